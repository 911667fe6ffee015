"""The picture of a step: what it draws, read back from matplotlib's artists and from the PNG."""

from __future__ import annotations

import importlib
import io
import re
from pathlib import Path

import pytest

from dbo_greenlet.errors import ConfigurationError
from dbo_greenlet.trace import HeaderRecord, StepRecord, TraceWriter, read_trace
from dbo_greenlet.trace.export.items import FlowEnd, Item, Process, Slice, SliceTrack
from dbo_greenlet.trace.export.open_export import open_export
from tests.trace.pages import write_trace

image = pytest.importorskip("matplotlib.image", reason="matplotlib is not installed")
patches = pytest.importorskip("matplotlib.patches")
plot = importlib.import_module("dbo_greenlet.trace.plot")  # needs matplotlib


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trace(tmp_path_factory.mktemp("plot") / "t.jsonl")


def colours_of(png: bytes) -> set[tuple[int, ...]]:
    pixels = image.imread(io.BytesIO(png), format="png")
    return {tuple(round(float(part) * 255) for part in pixel[:3]) for row in pixels[::3] for pixel in row[::3]}


def rgb(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[n : n + 2], 16) for n in (1, 3, 5))


def test_the_file_is_a_png_with_the_colours_of_the_stages(recorded: Path) -> None:
    file = io.BytesIO()
    count = plot.write_plot(open_export([recorded], steps=[1], rank=0), file, title="t")
    step = read_trace(recorded).step(1, rank=0)
    assert count == 1 + len(step.slices) + len(step.receives) + len(step.gpu)
    data = file.getvalue()
    assert data.startswith(b"\x89PNG\r\n")
    height, width = image.imread(io.BytesIO(data), format="png").shape[:2]
    assert width == 14 * 150 and 300 < height < 1000
    found = colours_of(data)
    for stage in ("attention", "dispatch", "experts", "combine", "other"):
        assert rgb(plot.COLOURS[stage]) in found, stage
    assert rgb(plot.COLOURS["shared"]) not in found


def boxes(axes: object, colour: str) -> list[tuple[float, float, float]]:
    """Left, right and row of the boxes of a colour."""
    found = []
    for collection in axes.collections:  # type: ignore[attr-defined]
        if tuple(round(float(part) * 255) for part in collection.get_facecolor()[0][:3]) == rgb(colour):
            for path in collection.get_paths():
                box = path.get_extents()
                found.append((box.x0, box.x1, (box.y0 + box.y1) / 2))
    return sorted(found)


def test_boxes_lie_where_the_slices_do(recorded: Path) -> None:
    figure, _ = plot.draw_items(open_export([recorded], steps=[0], rank=0), title="t")
    (axes,) = figure.axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    row = dict(zip(names, axes.get_yticks(), strict=True))
    assert names[:5] == ["steps", "microbatch 0", "microbatch 1", "dispatch in flight", "combine in flight"]
    step = read_trace(recorded).step(0, rank=0)
    assert step.record is not None and step.record.begin == 0.0
    drawn = [
        (left, right) for left, right, y in boxes(axes, plot.COLOURS["attention"]) if round(y) == row["microbatch 1"]
    ]
    wanted = [(s.begin, s.end) for s in step.slices if s.ubatch == 1 and s.site.endswith("dispatch")]
    assert [end for box in drawn for end in box] == pytest.approx([end for span in wanted for end in span])
    # A wait is drawn apart from its slice, which begins behind it.
    experts = [box for box in boxes(axes, plot.COLOURS["experts"]) if round(box[2]) == row["compute stream"]]
    first = next(g for g in step.gpu if g.stream == "compute" and g.site == "layer1.combine")
    assert experts[0][:2] == pytest.approx((first.begin + first.waited, first.end))
    texts = {text.get_text() for text in axes.texts}
    assert {"A1", "M2", "step 0"} <= texts
    assert axes.get_xlabel() == "microseconds"
    arrows = [patch for patch in axes.patches if isinstance(patch, patches.FancyArrowPatch)]
    assert len(arrows) == len(step.receives) + 1  # and from the event that the comm stream waits for
    sent = next(r for r in step.receives)
    assert sent.at is not None
    start, end = min(arrow.get_path().get_extents().intervalx.tolist() for arrow in arrows)
    assert (start, end) == pytest.approx((step.slices[0].end - 0.001, sent.at), abs=3)


def test_several_ranks_are_named_and_parted(recorded: Path) -> None:
    figure, _ = plot.draw_items(open_export([recorded], steps=[0]), title="t")
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert [name for name in names if name.startswith("rank")] == ["rank 0: steps", "rank 1: steps"]


def test_layers_show_their_stretch(recorded: Path) -> None:
    figure, count = plot.draw_items(open_export([recorded], steps=[0], rank=0), title="t", layers=range(2, 3))
    items = [item for item in open_export([recorded], steps=[0], rank=0) if isinstance(item, Slice)]
    mine = [
        item for item in items if str(item.details.get("site")).startswith("layer2.") or item.name.startswith("C2,")
    ]
    begin, end = min(item.begin for item in mine), max(item.end for item in mine)
    assert figure.axes[0].get_xlim() == pytest.approx((0, (end - begin) / 1000))
    assert count == sum(item.begin < end and item.end > begin for item in items) < len(items)
    with pytest.raises(ConfigurationError, match="--layers 7: none of them is in these steps, which have 1, 2, 3"):
        plot.draw_items(open_export([recorded], steps=[0]), title="t", layers=range(7, 8))


def test_too_much_and_nothing(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "MAX_SLICES", 50)
    with pytest.raises(ConfigurationError, match=r"more than 50 slices .* \(--step 3\) .* \(--html\)"):
        plot.draw_items(open_export([recorded]), title="t")
    path = tmp_path / "t.jsonl"
    with TraceWriter(path) as writer:
        writer.write(HeaderRecord("0.1.0", 0, 1), StepRecord(0, 0, "dbo", 8, 8, False, "why"))
    with pytest.raises(ConfigurationError, match="nothing to draw: none of these steps has times"):
        plot.draw_items(open_export([path]), title="t")


def test_too_many_arrows_are_left_out_and_launches_always() -> None:
    def items(count: int, category: str) -> list[Item]:
        out: list[Item] = [Process(1, 0, "rank 0", ()), SliceTrack(5, 1, "a", 0), SliceTrack(6, 1, "b", 1)]
        for n in range(count):
            begin = 10_000 * n
            out.append(Slice(5, begin, begin + 4000, "x", "slice", {}, departs=(FlowEnd(n, "f", begin, category),)))
            out.append(Slice(6, begin, begin + 4000, "y", "slice", {}, arrives=(FlowEnd(n, "f", begin + 9, category),)))
        return out

    def drawn(count: int, category: str) -> tuple[int, bool]:
        figure, _ = plot.draw_items(items(count, category), title="t")
        (axes,) = figure.axes
        arrows = [patch for patch in axes.patches if isinstance(patch, patches.FancyArrowPatch)]
        return len(arrows), bool(re.search("arrows left out", axes.get_title(loc="left")))

    assert drawn(150, "receive") == (150, False)
    assert drawn(151, "event") == (0, True)
    assert drawn(151, "launch") == (0, False)
