"""Items of an export as a picture: what `dbo-greenlet show --png` draws. Needs matplotlib, the extra `plot`.

The picture has a row for each track, as the page has, the slices in the colours of their stages with their names where
there is room, waits as thin bars, and arrows from sends to receives where they are few enough to be told apart.

It is drawn with matplotlib's objects alone, not with pyplot, which keeps figures and picks a window system.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import IO

from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Patch, Rectangle

from ..errors import ConfigurationError
from .export.items import CounterSample, CounterTrack, Item, Process, Slice, SliceTrack
from .item_stages import STAGES, layer_of, stage_of
from .timetable import layers_text

__all__ = ["COLOURS", "MAX_SLICES", "draw_items", "write_plot"]

# As in the page: told apart also by those who do not see red and green alike.
COLOURS = dict(zip(STAGES, ("#4c8bd6", "#e8903a", "#3fa66b", "#d9607a", "#9a7bd0", "#a4adba"), strict=True))
_ARROW = "#7a3fe0"

# More than a picture can show, and more than a few seconds of drawing.
MAX_SLICES = 20_000
_MAX_ARROWS = 150
_ROW = 0.26  # inches
_DPI = 150


@dataclass
class _Row:
    process: Process
    track: SliceTrack | CounterTrack
    slices: list[Slice] = field(default_factory=list)
    samples: list[CounterSample] = field(default_factory=list)
    y: float = 0.0


def write_plot(
    items: Iterable[Item],
    file: IO[bytes],
    *,
    title: str,
    layers: Collection[int] | None = None,
    width: float = 14.0,
) -> int:
    """Draw the items as a PNG; returns how many slices it shows.

    Args:
        items: what to show.
        title: stands above the picture.
        layers: show the stretch of time in which slices of these layers ran; None shows all.
        width: inches, at 150 dots each.

    Raises:
        ConfigurationError: nothing to draw, more than `MAX_SLICES` slices, or none of `layers` among them.
        whatever iterating over `items` raises; OSError from the file.
    """
    figure, count = draw_items(items, title=title, layers=layers, width=width)
    figure.savefig(file, format="png")
    return count


def draw_items(
    items: Iterable[Item], *, title: str, layers: Collection[int] | None = None, width: float = 14.0
) -> tuple[Figure, int]:
    """The figure, and how many slices it shows; the arguments and errors are those of `write_plot`."""
    rows = _rows(items)
    begin, end = _stretch(rows, layers)
    for row in rows:
        row.slices = [each for each in row.slices if each.begin == begin or (each.begin < end and each.end > begin)]
    count = sum(len(row.slices) for row in rows)
    unit, name = _unit(end - begin)
    place = 0.0
    for row in rows:
        row.y = place
        place += 1.0
    figure = Figure(figsize=(width, max(1.4 + _ROW * len(rows), 2.2)), dpi=_DPI, layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlim(0, (end - begin) / unit)
    axes.set_ylim(place - 0.4, -0.6)
    characters = width * 0.82 * 72 / 4.2  # of a label's size that fit into the width of the axes
    per_character = (end - begin) / unit / characters
    for row in rows:
        if isinstance(row.track, CounterTrack):
            _draw_counter(axes, row, begin, end, unit)
        else:
            _draw_slices(axes, row, begin, end, unit, per_character)
    arrows = _draw_arrows(axes, rows, begin, end, unit)
    _draw_frame(axes, rows)
    axes.set_xlabel(name)
    axes.set_title(title if arrows else f"{title} (arrows left out: there are too many)", fontsize=10, loc="left")
    used = [stage for stage in STAGES if any(stage_of(each) == stage for row in rows for each in row.slices)]
    figure.legend(
        handles=[Patch(color=COLOURS[stage], label=stage) for stage in used],
        loc="outside lower center",
        ncols=max(len(used), 1),
        frameon=False,
        fontsize=8,
    )
    return figure, count


def _rows(items: Iterable[Item]) -> list[_Row]:
    """From top to bottom. Counters that stay 0 say nothing and take a row."""
    processes: dict[int, Process] = {}
    rows: dict[int, _Row] = {}
    count = 0
    for item in items:
        if isinstance(item, Process):
            processes[item.id] = item
        elif isinstance(item, (SliceTrack, CounterTrack)):
            rows[item.id] = _Row(processes[item.process], item)
        elif isinstance(item, Slice):
            rows[item.track].slices.append(item)
            count += 1
            if count > MAX_SLICES:
                raise ConfigurationError(
                    f"a picture of more than {MAX_SLICES} slices shows none of them; choose fewer steps (--step 3) or "
                    "a rank, or look at them as a page (--html)"
                )
        else:
            rows[item.track].samples.append(item)
    if not count:
        raise ConfigurationError("there is nothing to draw: none of these steps has times")
    kept = [row for row in rows.values() if row.slices or any(sample.value for sample in row.samples)]
    return sorted(kept, key=lambda row: (row.process.rank, row.process.id, row.track.place, row.track.id))


def _stretch(rows: list[_Row], layers: Collection[int] | None) -> tuple[int, int]:
    every = [each for row in rows for each in row.slices]
    some = every if layers is None else [each for each in every if layer_of(each) in layers]
    if not some:
        held = sorted({layer for each in every if (layer := layer_of(each)) is not None})
        has = f"which have {', '.join(map(str, held))}" if held else "whose slices name no layers"
        raise ConfigurationError(f"--layers {layers_text(layers or ())}: none of them is in these steps, {has}")
    begin = min(each.begin for each in some)
    return begin, max(max(each.end for each in some), begin + 1)


def _unit(length: int) -> tuple[float, str]:
    if length < 10_000_000:
        return 1e3, "microseconds"
    return (1e6, "milliseconds") if length < 10_000_000_000 else (1e9, "seconds")


def _draw_slices(axes: Axes, row: _Row, begin: int, end: int, unit: float, per_character: float) -> None:
    # A white line parts neighbours; round a hair of a slice it would be all that is seen.
    boxes: dict[tuple[str, bool], list[Rectangle]] = {(stage, wide): [] for stage in STAGES for wide in (False, True)}
    waits: list[Rectangle] = []
    for each in row.slices:
        stage = stage_of(each)
        left, right = max(each.begin, begin), min(each.end, end)
        busy = min(max(each.begin + each.waited, left), right)
        if busy > left:
            waits.append(Rectangle(((left - begin) / unit, row.y - 0.08), (busy - left) / unit, 0.16))
        wide = (right - busy) / unit > per_character
        boxes[stage, wide].append(Rectangle(((busy - begin) / unit, row.y - 0.38), (right - busy) / unit, 0.76))
        if label := _label(each.name, (right - busy) / unit / per_character):
            place = ((busy - begin) / unit + per_character * 0.5, row.y)
            axes.text(*place, label, va="center", ha="left", fontsize=6.5, clip_on=True)
    for (stage, wide), some in boxes.items():
        if some:
            edge = {"edgecolor": "white", "linewidth": 0.4} if wide else {"edgecolor": "none"}
            axes.add_collection(PatchCollection(some, facecolor=COLOURS[stage], **edge))
    if waits:
        axes.add_collection(PatchCollection(waits, facecolor="#b8bec8", edgecolor="none"))


def _label(name: str, room: float) -> str:
    short = name.split(",", 1)[0]
    return name if len(name) + 1 <= room else short if len(short) + 1 <= room else ""


def _draw_counter(axes: Axes, row: _Row, begin: int, end: int, unit: float) -> None:
    samples = sorted(row.samples, key=lambda sample: sample.at)
    highest = max(sample.value for sample in samples)
    before = [sample for sample in samples if sample.at <= begin][-1:]
    shown = before + [sample for sample in samples if begin < sample.at < end]
    if not shown or not highest:
        return
    times = [(max(sample.at, begin) - begin) / unit for sample in shown] + [(end - begin) / unit]
    heights = [row.y + 0.4 - 0.8 * sample.value / highest for sample in shown]
    # A counter's last sample holds until nobody knows: 0 in the exports of our traces.
    axes.fill_between(
        times, [*heights, heights[-1]], row.y + 0.4, step="post", color="#4c8bd6", alpha=0.35, linewidth=0
    )


def _draw_arrows(axes: Axes, rows: list[_Row], begin: int, end: int, unit: float) -> bool:
    """Whether the arrows were drawn, all or none."""
    # Every kernel of a profile has a launch: those arrows would cover the picture.
    ends = [(flow, row.y) for row in rows for each in row.slices for flow in each.departs if flow.category != "launch"]
    departs = {flow.id: (flow.at, y) for flow, y in ends}
    arrives = {flow.id: (flow.at, row.y) for row in rows for each in row.slices for flow in each.arrives}
    both = [(departs[number], arrives[number]) for number in departs.keys() & arrives.keys()]
    if len(both) > _MAX_ARROWS:
        return False
    for (left, from_y), (right, to_y) in sorted(both):
        if left < begin or right > end:
            continue
        arrow = FancyArrowPatch(
            ((left - begin) / unit, from_y),
            ((right - begin) / unit, to_y),
            arrowstyle="-|>",
            mutation_scale=6,
            linewidth=0.7,
            color=_ARROW,
            alpha=0.8,
            shrinkA=0,
            shrinkB=0,
            zorder=3,
        )
        axes.add_patch(arrow)
    return True


def _draw_frame(axes: Axes, rows: list[_Row]) -> None:
    """Names of the rows, with the rank where it changes, and a line between ranks."""
    several = len({row.process.id for row in rows}) > 1
    names = []
    latest: Process | None = None
    for row in rows:
        name = row.track.name
        if several and row.process is not latest:
            name = f"{row.process.name}: {name}"
            if latest is not None:
                axes.axhline(row.y - 0.5, color="#667085", linewidth=0.8)
        latest = row.process
        names.append(name)
    axes.set_yticks([row.y for row in rows], names, fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="x", color="#d5d9e0", linewidth=0.5)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
