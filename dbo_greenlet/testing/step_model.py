"""A slow, obvious scheduler: what must happen when microbatches run programs (`step_programs`), worked out beforehand.

Written to be read. It shares no code with the scheduler and its carriers: microbatches are plain generators, a receive
is a number in a list, and whose turn it is comes from the policy, which looks at the model's own bookkeeping.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..policy import Policy
    from .faults import Faults

__all__ = ["Expected", "predict"]


@dataclass
class Expected:
    """What must happen: the events, the decisions taken, the sites at which their slices ended, and the outcome."""

    log: list[Any] = field(default_factory=list)
    decisions: list[int] = field(default_factory=list)
    sites: list[str] = field(default_factory=list)
    outcome: tuple[Any, ...] = ()


@dataclass
class _Microbatch:
    """What a policy may look at."""

    index: int
    done: bool = False
    started: bool = False
    slice_number: int = 0
    site: str = ""


class _Raised(Exception):
    """A microbatch fails: with which outcome, under which name, and whether its program sees it."""

    def __init__(self, name: str, outcome: tuple[Any, ...] = (), *, aborts: bool = False) -> None:
        self.name = name
        self.outcome = outcome
        self.aborts = aborts  # the program sees the step being aborted, not the error
        super().__init__(name)


class _Model:
    """The step as a policy sees it, and the receives on their way."""

    def __init__(self, count: int, faults: Faults | None, carrier: str, timed: bool) -> None:
        self.count = count
        self.expected = Expected()
        self.decisions = self.expected.decisions
        self.sites = self.expected.sites
        self.log = self.expected.log
        self.last = -1
        self.microbatches = [_Microbatch(i) for i in range(count)]
        self.threads = carrier == "thread"
        self.timed = timed
        self.faults = {} if faults is None else {(f.kind, f.microbatch, f.number): f for f in faults.faults}
        # By owner, oldest first: (number, site passed last at the send).
        self.open: list[list[tuple[int, str]]] = [[] for _ in range(count)]
        self.left: list[list[tuple[int, str]]] = [[] for _ in range(count)]  # those its successor may still run
        self.allocations = [0] * count
        self.exhausted = False

    def may_run(self, index: int) -> bool:
        mine = self.microbatches[index]
        earlier = self.microbatches[:index]
        return not mine.done and all(each.done or each.slice_number > mine.slice_number for each in earlier)

    def runnable(self) -> list[int]:
        return [i for i in range(self.count) if self.may_run(i)]

    # -- receives ------------------------------------------------------------------------------------------------------

    def send(self, me: int, number: int) -> None:
        after = self.microbatches[(me + 1) % self.count]
        entry = (number, self.microbatches[me].site)
        queues = [self.open[me]] if after.done else [self.open[me], self.left[me]]
        for queue in queues:
            queue.append(entry)
            if ("reorder", me, number - 1) in self.faults:
                overtaken = [each for each in queue if each[0] == number - 1]
                queue[:] = [each for each in queue if each[0] != number - 1] + overtaken
        if ("early", me, number) in self.faults and not self.timed:
            self.receive(me, entry, ran_by=me, me=me)

    def receive(self, owner: int, entry: tuple[int, str], *, ran_by: int | None, me: int) -> None:
        """`me` runs it; the error names `ran_by`, which is None where the owner had to do it itself."""
        number, site = entry
        if ("fail", owner, number) in self.faults:
            raise _Raised("ReceiveHookError", ("receive failed", owner, ran_by, site, "InjectedFault"))
        self.open[owner].remove(entry)
        if entry in self.left[owner]:
            self.left[owner].remove(entry)
        self.log.append((owner, "receive", number, me))

    def receive_siblings(self, me: int) -> None:
        before = (me - 1) % self.count
        while self.left[before]:
            self.receive(before, self.left[before][0], ran_by=me, me=me)

    def receive_own(self, me: int) -> None:
        while self.open[me]:
            self.receive(me, self.open[me][0], ran_by=None, me=me)

    def allocate(self, me: int) -> None:
        number = self.allocations[me]
        self.allocations[me] += 1
        self.exhausted = self.exhausted or ("oom", me, number) in self.faults
        if self.exhausted:
            raise _Raised("allocator's error")
        self.log.append((me, "allocated"))

    # -- a microbatch --------------------------------------------------------------------------------------------------

    def run(self, me: int, program: Sequence[tuple[str, str]], tokens: int) -> Iterator[str]:
        try:
            yield from self.run_program(me, program, tokens)
        except _Raised as error:
            self.log.append((me, "aborted") if error.aborts else (me, "raised", error.name))
            raise
        self.log.append((me, "return"))
        # The entry has returned and sees no more of what happens now.
        self.receive_siblings(me)
        if self.count == 1 or self.microbatches[(me + 1) % self.count].done:
            self.receive_own(me)

    def run_program(self, me: int, program: Sequence[tuple[str, str]], tokens: int) -> Iterator[str]:
        if ("empty", me, None) in self.faults:
            tokens = 0
        log, yields, sent, dispatched = self.log, 0, 0, 0
        unread: list[tuple[str, int]] = []
        log.append((me, "start", tokens))
        for kind, name in program:
            if kind == "work":
                log.append((me, "work", name))
            elif kind == "yield":
                self.strike(me, yields)
                yields += 1
                yield name
                self.receive_own(me)
                for which, number in unread:
                    log.append((me, "read", which, [100 * me + number] * tokens))
                    dispatched += which == "dispatch"
                unread = []
            elif kind == "dispatch" or (kind == "combine" and dispatched):
                dispatched -= kind == "combine"
                log.append((me, kind, sent))
                self.send(me, sent)
                unread.append((kind, sent))
                sent += 1
            elif kind == "receive sibling's":
                self.receive_siblings(me)
            elif kind == "allocate":
                self.allocate(me)
            elif kind == "inner step":
                log += [(0, "inner", "a"), (1, "inner", "a"), (0, "inner", "b")]
                if name == "bad":
                    raise _Raised("MicrobatchFailed")
                log.append((1, "inner", "b"))
            elif kind == "raise":
                raise _Raised("ValueError")
            elif kind == "return":
                return

    def strike(self, me: int, number: int) -> None:
        if ("signal", me, number) in self.faults:
            # Python runs the handler on the main thread, which is the microbatch's own only without threads.
            raise _Raised("KeyboardInterrupt", ("interrupted",), aborts=self.threads)
        if ("raise", me, number) in self.faults:
            raise _Raised("InjectedFault")


def predict(
    programs: Sequence[Sequence[tuple[str, str]]],
    policy: Policy,
    *,
    faults: Faults | None = None,
    carrier: str = "greenlet",
    tokens: int = 2,
    timed: bool = True,
) -> Expected:
    """What `programs` must do under `policy`.

    Args:
        faults: what goes wrong.
        carrier: only a signal shows it.
        tokens: of a microbatch that is not empty.
        timed: the wire's transfers are timed by the device, so that an early one needs no early hook.
    """
    model = _Model(len(programs), faults, carrier, timed)
    choose: Any = policy.start(model)  # type: ignore[arg-type]  # the part of a step that policies look at
    runs = [model.run(i, program, tokens) for i, program in enumerate(programs)]
    while not all(each.done for each in model.microbatches):
        index = choose()
        microbatch = model.microbatches[index]
        microbatch.started = True
        try:
            site = next(runs[index], "")
        except _Raised as error:
            failed = ("failed", index, microbatch.slice_number, microbatch.site, error.name)
            model.expected.outcome = error.outcome or failed
            parked = [m for m in model.microbatches if m.started and not m.done and m is not microbatch]
            model.log += [(each.index, "aborted") for each in parked]
            return model.expected
        microbatch.site = site
        microbatch.done = site == ""
        microbatch.slice_number += 1
        model.last = index
        model.decisions.append(index)
        model.sites.append(site)
    model.expected.outcome = ("outputs", [f"output {i}" for i in range(len(programs))])
    return model.expected
