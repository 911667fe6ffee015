"""The ranks that share one step: meeting, agreeing on settings, small votes, and failing together (law 7).

**Failing together.** A rank whose step fails calls `announce_failure`; a rank that dies is noticed by its connections
closing, one that stalls by the group's timeout (`rank_alarm` says how). Every other rank then gets `RankFailedError`
from the collective it waits in, or from the next one it starts: within `FAILURE_SECONDS` of the announcement or the
death, and within the timeout plus `FAILURE_SECONDS` of the start of a collective that a stalled rank does not reach.
After that the group is broken and every use raises `BrokenGroupError`, until all ranks called `reset`.

A failure is noticed at the next collective, so a rank may finish the step in which another one failed and hear of it in
its next vote: whoever repeats a failed step must compare step numbers first.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ._version import __version__
from .errors import BrokenGroupError, ConfigurationError, DboError, RankFailedError, RanksDisagreeError
from .rank_alarm import Failure, RankAlarm, connect_ranks, local_address, shorten
from .rank_backends import Backends

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["FAILURE_SECONDS", "Collective", "RankGroup", "serve_store"]

FAILURE_SECONDS = 5.0
"""Within this time of a rank's announcement or death every waiting rank raises `RankFailedError`."""

# How long ranks may take to say whether they wait in a collective. Answering takes milliseconds; the rest is slack for
# a loaded machine, and leaves FAILURE_SECONDS room.
_ROLL_CALL_SECONDS = 3.0
# What a roll call finds, most to blame first: a busy rank may only be late.
_BLAME = ("gone", "silent", "busy")
# How often the host looks while it waits for a GPU, and a replacement rank for its place.
_GPU_POLL_SECONDS = 50e-6
_STORE_POLL_SECONDS = 0.05
# Beyond any use, and within what the store and the process groups can count in milliseconds.
_LONGEST_TIMEOUT = 1e6


def serve_store(host: str = "127.0.0.1", port: int = 0) -> dist.TCPStore:
    """Host the store through which ranks meet, on a free port if `port` is 0 (`.port` tells it).

    Host it in the process that starts the ranks, so that the death of any rank can be survived; a store hosted by
    rank 0 is lost with it. It lives as long as the returned object.
    """
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False)


def _check_timeout(timeout: float) -> None:
    if not (math.isfinite(timeout) and 0 < timeout <= _LONGEST_TIMEOUT):
        raise ConfigurationError(f"timeout = {timeout} s; it must be positive and at most {_LONGEST_TIMEOUT:.0f} s")


class Collective:
    """One collective in flight. Its tensors stay alive at least until `wait` returned."""

    __slots__ = ("_generation", "_group", "_work")

    def __init__(self, group: RankGroup, work: dist.Work) -> None:
        self._group = group
        self._work: dist.Work | None = work
        self._generation = group.generation

    def wait(self) -> None:
        """Wait until it is complete; with NCCL it is the current stream that waits, not the host.

        Raises `RankFailedError` if a rank failed meanwhile, `BrokenGroupError` if the group was broken before, or was
        reset since the collective began.
        """
        if self._work is None:
            return
        if self._generation != self._group.generation:
            self._work = None
            raise BrokenGroupError("a collective that began before the group was reset cannot be completed after it")
        self._group._finish(self._work)
        self._work = None


class RankGroup:
    """`world_size` ranks that run steps together; every rank constructs it, and it returns when all are there.

    `store` is where they meet (`serve_store`, or any store of torch.distributed). `address` is the address of this
    machine by which the others reach it. `device` "cpu" uses gloo, a CUDA device NCCL. `timeout`, in seconds, is how
    long a rank may keep the others waiting, at the meeting and in a collective, before it counts as stalled.

    A process that takes the place of a dead rank constructs it in the same way; it joins when the survivors `reset`.

    One thread at a time uses it. Raises `ConfigurationError` for impossible arguments, `RankFailedError` if a rank does
    not come.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        *,
        address: str = "127.0.0.1",
        device: str | torch.device = "cpu",
        timeout: float = 60.0,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ConfigurationError(f"rank = {rank} of world_size = {world_size}; it must be 0 to {world_size - 1}")
        _check_timeout(timeout)
        self.device = torch.device(device)
        if self.device.type not in ("cpu", "cuda"):
            raise ConfigurationError(f"device = {device!s}; it must be cpu or a CUDA device")
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout
        self.generation = -1
        self._address = address
        self._store = dist.PrefixStore("dbo_greenlet", store)
        self._store.set_timeout(timedelta(seconds=timeout))
        self._alarm: RankAlarm | None = None
        self._backends: Backends | None = None
        self._in_flight = 0
        # Why there is no alarm and no backend, and whether this rank has raised the alarm's failure already.
        self._absent = "it was never complete"
        self._raised = False
        self._join(self._generation_to_join())

    @classmethod
    def connect(
        cls,
        rank: int,
        world_size: int,
        port: int,
        host: str = "127.0.0.1",
        *,
        device: str | torch.device = "cpu",
        timeout: float = 60.0,
    ) -> Self:
        """Join through the store that somebody hosts at `host`:`port` (see `serve_store`).

        Raises `ConfigurationError` if no store answers there within the timeout.
        """
        _check_timeout(timeout)
        wait = timedelta(seconds=timeout)
        try:
            store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=wait)
        except RuntimeError as error:
            raise ConfigurationError(f"no store answers at {host}:{port} within {timeout:g} s: {error}") from error
        return cls(store, rank, world_size, address=local_address(host), device=device, timeout=timeout)

    @classmethod
    def from_env(cls, *, device: str | torch.device = "cpu", timeout: float = 60.0) -> Self:
        """Join as RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say, as torchrun and others set them.

        Raises `ConfigurationError` if one of them is missing or nobody hosts the store.
        """
        _check_timeout(timeout)
        try:
            store, rank, world_size = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
        except (ValueError, RuntimeError) as error:
            raise ConfigurationError(f"cannot join the ranks that the environment names: {error}") from error
        address = local_address(os.environ["MASTER_ADDR"])
        return cls(store, rank, world_size, address=address, device=device, timeout=timeout)

    # -- what a step uses ---------------------------------------------------------------------------------------------

    def exchange(self, row: Sequence[int] | Tensor) -> Tensor:
        """Every rank's `row`: int64 [n] on the CPU, the same n on all; returns int64 [world_size, n]. Blocks the host.

        One small all-gather, for the votes of a step. Raises what `Collective.wait` raises.
        """
        mine = torch.as_tensor(row, dtype=torch.int64)
        rows = torch.empty(self.world_size * mine.numel(), dtype=torch.int64)
        self._start(lambda backends: backends.gather(rows, mine)).wait()
        return rows.view(self.world_size, mine.numel())

    def all_to_all(
        self, received: Tensor, sent: Tensor, received_rows: Sequence[int] = (), sent_rows: Sequence[int] = ()
    ) -> Collective:
        """Start to send the rows of `sent` [M, B] to all ranks and to fill `received` [M', B]; returns without waiting.

        Both are contiguous uint8 on the group's device. `sent_rows` and `received_rows` say how many rows go to and
        come from each rank; left out, it is the same number for each. Raises `RankFailedError`, `BrokenGroupError`.
        """
        return self._start(lambda backends: backends.all_to_all(received, sent, list(received_rows), list(sent_rows)))

    def wait_for_device(self) -> None:
        """Block the host until the current stream of the group's GPU is done; nothing to do on a CPU.

        A plain synchronization would hang with the stream when a rank fails. Raises what `Collective.wait` raises.
        """
        if self.device.type != "cuda":
            return
        alarm = self._intact()
        reached = torch.cuda.Event()
        reached.record(torch.cuda.current_stream(self.device))
        deadline = time.monotonic() + self.timeout
        alarm.waiting = True
        try:
            while not reached.query():
                self._intact()
                if time.monotonic() > deadline:
                    raise self._explained(
                        alarm, f"the GPU did not reach a point of its stream within {self.timeout:g} s"
                    )
                time.sleep(_GPU_POLL_SECONDS)
        finally:
            alarm.waiting = False
        # An aborted NCCL operation lets the stream go on, with garbage.
        self._intact()

    def check(self) -> None:
        """Raise `RankFailedError` for a failure that was not raised here yet, `BrokenGroupError` for an older one."""
        self._intact()

    # -- agreeing, failing, starting anew -----------------------------------------------------------------------------

    def agree(self, settings: Mapping[str, object]) -> None:
        """Check that all ranks run this version of the package with the same `settings` (JSON values; others by repr).

        Every rank calls it, at start-up. Raises, on every rank alike, `RanksDisagreeError` naming each difference: the
        setting, and which rank has what. Raises what `Collective.wait` raises if a rank fails meanwhile.
        """
        mine = {
            key: json.dumps(value, sort_keys=True, default=repr)
            for key, value in {"dbo_greenlet version": __version__, **settings}.items()
        }
        text = json.dumps(mine).encode()
        lengths = self.exchange([len(text)]).flatten().tolist()
        rows = self.exchange(list(text.ljust(max(lengths))))
        told = [json.loads(bytes(row[:length].tolist())) for row, length in zip(rows, lengths, strict=True)]
        differences = []
        for key in dict.fromkeys(key for settings_of_rank in told for key in settings_of_rank):
            values = [settings_of_rank.get(key, "nothing") for settings_of_rank in told]
            if len(set(values)) > 1:
                has = ", ".join(f"rank {rank} has {value}" for rank, value in enumerate(values))
                differences.append(f"{key}: {has}")
        if differences:
            raise RanksDisagreeError("the ranks were not started alike: " + "; ".join(differences))

    def announce_failure(self, microbatch: int | None, error: BaseException) -> None:
        """Tell every rank that this rank's step failed, in `microbatch` where it is known, with `error`.

        Ends all pending collectives, here and there. After an earlier failure, of whichever rank, it changes nothing:
        a step that failed because another rank did may announce its error like any other. Never raises.
        """
        self._raised = True
        if self._alarm is not None:
            reason = shorten(f"{type(error).__name__}: {error}")
            self._alarm.raise_alarm(Failure(self.rank, microbatch, reason))

    def reset(self) -> None:
        """Throw the process groups away and make new ones; every rank calls it, and it returns when all have.

        Collectives in flight are lost. Raises `RankFailedError` if a rank does not come within the timeout; the group
        stays broken then, and reset may be tried again.
        """
        self._leave("it is being reset")
        # Whoever comes first opens the next generation; the others, and a process that replaces a dead rank, find it.
        try:
            opened = self._store.compare_set("generation", str(self.generation), str(self.generation + 1))
        except RuntimeError as error:
            raise BrokenGroupError(
                f"the group cannot be reset, because the process that hosted its store is gone: {error}"
            ) from error
        self._join(int(opened))

    def close(self) -> None:
        """Leave the group. The other ranks take it for a failure only if they still wait for this one."""
        self._leave("it was closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.announce_failure(None, error)
        self.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _intact(self) -> RankAlarm:
        alarm = self._alarm
        if alarm is None:
            raise BrokenGroupError(f"the group of ranks cannot be used: {self._absent}")
        if alarm.failure is not None:
            raise self._error_of(alarm.failure)
        return alarm

    def _error_of(self, failure: Failure) -> DboError:
        if self._raised:
            return BrokenGroupError(
                f"the group of ranks is broken since {failure.error()}; every rank must reset() it before the next step"
            )
        self._raised = True
        return failure.error()

    def _start(self, begin: Callable[[Backends], dist.Work]) -> Collective:
        alarm = self._intact()
        try:
            work = begin(self._backends)
        except RuntimeError as error:
            raise self._explained(alarm, str(error)) from error
        self._in_flight += 1
        return Collective(self, work)

    def _finish(self, work: dist.Work) -> None:
        alarm = self._intact()
        alarm.waiting = True
        try:
            work.wait()
        except RuntimeError as error:
            raise self._explained(alarm, str(error)) from error
        finally:
            alarm.waiting = False
        self._in_flight -= 1

    def _explained(self, alarm: RankAlarm, complaint: str) -> DboError:
        """The error to raise for a collective that failed with `complaint`: finds out which rank is to blame."""
        states = alarm.roll_call(_ROLL_CALL_SECONDS)
        if alarm.failure is None:
            absent = {rank: state for rank, state in states.items() if state != "waiting"}
            if absent:
                seen = ", ".join(f"rank {rank} is {state}" for rank, state in absent.items())
                blamed = min(absent, key=lambda rank: (_BLAME.index(absent[rank]), rank))
                failure = Failure(blamed, None, f"rank {self.rank} waited for it in vain ({seen}): {complaint}")
            else:
                failure = Failure(self.rank, None, f"no rank is missing, yet its collective failed: {complaint}")
            alarm.raise_alarm(failure)
        return self._error_of(alarm.failure)

    def _generation_to_join(self) -> int:
        """The generation that is open to this process: not one in which another process had its rank."""
        generation = int(self._store.compare_set("generation", "", "0"))
        deadline = time.monotonic() + self.timeout
        while self._store.check([f"{generation}/here/{self.rank}"]):
            if time.monotonic() > deadline:
                raise RankFailedError(
                    self.rank, None, f"another process is rank {self.rank}, or the others did not reset the group"
                )
            time.sleep(_STORE_POLL_SECONDS)
            generation = int(self._store.get("generation"))
        return generation

    def _join(self, generation: int) -> None:
        self.generation = generation
        store = dist.PrefixStore(str(generation), self._store)
        try:
            self._await_ranks(store)
            peers = connect_ranks(store, self.rank, self.world_size, self._address, self.timeout)
            self._alarm = RankAlarm(self.rank, peers, self._cut)
            self._backends = Backends(store, self.rank, self.world_size, self._address, self.device, self.timeout)
        except (RuntimeError, OSError) as error:
            # What stores, sockets and process groups raise when the other side is not there.
            self._leave(f"the ranks did not come together ({error})")
            raise RankFailedError(self.rank, None, f"cannot connect to the other ranks: {error}") from error
        self._raised = False
        self._in_flight = 0
        try:
            self.exchange([generation])
        except RankFailedError:
            self._leave("a rank failed while they came together")
            raise

    def _await_ranks(self, store: dist.Store) -> None:
        store.set(f"here/{self.rank}", "")
        keys = [f"here/{rank}" for rank in range(self.world_size)]
        try:
            store.wait(keys, timedelta(seconds=self.timeout))
        except RuntimeError as error:
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            if not missing:
                return  # the last one came just now
            self._absent = f"ranks {missing} did not come"
            raise RankFailedError(
                missing[0], None, f"it did not join within {self.timeout:g} s (ranks that did not: {missing})"
            ) from error

    def _cut(self) -> None:
        if (backends := self._backends) is not None:
            backends.cut()

    def _leave(self, why: str) -> None:
        alarm, backends = self._alarm, self._backends
        self._alarm, self._backends, self._absent = None, None, why
        # The farewell first: whoever waits for this rank asks, once the connections close, and must know by then.
        if alarm is not None:
            alarm.close()
        if backends is not None:
            backends.close(pending=self._in_flight > 0)
