"""What a server does with its trace, in this process (`serving`) or in another one (`running`). Needs no vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dbo_greenlet
from dbo_greenlet import Scheduler, dbo_maybe_run_recv_hook, dbo_register_recv_hook, dbo_yield
from dbo_greenlet.errors import MicrobatchFailed
from dbo_greenlet.schedule import Schedule
from dbo_greenlet.vllm.recording import ServerTrace

SCRIPT = Path(__file__).with_name("script_server.py")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(dbo_greenlet.__file__).parents[1])}
CUTS = [(0, 4, 0, 1), (4, 8, 1, 2)]
LOW_LATENCY = ("dispatch", "combine")
HIGH_THROUGHPUT = ("before_dispatch", "before_combine", "combine")


def entry(layers: int, stages: Sequence[str] = LOW_LATENCY, fail: bool = False) -> Callable[[], None]:
    def model() -> None:
        for layer in range(layers):
            for stage in stages:
                if stages is LOW_LATENCY:
                    dbo_maybe_run_recv_hook()
                    dbo_register_recv_hook(lambda: None)
                dbo_yield(f"layer{layer}.{stage}")
        if fail:
            raise ValueError("out of experts")

    return model


class Server:
    """What `dbo_greenlet.vllm.step` does with a trace."""

    def __init__(self, trace: ServerTrace) -> None:
        self.trace = trace
        self.plain = Scheduler()
        self.recording = Scheduler(instruments=[trace.recorder])

    def step(
        self,
        layers: int = 2,
        *,
        stages: Sequence[str] = LOW_LATENCY,
        fail: bool = False,
        kind: str = "eager",
        cuts: Sequence[Any] = CUTS,
    ) -> bool:
        due = self.trace.due()
        schedule: Schedule | None = None
        error: BaseException | None = None
        try:
            scheduler = self.recording if due else self.plain
            schedule = scheduler.run([entry(layers, stages, fail), entry(layers, stages)]).schedule
        except MicrobatchFailed as failed:
            error = failed
        self.trace.split_step(kind=kind, slices=cuts, tokens=8, padded=16, schedule=schedule, error=error)
        return due


@contextmanager
def serving(folder: Path, **options) -> Iterator[Server]:
    arguments = {"every": 1, "megabytes": 1.0, "rank": 0, "world": 2, "settings": {}} | options
    trace = ServerTrace(folder, **arguments)
    try:
        yield Server(trace)
    finally:
        trace.close()


@contextmanager
def running(folder: Path, *arguments: object) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(folder), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    with process:
        try:
            ready, _, path = process.stdout.readline().strip().partition(" ")
            assert ready == "ready", process.stderr.read()
            yield process, Path(path)
        finally:
            process.kill()


def tell(process: subprocess.Popen[str], command: str) -> None:
    process.stdin.write(command + "\n")
    process.stdin.flush()


def step(process: subprocess.Popen[str], command: str = "step") -> None:
    tell(process, command)
    assert process.stdout.readline().strip().isdigit(), process.stderr.read()
