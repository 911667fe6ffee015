"""The standalone runner: model and batch in, output out, split where the ranks agree to.

    runner = Runner(model, kv_cache=cache, settings=VoteSettings(...), group=group)
    out = runner.step(step_input)         # every rank of the group, in lockstep, idle ranks included
    out.output                            # rows as the batch had them, whichever way it ran

One step is: vote; pad and cut where the vote says so; run the microbatches under the scheduler, or the whole batch at
once; join the comm stream into the compute stream; merge. What a step needs beyond its batch is made once and kept:
contexts with their streams and events, and the buffers of query offsets and sequence lengths.

On a GPU the decode steps can be graphs (`graph_sizes`, `capture_graphs`): captured once for each size, on the thread
that runs the runner, and replayed from then on with one launch and no allocation (`step_graphs` says which steps).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from .batching import (
    Decision,
    RankVote,
    StepInput,
    UBatchBuffers,
    UBatchSlice,
    Veto,
    VoteSettings,
    decide,
    merge_outputs,
    pad_step,
    slice_all,
    split_step,
)
from .devices import Device, cpu_device
from .errors import (
    ConfigurationError,
    MicrobatchFailed,
    RankFailedError,
    ReceiveHookError,
    ScheduleDivergence,
    SchedulerInternalError,
)
from .microbatch import UBatchContext, make_ubatch_contexts
from .policy import Policy
from .schedule import Schedule
from .scheduler import Scheduler
from .step_graphs import CapturedStep, StepGraphs, open_pool

if TYPE_CHECKING:
    from .all2all import AllToAll
    from .graphs import GraphPool
    from .slice_bracket import SliceBracket

__all__ = ["MODES", "RankLink", "Runner", "StepOutput"]

MODES = ("auto", "never", "sequential")


class RankLink(Protocol):
    """What the runner asks of a group of ranks; `dbo_greenlet.ranks.RankGroup` is one."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def exchange(self, row: Tensor) -> Tensor:
        """Every rank's row of whole numbers [n], as [world_size, n]."""

    def announce_failure(self, microbatch: int | None, error: BaseException) -> None:
        """Make the step fail on every rank; does nothing where another failure was first."""


@dataclass(frozen=True)
class StepOutput:
    """What a step gave.

    Attributes:
        output: what the model returns, with as many rows as the batch that came in; None where no rank had a token.
            Of a replayed step it is valid until the next replay.
        decision: split or not, with the reason, and the votes.
        slices: the cut, one per microbatch; () where the step was not split.
        schedule: the scheduler's decisions; None where there were none to take (not split, or one after the other).
            A replayed step has those of its capture.
        execution: "eager", or "replayed" from a graph.
        timeline: where the runner has a `GpuTimeline` and the step was split: the `StepEvents` that hold its GPU times,
            until the next step of the same graph (or, eager, the next step).
    """

    output: Any
    decision: Decision
    slices: tuple[UBatchSlice, ...] = ()
    schedule: Schedule | None = None
    execution: str = "eager"
    timeline: Any = None

    @property
    def yields(self) -> tuple[int, ...]:
        """Number of yields of each microbatch."""
        return () if self.schedule is None else self.schedule.yields


class Runner:
    """Runs a model's steps.

    Args:
        model: called as `model(step_input)`, or as `model.forward(step_input, kv_cache)` where there is a cache. It
            returns a tensor with a row per token, or a structure of them (see `merge_outputs`).
        kv_cache: passed on to the model.
        settings: number of microbatches N, thresholds and rule of the vote.
        group: the ranks that run their steps in lockstep with this one; None for a single rank.
        device: where streams and events live; None is the CPU.
        policy, carrier, strict, thread_state, watchdog, instruments: see `Scheduler`.
        max_requests: requests (padding included) of the largest step. A larger one makes new buffers, which a captured
            graph would not know about.
        compare_schedules: after each split step, compare its schedule hash with the other ranks'. It costs a small
            all-gather a step.
        inference_mode: wrap each step in `torch.inference_mode()`: once, round all microbatches.
        graph_sizes: steps in which every request has one new token are padded, tokens and requests, to the next of
            these sizes, and run as a graph once `capture_graphs` was called. The same on every rank.
        use_graphs: False pads and captures nothing, so that eager steps have the shapes that graphs would have.
        all2all: the model's all-to-all: asked whether it can be captured, told how large microbatches are, and given
            its multiprocessors while a split step runs. Without it the all-to-all makes room for its largest step.
        timeline: a `GpuTimeline`: the split steps' slices are timed on the GPU, in graphs too.

    A runner runs one step at a time.

    Raises:
        ConfigurationError: a setting that cannot work.
    """

    def __init__(
        self,
        model: Any,
        *,
        kv_cache: Any = None,
        settings: VoteSettings | None = None,
        group: RankLink | None = None,
        device: Device | None = None,
        policy: Policy | None = None,
        carrier: str = "greenlet",
        strict: bool | None = None,
        thread_state: Any = "auto",
        watchdog: float | None = None,
        instruments: Iterable[Any] = (),
        max_requests: int = 256,
        compare_schedules: bool = False,
        inference_mode: bool = True,
        graph_sizes: Sequence[int] = (),
        use_graphs: bool = True,
        all2all: AllToAll | None = None,
        timeline: Any = None,
    ) -> None:
        self.settings = VoteSettings() if settings is None else settings
        self.group = group
        self.device: Device = cpu_device() if device is None else device
        self._new_scheduler = partial(
            Scheduler,
            carrier=carrier,
            strict=strict,
            thread_state=thread_state,
            watchdog=watchdog,
            instruments=tuple(instruments),
        )
        self.scheduler = self._new_scheduler(policy)
        self._forward: Callable[[StepInput], Any] = (
            model if kv_cache is None else partial(_forward_with_cache, model.forward, kv_cache)
        )
        self._compare_schedules = compare_schedules
        self._inference_mode = inference_mode
        self._unsplit = VoteSettings(1, self.settings.decode_threshold, self.settings.prefill_threshold)
        self._buffers = self._make_buffers(max_requests)
        self._contexts: list[UBatchContext] = []
        self._joined = self.device.new_event()
        self._timeline = timeline
        self._all2all = all2all
        self._graphs = StepGraphs(graph_sizes, self._tensor_device()) if graph_sizes else None
        self._pool: GraphPool | None = None
        if graph_sizes and use_graphs:
            self._pool = open_pool(self.device, carrier, kv_cache, all2all)

    def capture_graphs(self, mode: str = "auto") -> list[CapturedStep]:
        """Capture what steps of that mode can ask for, and return all that is captured. Every rank calls it alike.

        Each graph is preceded by an eager run of the same step, whose requests are padding: it writes nothing into the
        KV cache, but takes part in the all-to-all.

        Raises:
            ConfigurationError: the runner was made without graphs, or an unknown mode.
            GraphCaptureError: a capture failed. What was captured before it stays usable; so does the process.
        """
        if self._graphs is None or self._pool is None:
            raise ConfigurationError("this runner makes no graphs; give it graph_sizes and use_graphs=True")
        if mode not in ("auto", "never"):
            raise ConfigurationError(f"mode={mode!r} has no graphs; choose auto or never")
        with torch.inference_mode(self._inference_mode):
            return self._graphs.capture_all(self._unsplit if mode == "never" else self.settings, self._capture)

    def step(
        self, step: StepInput, *, mode: str = "auto", policy: Policy | None = None, veto: Veto = Veto.NONE
    ) -> StepOutput:
        """Run one step. Every rank of the group calls this for each of its steps, with a batch or an idle one.

        Args:
            step: this rank's batch.
            mode: "auto" splits where the vote says so; "never" does not; "sequential" takes the slices of "auto" one
                after the other, without a scheduler: the same arithmetic on the same rows, so its output must be equal
                bit for bit. The same on every rank.
            policy: for this step instead of the runner's; the same on every rank.
            veto: why this rank does not want the step split.

        Raises:
            MicrobatchFailed and what else `Scheduler.run` raises: here. The other ranks of the group get
                `RankFailedError` naming this one.
            RankFailedError: another rank failed, died or stalled.
            ScheduleDivergence: with `compare_schedules`, another rank took other decisions in this step.
            BrokenGroupError: the group is broken since an earlier step.
            ConfigurationError: an unknown mode.
        """
        if mode not in MODES:
            raise ConfigurationError(f"mode={mode!r} is not known; choose one of {', '.join(MODES)}")
        vote = self._vote(step, veto)
        try:
            decision = decide(self._votes(vote), self._unsplit if mode == "never" else self.settings)
            if all(each.num_tokens == 0 for each in decision.votes):
                return StepOutput(None, decision)
            with torch.inference_mode(self._inference_mode):
                return self._run(step, decision, mode, policy)
        except BaseException as error:
            # Everything: whatever ends the step here, a KeyboardInterrupt too, leaves the others waiting (law 7).
            if self.group is None:
                raise
            self.group.announce_failure(_failed_microbatch(error), error)
            heard = _failure_of_another_rank(error)
            if heard is None or heard is error:
                raise
            # A microbatch met it, but it is no failure of that microbatch.
            raise RankFailedError(heard.rank, heard.microbatch, heard.reason) from error

    def _vote(self, step: StepInput, veto: Veto) -> RankVote:
        vote = RankVote.of_step(step, veto=veto)
        size = None if self._graphs is None else self._graphs.size_for(step)
        return vote if size is None else replace(vote, num_padded_tokens=size)

    def _votes(self, vote: RankVote) -> list[RankVote]:
        if self.group is None:
            return [vote]
        return [RankVote.from_row(row) for row in self.group.exchange(vote.to_row())]

    def _run(self, step: StepInput, decision: Decision, mode: str, policy: Policy | None) -> StepOutput:
        rows = step.num_padded_tokens
        graphs = self._graphs
        size = None if graphs is None else graphs.size_of(decision)
        self._expect(decision.padded_tokens, decision.num_microbatches)
        if graphs is not None and size is not None and graphs.takes(step):
            step = graphs.buffers.fill(step, size)
            found = graphs.find(size, decision.num_microbatches)
            if found is not None and policy is None and mode != "sequential":
                return self._replay(found, step, decision, rows)
        else:
            step = pad_step(step, decision.tokens_on(0 if self.group is None else self.group.rank))
        if not decision.split:
            return StepOutput(_first_rows(self._forward(step), rows), decision)
        slices = split_step(step, decision.num_microbatches)
        if mode == "sequential":
            outputs = [entry() for entry in self._entries(step, slices)]
            return StepOutput(_first_rows(merge_outputs(outputs, slices), rows), decision, tuple(slices))
        scheduler = self.scheduler if policy is None else self._new_scheduler(policy)
        contexts = self._contexts_for_step()
        events = None if self._timeline is None else self._timeline.eager(contexts)
        output, schedule = self._run_split(step, slices, scheduler, contexts, events)
        self._compare(schedule)
        return StepOutput(_first_rows(output, rows), decision, tuple(slices), schedule, timeline=events)

    def _entries(self, step: StepInput, slices: Sequence[UBatchSlice]) -> list[Callable[[], Any]]:
        if step.num_padded_requests > self._buffers.max_requests:
            self._buffers = self._make_buffers(step.num_padded_requests)
        return [partial(self._forward, part) for part in slice_all(step, slices, self._buffers)]

    def _run_split(
        self,
        step: StepInput,
        slices: Sequence[UBatchSlice],
        scheduler: Scheduler,
        contexts: list[UBatchContext],
        bracket: SliceBracket | None,
    ) -> tuple[Any, Schedule]:
        with nullcontext() if self._all2all is None else self._all2all.reserve_sms():
            result = scheduler.run(self._entries(step, slices), contexts, bracket=bracket)
        # Whatever the caller enqueues next runs behind the step's communication as well.
        self.device.record(self._joined, contexts[0].comm_stream)
        self.device.wait(contexts[0].compute_stream, self._joined)
        return merge_outputs(result.outputs, slices), result.schedule

    def _expect(self, tokens: int, microbatches: int) -> None:
        """Tell the all-to-all the most tokens that a microbatch of any rank has: a number that all ranks know."""
        if self._all2all is not None:
            self._all2all.expect_tokens(tokens - (microbatches - 1) * (tokens // microbatches))

    # -- graphs ------------------------------------------------------------------------------------------------------

    def _capture(self, size: int, microbatches: int) -> CapturedStep:
        graphs, pool = self._graphs, self._pool
        if graphs is None or pool is None:
            raise SchedulerInternalError("a graph was asked of a runner that makes none")
        step = graphs.buffers.full_step(size)
        self._expect(size, microbatches)
        if microbatches == 1:
            return CapturedStep(size, 1, pool.capture(lambda: self._forward(step)))
        slices = split_step(step, microbatches)
        comm = self._contexts_for_step()[0].comm_stream
        # Contexts of its own: an event that a capture has recorded stands for nothing outside of it.
        contexts = make_ubatch_contexts(microbatches, pool.stream, comm, device=self.device)
        events = None if self._timeline is None else self._timeline.captured(contexts)
        run = partial(self._run_split, step, slices, self.scheduler, contexts, events)
        captured = pool.capture(run, streams=[comm])
        output, schedule = captured.output
        return CapturedStep(size, microbatches, replace(captured, output=output), schedule, events)

    def _replay(self, found: CapturedStep, step: StepInput, decision: Decision, rows: int) -> StepOutput:
        found.captured.replay()
        if found.timeline is not None:
            found.timeline.replayed()
        output = _first_rows(found.captured.output, rows)
        if found.schedule is None:
            return StepOutput(output, decision, execution="replayed")
        self._compare(found.schedule)
        slices = tuple(split_step(step, found.microbatches))
        return StepOutput(output, decision, slices, found.schedule, "replayed", found.timeline)

    def _contexts_for_step(self) -> list[UBatchContext]:
        """The contexts, on the stream that is current now; made anew only where that is another one than last time."""
        compute = self.device.current_stream()
        if not self._contexts or self._contexts[0].compute_stream is not compute:
            comm = self._contexts[0].comm_stream if self._contexts else None
            n = self.settings.num_microbatches
            self._contexts = make_ubatch_contexts(n, compute, comm, device=self.device)
        return self._contexts

    def _compare(self, schedule: Schedule) -> None:
        if self.group is None or not self._compare_schedules:
            return
        # 60 of the hash's 64 bits: a row holds signed numbers.
        mine = int(schedule.hash, 16) >> 4
        hashes = self.group.exchange(torch.tensor([mine], dtype=torch.int64))[:, 0].tolist()
        other = next((rank for rank, value in enumerate(hashes) if value != mine), None)
        if other is not None:
            raise ScheduleDivergence(
                f"rank {self.group.rank} and rank {other} ran this step in different orders: the hashes of their "
                f"schedules begin with {mine:015x} and {hashes[other]:015x}; are policy and model the same on both?"
            )

    def _make_buffers(self, max_requests: int) -> UBatchBuffers:
        return UBatchBuffers(max_requests, self.settings.num_microbatches, self._tensor_device())

    def _tensor_device(self) -> torch.device:
        return torch.device(self.device.name)


def _forward_with_cache(forward: Callable[[StepInput, Any], Any], kv_cache: Any, step: StepInput) -> Any:
    return forward(step, kv_cache)


def _failed_microbatch(error: BaseException) -> int | None:
    if isinstance(error, MicrobatchFailed):
        return error.index
    return error.owner if isinstance(error, ReceiveHookError) else None


def _failure_of_another_rank(error: BaseException | None) -> RankFailedError | None:
    while error is not None and not isinstance(error, RankFailedError):
        error = error.__cause__
    return error


def _first_rows(output: Any, rows: int) -> Any:
    """The output without the rows of the padding that the ranks agreed on: views, in the same containers."""
    if isinstance(output, Tensor):
        return output[:rows]
    if isinstance(output, dict):
        return {key: _first_rows(value, rows) for key, value in output.items()}
    if isinstance(output, (tuple, list)):
        items = [_first_rows(item, rows) for item in output]
        return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
    if isinstance(tensors := getattr(output, "tensors", None), dict):
        return type(output)(_first_rows(tensors, rows))
    return output
