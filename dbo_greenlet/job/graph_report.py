"""What a job says beyond its answers: graphs beside eager steps, one carrier beside the other, logits beside logits.

Steps are compared by the checksums of their outputs, which is bit for bit: the same step twice gives the same bits, on
a GPU over NCCL and over either kind of DeepEP's kernels too (measured, by replays in other processes). Split and
unsplit do not, since a microbatch has other matrix shapes than the whole batch; there the logits say how far they are
apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..trace.schema import StepRecord
from .launch import JobResult
from .spec import GRAPH_RUNS, RUN_OF_CARRIER

__all__ = ["gpu_lines", "graph_findings", "graph_lines", "make_graph_report", "runs_of", "why_no_graphs"]

TITLES = {"dbo-graph": "DBO", "unsplit-graph": "no DBO"}
ROWS = {run: f"graph, {title}" for run, title in TITLES.items()}
# Columns of a vote: its tokens, those with padding, and the new tokens of each request where they are as many for all.
_TOKENS, _PADDED, _UNIFORM = 1, 2, 3


def make_graph_report(result: JobResult) -> dict[str, Any]:
    """The parts "devices", "graphs", "carriers" and "logits" of a job's report."""
    return {
        "devices": [
            {"rank": rank, "device": ready.device, "processor": ready.processor, "sharing": ready.sharing}
            for rank, ready in sorted(result.ready.items())
        ],
        "graphs": {"why_not": why_no_graphs(result), "runs": {run: _graphs(result, run) for run in graph_runs(result)}},
        "carriers": compare_outputs(result.steps, *RUN_OF_CARRIER.values()),
        "logits": {run: logits for run in runs_of(result) if (logits := _logits(result, run)) is not None},
    }


def runs_of(result: JobResult) -> list[str]:
    """The passes that took place, in order."""
    return list(dict.fromkeys(run for run, _ in result.passes))


def graph_runs(result: JobResult) -> list[str]:
    """Those of them whose decode steps are graphs."""
    return [run for run in runs_of(result) if run in GRAPH_RUNS]


def why_no_graphs(result: JobResult) -> str | None:
    """Why there are none, as a clause; None where there are."""
    if why := result.spec.settings.no_graphs:
        return why
    return next((ready.no_graphs for ready in result.ready.values() if ready.no_graphs), None)


def compare_outputs(steps: Iterable[StepRecord], ours: str, theirs: str) -> dict[str, Any]:
    """The outputs of run `ours` beside those of run `theirs`, over the (step, rank) that both have.

    `steps` were compared, of which `replayed` were replayed from a graph in run `ours`, on rank 0. `differing` lists
    those that differ on any rank, in their output or in the requests they hold; `missing` those that only one of the
    runs has.
    """
    of_ours, of_theirs = ({(r.step, r.rank): r for r in steps if r.run == run} for run in (ours, theirs))
    shared = of_ours.keys() & of_theirs.keys()
    same = {key for key in shared if _result(of_ours[key]) == _result(of_theirs[key])}
    return {
        "steps": len({step for step, _ in shared}),
        "replayed": sum(of_ours[key].execution == "replayed" for key in shared if key[1] == 0),
        "differing": sorted({step for step, _ in shared - same}),
        "missing": sorted({step for step, _ in of_ours.keys() ^ of_theirs.keys()}),
    }


def _result(record: StepRecord) -> tuple[str, list[int]]:
    return record.output, record.requests


def _graphs(result: JobResult, run: str) -> dict[str, Any]:
    of_rank = result.graphs.get((run, 0))
    graphs = () if of_rank is None else of_rank.graphs
    steps = [record for record in result.steps if record.run == run and record.rank == 0]
    decodes = [record for record in steps if _is_decode(record)]
    eager = GRAPH_RUNS[run]
    sizes = {graph.size for graph in graphs}
    fitting = [record for record in decodes if max(vote[_PADDED] for vote in record.votes) in sizes]
    return {
        "sizes": sorted(sizes),
        "captured": len(graphs),
        "capture_seconds": sum(graph.seconds for graph in graphs),
        "pool_bytes": sum(graph.pool_bytes for graph in graphs),
        "decode_steps": len(decodes),
        "fitting": len(fitting),
        "split_and_fitting": sum(record.split for record in fitting),
        "replayed": sum(record.execution == "replayed" for record in steps),
        "split_and_replayed": sum(record.execution == "replayed" and record.split for record in steps),
        "eager": eager,
        "outputs": compare_outputs(result.steps, run, eager),
        "tokens_differ": _requests_apart(result, run, eager),
    }


def _is_decode(record: StepRecord) -> bool:
    """Whether every rank decodes or is idle: a rank that replays its graph cannot take part in another's prefill."""
    votes = record.votes
    return any(vote[_TOKENS] for vote in votes) and all(vote[_UNIFORM] == 1 or not vote[_TOKENS] for vote in votes)


def _requests_apart(result: JobResult, ours: str, theirs: str) -> list[str]:
    """Ids of the requests that got other tokens."""
    a, b = ({n: t for (run, _), d in result.passes.items() if run == name for n, t in d.tokens.items()}
            for name in (ours, theirs))  # fmt: skip
    return [request.id for request in result.spec.requests if a.get(request.number) != b.get(request.number)]


def _logits(result: JobResult, run: str) -> dict[str, Any] | None:
    """What the ranks found, as one."""
    of_ranks = [done.logits for (name, _), done in sorted(result.passes.items()) if name == run and done.logits]
    if not of_ranks:
        return None
    # A NaN is larger than anything.
    worst = max(of_ranks, key=lambda each: math.inf if math.isnan(each.largest) else each.largest)
    ids = {request.number: request.id for request in result.spec.requests}
    return {
        "against": worst.against,
        "rows": sum(each.rows for each in of_ranks),
        "equal": sum(each.equal for each in of_ranks),
        "left_out": sum(each.left_out for each in of_ranks),
        "parted": sum(each.parted for each in of_ranks),
        # JSON has no NaN.
        "largest": None if math.isnan(worst.largest) else worst.largest,
        "id": ids.get(worst.request),
        "token": worst.token if worst.request >= 0 else None,
    }


def graph_findings(report: Mapping[str, Any]) -> list[str]:
    """What is not as it should be, one sentence each; empty where all is well."""
    found = []
    for run, graphs in report["graphs"]["runs"].items():
        outputs, eager = graphs["outputs"], graphs["eager"]
        if outputs["differing"]:
            found.append(
                f"The outputs of run {run} differ from those of run {eager} in {_steps(outputs['differing'])}."
            )
        elif graphs["tokens_differ"]:
            found.append(f"Run {run} gave other tokens than run {eager} from equal outputs.")
        if outputs["missing"]:
            found.append(f"Only one of the runs {run} and {eager} has {_steps(outputs['missing'])}.")
        if graphs["fitting"] and not graphs["replayed"]:
            found.append(f"Run {run} replayed none of {graphs['fitting']} steps that have a graph.")
        elif graphs["split_and_fitting"] and not graphs["split_and_replayed"]:
            found.append(f"Run {run} replayed none of {graphs['split_and_fitting']} split steps that have a graph.")
    if differing := report["carriers"]["differing"]:
        found.append(f"Greenlets and threads gave other outputs in {_steps(differing)}.")
    for run, logits in report["logits"].items():
        if logits["rows"] and logits["largest"] is None:
            place = f"request {logits['id']}, token {logits['token']}"
            found.append(f"Logits of run {run} or {logits['against']} are no numbers ({place}).")
    return found


def gpu_lines(report: Mapping[str, Any]) -> list[str]:
    """Which ranks share a GPU, and what follows from it."""
    shared = {each["device"]: each for each in report["devices"] if each["sharing"] > 1}
    return [
        f"GPU: {each['sharing']} ranks share {device} ({each['processor']}); they take turns on it, so no overlap can "
        "be read from this run."
        for device, each in shared.items()
    ]


def graph_lines(report: Mapping[str, Any]) -> list[str]:
    """Graphs, carriers and logits as text."""
    lines = []
    for run, graphs in report["graphs"]["runs"].items():
        sizes = ", ".join(map(str, graphs["sizes"])) or "none"
        lines.append(
            f"Graphs, {TITLES[run]}: {len(graphs['sizes'])} sizes captured in {graphs['capture_seconds']:.2f} s, "
            f"{graphs['pool_bytes'] / 1e6:.1f} MB, {graphs['replayed']} of {graphs['decode_steps']} decode steps "
            f"replayed, {graphs['split_and_replayed']} of them split; {graphs['captured']} graphs of sizes {sizes}:"
        )
        lines.append(f"  {_graph_verdict(graphs, report['logits'].get(run))}")
    carriers = report["carriers"]
    if carriers["steps"]:
        apart = f"NOT equal in {_steps(carriers['differing'])}" if carriers["differing"] else "equal bit for bit"
        lines.append(f"Greenlets and threads: the outputs of the same {carriers['steps']} steps are {apart}.")
    for run, logits in report["logits"].items():
        if run not in GRAPH_RUNS and logits["rows"]:
            lines.append(f"Logits, split and unsplit: {_logit_words(logits)}.")
    return lines


def _graph_verdict(graphs: Mapping[str, Any], logits: Mapping[str, Any] | None) -> str:
    outputs = graphs["outputs"]
    if not outputs["replayed"]:
        return "no step was replayed, so nothing is compared."
    if not outputs["differing"]:
        others = outputs["steps"] - outputs["replayed"]
        return (
            f"the outputs of all {outputs['replayed']} replayed steps, and of the {others} eager ones between them, "
            f"equal those of run {graphs['eager']} bit for bit."
        )
    tokens = graphs["tokens_differ"]
    text = (
        f"the outputs are NOT those of run {graphs['eager']} in {_steps(outputs['differing'])} of {outputs['steps']}; "
    )
    text += f"{len(tokens)} requests got other tokens" if tokens else "the tokens are equal"
    return text + (f"; logits: {_logit_words(logits)}." if logits and logits["rows"] else ".")


def _logit_words(logits: Mapping[str, Any]) -> str:
    rows, equal = logits["rows"], logits["equal"]
    more = f"; {logits['parted']} rows behind a token that differs were not compared" if logits["parted"] else ""
    more += f"; {logits['left_out']} more were not kept" if logits["left_out"] else ""
    if equal == rows:
        return f"all {rows} rows are equal bit for bit{more}"
    largest = "not a number" if logits["largest"] is None else f"{logits['largest']:.2g}"
    return (
        f"the largest difference is {largest} (request {logits['id']}, token {logits['token']}); "
        f"{equal} of {rows} rows are equal bit for bit{more}"
    )


def _steps(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")
    return f"{len(numbers)} steps ({shown})"
