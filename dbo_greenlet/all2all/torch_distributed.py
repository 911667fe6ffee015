"""The all-to-all between ranks over torch.distributed: gloo on CPUs, NCCL on GPUs.

One message goes to each rank. A token is in it at most once, whichever and however many of that rank's experts it
chose: its hidden row, and for each choice the local expert or -1. Back come the experts' outputs, one row for each
choice (`all2all` says why), and the routing weights never travel.

Two modes. With `capacity=None` messages have their exact sizes. Ranks tell each other the row counts first, in a small
gather that *blocks the host* in the send part, on a GPU also for the routing itself. With a capacity, messages are
padded to that many tokens for each pair of ranks, nothing before or in the send parts blocks the host, and shapes
depend on nothing but the capacity. A microbatch of T tokens sends at most T rows to one rank, so a capacity of the
largest microbatch always suffices, and the token count alone decides whether a microbatch is refused. A smaller
capacity, for the expected share of a rank, was rejected: it would fail or drop tokens depending on the data, and
checking would make the host wait for the GPU.

The tensors of a message live until the combined result was read, and longer than the microbatch that began it if that
one is unwound: the process group holds them while it works on them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ConfigurationError
from ..ranks import RankGroup
from . import DispatchedTokens
from .errors import CapacityExceededError
from .routing import InOrder, check_inputs, experts_per_rank, group_by_expert, sum_choices

__all__ = ["TorchDistributed"]

# Parts of a message begin at multiples of this many bytes, so that each can be viewed in its own dtype.
_ALIGNMENT = 16
# Of a local expert in a message.
_ID = torch.int32


class TorchDistributed:
    """An `AllToAll` over the ranks of `group`; `capacity` is the largest number of tokens of a microbatch, or None.

    `capacity` may be set between steps, to the same number on every rank; a dispatch keeps the one it began with.
    It works across `group.reset()`. Raises `ConfigurationError` if the experts do not divide among the ranks or the
    capacity is not positive.
    """

    def __init__(self, group: RankGroup, num_experts: int, capacity: int | None = None) -> None:
        self.group = group
        self.num_experts = num_experts
        self.num_local_experts = experts_per_rank(num_experts, group.world_size)
        self.name = "torch_distributed:" + ("nccl" if group.device.type == "cuda" else "gloo")
        self._capacity: int | None = None
        self.capacity = capacity

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def world_size(self) -> int:
        return self.group.world_size

    @property
    def capacity(self) -> int | None:
        return self._capacity

    @capacity.setter
    def capacity(self, tokens: int | None) -> None:
        if tokens is not None and tokens < 1:
            raise ConfigurationError(f"capacity = {tokens} tokens; it must be positive, or None for exact messages")
        self._capacity = tokens

    def dispatch_send(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> TorchDispatch:
        """See `AllToAll.dispatch_send`. With `capacity=None` it blocks until every rank has called it.

        Also raises `CapacityExceededError`, and `RankFailedError` or `BrokenGroupError` if a rank failed.
        """
        check_inputs(hidden, topk_ids, topk_weights, self.num_experts)
        if self._capacity is not None and hidden.shape[0] > self._capacity:
            raise CapacityExceededError(hidden.shape[0], self._capacity)
        return TorchDispatch(self.group, self.num_local_experts, self._capacity, hidden, topk_ids, topk_weights)


@dataclass(frozen=True)
class _Rows:
    """How many rows of one message go to and come from each rank.

    `to` and `of` list them, or are empty where the message is padded: for the process group that is an even share.
    """

    to: list[int]
    of: list[int]
    sent: int
    received: int
    to_others: int

    @staticmethod
    def exact(counts: Tensor, rank: int) -> _Rows:
        """`counts` int64 [W, W] on the CPU: rows from each rank (first index) to each rank."""
        to, of = counts[rank].tolist(), counts[:, rank].tolist()
        return _Rows(to, of, sum(to), sum(of), sum(to) - to[rank])

    @staticmethod
    def padded(each: int, world_size: int) -> _Rows:
        return _Rows([], [], each * world_size, each * world_size, each * (world_size - 1))


class TorchDispatch(InOrder):
    """One dispatch of `TorchDistributed`; see `Dispatch`."""

    def __init__(
        self,
        group: RankGroup,
        num_local_experts: int,
        capacity: int | None,
        hidden: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
    ) -> None:
        super().__init__()
        self.bytes_sent = 0
        self._group = group
        self._num_local_experts = num_local_experts
        self._exact = capacity is None
        self._choices = topk_ids.shape[1]
        self._width = hidden.shape[1]
        self._dtype = hidden.dtype
        self._experts_at = _aligned(self._width * self._dtype.itemsize)
        self._weights = topk_weights.clone()

        ranks = torch.arange(group.world_size, device=topk_ids.device)
        owner = torch.div(topk_ids, num_local_experts, rounding_mode="floor")  # [T, K]; -1 stays -1
        chosen = owner.unsqueeze(1) == ranks.unsqueeze(1)  # [T, W, K]
        goes = chosen.any(dim=2)  # [T, W]
        if capacity is None:
            counts = torch.stack([goes.sum(0), chosen.sum((0, 2))])  # tokens and choices for each rank
            everywhere = group.exchange(counts.flatten().cpu()).view(group.world_size, 2, group.world_size)
            rows = _Rows.exact(everywhere[:, 0], group.rank)
            # Answers go the other way.
            self._answer_rows = _Rows.exact(everywhere[:, 1].T, group.rank)
            first = counts[0].cumsum(0) - counts[0]
        else:
            rows = _Rows.padded(capacity, group.world_size)
            self._answer_rows = _Rows.padded(capacity * self._choices, group.world_size)
            first = ranks * capacity
        # The message row of each token for each rank [T, W]; one past the end, which is not sent, if it does not go.
        row = torch.where(goes, first + goes.cumsum(0) - 1, rows.sent)
        self._slots = self._slots_of_answers(owner, row)

        local = torch.where(chosen, (topk_ids % num_local_experts).unsqueeze(1), -1)
        message = self._pack(hidden.detach(), local, row, rows.sent)
        self._received = message.new_empty(rows.received, message.shape[1])
        self._send(rows, message, self._received)

    def _slots_of_answers(self, owner: Tensor, row: Tensor) -> Tensor:
        """[T, K]: the row of the combine's message in which the output for a choice comes back, or -1 for none."""
        if self._exact:
            # Only real choices come back: by rank, then token, then choice.
            key = torch.where(owner < 0, self._group.world_size, owner).flatten()
            slots = torch.empty_like(key)
            slots[torch.argsort(key, stable=True)] = torch.arange(key.numel(), device=key.device)
            slots = slots.view_as(owner)
        else:
            # Every row of the dispatch comes back with all its choices, real or not.
            choice = torch.arange(self._choices, device=owner.device)
            slots = row.gather(1, owner.clamp(min=0)) * self._choices + choice
        return torch.where(owner < 0, -1, slots)

    def _pack(self, hidden: Tensor, local: Tensor, row: Tensor, sent: int) -> Tensor:
        """The message, uint8 [sent, bytes of a row]: hidden rows and, for each choice, the receiver's local expert.

        `local` [T, W, K]: the local expert at the rank, or -1; `row` [T, W].
        """
        tokens, world = row.shape
        row_bytes = self._experts_at + _aligned(_ID.itemsize * self._choices)
        message = torch.empty(sent + 1, row_bytes, dtype=torch.uint8, device=hidden.device)
        hidden_rows, experts = self._unpack(message)
        experts.fill_(-1)
        if tokens:
            # Padding rows carry token 0: any row does, as no choice of it is real.
            token_of_row = torch.zeros(sent + 1, dtype=torch.int64, device=row.device)
            token = torch.arange(tokens, device=row.device).unsqueeze(1).expand(tokens, world)
            token_of_row[row] = token
            hidden_rows.copy_(hidden.index_select(0, token_of_row))
            experts[row] = local.to(_ID)
        return message[:sent]

    def _unpack(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """Views of a message: hidden rows [M, H] and local experts int32 [M, K]."""
        hidden = message[:, : self._width * self._dtype.itemsize].view(self._dtype)
        experts = message[:, self._experts_at : self._experts_at + _ID.itemsize * self._choices].view(_ID)
        return hidden, experts

    def _receive_dispatch(self) -> None:
        self._receive()

    def _read_tokens(self) -> DispatchedTokens:
        self._order_after_receive()
        hidden, experts = self._unpack(self._received)
        # The clamp changes nothing, unless a failing rank left garbage here: then a GPU must not index with it.
        local = experts.flatten().clamp(-1, self._num_local_experts - 1).to(torch.int64)
        self._group.wait_for_device()
        self._answered, counts = group_by_expert(local, self._num_local_experts)
        # Where each output goes in the combine's message. Exact: real choices only, by source, then token, then choice.
        self._answer_at = ((local >= 0).cumsum(0) - 1)[self._answered] if self._exact else self._answered
        return DispatchedTokens(hidden.index_select(0, self._answered // self._choices), counts)

    def _send_combine(self, expert_outputs: Tensor) -> None:
        # Padding rows stay as they are: their slots are never read.
        answers = expert_outputs.new_empty(self._answer_rows.sent, self._width)
        answers[self._answer_at] = expert_outputs
        self._answers = answers.new_empty(self._answer_rows.received, self._width)
        # As bytes: not every process group knows every dtype.
        self._send(self._answer_rows, answers.view(torch.uint8), self._answers.view(torch.uint8))

    def _receive_combine(self) -> None:
        self._receive()

    def _read_combined(self) -> Tensor:
        self._order_after_receive()
        return sum_choices(self._answers, self._slots, self._weights)

    def _send(self, rows: _Rows, message: Tensor, received: Tensor) -> None:
        self._in_flight = self._group.all_to_all(received, message, rows.of, rows.to)
        self._buffers = (message, received)
        self.bytes_sent += rows.to_others * message.shape[1]

    def _receive(self) -> None:
        self._in_flight.wait()
        if self._group.device.type == "cuda":
            # The receive part may run on another stream than the owner's, in a sibling that calls the hook.
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(self._group.device))

    def _order_after_receive(self) -> None:
        if self._group.device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self._group.device)
        stream.wait_event(self._ready)
        for buffer in self._buffers:
            # Made on the stream of the send and used on this one: keep the allocator from giving them away too early.
            buffer.record_stream(stream)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
