"""From a failing schedule to the smallest one that fails by the same verdict.

Small is what `interleavings` calls the size of a schedule: few preemptions, then few decisions that must be picked,
then the decisions themselves. First every smaller schedule is tried, in the order of their size, up to a number of
runs: what then fails is *the* smallest, and the report says so. Where that takes too long, the failing schedule is cut
down instead, as ddmin does (Zeller and Hildebrandt 2002): its picked decisions are taken out in halves, quarters and so
on down to one by one, and what is left out follows the default; and neighbouring stretches of two microbatches change
places. The result is smallest in this sense: without any one of its picked decisions, or with any two such stretches
exchanged, it does not fail, or is not smaller.

Both are functions of the step and the schedule, without chance: the same failure always shrinks to the same schedule.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import PolicyError
from .errors import NondeterminismError
from .interleavings import Size, SmallestFirst, Start, default_choice, size_of
from .verdicts import Finding, Reference, Verdict, first_finding, is_of_the_ranks

if TYPE_CHECKING:
    from ..policy import Policy
    from ..step import Step
    from .step_run import StepRun, StepRunner

__all__ = ["Picked", "Shrunk", "Trial", "Trials", "decisions_of", "shrink"]


class Picked:
    """A policy that picks the given microbatches, and behind them follows the default.

    Args:
        decisions: the microbatches to pick. The step fails with `PolicyError` where one of them may not run.
        skip: pass over those that may not run.

    `made` are the decisions of the last step that was begun, with those for a slice that failed, and `runnable` who
    could have run at each, from `decisions` on: of those before it is known already. With `skip` it is all of them.
    """

    name = "picked"

    def __init__(self, decisions: Sequence[int], skip: bool = False) -> None:
        self.decisions = decisions
        self.skip = skip
        self.made: list[int] = []
        self.runnable: list[Sequence[int]] = []

    def start(self, step: Step) -> Callable[[], int]:
        self.made, self.runnable = made, seen = [], []
        wanted = iter(self.decisions)
        runnable = _of_two(step) if step.count == 2 else step.runnable

        def choose() -> int:
            index = next(wanted, -1)
            if index < 0:
                could = runnable()
                index = step.last
                if index not in could:
                    index = could[0]
                seen.append(could)
            made.append(index)
            return index

        def choose_or_skip() -> int:
            could = runnable()
            index = next((each for each in wanted if each in could), -1)
            if index < 0:
                index = default_choice(step.last, could)
            seen.append(could)
            made.append(index)
            return index

        return choose_or_skip if self.skip else choose


def _of_two(step: Step) -> Callable[[], Sequence[int]]:
    """`step.runnable` of a step of two microbatches: an exploration asks at every decision of thousands of runs."""
    zero, one = step.microbatches

    def runnable() -> Sequence[int]:
        if zero.done:
            return _ONE
        return _BOTH if zero.slice_number > one.slice_number and not one.done else _ZERO

    return runnable


_ZERO, _ONE, _BOTH = (0,), (1,), (0, 1)


def decisions_of(run: StepRun) -> tuple[int, ...]:
    """The decisions of a run, with the one for the slice that failed, which its schedule has not."""
    decisions = run.schedule.decisions
    return decisions if run.failed is None else (*decisions, run.failed)


@dataclass
class Trial:
    """One run: what came of it, what was found, and its size (its decisions have the slice that failed, if one did)."""

    run: StepRun
    finding: Finding | None
    size: Size

    @property
    def decisions(self) -> tuple[int, ...]:
        return self.size[2]

    @classmethod
    def of_broken(cls, run: StepRun, finding: Finding) -> Trial:
        """Of a run that another rank's failure ended, all of it as if picked: nothing says who else could have run."""
        decisions = decisions_of(run)
        return cls(run, finding, (0, len(decisions), decisions))


class Trials:
    """Runs schedules of one step under test and judges them.

    `number` counts the runs. `broken`: another rank's failure ended one of them, and would end all that follow.
    """

    def __init__(self, runner: StepRunner, verdicts: Sequence[Verdict], reference: Reference) -> None:
        self.runner = runner
        self.verdicts = tuple(verdicts)
        self.reference = reference
        self.number = 0
        self.broken = False

    def run(self, policy: Policy) -> tuple[StepRun, Finding | None]:
        """Run one schedule."""
        self.number += 1
        run = self.runner.run(policy)
        self.broken = self.broken or is_of_the_ranks(run.error)
        return run, first_finding(run, self.reference, self.verdicts)

    def branch(self, order: SmallestFirst, start: Start) -> Trial:
        """Run what `order` gave, and tell it what else could have been.

        Where another rank's failure ended the run and a verdict said so, that is all there is to tell.

        Raises:
            NondeterminismError: it could not be run as it was found. Its cause is the step's error, if it failed.
        """
        policy = Picked(start.decisions)
        run, finding = self.run(policy)
        decisions, sites = tuple(policy.made), run.schedule.sites
        known = start.sites
        if self.broken and finding is not None:
            return Trial.of_broken(run, finding)
        if isinstance(run.error, PolicyError) and len(decisions) <= start.length:
            raise NondeterminismError(
                f"decision {len(decisions) - 1} could be made in an earlier run of the same decisions, and cannot in "
                f"this one ({run.error}); check_deterministic says more"
            ) from run.error
        if sites[: len(known)] != known:
            position = next(i for i, (a, b) in enumerate(itertools.zip_longest(sites, known)) if a != b)
            now = f"to {sites[position]!r}" if position < len(sites) else _nowhere(run.error)
            raise NondeterminismError(
                f"decision {position} sent microbatch {start.decisions[position]} to {known[position]!r} in an earlier "
                f"run of the same decisions, and {now} in this one; check_deterministic says more"
            ) from run.error
        if not start.length:
            run.runnable = [tuple(each) for each in policy.runnable]
        order.ran(start, decisions, sites, policy.runnable)
        return Trial(run, finding, (start.preemptions, start.length, decisions))

    def may_go_on(self, last: int) -> bool:
        """Whether another run tells anything, up to run number `last`."""
        return self.number < last and not self.broken

    def follow(self, wanted: Sequence[int]) -> Trial:
        """Run `wanted` as far as it can be met, then the default."""
        policy = Picked(wanted, skip=True)
        run, finding = self.run(policy)
        return Trial(run, finding, size_of(policy.made, policy.runnable))


def _nowhere(error: BaseException | None) -> str:
    # A step that does not fail here has made fewer decisions than it was given, which no policy allows it.
    return "nowhere" if error is None else f"nowhere (the step failed there: {type(error).__name__}: {error})"


@dataclass(frozen=True)
class Shrunk:
    """The smallest failing schedule that was found.

    Attributes: `trial`; `smallest`: whether every smaller one was tried; `runs`: how many runs that took.
    """

    trial: Trial
    smallest: bool
    runs: int


def shrink(trials: Trials, failing: Trial, *, search_runs: int = 1000, cut_runs: int = 1000) -> Shrunk:
    """Shrink `failing`; see the module.

    Args:
        trials: of the step that fails.
        failing: a run with a finding.
        search_runs: the most runs in which smaller schedules are tried; where they are not enough, nothing comes of it.
        cut_runs: the most runs in which the failing schedule is then cut down.

    It ends where another rank fails meanwhile.
    """
    before = trials.number
    if failing.finding is None:
        return Shrunk(failing, False, 0)
    found, complete = _smallest(trials, failing, search_runs)
    if not complete:
        found = _cut_down(trials, failing, cut_runs)
    return Shrunk(found, complete, trials.number - before)


def _smallest(trials: Trials, failing: Trial, runs: int) -> tuple[Trial, bool]:
    """(the smallest schedule that fails as `failing` does, True), or (`failing`, False) after `runs` runs."""
    order = SmallestFirst(failing.size[0])
    for _ in range(runs):
        start = order.next()
        if start is None or (start.preemptions, start.length, start.decisions) >= failing.size:
            return failing, True
        trial = trials.branch(order, start)
        if trials.broken:
            break
        if _same(trial.finding, failing.finding):
            return trial, True
    return failing, False


def _cut_down(trials: Trials, failing: Trial, runs: int) -> Trial:
    last = trials.number + runs
    best = failing

    def smaller(wanted: Sequence[int]) -> bool:
        nonlocal best
        trial = trials.follow(wanted)
        if trials.broken or not _same(trial.finding, failing.finding) or trial.size >= best.size:
            return False
        best = trial
        return True

    while _take_out(lambda: _picked(best), smaller, trials, last) | _exchange(
        lambda: _picked(best), smaller, trials, last
    ):
        pass
    return best


def _picked(trial: Trial) -> tuple[int, ...]:
    return trial.decisions[: trial.size[1]]


def _take_out(
    picked: Callable[[], Sequence[int]], smaller: Callable[[Sequence[int]], bool], trials: Trials, last: int
) -> bool:
    """Leave out half of the picked decisions, a quarter, and so on to one; whether anything became smaller."""
    any_smaller = False
    width = max(1, len(picked()) // 2)
    while True:
        position, shrunk = 0, False
        while position < len(now := picked()) and trials.may_go_on(last):
            if smaller((*now[:position], *now[position + width :])):
                shrunk = any_smaller = True
            else:
                position += width
        if width == 1 and not shrunk:
            return any_smaller
        if not shrunk:
            width //= 2


def _exchange(
    picked: Callable[[], Sequence[int]], smaller: Callable[[Sequence[int]], bool], trials: Trials, last: int
) -> bool:
    """Have two neighbouring stretches of different microbatches change places: each joins others of its own."""
    any_smaller = False
    position = 0
    while trials.may_go_on(last):
        stretches = [list(group) for _, group in itertools.groupby(picked())]
        if position + 1 >= len(stretches):
            break
        stretches[position], stretches[position + 1] = stretches[position + 1], stretches[position]
        if smaller([index for stretch in stretches for index in stretch]):
            any_smaller = True
        else:
            position += 1
    return any_smaller


def _same(finding: Finding | None, wanted: Finding | None) -> bool:
    """The same verdict found it. What it says may differ: names and numbers change with the schedule."""
    return finding is not None and wanted is not None and finding.verdict == wanted.verdict
