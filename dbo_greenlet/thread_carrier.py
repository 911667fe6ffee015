"""Microbatches as OS threads: the classical design, for comparison.

The same `Step` keeps the same laws and makes the same decisions; only what carries a microbatch differs. One thread
runs at a time. A yielding thread does the hub's bookkeeping itself and wakes the next one directly: handing over to a
hub thread first would double the hand-offs, and this carrier is the baseline the greenlets are measured against, so it
must be as good as the design allows.

The hand-off is a `threading.Event` per microbatch: set the next one's, wait for one's own, clear it. That is what is
meant by "stock threads" in every table. A bare lock used as a binary semaphore is about twice as quick:
`LockThreadMicrobatch`, for benchmarks that show both.

Each thread has torch's thread state to itself, so nothing is saved and restored here. Ambient state that is registered
(`register_ambient_state`) is therefore shared by the microbatches of this carrier, unless it is per thread itself.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol

from .errors import SchedulerInternalError, StepAborted
from .slice_bracket import Slice
from .step import Microbatch, Step, running, step_over, traced

if TYPE_CHECKING:
    from .scheduler import StepHooks
    from .switch_state import SwitchState

__all__ = ["LockThreadMicrobatch", "ThreadMicrobatch", "run_step"]


class Signal(Protocol):
    """Wakes one waiter; a wake-up that comes before the wait is not lost."""

    def wake(self) -> None: ...
    def sleep(self) -> object: ...


class EventSignal:
    __slots__ = ("sleep", "wake")

    def __init__(self) -> None:
        event = threading.Event()
        self.wake = event.set

        def sleep(wait: Callable[[], bool] = event.wait, clear: Callable[[], None] = event.clear) -> None:
            wait()
            clear()

        self.sleep = sleep


class LockSignal:
    __slots__ = ("_lock", "sleep")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.sleep = self._lock.acquire

    def wake(self) -> None:
        # During an abort a thread may be woken twice; releasing a lock that is open is an error, and harmless here.
        if self._lock.locked():
            self._lock.release()


class Baton:
    """What the threads of one step share."""

    __slots__ = ("choose", "fault", "hooks", "over", "slice", "state", "step")

    def __init__(self, step: Step, choose: Callable[[], int], state: SwitchState, hooks: StepHooks) -> None:
        self.step = step
        self.choose = choose
        self.state = state
        self.hooks = hooks
        self.over = threading.Event()
        self.fault: BaseException | None = None
        self.slice: Slice | None = None  # the one that runs, where there is a bracket

    def slice_ended(self, microbatch: Microbatch) -> Any:
        """The hub's part at the end of a slice: record it and decide who is next, None where nobody is left.

        The caller holds the baton, so nobody else runs. An error here is the step's and not the microbatch's that
        happens to do the bookkeeping: it is kept for the thread that called `run`, and the microbatch is unwound.
        """
        try:
            if self.hooks.bracket is not None and (this := self.slice) is not None:
                self.slice = None
                this.end_site = microbatch.site
                self.hooks.bracket.end(this)
            self.step.slice_ended(microbatch)
            if self.hooks.after_slice is not None:
                self.hooks.after_slice(microbatch)
            return self.pass_on() if self.step.live else None
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> NoReturn:
        self.step.aborting = True
        if self.fault is None:
            self.fault = error
        raise StepAborted("the scheduler failed") from None

    def slice_failed(self, microbatch: Microbatch) -> None:
        """The microbatch raised: its slice ends too, and what the bracket says to that would hide the reason."""
        if self.hooks.bracket is not None and (this := self.slice) is not None and this.microbatch == microbatch.index:
            self.slice = None
            this.end_site = microbatch.site
            with contextlib.suppress(Exception):
                self.hooks.bracket.end(this)

    def pass_on(self) -> Any:
        microbatch: Any = self.step.check_choice(self.choose())
        microbatch.started = True
        return microbatch

    def slice_begins(self, microbatch: Microbatch) -> None:
        traced[0], traced[1] = True, microbatch.index
        if self.hooks.before_slice is not None:
            self.hooks.before_slice(microbatch)
        if (bracket := self.hooks.bracket) is not None:
            this = Slice(microbatch.index, microbatch.slice_number, len(self.step.decisions), microbatch.site)
            try:
                bracket.begin(this)
            except BaseException as error:
                # As at the end of a slice: the step's error, which the model must not be able to swallow.
                self._fail(error)
            self.slice = this


class ThreadMicrobatch(Microbatch):
    __slots__ = ("baton", "signal", "thread")

    new_signal: ClassVar[Callable[[], Signal]] = EventSignal

    def __init__(self, index: int, entry: Callable[[], Any], context: Any) -> None:
        super().__init__(index, entry, context)
        self.signal: Signal = type(self).new_signal()
        self.baton: Baton | None = None
        self.thread: threading.Thread | None = None

    def yield_(self, site: str) -> None:
        step, baton = self.step, self.baton
        if step is None or baton is None or step.aborting:
            raise StepAborted("the step is being aborted")
        self.site = site
        chosen = baton.slice_ended(self)
        if chosen is not self:
            chosen.signal.wake()
            self.signal.sleep()
        if step.aborting:
            raise StepAborted(f"a sibling of microbatch {self.index} failed")
        baton.slice_begins(self)
        if self.outstanding:
            self.run_outstanding()

    def body(self) -> None:
        """What the thread runs. Never raises; the last one to hold the baton tells the caller that the step is over."""
        baton, step = self.baton, self.step
        if baton is None or step is None:
            raise SchedulerInternalError("a released microbatch was started")
        self.signal.sleep()
        if step.aborting:
            return
        thread = get_ident()
        running[thread] = self
        chosen = None
        try:
            baton.state.thread_begin()
            try:
                chosen = self._run_entry(baton, step)
            except BaseException:  # passed on; only the slice that failed must not stay open
                baton.slice_failed(self)
                raise
            finally:
                baton.state.thread_end()
        except BaseException as error:
            # Everything: the thread that called `run` raises it, after the siblings are unwound.
            self.error = error.with_traceback(error.__traceback__.tb_next if error.__traceback__ else None)
            if step.failed_index is None and not isinstance(error, StepAborted):
                step.failed_index = self.index
        finally:
            running.pop(thread, None)
            if not self.done:
                self.done = True
                step.live -= 1
        if chosen is None:
            baton.over.set()
        else:
            chosen.signal.wake()

    def _run_entry(self, baton: Baton, step: Step) -> Any:
        context = self.context
        if context is not None:
            # The current stream belongs to the thread; a new thread starts on the device's default one.
            context.device.set_stream(context.compute_stream)
        baton.slice_begins(self)
        if self.entry is None:
            raise SchedulerInternalError("a released microbatch was started")
        self.result = self.entry()
        self.run_leftovers()
        self.done = True
        step.live -= 1
        self.site = ""
        return baton.slice_ended(self)

    def release(self) -> None:
        super().release()
        self.baton = None
        self.thread = None


class LockThreadMicrobatch(ThreadMicrobatch):
    """The same with a lock for each hand-off instead of an event."""

    __slots__ = ()
    new_signal: ClassVar[Callable[[], Signal]] = LockSignal


def run_step(step: Step, choose: Callable[[], int], state: SwitchState, hooks: StepHooks) -> None:
    """Run the microbatches of `step` on one thread each, until all returned or one failed (`step.failed_index`).

    All threads have ended when this returns or raises. A first Ctrl-C waits until the microbatch that runs reaches its
    next yield; a second one gives up on it, and leaves its (daemon) thread behind.
    """
    microbatches: Sequence[Any] = step.microbatches
    baton = Baton(step, choose, state, hooks)
    state.start()
    interrupt: BaseException | None = None
    try:
        try:
            for microbatch in microbatches:
                microbatch.baton = baton
                microbatch.thread = threading.Thread(
                    target=hooks.copy_context().run,
                    args=(microbatch.body,),
                    name=f"dbo_greenlet microbatch {microbatch.index}",
                    daemon=True,
                )
                microbatch.thread.start()
            baton.pass_on().signal.wake()
            baton.over.wait()
        except KeyboardInterrupt as error:
            interrupt = error
            step.aborting = True
            if any(microbatch.started for microbatch in microbatches):
                baton.over.wait()
    finally:
        # One at a time, as everything else: the one that ran has ended, the parked ones unwind now.
        step.aborting = True
        try:
            for microbatch in microbatches:
                microbatch.drop_receives()
            for microbatch in microbatches:
                if microbatch.thread is not None and microbatch.thread.ident is not None:
                    microbatch.signal.wake()
                    microbatch.thread.join()
                microbatch.done = True
        finally:
            step_over(get_ident(), step.outer)
            state.finish()
    fault, baton.fault = baton.fault or interrupt, None
    if fault is not None:
        try:
            raise fault
        finally:
            del fault, interrupt  # or the error's traceback and this frame keep each other
