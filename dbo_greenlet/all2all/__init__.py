"""The expert all-to-all: what a Mixture-of-Experts layer asks of it, whichever transport is below.

A layer sends its tokens to the ranks that hold their experts (*dispatch*) and gets the experts' outputs back
(*combine*). Each of the two is a *send part*, which returns without waiting, and a *receive part*, which makes the
result visible and may block; between them the other microbatch computes. The parts of one dispatch, in order:

    sent = all_to_all.dispatch_send(hidden, topk_ids, topk_weights)     send part of the dispatch
    sent.finish_dispatch()                                              receive part: the recv hook
    tokens = sent.tokens()                                              rows for this rank's experts
    sent.combine_send(expert_outputs)                                   send part of the combine
    sent.finish_combine()                                               receive part: the recv hook
    out = sent.combined()                                               [tokens, hidden size]

Experts lie in contiguous blocks: expert `e` lives on rank `e // num_local_experts`. Every rank must call the send
parts in the same order; a schedule that is a function of the inputs alone (law 5) sees to that.

**Bits.** The experts return one row for each (token, expert) choice, and the rank that owns the token multiplies by
the routing weights and adds, in float32, in the order of `topk_ids`. So the combined row of a token depends neither on
the other tokens of the microbatch, nor on the order of arrival, nor on how many ranks there are. Summing where the
experts are would return one row per rank instead of one per choice, and was rejected for that: the order of the
additions would follow from where the experts live.

Not here: which token goes to which expert (`moe.gate`), what the experts compute (`moe.experts`), and when the parts
run (the layer that calls them, and the scheduler).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from .errors import AllToAllInputError, CapacityExceededError, PartOrderError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "AllToAll",
    "AllToAllInputError",
    "CapacityExceededError",
    "Dispatch",
    "DispatchedTokens",
    "PartOrderError",
]


@dataclass(frozen=True)
class DispatchedTokens:
    """The rows that this rank's experts have to work on.

    `hidden` [R, H]: one row for each (token, choice) pair that names one of them, grouped by local expert, and within
    one expert in the order (source rank, token, choice). `counts` int64 [num_local_experts], on the CPU: how many rows
    each local expert has; their sum is R. A token that names one expert twice has two rows.
    """

    hidden: Tensor
    counts: Tensor


class Dispatch(Protocol):
    """One dispatch in flight, and the combine that answers it. Belongs to one microbatch; each part is called once."""

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent to *other* ranks so far, padding included."""

    def finish_dispatch(self) -> None:
        """Receive part of the dispatch.

        Raises `PartOrderError` if it already ran, `RankFailedError` or `BrokenGroupError` if another rank failed.
        """

    def tokens(self) -> DispatchedTokens:
        """What was received. Raises `ReceiveNotFinishedError` before `finish_dispatch`."""

    def combine_send(self, expert_outputs: Tensor) -> None:
        """Send part of the combine: `expert_outputs` [R, H] in the order and dtype of `tokens().hidden`.

        Raises `ReceiveNotFinishedError` before `finish_dispatch`, `PartOrderError` if it already ran,
        `AllToAllInputError` for another shape or dtype, `RankFailedError` or `BrokenGroupError` if another rank failed.
        """

    def finish_combine(self) -> None:
        """Receive part of the combine.

        Raises `PartOrderError` if it already ran or before `combine_send`, `RankFailedError` or `BrokenGroupError` if
        another rank failed.
        """

    def combined(self) -> Tensor:
        """[T, H] in the dtype of `hidden`: for each token, the sum over its choices of weight x expert output.

        A choice of -1 adds nothing. Raises `ReceiveNotFinishedError` before `finish_combine`.
        """


class AllToAll(Protocol):
    """A transport between the ranks of one expert-parallel group."""

    @property
    def name(self) -> str:
        """What a trace calls it."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def num_experts(self) -> int: ...

    @property
    def num_local_experts(self) -> int: ...

    def dispatch_send(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Dispatch:
        """Send part of the dispatch: posts the send and returns without waiting for the receive.

        `hidden` [T, H] in float32, bfloat16 or float16; `topk_ids` int64 [T, K], each an expert or -1 for none;
        `topk_weights` float32 [T, K]. T may be 0, also on some ranks only. The three are read before it returns: the
        caller may overwrite them.

        Raises `AllToAllInputError` for other shapes, dtypes or (on the CPU) expert numbers.
        """
