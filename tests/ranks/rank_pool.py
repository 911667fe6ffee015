"""Processes that stand for ranks: started once, told what to run as often as a test likes, watched with a time limit.

A task is a function `task(group, **arguments)` of an importable module; each rank runs it with its own `RankGroup`. Its
result, or the exception it raised, comes back to the test.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from dbo_greenlet.ranks import RankGroup, serve_store

# Far above what any task takes, and below the timeout of the groups: a rank that hangs fails the test.
TASK_SECONDS = 40.0


class RankProcessError(Exception):
    """A task raised on a rank; the message is the traceback there."""


class RankPool:
    """`world_size` processes and the store through which they meet. Groups are made by `make_groups`."""

    def __init__(self, world_size: int) -> None:
        # One process imports torch and the others are forked from it.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            ["torch", "dbo_greenlet.all2all.torch_distributed", "dbo_greenlet.scheduler"]
        )
        self.store = serve_store()
        self.world_size = world_size
        self.processes: list[Any] = [None] * world_size
        self._pipes: list[Any] = [None] * world_size
        for rank in range(world_size):
            self.start(rank)

    def start(self, rank: int) -> None:
        """Start the process of `rank`, also in place of one that died."""
        self._pipes[rank], theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(rank, self.store.port, theirs), daemon=True)
        process.start()
        theirs.close()
        self.processes[rank] = process

    def send(self, rank: int, task: Callable[..., Any], **arguments: Any) -> None:
        self._pipes[rank].send((task, arguments))

    def receive(self, rank: int) -> Any:
        """What the last task sent to `rank` returned; an exception it raised is returned, not raised."""
        pipe = self._pipes[rank]
        if not pipe.poll(TASK_SECONDS):
            raise RankProcessError(f"rank {rank} did not finish its task within {TASK_SECONDS:g} s")
        outcome, where = pipe.recv()
        if isinstance(outcome, BaseException):
            # Exceptions carry attributes, but no traceback, from process to process.
            outcome.traceback_there = where
        return outcome

    def run(self, task: Callable[..., Any], ranks: range | None = None, **arguments: Any) -> list[Any]:
        """Run `task` on all ranks (or `ranks`) and return what each returned or raised."""
        ranks = range(self.world_size) if ranks is None else ranks
        for rank in ranks:
            self.send(rank, task, **arguments)
        return [self.receive(rank) for rank in ranks]

    def check(self, task: Callable[..., Any], ranks: range | None = None, **arguments: Any) -> list[Any]:
        """Like `run`, but what a rank raised is raised here."""
        outcomes = self.run(task, ranks, **arguments)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise RankProcessError(getattr(outcome, "traceback_there", "")) from outcome
        return outcomes

    def make_groups(self, name: str, world_size: int, timeout: float = 60.0, device: str = "cpu") -> None:
        """Every rank below `world_size` makes the group `name`; with device "cuda" each takes the GPU of its number."""
        self.check(_make_group, range(world_size), name=name, world_size=world_size, timeout=timeout, device=device)

    def make_groups_on(self, rank: int, name: str, world_size: int, timeout: float = 60.0) -> None:
        """The group on one rank, whose peers are waiting for it."""
        ranks = range(rank, rank + 1)
        self.check(_make_group, ranks, name=name, world_size=world_size, timeout=timeout, device="cpu")

    def close(self) -> None:
        for process, pipe in zip(self.processes, self._pipes, strict=True):
            pipe.close()
            process.join(5)
            if process.is_alive():
                process.kill()


_groups: dict[str, RankGroup] = {}
_here: dict[str, Any] = {}


def group(name: str) -> RankGroup:
    """In a task: this rank's group `name`."""
    return _groups[name]


def this_rank() -> int:
    return _here["rank"]


def _make_group(name: str, world_size: int, timeout: float, device: str) -> None:
    store = dist.PrefixStore(name, store_for_tests())
    if device == "cuda":
        device = f"cuda:{this_rank()}"
    _groups[name] = RankGroup(store, this_rank(), world_size, device=device, timeout=timeout)


def store_for_tests() -> dist.Store:
    """In a task: a store beside the groups', by which tasks wait for each other."""
    return dist.TCPStore("127.0.0.1", _here["port"], is_master=False, wait_for_workers=False)


def _serve(rank: int, port: int, pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    _here.update(rank=rank, port=port)
    while True:
        try:
            task, arguments = pipe.recv()
        except (EOFError, ConnectionResetError):
            # The test is over. Groups are left as they are: what a process leaves behind must not keep it from ending.
            os._exit(0)
        try:
            outcome, where = task(**arguments), ""
        except Exception as error:
            # Whatever a task raises is the test's to judge.
            outcome, where = error, traceback.format_exc()
        pipe.send((outcome, where))
