"""Explorations that something else ends: a step that fails inside what it repeats, a rank that dies."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest

from dbo_greenlet import dbo_enabled, dbo_yield
from dbo_greenlet.errors import BrokenGroupError, MicrobatchFailed, RankFailedError
from dbo_greenlet.testing.errors import ExplorationFailed, NondeterminismError
from dbo_greenlet.testing.explore import explore
from dbo_greenlet.testing.replay_case import ReplayCase
from dbo_greenlet.testing.step_run import TestBed
from dbo_greenlet.testing.verdicts import same_outputs, succeeded

Build = Callable[[TestBed], list[Callable[[], int]]]


def step(at_site: Callable[[int, int, str], None], log: list[int] | None = None) -> Build:
    """Microbatches with three yields; `at_site(run, i, site)` is called behind each, in a step only, runs from 1.

    `log` gets the run of each slice that begins.
    """
    runs = itertools.count()  # 0: the reference

    def build(bed: TestBed) -> list[Callable[[], int]]:
        run = next(runs)

        def entry(i: int) -> int:
            for site in ("a", "b", "c"):
                if log is not None:
                    log.append(run)
                dbo_yield(site)
                if dbo_enabled():
                    at_site(run, i, site)
            return i

        return [partial(entry, i) for i in range(bed.count)]

    return build


class DyingRank:
    """In run `when` another rank dies while microbatch `i` stands at `site`; in those behind it the group is broken."""

    def __init__(self, when: int, i: int, site: str) -> None:
        self.when, self.i, self.site = when, i, site
        self.runs = 0

    def __call__(self, run: int, i: int, site: str) -> None:
        self.runs = run
        if run > self.when:
            raise BrokenGroupError("the group is broken since rank 1 failed")
        if (run, i, site) == (self.when, self.i, self.site):
            raise RankFailedError(1, None, "its process ended")


def test_a_step_that_fails_inside_what_it_repeats() -> None:
    def at_site(run: int, i: int, site: str) -> None:
        if run == 6 and (i, site) == (0, "a"):
            raise ValueError("only now")

    said = (
        r"^decision 1 sent microbatch 0 to 'b' in an earlier run of the same decisions, and nowhere \(the step failed "
        r"there: MicrobatchFailed: Microbatch 0 of 2 failed in slice 1 after the yield at 'a': ValueError: only now\) "
        r"in this one; check_deterministic says more$"
    )
    with pytest.raises(NondeterminismError, match=said) as caught:
        explore(step(at_site), report=None)
    assert isinstance(caught.value.__cause__, MicrobatchFailed)
    assert str(caught.value.__cause__.__cause__) == "only now"


@pytest.mark.parametrize(
    ("how", "when", "which"),
    [
        ("exhaustive", 1, "the first schedule fails: "),
        ("exhaustive", 2, "the first schedule fails: "),
        ("exhaustive", 6, "schedule 5, in the order of their size, fails: "),
        ("random", 3, "schedule 1 (SeededRandom("),
        ("pct", 4, "schedule 2 (Pct("),
    ],
)
def test_a_rank_that_dies_is_told_as_such_and_nothing_runs_after_it(how: str, when: int, which: str) -> None:
    rank = DyingRank(when, 0, "b")
    with pytest.raises(ExplorationFailed) as caught:
        explore(step(rank), how=how, schedules=20, report=None)
    text = str(caught.value)
    assert text.startswith(which)
    assert "ReceiveHookError" not in text and "rank 1 failed: its process ended" in text.splitlines()[0]
    assert "smallest schedule that fails" not in text
    assert "that another rank's failure ended is not run again, so this is its schedule as it was" in text
    assert isinstance(caught.value.__cause__, MicrobatchFailed)
    assert isinstance(caught.value.__cause__.__cause__, RankFailedError)
    assert rank.runs == when
    # Up to the slice that failed, and with it.
    schedule = ReplayCase.decode(caught.value.replay).schedule
    assert len(schedule.decisions) == len(schedule.sites) + 1
    assert (schedule.decisions[-1], schedule.sites[-1] if schedule.decisions[-2] == 0 else "b") == (0, "b")


def test_a_rank_that_dies_inside_what_is_repeated_is_no_nondeterminism() -> None:
    # The same run as in the first test of this file, and another error.
    rank = DyingRank(6, 0, "a")
    with pytest.raises(ExplorationFailed, match="rank 1 failed: its process ended") as caught:
        explore(step(rank), report=None)
    assert ReplayCase.decode(caught.value.replay).schedule.sites == ("a",)
    assert rank.runs == 6


def test_a_verdict_that_is_content_with_failures_leaves_the_difference() -> None:
    rank = DyingRank(6, 0, "a")
    with pytest.raises(NondeterminismError, match="nowhere .*rank 1 failed: its process ended") as caught:
        explore(step(rank), verdicts=[same_outputs], report=None)
    assert isinstance(caught.value.__cause__, MicrobatchFailed)


@pytest.mark.parametrize(("search", "cut"), [(1000, 1000), (0, 1000)])
def test_a_rank_that_dies_while_a_failure_is_shrunk_ends_the_shrinking(search: int, cut: int) -> None:
    """Its error is by the same verdict, and is neither taken for the failure nor for its absence."""
    found: list[int] = []

    class Bug(DyingRank):
        def __call__(self, run: int, i: int, site: str) -> None:
            if found:
                # One run to see who could go on where, and one that is smaller.
                self.when = found[0] + 2
            super().__call__(run, i, site)

    rank = Bug(10**6, 0, "a")
    order: dict[int, list[int]] = {}

    def at_site(run: int, i: int, site: str) -> None:
        rank(run, i, site)
        order.setdefault(run, []).append(i)
        if (i, site) == (0, "c") and 1 in order[run]:
            found.append(run)
            raise ValueError("the bug")

    with pytest.raises(ExplorationFailed) as caught:
        explore(step(at_site), how="random", seed=3, verdicts=[succeeded], report=None, shrink_runs=max(search, cut))
    text = str(caught.value)
    assert "ValueError: the bug" in text.splitlines()[0] and "its process ended" not in text
    assert "cut down from a larger one" in text
    assert rank.runs == found[0] + 2
