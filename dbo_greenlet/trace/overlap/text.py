"""The overlap report as text and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from .report import Measure, OverlapReport, Row, View

__all__ = ["is_reliable", "overlap_json", "render_overlap", "render_summary", "says_something"]

_VIEWS = {"kernels": "by kernels", "in_flight": "in flight"}
_SUBJECTS = _VIEWS | {"idle": "time without compute", "launch_delay": "launch delay"}


def is_reliable(report: OverlapReport) -> bool:
    """Whether one of the two views at least can be trusted."""
    doubted = {entry.view for entry in report.unreliable}
    return any(getattr(report, view) is not None and view not in doubted for view in _VIEWS)


def says_something(report: OverlapReport) -> bool:
    """Whether what one of the two views says is hidden holds, if only as the most that it can be."""
    return any(
        all(entry.at_most for entry in report.unreliable if entry.view == view)
        for view in _VIEWS
        if getattr(report, view) is not None
    )


def overlap_json(report: OverlapReport) -> dict[str, Any]:
    """The report as JSON values: times in microseconds, hidden as a share from 0 to 1 (null without communication).

    `at_most`: no view is reliable, and of one it is known that what it says is hidden is the most that it can be.
    """
    out: dict[str, Any] = {
        "file": report.path,
        "source": report.source,
        "gpus": report.gpus,
        "reliable": is_reliable(report),
        "at_most": says_something(report) and not is_reliable(report),
    }
    for name in _VIEWS:
        view: View | None = getattr(report, name)
        if view is None:
            out[name] = None
            continue
        out[name] = {
            "how": view.how,
            **dataclasses.asdict(view.measure),
            "exposed": view.measure.exposed,
            "hidden": view.measure.hidden,
        } | {
            key: [dataclasses.asdict(row) for row in getattr(view, key)]
            for key in ("by_stage", "by_layer", "by_microbatch", "by_rank")
        }
    out["idle"] = None if report.idle is None else {"total": report.idle.total, **dataclasses.asdict(report.idle)}
    out["launch_delay"] = None if report.launch_delay is None else dataclasses.asdict(report.launch_delay)
    out["libraries"] = report.libraries
    out["unreliable"] = [dataclasses.asdict(entry) for entry in report.unreliable]
    out["notes"] = report.notes
    return out


def render_overlap(report: OverlapReport) -> str:
    """The report for a terminal."""
    views: dict[str, View] = {
        title: view for name, title in _VIEWS.items() if (view := getattr(report, name)) is not None
    }
    longest = max((view.measure.window for view in views.values()), default=0.0)
    unit, scale = ("ms", 1000.0) if longest >= 10_000 else ("us", 1.0)

    def time(value: float) -> str:
        return f"{value / scale:.3f}"

    where = ", ".join([report.source, *report.gpus])
    blocks = [f"{report.path} ({where}), times in {unit}"]
    shares = [_share(report, name, view) for name in _VIEWS if (view := getattr(report, name)) is not None]
    blocks.append(_table(["", *views], _whole([view.measure for view in views.values()], shares, time)))
    for title, view in views.items():
        for part, rows in (
            ("stage", view.by_stage),
            ("layer", view.by_layer),
            ("microbatch", view.by_microbatch),
            ("rank", view.by_rank),
        ):
            if rows:
                blocks.append(_part(f"{part}, {title}" if len(views) > 1 else part, rows, time))
    if report.idle is not None:
        idle = report.idle
        causes = [
            ["host late", time(idle.host), time(idle.host_exposed)],
            ["waiting for an event", time(idle.event), time(idle.event_exposed)],
            ["other", time(idle.other), time(idle.other_exposed)],
        ]
        if idle.unknown:
            causes.append(["unknown (no launch)", time(idle.unknown), time(idle.unknown_exposed)])
        blocks.append(_table(["no compute", time(idle.total), "exposed communication in it"], causes))
    tail = []
    if (delay := report.launch_delay) is not None:
        tail.append(
            f"launch delay: median {delay.median:.1f} us, 95 % below {delay.p95:.1f} us, longest {delay.longest:.1f} "
            f"us ({delay.kernels} launches)"
        )
    if report.libraries:
        tail.append(
            "communication kernels: " + ", ".join(f"{name} {count}" for name, count in report.libraries.items())
        )
    for name, title in _VIEWS.items():
        if (view := getattr(report, name)) is not None:
            tail.append(f"{title}: {view.how}")
    if any(share.endswith("?") for share in shares):
        tail.append("?: not to be trusted, for what is said of this column below")
    tail += [
        f"{'upper bound' if entry.at_most else 'unreliable'} ({_SUBJECTS[entry.view]}): {entry.why}"
        for entry in report.unreliable
    ]
    tail += [f"note: {note}" for note in report.notes]
    if tail:
        blocks.append("\n".join(tail))
    return "\n\n".join(blocks)


def render_summary(reports: Sequence[OverlapReport]) -> str:
    """One line a file, in milliseconds, by the view that can be trusted: the one by kernels where both can.

    Where none can, by the one that is a bound: what is hidden at most, and exposed at least.
    """
    rows = []
    for report in reports:
        doubts = {name: [entry for entry in report.unreliable if entry.view == name] for name in _VIEWS}
        shown = [name for name in _VIEWS if getattr(report, name) is not None]
        holding = [name for name in shown if not doubts[name]] or [
            name for name in shown if all(entry.at_most for entry in doubts[name])
        ]
        if not holding:
            rows.append([report.path, "unreliable", "", "", "", ""])
            continue
        name = holding[0]
        view: View = getattr(report, name)
        communication, exposed, window = (
            f"{value / 1000:.3f}" for value in (view.measure.communication, view.measure.exposed, view.measure.window)
        )
        exposed = f">= {exposed}" if doubts[name] else exposed
        rows.append([report.path, _VIEWS[name], communication, exposed, _share(report, name, view), window])
    return _table(["all, in ms", "", "communication", "exposed", "hidden", "window"], rows)


def _whole(measures: Sequence[Measure], shares: Sequence[str], time: Any) -> list[list[str]]:
    return [
        ["communication", *(time(m.communication) for m in measures)],
        ["compute", *(time(m.compute) for m in measures)],
        ["both", *(time(m.both) for m in measures)],
        ["exposed", *(time(m.exposed) for m in measures)],
        ["hidden", *shares],
        ["window", *(time(m.window) for m in measures)],
        ["communications", *(str(m.events) for m in measures)],
    ]


def _part(title: str, rows: Sequence[Row], time: Any) -> str:
    lines = []
    for row in rows:
        hidden = 1 - row.exposed / row.communication if row.communication else None
        communicates = [time(row.communication), time(row.exposed), _percent(hidden)] if row.events else ["", "", ""]
        computes = [time(row.compute), time(row.hides)] if row.compute else ["", ""]
        lines.append([str(row.key), *communicates, *computes])
    return _table([title, "communication", "exposed", "hidden", "compute", "hides"], lines)


def _share(report: OverlapReport, name: str, view: View) -> str:
    """What a view says is hidden, with what is known of that: the most that it can be, or nothing ("?")."""
    share = _percent(view.measure.hidden)
    doubts = [entry for entry in report.unreliable if entry.view == name]
    if not doubts or view.measure.hidden is None:
        return share
    return f"<= {share}" if all(entry.at_most for entry in doubts) else f"{share} ?"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"


def _table(head: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = []
    for row in [head, *rows]:
        cells = [row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
