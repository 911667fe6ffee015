"""Who goes next.

A policy is an oracle: at every yield the scheduler shows it the step and takes the index it answers. The scheduler
keeps the laws, the policy keeps none: an answer that may not run now is refused with `PolicyError`, so a policy file
needs no defensive code and a wrong policy cannot corrupt a step.

A policy object holds settings only and may serve several steps, also in several threads at once. What one step needs
lives in the closure that `start` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Protocol

from .errors import PolicyError, ReplayMismatch
from .schedule import Schedule

if TYPE_CHECKING:
    from .step import Step

__all__ = ["Policy", "RoundRobin", "Scripted", "answers_in_turn"]

Chooser = Callable[[], int]


class Policy(Protocol):
    """What the scheduler asks of a policy."""

    name: str

    def start(self, step: Step) -> Chooser:
        """Begin one step; the returned callable answers the index of the microbatch to run next.

        It is called only while at least one microbatch can run, and may read `step.runnable()`, `step.last` and
        `step.microbatches`.
        """
        ...


class RoundRobin:
    """Each microbatch in turn, in ring order; those that are done are passed over. This is vLLM's order."""

    name = "round_robin"

    def start(self, step: Step) -> Chooser:
        microbatches = step.microbatches
        count = step.count

        def choose() -> int:
            index = step.last
            while True:
                index += 1
                if index == count:
                    index = 0
                if not microbatches[index].done:
                    return index

        # Not True: what `functools.wraps` makes takes over the attribute, and may answer otherwise.
        choose.in_turn = choose.__code__  # type: ignore[attr-defined]
        return choose

    def __repr__(self) -> str:
        return "RoundRobin()"


def answers_in_turn(choose: Chooser) -> bool:
    """Whether `choose` is `RoundRobin`'s own: for as long as no microbatch is done, a carrier knows its answers.

    An object that hands attributes on to what it wraps is none.
    """
    return type(choose) is FunctionType and choose.__dict__.get("in_turn") is choose.__code__


class Scripted:
    """Replays recorded decisions, and site for site where the schedule recorded its sites.

    Args:
        schedule: a `Schedule`, the string that `Schedule.encode` made, or the plain list of microbatch indices.

    The step fails with `ReplayMismatch` at the first decision that cannot be met: a microbatch that is done or may not
    run yet, another yield site than the recorded one, or a step that goes on after the script ended or ends before it.
    """

    name = "scripted"

    def __init__(self, schedule: Schedule | str | Sequence[int]) -> None:
        if isinstance(schedule, str):
            schedule = Schedule.decode(schedule)
        if isinstance(schedule, Schedule):
            self.decisions = schedule.decisions
            self.sites = schedule.sites
            self.count: int | None = schedule.count
        else:
            self.decisions = tuple(schedule)
            self.sites = ()
            self.count = None

    def start(self, step: Step) -> Chooser:
        decisions, sites = self.decisions, self.sites
        if self.count is not None and self.count != step.count:
            raise PolicyError(
                f"the scripted schedule is for {self.count} microbatches and this step has {step.count}; "
                "replay it with the recorded number of microbatches"
            )

        def choose() -> int:
            position = len(step.decisions)
            if position and sites and step.sites[-1] != sites[position - 1]:
                raise ReplayMismatch(
                    f"replay parts at decision {position - 1}: microbatch {step.decisions[-1]} "
                    f"{_site_words(step.sites[-1])}, the recorded step says it {_site_words(sites[position - 1])}"
                )
            if position >= len(decisions):
                raise ReplayMismatch(
                    f"replay parts at decision {position}: the recorded step ended after {position} decisions, "
                    f"this one still has microbatches {step.runnable()} to run"
                )
            index = decisions[position]
            if index not in step.runnable():
                raise ReplayMismatch(
                    f"replay parts at decision {position}: the recorded step resumed microbatch {index}, "
                    f"which cannot run here now; runnable are {step.runnable()}"
                )
            return index

        return choose

    def finish(self, step: Step) -> None:
        """Called by the scheduler after the last slice: the script must be used up, down to its last site."""
        done = len(step.decisions)
        if done < len(self.decisions):
            raise ReplayMismatch(
                f"replay parts at decision {done}: the recorded step went on with microbatch "
                f"{self.decisions[done]}, this one is complete after {done} decisions"
            )
        if self.sites and done and step.sites[-1] != self.sites[done - 1]:
            raise ReplayMismatch(
                f"replay parts at decision {done - 1}: microbatch {step.decisions[-1]} "
                f"{_site_words(step.sites[-1])}, the recorded step says it {_site_words(self.sites[done - 1])}"
            )

    def __repr__(self) -> str:
        return f"Scripted({len(self.decisions)} decisions)"


def _site_words(site: str) -> str:
    return f"yielded at {site!r}" if site else "returned"
