"""Microbatches as greenlets on the caller's thread: the hub.

    caller ── run ──► hub ──switch──► microbatch 0 ──yield──► hub ──switch──► microbatch 1 ──yield──► hub ...

The hub is the greenlet that called `run_step` and the only parent (law 1): a microbatch switches to the hub and nowhere
else, and its result or error is handed over as a value instead of travelling along greenlet parents, so an error is
always charged to the microbatch that raised it. (Letting microbatches switch to each other saves one switch a yield and
was rejected: an exception then surfaces in whichever greenlet happens to be the releaser.)

Between two switches nothing happens but bookkeeping: end of slice, choice, begin of slice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any, NoReturn

from greenlet import getcurrent, greenlet

from .errors import ForeignSwitchError, SchedulerInternalError, StepAborted, UnsafeYieldError
from .policy import answers_in_turn
from .slice_bracket import Slice
from .step import Microbatch, Step, running, step_over, traced

if TYPE_CHECKING:
    from .scheduler import StepHooks
    from .slice_bracket import SliceBracket
    from .switch_state import SwitchState

__all__ = ["Carrier", "CarrierPool", "GreenletMicrobatch", "run_step"]

# What travels through `switch`, besides the microbatch itself: anything else means that somebody outside switched.
_GO = object()
_ENDED = object()

# (yield site, bytes of C stack between the microbatch's entry and the yield) that were found free of C++ frames.
# Walking the Python frames costs about 0.1 us a frame, too much for every yield of a deep model. A site alone is no
# key: one yield line may be reached by a plain call first and through an operator later. The C frames are what matters,
# and their number of bytes, which greenlet knows anyway, tells one path from another. (Greenlet counts what the hub's
# own stack covers. That is all of it where the carrier was started at the hub's depth or above; 0 is never trusted.)
_safe_paths: set[tuple[str, int]] = set()
_MAX_SAFE_PATHS = 65536

# Bytes of the hub's own C stack that a switch to a carrier may have to save before the carrier is replaced.
_MOST_HUB_STACK = 4096


def _refuse_to_yield(microbatch: Microbatch) -> Any:
    raise StepAborted(f"the step of microbatch {microbatch.index} is being aborted")


class GreenletMicrobatch(Microbatch):
    __slots__ = ("ended", "greenlet", "parked", "safe_stack", "stale", "switch", "to_hub")

    def __init__(self, index: int, entry: Callable[[], Any], context: Any) -> None:
        super().__init__(index, entry, context)
        self.greenlet: Carrier | None = None
        self.parked = False  # inside a yield: the only place into which an error may be thrown
        # Bytes of C stack with which the yield it is at was found free of C++ frames; None: ask `_safe_paths`.
        self.safe_stack: int | None = None
        self.ended = False
        self.stale = False
        self.switch: Callable[[Any], Any] | None = None
        # The way to the hub while the step runs, and a function that refuses once it is being aborted or over: the
        # yield itself then needs no test for either.
        self.to_hub: Callable[[Any], Any] = _refuse_to_yield

    def yield_(self, site: str) -> None:
        if getcurrent() is not self.greenlet:
            raise ForeignSwitchError(
                f"the yield at {site!r} was called from a greenlet that is not microbatch {self.index}; "
                "only the microbatch's own greenlet may yield (did a library inside the model start greenlets?)"
            )
        self.park(site)

    def park(self, site: str) -> None:
        """`yield_` for a caller that knows it is on this microbatch's own greenlet."""
        self.hand_over(site)
        if self.outstanding:
            self.run_outstanding()

    def hand_over(self, site: str) -> None:
        """Switch to the hub; returns when the hub switches back. Hosts put their own state on before receives run."""
        self.site = site
        self.parked = True
        go = self.to_hub(self)
        self.parked = False
        if go is not _GO:
            self.refuse_resumption()

    def found_safe(self, stack: int) -> None:
        """The yield that it is at, with `stack` bytes of C stack, is free of C++ frames."""

    def refuse_resumption(self) -> NoReturn:
        raise ForeignSwitchError(
            f"microbatch {self.index}, parked at {self.site!r}, was resumed by a greenlet that is not the hub"
        )

    def body(self) -> None:
        """What the carrier runs. Never raises: the outcome is left in `result` or `error`."""
        try:
            if self.entry is None:
                raise SchedulerInternalError("a released microbatch was started")
            if self.context is not None:
                self.context.enter()
            self.result = self.entry()
            self.run_leftovers()
        except BaseException as error:
            # Everything, KeyboardInterrupt and SystemExit included: the hub decides, after it has unwound the siblings.
            self.error = error.with_traceback(error.__traceback__.tb_next if error.__traceback__ else None)
        hub = self.greenlet.parent if self.greenlet is not None else None
        self.stale = hub is not None and hub._stack_saved > _MOST_HUB_STACK
        self.ended = True

    def release(self) -> None:
        super().release()
        self.greenlet = self.switch = None
        self.to_hub = _refuse_to_yield


class Carrier(greenlet):  # type: ignore[misc]  # greenlet has no types
    """A greenlet that knows whom it carries, so that a yield finds its microbatch with one look."""

    __slots__ = ("microbatch",)  # the attributes of a greenlet without it are in a dict, which is three more looks
    microbatch: GreenletMicrobatch | None


def _carry_one(_: object) -> object:
    """The life of a carrier that is not kept."""
    getcurrent().microbatch.body()
    return _ENDED


def _carry_many(given: object) -> None:
    """The life of a carrier that is kept: one microbatch after the other, handed in by the hub of each step.

    Between steps it waits where nothing of a step is referenced any more. Whatever else comes in there is the result
    of a greenlet that the model started and that outlived its microbatch; it is handed on, as a dead parent would.
    """
    while True:
        if given is _GO:
            getcurrent().microbatch.body()
            given = getcurrent().parent.switch(_ENDED)
        else:
            given = getcurrent().parent.switch(given)


class CarrierPool(threading.local):
    """Idle carriers of one scheduler, per OS thread (a greenlet cannot change threads).

    Starting a greenlet costs a map and an unmap of memory for its Python frames, about 10 us together, which is more
    than everything else in the start of a step. An idle carrier references no model, no hook and no tensor; it goes
    with the scheduler or with the thread.

    Only for hubs that are their thread's first greenlet, which is the usual case. A carrier would keep any other hub
    alive, and could be asked to be its own ancestor's parent.
    """

    def __init__(self) -> None:
        self.idle: list[Carrier] = []

    def take(self, hub: greenlet, microbatch: GreenletMicrobatch) -> Carrier:
        if hub.parent is not None:
            carrier = Carrier(_carry_one, hub)
        else:
            while self.idle and self.idle[-1].dead:
                self.idle.pop()
            carrier = self.idle.pop() if self.idle else Carrier(_carry_many, hub)
        carrier.microbatch = microbatch
        return carrier

    def give_back(self, microbatch: GreenletMicrobatch) -> None:
        """Keep the carrier of `microbatch` for another step, if it is fit for one."""
        carrier = microbatch.greenlet
        if carrier is None or carrier.dead or carrier.parent.parent is not None:
            return
        # Unfit: one that an interrupt or somebody else's switch left in the middle; and one that was started when the
        # hub was shallower in the C stack than now, because each of its switches copies the difference.
        if (microbatch.ended and not microbatch.stale) or not microbatch.started:
            carrier.microbatch = None
            carrier.gr_context = None
            self.idle.append(carrier)


def run_step(step: Step, choose: Callable[[], int], state: SwitchState, hooks: StepHooks) -> None:
    """Run the microbatches of `step` on this thread, until all returned or one failed (`step.failed_index`).

    Raises what went wrong in the hub itself. In either case every microbatch is unwound when this returns.
    """
    hub = getcurrent()
    thread = get_ident()
    pool: CarrierPool = hooks.pool
    microbatches: Sequence[Any] = step.microbatches
    for microbatch in microbatches:
        microbatch.greenlet = carrier = pool.take(hub, microbatch)
        carrier.gr_context = hooks.copy_context()
        microbatch.switch = carrier.switch
        microbatch.to_hub = hub.switch
    state.start()
    try:
        _loop(step, choose, state, hooks, thread)
    finally:
        # Each part also where the one before was interrupted.
        try:
            if step.live:
                _unwind(step, state, thread)
        finally:
            step_over(thread, step.outer)
            try:
                state.finish()
            finally:
                for microbatch in microbatches:
                    pool.give_back(microbatch)


def _loop(step: Step, choose: Callable[[], int], state: SwitchState, hooks: StepHooks, thread: int) -> None:
    unchanged, leave, resume = state.unchanged, state.leave, state.resume
    begin_slice, end_slice, bracket = hooks.before_slice, hooks.after_slice, hooks.bracket
    # Any: without streams the keys are all None, and never differ.
    streams: Any = getattr(state, "streams", None)
    stream_now = None
    if streams is not None:
        stream_key, stream_now, met = streams.key, streams.baseline, {streams.baseline}
        for each in step.microbatches:
            each.stream = stream_now
    check_choice, slice_ended, strict = step.check_choice, step.slice_ended, step.strict
    microbatches: Sequence[Any] = step.microbatches
    count, decisions, sites = step.count, step.decisions, step.sites
    unwatched = streams is None and begin_slice is None and end_slice is None and bracket is None
    in_turn = not strict and unwatched and answers_in_turn(choose)
    # What a yield costs is mostly what it touches: between two yields a model pushes this loop out of the processor's
    # caches, and a call that is avoided is a microsecond. Hence the common case of `check_choice` and `slice_ended`
    # stands here a second time.
    traced[0] = True
    while step.live:
        if in_turn:
            microbatch, arrived, differs = _take_turns(step, unchanged, state, thread)
            index, in_turn = microbatch.index, False
        else:
            index = choose()
            microbatch = microbatches[index] if index.__class__ is int and 0 <= index < count else None
            if (
                microbatch is None
                or microbatch.done
                or (index and microbatches[index - 1].slice_number <= microbatch.slice_number)
            ):
                microbatch = check_choice(index)
            running[thread] = microbatch
            traced[1] = index
            microbatch.started = True
            if microbatch.stream != stream_now:
                streams.put(microbatch.stream)
            if begin_slice is not None:
                begin_slice(microbatch)
            if bracket is not None:
                this = Slice(index, microbatch.slice_number, len(decisions), microbatch.site)
                bracket.begin(this)
            if microbatch.saved_state is None:
                arrived = microbatch.switch(_GO)
                differs = not unchanged()
            else:
                arrived = resume(microbatch, microbatch.switch, _GO)
                differs = False
        # Before anything that can raise: a microbatch that is unwound goes on on the stream that it left.
        if streams is not None:
            stream_now = stream_key()
            if microbatch.stream != stream_now:
                microbatch.stream = stream_now
                if stream_now not in met:
                    met.add(stream_now)
                    streams.meet()
        if differs:
            leave(microbatch)
        if bracket is not None:
            _end_bracket(bracket, this, microbatch)
        if arrived is microbatch:
            stack = microbatch.greenlet._stack_saved
            if strict or (stack != microbatch.safe_stack and (microbatch.site, stack) not in _safe_paths):
                _refuse_unsafe(microbatch, stack, state)
        elif microbatch.ended and arrived is _ENDED:
            microbatch.done = True
            step.live -= 1
            if microbatch.error is not None:
                step.failed_index = microbatch.index
                return
            microbatch.site = ""
        else:
            _raise_meddling(step)
            raise ForeignSwitchError(
                f"the hub was resumed by a greenlet that is no microbatch of this step, while microbatch "
                f"{microbatch.index} ran (after {repr(microbatch.site) if microbatch.site else 'its start'}); "
                "inside a step only dbo_yield may hand the thread to the hub"
            )
        if strict:
            slice_ended(microbatch)
        else:
            decisions.append(index)
            sites.append(microbatch.site)
            step.last = index
            microbatch.slice_number += 1
        if end_slice is not None:
            end_slice(microbatch)


def _take_turns(step: Step, unchanged: Callable[[], bool], state: SwitchState, thread: int) -> tuple[Any, Any, bool]:
    """`_loop` for slices in ring order, as long as each ends at a yield with the thread as it was before.

    Returns the first that ended otherwise, not recorded yet: its microbatch, what arrived, whether the state differs.
    """
    decisions, sites = step.decisions, step.sites
    ring: Any = tuple(step.microbatches)
    while True:
        for microbatch in ring:
            running[thread] = microbatch
            traced[1] = index = microbatch.index
            microbatch.started = True
            arrived = microbatch.switch(_GO)
            if not unchanged():
                return microbatch, arrived, True
            if arrived is not microbatch:
                return microbatch, arrived, False
            stack = microbatch.greenlet._stack_saved
            if stack != microbatch.safe_stack and (microbatch.site, stack) not in _safe_paths:
                _refuse_unsafe(microbatch, stack, state)
            decisions.append(index)
            sites.append(microbatch.site)
            step.last = index
            microbatch.slice_number += 1


def _end_bracket(bracket: SliceBracket, this: Slice, microbatch: GreenletMicrobatch) -> None:
    this.end_site = "" if microbatch.ended else microbatch.site
    try:
        bracket.end(this)
    except Exception:
        # A slice that failed half-way leaves a bracket with half a slice: its complaint would hide the reason.
        if microbatch.error is None:
            raise


def _raise_meddling(step: Step) -> None:
    """Raise what a parked microbatch noticed, if somebody else switched into it and it ended by that."""
    for microbatch in step.microbatches:
        if microbatch.error is not None:
            raise microbatch.error


def _refuse_unsafe(microbatch: GreenletMicrobatch, stack: int, state: SwitchState) -> None:
    carrier = microbatch.greenlet
    if carrier is None:
        raise SchedulerInternalError("a parked microbatch has no greenlet")
    op = state.unsafe_call(carrier.gr_frame)
    if op is None:
        if stack and len(_safe_paths) < _MAX_SAFE_PATHS:
            _safe_paths.add((microbatch.site, stack))
            microbatch.found_safe(stack)
        return
    error = UnsafeYieldError(
        f"microbatch {microbatch.index} yielded at {microbatch.site!r} under the operator {op}, whose C++ frame would "
        f"abort the process when a sibling is resumed; register it with dbo_greenlet.direct_ops.register_direct_op"
        f"({op!r}) so that it is called without that frame, or move the yield out of the operator",
        op,
    )
    # This microbatch is still the only one parked under a C++ frame, so unwinding it at once is last in, first out.
    _throw(microbatch, error, state)
    try:
        raise error
    finally:
        del error  # or its traceback and this frame keep each other, and the operator's arguments


def _unwind(step: Step, state: SwitchState, thread: int) -> None:
    """Throw `StepAborted` into every parked microbatch; its `finally` and `with` blocks run in its own thread state.

    Raises KeyboardInterrupt (or whatever else an asynchronous signal raises) if one came in the middle, after the last
    microbatch is unwound.
    """
    step.aborting = True
    interrupts: list[BaseException] = []
    microbatches: Sequence[Any] = step.microbatches
    for microbatch in microbatches:
        microbatch.to_hub = _refuse_to_yield
        microbatch.drop_receives()
    for microbatch in microbatches:
        # Nothing is thrown into one that never ran, or that an interrupt ended outside its entry.
        if microbatch.parked and not microbatch.ended and not microbatch.greenlet.dead:
            running[thread] = microbatch
            try:
                _throw(microbatch, StepAborted(f"a sibling of microbatch {microbatch.index} failed"), state)
            except BaseException as error:
                interrupts.append(error)
            if not microbatch.ended and not microbatch.greenlet.dead:
                # A yield while aborting raises instead of parking, so only somebody else's switch leads here.
                microbatch.error = ForeignSwitchError(
                    f"microbatch {microbatch.index} did not unwind: its code switched to another greenlet"
                )
        microbatch.done = True
    step.live = 0
    if interrupts:
        raise interrupts.pop(0)


def _throw(microbatch: Any, error: BaseException, state: SwitchState) -> None:
    """Raise `error` in a parked microbatch, with its own thread state and stream on."""
    streams = getattr(state, "streams", None)
    if streams is not None and streams.key() != microbatch.stream:
        streams.put(microbatch.stream)
    if microbatch.saved_state is None:
        microbatch.greenlet.throw(error)
        state.leave(microbatch)
    else:
        state.resume(microbatch, microbatch.greenlet.throw, error)
