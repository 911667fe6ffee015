"""One step on the terminal: a row per microbatch, host time from left to right.

    microbatch 0 ┃A3━━━━━━━━━━┃M3━━━━━━━━━━━━━━           ┃A4━━━━━━━
    microbatch 1             ┃A3━━━━━━━━━           ┃M3━━━━━━

A3 is the slice with layer 3's attention (it ends at the dispatch), M3 the one with its experts (it ends at the
combine); with the yields of high throughput M3 ends before the combine, and S3 is the slice with the combine's launch
and the shared expert. Slices never overlap, whosever they are: this is the host's turn-taking, not the device's
overlap. Where no row is drawn, the scheduler ran.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from ..errors import ConfigurationError
from .notation import is_high_throughput, parse_site
from .reader import StepTrace
from .rows import ASCII, MIN_COLUMNS, UNICODE, Box, draw_axis, draw_row
from .schema import GpuRecord, SliceRecord
from .timetable import layers_text

__all__ = ["render_lanes", "slice_label", "slice_letters", "stretch_of_layers"]

_LETTERS = {"dispatch": "A", "before_dispatch": "A", "before_combine": "M"}  # and "combine", by pattern


def render_lanes(
    step: StepTrace, *, layers: Collection[int] | None = None, width: int = 100, unicode: bool = True
) -> str:
    """The slices of a recorded step over host time, one row per microbatch.

    Args:
        step: from `read_trace`.
        layers: show the stretch of time in which slices of these layers ran (and whatever else ran in it); None shows
            the whole step. Needs dispatch and combine labels.
        width: characters a line; never fewer than the row's name and ten columns.
        unicode: box-drawing characters, otherwise ASCII.

    Raises:
        ConfigurationError: none of `layers` is in the step.
    """
    if not step.slices:
        if step.record is not None and not step.record.split:
            return "no lanes: the step was not split"
        if step.record is not None and step.record.execution == "replayed":
            return "no lanes: the step was replayed from its graph, which runs no slices on the host"
        return "no lanes: its slices are not in the trace (yet)"
    slices = step.slices if layers is None else stretch_of_layers(step.slices, layers)
    begin = min(s.begin for s in slices)
    end = max(s.end for s in slices)
    names = [f"microbatch {index} " for index in range(max(step.count, 1))]
    margin = max(map(len, names))
    columns = max(width - margin, MIN_COLUMNS)
    letters = slice_letters([s.site for s in step.slices])
    lines = [draw_axis(begin, end, margin, columns)]
    for index, name in enumerate(names):
        boxes = [
            Box(s.begin, s.end, "failed" if s.failed else slice_label(s.site, letters))
            for s in slices
            if s.ubatch == index
        ]
        row = draw_row(boxes, begin, end, columns, UNICODE if unicode else ASCII)
        lines.append((name.ljust(margin) + row).rstrip())
    return "\n".join(lines)


def slice_letters(sites: Sequence[str]) -> Mapping[str, str]:
    """What stands for a slice, by the stage of the site at which it ends, in a step with these sites."""
    return letters_of(is_high_throughput(sites))


def letters_of(high_throughput: bool) -> Mapping[str, str]:
    """As `slice_letters`, for who knows already which pattern it is."""
    return _LETTERS | {"combine": "S" if high_throughput else "M"}


def slice_label(site: str, letters: Mapping[str, str]) -> str:
    """The name in the lanes of a slice that ends at `site`."""
    if not site:
        return "out"
    parsed = parse_site(site)
    return site if parsed is None else f"{letters[parsed.stage]}{parsed.layer}"


AnySlice = TypeVar("AnySlice", SliceRecord, GpuRecord)


def stretch_of_layers(slices: Sequence[AnySlice], layers: Collection[int]) -> list[AnySlice]:
    """The slices of these layers, and whatever else ran while they did.

    Raises:
        ConfigurationError: none of `layers` is among them.
    """
    wanted = [s for s in slices if (site := parse_site(s.site)) is not None and site.layer in layers]
    if not wanted:
        held = sorted({site.layer for s in slices if (site := parse_site(s.site)) is not None})
        has = f"which has {', '.join(map(str, held))}" if held else "whose sites are not dispatch and combine labels"
        raise ConfigurationError(f"--layers {layers_text(layers)}: none of them is in this step, {has}")
    begin = min(s.begin for s in wanted)
    end = max(s.end for s in wanted)
    return [s for s in slices if (s.begin < end and s.end > begin) or s in wanted]
