"""A profile on the terminal."""

from __future__ import annotations

import pytest

from dbo_greenlet.errors import TraceFileError
from dbo_greenlet.trace.export.items import Item, Process, Slice, SliceTrack
from dbo_greenlet.trace.stream_lanes import LEGEND, gpu_streams, render_streams


def items(*kernels: tuple[int, int, int, str], processes: int = 1) -> list[Item]:
    """Kernels (stream, begin, end, stage), nanoseconds, on streams 0 and 1 of each process; and a call on the host."""
    out: list[Item] = []
    for process in range(1, processes + 1):
        out.append(Process(process, process - 1, f"rank {process - 1}", ()))
        out.append(SliceTrack(1000 * process, process, "calls", 0))
        out.append(Slice(1000 * process, 0, 10**9, "cudaDeviceSynchronize", "call", {}))
        out += [SliceTrack(100 * process + stream, process, f"stream {stream}", stream + 1) for stream in (1, 0)]
        for stream, begin, end, stage in kernels:
            details = {"kernel": "k", "stage": stage}
            out.append(Slice(100 * process + stream, begin, end, "k", "kernel", details))
    return out


def test_a_character_is_the_stage_that_took_most_of_its_time() -> None:
    kernels = [
        (1, 51_000, 76_000, "combine"),  # begins and ends in the middle of a character of 2 us
        (1, 76_000, 76_500, "shared"),  # a quarter of one
        (0, 0, 50_000, "attention"),
        (0, 50_000, 50_900, "experts"),  # a bit less than half of one
        (0, 60_000, 62_000, "dispatch"),
        (0, 62_000, 62_400, "experts"),  # shares one with more of the dispatch
        (0, 62_400, 64_000, "dispatch"),
        (0, 75_000, 100_000, "of mine"),
    ]
    assert render_streams(gpu_streams(items(*kernels)), width=59).splitlines() == [
        "         0 us                      100 us (2.0 us a column)",
        "stream 0 " + "A" * 25 + "m    DD     " + "O" * 13,
        "stream 1 " + " " * 25 + "C" * 13 + "s",
        "",
        LEGEND,
        "",
        "stream 0: in use 0.080 ms (attention 0.050, dispatch 0.004, experts 0.001, other 0.025)",
        "stream 1: in use 0.025 ms (combine 0.025, shared 0.001)",
    ]


def test_several_ranks_are_named() -> None:
    lines = render_streams(gpu_streams(items((0, 5, 9, "experts"), processes=2)), width=40).splitlines()
    assert lines[1:3] == ["rank 0, stream 0 " + "M" * 23, "rank 1, stream 0 " + "M" * 23]


def test_a_profile_without_kernels() -> None:
    with pytest.raises(TraceFileError, match="nothing ran on a GPU in this profile"):
        gpu_streams(items())
