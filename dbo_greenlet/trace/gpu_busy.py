"""What a step's GPU times say about overlap: how long each stream was in use, and how long both were.

A stretch (`GpuRecord`) counts from where its stream's wait at the beginning was over. Inside it the stream is taken to
be busy. So these count as use: a gap in which the GPU had nothing to run because the host was late, also in a replay,
which CUDA launches piece by piece where it has events in it; a later wait of the same slice; the events themselves; and
a receive kernel that does nothing but wait for another rank's bytes, as DeepEP's low-latency ones do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .schema import GpuRecord

__all__ = ["GpuUse", "Interval", "common", "gpu_use", "length", "united"]


@dataclass(frozen=True)
class GpuUse:
    """Microseconds of one step on the GPU.

    Attributes:
        length: from the first begin to the last end.
        compute, comm: in which the stream was in use.
        both: in which both were: communication that compute hides.
    """

    length: float
    compute: float
    comm: float
    both: float


def gpu_use(stretches: Sequence[GpuRecord]) -> GpuUse:
    """The use of both streams over one step; all zero where there is nothing."""
    if not stretches:
        return GpuUse(0.0, 0.0, 0.0, 0.0)
    whole = max(s.end for s in stretches) - min(s.begin for s in stretches)
    compute = united((s.begin + s.waited, s.end) for s in stretches if s.stream != "comm")
    comm = united((s.begin + s.waited, s.end) for s in stretches if s.stream == "comm")
    return GpuUse(whole, length(compute), length(comm), length(common(compute, comm)))


Interval = tuple[float, float]


def united(intervals: Iterable[Interval]) -> list[Interval]:
    """Sorted, without overlaps."""
    out: list[Interval] = []
    for begin, end in sorted(intervals):
        if out and begin <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        elif end > begin:
            out.append((begin, end))
    return out


def common(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """What both cover; each of them as `united` gives it."""
    out: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        begin, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if begin < end:
            out.append((begin, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return out


def length(intervals: Iterable[Interval]) -> float:
    """The time covered, of intervals without overlaps."""
    return sum(end - begin for begin, end in intervals)
