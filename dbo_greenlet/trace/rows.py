"""Boxes on a line of characters, each character the same time; and the axis above them.

A box is at least one character wide; a character that two boxes of a row share is drawn as crowded instead of hiding
one of them. A label that does not fit is left out: the first half of "A13" would name another layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ASCII", "MIN_COLUMNS", "UNICODE", "Box", "Glyphs", "draw_axis", "draw_row"]

MIN_COLUMNS = 10


@dataclass(frozen=True)
class Glyphs:
    begin: str
    body: str
    crowded: str
    idle: str


UNICODE = Glyphs("┃", "━", "╋", "·")
ASCII = Glyphs("|", "=", "#", ".")


@dataclass(frozen=True)
class Box:
    """Something that took the microseconds from `begin` to `end`, the first `idle` of them without doing anything."""

    begin: float
    end: float
    label: str
    idle: float = 0.0


def draw_row(boxes: Sequence[Box], begin: float, end: float, columns: int, glyphs: Glyphs) -> str:
    """The boxes, in order of time, in `columns` characters that stand for `begin` to `end`."""
    scale = columns / max(end - begin, 0.001)  # the clock's tick: a step of no length at all still has a row
    row = [" "] * columns
    taken = -1  # last column in use
    for box in boxes:
        first = _column(box.begin + box.idle - begin, scale, columns)
        last = min(max(first, round((box.end - begin) * scale) - 1), columns - 1)
        if box.idle:
            for column in range(max(_column(box.begin - begin, scale, columns), taken + 1), first):
                row[column] = glyphs.idle
        if first <= taken:
            row[taken] = glyphs.crowded
            first = taken + 1
        if first > last:
            continue
        size = last - first + 1
        text = glyphs.begin + (box.label if len(box.label) < size else "")
        row[first : last + 1] = text.ljust(size, glyphs.body)
        taken = last
    return "".join(row)


def draw_axis(begin: float, end: float, margin: int, columns: int) -> str:
    """The line above the rows, which begin `margin` characters from the left."""
    left = f"{begin:.0f} us"
    right = f"{end:.0f} us ({(end - begin) / columns:.1f} us a column)"
    gap = columns - len(left) - len(right)
    if gap < 2:
        return f"{left} to {right}"
    return " " * margin + left + " " * gap + right


def _column(time: float, scale: float, columns: int) -> int:
    return min(int(time * scale), columns - 1)
