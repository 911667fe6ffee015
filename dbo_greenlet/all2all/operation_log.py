"""Which operations a rank did, so that after a failure the ranks can tell what each still owes the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ..errors import BrokenGroupError

__all__ = ["KEPT", "OperationLog"]

KEPT = 4096
"""How many operations one rank may be ahead of another: a step of 1000 layers with two microbatches."""


class OperationLog:
    """A number for each operation, of the last `KEPT`; `total` ran, and `captured` went into graphs instead."""

    def __init__(self) -> None:
        self.total = 0
        self.captured = 0
        self._last: deque[int] = deque(maxlen=KEPT)

    def add(self, number: int, captured: bool = False) -> None:
        """Note an operation; `number` is not negative."""
        if captured:
            self.captured += 1
        else:
            self.total += 1
            self._last.append(number)

    def extend(self, numbers: Sequence[int]) -> None:
        """Note operations that run together, those of a replayed graph."""
        self.total += len(numbers)
        self._last.extend(numbers)

    def since(self, least: int, most: int) -> list[int]:
        """The operations from the `least`-th to the `most`-th, -1 for those not done here; `most - least + 1` numbers.

        `least` and `most` are the smallest and the largest total of all ranks. Raises `BrokenGroupError`, on every rank
        alike, if they are further apart than is remembered.
        """
        if most - least > KEPT:
            raise BrokenGroupError(
                f"a rank is {most - least} operations behind another, and {KEPT} are remembered; restart all ranks"
            )
        known = list(self._last)[len(self._last) - (self.total - least) :]
        return known + [-1] * (most - least + 1 - len(known))
