"""The all-to-all of one rank: every expert is local, and sending is a copy.

It keeps the same parts, order and errors as a transport between ranks, so that a model, a schedule or a test can be
run on one rank first and only the transport changes after that.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from . import DispatchedTokens, PaddedTokens
from .routing import InOrder, check_inputs, experts_per_rank, group_by_expert, place_by_expert, sum_choices

__all__ = ["Loopback"]


class Loopback:
    """An `AllToAll` of one rank that holds all of `num_experts` experts.

    With `static_shapes` a dispatch gives `PaddedTokens` with T rows for each expert and reads nothing on the host, so
    that a step on a GPU can be captured into a graph; without, the exact rows.

    Raises `ConfigurationError` if `num_experts` is not positive.
    """

    name = "loopback"
    rank = 0
    world_size = 1

    def __init__(self, num_experts: int, *, static_shapes: bool = False) -> None:
        self.num_experts = num_experts
        self.num_local_experts = experts_per_rank(num_experts, 1)
        self.static_shapes = static_shapes

    @property
    def not_capturable(self) -> str | None:
        return None if self.static_shapes else "the loopback without static shapes reads row counts on the host"

    def expect_tokens(self, most: int | None) -> None:
        """Nothing to do: there are no tokens but this rank's."""

    def begin_capture(self) -> None:
        """Nothing to note."""

    def replay_token(self) -> None:
        """Nothing to know."""

    def replaying(self, token: Any) -> None:
        """Nothing to do: a replay is like any other."""

    def reserve_sms(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        """It holds nothing."""

    def dispatch_send(
        self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor
    ) -> LoopbackDispatch | PaddedLoopbackDispatch:
        check_inputs(hidden, topk_ids, topk_weights, self.num_experts)
        kind = PaddedLoopbackDispatch if self.static_shapes else LoopbackDispatch
        return kind(hidden, topk_ids, topk_weights, self.num_experts)


class LoopbackDispatch(InOrder):
    """One dispatch of `Loopback` with exact rows; see `Dispatch`."""

    bytes_sent = 0

    def __init__(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, num_experts: int) -> None:
        super().__init__()
        choices = topk_ids.shape[1]
        self._order, counts = group_by_expert(topk_ids.flatten(), num_experts)
        self._in_flight = DispatchedTokens(hidden.index_select(0, self._order // choices), counts)
        # The row of choice k of token t comes back to place t * choices + k.
        place = torch.arange(topk_ids.numel(), device=topk_ids.device).view_as(topk_ids)
        self._slots = torch.where(topk_ids < 0, -1, place)
        self._weights = topk_weights.clone()

    def _receive_dispatch(self) -> None:
        """Nothing to wait for: the copy is made by the send part."""

    def _read_tokens(self) -> DispatchedTokens:
        return self._in_flight

    def _send_combine(self, expert_outputs: Tensor) -> None:
        # Places of choices of -1 stay as they are; sum_choices never reads them.
        self._returned = expert_outputs.new_empty(self._slots.numel(), expert_outputs.shape[1])
        self._returned[self._order] = expert_outputs

    def _receive_combine(self) -> None:
        """Nothing to wait for: the copy is made by the send part."""

    def _read_combined(self) -> Tensor:
        return sum_choices(self._returned, self._slots, self._weights)


class PaddedLoopbackDispatch(InOrder):
    """One dispatch of `Loopback` with static shapes; see `Dispatch`."""

    bytes_sent = 0

    def __init__(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, num_experts: int) -> None:
        super().__init__()
        places = place_by_expert(topk_ids, num_experts)
        self._in_flight = places.padded(hidden)
        self._slots = torch.where(topk_ids < 0, -1, places.answers)
        self._weights = topk_weights.clone()

    def _receive_dispatch(self) -> None:
        """Nothing to wait for: the copy is made by the send part."""

    def _read_tokens(self) -> PaddedTokens:
        return self._in_flight

    def _send_combine(self, expert_outputs: Tensor) -> None:
        self._returned = expert_outputs.flatten(0, 1)

    def _receive_combine(self) -> None:
        """Nothing to wait for: nothing is sent."""

    def _read_combined(self) -> Tensor:
        return sum_choices(self._returned, self._slots, self._weights)
