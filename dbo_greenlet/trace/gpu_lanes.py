"""One step on the GPU: a row per stream and microbatch, GPU time from left to right.

    compute 0 ┃A3━━━━━━━━          ┃M3━━━━━━━━━━━
    compute 1           ┃A3━━━━━━━━··············┃M3━━━━
    comm 0              ┃D3━━━━━━━━━              ┃C3━━━━━━
    comm 1                         ┃D3━━━━━━━━━━━━

On the compute stream the slices are named as in `lanes`; on the comm stream by what they carry, which follows from the
site that the slice goes on from: D3 layer 3's dispatch, C3 its combine. Dots are a wait for the other stream. Unlike
in the lanes over host time, rows of the two streams overlap, and that they do is the point.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Mapping

from .gpu_busy import gpu_use
from .lanes import slice_label, slice_letters, stretch_of_layers
from .notation import parse_site
from .reader import StepTrace
from .rows import ASCII, MIN_COLUMNS, UNICODE, Box, draw_axis, draw_row
from .schema import GpuRecord

__all__ = ["render_gpu"]

_CARRIED = {"dispatch": "D", "before_dispatch": "D", "combine": "C", "before_combine": "C"}


def render_gpu(
    step: StepTrace, *, layers: Collection[int] | None = None, width: int = 100, unicode: bool = True
) -> str:
    """The GPU times of a recorded step: how long, how much overlap, and the rows; "" where it has none.

    Args:
        step: from `read_trace`.
        layers: show the stretch of time in which slices of these layers ran; None shows the whole step.
        width: characters a line; never fewer than the row's name and ten columns.
        unicode: box-drawing characters, otherwise ASCII.

    Raises:
        ConfigurationError: none of `layers` is in the step.
    """
    if not step.gpu:
        return ""
    origin = min(s.begin for s in step.gpu)
    shown = step.gpu if layers is None else stretch_of_layers(step.gpu, layers)
    begin = min(s.begin for s in shown) - origin
    end = max(s.end for s in shown) - origin
    keys = sorted({(s.stream != "compute", s.stream, s.ubatch) for s in shown})
    margin = max(len(f"{stream} {ubatch} ") for _, stream, ubatch in keys)
    columns = max(width - margin, MIN_COLUMNS)
    glyphs = UNICODE if unicode else ASCII
    letters = slice_letters(step.sites)
    summary = [part for line in _summary(step, origin) for part in textwrap.wrap(line, max(width, 40))]
    lines = [*summary, draw_axis(begin, end, margin, columns)]
    for _, stream, ubatch in keys:
        boxes = [
            Box(s.begin - origin, s.end - origin, _label(s, letters), s.waited)
            for s in sorted(shown, key=lambda s: s.begin)
            if (s.stream, s.ubatch) == (stream, ubatch)
        ]
        lines.append((f"{stream} {ubatch} ".ljust(margin) + draw_row(boxes, begin, end, columns, glyphs)).rstrip())
    return "\n".join(lines)


def _summary(step: StepTrace, origin: float) -> list[str]:
    use = gpu_use(step.gpu)
    text = f"on the GPU: {use.length:.1f} us, compute in use {use.compute:.1f} us"
    if any(s.stream == "comm" for s in step.gpu):
        text += f", comm {use.comm:.1f} us"
        if use.comm:
            text += f", {use.both:.1f} us of it under compute ({100 * use.both / use.comm:.0f} %)"
    else:
        text += "; no slice used the comm stream"
    lines = [text]
    if step.record is not None and step.record.execution == "replayed":
        lines.append("its events make a replay longer, the more the shorter its kernels are")
    if step.record is not None and step.record.begin is not None:
        error = max(s.error for s in step.gpu)
        lines.append(f"begins {origin - step.record.begin:.0f} us after the host began the step, +- {error:.0f} us")
    return lines


def _label(entry: GpuRecord, letters: Mapping[str, str]) -> str:
    if entry.stream == "compute":
        return slice_label(entry.site, letters)
    after = parse_site(entry.after)
    return entry.after or slice_label(entry.site, letters) if after is None else f"{_CARRIED[after.stage]}{after.layer}"
