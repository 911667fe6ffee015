"""The all-to-all over DeepEP's high-throughput kernels: exact rows, on DeepEP's own stream, with counts on the host.

A dispatch must know how many rows come before it can allocate them, and DeepEP finds out by letting the host wait for
the GPU. So the parts are these:

* `dispatch_send` captures an event on the compute stream and launches nothing. The event stands before the yield: what
  comes later waits for this microbatch's work only (law 4).
* `finish_dispatch`, the recv hook, launches the layout and the dispatch behind that event on DeepEP's stream and blocks
  the host until the counts are here. The sibling runs it after it has enqueued its own compute, right before its own
  send, so that the GPU has work while the host waits.
* `combine_send` adds up the outputs of this rank's experts for each received row, in float32 and in the order of
  `topk_ids`, rounds to bfloat16, captures an event and launches DeepEP's combine behind it. `finish_combine` does
  nothing: `combined` makes the stream wait.

**Bits.** A token's row is the sum, in float32 and in the order of the ranks, of one bfloat16 row from each rank that
holds experts of it. So it depends on where the experts live, unlike a transport that returns a row for each choice.

**No graph.** A captured step cannot read counts on the host. DeepEP can be given the worst case instead of the counts
(`num_worst_tokens`), and every rank then computes on as many rows as all ranks together have tokens: what these kernels
are there to avoid. For graphs use the low-latency kernels.

**Failures.** DeepEP's wait for the counts cannot be interrupted for 100 s. So the ranks meet before each dispatch, in a
small gather on the host that notices a rank that failed, died or stalled, and that costs each dispatch a round trip
between the ranks. What it cannot catch is a rank that dies between the meeting and its own kernels: the others then sit
in DeepEP for up to 100 s.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import BrokenGroupError, ConfigurationError
from ..ranks import RankGroup
from . import DispatchedTokens
from .deepep import TOO_LATE, DeepEPTransport, check_group, check_hidden, import_deep_ep, make_buffer, meet
from .routing import InOrder, sum_choices

__all__ = ["MAX_CHOICES", "MAX_HIDDEN", "DeepEPHighThroughput", "HighThroughputDispatch"]

MAX_CHOICES = 32
"""The most experts of one token that the kernels take: one lane of a warp each."""

HIGH_THROUGHPUT_RANKS = (2, 4, 8)
"""Numbers of ranks for which there are kernels within one node. More go between nodes, which never ran here."""

HIDDEN_MULTIPLE, MAX_HIDDEN = 16, 8176
"""Row widths in elements: half a row, in pieces of 16 bytes, must fit 8 KiB of shared memory beside a barrier."""


class DeepEPHighThroughput(DeepEPTransport):
    """An `AllToAll` over DeepEP's high-throughput kernels within one node, bfloat16 only.

    `hidden_size` is the width of a row in elements. `num_sms`, even, is how many multiprocessors DeepEP's kernels take
    inside `reserve_sms()`; outside it is DeepEP's own number. All are the same on every rank, and a token names an
    expert at most once. Making one blocks until every rank does.

    It works across `group.reset()`: the first dispatch after one runs the combines that a rank still owes the others.

    Raises `ConfigurationError` if DeepEP is missing or of another version, or the numbers are not ones that it takes;
    `RankFailedError` if a rank fails meanwhile.
    """

    name = "deepep_high_throughput"
    short = "ht"
    not_capturable = "DeepEP's high-throughput dispatch reads row counts on the host"

    def __init__(self, group: RankGroup, num_experts: int, hidden_size: int, *, num_sms: int = 20) -> None:
        check_group(group, "DeepEP high throughput", HIGH_THROUGHPUT_RANKS)
        super().__init__(group, num_experts)
        if not 0 < hidden_size <= MAX_HIDDEN or hidden_size % HIDDEN_MULTIPLE:
            raise ConfigurationError(
                f"hidden size {hidden_size}: DeepEP's high-throughput kernels take multiples of {HIDDEN_MULTIPLE} "
                f"up to {MAX_HIDDEN}"
            )
        available = torch.cuda.get_device_properties(group.device).multi_processor_count
        if num_sms < 2 or num_sms % 2 or num_sms >= available:
            raise ConfigurationError(
                f"num_sms = {num_sms}: DeepEP takes an even number of the {available} multiprocessors, at least 2, and "
                "some must be left for the model"
            )
        self.hidden_size = hidden_size
        self.num_sms = num_sms
        deep_ep = import_deep_ep()
        meet(group, "ht new", [])
        self._type: Any = deep_ep.Buffer
        self._sms: int = self._type.num_sms
        self._configs = {sms: self._configs_for(sms) for sms in {self._sms, num_sms}}
        row_bytes = hidden_size * 2
        size = max(
            config.get_nvl_buffer_size_hint(row_bytes, group.world_size)
            for pair in self._configs.values()
            for config in pair
        )
        self.buffer = make_buffer(deep_ep, group, num_nvl_bytes=size)
        self._dispatches = 0
        # Dispatches without a combine so far, by number: what settling needs of them.
        self._open: dict[int, _Open] = {}

    def dispatch_send(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> HighThroughputDispatch:
        """See `AllToAll.dispatch_send`. Raises `RankFailedError` or `BrokenGroupError` if a rank failed."""
        check_hidden(hidden, topk_ids, topk_weights, self.num_experts, self.hidden_size, MAX_CHOICES)
        self.make_ready()
        return HighThroughputDispatch(self, hidden, topk_ids, topk_weights)

    def expect_tokens(self, most: int | None) -> None:
        """Nothing to do: rows are exact."""

    @contextmanager
    def reserve_sms(self) -> Iterator[None]:
        """Keep `num_sms` multiprocessors for DeepEP: it uses as many, and torch asks products to leave them free.

        For the time of a split step, on every rank alike; both are as before afterwards, whatever happens inside. A
        dispatch is combined with as many as it began with. torch is told by `_set_sm_carveout_experimental`, which it
        has from 2.7 on and passes to cuBLASLt; products that do not go through that may still use all of them.
        """
        before, set_carve_out = self._sms, getattr(torch._C, "_set_sm_carveout_experimental", None)
        left_free = torch._C._get_sm_carveout_experimental() if set_carve_out else None
        library_before = self._type.num_sms
        try:
            self._sms = self.num_sms
            self._type.set_num_sms(self.num_sms)
            if set_carve_out:
                set_carve_out(self.num_sms)
            yield
        finally:
            self._sms = before
            self._type.set_num_sms(library_before)
            if set_carve_out:
                set_carve_out(left_free)

    def begin_capture(self) -> None:
        """Nothing to note: it cannot be captured."""

    def replay_token(self) -> None:
        """Nothing to know."""

    def replaying(self, token: Any) -> None:
        """Nothing to do."""

    # -- what a dispatch calls ---------------------------------------------------------------------------------------

    def capture(self) -> Any:
        """An event behind all that the current stream holds."""
        return self._type.capture()

    def dispatch(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, behind: Any) -> _Received:
        """Launch a dispatch behind the event `behind`; blocks the host until the counts are here."""
        if any(row[0] != self._dispatches for row in self.group.exchange([self._dispatches]).tolist()):
            raise BrokenGroupError("the ranks are not at the same dispatch; every rank must run the same schedule")
        config, _ = self._configs[self._sms]
        asynchronous = {"async_finish": True, "allocate_on_comm_stream": True}
        per_rank, _, per_expert, in_rank, laid_out = self.call(
            self.buffer.get_dispatch_layout, topk_ids, self.num_experts, previous_event=behind, **asynchronous
        )
        rows, ids, weights, counts, handle, done = self.call(
            self.buffer.dispatch,
            hidden,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=topk_ids,
            topk_weights=topk_weights,
            config=config,
            previous_event=laid_out,
            **asynchronous,
        )
        number = self._dispatches
        self._dispatches += 1
        self._open[number] = _Open(handle, rows.shape[0], self._sms)
        return _Received(rows, ids, weights, counts, number, done)

    def combine(self, rows: Tensor, number: int) -> tuple[Tensor, Any]:
        """Launch the combine of dispatch `number`: the rows to be, and the event behind them."""
        self.group.check()
        sent = self._open.get(number)
        if sent is None:
            raise BrokenGroupError(TOO_LATE)
        _, config = self._configs[sent.sms]
        combined, _, done = self.call(
            self.buffer.combine,
            rows,
            sent.handle,
            config=config,
            previous_event=self.capture(),
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        del self._open[number]
        self._log.add(number)
        return combined, done

    def _configs_for(self, sms: int) -> tuple[Any, Any]:
        before = self._type.num_sms
        try:
            self._type.set_num_sms(sms)
            ranks = self.group.world_size
            return self._type.get_dispatch_config(ranks), self._type.get_combine_config(ranks)
        finally:
            self._type.set_num_sms(before)

    def before_settling(self) -> None:
        if len({row[0] for row in meet(self.group, "ht cnt", [self._dispatches])}) > 1:
            raise BrokenGroupError("a rank failed in the middle of a dispatch, beyond repair; restart all ranks")

    def owe(self, number: int) -> None:
        """A combine with zeros."""
        sent = self._open.get(number)
        if sent is None:
            raise BrokenGroupError(TOO_LATE)
        zeros = torch.zeros(sent.rows, self.hidden_size, dtype=torch.bfloat16, device=self.group.device)
        _, done = self.combine(zeros, number)
        done.current_stream_wait()

    def after_settling(self, total: int) -> None:
        self._open.clear()


class _Open(NamedTuple):
    """A dispatch that was not combined: DeepEP's handle, the rows received, and the multiprocessors it ran on."""

    handle: Any
    rows: int
    sms: int


class _Received(NamedTuple):
    """What a dispatch gave: rows [R, H], local experts int64 [R, K] or -1, weights [R, K], and rows of each expert.

    `done` is an event behind the kernels.
    """

    rows: Tensor
    ids: Tensor
    weights: Tensor
    counts: list[int]
    number: int
    done: Any


class HighThroughputDispatch(InOrder):
    """One dispatch of `DeepEPHighThroughput`; see `Dispatch`. `bytes_sent` is as if every row went to every rank."""

    def __init__(
        self, all_to_all: DeepEPHighThroughput, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor
    ) -> None:
        super().__init__()
        self._all_to_all = all_to_all
        self._inputs = (hidden.contiguous(), topk_ids.contiguous(), topk_weights.contiguous())
        self._behind = all_to_all.capture()
        self._began_in = all_to_all.group.generation
        # With its choices: expert and weight.
        row_bytes = 2 * hidden.shape[1] + 12 * topk_ids.shape[1]
        self.bytes_sent = hidden.shape[0] * row_bytes * (all_to_all.world_size - 1)

    def _receive_dispatch(self) -> None:
        if self._began_in != self._all_to_all.group.generation:
            raise BrokenGroupError(TOO_LATE)
        self._received = self._all_to_all.dispatch(*self._inputs, self._behind)
        # For the allocator DeepEP has marked them as used on its stream and on this one.
        self._launched_on = torch.cuda.current_stream()
        del self._inputs, self._behind

    def _read_tokens(self) -> DispatchedTokens:
        received = self._received
        received.done.current_stream_wait()
        _mark_used((received.rows, received.ids, received.weights), self._launched_on)
        counts = torch.tensor(received.counts, dtype=torch.int64)
        key = torch.where(received.ids < 0, self._all_to_all.num_local_experts, received.ids).flatten()
        order = torch.argsort(key, stable=True)[: int(counts.sum())]
        slots = torch.full_like(key, -1)
        slots[order] = torch.arange(order.shape[0], device=order.device)
        self._slots = slots.view_as(received.ids)
        return DispatchedTokens(received.rows.index_select(0, order // received.ids.shape[1]), counts)

    def _send_combine(self, expert_outputs: Tensor) -> None:
        received = self._received
        if expert_outputs.shape[0]:
            rows = sum_choices(expert_outputs, self._slots, received.weights)
        else:
            rows = torch.zeros_like(received.rows)
        _mark_used((received.weights,), self._launched_on)
        self._combined_on = torch.cuda.current_stream()
        self._combined, self._done = self._all_to_all.combine(rows, received.number)
        self.bytes_sent += received.rows.numel() * 2

    def _receive_combine(self) -> None:
        """Nothing to launch and nothing to block for: `combined` makes its stream wait."""
        self._all_to_all.group.check()

    def _read_combined(self) -> Tensor:
        self._done.current_stream_wait()
        _mark_used((self._combined,), self._combined_on)
        return self._combined


def _mark_used(tensors: tuple[Tensor, ...], known: torch.cuda.Stream) -> None:
    """Where another stream than the one that DeepEP saw is current: keep the allocator from giving them away early."""
    stream = torch.cuda.current_stream()
    if stream != known:
        for tensor in tensors:
            tensor.record_stream(stream)
