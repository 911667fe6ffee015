"""The report of critical paths as text and as JSON."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

from .graph import IDLE, Piece
from .lanes import render_path_lanes
from .report import COMMUNICATION, Gain, PathReport, StepPath

__all__ = ["path_json", "render_path"]

# A gap of the stream between two pieces of one kind; longer ones stand for themselves.
_GAP_US = 10.0


def path_json(report: PathReport) -> dict[str, Any]:
    """The report as JSON values; times in microseconds."""
    return {
        "file": report.path,
        "source": report.source,
        "what": report.what,
        "reliable": not report.unreliable,
        "total": _step_json(report.total, whole=True),
        "steps": [_step_json(step) for step in report.steps],
        "shown": _step_json(report.shown) | {"pieces": [piece._asdict() for piece in report.shown.pieces]},
        "unreliable": report.unreliable,
        "notes": report.notes,
    }


def _step_json(step: StepPath, *, whole: bool = False) -> dict[str, Any]:
    key = {} if whole else {"run": step.run, "step": step.step, "rank": step.rank, "begin": step.begin}
    return key | {
        "length": step.length,
        "stages": [dataclasses.asdict(stage) for stage in step.stages],
        "links": step.links,
    }


def render_path(report: PathReport, *, width: int = 100, pieces: int = 30, steps: bool = False) -> str:
    """The report for a terminal.

    Args:
        width: characters a line of the lanes and the notes.
        pieces: how many pieces of the path to print, the longest, in order of time.
        steps: also a line for each step.
    """
    scale, unit = (1000.0, "ms") if report.total.length >= 100_000 else (1.0, "us")
    blocks = [f"{report.path} ({report.source}): {report.what}, times in {unit}"]
    blocks.append(_stages(report.total, scale))
    if report.total.links:
        links = sorted(report.total.links.items(), key=lambda link: (-link[1], link[0]))
        blocks.append("on the path: " + ", ".join(f"{kind} {count}" for kind, count in links))
    if steps and len(report.steps) > 1:
        blocks.append(_every_step(report.steps))
    shown = report.shown
    what = shown.run if report.source == "dbo_greenlet" else f"{shown.run} of rank {shown.rank}"
    name = f"step {shown.step}, rank {shown.rank}" if report.source == "dbo_greenlet" else f"step {shown.step}, {what}"
    median = " (of median length)" if len(report.steps) > 1 else ""
    blocks.append(f"{name}{median}: {shown.length:.1f} us")
    if len(report.steps) > 1:
        blocks.append(_stages(shown, 1.0))
    blocks.append(render_path_lanes(shown, report.lanes, width=width))
    if pieces:
        blocks.append(_pieces(shown, pieces))
    tail = [f"unreliable: {why}" for why in report.unreliable] + [f"note: {note}" for note in report.notes]
    if tail:
        blocks.append("\n".join("\n".join(textwrap.wrap(line, width, subsequent_indent="  ")) for line in tail))
    return "\n\n".join(blocks)


def _stages(step: StepPath, scale: float) -> str:
    percents = [gain.percent for gain in step.stages[0].gains] if step.stages else []
    doubted = any(row.uncertain for row in step.stages)
    head = ["stage", "on the path", "share", *(["uncertain"] if doubted else [])]
    head += ["without it" if percent == 100 else f"{percent:g} % shorter" for percent in percents]
    rows = []
    for row in step.stages:
        if not row.on_path and not any(gain.most for gain in row.gains):
            continue
        # What is counted by its parts already is in brackets.
        name = f"({row.stage})" if row.stage == COMMUNICATION else row.stage
        cells = [name, f"{row.on_path / scale:.3f}", f"{_share(row.on_path, step.length)} %"]
        if doubted:
            cells.append(f"{row.uncertain / scale:.3f}" if row.uncertain else "")
        rows.append([*cells, *(_saves(gain, step.length) for gain in row.gains)])
    rows.append(["all", f"{step.length / scale:.3f}", "100.0 %"])
    return _table(head, rows)


def _saves(gain: Gain, length: float) -> str:
    """How much shorter the step gets, in percent of it."""
    least, most = _share(gain.least, length), _share(gain.most, length)
    if least == most:
        return "0" if least == "0.0" else f"-{least} %"
    return f"{'0' if least == '0.0' else f'-{least}'} to -{most} %"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole if whole else 0.0:.1f}"


def _every_step(steps: Sequence[StepPath]) -> str:
    rows = []
    for step in steps:
        own = [row for row in step.stages if row.on_path and row.stage != COMMUNICATION]
        longest = sorted(own, key=lambda row: -row.on_path)[:3]
        parts = ", ".join(f"{row.stage} {_share(row.on_path, step.length)} %" for row in longest)
        rows.append([step.run, str(step.step), str(step.rank), f"{step.length:.1f}", parts])
    return _table(["", "step", "rank", "length (us)", "mostly"], rows, left=(0, 4))


class _Group(NamedTuple):
    """Neighbouring pieces of one stage on one lane."""

    begin: float
    end: float
    pieces: tuple[Piece, ...]


def _grouped(pieces: Sequence[Piece]) -> list[_Group]:
    out: list[_Group] = []
    for piece in pieces:
        if out:
            last = out[-1].pieces
            same = last[0].lane == piece.lane and last[0].stage == piece.stage
            gap = piece.stage == IDLE and last[0].lane == piece.lane and piece.length < _GAP_US
            if same or gap:
                out[-1] = _Group(out[-1].begin, piece.end, (*last, piece))
                continue
        out.append(_Group(piece.begin, piece.end, (piece,)))
    return out


def _pieces(step: StepPath, count: int) -> str:
    groups = _grouped(step.pieces)
    kept = sorted(sorted(range(len(groups)), key=lambda n: groups[n].begin - groups[n].end)[:count])
    rows = []
    for number in kept:
        group = groups[number]
        first = group.pieces[0]
        working = [piece for piece in group.pieces if piece.stage != IDLE] or list(group.pieces)
        what = max(working, key=lambda piece: piece.length).what
        if len(working) > 1:
            what += f" and {len(working) - 1} more"
        instead = dict.fromkeys(text for piece in group.pieces for text in piece.instead)
        if instead:
            what += f" (or {', '.join(instead)})" if len(instead) <= 2 else f" (or {len(instead)} others)"
        link = first.kind if first.kind != "work" and not first.by else ", ".join(dict.fromkeys(first.by))
        rows.append(
            [f"{group.begin - step.begin:.1f}", f"{group.end - group.begin:.1f}", first.stage, first.lane, link, what]
        )
    table = _table(["from", "took", "stage", "lane", "reached by", "what"], rows, left=(2, 3, 4, 5))
    rest = len(groups) - len(kept)
    if rest:
        left = sum(groups[n].end - groups[n].begin for n in set(range(len(groups))) - set(kept))
        table += f"\nand {rest} shorter ones, {left:.1f} us together (--pieces)"
    return table


def _table(head: list[str], rows: list[list[str]], *, left: tuple[int, ...] = (0,)) -> str:
    widths = [max(len(row[n]) for row in [head, *rows] if n < len(row)) for n in range(len(head))]
    lines = []
    for row in [head, *rows]:
        cells = [cell.ljust(widths[n]) if n in left else cell.rjust(widths[n]) for n, cell in enumerate(row)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
