"""The errors of the expert all-to-all that no other room raises."""

from __future__ import annotations

from ..errors import DboError

__all__ = ["AllToAllInputError", "CapacityExceededError", "PartOrderError"]


class AllToAllInputError(DboError):
    """Tensors that cannot be dispatched or combined; the message names the tensor, what it is and what it must be."""


class CapacityExceededError(DboError):
    """A microbatch has more tokens than the agreed capacity of one message.

    Attributes: `tokens` and `capacity`.
    """

    def __init__(self, tokens: int, capacity: int) -> None:
        self.tokens = tokens
        self.capacity = capacity
        super().__init__(
            f"a microbatch of {tokens} tokens does not fit the all-to-all's capacity of {capacity} tokens for each "
            f"pair of ranks; set the capacity, on every rank alike, to the largest microbatch of the step "
            f"(the ranks' vote tells it)"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.tokens, self.capacity))


class PartOrderError(DboError):
    """A part of a dispatch was called twice, or before the part that must come first."""
