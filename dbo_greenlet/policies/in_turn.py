"""All of microbatch 0, then all of microbatch 1, and so on: the order without any overlap, under the scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..policy import Chooser
    from ..step import Step

__all__ = ["InTurn"]


class InTurn:
    """One microbatch after the other.

    Every yield comes straight back, so each microbatch completes its own receives. What it costs more than the same
    microbatches without a scheduler is what the yields cost; and it is the order that others are shrunk towards.
    """

    name = "in_turn"

    def start(self, step: Step) -> Chooser:
        microbatches = step.microbatches

        def choose() -> int:
            return next(index for index, microbatch in enumerate(microbatches) if not microbatch.done)

        return choose

    def __repr__(self) -> str:
        return "InTurn()"
