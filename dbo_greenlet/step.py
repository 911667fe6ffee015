"""One step: the microbatches, who may run, what they still have to receive, and the record of the decisions.

Everything here is bookkeeping on plain Python objects; nothing here switches, waits, or knows a carrier. The two
carriers (`greenlet_carrier`, `thread_carrier`) move the thread of control and call these methods, so that a schedule
cannot depend on what carries it.

The states of a microbatch, and what takes it from one to the next (`TRANSITIONS` is the whole story):

    WAITING --start--> RUNNING --yield--> PARKED --resume--> RUNNING --return--> RETURNED
                       RUNNING --raise--> FAILED             PARKED  --abort---> ABORTED
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Sequence
from typing import Any

from .errors import (
    ForeignSwitchError,
    PolicyError,
    ReceiveHookError,
    ScheduleDivergence,
    SchedulerInternalError,
)

__all__ = ["TRANSITIONS", "Microbatch", "Receive", "State", "Step"]


class State(enum.Enum):
    """Where a microbatch stands; `done` states end its part of the step."""

    WAITING = "waiting"
    RUNNING = "running"
    PARKED = "parked"
    RETURNED = "returned"
    FAILED = "failed"
    ABORTED = "aborted"


TRANSITIONS: dict[tuple[State, str], State] = {
    (State.WAITING, "start"): State.RUNNING,
    (State.WAITING, "abort"): State.ABORTED,
    (State.RUNNING, "yield"): State.PARKED,
    (State.RUNNING, "return"): State.RETURNED,
    (State.RUNNING, "raise"): State.FAILED,
    (State.RUNNING, "abort"): State.ABORTED,
    (State.PARKED, "resume"): State.RUNNING,
    (State.PARKED, "abort"): State.ABORTED,
}

# OS thread id -> the microbatch that this thread runs now. This is the one thing a `dbo_*` call outside a step looks
# at (law 8), and the reason why a thread without a step sees "disabled" while another thread runs one. Under the
# greenlet carrier a step has one entry, rewritten at every switch; under the thread carrier one for each microbatch.
running: dict[int, Microbatch] = {}

# [whether a microbatch runs, its index]: the same two answers as plain values, for code that a compiler traces. Dynamo
# cannot trace a look-up by thread, and a guard on an object that is new in each step would recompile in each step; a
# guard on a bool or a small int gives one specialisation per value at most. They are right for one step at a time:
# traced code that asks while two threads run steps at once may see the other one's answer.
traced: list[Any] = [False, 0]


def step_over(thread: int, outer: Microbatch | None) -> None:
    """Put both tables back when a step on `thread` is over; `outer` is the microbatch that ran it, if one did."""
    if outer is None:
        running.pop(thread, None)
        # Another thread may still be in a step of its own; its hub says who runs at its next switch.
        traced[0], traced[1] = bool(running), 0
    else:
        running[thread] = outer
        traced[0], traced[1] = True, outer.index


class Receive:
    """A receive hook on its way: registered by its owner, run exactly once by whoever comes first."""

    __slots__ = ("hook", "owner", "running", "site")

    def __init__(self, owner: Microbatch, hook: Callable[[], Any]) -> None:
        self.owner = owner
        self.hook: Callable[[], Any] | None = hook
        self.running = False
        self.site = owner.site

    def run(self, by: int | None) -> None:
        """Run the hook if nobody did; `by` is the microbatch that runs it, None for the hub.

        Raises:
            ReceiveHookError: the hook raised, or is still running because it yielded; it is not run again.
        """
        owner = self.owner
        if self.running:
            raise ReceiveHookError(owner.index, by, self.site) from ForeignSwitchError("a receive hook must not yield")
        hook, self.hook = self.hook, None
        if hook is None:
            return
        self.running = True
        try:
            hook()
        except Exception as error:
            raise ReceiveHookError(owner.index, by, self.site) from error
        self.running = False
        # Only now: a receive is outstanding until it is complete. Lists that a failing step has emptied stay empty.
        for waiting in (owner.outstanding, owner.successor.inbox if owner.successor is not None else ()):
            if self in waiting:
                waiting.remove(self)  # type: ignore[union-attr]  # nothing is in ()
        step = owner.step
        if step is not None and step.on_receive:
            step.on_receive(owner, by)


class Microbatch:
    """One slice of the step's tokens on its way through the model.

    Attributes an instrument may read: `index`, `context` (the `UBatchContext`, or None), `site` (the yield point it
    passed last, "" before the first and once it returned), `slice_number` (slices completed), `state`, `outstanding`
    (receives registered and not yet run).
    """

    __slots__ = (
        "__weakref__",
        "context",
        "done",
        "entry",
        "error",
        "inbox",
        "index",
        "outstanding",
        "result",
        "saved_state",
        "site",
        "slice_number",
        "started",
        "step",
        "stream",
        "successor",
    )

    def __init__(self, index: int, entry: Callable[[], Any], context: Any) -> None:
        self.index = index
        self.entry: Callable[[], Any] | None = entry
        self.context = context
        self.step: Step | None = None
        self.successor: Microbatch | None = None
        self.site = ""
        self.slice_number = 0
        self.started = False
        self.done = False
        self.saved_state: Any = None
        self.stream: Any = None  # key of the stream it left the thread on; None where no stream is kept
        self.result: Any = None
        self.error: BaseException | None = None
        self.outstanding: list[Receive] = []
        self.inbox: list[Receive] = []

    @property
    def state(self) -> State:
        if self.done:
            if self.step is not None and self.step.failed_index == self.index:
                return State.FAILED
            return State.RETURNED if self.started and self.error is None else State.ABORTED
        if not self.started:
            return State.WAITING
        return State.RUNNING if running.get(threading.get_ident()) is self else State.PARKED

    # -- what the carrier implements ---------------------------------------------------------------------------------

    def yield_(self, site: str) -> None:
        """Hand the thread to the hub; returns when the hub resumes this microbatch (defined by the carrier)."""
        raise SchedulerInternalError(f"{type(self).__name__} is not a carrier")

    # -- receives (law 4) --------------------------------------------------------------------------------------------

    def register_receive(self, hook: Callable[[], Any]) -> None:
        """Note a receive that must be complete before this microbatch goes on after its next yield.

        The next microbatch of the ring finds it in its inbox and runs it before its own next send, as in vLLM. Where
        that one is done, or does not get to it, this microbatch runs it itself when it is resumed: that is on the
        owner's stream and in the owner's thread state, and an error is the owner's own.
        """
        receive = Receive(self, hook)
        self.outstanding.append(receive)
        if self.successor is not None and not self.successor.done:
            self.successor.inbox.append(receive)
        step = self.step
        if step is not None and step.on_register:
            step.on_register(self)

    def run_inbox(self) -> None:
        """Run the receives that the previous microbatch of the ring left for this one."""
        while self.inbox:
            self.inbox[0].run(self.index)

    def run_outstanding(self) -> None:
        """Run this microbatch's own receives that no sibling ran."""
        while self.outstanding:
            self.outstanding[0].run(None)

    def run_leftovers(self) -> None:
        """What is still to be received when the entry has returned.

        The inbox first: it holds the sibling's last combine. Own receives only where no successor is left to run
        them; otherwise they wait in its inbox. By induction round the ring none is dropped.
        """
        if self.inbox:
            self.run_inbox()
        if self.outstanding and (self.successor is None or self.successor is self or self.successor.done):
            self.run_outstanding()

    def captured(self, event: Any) -> None:
        """Tell the step that the microbatch has just let a library record an event of its own on the compute stream."""
        if self.step is not None and self.step.on_event:
            self.step.on_event(self, event)

    def drop_receives(self) -> None:
        """Forget what is still to be received: the step fails."""
        self.outstanding.clear()
        self.inbox.clear()

    def release(self) -> None:
        """Cut every reference that would keep the model's tensors, hooks or siblings alive after the step."""
        self.entry = self.context = self.step = self.successor = None
        self.saved_state = self.result = self.error = None
        self.drop_receives()


class Step:
    """The bookkeeping of one step. Policies and instruments read it; only carriers write to it.

    Attributes: `count` (N), `microbatches`, `decisions` (the index that ran, slice by slice), `sites` (the site at
    which each of these slices ended, "" = returned), `last` (the microbatch that ran last, -1 at the start), `live`
    (how many are not done), `policy_name`.
    """

    def __init__(self, microbatches: Sequence[Microbatch], policy_name: str, strict: bool) -> None:
        self.microbatches = list(microbatches)
        self.count = len(self.microbatches)
        self.policy_name = policy_name
        self.strict = strict
        self.decisions: list[int] = []
        self.sites: list[str] = []
        self.last = -1
        self.live = self.count
        self.aborting = False
        self.failed_index: int | None = None
        # The microbatch that runs this step inside its own, None for a step that is in no other.
        self.outer: Microbatch | None = None
        self.on_receive: Callable[[Microbatch, int | None], None] | None = None
        self.on_register: Callable[[Microbatch], None] | None = None
        self.on_event: Callable[[Microbatch, Any], None] | None = None
        # Strict mode: the sites in the order in which the furthest microbatch passed them, and who that was.
        self._reference: list[str] = []
        self._reference_owner: list[int] = []
        ring = self.microbatches[1:] + self.microbatches[:1]
        for microbatch, successor in zip(self.microbatches, ring, strict=True):
            microbatch.step = self
            microbatch.successor = successor

    # -- who may run (law 6) -----------------------------------------------------------------------------------------

    def may_run(self, index: int) -> bool:
        """Whether law 6 lets microbatch `index` run its next slice.

        Its k-th slice may start once every earlier microbatch has completed its own k-th slice (or is done): whatever
        microbatch i enqueues in slice k then lies on the compute stream before what i + 1 enqueues in slice k, and a
        request cut across the boundary reads KV that was written before.
        """
        microbatch = self.microbatches[index]
        if microbatch.done:
            return False
        wanted = microbatch.slice_number
        for earlier in range(index - 1, -1, -1):
            other = self.microbatches[earlier]
            if not other.done:
                # Slice numbers do not increase along the ring, so the nearest predecessor decides for all of them.
                return other.slice_number > wanted
        return True

    def runnable(self) -> list[int]:
        """Indices of the microbatches that may run now, ascending. Never empty while the step lives."""
        return [i for i in range(self.count) if self.may_run(i)]

    def check_choice(self, index: int) -> Microbatch:
        """The microbatch the policy picked.

        Raises:
            PolicyError: it is done, would overtake an earlier one, or is no index at all.
        """
        microbatches = self.microbatches
        try:
            microbatch = microbatches[index]
        except (IndexError, TypeError):
            raise self._no_such(index) from None
        # The common case first: this runs at every yield.
        if not microbatch.done and microbatch.index == index:
            if index == 0 or microbatches[index - 1].slice_number > microbatch.slice_number:
                return microbatch
            if self.may_run(index):
                return microbatch
        if microbatch.index != index:
            raise self._no_such(index)  # counted from the end
        why = "is done" if microbatch.done else "would overtake an earlier microbatch on the compute stream"
        raise PolicyError(
            f"policy {self.policy_name!r} picked microbatch {index}, which {why}; runnable: {self.runnable()}"
        )

    def _no_such(self, index: object) -> PolicyError:
        return PolicyError(f"policy {self.policy_name!r} answered {index!r}; runnable are {self.runnable()}")

    # -- the record (law 5) ------------------------------------------------------------------------------------------

    def slice_ended(self, microbatch: Microbatch) -> None:
        """Record that `microbatch` gave the thread back, at `microbatch.site` or because it is done.

        Raises:
            ScheduleDivergence: strict mode, and its yield sites part from a sibling's.
        """
        index = microbatch.index
        site = microbatch.site
        self.decisions.append(index)
        self.sites.append(site)
        self.last = index
        position = microbatch.slice_number
        microbatch.slice_number = position + 1
        if self.strict:
            self._compare(index, position, site)

    def _compare(self, index: int, position: int, site: str) -> None:
        reference = self._reference
        if position == len(reference):
            reference.append(site)
            self._reference_owner.append(index)
        elif reference[position] != site:
            sibling = self._reference_owner[position]
            raise ScheduleDivergence(
                f"microbatches part at yield {position}: microbatch {sibling} {_words(reference[position])}, "
                f"microbatch {index} {_words(site)}; every microbatch of a step must pass the same yield points "
                "(is a branch of the model taken by one slice only?)"
            )

    def release(self) -> None:
        """Break the reference cycles of the step so that everything in it goes when the caller's frame does."""
        self.on_receive = self.on_register = self.on_event = self.outer = None
        for microbatch in self.microbatches:
            microbatch.release()


def _words(site: str) -> str:
    return f"yielded at {site!r}" if site else "returned"
