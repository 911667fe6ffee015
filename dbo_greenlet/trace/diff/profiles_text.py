"""A comparison of two profiles as text and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from .profiles import CHANGES, WHOLE, KernelRow, ProfileDiff
from .text import aligned

__all__ = ["profile_diff_json", "render_profile_diff"]

SHOWN = 10  # rows of a table
_WIDTH = 60  # characters of a name


def render_profile_diff(diff: ProfileDiff) -> str:
    """The comparison for people: the kernels that came and went, then times by stage and of the whole, in ms."""
    changes = diff.changes()
    lines = [f"A is {diff.a.path}", f"B is {diff.b.path}", ""]
    lines.append("Kernels: " + ", ".join(f"{changes[change]} {text}" for change, text in CHANGES.items()) + ".")
    changed = [row for row in diff.kernels if row.change != "unchanged"]
    same = [row for row in diff.kernels if row.change == "unchanged" and row.a.time != row.b.time]
    if changed:
        lines += ["", *_kernels("Ran another number of times, by time", changed)]
    if same:
        lines += ["", *_kernels("Ran as often, by time", same)]
    lines += ["", *_stages(diff), "", *_whole(diff)]
    lines += [""] * bool(diff.notes) + [f"note: {note}" for note in diff.notes]
    return "\n".join(lines)


def profile_diff_json(diff: ProfileDiff) -> dict[str, Any]:
    """The whole of it as JSON values; times in microseconds."""
    return {
        "a": dataclasses.asdict(diff.a),
        "b": dataclasses.asdict(diff.b),
        "equal": diff.equal,
        "changes": diff.changes(),
        "kernels": [dataclasses.asdict(row) | {"change": row.change} for row in diff.kernels],
        "stages": [dataclasses.asdict(row) | {"change": row.change} for row in diff.stages],
        "notes": diff.notes,
    }


def _kernels(title: str, rows: Sequence[KernelRow]) -> list[str]:
    table = [(title, "calls A", "B", "ms A", "B", "B - A", "")]
    for row in rows[:SHOWN]:
        name = row.name if len(row.name) <= _WIDTH else row.name[: _WIDTH - 3] + "..."
        table.append((f"  {name}", str(row.a.count), str(row.b.count), *_times(row.a.time, row.b.time), row.does))
    more = len(rows) - SHOWN
    return aligned(table) + ([f"  and {more} more; --json has them all"] if more > 0 else [])


def _stages(diff: ProfileDiff) -> list[str]:
    table: list[tuple[str, ...]] = [("By stage", "kernels A", "B", "ms A", "B", "B - A", "")]
    for row in diff.stages:
        table.append((row.stage, str(row.a.count), str(row.b.count), *_times(row.a.time, row.b.time), row.change))
        for what in ("communication", "exposed", "compute"):
            a, b = getattr(row, what)
            if a or b:
                table.append((f"  {what}", "", "", *_times(a, b), ""))
    return aligned(table)


def _whole(diff: ProfileDiff) -> list[str]:
    table: list[tuple[str, ...]] = [("The whole, in ms", "A", "B", "B - A", "")]
    for name in WHOLE:
        a, b = diff.a.whole.get(name, 0.0), diff.b.whole.get(name, 0.0)
        if a or b:
            table.append((f"  {name}", *_times(a, b), f"{100 * (b - a) / a:+.1f} %" if a else ""))
    wholes = (diff.a.whole, diff.b.whole)
    if all(whole.get("communication") for whole in wholes):
        a, b = (100 * whole["both"] / whole["communication"] for whole in wholes)
        table.append(("  hidden, in %", f"{a:.2f}", f"{b:.2f}", f"{b - a:+.2f}", ""))
    return aligned(table)


def _times(a: float, b: float) -> tuple[str, str, str]:
    return f"{a / 1000:.3f}", f"{b / 1000:.3f}", f"{(b - a) / 1000:+.3f}"
