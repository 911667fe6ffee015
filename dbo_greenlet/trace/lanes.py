"""One step on the terminal: a row per microbatch, host time from left to right.

    microbatch 0 ┃A3━━━━━━━━━━┃M3━━━━━━━━━━━━━━           ┃A4━━━━━━━
    microbatch 1             ┃A3━━━━━━━━━           ┃M3━━━━━━

A3 is the slice with layer 3's attention (it ends at the dispatch), M3 the one with its experts (it ends at the
combine); with the yields of high throughput M3 ends before the combine, and S3 is the slice with the combine's launch
and the shared expert. Slices never overlap, whosever they are: this is the host's turn-taking, not the device's
overlap. Where no row is drawn, the scheduler ran.

Every character stands for the same time. A slice is at least one character wide; a character that two slices of a
row share is drawn as crowded instead of hiding one of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ..errors import ConfigurationError
from .notation import is_high_throughput, parse_site
from .reader import StepTrace
from .schema import SliceRecord
from .timetable import layers_text

__all__ = ["render_lanes"]

MIN_COLUMNS = 10
_LETTERS = {"dispatch": "A", "before_dispatch": "A", "before_combine": "M"}  # and "combine", by pattern


@dataclass(frozen=True)
class _Glyphs:
    begin: str
    body: str
    crowded: str


_UNICODE = _Glyphs("┃", "━", "╋")
_ASCII = _Glyphs("|", "=", "#")


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
        unsplit = step.record is not None and not step.record.split
        return f"no lanes: {'the step was not split' if unsplit else 'its slices are not in the trace (yet)'}"
    slices = step.slices if layers is None else _stretch(step.slices, layers)
    begin = min(s.begin for s in slices)
    end = max(s.end for s in slices)
    names = [f"microbatch {index} " for index in range(max(step.count, 1))]
    margin = max(map(len, names))
    columns = max(width - margin, MIN_COLUMNS)
    glyphs = _UNICODE if unicode else _ASCII
    letters = _LETTERS | {"combine": "S" if is_high_throughput([s.site for s in step.slices]) else "M"}
    lines = [_axis(begin, end, margin, columns)]
    for index, name in enumerate(names):
        row = _row([s for s in slices if s.ubatch == index], begin, end, columns, glyphs, letters)
        lines.append((name.ljust(margin) + row).rstrip())
    return "\n".join(lines)


def _stretch(slices: Sequence[SliceRecord], layers: Collection[int]) -> list[SliceRecord]:
    wanted = [s for s in slices if (site := parse_site(s.site)) is not None and site.layer in layers]
    if not wanted:
        held = sorted({site.layer for s in slices if (site := parse_site(s.site)) is not None})
        has = f"which has {', '.join(map(str, held))}" if held else "whose sites are not dispatch and combine labels"
        raise ConfigurationError(f"--layers {layers_text(layers)}: none of them is in this step, {has}")
    begin = min(s.begin for s in wanted)
    end = max(s.end for s in wanted)
    return [s for s in slices if (s.begin < end and s.end > begin) or s in wanted]


def _row(
    slices: Sequence[SliceRecord], begin: float, end: float, columns: int, glyphs: _Glyphs, letters: Mapping[str, str]
) -> str:
    scale = columns / max(end - begin, 0.001)  # the clock's tick: a step of no length at all still has a row
    row = [" "] * columns
    taken = -1  # last column in use
    for entry in slices:
        first = min(int((entry.begin - begin) * scale), columns - 1)
        last = min(max(first, round((entry.end - begin) * scale) - 1), columns - 1)
        if first <= taken:
            row[taken] = glyphs.crowded
            first = taken + 1
        if first > last:
            continue
        size = last - first + 1
        label = _label(entry, letters)
        # A label that does not fit is left out: the first half of "A13" would name another layer.
        text = glyphs.begin + (label if len(label) < size else "")
        row[first : last + 1] = text.ljust(size, glyphs.body)
        taken = last
    return "".join(row)


def _label(entry: SliceRecord, letters: Mapping[str, str]) -> str:
    if entry.failed:
        return "failed"
    if not entry.site:
        return "out"
    site = parse_site(entry.site)
    if site is None:
        return entry.site
    return f"{letters[site.stage]}{site.layer}"


def _axis(begin: float, end: float, margin: int, columns: int) -> str:
    left = f"{begin:.0f} us"
    right = f"{end:.0f} us ({(end - begin) / columns:.1f} us a column)"
    gap = columns - len(left) - len(right)
    if gap < 2:
        return f"{left} to {right}"
    return " " * margin + left + " " * gap + right
