"""Small programs for microbatches, and the real scheduler running them as `step_model` says it must.

A program is a list of actions, each a pair of kind and name:

    ("work", "p")             something that shows in the log
    ("yield", "site")         yield there; what was sent before has been received when it comes back, and is read
    ("dispatch", "")          send part of a dispatch, receive part registered as a hook
    ("combine", "")           the same for the combine of the oldest dispatch that was read; without one, nothing
    ("receive sibling's", "") run what the previous microbatch left
    ("allocate", "")          ask the device for memory
    ("inner step", "good")    a step of two microbatches inside this one; "bad": its second one raises
    ("raise", "message")      raise ValueError
    ("return", "")            return early

`check_programs` runs N of them on the real carrier, twice, and raises `Finding` where events, decisions, sites or the
outcome are not what the model says, or something is left behind. What is sent goes through a `Wire`: the virtual
device's transfers, or your own transport.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

from ..errors import MicrobatchFailed, ReceiveHookError, StepAborted
from ..policy import Policy, RoundRobin
from ..scheduler import Scheduler
from ..step import running, traced
from ..yields import dbo_current_ubatch_id, dbo_maybe_run_recv_hook, dbo_register_recv_hook, dbo_yield
from .errors import Finding, InjectedFault
from .faults import Faults
from .step_model import Expected, predict
from .step_run import StepRun, StepRunner, TestBed

__all__ = ["TOKENS", "Action", "Chosen", "DeviceWire", "Event", "Parts", "Wire", "check_programs", "play"]

Action = tuple[str, str]
Event = tuple[Any, ...]

TOKENS = 2
"""Tokens of a microbatch that is not empty."""


class Parts(NamedTuple):
    """One transfer on its way: `receive` is its recv hook, `read` gives what arrived and works only after it.

    `handle` is whatever the wire's `combine` needs of the dispatch that it answers.
    """

    receive: Callable[[], None]
    read: Callable[[], Sequence[int]]
    handle: Any = None


class Wire(Protocol):
    """What programs send through; made anew for each step.

    `payload` has one whole number for each token of the microbatch, none where it is empty, and must arrive unchanged.
    Every dispatch is combined at most once, after it was read, by as many numbers.

    A wire whose transfers are those of a `VirtualDevice` has an attribute `timed` that is True.
    """

    def dispatch(self, microbatch: int, payload: Sequence[int]) -> Parts:
        """Send part of a dispatch."""

    def combine(self, microbatch: int, payload: Sequence[int], dispatched: Parts) -> Parts:
        """Send part of the combine that answers `dispatched`."""


class DeviceWire:
    """Transfers of a virtual device; a read before the receive is an error.

    `timed` says that the device decides when they arrive, so that late, early and reordered ones are its own.
    """

    timed = True

    def __init__(self, device: Any, us: float = 10.0) -> None:
        self._device = device
        self._us = us

    def dispatch(self, microbatch: int, payload: Sequence[int]) -> Parts:
        return self._send(f"D_{microbatch}", payload)

    def combine(self, microbatch: int, payload: Sequence[int], dispatched: Parts) -> Parts:
        return self._send(f"C_{microbatch}", payload)

    def _send(self, name: str, payload: Sequence[int]) -> Parts:
        transfer = self._device.send(name, self._us)
        arrived: list[Sequence[int]] = []

        def receive() -> None:
            self._device.receive(transfer)
            arrived.append(payload)

        def read() -> Sequence[int]:
            if not arrived:
                raise Finding(f"{name} was read before its receive ran")
            return arrived[0]

        return Parts(receive, read)


class Chosen:
    """A policy that takes its choices from a list: of those that may run, choice modulo their number; then the first.

    An empty list is all of microbatch 0, then all of 1, and so on: what a failing example shrinks towards.
    """

    name = "chosen"

    def __init__(self, choices: Sequence[int]) -> None:
        self.choices = tuple(choices)

    def start(self, step: Any) -> Callable[[], int]:
        choices, decisions = self.choices, step.decisions

        def choose() -> int:
            able: list[int] = step.runnable()
            position = len(decisions)
            return able[choices[position] % len(able)] if position < len(choices) else able[0]

        return choose

    def __repr__(self) -> str:
        return f"Chosen({list(self.choices)})"


def play(index: int, program: Sequence[Action], log: list[Event], wire: Wire, bed: TestBed) -> Callable[[], str]:
    """An entry that acts out `program` and logs (microbatch it believes it is, what it did, ...)."""

    def entry() -> str:
        me = dbo_current_ubatch_id
        tokens = TOKENS if bed.faults is None else bed.faults.tokens(index, TOKENS)
        log.append((me(), "start", tokens))
        sent = 0
        unread: list[tuple[str, Parts]] = []
        dispatched: list[Parts] = []
        try:
            for kind, name in program:
                if kind == "work":
                    log.append((me(), "work", name))
                elif kind == "yield":
                    dbo_yield(name)
                    for which, parts in unread:
                        log.append((me(), "read", which, list(parts.read())))
                    dispatched += [parts for which, parts in unread if which == "dispatch"]
                    unread.clear()
                elif kind == "dispatch" or (kind == "combine" and dispatched):
                    payload = [100 * index + sent] * tokens
                    log.append((me(), kind, sent))
                    parts = (
                        wire.dispatch(index, payload)
                        if kind == "dispatch"
                        else wire.combine(index, payload, dispatched.pop(0))
                    )
                    dbo_register_recv_hook(_logged(parts.receive, log, index, sent))
                    unread.append((kind, parts))
                    sent += 1
                elif kind == "receive sibling's":
                    dbo_maybe_run_recv_hook()
                elif kind == "allocate":
                    _allocate(bed, index)
                    log.append((me(), "allocated"))
                elif kind == "inner step":
                    _inner_step(log, bad=name == "bad")
                elif kind == "raise":
                    raise ValueError(name)
                elif kind == "return":
                    break
        except StepAborted:
            log.append((me(), "aborted"))
            raise
        except BaseException as error:  # noted, and passed on: what becomes of it is the scheduler's
            log.append((me(), "raised", _name_of(error)))
            raise
        log.append((me(), "return"))
        return f"output {index}"

    return entry


def _name_of(error: BaseException | None) -> str:
    """The type of an error; that of an exhausted allocator is the device's own, and is told by what caused it."""
    if isinstance(error, (MemoryError, RuntimeError)) and isinstance(error.__cause__, InjectedFault):
        return "allocator's error"
    return type(error).__name__


def _logged(receive: Callable[[], None], log: list[Event], owner: int, number: int) -> Callable[[], None]:
    def hook() -> None:
        receive()
        log.append((owner, "receive", number, dbo_current_ubatch_id()))

    return hook


def _allocate(bed: TestBed, index: int) -> None:
    if hasattr(bed.device, "new_buffer"):
        bed.device.new_buffer("scratch")
    elif bed.faults is not None:
        bed.faults.allocating(index)


def _inner_step(log: list[Event], *, bad: bool) -> None:
    def inner(fails: bool) -> None:
        log.append((dbo_current_ubatch_id(), "inner", "a"))
        dbo_yield("inner")
        if fails:
            raise ValueError("inner")
        log.append((dbo_current_ubatch_id(), "inner", "b"))

    Scheduler(strict=False).run([lambda: inner(False), lambda: inner(bad)])


def check_programs(
    programs: Sequence[Sequence[Action]],
    policy: Policy | None = None,
    *,
    faults: Faults | None = None,
    carrier: str = "greenlet",
    make_wire: Callable[[TestBed], Wire] | None = None,
    make_device: Callable[[], Any] | None = None,
) -> StepRun:
    """Run `programs` on the real scheduler, twice on the same one, and compare each run with the model.

    Args:
        programs: one for each microbatch.
        policy: default round robin.
        faults: what is to go wrong; the model knows all kinds but "signal" other than INT, and those of ranks.
        carrier: see `Scheduler`.
        make_wire: makes what the programs send through; default `DeviceWire`.
        make_device: default a `VirtualDevice`.

    Raises:
        Finding: the first difference, or what was left behind.
    """
    policy = RoundRobin() if policy is None else policy
    logs: list[list[Event]] = []
    timed: list[bool] = []

    def build(bed: TestBed) -> list[Callable[[], str]]:
        wire = DeviceWire(bed.device) if make_wire is None else make_wire(bed)
        log: list[Event] = []
        logs.append(log)
        timed.append(getattr(wire, "timed", False))
        return [play(i, program, log, wire, bed) for i, program in enumerate(programs)]

    threads = threading.active_count()
    runner = StepRunner(
        build, count=len(programs), make_device=make_device, faults=faults, carrier=carrier, strict=False
    )
    for attempt in ("the step", "the next step"):
        run = runner.run(policy)
        expected = predict(programs, policy, faults=faults, carrier=carrier, tokens=TOKENS, timed=timed[-1])
        _compare(attempt, expected, logs[-1], run)
        if running or traced != [False, 0]:
            raise Finding(f"{attempt} left the thread inside a step: {running}, {traced}")
        if threading.active_count() != threads:
            raise Finding(f"{attempt} left threads behind: {threading.enumerate()}")
    return run


def outcome_of(run: StepRun) -> Event:
    """What came of a run, in the model's words."""
    error = run.error
    if error is None:
        return ("outputs", run.outputs)
    cause = _name_of(error.__cause__)
    if isinstance(error, MicrobatchFailed):
        assert_none = [(index, repr(each)) for index, each in error.secondary]
        return ("failed", error.index, error.slice_number, error.site, cause, *assert_none)
    if isinstance(error, ReceiveHookError):
        return ("receive failed", error.owner, error.ran_by, error.site, cause)
    if isinstance(error, KeyboardInterrupt):
        return ("interrupted",)
    return ("raised", repr(error))


def _compare(attempt: str, expected: Expected, log: list[Event], run: StepRun) -> None:
    __tracebackhide__ = True  # to pytest, which would print this function above what was found
    for what, real, model in (
        ("event", log, expected.log),
        ("decision", list(run.schedule.decisions), expected.decisions),
        ("site", list(run.schedule.sites), expected.sites),
        ("outcome", [outcome_of(run)], [expected.outcome]),
    ):
        for number, (is_, should) in enumerate(zip_longest(real, model)):
            if is_ != should:
                raise Finding(
                    f"{attempt} did not run as the model says: {what} {number} is {is_!r}, the model says {should!r}\n"
                    f"{what}s: {real}\nmodel: {model}"
                ) from run.error
    if run.left_behind:
        raise Finding(f"{attempt} left something behind: {'; '.join(run.left_behind)}")
