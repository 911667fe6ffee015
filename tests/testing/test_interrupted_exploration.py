"""What is left of an exploration that something outside cuts off, and what a failing assertion shows of a run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dbo_greenlet.errors import ConfigurationError
from dbo_greenlet.testing import explore, low_latency, run_in_turn, run_step
from dbo_greenlet.testing.faults import Faults
from dbo_greenlet.testing.replay_case import ReplayCase
from tests.testing.pytest_runs import Suite

HANGS = """
import pytest
from dbo_greenlet import dbo_yield


def build(bed):
    order = []

    def entry(i):
        for site in ("a", "b"):
            order.append(i)
            if order == [0, 1, 0]:  # in one schedule of five: there a time limit strikes
                raise {outside}
            dbo_yield(site)

    return [lambda i=i: entry(i) for i in range(2)]


def test_hang(dbo_explore):
    dbo_explore(build)
"""


@pytest.mark.parametrize("outside", ["pytest.fail.Exception('too long')", "pytest.exit.Exception('stopped')"])
def test_a_schedule_that_was_cut_off_can_be_run_again(tmp_path: Path, outside: str) -> None:
    suite = Suite(tmp_path)
    suite.write("test_it.py", HANGS.format(outside=outside))
    done = suite.pytest()
    if outside.startswith("pytest.exit"):
        assert "stopped" in done.stdout + done.stderr
        return
    (line,) = [each for each in done.stdout.splitlines() if "--dbo-replay=" in each]
    found = re.search("--dbo-replay='(.*)'", line)
    assert found is not None
    assert ReplayCase.decode(found[1]).schedule.decisions == (0, 1, 0)
    again = suite.pytest("test_it.py::test_hang", f"--dbo-replay={found[1]}")
    assert "too long" in again.stdout and again.returncode == 1


def test_faults_may_be_their_text(tmp_path: Path) -> None:
    suite = Suite(tmp_path)
    suite.write(
        "test_it.py",
        """
        from dbo_greenlet.testing import low_latency

        def test_text(dbo_explore):
            assert dbo_explore(low_latency(1), faults="raise@1.1").schedules == 5

        def test_mistyped(dbo_explore):
            dbo_explore(low_latency(1), faults="rise@1.1")
        """,
    )
    done = suite.pytest()
    assert "1 failed, 1 passed" in done.stdout and "rise" in done.stdout + done.stderr
    assert done.returncode == 2


def test_a_failed_run_begins_with_its_error() -> None:
    failed = run_step(low_latency(1), faults=Faults.parse("raise@1.1"))
    assert repr(failed).startswith("<StepRun failed: MicrobatchFailed: Microbatch 1 of 2 failed in slice 1 after ")
    assert repr(run_step(low_latency(1))).startswith("<StepRun succeeded: dbo1:2:010101:")


@pytest.mark.parametrize("run", [run_step, run_in_turn, explore])
def test_a_step_instead_of_what_builds_one_is_told(run: Any) -> None:
    with pytest.raises(ConfigurationError, match="build is a function that takes a TestBed .* and not list"):
        run([lambda: 0, lambda: 1])
