"""Stopping in the debugger right before one decision's slice, in the code of the microbatch that it resumes.

The debugger has to start on the microbatch's own stack: from the hub, a step into the model is a switch, which no
debugger follows. So a microbatch looks, whenever its yield returns, whether this is the decision; and an entry looks
before it begins. Only microbatches of the step that is to stop are of that kind.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Any

from ..step import running
from .step_run import StepUnderTest

if TYPE_CHECKING:
    from ..step import Microbatch, Step
    from .step_run import Build, TestBed

__all__ = ["Until"]

# Modules that stand between the scheduler and the model. The debugger neither stops in them nor steps into them.
_BETWEEN = (
    "dbo_greenlet.devices.cpu",
    "dbo_greenlet.devices.cuda",
    "dbo_greenlet.devices.virtual",
    "dbo_greenlet.yields",
    "dbo_greenlet.microbatch",
    "dbo_greenlet.greenlet_carrier",
    "dbo_greenlet.thread_carrier",
    "dbo_greenlet.step",
    "dbo_greenlet.scheduler",
    "dbo_greenlet.schedule",
    "dbo_greenlet.switch_state",
    "dbo_greenlet.thread_state",
    "dbo_greenlet.testing.faulty_microbatch",
    "dbo_greenlet.testing.replay_policy",
    "dbo_greenlet.testing.step_run",
    "dbo_greenlet.testing.step_record",
    "dbo_greenlet.testing.until",
)


class Until:
    """An instrument that stops before decision number `decision` (from 0) of a step.

    Args:
        decision: which.
        debug: called with (where the microbatch stands, whether it is about to call what is to be debugged, the
            modules to pass over, a line that says what it is); starts a debugger there.

    Attributes: `reached`, whether it stopped; `last`, the last decision that the step came to, -1 where to none.
    """

    def __init__(self, decision: int, debug: Callable[[FrameType, bool, tuple[str, ...], str], None]) -> None:
        self.decision = decision
        self.debug = debug
        self.reached = False
        self.last = -1

    def before_step(self, step: Step) -> None:
        for microbatch in step.microbatches:
            # Microbatches exist when an instrument first hears of a step; their kind can still be another one, because
            # it has the same attributes.
            microbatch.__class__ = _stopping(type(microbatch), self)

    def armed(self, build: Build) -> Build:
        """`build`, with entries that also stop where the decision is for a microbatch's first slice."""

        def build_armed(bed: TestBed) -> StepUnderTest:
            made = build(bed)
            step = made if isinstance(made, StepUnderTest) else StepUnderTest(made)
            return replace(step, entries=[self._entry(each) for each in step.entries])

        return build_armed

    def _entry(self, entry: Callable[[], Any]) -> Callable[[], Any]:
        def begin() -> Any:
            microbatch = running.get(get_ident())
            if microbatch is not None and self.is_next(microbatch):
                self.stop(microbatch, sys._getframe())
            return entry()

        return begin

    def is_next(self, microbatch: Microbatch) -> bool:
        step = microbatch.step
        if step is None or self.reached:
            return False
        self.last = len(step.decisions)
        return self.last == self.decision

    def stop(self, microbatch: Microbatch, frame: FrameType) -> None:
        self.reached = True
        begins = not microbatch.slice_number
        where = "begins" if begins else f"goes on after {microbatch.site!r}"
        self.debug(frame, begins, _BETWEEN, f"decision {self.decision}: microbatch {microbatch.index} {where}")


def _stopping(base: type[Microbatch], until: Until) -> type[Microbatch]:
    """A carrier's kind of microbatch that asks `until` whenever it is resumed."""
    name = "hand_over" if hasattr(base, "hand_over") else "yield_"
    hand_over = getattr(base, name)

    def hand_over_and_look(self: Microbatch, site: str) -> None:
        hand_over(self, site)
        if until.is_next(self):
            frame: FrameType | None = sys._getframe()
            while frame is not None and frame.f_globals.get("__name__") in _BETWEEN:
                frame = frame.f_back
            until.stop(self, frame or sys._getframe())

    return type(base.__name__, (base,), {"__slots__": (), name: hand_over_and_look})
