"""What the report says of graphs, carriers, logits and shared GPUs, on results made by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dbo_greenlet.job import graph_report
from dbo_greenlet.job.launch import JobResult
from dbo_greenlet.job.messages import CapturedGraph, GraphsCaptured, LogitsCompared, PassDone, Ready, StepDone
from dbo_greenlet.job.report import findings, make_report, render_report
from dbo_greenlet.job.requests import Request
from dbo_greenlet.job.spec import JobSpec, Settings, passes_of
from dbo_greenlet.trace import StepRecord

REQUESTS = (Request(0, 1, "a", "p", "42"), Request(1, 2, "b", "p", "7"))
TOKENS = {0: [1, 2], 1: [3]}
SETTINGS = Settings(ranks=2, device="cuda", dtype="bfloat16", all2all="nccl")
RUNS = ("dbo", "unsplit", "dbo-graph", "unsplit-graph", "thread")
GRAPHS = (CapturedGraph(16, 2, 0.5, 3_000_000), CapturedGraph(16, 1, 0.25, 1_000_000), CapturedGraph(8, 1, 0.25, 0))


def step(run: str, number: int, rank: int = 0, **other: Any) -> StepDone:
    """A step of two requests that decode on both ranks; split and replayed as its run says."""
    graph = run.endswith("graph")
    values = {
        "split": not run.startswith("unsplit"),
        "votes": [[1, 2, 8, 1, 0]] * 2,
        "hash": "" if run.startswith("unsplit") else "aa",
        "yields": [] if run.startswith("unsplit") else [2, 2],
        "output": f"output {number}",
        "requests": [0, 1],
        "execution": "replayed" if graph else "eager",
        **other,
    }
    record = StepRecord(number, rank, run, 2, 8, reason="split-decode", **values)
    return StepDone(record, b"", 0, "why")


def result(
    *steps: StepDone, settings: Settings = SETTINGS, ready: Ready | None = None, **tokens: dict[int, list[int]]
) -> JobResult:
    """A whole job: two steps of each run, with `steps` in the place of theirs."""
    out = JobResult(JobSpec(settings, "model", "prompts", REQUESTS, passes_of(settings)))
    ready = Ready(1.0, "cuda:0", "Abacus 9000", 2) if ready is None else ready
    runs = [run for run in RUNS if not (ready.no_graphs or settings.no_graphs) or not run.endswith("graph")]
    replaced = {(s.record.run, s.record.step, s.record.rank): s for s in steps}
    for rank in (0, 1):
        out.take(rank, ready)
        for run in runs:
            if run.endswith("graph"):
                out.take(rank, GraphsCaptured(run, GRAPHS))
            for number in (0, 1):
                out.take(rank, replaced.get((run, number, rank), step(run, number, rank)))
            mine = {n: t for n, t in tokens.get(run.replace("-", "_"), TOKENS).items() if n == rank}
            texts = dict.fromkeys(mine, " 40+2=42")
            against = {"unsplit": "dbo", "dbo-graph": "dbo", "unsplit-graph": "unsplit"}.get(run)
            logits = None if against is None else LogitsCompared(against, 10, 10)
            if run == "unsplit":
                logits = LogitsCompared("dbo", 10, 7, 0, 3, 0.25 * rank, rank, 1)
            out.take(rank, PassDone(run, 1.0, texts, mine, {}, None if run == "thread" else logits))
    return out


def test_graph_rows_are_scores_where_there_are_graphs() -> None:
    report = make_report(result())
    assert [(row["run"], row["exact_match"], row["n"]) for row in report["table"]] == [
        ("eager, no DBO", 0.5, 2),
        ("graph, no DBO", 0.5, 2),
        ("eager, DBO", 0.5, 2),
        ("graph, DBO", 0.5, 2),
    ]
    assert findings(report) == []
    json.dumps(report, allow_nan=False)


def test_what_the_captures_took_and_what_was_replayed_is_told() -> None:
    # A prefill among them: no decode, and not replayed.
    prefill = step("dbo-graph", 0, 0, votes=[[1, 40, 40, 0, 0]] * 2, execution="eager")
    report = make_report(result(prefill))
    graphs = report["graphs"]["runs"]["dbo-graph"]
    assert (graphs["sizes"], graphs["captured"], graphs["capture_seconds"]) == ([8, 16], 3, 1.0)
    assert (graphs["pool_bytes"], graphs["decode_steps"], graphs["replayed"]) == (4_000_000, 1, 1)
    assert graphs["outputs"] == {"steps": 2, "replayed": 1, "differing": [], "missing": []}
    text = render_report(report)
    assert (
        "Graphs, DBO: 2 sizes captured in 1.00 s, 4.0 MB, 1 of 1 decode steps replayed, 1 of them split; 3 graphs of "
        "sizes 8, 16:\n  the outputs of all 1 replayed steps, and of the 1 eager ones between them, equal those of run "
        "dbo bit for bit." in text
    )
    assert "Graphs, no DBO: 2 sizes captured in 1.00 s, 4.0 MB, 2 of 2 decode steps replayed, 0 of them split" in text


def test_other_outputs_from_a_graph_are_a_finding() -> None:
    report = make_report(result(step("dbo-graph", 1, rank=1, output="another")))
    assert findings(report) == ["The outputs of run dbo-graph differ from those of run dbo in 1 steps (1)."]
    assert "the outputs are NOT those of run dbo in 1 steps (1) of 2; the tokens are equal; logits: all 20 rows" in (
        render_report(report)
    )


@pytest.mark.parametrize("run", ["dbo-graph", "unsplit-graph"])
def test_graphs_that_are_never_replayed_are_a_finding_and_no_score(run: str) -> None:
    eager = [step(run, number, rank, execution="eager") for number in (0, 1) for rank in (0, 1)]
    report = make_report(result(*eager))
    assert findings(report) == [f"Run {run} replayed none of 2 steps that have a graph."]
    row = next(row for row in report["table"] if row["run"] == graph_report.ROWS[run])
    assert row["exact_match"] is None and row["needs"] == "no step was replayed from a graph"
    text = render_report(report)
    assert "0 of 2 decode steps replayed" in text and "no step was replayed, so nothing is compared." in text


def test_split_steps_that_are_never_replayed_are_a_finding() -> None:
    # Step 0 is not split and replayed, step 1 split and eager.
    steps = [step("dbo-graph", 0, rank, split=False) for rank in (0, 1)]
    steps += [step("dbo-graph", 1, rank, execution="eager") for rank in (0, 1)]
    assert findings(make_report(result(*steps))) == ["Run dbo-graph replayed none of 1 split steps that have a graph."]


@pytest.mark.parametrize(
    ("votes", "decodes"),
    [
        ([[1, 2, 8, 1, 0], [1, 0, 0, 0, 0]], 2),  # rank 1 is idle
        ([[1, 0, 0, 0, 0], [1, 2, 8, 1, 0]], 2),  # rank 0 is
        ([[1, 2, 8, 1, 0], [1, 9, 9, 0, 0]], 0),  # rank 1 prefills
        ([[1, 0, 0, 0, 0], [1, 0, 0, 0, 0]], 0),
    ],
)
def test_a_decode_step_is_one_on_every_rank(votes: list[list[int]], decodes: int) -> None:
    steps = [step("dbo-graph", number, rank, votes=votes) for number in (0, 1) for rank in (0, 1)]
    assert make_report(result(*steps))["graphs"]["runs"]["dbo-graph"]["decode_steps"] == decodes


def test_decode_steps_larger_than_any_graph_need_none() -> None:
    large = [[1, 20, 20, 1, 0]] * 2
    steps = [step("dbo-graph", n, rank, votes=large, execution="eager") for n in (0, 1) for rank in (0, 1)]
    report = make_report(result(*steps))
    assert report["graphs"]["runs"]["dbo-graph"]["decode_steps"] == 2
    assert findings(report) == []
    assert report["table"][3]["needs"] == "no step was replayed from a graph"


def test_steps_that_one_run_lacks_are_a_finding() -> None:
    job = result()
    job.steps = [r for r in job.steps if (r.run, r.step) != ("dbo-graph", 1)]
    assert findings(make_report(job)) == ["Only one of the runs dbo-graph and dbo has 1 steps (1)."]


def test_steps_of_other_requests_differ() -> None:
    report = make_report(result(step("thread", 1, requests=[1, 0])))
    assert findings(report) == ["Greenlets and threads gave other outputs in 1 steps (1)."]


def test_other_tokens_from_a_graph_are_a_finding() -> None:
    report = make_report(result(unsplit_graph=TOKENS | {1: [4]}))
    assert report["graphs"]["runs"]["unsplit-graph"]["tokens_differ"] == ["b"]
    assert findings(report) == ["Run unsplit-graph gave other tokens than run unsplit from equal outputs."]


def test_other_outputs_with_the_other_carrier_are_a_finding() -> None:
    report = make_report(result(step("thread", 0, output="another")))
    assert findings(report) == ["Greenlets and threads gave other outputs in 1 steps (0)."]
    assert "Greenlets and threads: the outputs of the same 2 steps are NOT equal in 1 steps (0)." in (
        render_report(report)
    )


def test_a_graph_with_another_schedule_is_a_finding() -> None:
    report = make_report(result(step("dbo-graph", 1, hash="bb")))
    assert findings(report) == ["The schedules of the ranks or carriers differ in steps 1."]


def test_logits_of_split_and_unsplit_are_those_of_all_ranks() -> None:
    report = make_report(result())
    assert report["logits"]["unsplit"] == {
        "against": "dbo",
        "rows": 20,
        "equal": 14,
        "left_out": 0,
        "parted": 6,
        "largest": 0.25,
        "id": "b",
        "token": 1,
    }
    assert (
        "Logits, split and unsplit: the largest difference is 0.25 (request b, token 1); 14 of 20 rows are equal bit "
        "for bit; 6 rows behind a token that differs were not compared." in render_report(report)
    )


def test_logits_that_are_no_numbers_are_told() -> None:
    job = result()
    job.take(0, PassDone("unsplit", 1.0, {}, {0: TOKENS[0]}, {}, LogitsCompared("dbo", 3, 2, 1, 0, float("nan"), 0, 0)))
    report = make_report(job)
    json.dumps(report, allow_nan=False)
    assert report["logits"]["unsplit"]["largest"] is None
    assert "the largest difference is not a number (request a, token 0)" in render_report(report)
    assert findings(report) == ["Logits of run unsplit or dbo are no numbers (request a, token 0)."]


def test_a_timeline_leaves_no_time_per_yield() -> None:
    settings = Settings(ranks=2, device="cuda", dtype="bfloat16", all2all="nccl", gpu_timeline=True)
    assert "Host time per yield: not measured, since the GPU timeline takes" in (
        render_report(make_report(result(settings=settings)))
    )


def test_ranks_that_share_a_gpu_are_told_of_once() -> None:
    lines = render_report(make_report(result())).splitlines()
    assert [line for line in lines if line.startswith("GPU: ")] == [
        "GPU: 2 ranks share cuda:0 (Abacus 9000); they take turns on it, so no overlap can be read from this run."
    ]
    alone = render_report(make_report(result(ready=Ready(1.0, "cuda:0", "Abacus 9000", 1))))
    assert "GPU:" not in alone


@pytest.mark.parametrize(
    ("settings", "ready", "why"),
    [
        (SETTINGS, Ready(1.0, "cuda:0", "A", 1, "its dispatch reads counts on the host"), "its dispatch reads counts"),
        (Settings(), Ready(1.0), "needs a CUDA device"),
        (Settings(device="cuda", cudagraph_sizes="none"), Ready(1.0, "cuda:0"), "switched off"),
    ],
)
def test_graph_rows_say_why_there_are_none(settings: Settings, ready: Ready, why: str) -> None:
    report = make_report(result(settings=settings, ready=ready))
    rows = {row["run"]: row for row in report["table"]}
    for run in ("graph, no DBO", "graph, DBO"):
        assert rows[run]["exact_match"] is None and rows[run]["needs"].startswith(why)
        assert f"| {run} " in render_report(report)
    assert report["graphs"]["runs"] == {} and "Graphs, " not in render_report(report)
    assert findings(report) == []
