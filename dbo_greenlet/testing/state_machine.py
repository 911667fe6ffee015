"""A Hypothesis state machine over a step: programs are built action by action, run in an order that Hypothesis chooses,
and compared event by event with a slow, obvious model.

In a test suite, on your own transport:

    from dbo_greenlet.testing.state_machine import OverlapMachine
    from dbo_greenlet.testing.step_programs import Parts

    class MyWire:                                       # see `step_programs.Wire`
        def dispatch(self, microbatch, payload):
            sent = my_transport.dispatch_send(payload)  # the send part: returns at once
            return Parts(receive=sent.finish, read=sent.rows, handle=sent)

        def combine(self, microbatch, payload, dispatched):
            sent = my_transport.combine_send(payload, dispatched.handle)
            return Parts(receive=sent.finish, read=sent.rows)

    class OverMyTransport(OverlapMachine):
        def make_wire(self, bed):
            return MyWire()

    TestOverMyTransport = OverMyTransport.TestCase

Hypothesis grows the programs of one to three microbatches by rules (work, yield, dispatch, combine, receive, raise,
return early, a step inside), runs them on the real scheduler under policies and faults that it draws, and shrinks what
fails to the fewest rules. It prints them as code:

    state = OverMyTransport()
    state.microbatches(count=2)
    state.dispatch(microbatch=0)
    state.pause(microbatch=0, site='a')
    state.run(faults='', policy=[0, 1])
    state.teardown()

which runs as it stands, below the import of `OverMyTransport`. `policy` is a list of choices (`step_programs.Chosen`)
or a text such as 'random:7' (`policies.policy_from_text`), `faults` a fault string (`testing.faults`).

What is compared, in each run and in another one on the same scheduler: every event in order, decisions, sites, outputs,
or which error of which microbatch; then that nothing is left of the step (`step_programs.check_programs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from .faults import Faults
from .sometimes import sometimes
from .step_programs import Action, DeviceWire, Wire, check_programs
from .step_run import TestBed
from .strategies import HARMLESS_TO_PYTEST, SITES, faults, policies, policy_of

__all__ = ["OverlapMachine"]

_MOST = 3
_microbatch = st.integers(0, _MOST - 1)


class OverlapMachine(RuleBasedStateMachine):
    """Microbatches whose programs grow, run under drawn policies and faults. Subclass it for your own transport.

    Attributes to override: `carrier` ("greenlet" or "thread"), `fault_kinds` (those that a run may meet; add "signal"
    where KeyboardInterrupt is to be met too), `make_wire` and `make_device`.
    """

    carrier: ClassVar[str] = "greenlet"
    fault_kinds: ClassVar[Sequence[str]] = HARMLESS_TO_PYTEST

    def __init__(self) -> None:
        super().__init__()
        self.programs: list[list[Action]] = [[]]
        self._grown = False

    # -- what a subclass replaces --------------------------------------------------------------------------------------

    def make_wire(self, bed: TestBed) -> Wire:
        """What the programs of one step send through; default: transfers of the virtual device."""
        return DeviceWire(bed.device)

    def make_device(self) -> Any:
        """The device of one step; default: a new virtual one."""
        from ..devices.virtual import VirtualDevice

        return VirtualDevice()

    # -- the programs grow ---------------------------------------------------------------------------------------------

    @initialize(count=st.integers(1, _MOST))
    def microbatches(self, count: int) -> None:
        self.programs = [[] for _ in range(count)]

    @rule(microbatch=_microbatch, name=st.sampled_from(("p", "q")))
    def work(self, microbatch: int, name: str) -> None:
        self._add(microbatch, "work", name)

    @rule(microbatch=_microbatch, site=st.sampled_from(SITES))
    def pause(self, microbatch: int, site: str) -> None:
        """A yield, and then the reading of what was sent before it."""
        self._add(microbatch, "yield", site)

    @rule(microbatch=_microbatch)
    def dispatch(self, microbatch: int) -> None:
        self._add(microbatch, "dispatch")

    @rule(microbatch=_microbatch)
    def combine(self, microbatch: int) -> None:
        self._add(microbatch, "combine")

    @rule(microbatch=_microbatch)
    def layer(self, microbatch: int) -> None:
        """Dispatch, yield, combine, yield: what a Mixture-of-Experts layer does."""
        for kind, name in (("dispatch", ""), ("yield", "dispatch"), ("combine", ""), ("yield", "combine")):
            self._add(microbatch, kind, name)

    @rule(microbatch=_microbatch)
    def receive(self, microbatch: int) -> None:
        """What the previous microbatch left."""
        self._add(microbatch, "receive sibling's")

    @rule(microbatch=_microbatch)
    def allocate(self, microbatch: int) -> None:
        self._add(microbatch, "allocate")

    @rule(microbatch=_microbatch, how=st.sampled_from(("good", "bad")))
    def inner_step(self, microbatch: int, how: str) -> None:
        self._add(microbatch, "inner step", how)

    @rule(microbatch=_microbatch)
    def fail(self, microbatch: int) -> None:
        self._add(microbatch, "raise", "x")

    @rule(microbatch=_microbatch)
    def return_early(self, microbatch: int) -> None:
        self._add(microbatch, "return")

    # -- and run -------------------------------------------------------------------------------------------------------

    @precondition(lambda self: any(self.programs))
    @rule(
        policy=policies(),
        faults=st.one_of(st.just(""), faults(count=_MOST, kinds=(*HARMLESS_TO_PYTEST, "signal")).map(str)),
    )
    def run(self, policy: Sequence[int] | str, faults: str) -> None:
        """All programs, under `policy`. Faults of kinds that this class does not meet are left out."""
        self._check(policy, faults)

    def teardown(self) -> None:
        # What grew and was never run, too.
        if self._grown:
            self._check("round_robin", "")

    def _add(self, microbatch: int, kind: str, name: str = "") -> None:
        self.programs[microbatch % len(self.programs)].append((kind, name))
        self._grown = True

    def _check(self, policy: Sequence[int] | str, text: str) -> None:
        self._grown = False
        met = [
            fault
            for fault in Faults.parse(text).faults
            if fault.kind in self.fault_kinds and (fault.microbatch or 0) < len(self.programs)
        ]
        run = check_programs(
            self.programs,
            policy_of(policy),
            faults=Faults(met),
            carrier=self.carrier,
            make_wire=self.make_wire,
            make_device=self.make_device,
        )
        # Noted only where it is so: a suite that wants one of them declares it, and no other suite has to reach it.
        sometimes(f"state machine: a step {'succeeded' if run.succeeded else 'failed'}")
        if _took_turns(run.schedule.decisions):
            sometimes("state machine: microbatches took turns")


def _took_turns(decisions: Sequence[int]) -> bool:
    """Some microbatch ran again after another one had run."""
    return any(a != b and a in decisions[i + 2 :] for i, (a, b) in enumerate(pairwise(decisions)))
