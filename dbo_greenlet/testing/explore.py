"""Exploration: run a step under test under many schedules, judge each run, shrink the first failure.

    found = explore(build)                                # every schedule that laws 4 and 6 allow
    found = explore(build, preemptions=2)                 # those with at most two preemptions
    found = explore(build, how="pct", schedules=500)      # beyond that: by chance, with a bound on what is missed

The number of schedules is reported before the first of them runs. An exhaustive exploration goes through them in the
order of their size (`interleavings`), so that its first failure is the smallest one there is; one by chance shrinks
what it finds (`shrink`). The same step, options and seed give the same exploration, down to its fingerprint.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import ConfigurationError
from ..policies import Pct, SeededRandom
from ..policy import Policy
from .checksum import checksum
from .determinism import compare_runs
from .errors import ExplorationFailed, NondeterminismError, SpaceTooLargeError
from .failure_text import failure_text
from .interleavings import IN_TURN, SmallestFirst, count_up_to, largest_bound
from .shrink import Picked, Shrunk, Trial, Trials, decisions_of, shrink
from .step_run import Build, StepRun, StepRunner, run_in_turn
from .verdicts import DEFAULT, Reference, Verdict, is_injected

if TYPE_CHECKING:
    from .faults import Faults

__all__ = ["HOW", "Exploration", "explore", "reference_of"]

HOW = ("exhaustive", "pct", "random")


@dataclass(frozen=True)
class Exploration:
    """What was explored, and without a finding.

    Attributes:
        how: "exhaustive", "pct" or "random".
        slices: of each microbatch, in turn and without faults.
        preemptions: the bound, None for none.
        space: number of schedules within the bound, if each has as many slices as in turn.
        space_is_exact: False where `space` is only a lower bound.
        schedules: how many ran.
        distinct: how many different ones.
        decisions: how many decisions they had together.
        states: how many different states of the scheduler they went through (slices completed of each microbatch).
        depth, seed: of the chance; None and None for exhaustive.
        fingerprint: sixteen hex characters over all schedules in their order, with sites: equal for equal explorations.
    """

    how: str
    slices: tuple[int, ...]
    preemptions: int | None
    space: int
    space_is_exact: bool
    schedules: int
    distinct: int
    decisions: int
    states: int
    depth: int | None
    seed: int | None
    fingerprint: str

    @property
    def complete(self) -> bool:
        """Whether every schedule without bound was run."""
        return self.how == "exhaustive" and self.preemptions is None

    def __str__(self) -> str:
        bound = "" if self.preemptions is None else f", at most {_counted(self.preemptions, 'preemption')}"
        chance = "" if self.seed is None else f", seed {self.seed}"
        depth = "" if self.depth is None else f", depth {self.depth}"
        space = _in_words(self.space, self.space_is_exact)
        return (
            f"{self.how}{bound}{depth}{chance}: {_counted(self.schedules, 'schedule')} run, {self.distinct:,} "
            f"different of {space}, {self.states:,} states, {self.decisions:,} decisions, no finding"
        )


def explore(
    build: Build,
    *,
    how: str = "exhaustive",
    count: int = 2,
    preemptions: int | None = None,
    most: int = 100_000,
    schedules: int = 1000,
    depth: int = 2,
    seed: int = 0,
    verdicts: Sequence[Verdict] = DEFAULT,
    make_device: Callable[[], Any] | None = None,
    faults: Faults | None = None,
    strict: bool = True,
    thread_state: Any = "auto",
    instruments: Iterable[Any] = (),
    shrink_runs: int = 1000,
    report: Callable[[str], object] | None = print,
) -> Exploration:
    """Run `build`'s step under many schedules and judge each run.

    Args:
        build: makes the step, anew for each run; see `step_run`.
        how: "exhaustive"; or by chance, "pct" (probabilistic concurrency testing) or "random".
        count: number of microbatches N.
        preemptions: exhaustive: only schedules with at most so many preemptions (see `interleavings`).
        most: exhaustive: refuse where there are more schedules than this.
        schedules: by chance: how many to run.
        depth: pct: a bug that shows when so many decisions come in a certain order is met by one schedule with a
            probability of at least 1 / (N * k ** (depth - 1)), with k decisions in a step.
        seed: by chance: the same seed gives the same schedules.
        verdicts: what each run is judged by; the first that finds something ends the exploration.
        make_device, faults, strict, thread_state, instruments: see `run_step`.
        shrink_runs: the most runs for each of the two ways of shrinking (`shrink`).
        report: gets a line before the first run of the exploration; None for none.

    Raises:
        ExplorationFailed: a run failed; its message has the finding, the smallest schedule that fails, and how to run
            it again, `replay` the string alone. Its cause is the step's error, if it failed. Where another rank's
            failure ended the step, the schedule is that of the run: all others fail alike.
        NondeterminismError: the same decisions gave another run, so that nothing can be said about schedules. Its cause
            is the step's error, if it failed there.
        SpaceTooLargeError: more than `most` schedules; the message suggests a bound.
        ConfigurationError: an option that cannot work.
        Whatever an entry raises outside a step: there is no reference then.
    """
    _check(how, preemptions, most, schedules, depth, shrink_runs)
    runner = StepRunner(
        build,
        count=count,
        make_device=make_device,
        faults=faults,
        strict=strict,
        thread_state=thread_state,
        instruments=instruments,
    )
    trials = Trials(runner, verdicts, reference_of(build, count=count, make_device=make_device, faults=faults))
    bound = preemptions if how == "exhaustive" else None
    order = SmallestFirst(bound)
    first = _first(trials, order, report)
    whole = first.run
    if whole.error is not None:
        # A fault ended it early; how long the step is, it says without.
        whole = StepRunner(build, count=count, make_device=make_device, strict=strict).run(Picked(()))
    slices = tuple(max(1, whole.schedule.decisions.count(index)) for index in range(count))
    space, exact = count_up_to(slices, bound)
    what = f"{_counted(count, 'microbatch', 'microbatches')} with {_each(slices)}"
    size = _in_words(space, exact)
    if how == "exhaustive" and space > most:
        raise SpaceTooLargeError(_too_large(slices, bound, most, size, what))
    notes = _Notes(count)
    if how == "exhaustive":
        within = "" if bound is None else f" with at most {_counted(bound, 'preemption')}"
        _say(report, f"exploring all {size} schedules{within} of {what}")
        _exhaust(trials, notes, order, first, most)
    else:
        chance = f"pct, depth {depth}" if how == "pct" else how
        _say(
            report, f"exploring {_counted(schedules, 'schedule')} by chance ({chance}, seed {seed}) of {size} of {what}"
        )
        _by_chance(trials, notes, _policies(how, schedules, depth, seed, sum(slices)), shrink_runs)
    return Exploration(
        how=how,
        slices=slices,
        preemptions=bound,
        space=space,
        space_is_exact=exact,
        schedules=notes.schedules,
        distinct=len(notes.distinct),
        decisions=notes.decisions,
        states=len(notes.states),
        depth=depth if how == "pct" else None,
        seed=None if how == "exhaustive" else seed,
        fingerprint=notes.digest.hexdigest(),
    )


def reference_of(
    build: Build, *, count: int = 2, make_device: Callable[[], Any] | None = None, faults: Faults | None = None
) -> Reference:
    """What the verdicts compare with: the outputs of `run_in_turn`, whose errors pass through."""
    try:
        outputs = run_in_turn(build, count=count, make_device=make_device, faults=faults)
    except Exception as error:
        # Any error of the step's own passes; one that was injected also strikes outside a step (no memory is left).
        if faults is None or not is_injected(error):
            raise
        outputs = run_in_turn(build, count=count, make_device=make_device)
    return Reference(outputs, checksum(outputs))


class _Notes:
    """What an exploration went through."""

    def __init__(self, count: int) -> None:
        self.schedules = self.decisions = 0
        self.distinct: set[bytes] = set()
        self.states: set[int] = {0}
        self.digest = hashlib.blake2b(digest_size=8)
        # A state as one number: slices completed of each microbatch, at most a million of them.
        self._one = [1 << (20 * index) for index in range(count)]

    def add(self, run: StepRun) -> None:
        decisions, sites = decisions_of(run), run.schedule.sites
        as_bytes = bytes(decisions)
        self.schedules += 1
        self.decisions += len(decisions)
        self.distinct.add(as_bytes)
        self.digest.update(as_bytes)
        self.digest.update("\0".join(sites).encode(errors="surrogatepass"))
        one = self._one
        self.states.update(itertools.accumulate([one[index] for index in decisions]))


def _first(trials: Trials, order: SmallestFirst, report: Callable[[str], object] | None) -> Trial:
    """The first schedule of `order`, run twice: both runs must be the same in everything."""
    order.next()  # IN_TURN: it has the smallest size of all
    first = again = trials.branch(order, IN_TURN)
    if not trials.broken:
        again = trials.branch(SmallestFirst(), IN_TURN)
    if trials.broken and again.finding is not None:
        _fail(Shrunk(again, False, 0), "the first schedule", trials)
    if (difference := compare_runs(first.run, again.run)) is not None:
        raise NondeterminismError(difference)
    if first.finding is not None:
        _say(report, "exploring nothing: the microbatches fail in turn, without any preemption")
        _fail(Shrunk(first, True, 0), "the first schedule", trials)
    return first


def _exhaust(trials: Trials, notes: _Notes, order: SmallestFirst, first: Trial, most: int) -> None:
    notes.add(first.run)
    while (start := order.next()) is not None:
        if notes.schedules >= most:
            raise SpaceTooLargeError(
                f"more than most={most:,} schedules: the number of slices depends on the schedule, so that there are "
                "more than were counted; lower the bound on preemptions, or use how='pct'"
            )
        trial = trials.branch(order, start)
        notes.add(trial.run)
        if trial.finding is not None:
            _fail(Shrunk(trial, True, 0), f"schedule {notes.schedules:,}, in the order of their size,", trials)


def _by_chance(trials: Trials, notes: _Notes, policies: Iterator[Policy], shrink_runs: int) -> None:
    for policy in policies:
        run, finding = trials.run(policy)
        notes.add(run)
        if finding is None:
            continue
        which = f"schedule {notes.schedules:,} ({policy!r})"
        if trials.broken:
            _fail(Shrunk(Trial.of_broken(run, finding), False, 0), which, trials)
        # The same decisions once more, to see who could have run at each.
        trial = trials.follow(decisions_of(run))
        if trial.finding is None:
            raise NondeterminismError(
                f"a schedule failed and, run again, did not: {finding.text}; the step has a source of chance or keeps "
                "something from one run to the next"
            )
        _fail(shrink(trials, trial, search_runs=shrink_runs, cut_runs=shrink_runs), which, trials)


def _policies(how: str, schedules: int, depth: int, seed: int, length: int) -> Iterator[Policy]:
    seeds = random.Random(seed)
    for _ in range(schedules):
        each = seeds.getrandbits(32)
        yield Pct(each, depth, length) if how == "pct" else SeededRandom(each)


def _fail(shrunk: Shrunk, which: str, trials: Trials) -> NoReturn:
    text, replay = failure_text(shrunk, which, trials)
    # With the step's own error as the cause, and so its traceback; None where a verdict found something else.
    raise ExplorationFailed(text, replay) from shrunk.trial.run.error


def _too_large(slices: Sequence[int], bound: int | None, most: int, size: str, what: str) -> str:
    suggested, number = largest_bound(slices, most)
    within = "" if bound is None else f" with at most {_counted(bound, 'preemption')}"
    return (
        f"there are {size} schedules{within} of {what}, and most={most:,}. Use preemptions={suggested}, which leaves "
        f"{number:,}, raise most, explore fewer layers, or explore by chance: how='pct'"
    )


def _check(how: str, preemptions: int | None, most: int, schedules: int, depth: int, shrink_runs: int) -> None:
    if how not in HOW:
        raise ConfigurationError(f"how={how!r}: use one of {', '.join(HOW)}")
    if how != "exhaustive" and preemptions is not None:
        raise ConfigurationError(f"preemptions={preemptions}: only an exhaustive exploration has a bound on them")
    for name, value, least in (
        ("preemptions", preemptions, 0),
        ("most", most, 1),
        ("schedules", schedules, 1),
        ("depth", depth, 1),
        ("shrink_runs", shrink_runs, 0),
    ):
        if value is not None and (type(value) is not int or value < least):
            raise ConfigurationError(f"{name}={value!r}: use a whole number, {least} or more")


def _say(report: Callable[[str], object] | None, line: str) -> None:
    if report is not None:
        report(line)


def _in_words(number: int, exact: bool) -> str:
    # A deep step of several microbatches has a number of schedules with thousands of digits.
    text = f"{number:,}" if number < 10**15 else f"about 10^{math.log10(number):.0f}"
    return text if exact else f"more than {text}"


def _counted(number: int, one: str, more: str = "") -> str:
    return f"{number:,} {one if number == 1 else more or one + 's'}"


def _each(slices: Sequence[int]) -> str:
    if len(set(slices)) == 1:
        return f"{_counted(slices[0], 'slice')} each"
    return " and ".join(map(str, slices)) + " slices"
