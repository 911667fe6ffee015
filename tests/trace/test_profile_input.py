"""What a profile's file can have wrong beside its form: times in other units, and a way in that is read only once."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("msgspec", reason="msgspec is not installed, so profiles are not read")
from dbo_greenlet.errors import TraceFileError
from dbo_greenlet.trace.importers import read_profile
from tests.trace.profiles import GEMM, ChromeProfile


@pytest.mark.parametrize(("factor", "unit"), [(1e-3, "milliseconds"), (1e-6, "seconds")])
def test_kernels_that_are_too_short_to_have_run(tmp_path: Path, factor: float, unit: str) -> None:
    """Neither a clock of this century nor the bandwidth of a copy tells; that kernels take no time does."""
    made = ChromeProfile(base=None)
    for number, took in enumerate((2, 60, 7)):
        made.kernel(GEMM, 1000 * number * factor, (1000 * number + took) * factor)
    with pytest.raises(TraceFileError) as refused:
        read_profile(made.write(tmp_path / "p.json"))
    assert f"its times are {unit}, where a profile has microseconds" in str(refused.value)


def test_copies_in_seconds(tmp_path: Path) -> None:
    made = ChromeProfile()
    for number in range(3):
        begin = 2e-3 * number
        size = {"bytes": 64_000_000, "memory bandwidth (GB/s)": 64.0}
        made.kernel("Memcpy DtoD", begin, begin + 1e-3, category="gpu_memcpy", **size)
    with pytest.raises(TraceFileError, match="its times are seconds"):
        read_profile(made.write(tmp_path / "p.json"))


def test_short_kernels_of_whole_microseconds_are_taken(tmp_path: Path) -> None:
    """Old profilers rounded, down to nothing."""
    made = ChromeProfile()
    made.kernel(GEMM, 10, 10)
    made.kernel(GEMM, 20, 21)
    assert len(read_profile(made.write(tmp_path / "p.json")).activities) == 2
    made.events.append({"ph": "X", "cat": "kernel", "name": GEMM, "pid": 0, "tid": 7, "ts": "soon"})
    assert read_profile(made.write(tmp_path / "p.json")).notes == [
        "1 event that torch.profiler cannot have written was left out."
    ]


def test_a_number_that_json_does_not_have(tmp_path: Path) -> None:
    made = ChromeProfile()
    made.kernel(GEMM, 10, 20)
    made.kernel(GEMM, 30, float("nan"))
    with pytest.raises(TraceFileError, match="not JSON behind event 0 or a later one .*; a NaN or Infinity is none"):
        read_profile(made.write(tmp_path / "p.json"))


def test_a_pipe_says_that_it_is_one(tmp_path: Path) -> None:
    made = ChromeProfile()
    made.kernel(GEMM, 10, 20)
    os.mkfifo(tmp_path / "pipe")
    # Opened both ways, so that opening it again waits for nobody.
    both = os.open(tmp_path / "pipe", os.O_RDWR)
    try:
        os.write(both, json.dumps({"traceEvents": made.events}).encode())
        with pytest.raises(TraceFileError, match="pipe: a pipe, which cannot be read more than once"):
            read_profile(tmp_path / "pipe")
    finally:
        os.close(both)
