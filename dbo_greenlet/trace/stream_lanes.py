"""A profile on the terminal: a row per GPU stream, GPU time from left to right.

    stream 7  AAAAAAMMMMMMMMMMM  mM MMMAAAAAAAAAAAA
    stream 27 CCCDDDDDD DDDDDDDDDCCCCCCCC   CCCCCCC

Each character is the stage that ran for most of its time, as a capital letter where the stream was in use for at least
half of it. Thousands of kernels share a row: boxes with names, as in the lanes of a step, would all be crowded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..errors import TraceFileError
from .export.items import Item, Process, Slice, SliceTrack
from .item_stages import STAGES, stage_of
from .rows import MIN_COLUMNS, draw_axis

__all__ = ["LEGEND", "Stream", "gpu_streams", "render_streams"]

_LETTERS = dict(zip(STAGES, "ADMCSO", strict=True))

LEGEND = (
    "A attention, D dispatch, M routed experts, C combine, S shared expert, O other; small letters: less than half of "
    "the time"
)


@dataclass
class Stream:
    """What ran on one GPU stream. (A stream whose kernels overlap has more than one.)

    Attributes:
        process, name: where.
        spans: (begin, end, stage), nanoseconds, one behind the other.
    """

    process: Process
    name: str
    spans: list[tuple[int, int, str]] = field(default_factory=list)

    @property
    def stages(self) -> dict[str, int]:
        """Nanoseconds by stage, in the order of the stages; those that ran."""
        total = dict.fromkeys(STAGES, 0)
        for begin, end, stage in self.spans:
            total[stage] += end - begin
        return {stage: time for stage, time in total.items() if time}


def gpu_streams(items: Iterable[Item]) -> list[Stream]:
    """The GPU streams of an export of a profile, from top to bottom.

    Raises:
        TraceFileError: there are none.
        whatever iterating over `items` raises.
    """
    processes: dict[int, Process] = {}
    tracks: dict[int, SliceTrack] = {}
    streams: dict[int, Stream] = {}
    for item in items:
        if isinstance(item, Process):
            processes[item.id] = item
        elif isinstance(item, SliceTrack):
            tracks[item.id] = item
        elif isinstance(item, Slice) and "kernel" in item.details:
            stream = streams.get(item.track)
            if stream is None:
                track = tracks[item.track]
                stream = streams[item.track] = Stream(processes[track.process], track.name)
            stream.spans.append((item.begin, item.end, stage_of(item)))
    if not streams:
        raise TraceFileError("nothing ran on a GPU in this profile")
    order = sorted(streams, key=lambda track: (processes[tracks[track].process].rank, tracks[track].place))
    return [streams[track] for track in order]


def render_streams(streams: list[Stream], *, width: int = 100) -> str:
    """The rows under an axis, the legend, and how long each stream was in use for what.

    Args:
        streams: at least one.
        width: characters a line; never fewer than the row's name and ten columns.
    """
    begin = min(stream.spans[0][0] for stream in streams)
    end = max(span[1] for stream in streams for span in stream.spans)
    several = len({stream.process.id for stream in streams}) > 1
    names = [f"{stream.process.name}, {stream.name}" if several else stream.name for stream in streams]
    margin = max(map(len, names)) + 1
    columns = max(width - margin, MIN_COLUMNS)
    lines = [draw_axis(0, (end - begin) / 1000, margin, columns)]
    for name, stream in zip(names, streams, strict=True):
        lines.append((name.ljust(margin) + _row(stream, begin, end, columns)).rstrip())
    lines += ["", LEGEND, ""]
    for name, stream in zip(names, streams, strict=True):
        parts = ", ".join(f"{stage} {time / 1e6:.3f}" for stage, time in stream.stages.items())
        lines.append(f"{name}: in use {sum(stream.stages.values()) / 1e6:.3f} ms ({parts})")
    return "\n".join(lines)


def _row(stream: Stream, begin: int, end: int, columns: int) -> str:
    wide = max(end - begin, 1) / columns
    shares: list[dict[str, float]] = [{} for _ in range(columns)]
    for first, last, stage in stream.spans:
        column = min(int((first - begin) / wide), columns - 1)
        while column < columns and begin + column * wide < last:
            part = min(last, begin + (column + 1) * wide) - max(first, begin + column * wide)
            shares[column][stage] = shares[column].get(stage, 0.0) + part
            column += 1
    return "".join(_character(share, wide) for share in shares)


def _character(share: dict[str, float], wide: float) -> str:
    if not share:
        return " "
    letter = _LETTERS[max(share, key=lambda stage: share[stage])]
    return letter if sum(share.values()) >= wide / 2 else letter.lower()
