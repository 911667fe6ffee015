"""`.ci/run`: every stage runs, also after a failure, and the last line adds up the tests of all of them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / ".ci" / "run"
STAGES = ["setup", "lint", "wheel-check", "browser", "test-core", "test-vllm", "test"]
# Stands for make, whose stages take a quarter of an hour: notes its target, says what pytest would, fails where asked.
MAKE = """#!/bin/sh
echo "$1" >>targets
case $1 in
test-core) echo "5 passed, 1 warning in 1.50s"; echo "7 passed in 0.50s (0:00:01)" ;;
test-vllm) echo "= 3 passed, 1 skipped in 2.00s =" ;;
test)
    case " $FAILING " in
    *" test "*) echo "= 2 failed, 20 passed, 4 skipped, 1 error in 9.00s (0:01:39) =" ;;
    *) echo "= 23 passed, 4 skipped in 9.00s (0:01:39) =" ;;
    esac ;;
setup-vllm) if [ -n "$SLOW" ]; then sleep 60 & echo $! >sleeping; wait; fi ;;
esac
case " $FAILING " in *" $1 "*) exit 1 ;; esac
"""

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts .ci/run in a folder of its own; variables go into its environment."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(RUN, tmp_path / ".ci" / "run")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text("@pytest.mark.vllm\n")
    make = tmp_path / "bin" / "make"
    make.parent.mkdir()
    make.write_text(MAKE)
    make.chmod(0o755)

    def start(**variables: str) -> subprocess.Popen[str]:
        path = f"{make.parent}{os.pathsep}{os.environ['PATH']}"
        return subprocess.Popen(
            [str(tmp_path / ".ci" / "run")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PATH": path, "FAILING": "", "SLOW": "", "CI_VLLM": "1", **variables},
            start_new_session=True,
        )

    return start


def test_every_stage_runs_and_the_tests_are_added_up(run: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    process = run(FAILING="lint setup-vllm test")
    said = process.communicate(timeout=60)[0].splitlines()
    targets = (tmp_path / "targets").read_text().split()
    assert [each for each in targets if each != "setup-vllm"] == STAGES and targets.count("setup-vllm") == 1
    assert [line.split()[1] for line in said if "FAILED" in line] == ["lint", "setup-vllm", "test"]
    # Which of the two that ran side by side ended first is open.
    failed = next(line for line in said if line.startswith("ci: failed stages: "))
    assert set(failed.partition(" (")[0].split()[3:]) == {"lint", "setup-vllm", "test"}
    assert process.returncode == 1 and said[-1] == "35 passed, 3 failed, 5 skipped"


@pytest.mark.parametrize(
    ("failing", "code", "last"),
    [("", 0, "38 passed, 0 failed, 5 skipped"), ("lint wheel-check", 1, "38 passed, 2 failed, 5 skipped")],
)
def test_a_stage_without_tests_that_fails_counts_as_one(
    run: Callable[..., subprocess.Popen[str]], failing: str, code: int, last: str
) -> None:
    process = run(FAILING=failing)
    said = process.communicate(timeout=60)[0].splitlines()
    assert (process.returncode, said[-1]) == (code, last)


def test_without_vllm(run: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    process = run(CI_VLLM="0")
    said = process.communicate(timeout=60)[0].splitlines()
    assert (tmp_path / "targets").read_text().split() == [each for each in STAGES if each != "test-vllm"]
    assert said[-1] == "35 passed, 0 failed, 4 skipped"


def test_who_interrupts_it_stops_what_goes_on_beside(run: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    process = run(SLOW="1")
    sleeping = tmp_path / "sleeping"
    end = time.monotonic() + 30
    while not (sleeping.exists() and sleeping.read_text().strip()):
        assert time.monotonic() < end, "the set-up of vLLM's environment did not start"
        time.sleep(0.02)
    beside = int(sleeping.read_text())
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=30)
    while runs(beside) and time.monotonic() < end:
        time.sleep(0.02)
    assert not runs(beside)


def runs(process: int) -> bool:
    """Neither gone nor only waiting to be collected by whoever took it over."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][:1] not in "ZX"
    except FileNotFoundError:
        return False
