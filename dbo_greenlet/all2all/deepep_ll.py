"""The all-to-all over DeepEP's low-latency kernels: a send kernel, a receive kernel, and nothing on the GPU in between.

A send part launches a kernel that writes the rows straight into the other ranks' memory and ends; the receive part, the
recv hook, launches one that waits for theirs. Between the two no kernel of DeepEP runs, so the whole GPU belongs to the
other microbatch, and no host waits for anything: a step can be captured into a CUDA graph.

**Bits.** Hidden rows travel in bfloat16, as they are. The experts' outputs come back in bfloat16, one for each choice,
and DeepEP's combine multiplies by the float32 routing weights and adds in float32, in the order of `topk_ids`, on the
token's own rank; the sum is rounded to bfloat16 once. DeepEP's 8-bit formats were left out: they change the numbers.

**Width.** The kernels exist for some widths only (`WIRE_WIDTHS`). Rows are padded with zeros to the next one on the
wire and cut after the combine. That is exact: no number of a row depends on the others.

**One receive at a time.** The buffer has two halves that operations use in turn, and each send clears the half that the
next operation will use. A send before the previous operation's receive would clear what that receive waits for, and the
GPU would wait forever; so it raises `PartOrderError`. The yields keep the order by themselves: a microbatch runs its
sibling's recv hook right before it sends.

Sends, hooks and products all belong on one stream: DeepEP launches a hook on the stream of its send.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import BrokenGroupError, ConfigurationError, SchedulerInternalError
from ..ranks import RankGroup
from . import PaddedTokens
from .deepep import TOO_LATE, DeepEPTransport, check_group, check_hidden, import_deep_ep, make_buffer, meet
from .errors import CapacityExceededError, PartOrderError
from .routing import InOrder

__all__ = ["MAX_CHOICES", "WIRE_WIDTHS", "DeepEPLowLatency", "LowLatencyDispatch", "rows_for", "wire_width"]

WIRE_WIDTHS = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
"""The row widths, in elements, for which DeepEP 1.2 has low-latency kernels."""

MAX_CHOICES = 11
"""The most experts of one token that those kernels take."""

# Kinds of operation, for the log.
_DISPATCH, _COMBINE = 0, 1
LOW_LATENCY_RANKS = (2, 3, 4, 5, 6, 7, 8)
"""Numbers of ranks within one node: all that can share their memory. Between nodes this package never ran."""

_DEFAULT_QUEUE_DEPTH = 1024
# DeepEP views rows of all ranks through TMA, which wants their number to be a multiple of this.
_ROWS_MULTIPLE = 4


def wire_width(hidden_size: int) -> int:
    """The smallest width on the wire that holds `hidden_size`; raises `ConfigurationError` if there is none."""
    for width in WIRE_WIDTHS:
        if 0 < hidden_size <= width:
            return width
    raise ConfigurationError(
        f"hidden size {hidden_size}: DeepEP's low-latency kernels take at most {WIRE_WIDTHS[-1]} elements a row"
    )


def rows_for(max_tokens: int, world_size: int) -> int:
    """Rows that each pair of ranks gets for microbatches of at most `max_tokens` tokens.

    Raises `ConfigurationError` if DeepEP's send queues (NVSHMEM_QP_DEPTH entries, 1024 by default) cannot hold them.
    """
    step = _ROWS_MULTIPLE // math.gcd(world_size, _ROWS_MULTIPLE)
    rows = -(-max_tokens // step) * step
    depth = int(os.environ.get("NVSHMEM_QP_DEPTH", _DEFAULT_QUEUE_DEPTH))
    most = (depth // 2 - 1) // step * step
    if max_tokens < 1 or rows > most:
        raise ConfigurationError(
            f"max_tokens = {max_tokens}: with {world_size} ranks and NVSHMEM_QP_DEPTH = {depth}, DeepEP's low-latency "
            f"kernels take 1 to {most} tokens a microbatch; use smaller steps, more microbatches or the "
            "high-throughput kernels"
        )
    return rows


class DeepEPLowLatency(DeepEPTransport):
    """An `AllToAll` over DeepEP's low-latency kernels, bfloat16 only.

    `hidden_size` is the width of a row in elements, `max_tokens` the most tokens of a microbatch; both, and
    `num_experts`, are the same on every rank. A token names an expert at most once. Making one blocks until every rank
    does, and takes GPU memory in pieces of 512 MiB, as DeepEP has NVSHMEM do.

    It works across `group.reset()`: the first dispatch or replay after one runs the operations, eager or of a replayed
    graph, that a rank still owes the others, so that no kernel of the failed step waits any more. Until then such a
    kernel may occupy the GPU; DeepEP lets it wait 100 s. Graphs captured before the reset can be replayed after it. Who
    reads results calls `RankGroup.wait_for_device` first, which notices a failure. An error inside DeepEP itself, out
    of memory for example, ends its use: steps after a reset raise `BrokenGroupError`, or the `RankFailedError` that
    tells of it, on every rank.

    Raises `ConfigurationError` if DeepEP is missing or of another version, or the numbers are not ones that it takes;
    `RankFailedError` if a rank fails meanwhile.
    """

    name = "deepep_low_latency"
    short = "ll"
    not_capturable = None

    def __init__(self, group: RankGroup, num_experts: int, hidden_size: int, max_tokens: int) -> None:
        check_group(group, "DeepEP low latency", LOW_LATENCY_RANKS)
        super().__init__(group, num_experts)
        self.hidden_size = hidden_size
        self.max_tokens = max_tokens
        self.wire_width = wire_width(hidden_size)
        self.rows = rows_for(max_tokens, group.world_size)
        deep_ep = import_deep_ep()
        meet(group, "ll new", [])
        size = deep_ep.Buffer.get_low_latency_rdma_size_hint(self.rows, self.wire_width, group.world_size, num_experts)
        self.buffer = make_buffer(
            deep_ep,
            group,
            num_rdma_bytes=size,
            low_latency_mode=True,
            num_qps_per_rank=self.num_local_experts,
        )
        # What a send kernel reads, where rows must be padded. One of each is enough for any number of microbatches: a
        # send kernel has read it before anything later on the stream writes it. What is behind the hidden size stays
        # zero, and what is behind the rows of a step is not read.
        self._narrow = self.wire_width != hidden_size
        if self._narrow:
            self._staged = self._zeros(self.rows, self.wire_width)
        self._staged_outputs: Tensor | None = None
        if self._narrow:
            self._stage_outputs()
        self._most: int | None = None
        self._outstanding: _Outstanding | None = None
        self._capture: list[int] = []

    @property
    def most_tokens(self) -> int:
        """The most tokens of a microbatch for now: `max_tokens`, or what is expected where that is less."""
        return self.max_tokens if self._most is None else min(self.max_tokens, self._most)

    def expect_tokens(self, most: int | None) -> None:
        """See `AllToAll.expect_tokens`. The buffers stay as they are; the rows given to the experts get fewer."""
        self._most = most
        if self.places < self.rows * self.world_size:
            self._stage_outputs()

    @property
    def places(self) -> int:
        """Rows of each local expert, taken or not: those of an expert come one behind the other, from all ranks."""
        rows = self.rows if self.most_tokens == self.max_tokens else max(1, self.most_tokens)
        return rows * self.world_size

    def dispatch_send(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> LowLatencyDispatch:
        """See `AllToAll.dispatch_send`.

        Also raises `CapacityExceededError`, `PartOrderError` while the receive of another operation is outstanding, and
        `RankFailedError` or `BrokenGroupError` if a rank failed.
        """
        check_hidden(hidden, topk_ids, topk_weights, self.num_experts, self.hidden_size, MAX_CHOICES)
        if hidden.shape[0] > self.most_tokens:
            raise CapacityExceededError(hidden.shape[0], self.most_tokens)
        self.make_ready()
        return LowLatencyDispatch(self, hidden, topk_ids, topk_weights)

    def reserve_sms(self) -> AbstractContextManager[None]:
        """Nothing: while the other microbatch computes, no kernel of DeepEP runs."""
        return nullcontext()

    def begin_capture(self) -> None:
        """See `AllToAll.begin_capture`."""
        self._capture = []

    def replay_token(self) -> tuple[int, ...]:
        """The operations that were captured."""
        return tuple(self._capture)

    def replaying(self, token: tuple[int, ...]) -> None:
        """Note the operations of the graph: where another rank does not launch it, it owes them."""
        self.make_ready()
        self._log.extend(token)

    # -- what a dispatch calls ---------------------------------------------------------------------------------------

    def send_rows(self, owner: object, hidden: Tensor, topk_ids: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Launch the send of a dispatch: rows and counts that its receive will fill, and the handle for the combine."""
        if self._narrow:
            staged = self._staged[: hidden.shape[0]]
            staged[:, : self.hidden_size].copy_(hidden)
        else:
            staged = hidden.contiguous()
        self._refuse_two_receives("dispatch")
        received, counts, handle, _, hook = self.call(
            self.buffer.low_latency_dispatch,
            staged,
            topk_ids,
            self.rows,
            self.num_experts,
            use_fp8=False,
            return_recv_hook=True,
        )
        self._sent(_DISPATCH, owner, hook)
        return received, counts, handle

    def send_outputs(
        self, owner: object, outputs: Tensor, topk_ids: Tensor, topk_weights: Tensor, handle: Any
    ) -> Tensor:
        """Launch the send of a combine: the rows that its receive will fill."""
        self.group.check()
        if self._narrow or outputs.shape[1] < self.rows * self.world_size:
            if self._staged_outputs is None:
                raise SchedulerInternalError("outputs of fewer rows than DeepEP takes, and no room for the others")
            self._staged_outputs[:, : outputs.shape[1], : self.hidden_size].copy_(outputs)
            outputs = self._staged_outputs
        self._refuse_two_receives("combine")
        combined: Tensor
        combined, _, hook = self.call(
            self.buffer.low_latency_combine,
            outputs.contiguous(),
            topk_ids,
            topk_weights,
            handle,
            return_recv_hook=True,
        )
        self._sent(_COMBINE, owner, hook)
        return combined

    def receive(self, owner: object) -> None:
        """Launch the receive of what `owner` sent last."""
        self.group.check()
        outstanding = self._outstanding
        if outstanding is None or outstanding.owner is not owner:
            raise BrokenGroupError(TOO_LATE)
        outstanding.hook()
        self._outstanding = None

    def _refuse_two_receives(self, kind: str) -> None:
        capturing = torch.cuda.is_current_stream_capturing()
        if self._outstanding is not None and self._outstanding.captured and not capturing:
            # Left by a capture that failed: none of its operations ever runs.
            self._outstanding = None
        if self._outstanding is not None:
            raise PartOrderError(
                f"the send of a {kind} while the receive of another operation is outstanding: DeepEP's low-latency "
                "buffer holds one operation at a time. Run the previous microbatch's recv hook before each send "
                "(dbo_maybe_run_recv_hook does); after a failed step reset the group"
            )
        if not capturing and self._log.captured % 2:
            self._swap_halves()

    def _sent(self, kind: int, owner: object, hook: Callable[[], None]) -> None:
        captured = torch.cuda.is_current_stream_capturing()
        self._log.add(kind, captured)
        if captured:
            self._capture.append(kind)
        self._outstanding = _Outstanding(owner, hook, captured)

    # -- after a failure ---------------------------------------------------------------------------------------------

    def before_settling(self) -> None:
        if self._outstanding is not None and not self._outstanding.captured:
            self._outstanding.hook()
        self._outstanding = None
        if self._log.captured % 2:
            self._swap_halves()

    def owe(self, number: int) -> None:
        self._send_nothing(number)
        self._log.add(number)

    def after_settling(self, total: int) -> None:
        if total % 2:
            # A captured graph begins with the half of the buffer with which a step begins.
            self.owe(_DISPATCH)

    def _send_nothing(self, kind: int) -> None:
        """One operation in which this rank has no token and no output, receive included."""
        ids = torch.zeros(0, 1, dtype=torch.int64, device=self.group.device)
        if kind == _DISPATCH:
            hook = self.call(
                self.buffer.low_latency_dispatch,
                self._zeros(0, self.wire_width),
                ids,
                self.rows,
                self.num_experts,
                use_fp8=False,
                return_recv_hook=True,
            )[-1]
        else:
            places = self.rows * self.world_size
            source = torch.zeros(self.num_local_experts, places, dtype=torch.int32, device=self.group.device)
            ranges = torch.zeros(self.num_local_experts, self.world_size, dtype=torch.int64, device=self.group.device)
            hook = self.call(
                self.buffer.low_latency_combine,
                self._zeros(self.num_local_experts, places, self.wire_width),
                ids,
                torch.zeros(0, 1, dtype=torch.float32, device=self.group.device),
                (source, ranges, self.rows, self.wire_width, self.num_experts),
                return_recv_hook=True,
            )[-1]
        hook()

    def _swap_halves(self) -> None:
        """Undo that a capture which failed took an odd number of turns: DeepEP counts them on the host.

        One more operation, in a graph that is thrown away.
        """
        thrown_away = torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local")
        with torch.cuda.device(self.group.device), thrown_away:
            self._send_nothing(_DISPATCH)
        self._log.captured = 0

    def _stage_outputs(self) -> None:
        """Make the room once, and never while a graph is captured: it would lie in the graph's memory."""
        if self._staged_outputs is None:
            self._staged_outputs = self._zeros(self.num_local_experts, self.rows * self.world_size, self.wire_width)

    def _zeros(self, *shape: int) -> Tensor:
        # Ordinary tensors even if the caller is in inference mode: an inference tensor could not be written outside.
        with torch.inference_mode(False):
            return torch.zeros(*shape, dtype=torch.bfloat16, device=self.group.device)


class _Outstanding(NamedTuple):
    """A receive that did not run: whose, how, and whether its send was captured into a graph."""

    owner: object
    hook: Callable[[], None]
    captured: bool


class LowLatencyDispatch(InOrder):
    """One dispatch of `DeepEPLowLatency`; see `Dispatch`. `bytes_sent` is as if every expert were on another rank."""

    def __init__(self, all_to_all: DeepEPLowLatency, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> None:
        super().__init__()
        self._all_to_all = all_to_all
        self._began_in = all_to_all.group.generation
        self._ids = topk_ids.contiguous()
        self._weights = topk_weights.contiguous()
        self._places = all_to_all.places
        self._rows, self._counts, self._handle = all_to_all.send_rows(self, hidden, self._ids)
        # A row comes with 16 bytes that say where it is from.
        self.bytes_sent = topk_ids.numel() * (2 * all_to_all.wire_width + 16)

    def _receive_dispatch(self) -> None:
        self._all_to_all.receive(self)

    def _read_tokens(self) -> PaddedTokens:
        return PaddedTokens(self._rows[:, : self._places, : self._all_to_all.hidden_size], self._counts)

    def _send_combine(self, expert_outputs: Tensor) -> None:
        if self._began_in != self._all_to_all.group.generation:
            raise BrokenGroupError(TOO_LATE)
        self._combined = self._all_to_all.send_outputs(self, expert_outputs, self._ids, self._weights, self._handle)
        self.bytes_sent += self._ids.numel() * 2 * self._all_to_all.wire_width

    def _receive_combine(self) -> None:
        self._all_to_all.receive(self)

    def _read_combined(self) -> Tensor:
        return self._combined[:, : self._all_to_all.hidden_size]
