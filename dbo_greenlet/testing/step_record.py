"""What a step decided, written down while it runs: also of one that an exception of the test runner cuts off."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..schedule import Schedule

if TYPE_CHECKING:
    from ..step import Microbatch, Step

__all__ = ["StepRecord"]


class StepRecord:
    """An instrument. `schedule()` has one decision more than sites where a slice did not come to its end."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._decisions: list[int] = []
        self._sites: list[str] = []

    def before_step(self, step: Step) -> None:
        self._count = step.count

    def before_slice(self, microbatch: Microbatch) -> None:
        self._decisions.append(microbatch.index)

    def after_slice(self, microbatch: Microbatch) -> None:
        self._sites.append(microbatch.site)

    def schedule(self) -> Schedule:
        """The decisions so far."""
        return Schedule(self._count, tuple(self._decisions), tuple(self._sites))
