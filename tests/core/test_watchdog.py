from __future__ import annotations

import logging
import threading
import time
from typing import Any

import pytest

from dbo_greenlet import Scheduler, dbo_register_recv_hook, dbo_yield

CARRIERS = ["greenlet", "thread"]


class Stuck:
    """A microbatch that does not come back until the watchdog has spoken (or ten seconds passed)."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.caplog = caplog

    def waiting_for_a_collective(self) -> None:
        deadline = time.monotonic() + 10
        while not self.caplog.records and time.monotonic() < deadline:
            time.sleep(0.01)

    def __call__(self) -> None:
        dbo_register_recv_hook(lambda: None)
        dbo_yield("layer3.dispatch")
        self.waiting_for_a_collective()


def parked() -> None:
    dbo_register_recv_hook(lambda: None)
    dbo_yield("layer3.dispatch")


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_stuck_step_is_described(carrier: str, caplog: pytest.LogCaptureFixture) -> None:
    threads = threading.active_count()
    with caplog.at_level(logging.ERROR, logger="dbo_greenlet.watchdog"):
        Scheduler(carrier=carrier, watchdog=0.15).run([parked, Stuck(caplog), parked])
    (record,) = caplog.records
    report = record.getMessage().splitlines()
    assert report[0] == "no progress for 0.15 s in a step of 3 microbatches after 4 slices"
    assert report[1].startswith("microbatch 1 runs and does not come back: it is not parked in the scheduler")
    assert report[2] == "  microbatch 0: returned after 2 slices"
    # Microbatch 2's receive is open: its sibling 0 returned without running it, and it was not resumed yet.
    assert report[3] == "  microbatch 1: running slice 1, after 'layer3.dispatch'"
    assert report[4] == "  microbatch 2: parked at 'layer3.dispatch' after 1 slices"
    assert any("waiting_for_a_collective" in line for line in report)
    assert threading.active_count() == threads


def test_open_receives_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    stuck = Stuck(caplog)

    def first() -> None:
        dbo_register_recv_hook(lambda: None)
        dbo_register_recv_hook(lambda: None)
        dbo_yield("layer0.combine")

    def second() -> None:
        stuck.waiting_for_a_collective()

    with caplog.at_level(logging.ERROR, logger="dbo_greenlet.watchdog"):
        Scheduler(watchdog=0.15, strict=False).run([first, second])
    report = caplog.records[0].getMessage()
    assert "  microbatch 0: parked at 'layer0.combine' after 1 slices, 2 receive(s) open" in report
    assert "  microbatch 1: running slice 0, before its first yield" in report


def test_stuck_in_the_policy_is_the_schedulers_fault(caplog: pytest.LogCaptureFixture) -> None:
    stuck = Stuck(caplog)

    class Slow:
        name = "slow"

        def start(self, step: Any) -> Any:
            def choose() -> int:
                if step.decisions:
                    stuck.waiting_for_a_collective()
                return int(step.runnable()[0])

            return choose

    with caplog.at_level(logging.ERROR, logger="dbo_greenlet.watchdog"):
        Scheduler(Slow(), watchdog=0.15).run([parked, parked])
    assert "the step is stuck in the scheduler" in caplog.records[0].getMessage()


def test_a_step_that_moves_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    def slow() -> None:
        for k in range(8):
            time.sleep(0.05)
            dbo_yield(f"s{k}")

    Scheduler(watchdog=0.5).run([slow, slow])
    assert caplog.records == []
