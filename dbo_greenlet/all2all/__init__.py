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

**Rows.** What was received comes as `DispatchedTokens`, as many rows as there are and their numbers on the host, or as
`PaddedTokens`, a fixed number of rows for each expert and their numbers on the device. The first costs a wait for the
device in every dispatch; the second computes on rows that nobody asked for, and is what a CUDA graph needs.

**Bits.** Where the transport returns rows (`loopback`, `torch_distributed`), the experts return one row for each
(token, expert) choice, and the rank that owns the token multiplies by the routing weights and adds, in float32, in the
order of `topk_ids`. So the combined row of a token depends neither on the other tokens of the microbatch, nor on the
order of arrival, nor on how many ranks there are. Summing where the experts are would return one row per rank instead
of one per choice, and was rejected for that: the order of the additions would follow from where the experts live.
DeepEP has formats of its own; its two modules say what they add up where.

Not here: which token goes to which expert (`moe.gate`), what the experts compute (`moe.experts`), and when the parts
run (the layer that calls them, and the scheduler).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from .errors import AllToAllInputError, CapacityExceededError, PartOrderError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "AllToAll",
    "AllToAllInputError",
    "CapacityExceededError",
    "Dispatch",
    "DispatchedTokens",
    "PaddedTokens",
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


@dataclass(frozen=True)
class PaddedTokens:
    """The rows that this rank's experts have to work on, in a shape that does not depend on the routing.

    `hidden` [num_local_experts, M, H]: row m of local expert e is real where m < counts[e], and anything at all, NaN
    included, elsewhere; what the expert makes of such a row is never read. `counts` int32 or int64 [num_local_experts],
    on the device of `hidden`. A token that names one expert twice has one row there, except over DeepEP, where a token
    must name an expert at most once.
    """

    hidden: Tensor
    counts: Tensor


class Dispatch(Protocol):
    """One dispatch in flight, and the combine that answers it. Belongs to one microbatch; each part is called once."""

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent to *other* ranks so far, padding included.

        Where only the GPU knows (DeepEP): the most that it can have been.
        """

    def finish_dispatch(self) -> None:
        """Receive part of the dispatch.

        Raises `PartOrderError` if it already ran, `RankFailedError` or `BrokenGroupError` if another rank failed.
        """

    def tokens(self) -> DispatchedTokens | PaddedTokens:
        """What was received. Raises `ReceiveNotFinishedError` before `finish_dispatch`."""

    def combine_send(self, expert_outputs: Tensor) -> None:
        """Send part of the combine: `expert_outputs` in the shape, order and dtype of `tokens().hidden`.

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

    @property
    def not_capturable(self) -> str | None:
        """None where a step with it can be captured into a CUDA graph; else the reason, as a clause for a message."""

    def expect_tokens(self, most: int | None) -> None:
        """From now on no microbatch, on any rank, has more than `most` tokens; None: as many as it was made for.

        Called between steps, with the same number on every rank (their vote tells it). Where rows have static shapes
        these get smaller with it: the difference between products over the tokens of a step and over those of the
        largest step that there may be. A dispatch keeps the number it began with, a captured graph too.
        """

    def begin_capture(self) -> None:
        """The caller captures a step into a graph from here on, on the current stream."""

    def replay_token(self) -> Any:
        """What `replaying` has to know of the step captured since `begin_capture`."""

    def replaying(self, token: Any) -> None:
        """The graph with this token is launched next: called before every replay, on every rank alike.

        Raises `BrokenGroupError` if the graph cannot be replayed any more, `RankFailedError` if a rank failed.
        """

    def reserve_sms(self) -> AbstractContextManager[None]:
        """For the time of a split step: keep multiprocessors for a transport whose kernels run beside the model's.

        What was reserved is given back however the block ends. For other transports it does nothing.
        """

    def close(self) -> None:
        """Give back what it holds besides tensors; it cannot be used afterwards. Closing it twice is allowed."""

    def dispatch_send(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Dispatch:
        """Send part of the dispatch: posts the send and returns without waiting for the receive.

        `hidden` [T, H] in float32, bfloat16 or float16; `topk_ids` int64 [T, K], each an expert or -1 for none;
        `topk_weights` float32 [T, K]. T may be 0, also on some ranks only. The caller leaves the three as they are
        until the combined result was read: some transports read them again later, and copying them for the others
        would cost launches in every layer.

        Raises `AllToAllInputError` for other shapes, dtypes or (on the CPU) expert numbers.
        """
