"""The timetable of one step, in the notation that vLLM documents its schedule in:

    Comp: |-A0_0-A1_0-||-MLP_1-||-S_1-MLP_0-||-S_0-A0_1-A1_1-|
    Comm: |----D_1----||--D_0--||----C_1----||------C_0------|
    Order: D_1 send, A0_0, A1_0, D_1 recv, D_0 send, MLP_1, D_0 recv,
           C_1 send, S_1, MLP_0, C_1 recv, C_0 send, S_0, A0_1, A1_1, C_0 recv

A column is a stretch of the order in which the same windows are in flight. In a schedule that takes turns that is one
window; otherwise windows overlap, and then there is more than one Comm line. An empty Comm cell is compute with
nothing in flight, an empty Comp cell is communication that nothing hides. A cell that goes on in the next row has no
bar there.

A step is cut into one block per layer, so that a few layers of a deep model can be shown. The block of layer L begins
at the first dispatch after every microbatch has sent its combines of the layers below: a microbatch that is a phase
ahead appears in the block of its siblings' layer, as it does in the notation, and the heading says so. Where
microbatches are further apart than a layer (one after the other, for example) no such rotation exists; then the blocks
follow the layer of each send. Consecutive layers that look the same are drawn once.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from ..errors import ConfigurationError
from .notation import Item

__all__ = ["Block", "blocks", "layers_text", "parse_layers", "render_order"]


@dataclass
class Window:
    """One dispatch or combine in flight, over the columns `first` to `last` of its step."""

    send: Item
    first: int
    last: int = -1
    received: bool = False


@dataclass
class Column:
    """A stretch of compute during which the windows in flight do not change."""

    start: int  # index, in the order, of its first item
    compute: list[Item] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)


@dataclass
class Block:
    """The part of a step that belongs to one layer.

    Attributes:
        layer: the layer; see the module for what belongs to it.
        items: its part of the order.
        start: index, in the order of the step, of its first item.
    """

    layer: int
    items: list[Item]
    start: int


def parse_layers(text: str) -> range:
    """Layers as a user types them: "3" or "3-5", both ends included, numbers of one to six digits.

    Raises:
        ConfigurationError: anything else.
    """
    match = re.fullmatch(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", text)
    if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
        raise ConfigurationError(f"--layers {text}: give one layer (3) or a range with both ends (3-5)")
    return range(int(match[1]), int(match[2] or match[1]) + 1)


def layers_text(layers: Collection[int]) -> str:
    """Layers as a user would type them; others than a range are joined by commas."""
    if isinstance(layers, range) and layers and layers.step == 1:
        # Never element by element: a range of a million layers is as quickly typed as one of three.
        return f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else str(layers[0])
    return ", ".join(map(str, layers))


def render_order(items: Sequence[Item], *, layers: Collection[int] | None = None, width: int = 100) -> str:
    """The order of a step as Comp, Comm and Order lines, one block a layer.

    Args:
        items: from `notation.order`.
        layers: layers to show; None shows all.
        width: characters a line, at least 40.

    Raises:
        ConfigurationError: none of `layers` is in the step.
    """
    width = max(width, 40)
    found = blocks(items)
    shown = [block for block in found if layers is None or block.layer in layers]
    if not shown:
        held = sorted({block.layer for block in found})
        raise ConfigurationError(
            f"--layers {layers_text(layers or ())}: none of them is in this step, which has {', '.join(map(str, held))}"
        )
    columns, open_windows = _columns(items)
    drawn: list[_Drawn] = []
    for block in shown:
        end = block.start + len(block.items)
        mine = [n for n, column in enumerate(columns) if block.start <= column.start < end]
        lines = _draw(columns, mine, width) + _wrap("Order: ", [str(item) for item in block.items], width)
        note = _whereabouts(block, found)
        if drawn and (drawn[-1].note, drawn[-1].lines) == (note, lines):
            drawn[-1].last = block.layer
        else:
            drawn.append(_Drawn(block.layer, block.layer, note, lines))
    out = "\n\n".join("\n".join([d.heading, *d.lines]) for d in drawn)
    if open_windows:
        names = ", ".join(f"{w.send.label} of layer {w.send.layer}" for w in open_windows)
        out += f"\n\nsent and never received: {names}"
    return out


# -- blocks ------------------------------------------------------------------------------------------------------------


def blocks(items: Sequence[Item]) -> list[Block]:
    """Cut the order of a step into one block per layer; see the module for the rule."""
    starts = _starts_by_phase(items)
    if starts is None:
        starts = _starts_by_send(items)
    if not starts:
        return []
    starts[0] = (0, starts[0][1])  # what comes before the first send belongs to the first block
    ends = [start for start, _ in starts[1:]] + [len(items)]
    return [Block(layer, list(items[start:end]), start) for (start, layer), end in zip(starts, ends, strict=True)]


def _starts_by_phase(items: Sequence[Item]) -> list[tuple[int, int]] | None:
    """(index, layer) of each block's first send; None where microbatches are more than one layer apart."""
    dispatches = [item for item in items if item.piece == "D" and item.action == "send"]
    layers = sorted({item.layer for item in dispatches})
    rank = {layer: n for n, layer in enumerate(layers)}
    complete = {item.microbatch: 0 for item in dispatches}  # microbatch -> layers whose combine it has sent
    starts: list[tuple[int, int]] = []
    for index, item in enumerate(items):
        if item.action != "send":
            continue
        if item.piece == "C":
            complete[item.microbatch] = rank[item.layer] + 1
            continue
        lowest = min(complete.values())
        if lowest == len(starts):
            starts.append((index, layers[lowest]))
        if rank[item.layer] - (len(starts) - 1) > 1:
            return None
    return starts


def _starts_by_send(items: Sequence[Item]) -> list[tuple[int, int]]:
    starts: list[tuple[int, int]] = []
    for index, item in enumerate(items):
        if item.action == "send" and (not starts or starts[-1][1] != item.layer):
            starts.append((index, item.layer))
    return starts


@dataclass
class _Drawn:
    """A block as text, with the consecutive ones that look the same."""

    first: int
    last: int
    note: str
    lines: list[str]

    @property
    def heading(self) -> str:
        layers = f"layer {self.first}" if self.first == self.last else f"layers {self.first} to {self.last}"
        return f"{layers} ({self.note})" if self.note else layers


def _whereabouts(block: Block, step: Sequence[Block]) -> str:
    """Which microbatches are in another layer than the block's; "" if none is."""
    layers: dict[int, set[int]] = {}
    for item in block.items:
        if item.action == "send":
            layers.setdefault(item.microbatch, set()).add(item.layer)
    above = min((other.layer for other in step if other.layer > block.layer), default=None)
    notes = []
    for index, its_layers in sorted(layers.items()):
        if its_layers == {above}:
            notes.append(f"microbatch {index} one layer ahead")
        elif its_layers != {block.layer}:
            notes.append(f"microbatch {index} in layer {' and '.join(map(str, sorted(its_layers)))}")
    return ", ".join(notes)


# -- columns -----------------------------------------------------------------------------------------------------------


def _columns(items: Sequence[Item]) -> tuple[list[Column], list[Window]]:
    """The columns of a step, and the windows that were never closed."""
    columns: list[Column] = []
    in_flight: list[Window] = []
    current: Column | None = None
    for index, item in enumerate(items):
        if not item.action:
            if current is None:
                current = Column(index, windows=list(in_flight))
                columns.append(current)
            current.compute.append(item)
            continue
        current = None
        if item.action == "send":
            in_flight.append(Window(item, first=len(columns)))
            continue
        window = next(w for w in in_flight if w.send.microbatch == item.microbatch)
        if window.first == len(columns):
            # Received as soon as it was sent: it gets a column of its own, without compute.
            columns.append(Column(index, windows=list(in_flight)))
        window.last = len(columns) - 1
        window.received = True
        in_flight.remove(window)
    for window in in_flight:
        window.last = len(columns) - 1
    return columns, in_flight


# -- drawing -----------------------------------------------------------------------------------------------------------


def _draw(columns: Sequence[Column], shown: Sequence[int], width: int) -> list[str]:
    """Comp and Comm lines of the columns `shown` (consecutive), broken into rows that fit."""
    lines: list[str] = []
    row: list[int] = []
    for number in shown:
        if row and 6 + sum(_widths(columns, [*row, number])) + 2 * (len(row) + 1) > width:
            lines += _draw_row(columns, row)
            row = []
        row.append(number)
    if row:
        lines += _draw_row(columns, row)
    return lines


def _widths(columns: Sequence[Column], row: Sequence[int]) -> list[int]:
    """Characters inside the bars of each column of a row."""
    inner = [len(_compute_text(columns[number])) for number in row]
    for window in _windows_of(columns, row):
        first, last = _part(window, row)
        have = sum(inner[first : last + 1]) + 2 * (last - first)
        need = len(window.send.label) + (2 if have else 4)
        inner[last] += max(0, need - have)
    return inner


def _draw_row(columns: Sequence[Column], row: Sequence[int]) -> list[str]:
    inner = _widths(columns, row)
    edges = [0]  # character at which each cell's opening bar stands
    for size in inner:
        edges.append(edges[-1] + size + 2)
    comp = "".join(
        f"|{_compute_text(columns[number]):-<{size}}|" if columns[number].compute else " " * (size + 2)
        for number, size in zip(row, inner, strict=True)
    )
    lanes: list[list[str]] = []
    for window in _windows_of(columns, row):
        first, last = _part(window, row)
        start, end = edges[first], edges[last + 1]
        lane = next((lane for lane in lanes if all(c == " " for c in lane[start:end])), None)
        if lane is None:
            lane = [" "] * edges[-1]
            lanes.append(lane)
        text = _centred(window.send.label, end - start - 2)
        opening = "|" if window.first >= row[0] else "-"
        closing = "|" if window.last <= row[-1] and window.received else "-"
        lane[start:end] = opening + text + closing
    comm = ["".join(lane).rstrip() for lane in lanes] or [""]
    return [
        f"Comp: {comp}".rstrip(),
        *(f"{'Comm: ' if n == 0 else '      '}{lane}".rstrip() for n, lane in enumerate(comm)),
    ]


def _compute_text(column: Column) -> str:
    return "".join(f"-{item.label}" for item in column.compute) + "-" if column.compute else ""


def _windows_of(columns: Sequence[Column], row: Sequence[int]) -> list[Window]:
    seen: dict[int, Window] = {}
    for number in row:
        for window in columns[number].windows:
            seen.setdefault(id(window), window)
    return list(seen.values())


def _part(window: Window, row: Sequence[int]) -> tuple[int, int]:
    """The cells of a row that a window covers: indices into the row."""
    return max(window.first, row[0]) - row[0], min(window.last, row[-1]) - row[0]


def _centred(label: str, size: int) -> str:
    left = (size - len(label)) // 2
    return "-" * left + label + "-" * (size - len(label) - left)


def _wrap(head: str, entries: Iterable[str], width: int) -> list[str]:
    """Entries joined by commas under a hanging head; an entry is never broken."""
    lines: list[str] = []
    line = head
    for entry in entries:
        if len(line) > len(head) and len(line) + len(entry) + 1 > width:
            lines.append(line.rstrip())
            line = " " * len(head)
        line += f"{entry}, "
    return [*lines, line.rstrip(", ")]
