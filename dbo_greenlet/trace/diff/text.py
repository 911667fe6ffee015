"""A comparison of two traces as text and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from .times import KINDS
from .traces import Difference, StepKey, TraceDiff

__all__ = ["aligned", "diff_json", "render_diff"]

SHOWN = 5  # steps of a kind that are named
_STAGES = ("attention", "experts", "shared", "dispatch", "combine", "out", "other")


def render_diff(diff: TraceDiff) -> str:
    """The comparison for people: what differs first, which steps differ, and the times side by side."""
    lines = [f"A is {diff.a}", f"B is {diff.b}", ""]
    lines += _first(diff)
    lines += _further(diff)
    lines += _outputs(diff)
    lines += ["", *_times(diff), "", *_steps(diff)]
    if diff.torn:
        lines += ["", f"The last line of {' and of '.join(diff.torn)} is torn and was left out."]
    if diff.unended:
        lines += ["", f"{' and '.join(diff.unended)}: no end record of some rank; the run still goes on, or died."]
    return "\n".join(lines + [f"note: {note}" for note in diff.notes])


def diff_json(diff: TraceDiff) -> dict[str, Any]:
    """The whole of it as JSON values; times in microseconds, null where a trace does not have one."""
    return {
        "a": diff.a,
        "b": diff.b,
        "equal": diff.equal,
        "first": None if diff.first is None else dataclasses.asdict(diff.first),
        "differing": [_named(key) for key in diff.differing],
        "only_a": [_named(key) for key in diff.only_a],
        "only_b": [_named(key) for key in diff.only_b],
        "outputs": [_named(key) for key in diff.outputs],
        "tokens": [_named(key) for key in diff.tokens],
        "not_comparable": diff.not_comparable,
        "totals": {
            run: _rows({key: a for key, (a, _) in sums.items()}, {key: b for key, (_, b) in sums.items()})
            for run, sums in diff.totals().items()
        },
        "steps": [
            _named((step.run, step.step, step.rank)) | {"delta": step.delta, "times": _rows(step.a, step.b)}
            for step in diff.times
        ],
        "notes": diff.notes,
        "torn": diff.torn,
        "unended": diff.unended,
    }


def _rows(a: Mapping[tuple[str, str], float], b: Mapping[tuple[str, str], float]) -> list[dict[str, Any]]:
    return [{"what": key[0], "stage": key[1], "a": a.get(key), "b": b.get(key)} for key in sorted({*a, *b}, key=_order)]


def _order(key: tuple[str, str]) -> tuple[int, int]:
    return list(KINDS).index(key[0]), _STAGES.index(key[1]) if key[1] in _STAGES else 0


def _named(key: StepKey) -> dict[str, Any]:
    return dict(zip(("run", "step", "rank"), key, strict=True))


def _words(key: StepKey) -> str:
    run, step, rank = key
    return f"step {step}, rank {rank}, run {run}"


def _list(keys: list[StepKey]) -> str:
    more = f"; and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
    return "; ".join(map(_words, keys[:SHOWN])) + more


def _count(keys: list[StepKey]) -> str:
    return f"{len(keys)} step{'' if len(keys) == 1 else 's'}"


def _first(diff: TraceDiff) -> list[str]:
    if diff.first is None:
        return [f"Every decision is equal, in {len(diff.times)} steps (each rank's counted)."]
    first = diff.first
    return [
        f"The first decision that differs: {_words((first.run, first.step, first.rank))}, {_where(first)}",
        f"  A: {first.a}",
        f"  B: {first.b}",
    ]


def _where(first: Difference) -> str:
    names = {
        "step": "the step itself",
        "votes": "the votes",
        "split": "split or not",
        "slices": "the cut into microbatches [first token, end, first request, end]",
        "decision": "the schedule",
        "execution": "how it was run",
        "error": "how it failed",
    }
    if first.what == "receive":
        return f"decision {first.decision}, a receive in it"
    return names[first.what] if first.decision is None else f"decision {first.decision}"


def _further(diff: TraceDiff) -> list[str]:
    lines = []
    if diff.differing:
        lines.append(f"Different decisions in {_count(diff.differing)} of {len(diff.times)}: {_list(diff.differing)}.")
    for name, keys in (("A", diff.only_a), ("B", diff.only_b)):
        if keys:
            lines.append(f"Only in {name}: {_count(keys)}: {_list(keys)}.")
    return lines


def _outputs(diff: TraceDiff) -> list[str]:
    if diff.not_comparable:
        return [f"Outputs and tokens are not comparable: {diff.not_comparable}."]
    lines = []
    for name, keys in (("Output checksums", diff.outputs), ("Sampled tokens", diff.tokens)):
        if keys:
            lines.append(f"{name} differ in {_count(keys)}: {_list(keys)}.")
    return lines or ["Output checksums and sampled tokens are equal."]


def _times(diff: TraceDiff) -> list[str]:
    table: list[tuple[str, ...]] = [("Times in us, summed over the steps and ranks in both", "A", "B", "B - A", "")]
    for run, totals in diff.totals().items():
        kind = ""
        for key in sorted(totals, key=_order):
            a, b = totals[key]
            if not kind:
                table.append((f"run {run}", "", "", "", ""))
            if key[0] != kind:
                kind = key[0]
                if key[1]:
                    table.append((f"  {KINDS[kind]}", "", "", "", ""))
            name = f"    {key[1]}" if key[1] else f"  {KINDS[kind]}"
            change = f"{100 * (b - a) / a:+.1f} %" if a else ""
            table.append((name, f"{a:.1f}", f"{b:.1f}", f"{b - a:+.1f}", change))
    return aligned(table) if len(table) > 1 else ["No times of a step are in both traces."]


def _steps(diff: TraceDiff) -> list[str]:
    key = ("step", "")
    timed = [step for step in diff.times if key in step.a and key in step.b]
    if not timed:
        return ["No step was timed as a whole in both traces."]
    changed = sorted(timed, key=lambda step: -abs(step.delta))[:SHOWN]
    table: list[tuple[str, ...]] = [("Steps that changed most", "A", "B", "B - A", "in flight A", "in flight B")]
    for step in changed:
        flights = [sum(time for (kind, _), time in side.items() if kind == "in flight") for side in (step.a, step.b)]
        table.append(
            (
                f"  {_words((step.run, step.step, step.rank))}",
                *(f"{side[key]:.1f}" for side in (step.a, step.b)),
                f"{step.delta:+.1f}",
                *(f"{time:.1f}" for time in flights),
            )
        )
    return aligned(table)


def aligned(table: Sequence[tuple[str, ...]]) -> list[str]:
    """A table as lines: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for name, *numbers in table:
        cells = [number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *cells]).rstrip())
    return lines
