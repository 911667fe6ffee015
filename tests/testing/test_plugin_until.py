"""The debugger by --dbo-until: where it stops, and what is told where it cannot."""

from __future__ import annotations

import subprocess

import pytest

from dbo_greenlet.testing import ReplayCase
from tests.testing.plugin_suites import FAILING
from tests.testing.pytest_runs import Suite, environment, the_line


@pytest.mark.parametrize("carrier", ["greenlet", "thread"])
def test_until_stops_in_the_model_before_the_slice_of_a_decision(suite: Suite, carrier: str) -> None:
    suite.write(
        "test_it.py",
        f"""
        from model import build

        def test_it(dbo_run):
            assert dbo_run(build, "phase_offset:2", carrier="{carrier}").outputs == "no such"
        """,
    )
    line = the_line(suite.pytest().stdout)
    case = ReplayCase.decode(line.partition("--dbo-replay=")[2])
    assert case.schedule.decisions[:4] == (0, 0, 1, 0)
    done = subprocess.run(
        line + " --dbo-until 3",
        shell=True,
        cwd=suite.folder,
        input="p 'AT', i, layer, log\nn\nn\nc\n",
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(),
        check=False,
    )
    assert "decision 3: microbatch 0 goes on after 'layer0.combine'" in done.stdout, done.stdout + done.stderr
    assert "('AT', 0, 0, [0, 0, 1])" in done.stdout
    # The next two lines are the model's, not the scheduler's.
    assert "-> for layer in range(LAYERS):" in done.stdout
    assert done.returncode == 1 and "1 failed" in done.stdout  # and the test goes on


def test_until_stops_before_a_first_slice_and_can_be_left(suite: Suite) -> None:
    suite.write("test_it.py", FAILING["an assertion"][0])
    done = suite.pytest("--dbo-until", "0", stdin="n\np 'AT', i, log\nq\n")
    assert "decision 0: microbatch 0 begins" in done.stdout
    assert "('AT', 0, [])" in done.stdout
    assert done.returncode == 2 and "Quitting debugger" in done.stdout


def test_until_behind_the_end_is_told_beside_a_failure_too(suite: Suite) -> None:
    suite.write("test_it.py", FAILING["an assertion"][0])
    failed = suite.pytest("--dbo-until=99")
    assert failed.returncode == 1 and "1 failed" in failed.stdout
    assert "dbo-greenlet: --dbo-until: no step came to decision 99; the last was decision 9" in failed.stdout
    suite.write("test_it.py", "def test_it(dbo_run):\n    dbo_run(lambda bed: [int, int])\n")
    passed = suite.pytest("--dbo-until=2")
    assert passed.returncode == 2 and "no step came to decision 2; the last was decision 1" in passed.stdout
