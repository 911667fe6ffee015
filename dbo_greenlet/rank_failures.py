"""Ranks that run steps in lockstep fail together (law 7): what a runner asks of their group, and what it tells it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from .errors import MicrobatchFailed, RankFailedError, ReceiveHookError

__all__ = ["RankLink", "failing_together"]


class RankLink(Protocol):
    """What the runner asks of a group of ranks; `dbo_greenlet.ranks.RankGroup` is one."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def exchange(self, row: Tensor) -> Tensor:
        """Every rank's row of whole numbers [n], as [world_size, n]."""

    def announce_failure(self, microbatch: int | None, error: BaseException) -> None:
        """Make the step fail on every rank; does nothing where another failure was first."""


@contextmanager
def failing_together(group: RankLink | None) -> Iterator[None]:
    """What is raised inside is told to every rank of the group.

    Raises:
        RankFailedError: in place of what another rank's failure led to here, also inside a microbatch.
    """
    try:
        yield
    except BaseException as error:
        # Everything: whatever ends the step here, a KeyboardInterrupt too, leaves the others waiting.
        if group is None:
            raise
        group.announce_failure(_failed_microbatch(error), error)
        heard = _failure_of_another_rank(error)
        if heard is None or heard is error:
            raise
        # A microbatch met it, but it is no failure of that microbatch.
        raise RankFailedError(heard.rank, heard.microbatch, heard.reason) from error


def _failed_microbatch(error: BaseException) -> int | None:
    if isinstance(error, MicrobatchFailed):
        return error.index
    return error.owner if isinstance(error, ReceiveHookError) else None


def _failure_of_another_rank(error: BaseException | None) -> RankFailedError | None:
    while error is not None and not isinstance(error, RankFailedError):
        error = error.__cause__
    return error
