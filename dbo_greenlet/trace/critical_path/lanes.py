"""The critical path over the lanes of its step: what is on it is heavy, the rest of what ran is light.

host        ┃host━━┃host━━┃host━━━━──────────────
compute 0   ─────────             ┃A3━━──┃M3━━━━━
compute 1         ───────────         ┃━━─
in flight                              ┃D3━━
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..rows import ASCII, MIN_COLUMNS, UNICODE, Box, Glyphs, draw_axis, draw_row
from .graph import Piece
from .report import StepPath

__all__ = ["render_path_lanes"]

_LIGHT = Glyphs("─", "─", "─", " ")
_LIGHT_ASCII = Glyphs("-", "-", "-", " ")
_OF = " of microbatch "
# Boxes of fewer columns than this are drawn with their neighbour.
_NARROW = 2.0


def render_path_lanes(
    shown: StepPath,
    lanes: Mapping[str, Sequence[tuple[float, float]]],
    *,
    width: int = 100,
    unicode: bool = True,
) -> str:
    """The lanes of a step with its path; times count from the step's begin.

    Args:
        shown: the step, with its pieces.
        lanes: what ran, (begin, end) by lane.
        width: characters a line; never fewer than the row's name and ten columns.
        unicode: box-drawing characters, otherwise ASCII.
    """
    by_lane: dict[str, list[Piece]] = {name: [] for name in lanes}
    for piece in shown.pieces:
        by_lane.setdefault(piece.lane, []).append(piece)
    names = sorted(by_lane, key=_place)
    margin = max(map(len, names), default=0) + 1
    columns = max(width - margin, MIN_COLUMNS)
    end = shown.length
    lines = [draw_axis(0.0, end, margin, columns)]
    heavy, light = (UNICODE, _LIGHT) if unicode else (ASCII, _LIGHT_ASCII)
    for name in names:
        others = [Box(begin - shown.begin, over - shown.begin, "") for begin, over in lanes.get(name, ())]
        row = list(draw_row([box for box in others if 0.0 <= box.begin <= end], 0.0, end, columns, light))
        path = draw_row(_boxes(by_lane[name], shown.begin, end / columns), 0.0, end, columns, heavy)
        row = [under if over == " " else over for under, over in zip(row, path, strict=True)]
        lines.append((name.ljust(margin) + "".join(row)).rstrip())
    return "\n".join(lines)


def _place(lane: str) -> tuple[int, str, int]:
    """Host first, then streams, then what is in flight."""
    name, _, number = lane.rpartition(" ")
    order = {"host": 0, "thread": 0, "compute": 1, "stream": 1, "comm": 2, "in": 3}
    if not number.isdigit():
        name, number = lane, "-1"
    return order.get(name.partition(" ")[0], 4), name, int(number)


def _boxes(pieces: Sequence[Piece], origin: float, column: float) -> list[Box]:
    """Pieces as boxes; neighbours with one label as one, and what is too short to be told apart, too."""
    boxes: list[Box] = []
    for piece in pieces:
        begin, end, label = piece.begin - origin, piece.end - origin, _label(piece)
        if boxes and begin - boxes[-1].end < column:
            last = boxes[-1]
            longer = label if end - begin > last.end - last.begin else last.label
            if last.label == label and begin - last.end < 1e-6:
                boxes[-1] = Box(last.begin, end, label)
                continue
            if min(end - begin, last.end - last.begin) < _NARROW * column:
                boxes[-1] = Box(last.begin, end, longer)
                continue
        boxes.append(Box(begin, end, label))
    return boxes


def _label(piece: Piece) -> str:
    """ "A3", "D3" where the piece is one of these, otherwise its stage."""
    if piece.kind in ("work", "receive") and _OF in piece.what:
        return piece.what.partition(_OF)[0]
    return piece.stage
