"""A worker of vLLM whose split step failed, or is not over, ends when it is told to or when its engine is gone.

vLLM ends its workers by closing a pipe and, if that does not help, by SIGTERM; an engine core that is killed says
nothing. The worker's loop, its handler of signals and its watch over that pipe are vLLM's own here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM, whose worker is ended here (make test-vllm)")

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
LIMIT = 120.0  # for imports, on a machine that is busy
SOON = 20.0  # for the worker to end: far less than it would take by itself


class Engine:
    """The script: an engine core with its worker, in a process group of their own."""

    def __init__(self, what: str, log: Path) -> None:
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.vllm_dropin.script_worker_end", what],
                cwd=ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def line(self, begin: str, limit: float = LIMIT) -> str:
        """The rest of the first line that begins so, once it is there."""
        end = time.monotonic() + limit
        while time.monotonic() < end:
            for line in self.log.read_text(errors="replace").splitlines():
                if line.startswith(begin):
                    return line.removeprefix(begin).strip()
            time.sleep(0.05)
        pytest.fail(f"no line {begin!r} within {limit:.0f} s:\n{self.log.read_text(errors='replace')[-3000:]}")

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(params=["fails", "waits"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(request.param, tmp_path / "log")
    yield engine
    engine.end()


def reach(engine: Engine) -> int:
    """Wait until the step has failed, or is inside a microbatch; returns the worker's process id."""
    worker = int(engine.line("worker "))
    if engine.process.args[-1] == "fails":
        answer = engine.line("answer ")
        assert answer.startswith("FAILURE Microbatch 1 of 2 failed")
        assert answer.endswith("BrokenExpertError: expert broke in layer1")
    else:
        engine.line("inside")
    return worker


def test_sigterm_ends_it(engine: Engine) -> None:
    os.kill(reach(engine), signal.SIGTERM)
    engine.line("shut down", SOON)
    assert engine.line("exit ", SOON) == "0"


def test_it_does_not_outlive_its_engine(tmp_path: Path) -> None:
    engine = Engine("fails", tmp_path / "log")
    try:
        worker = reach(engine)
        engine.process.kill()
        engine.process.wait()
        engine.line("shut down", SOON)
        end = time.monotonic() + SOON
        while alive(worker) and time.monotonic() < end:
            time.sleep(0.05)
        assert not alive(worker)
    finally:
        engine.end()


def alive(process: int) -> bool:
    """Neither gone nor only waiting to be collected by whoever took it over."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][:1] not in "ZX"
    except FileNotFoundError:
        return False
