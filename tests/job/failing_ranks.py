"""What a rank's process runs in tests of failures: the real one, with something broken in it."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection

from dbo_greenlet.job.process import rank_main
from dbo_greenlet.job.spec import JobSpec

FAILS_AT = 20  # expert calls of a rank: eight a step, so in the middle of step 2


def _after_layers(rank: int, failing: int, action: object) -> None:
    """On rank `failing`, do `action` in the middle of a step."""
    if rank != failing:
        return
    from dbo_greenlet.moe.experts import LocalExperts

    real, calls = LocalExperts.forward, iter(range(FAILS_AT))

    def forward(self: LocalExperts, received: object) -> object:
        if next(calls, None) is None:
            action()
        return real(self, received)

    LocalExperts.forward = forward


def raising(spec: JobSpec, rank: int, connection: Connection, output: str) -> None:
    def fail() -> None:
        raise ValueError("expert out of order")

    _after_layers(rank, 1, fail)
    rank_main(spec, rank, connection, output)


def dying(spec: JobSpec, rank: int, connection: Connection, output: str) -> None:
    _after_layers(rank, 1, lambda: os.kill(os.getpid(), signal.SIGKILL))
    rank_main(spec, rank, connection, output)


def aborting(spec: JobSpec, rank: int, connection: Connection, output: str) -> None:
    def abort() -> None:
        os.write(2, b"terminate called: internal error\n")
        os.abort()

    _after_layers(rank, 0, abort)
    rank_main(spec, rank, connection, output)


def stalling(spec: JobSpec, rank: int, connection: Connection, output: str) -> None:
    _after_layers(rank, 1, lambda: time.sleep(600))
    rank_main(spec, rank, connection, output)


def unable_to_capture(spec: JobSpec, rank: int, connection: Connection, output: str) -> None:
    from dbo_greenlet.errors import GraphCaptureError
    from dbo_greenlet.job.worker import Rank

    def fail(self: Rank, each: object) -> None:
        raise GraphCaptureError("the graph of 64 tokens cannot be captured: out of memory")

    if rank == 1:
        # Where a pass makes what its steps need, graphs included.
        Rank._make_runner = fail
    rank_main(spec, rank, connection, output)


def of_another_version(spec: JobSpec, rank: int, connection: Connection, output: str) -> None:
    if rank == 1:
        import dbo_greenlet.ranks as ranks

        ranks.__version__ = "0.0.9"
    rank_main(spec, rank, connection, output)


def without_loopback(spec: JobSpec, rank: int, connection: Connection, output: str) -> None:
    import dbo_greenlet.all2all.loopback as loopback

    del loopback.Loopback
    rank_main(spec, rank, connection, output)
