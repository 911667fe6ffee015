"""The graphs of a runner: which steps have one, the buffers they read, and the captured steps themselves.

A graph is made for a number of tokens, so a step must first be made to have such a number: a *uniform decode*, in which
each request has one new token, is padded, tokens and requests alike, to the next of the sizes that were asked for.
Anything else runs eagerly, as it is.

Graphs are kept by (tokens, microbatches, policy). Sizes and policy belong to the runner, so what a step needs is found
by two numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .batching import Decision, RankVote, StepInput, UBatchSlice, VoteSettings
from .batching.inputs import PADDING_SLOT
from .errors import ConfigurationError

if TYPE_CHECKING:
    from .all2all import AllToAll
    from .devices import Device
    from .graphs import Captured, GraphPool
    from .schedule import Schedule

__all__ = ["CapturedStep", "StepBuffers", "StepGraphs", "open_pool"]


@dataclass(frozen=True)
class CapturedStep:
    """One captured step.

    Attributes:
        size: its tokens and requests, padding included.
        microbatches: N, or 1 for a step that is not split.
        captured: output, seconds, pool_bytes and `replay()`.
        slices: the cut; () where the step is not split.
        schedule: the scheduler's decisions during the capture, which every replay repeats; None where there were none.
        timeline: the timing events in it, where the runner has a `GpuTimeline`; else None.
        buffers: what it reads and writes besides the pool's memory, and must not be given away while it lives.
        operations: what the all-to-all has to know about it before each replay.
    """

    size: int
    microbatches: int
    captured: Captured[Any]
    slices: tuple[UBatchSlice, ...] = ()
    schedule: Schedule | None = None
    timeline: Any = None
    buffers: Any = field(default=None, repr=False)
    operations: Any = field(default=None, repr=False)


class StepBuffers:
    """What a captured step reads: at the same addresses in every replay, for at most `size` tokens."""

    def __init__(self, size: int, device: torch.device) -> None:
        def whole(count: int, kind: torch.dtype, fill: int = 0) -> Tensor:
            return torch.full((count,), fill, dtype=kind, device=device)

        # Ordinary tensors even if the caller is in inference mode: steps of either kind write to them.
        with torch.inference_mode(False):
            self._positions = whole(size, torch.int64)
            self._slots = whole(size, torch.int64, PADDING_SLOT)
            self._rows = whole(size, torch.int64, PADDING_SLOT)
            self._ids = whole(size, torch.int64)
            self._offsets = whole(size + 1, torch.int32)
            self._lengths = whole(size, torch.int32)
            self._padding = [whole(size, torch.int64, fill) for fill in (0, PADDING_SLOT, PADDING_SLOT, 0)]
        self._filled = 0

    def fill(self, step: StepInput, size: int) -> None:
        """Write the step, a uniform decode or an idle one, padded to `size` tokens and requests.

        Padding tokens have id 0, position 0, slot -1 and request row -1; padding requests own no token.
        """
        n, filled = step.num_tokens, self._filled
        ours = [self._positions, self._slots, self._rows, self._ids]
        theirs = [step.positions, step.slot_mapping, step.request_rows, step.input_ids]
        # Before the first copy: one that is interrupted must not leave slots behind that pass for padding.
        self._filled = max(n, filled)
        torch._foreach_copy_([each[:n] for each in ours], [each[:n] for each in theirs])  # type: ignore[index]
        if n < filled:
            # What lies behind is padding already, but for what the last step left there.
            torch._foreach_copy_([each[n:filled] for each in ours], [each[n:filled] for each in self._padding])
        torch._foreach_copy_(
            [self._offsets[: n + 1], self._lengths[:n]], [step.query_start_loc[: n + 1], step.seq_lens[:n]]
        )
        self._offsets[n + 1 : size + 1] = n
        self._lengths[n:size] = 0
        self._filled = n

    def padded(self, step: StepInput, size: int) -> StepInput:
        """The step that was filled in, as views of the buffers."""
        n = step.num_tokens
        behind = torch.full((size - n,), n, dtype=torch.int32)
        return StepInput(
            positions=self._positions[:size],
            query_start_loc=self._offsets[: size + 1],
            seq_lens=self._lengths[:size],
            slot_mapping=self._slots[:size],
            request_rows=self._rows[:size],
            num_tokens=n,
            num_padded_tokens=size,
            input_ids=self._ids[:size],
            num_requests=n,
            query_start_loc_cpu=torch.cat([step.query_start_loc_cpu[: n + 1], behind]),
            seq_lens_cpu=torch.cat([step.seq_lens_cpu[:n], torch.zeros(size - n, dtype=torch.int32)]),
        )

    def full_step(self, size: int) -> StepInput:
        """A step of `size` requests that read one position each and write nothing: what a graph is captured with."""
        device = self._positions.device
        zeros = torch.zeros(size, dtype=torch.int64, device=device)
        offsets = torch.arange(size + 1, dtype=torch.int32)
        ones = torch.ones(size, dtype=torch.int32)
        step = StepInput(
            positions=zeros,
            query_start_loc=offsets.to(device),
            seq_lens=ones.to(device),
            slot_mapping=torch.full_like(zeros, PADDING_SLOT),
            request_rows=zeros,
            num_tokens=size,
            num_padded_tokens=size,
            input_ids=zeros,
            query_start_loc_cpu=offsets,
            seq_lens_cpu=ones,
        )
        self.fill(step, size)
        return self.padded(step, size)


class StepGraphs:
    """Sizes, buffers and captured steps of one runner.

    Args:
        sizes: the numbers of tokens that uniform decodes are padded to.
        device: where the model runs.

    Raises:
        ConfigurationError: a size below 1.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.sizes = sorted(set(sizes))
        if self.sizes[0] < 1:
            raise ConfigurationError(f"graph_sizes has {self.sizes[0]}; a graph is for 1 token or more")
        self.buffers = StepBuffers(self.sizes[-1], device)
        self._captured: dict[tuple[int, int], CapturedStep] = {}
        self._generation = 0

    def takes(self, step: StepInput, uniform_query_len: int) -> bool:
        """Whether the buffers can hold this rank's step: it decodes from token ids, or is idle.

        `uniform_query_len`: the step's, which takes some tens of microseconds to ask for.
        """
        return (
            step.num_tokens <= self.sizes[-1]
            and step.num_padded_tokens == step.num_tokens
            and (step.num_tokens == 0 or uniform_query_len == 1)
            and step.input_ids is not None
            and step.inputs_embeds is None
            and not step.intermediate_tensors
            and step.positions.dim() == 1
        )

    def vote(self, step: StepInput, vote: RankVote) -> tuple[RankVote, bool]:
        """The vote with the size that this rank wants for its step, and whether the buffers take it.

        A rank that decodes a step that they do not take (from embeddings, say) does not call it a decode: no rank may
        replay a graph of an all-to-all that another one runs eagerly.
        """
        if self.takes(step, vote.uniform_query_len):
            if step.num_tokens:
                vote = replace(vote, num_padded_tokens=next(s for s in self.sizes if s >= step.num_tokens))
            return vote, True
        if step.num_tokens <= self.sizes[-1]:
            vote = replace(vote, uniform_query_len=0)
        return vote, False

    def size_of(self, decision: Decision) -> int | None:
        """The size at which every rank runs the step that was decided on; None where no graph is made for it.

        One size for all ranks, also where nothing is split: a graph has the room for what other ranks send built in. So
        each of them must decode or be idle; and if the step is split, the last microbatch must have a real token on
        each, since those before it would have another shape otherwise.
        """
        size = decision.padded_tokens
        decode = all(vote.uniform_query_len == 1 or vote.num_tokens == 0 for vote in decision.votes)
        return size if decode and size in self.sizes and not decision.padding_only_ranks else None

    def wanted(self, settings: VoteSettings) -> list[tuple[int, int]]:
        """(size, microbatches) of the graphs that steps under these settings can ask for, the largest first."""
        n = settings.num_microbatches
        wanted = []
        for size in reversed(self.sizes):
            if n > 1 and size >= settings.decode_threshold:
                wanted.append((size, n))
            # Also above the threshold: a rank that has less, or is idle, keeps the others from splitting.
            wanted.append((size, 1))
        return wanted

    def find(self, size: int, microbatches: int) -> CapturedStep | None:
        return self._captured.get((size, microbatches))

    def drop(self) -> None:
        """Forget all captured steps; their memory is free once nobody holds their outputs."""
        self._captured.clear()

    def keep(self, step: CapturedStep) -> None:
        self._captured[step.size, step.microbatches] = step

    def captured(self) -> list[CapturedStep]:
        return list(self._captured.values())

    def capture_all(
        self, settings: VoteSettings, capture: Callable[[int, int], CapturedStep], generation: int = 0
    ) -> list[CapturedStep]:
        """Capture what is wanted and not there yet, by `capture(size, microbatches)`.

        `generation` counts the resets of the ranks' group: what was captured before one is captured anew.
        """
        if generation != self._generation:
            self.drop()
            self._generation = generation
        for size, microbatches in self.wanted(settings):
            if (size, microbatches) not in self._captured:
                self.keep(capture(size, microbatches))
        return self.captured()


def open_pool(device: Device, carrier: str, kv_cache: Any, all2all: AllToAll | None) -> GraphPool:
    """A pool for graphs; raises `ConfigurationError` where steps cannot be captured."""
    remedy = "; leave graph_sizes out, or give use_graphs=False"
    if not device.name.startswith("cuda"):
        raise ConfigurationError(f"graphs need a CUDA device, this runner is on {device.name}{remedy}")
    if carrier != "greenlet":
        raise ConfigurationError(f"graphs are captured on one thread, carrier={carrier!r} runs several{remedy}")
    if kv_cache is not None and not getattr(kv_cache, "static_shapes", True):
        raise ConfigurationError("the shapes of a graph are fixed; make the KV cache with static_shapes=True" + remedy)
    if all2all is not None and (reason := all2all.not_capturable) is not None:
        raise ConfigurationError(f"steps cannot be captured: {reason}{remedy}")
    from .graphs import GraphPool

    return GraphPool(device)  # type: ignore[arg-type]  # its name says that it is one of CUDA
