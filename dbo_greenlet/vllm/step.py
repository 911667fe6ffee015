"""One step of vLLM's microbatches on the calling thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.worker.ubatching import UBatchContext

from ..policy import RoundRobin
from ..schedule import Schedule
from ..scheduler import Scheduler, StepResult
from ..thread_state import TorchThreadState
from .counters import counters
from .host_microbatch import HostMicrobatch, current_stream, leave, registered
from .watched_events import watched_events

if TYPE_CHECKING:
    from .recording import ServerTrace

__all__ = ["HostScheduler", "count_replay", "record_to", "recorded_to", "run_step"]


class HostScheduler(Scheduler):
    """The scheduler with vLLM's microbatches: round robin, as vLLM's threads hand over.

    Whatever a microbatch raises, a failed receive included, comes out as vLLM's V2 runner says it: "Microbatch i of n
    failed", with that as the cause.
    """

    passed_on = ()
    recorded_by_environment = False

    def __init__(self, instruments: Iterable[Any] = ()) -> None:
        # vLLM's own methods choose the stream after each switch.
        super().__init__(RoundRobin(), thread_state=_thread_state, instruments=instruments)
        self.microbatch_type = HostMicrobatch


def _thread_state() -> TorchThreadState:
    return TorchThreadState(host=True)


# Two schedulers, so that a step that is not recorded does not ask whether it is.
_plain = HostScheduler()
_trace: ServerTrace | None = None
_recording: HostScheduler | None = None


def record_to(trace: ServerTrace | None) -> None:
    """From now on, steps that are due are recorded to `trace`; None: none are."""
    global _trace, _recording
    _trace = trace
    _recording = None if trace is None else HostScheduler([trace.recorder])


def recorded_to() -> ServerTrace | None:
    """The trace of this process, if there is one."""
    return _trace


def count_replay() -> None:
    """A step ran as the replay of a captured one."""
    counters.executed("replayed")
    if _trace is not None:
        _trace.replayed_step()


def run_step(
    contexts: Sequence[UBatchContext],
    calls: Sequence[Callable[[], Any]],
    *,
    kind: str,
    slices: Sequence[Any] | None = None,
) -> list[Any]:
    """Run one call per context to completion, interleaved at vLLM's yields.

    Args:
        contexts: vLLM's, in order of their ids.
        calls: the model with each microbatch's inputs.
        kind: "eager" or "captured", for counters and traces.
        slices: vLLM's, one a microbatch, for the trace; None where they are not known.

    Returns:
        What the calls returned, in that order.

    Raises:
        MicrobatchFailed: one of them raised; that is its cause. Siblings are unwound, and vLLM's tables and the
            thread's stream are what they were.
        DboError: as `Scheduler.run`.
    """
    trace = _trace
    recorded = trace is not None and trace.due()
    scheduler = _recording if recorded and _recording is not None else _plain
    stream = current_stream()
    result: StepResult[Any] | None = None
    error: BaseException | None = None
    try:
        # Once round the hub, and not in each microbatch: scopes that end in another order than they began in would
        # leave the thread in inference mode.
        watched = nullcontext() if not recorded or trace is None else watched_events(contexts, trace.recorder)
        with registered(list(contexts)) as hosts, watched, torch.inference_mode():
            result = scheduler.run([_until_it_leaves(*each) for each in zip(contexts, calls, strict=True)], hosts)
        counters.executed(kind)
        return result.outputs
    except BaseException as raised:
        error = raised
        counters.executed("failed")
        _forget_shared_outputs(contexts)
        raise
    finally:
        if current_stream() is not stream:
            torch.cuda.set_stream(stream)
        if trace is not None and (recorded or error is not None):
            schedule: Schedule | None = None if result is None else result.schedule
            bounds = _bounds(slices)
            tokens = bounds[-1][1] if bounds else 0
            trace.split_step(kind=kind, slices=bounds, tokens=tokens, padded=tokens, schedule=schedule, error=error)
        error = None


def _until_it_leaves(context: UBatchContext, call: Callable[[], Any]) -> Callable[[], Any]:
    """`call`, and vLLM's table says when the microbatch is done: who looks there finds None for a peer that left."""

    def entry() -> Any:
        try:
            return call()
        finally:
            leave(context)

    return entry


def _forget_shared_outputs(contexts: Sequence[UBatchContext]) -> None:
    """Let vLLM's MoE layers forget what an unwound microbatch computed and never fetched.

    A layer keeps the output of its shared experts from before the combine until after it, one slot a microbatch, and
    refuses to compute over a full slot. A microbatch that is unwound in between leaves it full, and every later step
    would fail.
    """
    for layer in (getattr(contexts[0].forward_context, "no_compile_layers", None) or {}).values():
        kept = getattr(getattr(layer, "_shared_experts", None), "_output", None)
        if isinstance(kept, list):
            kept[:] = [None] * len(kept)


def _bounds(slices: Sequence[Any] | None) -> list[list[int]]:
    """Of each microbatch: first and end token, first and end request."""
    return [
        [each.token_slice.start, each.token_slice.stop, each.request_slice.start, each.request_slice.stop]
        for each in slices or ()
    ]
