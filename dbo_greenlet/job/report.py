"""What a job's steps and answers say: as plain data (the JSON of `--json`), and that data as text."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..trace.reader import StepTrace
from ..trace.schema import RecvRecord, SliceRecord, StepRecord, from_json
from ..trace.step_text import render_step
from .graph_report import ROWS, gpu_lines, graph_findings, graph_lines, make_graph_report, runs_of, why_no_graphs
from .launch import JobResult
from .requests import Request
from .spec import CLOSE_CALLS, RUN_OF_CARRIER

__all__ = ["is_right", "make_report", "render_report"]

HANDOFF_MEANS = (
    "median over the same steps with either carrier, from the last call before a yield to the first call after it in "
    "the microbatch that goes on; threads are stock threads (not pinned to a core)"
)


def is_right(text: str, answer: str) -> bool:
    """Exact match: of the last integer of the text where the answer is one, else of the text without its margins."""
    if re.fullmatch(r"[+-]?\d+", answer.strip()):
        # A sign belongs to its number unless something stands right before it: in "42-9" it is a difference.
        integers = re.findall(r"(?<!\w)[+-]?\d+|\d+", text)
        return bool(integers) and _canonical(integers[-1]) == _canonical(answer.strip())
    return text.strip() == answer.strip()


def _canonical(integer: str) -> str:
    """An integer as text without plus and leading zeros. Not by int(), which refuses numbers of thousands of digits."""
    digits = integer.lstrip("+-").lstrip("0") or "0"
    return "-" + digits if integer.startswith("-") and digits != "0" else digits


def make_report(result: JobResult) -> dict[str, Any]:
    """All findings of a finished job of `passes_of`; what `render_report` prints and `--json` writes."""
    settings = result.spec.settings
    main = RUN_OF_CARRIER[settings.carrier]
    split_texts, split_tokens, close = _answers(result, main)
    plain_texts, plain_tokens, plain_close = _answers(result, "unsplit")
    requests = result.spec.requests
    steps = [record for record in result.steps if record.run == main and record.rank == 0]
    split = [record for record in steps if record.split]
    differing = _differences(requests, split_tokens, plain_tokens, close, plain_close)
    apart = _hashes_apart(result.steps)
    return {
        "table": [
            {"run": "eager, no DBO", **_score(requests, plain_texts)},
            _graph_row(result, "unsplit-graph"),
            {"run": "eager, DBO", **_score(requests, split_texts)},
            _graph_row(result, "dbo-graph"),
        ],
        "tokens": {
            "equal": not differing,
            "generated": sum(len(tokens) for tokens in split_tokens.values()),
            "differing": differing,
            "unexplained": sum(not each["close_call"] for each in differing),
            "close_below": CLOSE_CALLS[settings.dtype],
        },
        "steps": {
            "total": len(steps),
            "split": len(split),
            "split_reasons": dict(Counter(record.reason for record in split)),
            "not_split": dict(Counter(record.reason for record in steps if not record.split)),
            "explanations": dict(result.explanations),
        },
        "yields": {
            "per_step": sorted({sum(record.yields) for record in split}),
            "per_microbatch": sorted({count for record in split for count in record.yields}),
            "total": sum(sum(record.yields) for record in split),
        },
        "schedule_hash": {
            "agreed": not apart,
            "steps": len(split),
            "ranks": settings.ranks,
            "distinct": sorted({record.hash for record in split}),
            "apart": apart,
        },
        "hand_off_us": {**_handoffs(result), "timeline": settings.gpu_timeline, "memory": settings.memory},
        **make_graph_report(result),
        "timetable": _timetable(result, main),
        "seconds": {
            run: max(d.seconds for (name, _), d in result.passes.items() if name == run) for run in runs_of(result)
        },
        "settings": settings.as_json(),
        "trace_problem": result.trace_problem,
        "answers": [
            {
                "id": request.id,
                "arrival": request.arrival,
                "text": split_texts.get(request.number, ""),
                "text_unsplit": plain_texts.get(request.number, ""),
                "answer": request.answer,
            }
            for request in requests
        ],
    }


def findings(report: Mapping[str, Any]) -> list[str]:
    """What is not as it should be, one sentence each; empty where all is well."""
    found = []
    if count := report["tokens"]["unexplained"]:
        found.append(f"{count} requests got other tokens than unsplit although the logits were not close.")
    if not report["schedule_hash"]["agreed"]:
        apart = ", ".join(map(str, report["schedule_hash"]["apart"]))
        found.append(f"The schedules of the ranks or carriers differ in steps {apart}.")
    found += graph_findings(report)
    if report["trace_problem"]:
        found.append(report["trace_problem"])
    return found


def _answers(result: JobResult, run: str) -> tuple[dict[int, str], dict[int, list[int]], dict[int, dict[int, float]]]:
    texts: dict[int, str] = {}
    tokens: dict[int, list[int]] = {}
    close: dict[int, dict[int, float]] = {}
    for (name, _), done in result.passes.items():
        if name == run:
            texts |= done.texts
            tokens |= done.tokens
            close |= done.close_calls
    return texts, tokens, close


def _score(requests: Sequence[Request], texts: Mapping[int, str]) -> dict[str, Any]:
    """Exact match over the requests with an answer, and its binomial standard error sqrt(p (1 - p) / n)."""
    right = [is_right(texts.get(r.number, ""), r.answer) for r in requests if r.answer is not None]
    if not right:
        return {"exact_match": None, "stderr": None, "n": 0, "needs": 'needs an "answer" in the prompt file'}
    share = sum(right) / len(right)
    return {"exact_match": share, "stderr": math.sqrt(share * (1 - share) / len(right)), "n": len(right)}


def _graph_row(result: JobResult, run: str) -> dict[str, Any]:
    row: dict[str, Any] = {"run": ROWS[run]}
    why = why_no_graphs(result)
    if why is None and not any(r.run == run and r.execution == "replayed" for r in result.steps):
        why = "no step was replayed from a graph"
    if why is not None:
        return {**row, "exact_match": None, "stderr": None, "needs": why}
    return {**row, **_score(result.spec.requests, _answers(result, run)[0])}


def _differences(
    requests: Sequence[Request],
    ours: Mapping[int, list[int]],
    theirs: Mapping[int, list[int]],
    close: Mapping[int, Mapping[int, float]],
    their_close: Mapping[int, Mapping[int, float]],
) -> list[dict[str, Any]]:
    """Requests whose tokens part, the first token at which they do, and the gap of the two best logits there."""
    out = []
    for request in requests:
        a, b = ours.get(request.number, []), theirs.get(request.number, [])
        if a == b:
            continue
        place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        gaps = [c[request.number][place] for c in (close, their_close) if place in c.get(request.number, {})]
        out.append(
            {
                "id": request.id,
                "token": place,
                "split": a[place : place + 1],
                "unsplit": b[place : place + 1],
                "gap": min(gaps, default=None),
                "close_call": bool(gaps),
            }
        )
    return out


def _hashes_apart(steps: Sequence[StepRecord]) -> list[int]:
    """Numbers of the steps whose schedule hash was not one and the same on all ranks and with either carrier."""
    seen: dict[int, set[str]] = {}
    for record in steps:
        if record.run in (*RUN_OF_CARRIER.values(), "dbo-graph"):
            seen.setdefault(record.step, set()).add(record.hash)
    return sorted(step for step, hashes in seen.items() if len(hashes) > 1)


def _handoffs(result: JobResult) -> dict[str, Any]:
    places: dict[str, dict[tuple[int, int], tuple[int, ...]]] = {run: {} for run in RUN_OF_CARRIER.values()}
    for (run, step, rank), times in result.handoffs.items():
        if run in places:
            places[run][step, rank] = times
    shared = set.intersection(*(set(of_run) for of_run in places.values()))
    out: dict[str, Any] = {"what": HANDOFF_MEANS, "steps": len({step for step, _ in shared})}
    for carrier, run in RUN_OF_CARRIER.items():
        microseconds = [time / 1000 for place in shared for time in places[run][place]]
        out[carrier] = _distribution(microseconds) if microseconds else None
    return out


def _distribution(times: list[float]) -> dict[str, Any]:
    # The tenth says what a hand-off takes when nobody disturbs it, the median what it took on this machine now.
    ordered = sorted(times)
    return {"median": statistics.median(ordered), "tenth": ordered[len(ordered) // 10], "measured": len(ordered)}


def _timetable(result: JobResult, run: str) -> str:
    """One split step of rank 0: a decode if there was one."""
    kept = [key for key in result.lines if key[0] == run]
    if not kept:
        return ""
    decodes = [r.step for r in result.steps if r.run == run and r.reason == "split-decode"]
    key = next((key for key in kept if key[1] in decodes), kept[0])
    step = StepTrace(run, key[1], 0)
    for line in result.lines[key].splitlines():
        record = from_json(json.loads(line))
        if isinstance(record, StepRecord):
            step.record = record
        elif isinstance(record, SliceRecord):
            step.slices.append(record)
        elif isinstance(record, RecvRecord):
            step.receives.append(record)
    return render_step(step)


# -- as text -----------------------------------------------------------------------------------------------------------


def render_report(report: Mapping[str, Any]) -> str:
    """The report for people."""
    parts = [_table(report["table"]), "", *_sentences(report)]
    if report["timetable"]:
        parts += ["", report["timetable"]]
    return "\n".join(parts)


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    cells = [("run", "exact match", "stderr")]
    for row in rows:
        if row["exact_match"] is None:
            cells.append((row["run"], row["needs"], ""))
        else:
            cells.append((row["run"], f"{row['exact_match']:.4f}", f"{row['stderr']:.4f}"))
    short = [line for line in cells if len(line[1]) <= 12]
    widths = [max(len(line[column]) for line in short or cells) for column in range(3)]
    lines = []
    for number, line in enumerate(cells):
        if line[2] or number == 0:
            lines.append("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |")
        else:
            lines.append(f"| {line[0].ljust(widths[0])} | {line[1]} |  |")
        if number == 0:
            lines.append("|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _sentences(report: Mapping[str, Any]) -> list[str]:
    tokens, steps, yields, hashes = (report[key] for key in ("tokens", "steps", "yields", "schedule_hash"))
    lines = [f"Tokens: {tokens['generated']} generated, " + _tokens_verdict(tokens)]
    for each in tokens["differing"]:
        gap = "not close" if each["gap"] is None else f"best logits {each['gap']:.1e} apart"
        lines.append(f"  request {each['id']}, token {each['token']}: {each['split']} and {each['unsplit']}, {gap}")
    lines.append(f"Steps: {steps['total']}, of which {steps['split']} were split.")
    for reason, count in {**steps["split_reasons"], **steps["not_split"]}.items():
        lines.append(f"  {count:4} {reason}: the first: {steps['explanations'].get(reason, '')}".rstrip(": "))
    if steps["split"]:
        per_step, per_microbatch = (" or ".join(map(str, yields[key])) for key in ("per_step", "per_microbatch"))
        lines.append(f"Yields: {per_step} a split step, {per_microbatch} a microbatch.")
        ranks = f"all {hashes['ranks']} ranks" if hashes["ranks"] > 1 else "the one rank"
        if hashes["agreed"]:
            lines.append(f"Schedule hash: equal on {ranks} in each of {hashes['steps']} split steps.")
        else:
            lines.append(f"Schedule hash: NOT equal on all ranks in steps {', '.join(map(str, hashes['apart']))}.")
    lines += _handoff_lines(report["hand_off_us"])
    return [*gpu_lines(report), *lines, *graph_lines(report)]


def _tokens_verdict(tokens: Mapping[str, Any]) -> str:
    if tokens["equal"]:
        return "equal to unsplit in every request."
    if not tokens["unexplained"]:
        return f"equal to unsplit but for close calls (best logits within {tokens['close_below']:g}):"
    return "NOT equal to unsplit:"


def _handoff_lines(handoffs: Mapping[str, Any]) -> list[str]:
    if handoffs["timeline"]:
        return ["Host time per yield: not measured, since the GPU timeline takes host time at every yield."]
    if handoffs["memory"]:
        return ["Host time per yield: not measured, since recording what operations do to memory takes host time."]
    if not handoffs["greenlet"] or not handoffs["thread"]:
        return ["Host time per yield: no step was split, so none was measured."]
    shown = ", ".join(
        f"{name} {each['median']:.1f} us (a tenth of {each['measured']} took at most {each['tenth']:.1f} us)"
        for name, each in (("greenlets", handoffs["greenlet"]), ("threads", handoffs["thread"]))
    )
    return [f"Host time per yield: {shown}:", f"  {handoffs['what']}."]
