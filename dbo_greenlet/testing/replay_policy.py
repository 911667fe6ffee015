"""The policy that makes a step's recorded decisions again, and stops where the step is another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import ReplayMismatch
from ..schedule import Schedule
from .errors import ReplayStringError

if TYPE_CHECKING:
    from ..step import Step

__all__ = ["Replaying"]


class Replaying:
    """Makes recorded decisions again, site for site.

    Other than `Scripted`, which repeats whole steps, it also repeats one that failed: its record ends in the middle,
    perhaps with a slice that never came to its end. A step that goes on after that (the bug is mended) runs on with
    the lowest microbatch that may run. After the record of a complete step nothing may come.

    Args:
        schedule: what to repeat. `sites` may be one shorter than `decisions`: the last slice did not end.

    The step fails with `ReplayMismatch` at the first decision that differs, and with `ReplayStringError` where its
    first slice already ends at a site that the record does not know, or N is another: that is no changed step but
    another one.
    """

    name = "replay"

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._known = frozenset(schedule.sites)
        # One "" for each microbatch: all of them returned.
        self._complete = len(schedule.sites) == len(schedule) and schedule.sites.count("") == schedule.count

    def start(self, step: Step) -> Callable[[], int]:
        schedule = self.schedule
        if schedule.count != step.count:
            raise ReplayStringError(
                f"the replay string is for a step of {schedule.count} microbatches and this one has {step.count}: it "
                "is of another model or another test"
            )
        decisions, length = schedule.decisions, len(schedule)

        def choose() -> int:
            position = len(step.decisions)
            self._compare(step, position - 1)
            if position >= length:
                if self._complete:
                    raise ReplayMismatch(
                        f"replay parts at decision {position}: the recorded step was complete after {length} "
                        f"decisions, this one still has microbatches {step.runnable()} to run"
                    )
                return step.runnable()[0]
            index = decisions[position]
            if not step.may_run(index):
                raise ReplayMismatch(
                    f"replay parts at decision {position}: the recorded step resumed microbatch {index}"
                    f"{self._at(position)}, which {_state(step, index)} here; runnable are {step.runnable()}"
                )
            return index

        return choose

    def finish(self, step: Step) -> None:
        """Called by the scheduler after the last slice of a step that succeeded."""
        done = len(step.decisions)
        self._compare(step, done - 1)
        if done < len(self.schedule):
            raise ReplayMismatch(
                f"replay parts at decision {done}: the recorded step went on with microbatch "
                f"{self.schedule.decisions[done]}{self._at(done)}, this one is complete after {done} decisions"
            )

    def _compare(self, step: Step, position: int) -> None:
        recorded = self.schedule.sites
        if not 0 <= position < len(recorded) or step.sites[position] == recorded[position]:
            return
        here, then, index = step.sites[position], recorded[position], step.decisions[position]
        if position == 0 and here not in self._known:
            raise ReplayStringError(
                f"the replay string is of another model or another test: microbatch {index} first "
                f"{_ended(here)}, and no slice of the recorded step ends there; its first one {_ended(then)}"
            )
        raise ReplayMismatch(
            f"replay parts at decision {position}: microbatch {index} {_ended(here)}, in the recorded step it "
            f"{_ended(then)}"
        )

    def _at(self, position: int) -> str:
        """Where the microbatch of a decision stood in the recorded step."""
        schedule = self.schedule
        index = schedule.decisions[position]
        before = [site for site, by in zip(schedule.sites[:position], schedule.decisions, strict=False) if by == index]
        return f", parked at {before[-1]!r}" if before and before[-1] else ""

    def __repr__(self) -> str:
        return f"Replaying({len(self.schedule)} decisions)"


def _ended(site: str) -> str:
    return f"yielded at {site!r}" if site else "returned"


def _state(step: Step, index: int) -> str:
    return "has returned" if step.microbatches[index].done else "may not run yet"
