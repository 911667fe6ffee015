"""The all-to-all between ranks over torch.distributed: gloo on CPUs, NCCL on GPUs.

One message goes to each rank. A token is in it at most once, whichever and however many of that rank's experts it
chose: its hidden row, and for each choice the local expert or -1. Back come the experts' outputs, one row for each
choice (`all2all` says why), and the routing weights never travel.

Two modes. With `capacity=None` messages have their exact sizes. Ranks tell each other the row counts first, in a small
gather that *blocks the host* in the send part, on a GPU also for the routing itself. With a capacity, messages are
padded to that many tokens for each pair of ranks, nothing before or in the send parts blocks the host, and their shapes
depend on nothing but the capacity. With `static_shapes`, which a capacity on a GPU brings, the experts get
`PaddedTokens` of capacity x ranks rows each, and the host reads nothing at all: the step can be captured into a graph.

A microbatch of T tokens sends at most T rows to one rank, so a capacity of the largest microbatch always suffices, and
the token count alone decides whether a microbatch is refused. A smaller capacity, for the expected share of a rank, was
rejected: it would fail or drop tokens depending on the data, and checking would make the host wait for the GPU.

The tensors of a message live until the combined result was read, and longer than the microbatch that began it if that
one is unwound: the process group holds them while it works on them. Where they are read on another stream than the one
they were made on, the latter waits for the former. `Tensor.record_stream` was rejected: in a captured graph it keeps
the memory for as long as the graph lives.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..devices.cuda import cuda_device
from ..errors import BrokenGroupError, ConfigurationError
from ..ranks import RankGroup
from . import DispatchedTokens, PaddedTokens
from .errors import CapacityExceededError
from .routing import InOrder, check_inputs, experts_per_rank, group_by_expert, place_by_expert, sum_choices

__all__ = ["TorchDistributed"]

# Parts of a message begin at multiples of this many bytes, so that each can be viewed in its own dtype.
_ALIGNMENT = 16
# Of a local expert in a message.
_ID = torch.int32


class TorchDistributed:
    """An `AllToAll` over the ranks of `group`; `capacity` is the largest number of tokens of a microbatch, or None.

    `capacity` may be set between steps, to the same number on every rank; a dispatch keeps the one it began with.
    `static_shapes` is whether a dispatch with a capacity gives `PaddedTokens`; None is yes on a GPU, where counting
    rows makes the host wait, and no on a CPU, where it costs nothing and padding costs products.

    It works across `group.reset()`. A graph captured before one does not: it holds a communicator that the reset threw
    away, and `replaying` refuses it. NCCL waits with the end of a communicator, also with an abort, until the graphs
    that captured it are gone: drop them before the group is reset or closed.

    Raises `ConfigurationError` if the experts do not divide among the ranks or the capacity is not positive.
    """

    def __init__(
        self, group: RankGroup, num_experts: int, capacity: int | None = None, *, static_shapes: bool | None = None
    ) -> None:
        self.group = group
        self.num_experts = num_experts
        self.num_local_experts = experts_per_rank(num_experts, group.world_size)
        on_gpu = group.device.type == "cuda"
        self.name = "torch_distributed:" + ("nccl" if on_gpu else "gloo")
        self.static_shapes = on_gpu if static_shapes is None else static_shapes
        # Only for a GPU, where the parts of a dispatch may run on different streams.
        self.events: Any = cuda_device(group.device.index or 0).event_pool if on_gpu else None
        self._expected: int | None = None
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

    def expect_tokens(self, most: int | None) -> None:
        """See `AllToAll.expect_tokens`; without a capacity there is nothing to make smaller."""
        self._expected = most

    @property
    def message_tokens(self) -> int | None:
        """Tokens of a padded message: the capacity, or what is expected where that is less."""
        if self._capacity is None or self._expected is None:
            return self._capacity
        return max(1, min(self._capacity, self._expected))

    @property
    def not_capturable(self) -> str | None:
        if self._capacity is None:
            return "an all-to-all without a capacity tells row counts on the host"
        return None if self.static_shapes else "an all-to-all without static shapes reads row counts on the host"

    def begin_capture(self) -> None:
        """Nothing to note."""

    def replay_token(self) -> int:
        """The generation of the group, whose communicator the graph holds."""
        return self.group.generation

    def replaying(self, token: int) -> None:
        """Raises `BrokenGroupError` for a graph from before a reset, which threw its communicator away."""
        self.group.check()
        if token != self.group.generation:
            raise BrokenGroupError("a graph that was captured before the group was reset; capture it again")

    def reserve_sms(self) -> AbstractContextManager[None]:
        """Nothing: how many NCCL takes is settled when its communicator is made (NCCL_MAX_NCHANNELS)."""
        return nullcontext()

    def close(self) -> None:
        """It holds nothing; the group is the caller's."""

    def dispatch_send(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> TorchDispatch:
        """See `AllToAll.dispatch_send`. With `capacity=None` it blocks until every rank has called it.

        Also raises `CapacityExceededError`, and `RankFailedError` or `BrokenGroupError` if a rank failed.
        """
        check_inputs(hidden, topk_ids, topk_weights, self.num_experts)
        capacity = self.message_tokens
        if capacity is not None and hidden.shape[0] > capacity:
            raise CapacityExceededError(hidden.shape[0], capacity)
        return TorchDispatch(self, hidden, topk_ids, topk_weights)


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

    def __init__(self, all_to_all: TorchDistributed, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> None:
        super().__init__()
        group, capacity = all_to_all.group, all_to_all.message_tokens
        num_local_experts = all_to_all.num_local_experts
        self.bytes_sent = 0
        self._all_to_all = all_to_all
        self._group = group
        self._num_local_experts = num_local_experts
        self._exact = capacity is None
        self._padded = capacity is not None and all_to_all.static_shapes
        self._made_on = self._current_stream()
        self._choices = topk_ids.shape[1]
        self._width = hidden.shape[1]
        self._dtype = hidden.dtype
        self._experts_at = _aligned(self._width * self._dtype.itemsize)
        self._weights = topk_weights.clone()

        owner = torch.div(topk_ids, num_local_experts, rounding_mode="floor")  # [T, K]; -1 stays -1
        local = topk_ids % num_local_experts
        if capacity is None:
            rows, message = self._exact_message(hidden.detach(), owner, local)
        else:
            rows, message = self._padded_message(hidden.detach(), owner, local, capacity)
        self._received = message.new_empty(rows.received, message.shape[1])
        self._send(rows, message, self._received)

    def _exact_message(self, hidden: Tensor, owner: Tensor, local: Tensor) -> tuple[_Rows, Tensor]:
        """A row for each token and rank that it goes to, by rank and then by token. Blocks the host.

        `owner` and `local` [T, K]: the rank of a choice, or -1 for none, and its expert there.
        """
        group, world = self._group, self._group.world_size
        ranks = torch.arange(world, device=owner.device)
        chosen = owner.unsqueeze(0) == ranks.view(-1, 1, 1)  # [W, T, K]
        goes = chosen.any(dim=2)  # [W, T]
        counts = torch.stack([goes.sum(1), chosen.sum((1, 2))])  # tokens and choices for each rank
        everywhere = group.exchange(counts.flatten().cpu()).view(world, 2, world)
        rows = _Rows.exact(everywhere[:, 0], group.rank)
        # Answers go the other way, real choices only: by rank, then token, then choice.
        self._answer_rows = _Rows.exact(everywhere[:, 1].T, group.rank)
        key = torch.where(owner < 0, world, owner).flatten()
        slots = torch.empty_like(key)
        slots[torch.argsort(key, stable=True)] = torch.arange(key.numel(), device=key.device)
        self._slots = torch.where(owner < 0, -1, slots.view_as(owner))

        message = self._new_message(rows.sent)
        hidden_rows, experts = self._unpack(message)
        rank, token = goes.nonzero(as_tuple=True)
        hidden_rows.copy_(hidden.index_select(0, token))
        experts.copy_(torch.where(chosen, local, -1)[rank, token])
        return rows, message

    def _padded_message(self, hidden: Tensor, owner: Tensor, local: Tensor, capacity: int) -> tuple[_Rows, Tensor]:
        """Row t of what each rank gets is token t, also where no expert of the rank wants it: room there is anyway."""
        world, tokens = self._group.world_size, hidden.shape[0]
        rows = _Rows.padded(capacity, world)
        # Every row comes back with all its choices, real or not.
        self._answer_rows = _Rows.padded(capacity * self._choices, world)
        choice = torch.arange(owner.numel(), device=owner.device).view_as(owner)
        self._slots = (owner * (capacity * self._choices)).add_(choice).masked_fill_(owner < 0, -1)

        message = self._new_message(rows.sent)
        hidden_rows, experts = (view.unflatten(0, (world, capacity)) for view in self._unpack(message))
        ranks = torch.arange(world, device=owner.device).view(-1, 1, 1)
        hidden_rows[:, :tokens].copy_(hidden)
        experts[:, :tokens].copy_(torch.where(owner == ranks, local, -1))
        experts[:, tokens:].fill_(-1)
        return rows, message

    def _new_message(self, rows: int) -> Tensor:
        """uint8 [rows, bytes of a row]: a hidden row and, for each choice, the receiver's local expert or -1."""
        row_bytes = self._experts_at + _aligned(_ID.itemsize * self._choices)
        return torch.empty(rows, row_bytes, dtype=torch.uint8, device=self._weights.device)

    def _unpack(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """Views of a message: hidden rows [M, H] and local experts int32 [M, K]."""
        hidden = message[:, : self._width * self._dtype.itemsize].view(self._dtype)
        experts = message[:, self._experts_at : self._experts_at + _ID.itemsize * self._choices].view(_ID)
        return hidden, experts

    def _receive_dispatch(self) -> None:
        self._receive()

    def _read_tokens(self) -> DispatchedTokens | PaddedTokens:
        self._order_after_receive()
        hidden, experts = self._unpack(self._received)
        # The clamp changes nothing, unless a failing rank left garbage here: then a GPU must not index with it.
        local = experts.clamp(-1, self._num_local_experts - 1).to(torch.int64)
        if self._padded:
            self._places = place_by_expert(local, self._num_local_experts)
            tokens: DispatchedTokens | PaddedTokens = self._places.padded(hidden)
        else:
            local = local.flatten()
            self._group.wait_for_device()
            self._answered, counts = group_by_expert(local, self._num_local_experts)
            # Where each output goes in the combine's message. Exact: real choices only, by source, then token, then
            # choice.
            self._answer_at = ((local >= 0).cumsum(0) - 1)[self._answered] if self._exact else self._answered
            tokens = DispatchedTokens(hidden.index_select(0, self._answered // self._choices), counts)
        self._give_back_after_read()
        return tokens

    def _send_combine(self, expert_outputs: Tensor) -> None:
        if self._padded:
            answers = self._places.answered(expert_outputs)
        else:
            # Padding rows stay as they are: their slots are never read.
            answers = expert_outputs.new_empty(self._answer_rows.sent, self._width)
            answers[self._answer_at] = expert_outputs
        self._made_on = self._current_stream()
        self._answers = answers.new_empty(self._answer_rows.received, self._width)
        # As bytes: not every process group knows every dtype.
        self._send(self._answer_rows, answers.view(torch.uint8), self._answers.view(torch.uint8))

    def _receive_combine(self) -> None:
        self._receive()

    def _read_combined(self) -> Tensor:
        self._order_after_receive()
        combined = sum_choices(self._answers, self._slots, self._weights)
        self._give_back_after_read()
        return combined

    def _send(self, rows: _Rows, message: Tensor, received: Tensor) -> None:
        self._in_flight = self._group.all_to_all(received, message, rows.of, rows.to)
        self._buffers = (message, received)
        self.bytes_sent += rows.to_others * message.shape[1]

    # The three below do nothing on a CPU, and next to nothing where all parts run on one stream, as in a step.

    def _receive(self) -> None:
        self._in_flight.wait()
        self._received_on = self._current_stream()
        self._ready: torch.cuda.Event | None = None
        if self._received_on != self._made_on:
            # The receive part runs on another stream than the owner's, in a sibling that calls the hook.
            self._ready = self._all_to_all.events.take()
            self._ready.record()

    def _order_after_receive(self) -> None:
        """The current stream goes on behind the receive.

        Where the receive ran on the owner's stream and the rows are read on another, it also waits for what the owner's
        stream was given since: recording an event at every receive would make the usual case, one stream, pay for it.
        """
        current = self._current_stream()
        if self._ready is None and current != self._received_on:
            self._ready = self._all_to_all.events.take()
            self._ready.record(self._stream(self._received_on))
        if self._ready is not None:
            torch.cuda.current_stream(self._group.device).wait_event(self._ready)
            self._all_to_all.events.give_back(self._ready)
            self._ready = None

    def _give_back_after_read(self) -> None:
        """The stream that the message was made on, and on which its memory will be used again, waits for this one."""
        if self._current_stream() != self._made_on:
            event = self._all_to_all.events.take()
            event.record()
            self._stream(self._made_on).wait_event(event)
            self._all_to_all.events.give_back(event)

    def _current_stream(self) -> int:
        """The raw handle of the current stream; 0 on a CPU."""
        device = self._group.device
        if device.type != "cuda":
            return 0
        # Five microseconds less than asking for the stream's object.
        return int(torch._C._cuda_getCurrentRawStream(_index(device)))

    def _stream(self, raw: int) -> torch.cuda.Stream:
        return torch.cuda.ExternalStream(raw, device=self._group.device)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
