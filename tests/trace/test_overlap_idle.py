"""Idle time by cause, and how long launches took to arrive."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo_greenlet.trace import intervals
from dbo_greenlet.trace.idle import idle_time
from dbo_greenlet.trace.overlap.text import is_reliable
from tests.trace.overlap_reports import report
from tests.trace.profiles import COMBINE, DISPATCH, GEMM, ChromeProfile


def test_idle_by_cause(tmp_path: Path) -> None:
    made = ChromeProfile()
    made.kernel(GEMM, 10, 20, launch=1)
    made.kernel(DISPATCH, 20, 40, stream=21, launch=3)
    made.kernel(GEMM, 50, 60, launch=44)  # launched (and the call over) at 45: 25 host late, 5 on its way
    made.call("cudaStreamWaitEvent", 46, 47)
    made.kernel(GEMM, 70, 80, launch=48)  # in time, behind a wait
    made.kernel(GEMM, 82, 90, launch=50)  # in time, no wait since
    made.kernel(COMBINE, 90, 95, stream=21, launch=52)  # behind the last compute
    idle = report(made, tmp_path).idle
    assert idle is not None
    assert (idle.host, idle.event, idle.other, idle.unknown) == (25, 10, 5 + 2 + 5, 0)
    assert (idle.host_exposed, idle.event_exposed, idle.other_exposed) == (20, 0, 5)
    assert idle.graph == 0


def test_a_wait_counts_for_the_next_launch_onto_a_stream_by_whichever_thread(tmp_path: Path) -> None:
    made = ChromeProfile()
    made.kernel(DISPATCH, 0, 5, stream=21)
    made.call("cudaStreamWaitEvent", 1, 2, thread=101)
    made.kernel(GEMM, 10, 20, launch=3)
    made.kernel(GEMM, 30, 40, launch=7)  # the wait was for the one before
    idle = report(made, tmp_path).idle
    assert idle is not None
    assert (idle.host, idle.event, idle.other) == (4, 6, 10)


def test_launch_delay(tmp_path: Path) -> None:
    made = ChromeProfile()
    made.kernel(DISPATCH, 0, 5, stream=21)
    for number in range(100):
        made.kernel(GEMM, 10 * number + number / 10, 10 * number + 9.95, launch=10 * number)
    delay = report(made, tmp_path).launch_delay
    assert delay is not None
    assert (delay.kernels, delay.early) == (100, 0)
    assert delay.median == pytest.approx(4.95) and delay.longest == pytest.approx(9.9)
    assert delay.p95 == pytest.approx(9.405)


def test_clocks_that_differ(tmp_path: Path) -> None:
    made = ChromeProfile()
    made.kernel(DISPATCH, 0, 5, stream=21)
    made.kernel(GEMM, 10, 20, launch=30)
    found = report(made, tmp_path)
    assert {entry.view for entry in found.unreliable} == {"idle", "launch_delay"}
    assert is_reliable(found), "the GPU's own times are not touched by it"


def test_without_launches_the_cause_is_unknown(tmp_path: Path) -> None:
    made = ChromeProfile()
    made.kernel(DISPATCH, 0, 5, stream=21)
    made.kernel(GEMM, 10, 20)
    found = report(made, tmp_path)
    assert found.idle is not None and found.launch_delay is None
    assert (found.idle.unknown, found.idle.unknown_exposed, found.idle.host) == (10, 5, 0)
    assert found.unreliable[0].view == "idle"
    assert "the profile does not show the host's launches" in found.unreliable[0].why
    assert found.notes[0].startswith("Not in the profile: no calls of the host")


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 60), st.integers(1, 15)), min_size=1, max_size=12))
def test_parts_add_up(kernels: list[tuple[bool, int, int]]) -> None:
    """Exposed by cause is exposed; both is never more than either; idle and compute fill the window."""
    comm = intervals.union([b for c, b, _ in kernels if c], [b + n for c, b, n in kernels if c])
    work = sorted((b, b + n) for c, b, n in kernels if not c)
    compute = intervals.union([b for b, _ in work], [e for _, e in work])
    everything = [(b, b + n) for _, b, n in kernels]
    window = intervals.span(min(b for b, _ in everything), max(e for _, e in everything))
    begin = np.array([b for b, _ in work], dtype=np.float64)
    launched = np.where(np.arange(len(begin)) % 3 == 2, np.nan, begin - 3)
    waits, graph = np.arange(len(begin)) % 2 == 1, np.arange(len(begin)) % 5 == 4
    idle = idle_time(window, compute, comm, begin, launched, waits, graph)
    assert idle.total == pytest.approx(intervals.length(window) - intervals.length(compute))
    exposed = idle.host_exposed + idle.event_exposed + idle.other_exposed + idle.unknown_exposed
    assert exposed == pytest.approx(intervals.length(intervals.difference(comm, compute)))
    assert idle.graph <= idle.other + 1e-9
