"""The process of one rank: its standard streams, the meeting with the other ranks, and its last words.

This module is imported by the parent as well (to start it), so torch and everything that needs it is imported inside.
"""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from ..errors import DboError, RankFailedError
from ..trace.process_trace import end_process_trace
from .messages import Failed, Finished, Message, Serving
from .spec import JobSpec

if TYPE_CHECKING:
    from ..ranks import RankGroup

__all__ = ["rank_main"]


def rank_main(spec: JobSpec, rank: int, connection: Connection, output: str) -> None:
    """Run rank `rank` of the job; messages go to `connection`, what libraries print to the file `output`."""
    # Ctrl-C reaches every process of a terminal; what is to be done about it is the parent's business.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _redirect_output(output)
    group: RankGroup | None = None
    worker: Any = None
    code = 0
    failure: BaseException | None = None
    try:
        import torch

        from .worker import Rank

        torch.set_num_threads(spec.settings.threads)
        group = _meet(spec, rank, connection)
        worker = Rank(spec, rank, group, connection.send)
        worker.run()
        worker.close()
        if group is not None:
            group.close()
        connection.send(Finished(worker.last_words(None)))
    except BaseException as error:
        # Everything: the parent is told what ended this rank, whatever it was.
        code, failure = 1, error
        _report(connection, rank, worker, error)
        if group is not None:
            group.announce_failure(None, error)
    finally:
        end_process_trace(failure)
        # Not a normal exit: threads of gloo or NCCL that still wait for a dead rank would be joined, for minutes.
        os._exit(code)


def _meet(spec: JobSpec, rank: int, connection: Connection) -> RankGroup | None:
    """Connect to the other ranks. Rank 0 serves the store on a free port and the parent passes the port on."""
    from .resources import connect_sharing_ranks, open_device

    settings = spec.settings
    # First: a process group on a device that is not there fails too, with words that nobody understands.
    device = open_device(settings.device, rank)[1]
    connect_sharing_ranks(settings, rank)
    if settings.ranks == 1 and settings.all2all not in ("torch", "nccl"):
        return None
    from ..ranks import RankGroup, serve_store

    if rank == 0:
        store = serve_store()
        connection.send(Serving(store.port))
        return RankGroup(store, rank, settings.ranks, device=device, timeout=settings.rank_timeout)
    port = connection.recv()
    return RankGroup.connect(rank, settings.ranks, port, device=device, timeout=settings.rank_timeout)


def _report(connection: Connection, rank: int, worker: Any, error: BaseException) -> None:
    blamed, microbatch = rank, getattr(error, "index", None)
    if isinstance(error, RankFailedError):
        blamed, microbatch = error.rank, error.microbatch
    text = str(error) if isinstance(error, DboError) else f"{type(error).__name__}: {error}".rstrip(": ")
    run, step = (worker.run_name, worker.step) if worker is not None else ("", -1)
    lines = worker.last_words(error) if worker is not None else b""
    message: Message = Failed(blamed, microbatch, type(error).__name__, text, run, step, lines, _formatted(error))
    # A parent that is gone cannot be told.
    with contextlib.suppress(OSError):
        connection.send(message)


def _formatted(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


def _redirect_output(output: str) -> None:
    """Standard output and error of this process, those of C++ code included, into a file.

    The command's own output stays readable by a program that way; the file is quoted if the rank dies without a word.
    """
    try:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError:
        # The parent was interrupted while it started this rank, and took the folder with it.
        descriptor = os.open(os.devnull, os.O_WRONLY)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
