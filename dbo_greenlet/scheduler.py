"""The scheduler: runs N microbatches to completion, one at a time, and says in which order it did.

It keeps these laws; comments elsewhere name them by number:

1. One thread, one parent.                            `greenlet_carrier`
2. No switch under a C++ frame.                       `greenlet_carrier._refuse_unsafe`, `direct_ops`
3. Thread state belongs to the microbatch.            `switch_state`, for torch `thread_state`
4. Events before switches, receives before use.       `microbatch`, `step.Microbatch.run_outstanding`
5. The schedule is a function of (policy, seed, yield points).   `schedule`, `Step.slice_ended`
6. Program order on the compute stream.               `Step.may_run`
7. A failing microbatch fails the step.               `Scheduler.run`, `greenlet_carrier._unwind`
8. Nothing when off.                                  `yields`
9. Errors are part of the interface.                  `errors`

This module imports neither torch nor CUDA nor vLLM, and nothing in it does I/O.
"""

from __future__ import annotations

import contextvars
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from . import greenlet_carrier, thread_carrier
from .errors import (
    ConfigurationError,
    ForeignSwitchError,
    MicrobatchFailed,
    PolicyError,
    ReceiveHookError,
    ScheduleDivergence,
    SchedulerInternalError,
    StepAborted,
)
from .policy import Policy, RoundRobin
from .schedule import MAX_MICROBATCHES, Schedule
from .step import Microbatch, Step, running, step_over
from .switch_state import PlainSwitchState, SwitchState

__all__ = ["CARRIERS", "Scheduler", "StepResult"]

if TYPE_CHECKING:
    from .devices import Device
    from .slice_bracket import SliceBracket
    from .slice_ranges import SliceRanges
    from .trace.process_trace import ProcessTrace

T = TypeVar("T")
logger = logging.getLogger("dbo_greenlet")


@dataclass(frozen=True)
class StepResult(Generic[T]):
    """What a step gave.

    Attributes:
        outputs: what each microbatch's entry returned, in order of the microbatches.
        schedule: the decisions taken.
    """

    outputs: list[T]
    schedule: Schedule

    @property
    def yields(self) -> tuple[int, ...]:
        """Number of yields of each microbatch."""
        return self.schedule.yields


class StepHooks:
    """What the carriers of one step need besides the step itself.

    The instruments, sorted by what they listen to so that an unused event costs one test; the caller's context; the
    scheduler's idle greenlets; and what is put round each slice.
    """

    def __init__(
        self, instruments: list[Any], pool: greenlet_carrier.CarrierPool, bracket: SliceBracket | None = None
    ) -> None:
        self.instruments = instruments
        self.bracket = bracket
        self.pool = pool
        self.before_slice = self.teller("before_slice")
        self.after_slice = self.teller("after_slice")
        self.copy_context = contextvars.copy_context().copy

    def teller(self, event: str) -> Callable[..., Any] | None:
        """What tells the instruments of `event`; None where none listens.

        One that raises is taken off and logged, and the step goes on without it: an instrument watches, and must not be
        able to fail the step that it watches. One that says `never_raises` need not be guarded against, which saves a
        call in each event.
        """
        if not self.instruments:
            return None
        listeners = [each for each in self.instruments if getattr(each, event, None) is not None]
        methods: list[Callable[..., Any]] = [getattr(each, event) for each in listeners]
        if len(methods) > 1:
            return partial(_tell, methods)
        if not methods:
            return None
        # The usual case, several times in each slice: without a loop.
        only = methods[0]
        if getattr(listeners[0], "never_raises", False):
            return only

        def tell(*arguments: Any) -> None:
            nonlocal only
            try:
                only(*arguments)
            except Exception:
                # Whatever the instrument raises is a fault of the instrument's, and logged.
                _taken_off(only)
                only = _not_listening

        return tell

    def tell(self, event: str, *arguments: Any) -> None:
        """Tell the instruments of what happens once a step."""
        if (teller := self.teller(event)) is not None:
            teller(*arguments)


def _tell(methods: list[Any], *arguments: Any) -> None:
    for method in tuple(methods):
        try:
            method(*arguments)
        except Exception:
            # Whatever the instrument raises is a fault of the instrument's, and logged.
            _taken_off(method)
            methods.remove(method)


def _taken_off(method: Any) -> None:
    logger.exception("instrument %r raised and is removed", getattr(method, "__self__", method))


def _not_listening(*_: Any) -> None:
    """In the place of an instrument that was taken off."""


# What the scheduler finds wrong and raises inside a microbatch, at its own yield point. It names the microbatch
# already, so it reaches the caller as it is; everything else that comes out of a microbatch is wrapped.
_OURS = (ScheduleDivergence, ForeignSwitchError, ReceiveHookError, PolicyError, SchedulerInternalError)

CARRIERS: dict[str, tuple[type[Microbatch], Callable[..., None]]] = {
    "greenlet": (greenlet_carrier.GreenletMicrobatch, greenlet_carrier.run_step),
    "thread": (thread_carrier.ThreadMicrobatch, thread_carrier.run_step),
}


class Scheduler:
    """Runs steps of N microbatches.

    Args:
        policy: who goes next; default `RoundRobin()`.
        carrier: "greenlet" (all on the calling thread) or "thread" (one OS thread per microbatch with event hand-offs,
            the classical design, for comparison). Never chosen silently.
        strict: raise `ScheduleDivergence` where microbatches pass different yield sites, and look for C++ frames at
            every yield. None reads the environment variable DBO_GREENLET_STRICT ("1" is on).
        thread_state: "auto" keeps torch's thread state apart once torch is imported; None keeps the current stream
            only; or a callable that makes one `SwitchState` per step.
        watchdog: seconds without progress after which a report of the stuck step is logged; None is off.
        instruments: objects with any of the methods `before_step(step)`, `after_step(step, error)`,
            `before_slice(microbatch)`, `after_slice(microbatch)`, `recv_registered(microbatch)`,
            `recv_ran(owner, by)`, `event_captured(microbatch, event)`. Between slices the current stream is that of the
            slice. One that raises is taken off; one with `never_raises` is trusted not to.

    Where a profiler of torch is on as a step begins, each slice gets a range in its trace: see `slice_ranges`.

    With DBO_GREENLET_TRACE in the environment, where the scheduler is made, its steps are recorded; `recording` is what
    does it (`trace.process_trace`), and otherwise None.

    Between steps a scheduler keeps nothing but idle greenlets, per thread: it may run steps in several threads at once,
    and a microbatch may run a step inside a step.

    Raises:
        ConfigurationError: a setting that cannot work.
    """

    # A host whose callers expect one kind of error for whatever happens in a microbatch leaves this empty.
    passed_on: tuple[type[Exception], ...] = _OURS
    # A host that records its steps itself, from the same variables, says False.
    recorded_by_environment = True

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        carrier: str = "greenlet",
        strict: bool | None = None,
        thread_state: Callable[[], SwitchState] | str | None = "auto",
        watchdog: float | None = None,
        instruments: Iterable[Any] = (),
    ) -> None:
        if carrier not in CARRIERS:
            raise ConfigurationError(f"carrier={carrier!r} is not known; choose one of {sorted(CARRIERS)}")
        if isinstance(thread_state, str) and thread_state != "auto":
            raise ConfigurationError(f"thread_state={thread_state!r}: use 'auto', None or a callable")
        if watchdog is not None and not watchdog > 0:
            raise ConfigurationError(f"watchdog={watchdog!r} must be a positive number of seconds, or None for off")
        self.policy: Policy = RoundRobin() if policy is None else policy
        self.carrier = carrier
        # A host that keeps ambient state of its own at each switch runs its own kind of microbatch.
        self.microbatch_type = CARRIERS[carrier][0]
        self.strict = _strict_from_environment() if strict is None else strict
        self.thread_state = thread_state
        self.instruments = list(instruments)
        self.watchdog = watchdog
        self.recording = _recording_from_environment() if self.recorded_by_environment else None
        self._pool = greenlet_carrier.CarrierPool()

    def run(
        self,
        entries: Sequence[Callable[[], T]],
        contexts: Sequence[Any] | None = None,
        *,
        bracket: SliceBracket | None = None,
    ) -> StepResult[T]:
        """Run one step: every entry to completion, interleaved at its yield points.

        Args:
            entries: one callable per microbatch, N >= 1, all on the same model.
            contexts: one `UBatchContext` per microbatch (streams and events), or None where no stream is switched.
            bracket: what to run round each slice, on the slice's own stream. What it raises fails the step.

        Raises:
            MicrobatchFailed: an entry raised; its error is the cause. Siblings are unwound, the thread's state is
                what it was, and the next step works.
            KeyboardInterrupt, SystemExit: raised in or between microbatches; siblings are unwound first.
            ScheduleDivergence, UnsafeYieldError, ForeignSwitchError, ReceiveHookError, PolicyError: see there.
            ConfigurationError: no entry, too many, or as many contexts as there are not entries.
        """
        count = len(entries)
        if not 1 <= count <= MAX_MICROBATCHES:
            raise ConfigurationError(f"a step has 1 to {MAX_MICROBATCHES} microbatches, not {count}")
        if contexts is not None and len(contexts) != count:
            raise ConfigurationError(f"{len(contexts)} contexts for {count} microbatches; pass one for each")
        kind, run_step = self.microbatch_type, CARRIERS[self.carrier][1]
        step = Step(
            [kind(i, entry, contexts[i] if contexts else None) for i, entry in enumerate(entries)],
            getattr(self.policy, "name", type(self.policy).__name__),
            self.strict,
        )
        thread = get_ident()
        step.outer = running.get(thread)
        instruments = self.instruments
        if self.recording is not None:
            watch = self.recording.watch(count, contexts, self.policy, self.carrier, timed=bracket is not None)
            if watch is not None:
                instruments = [*instruments, *watch.instruments]
                bracket = watch.bracket if bracket is None else bracket
        if (ranges := _ranges_for_a_profiler(bracket)) is not None:
            instruments, bracket = [*instruments, ranges], ranges
        hooks = StepHooks(instruments, self._pool, bracket)
        if hooks.instruments:
            step.on_register = hooks.teller("recv_registered")
            step.on_receive = hooks.teller("recv_ran")
            step.on_event = hooks.teller("event_captured")
            hooks.tell("before_step", step)
        error: BaseException | None = None
        try:
            self._run(step, run_step, hooks, getattr(contexts[0], "device", None) if contexts else None)
            return StepResult(
                [m.result for m in step.microbatches], Schedule(count, tuple(step.decisions), tuple(step.sites))
            )
        except BaseException as raised:
            error = raised
            # What a step inside a microbatch found names that step's microbatches: the outer one wraps it like any
            # other error.
            if isinstance(raised, _OURS):
                raised._left_a_step = True  # type: ignore[union-attr]
            raise
        finally:
            if hooks.instruments:
                hooks.tell("after_step", step, error)
            error = None
            # The carrier has done this; a Ctrl-C may have come in just there.
            step_over(thread, step.outer)
            step.release()

    def _run(self, step: Step, run_step: Callable[..., None], hooks: StepHooks, device: Device | None) -> None:
        choose = self.policy.start(step)
        watched = None
        if self.watchdog is not None:
            from .watchdog import watch

            watched = watch(step, self.watchdog)
        try:
            run_step(step, choose, self._switch_state(device), hooks)
        finally:
            if watched is not None:
                watched.stop()
        if step.failed_index is not None:
            _raise_failed(step, step.failed_index, self.passed_on)
        if finish := getattr(self.policy, "finish", None):
            finish(step)

    def _switch_state(self, device: Device | None) -> SwitchState:
        if callable(self.thread_state):
            return self.thread_state()
        # torch is not imported here: a program that has not imported it has no torch thread state to keep.
        if self.thread_state == "auto" and "torch" in sys.modules:
            return _torch_thread_state()(device)
        return PlainSwitchState(device)

    def __repr__(self) -> str:
        return f"Scheduler(policy={self.policy!r}, carrier={self.carrier!r}, strict={self.strict})"


@functools.cache
def _torch_thread_state() -> Callable[[Device | None], SwitchState]:
    # Once: an import statement, even of what is there, takes longer than making the object.
    from .thread_state import TorchThreadState

    return TorchThreadState


def _ranges_for_a_profiler(bracket: SliceBracket | None) -> SliceRanges | None:
    """What writes a range for each slice, round `bracket`, where a profiler of torch is on; otherwise None."""
    # Not imported: where nobody imported torch, none can be. A flag in a module, since this is asked in every step.
    profiler: Any = sys.modules.get("torch.autograd.profiler")
    if profiler is None or not getattr(profiler, "_is_profiler_enabled", False):
        return None
    from .slice_ranges import SliceRanges

    return SliceRanges(bracket)


def _raise_failed(step: Step, index: int, passed_on: tuple[type[Exception], ...]) -> None:
    failed = step.microbatches[index]
    secondary = [
        (m.index, m.error)
        for m in step.microbatches
        if m is not failed and m.error is not None and not isinstance(m.error, StepAborted)
    ]
    error = _what_to_raise(step, failed, secondary, passed_on)
    cause = failed.error
    try:
        if error is cause:
            raise error
        raise error from cause
    finally:
        # An error whose traceback holds the frame that holds the error is a cycle, and with it would stay the model's
        # frames and their tensors until the garbage collector happens to come.
        del error, cause, failed, secondary


def _what_to_raise(
    step: Step,
    failed: Microbatch,
    secondary: list[tuple[int, BaseException]],
    passed_on: tuple[type[Exception], ...],
) -> BaseException:
    for _, error in secondary:
        if not isinstance(error, Exception):
            return error  # KeyboardInterrupt, SystemExit: whoever asked to stop is not to be answered "failed"
    cause = failed.error
    if cause is None:
        return SchedulerInternalError(f"microbatch {failed.index} failed without an error")
    if not isinstance(cause, Exception):
        return cause
    if isinstance(cause, passed_on) and not hasattr(cause, "_left_a_step"):
        return cause
    failure = MicrobatchFailed(failed.index, step.count, failed.slice_number, failed.site)
    failure.secondary.extend(secondary)
    return failure


def _recording_from_environment() -> ProcessTrace | None:
    """What `dbo-greenlet record` asks for. Imported only then: the trace is no part of the scheduler."""
    if not os.environ.get("DBO_GREENLET_TRACE"):
        return None
    from .trace.process_trace import process_trace

    return process_trace()


def _strict_from_environment() -> bool:
    return os.environ.get("DBO_GREENLET_STRICT", "").lower() in ("1", "true", "yes", "on")
