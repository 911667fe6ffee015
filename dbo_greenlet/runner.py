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
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, TypeVar

import torch

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
    GraphCaptureError,
    SchedulerInternalError,
)
from .microbatch import UBatchContext, make_ubatch_contexts
from .policy import Policy
from .rank_failures import RankLink, failing_together
from .rank_schedules import compare_with_ranks
from .schedule import Schedule
from .scheduler import Scheduler
from .step_graphs import CapturedStep, StepGraphs, open_pool
from .step_output import StepOutput, first_rows

if TYPE_CHECKING:
    from .all2all import AllToAll
    from .graphs import GraphPool
    from .slice_bracket import SliceBracket

__all__ = ["MODES", "RankLink", "Runner", "StepOutput"]

MODES = ("auto", "never", "sequential")

T = TypeVar("T")


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
        max_requests: requests (padding included) of the largest step. A larger one makes new buffers; captured graphs
            keep theirs.
        compare_schedules: after each split step, compare its schedule hash with the other ranks' (`rank_schedules`). It
            costs a small all-gather a step.
        inference_mode: wrap each step in `torch.inference_mode()`: once, round all microbatches.
        graph_sizes: steps in which every request has one new token are padded, tokens and requests, to the next of
            these sizes, and run as a graph once `capture_graphs` was called. The same on every rank. Padding can leave
            the last microbatch without a real token; such a step is not split.
        use_graphs: False pads and captures nothing, so that eager steps have the shapes that graphs would have.
        all2all: the model's all-to-all: asked whether it can be captured, told how large microbatches are, and given
            its multiprocessors while a split step runs. Without it the all-to-all makes room for its largest step.
        timeline: a `GpuTimeline`: the split steps' slices are timed on the GPU, in graphs too.

    Attributes: `voted`, nanoseconds (`time.perf_counter_ns`) around the latest step's vote; None before the first, and
    where there is no group to vote with.

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
        if self.scheduler.recording is not None and group is not None:
            # Before any step: what runs first may be a step of somebody else, who does not know it.
            self.scheduler.recording.rank_is(group.rank, group.world_size)
        self._forward: Callable[[StepInput], Any] = (
            model if kv_cache is None else partial(_forward_with_cache, model.forward, kv_cache)
        )
        self._compare_schedules = compare_schedules
        self._inference_mode = inference_mode
        self._unsplit = VoteSettings(1, self.settings.decode_threshold, self.settings.prefill_threshold)
        self._buffers = self._make_buffers(max_requests)
        self._contexts: list[UBatchContext] = []
        self._joined = self.device.new_event()
        self._stream: Any = None
        self._moved = self.device.new_event()
        self._timeline = timeline
        self._all2all = all2all
        self.voted: tuple[int, int] | None = None
        self._graphs = StepGraphs(graph_sizes, self._tensor_device()) if graph_sizes else None
        self._pool: GraphPool | None = None
        if graph_sizes and use_graphs:
            self._pool = open_pool(self.device, carrier, kv_cache, all2all)

    def capture_graphs(self, mode: str = "auto") -> list[CapturedStep]:
        """Capture what steps of that mode can ask for, and return all that is captured. Every rank calls it alike.

        Each graph is preceded by an eager run of the same step, whose requests are padding: it writes nothing into the
        KV cache, but takes part in the all-to-all. After the group was reset, everything is captured anew.

        Raises:
            ConfigurationError: the runner was made without graphs, or an unknown mode.
            GraphCaptureError: a capture failed here; the process is as it was before. The other ranks of the group get
                `RankFailedError`, and the group is to be reset.
        """
        if self._graphs is None or self._pool is None:
            raise ConfigurationError("this runner makes no graphs; give it graph_sizes and use_graphs=True")
        if mode not in ("auto", "never"):
            raise ConfigurationError(f"mode={mode!r} has no graphs; choose auto or never")
        with failing_together(self.group), torch.inference_mode(self._inference_mode):
            settings = self._unsplit if mode == "never" else self.settings
            found = self._graphs.capture_all(settings, self._capture, getattr(self.group, "generation", 0))
            if self.group is not None:
                # Every rank has them all, or has heard of the one that failed, before one of them replays.
                self.group.exchange(torch.tensor([len(found)], dtype=torch.int64))
            return found

    def drop_graphs(self) -> None:
        """Forget all graphs; steps run eagerly again. NCCL does not end a communicator while a graph holds it."""
        if self._graphs is not None:
            self._graphs.drop()

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
            RankFailedError: another rank failed, died or stalled. A replay returns before it ran: who reads its output
                asks the group (`wait_for_device`) first.
            ScheduleDivergence: with `compare_schedules`, a rank took other decisions in this step; it names the rank.
            BrokenGroupError: the group is broken since an earlier step.
            ConfigurationError: an unknown mode.
        """
        if mode not in MODES:
            raise ConfigurationError(f"mode={mode!r} is not known; choose one of {', '.join(MODES)}")
        with failing_together(self.group), torch.inference_mode(self._inference_mode):
            vote, fits = RankVote.of_step(step, veto=veto), False
            if self._graphs is not None:
                vote, fits = self._graphs.vote(step, vote)
            decision = decide(self._votes(vote), self._unsplit if mode == "never" else self.settings)
            if all(each.num_tokens == 0 for each in decision.votes):
                return StepOutput(None, decision)
            self._follow_stream()
            return self._run(step, decision, mode, policy, fits)

    def _votes(self, vote: RankVote) -> list[RankVote]:
        if self.group is None:
            return [vote]
        begin = perf_counter_ns()
        rows = self.group.exchange(vote.to_row())
        self.voted = (begin, perf_counter_ns())
        return [RankVote.from_row(row) for row in rows]

    def _run(self, step: StepInput, decision: Decision, mode: str, policy: Policy | None, fits: bool) -> StepOutput:
        rows = step.num_padded_tokens
        graphs = self._graphs
        size = graphs.size_of(decision) if graphs is not None and fits else None
        self._expect(decision.padded_tokens, decision.num_microbatches)
        if graphs is not None and size is not None:
            graphs.buffers.fill(step, size)
            found = graphs.find(size, decision.num_microbatches)
            if found is not None and policy is None and mode != "sequential":
                return self._replay(found, decision, rows)
            step = graphs.buffers.padded(step, size)
        else:
            step = pad_step(step, decision.tokens_on(0 if self.group is None else self.group.rank))
        tokens = step.num_padded_tokens
        slices = tuple(split_step(step, decision.num_microbatches)) if decision.split else ()
        if not decision.split:
            with self._recorded(step, (), decision):
                output = self._forward(step)
            return StepOutput(first_rows(output, rows), decision, tokens=tokens)
        if mode == "sequential":
            outputs = [entry() for entry in self._entries(step, slices)]
            return StepOutput(first_rows(merge_outputs(outputs, slices), rows), decision, slices, tokens=tokens)
        scheduler = self.scheduler if policy is None else self._new_scheduler(policy)
        contexts = self._contexts_for_step()
        events = None if self._timeline is None else self._timeline.eager(contexts)
        output, schedule = self._run_split(step, slices, scheduler, contexts, events, decision)
        self._compare(schedule)
        return StepOutput(first_rows(output, rows), decision, slices, schedule, timeline=events, tokens=tokens)

    def _recorded(
        self, step: StepInput, slices: Sequence[UBatchSlice], decision: Decision | None
    ) -> AbstractContextManager[None]:
        """What tells the trace, where there is one, of the step that runs inside; without a decision, of a graph's."""
        recording = self.scheduler.recording
        if recording is None:
            return nullcontext()
        from .runner_recording import recorded

        return recorded(recording, step, slices, decision, group=self.group, device=self.device, voted=self.voted)

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
        decision: Decision | None = None,
    ) -> tuple[Any, Schedule]:
        entries = self._entries(step, slices)
        with self._recorded(step, slices, decision):
            with nullcontext() if self._all2all is None else self._all2all.reserve_sms():
                try:
                    result = scheduler.run(entries, contexts, bracket=bracket)
                except BaseException:
                    # What was unwound has given its tensors back to the compute stream. A capture that CUDA has given
                    # up cannot be told so, and need not.
                    with suppress(RuntimeError):
                        self._join(contexts)
                    raise
            self._join(contexts)
        return merge_outputs(result.outputs, slices), result.schedule

    def _join(self, contexts: list[UBatchContext]) -> None:
        """Whatever is enqueued next runs behind the step's communication as well."""
        # By the contexts' device, which may be one that notes what it is asked for.
        device = contexts[0].device
        device.record(self._joined, contexts[0].comm_stream)
        device.wait(contexts[0].compute_stream, self._joined)

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
        wait = getattr(self.group, "wait_for_device", None)
        slices: tuple[UBatchSlice, ...] = ()
        schedule = events = None
        try:
            if microbatches == 1:
                captured = pool.capture(partial(self._noted, partial(self._forward, step)), wait=wait)
            else:
                slices = tuple(split_step(step, microbatches))
                comm = self._contexts_for_step()[0].comm_stream
                # Contexts of its own: an event that a capture has recorded stands for nothing outside of it.
                contexts = make_ubatch_contexts(microbatches, pool.stream, comm, device=self.device)
                events = None if self._timeline is None else self._timeline.captured(contexts)
                run = partial(self._run_split, step, slices, self.scheduler, contexts, events)
                both = pool.capture(partial(self._noted, run), streams=[comm], wait=wait)
                output, schedule = both.output
                captured = replace(both, output=output)
        except GraphCaptureError as error:
            raise GraphCaptureError(f"the step of {size} tokens in {microbatches} microbatch(es): {error}") from error
        operations = None if self._all2all is None else self._all2all.replay_token()
        buffers = (graphs.buffers, self._buffers)
        return CapturedStep(size, microbatches, captured, slices, schedule, events, buffers, operations)

    def _noted(self, run: Callable[[], T]) -> T:
        """`run`; where it is being captured, the all-to-all notes what it does from here on."""
        if self._all2all is not None and torch.cuda.is_current_stream_capturing():
            self._all2all.begin_capture()
        return run()

    def _replay(self, found: CapturedStep, decision: Decision, rows: int) -> StepOutput:
        if self._all2all is not None:
            self._all2all.replaying(found.operations)
        found.captured.replay()
        if found.timeline is not None:
            found.timeline.replayed()
        output = first_rows(found.captured.output, rows)
        if found.schedule is not None:
            self._compare(found.schedule)
        return StepOutput(output, decision, found.slices, found.schedule, "replayed", found.timeline, tokens=found.size)

    def _follow_stream(self) -> None:
        """A step on another stream than the last one runs behind it: both use the same buffers."""
        stream = self.device.current_stream()
        if self._stream is not None and self._stream is not stream:
            self.device.record(self._moved, self._stream)
            self.device.wait(stream, self._moved)
        self._stream = stream

    def _contexts_for_step(self) -> list[UBatchContext]:
        """The contexts, on the stream that is current now; made anew only where that is another one than last time."""
        compute = self.device.current_stream()
        if not self._contexts or self._contexts[0].compute_stream is not compute:
            comm = self._contexts[0].comm_stream if self._contexts else None
            n = self.settings.num_microbatches
            self._contexts = make_ubatch_contexts(n, compute, comm, device=self.device)
        return self._contexts

    def _compare(self, schedule: Schedule) -> None:
        if self.group is not None and self._compare_schedules:
            compare_with_ranks(self.group, schedule)

    def _make_buffers(self, max_requests: int) -> UBatchBuffers:
        # Ordinary tensors even if the caller is in inference mode: steps of either kind write to them.
        with torch.inference_mode(False):
            return UBatchBuffers(max_requests, self.settings.num_microbatches, self._tensor_device())

    def _tensor_device(self) -> torch.device:
        return torch.device(self.device.name)


def _forward_with_cache(forward: Callable[[StepInput, Any], Any], kv_cache: Any, step: StepInput) -> Any:
    return forward(step, kv_cache)
