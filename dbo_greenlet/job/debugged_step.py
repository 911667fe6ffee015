"""A replay that stops in the debugger before one step of rank 0.

A rank has no terminal: its standard streams are the parent's to keep apart. So its debugger talks through a socket, and
the parent passes lines on between that and its own standard streams. The other ranks wait for rank 0 as long as it
takes: their time limit is the longest there is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pdb
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from ..errors import ConfigurationError, RankFailedError
from .process import rank_main
from .replay import ReplayPlan
from .spec import MAX_RANK_TIMEOUT, JobSpec

__all__ = ["debug_step"]

RankMain = Callable[[JobSpec, int, Connection, str], None]


@contextlib.contextmanager
def debug_step(plan: ReplayPlan, step: int) -> Iterator[tuple[ReplayPlan, RankMain]]:
    """(the plan without time limits, what its ranks are to run), to be replayed within.

    Args:
        plan: what is replayed.
        step: the step of rank 0 to stop before.

    Raises:
        ConfigurationError: the recorded run has no such step, or this system no local sockets; within: the debugger
            was quit before the replay was over.
    """
    steps = sorted({number for number, _ in plan.recorded})
    if step not in steps:
        raise ConfigurationError(
            f"--until is {step}, and run {plan.run} of {plan.trace.path} has no such step; it has {len(steps)}, from "
            f"{steps[0]} to {steps[-1]}"
        )
    if not hasattr(socket, "AF_UNIX"):
        raise ConfigurationError(
            "--until needs local sockets (AF_UNIX) for the debugger of a rank; this system has none"
        )
    patient = dataclasses.replace(plan.spec.settings, rank_timeout=MAX_RANK_TIMEOUT)
    waiting = dataclasses.replace(
        plan,
        spec=dataclasses.replace(plan.spec, settings=patient),
        specs=[dataclasses.replace(each, settings=patient) for each in plan.specs],
    )
    with tempfile.TemporaryDirectory(prefix="dbo-greenlet-") as folder, _Terminal(f"{folder}/debugger") as terminal:
        try:
            yield waiting, partial(_rank_main, step, terminal.address)
        except RankFailedError as error:
            if "BdbQuit" not in str(error):
                raise
            raise ConfigurationError(f"the debugger was quit in step {step}; the replay is not over") from None


class _Terminal:
    """The parent's end: passes lines on until the debugger is done. A context manager."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(address)
        self._server.listen(1)

    def __enter__(self) -> _Terminal:
        # Daemons: one may sit in a read of standard input that nobody can end.
        threading.Thread(target=self._show, name="dbo_greenlet debugger output", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.close()

    def _show(self) -> None:
        try:
            debugger, _ = self._server.accept()
        except OSError:
            return  # closed: the step was never reached
        threading.Thread(target=self._ask, args=(debugger,), name="dbo_greenlet debugger input", daemon=True).start()
        while data := debugger.recv(4096):
            sys.stdout.write(data.decode(errors="replace"))
            sys.stdout.flush()

    @staticmethod
    def _ask(debugger: socket.socket) -> None:
        # The debugger, or its process, may be gone when a line comes.
        with contextlib.suppress(OSError):
            for line in sys.stdin:
                debugger.sendall(line.encode())
            debugger.shutdown(socket.SHUT_WR)


def _rank_main(step: int, address: str, spec: JobSpec, rank: int, connection: Connection, output: str) -> None:
    """`rank_main`, whose rank 0 stops before `step`."""
    if rank == 0:
        from . import worker

        class DebuggedRank(worker.Rank):
            def _run_step(self, runner: Any, batch: Any, mode: str, recorded: Any) -> Any:
                if self.step == step:
                    _debug(address, f"step {step} of run {self.run_name}, rank 0: s steps into it")
                return super()._run_step(runner, batch, mode, recorded)

        # This process runs nothing but this rank, and `rank_main` looks the class up there.
        worker.Rank = DebuggedRank  # type: ignore[misc]
    rank_main(spec, rank, connection, output)


def _debug(address: str, title: str) -> None:
    """Start a debugger in the caller's frame that talks to the parent."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    # Two files: one for both directions forgets, when it is written to, the lines that it has read ahead.
    answers = connection.makefile("r", encoding="utf-8", newline="\n")
    questions = connection.makefile("w", encoding="utf-8", newline="\n")
    print(title, file=questions)
    # Ctrl-C is the parent's, and a .pdbrc is written for a terminal.
    debugger = pdb.Pdb(stdin=answers, stdout=questions, nosigint=True, readrc=False)
    debugger.set_trace(sys._getframe(1))
