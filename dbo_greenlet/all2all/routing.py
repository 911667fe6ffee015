"""The arithmetic that every transport shares: checks, grouping by expert, the weighted sum, and the order of the parts.

All of it works on any device. What makes the host wait for a GPU says so.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ConfigurationError, ReceiveNotFinishedError
from . import DispatchedTokens, PaddedTokens
from .errors import AllToAllInputError, PartOrderError

__all__ = [
    "ExpertPlaces",
    "InOrder",
    "check_inputs",
    "experts_per_rank",
    "group_by_expert",
    "place_by_expert",
    "sum_choices",
]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def experts_per_rank(num_experts: int, world_size: int) -> int:
    """Experts on each of `world_size` ranks; raises `ConfigurationError` unless they divide evenly."""
    if num_experts < 1 or num_experts % world_size:
        raise ConfigurationError(
            f"num_experts = {num_experts} cannot be spread evenly over {world_size} rank(s); it must be a positive "
            f"multiple of {world_size}"
        )
    return num_experts // world_size


def check_inputs(hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, num_experts: int) -> None:
    """Raises `AllToAllInputError` unless the three can be dispatched (shapes and dtypes: `AllToAll.dispatch_send`).

    Expert numbers are checked on the CPU only: on a GPU the host would have to wait for them.
    """
    if hidden.dim() != 2 or hidden.dtype not in _DTYPES:
        raise AllToAllInputError(
            f"hidden must be [tokens, hidden size] in float32, bfloat16 or float16, not {_shape(hidden)}"
        )
    if topk_ids.dim() != 2 or topk_ids.shape[0] != hidden.shape[0] or topk_ids.shape[1] < 1:
        raise AllToAllInputError(
            f"topk_ids must be [tokens, choices] with {hidden.shape[0]} tokens like hidden, not {_shape(topk_ids)}"
        )
    if topk_ids.dtype != torch.int64 or topk_weights.dtype != torch.float32:
        raise AllToAllInputError(
            f"topk_ids must be int64 and topk_weights float32, not {topk_ids.dtype} and {topk_weights.dtype}"
        )
    if topk_weights.shape != topk_ids.shape:
        raise AllToAllInputError(
            f"topk_weights must have the shape of topk_ids, {tuple(topk_ids.shape)}, not {tuple(topk_weights.shape)}"
        )
    if not hidden.device == topk_ids.device == topk_weights.device:
        raise AllToAllInputError(
            f"hidden, topk_ids and topk_weights must lie on one device, not on {hidden.device}, {topk_ids.device} and "
            f"{topk_weights.device}"
        )
    if topk_ids.device.type == "cpu" and topk_ids.numel():
        lowest, highest = (int(bound) for bound in topk_ids.aminmax())
        if lowest < -1 or highest >= num_experts:
            wrong = lowest if lowest < -1 else highest
            raise AllToAllInputError(
                f"topk_ids names expert {wrong}; it must be one of 0 to {num_experts - 1}, or -1 for none"
            )


def group_by_expert(local_ids: Tensor, num_local_experts: int) -> tuple[Tensor, Tensor]:
    """Group choices by local expert, keeping their order within each.

    `local_ids` [P]: each a local expert, or -1 for none. Returns `order` int64 [R], the positions of the choices that
    name an expert, and `counts` int64 [num_local_experts] on the CPU. On a GPU the host waits here: R is a shape.
    """
    key = torch.where(local_ids < 0, num_local_experts, local_ids)
    counts = torch.bincount(key, minlength=num_local_experts + 1)[:num_local_experts].cpu()
    order = torch.argsort(key, stable=True)[: int(counts.sum())]
    return order, counts


@dataclass(frozen=True)
class ExpertPlaces:
    """Where R rows of K choices each go among E experts of R places each; see `place_by_expert`.

    `rows` int64 [E, R]: the row in each place, 0 in places that are not taken; `counts` int64 [E]: the places taken,
    which come first; `answers` int64 [R, K]: the place, counted over all experts (e * R + m), that answers a choice, 0
    where the choice is -1.
    """

    rows: Tensor
    counts: Tensor
    answers: Tensor

    def padded(self, hidden: Tensor) -> PaddedTokens:
        """`hidden` [R, H], each row in its places."""
        experts, places = self.rows.shape
        rows = hidden.index_select(0, self.rows.flatten())
        return PaddedTokens(rows.view(experts, places, hidden.shape[1]), self.counts)

    def answered(self, outputs: Tensor) -> Tensor:
        """`outputs` [E, R, H] -> one row for each choice, [R * K, H]; anything for a choice of -1."""
        return outputs.reshape(-1, outputs.shape[-1]).index_select(0, self.answers.flatten())


def place_by_expert(local_ids: Tensor, num_local_experts: int) -> ExpertPlaces:
    """Give every expert its rows, in order, without the host learning how many: shapes follow from those of the input.

    `local_ids` [R, K]: each a local expert, or -1 for none. A row that names an expert twice has one place there, which
    answers both choices; so R places suffice for any routing.
    """
    rows, device = local_ids.shape[0], local_ids.device
    row = torch.arange(rows, device=device)
    experts = torch.arange(num_local_experts, device=device).view(-1, 1, 1)
    chosen = (local_ids == experts).any(dim=2)  # [E, R]
    place = chosen.cumsum(1) - 1
    # Rows that do not go to an expert are written to a spare place behind its last.
    placed = torch.zeros(num_local_experts, rows + 1, dtype=torch.int64, device=device)
    placed.scatter_(1, torch.where(chosen, place, rows), row.expand(num_local_experts, rows))
    local = local_ids.clamp(min=0)
    answers = torch.where(local_ids < 0, 0, local * rows + place[local, row.unsqueeze(1)])
    return ExpertPlaces(placed[:, :rows], chosen.sum(1), answers)


# Above this many elements (64 MiB in float32) the terms of all choices are not held in memory at once.
_MAX_TERMS = 1 << 24


def sum_choices(rows: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    """[T, H]: for each token the float32 sum over k, in order, of `weights[t, k] * rows[slots[t, k]]`, in rows' dtype.

    `rows` [P, H]; `slots` int64 [T, K], -1 where there is nothing to add; `weights` float32 [T, K].
    """
    total = torch.zeros(slots.shape[0], rows.shape[1], dtype=torch.float32, device=rows.device)
    if rows.shape[0] == 0:
        return total.to(rows.dtype)
    # A multiplication and an addition per choice, each correctly rounded, so that a token's bits do not depend on where
    # it lies in the tensor. addcmul may fuse the two in some vector lanes and not in others; a matrix product or
    # sum() may take the choices in another order; index_add_ adds in the order of arrival.
    if total.numel() * slots.shape[1] <= _MAX_TERMS:
        # The same numbers in fewer launches.
        for term in _terms(rows, slots, weights).unbind(1):
            total += term
    else:
        for k in range(slots.shape[1]):
            total += _terms(rows, slots[:, k : k + 1], weights[:, k : k + 1]).squeeze(1)
    return total.to(rows.dtype)


def _terms(rows: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    """float32 [T, K, H]: the products that `sum_choices` adds, 0 where there is nothing to add."""
    chosen = rows.index_select(0, slots.clamp(min=0).flatten()).view(*slots.shape, rows.shape[1])
    return (chosen.to(torch.float32) * weights.unsqueeze(2)).masked_fill_(slots.unsqueeze(2) < 0, 0.0)


_SENT, _RECEIVED, _COMBINE_SENT, _COMBINED = range(4)


class InOrder(ABC):
    """One dispatch, with its parts kept in order; the transport fills in the five underscored parts.

    A part that fails leaves the dispatch where it was.
    """

    def __init__(self) -> None:
        self._stage = _SENT
        self._tokens: DispatchedTokens | PaddedTokens | None = None
        self._result: Tensor | None = None

    def finish_dispatch(self) -> None:
        if self._stage != _SENT:
            raise PartOrderError("finish_dispatch was called twice for one dispatch")
        self._receive_dispatch()
        self._stage = _RECEIVED

    def tokens(self) -> DispatchedTokens | PaddedTokens:
        if self._stage == _SENT:
            raise ReceiveNotFinishedError(
                "tokens() was read before finish_dispatch(); run the receive hook of this dispatch first"
            )
        if self._tokens is None:
            self._tokens = self._read_tokens()
        return self._tokens

    def combine_send(self, expert_outputs: Tensor) -> None:
        if self._stage == _SENT:
            raise ReceiveNotFinishedError(
                "combine_send() was called before finish_dispatch(); run the receive hook of this dispatch first"
            )
        if self._stage != _RECEIVED:
            raise PartOrderError("combine_send was called twice for one dispatch")
        hidden = self.tokens().hidden
        if expert_outputs.shape != hidden.shape or expert_outputs.dtype != hidden.dtype:
            raise AllToAllInputError(
                f"expert outputs must be like the rows received, {_shape(hidden)}, not {_shape(expert_outputs)}"
            )
        self._send_combine(expert_outputs)
        self._stage = _COMBINE_SENT

    def finish_combine(self) -> None:
        if self._stage < _COMBINE_SENT:
            raise PartOrderError("finish_combine was called before combine_send")
        if self._stage == _COMBINED:
            raise PartOrderError("finish_combine was called twice for one dispatch")
        self._receive_combine()
        self._stage = _COMBINED

    def combined(self) -> Tensor:
        if self._stage != _COMBINED:
            raise ReceiveNotFinishedError(
                "combined() was read before finish_combine(); run the receive hook of this combine first"
            )
        if self._result is None:
            self._result = self._read_combined()
        return self._result

    @abstractmethod
    def _receive_dispatch(self) -> None:
        """Wait until the rows for this rank's experts are here."""

    @abstractmethod
    def _read_tokens(self) -> DispatchedTokens | PaddedTokens:
        """Group what was received; called once."""

    @abstractmethod
    def _send_combine(self, expert_outputs: Tensor) -> None:
        """Post the send of the outputs, without waiting; called with checked tensors."""

    @abstractmethod
    def _receive_combine(self) -> None:
        """Wait until the outputs for this rank's tokens are here."""

    @abstractmethod
    def _read_combined(self) -> Tensor:
        """Sum the choices; called once."""


def _shape(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"
