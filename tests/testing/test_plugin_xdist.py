"""The pytest plugin in a suite that pytest-xdist distributes."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from tests.testing.plugin_suites import FAILING
from tests.testing.pytest_runs import Suite, environment, the_line

xdist = pytest.mark.skipif(importlib.util.find_spec("xdist") is None, reason="needs pytest-xdist")
DISTRIBUTED = ["-p", "xdist", "-n", "2"]


@xdist
def test_lines_and_mistakes_come_from_workers_too(suite: Suite) -> None:
    suite.write("test_it.py", FAILING["an assertion"][0])
    suite.write("test_bad.py", "def test_bad(dbo_run):\n    from model import build\n    dbo_run(build, faults='x')\n")
    done = suite.pytest(*DISTRIBUTED)
    assert done.returncode == 2 and "2 failed" in done.stdout
    assert "\nfault 'x' in 'x' is of no known kind" in done.stdout
    line = the_line(done.stdout)
    # Replays run in the process itself, also where the suite's own options distribute.
    suite.write("pytest.ini", "[pytest]\naddopts = -p xdist -n 2\n")
    again = suite.shell(
        line + " --dbo-until=1 <<< $'c'" if sys.platform == "win32" else f"echo c | {line} --dbo-until=1"
    )
    assert "decision 1: microbatch 0" in again.stdout and "1 failed" in again.stdout


@xdist
def test_scenarios_and_golden_files_of_all_workers_count(scenarios: Suite) -> None:
    scenarios.write(
        "tests/test_golden.py",
        """
        import pytest
        from dbo_greenlet.testing import low_latency

        @pytest.mark.parametrize("layers", range(4))
        def test_it(dbo_run, dbo_golden, layers):
            dbo_golden(dbo_run(low_latency(layers + 1)))
        """,
    )
    done = scenarios.pytest(*DISTRIBUTED, "--dbo-update-golden")
    assert done.returncode == 1 and done.stdout.count("test_it-") == 4
    assert done.stdout.partition("scenarios that were never reached")[2].splitlines()[1:2] == ["never"]
    assert scenarios.pytest(*DISTRIBUTED, env={**environment(), "NOW": "1"}).returncode == 0
