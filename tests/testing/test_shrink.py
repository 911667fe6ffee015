"""Shrinking a failing schedule: to the smallest one, or to one that nothing can be taken from."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo_greenlet import dbo_yield
from dbo_greenlet.errors import PolicyError
from dbo_greenlet.testing.interleavings import interleavings
from dbo_greenlet.testing.shrink import Picked, Trial, Trials, decisions_of, shrink
from dbo_greenlet.testing.step_run import StepRun, StepRunner, TestBed
from dbo_greenlet.testing.verdicts import Reference
from tests.testing.exploring import sizes, yields

Fails = Callable[[tuple[int, ...]], bool]


def trials(slices: int, fails: Fails, count: int = 2) -> Trials:
    """A step of microbatches with so many slices, and a verdict that finds something where `fails` says so."""

    def verdict(run: StepRun, reference: Reference) -> str | None:
        return "found" if fails(run.schedule.decisions) else None

    return Trials(StepRunner(yields(slices - 1), count=count), [verdict], Reference())


def before(first: tuple[int, int], then: tuple[int, int]) -> Fails:
    """Whether slice `first` (microbatch, number) comes before slice `then`."""

    def fails(decisions: tuple[int, ...]) -> bool:
        def place(of: tuple[int, int]) -> int:
            return [p for p, index in enumerate(decisions) if index == of[0]][of[1]]

        return place(first) < place(then)

    return fails


def both(*those: Fails) -> Fails:
    return lambda decisions: all(each(decisions) for each in those)


SIX = sizes((6, 6))
ORDERS = [((i, a), (1 - i, b)) for i in (0, 1) for a in range(6) for b in range(6)]


class TestToTheSmallest:
    @settings(max_examples=40)
    @given(st.lists(st.sampled_from(ORDERS), min_size=1, max_size=3), st.randoms(use_true_random=False))
    def test_whatever_fails_and_wherever_it_begins(self, orders, chance):
        fails = both(*(before(*each) for each in orders))
        failing = [each for each in SIX if fails(each)]
        if not failing:
            return
        run = trials(6, fails)
        found = shrink(run, run.follow(chance.choice(failing)))
        assert found.smallest
        assert found.trial.size == min(SIX[each] for each in failing)
        assert found.trial.finding is not None
        assert found.runs == run.number - 1

    def test_it_may_be_the_smallest_already(self):
        fails = before((1, 0), (0, 5))
        run = trials(6, fails)
        smallest = min(each for each in SIX.values() if fails(each[2]))
        found = shrink(run, run.follow(smallest[2]))
        assert found.trial.size == smallest
        assert found.smallest

    def test_three_microbatches(self):
        fails = both(before((2, 0), (0, 2)), before((0, 1), (1, 0)))
        three = sizes((4, 4, 4))
        failing = [each for each in three if fails(each)]
        run = trials(4, fails, count=3)
        found = shrink(run, run.follow(failing[-1]))
        assert found.trial.size == min(three[each] for each in failing)

    def test_another_verdicts_failure_is_no_smaller_form_of_it(self):
        # Every schedule but the largest ones also fails for another reason.
        def first(run: StepRun, reference: Reference) -> str | None:
            return "deep" if SIX[run.schedule.decisions][0] >= 3 else None

        def second(run: StepRun, reference: Reference) -> str | None:
            return "shallow" if SIX[run.schedule.decisions][0] == 1 else None

        run = Trials(StepRunner(yields(5)), [first, second], Reference())
        largest = max(SIX.values())
        found = shrink(run, run.follow(largest[2]))
        assert found.trial.finding is not None and found.trial.finding.text == "deep"
        assert found.trial.size == min(each for each in SIX.values() if each[0] >= 3)

    def test_the_same_each_time(self):
        fails = both(before((1, 1), (0, 3)), before((0, 4), (1, 3)))
        start = max(each for each in SIX.values() if fails(each[2]))[2]
        results = []
        for _ in range(2):
            run = trials(6, fails)
            results.append((shrink(run, run.follow(start)).trial.size, run.number))
        assert results[0] == results[1]

    def test_what_does_not_fail_is_left_as_it_is(self):
        run = trials(6, lambda decisions: False)
        trial = run.follow((0, 1) * 6)
        found = shrink(run, trial)
        assert found.trial is trial and found.runs == 0 and not found.smallest


class TestCuttingDown:
    """Where the smaller schedules are too many to try them all."""

    def cut(self, run: Trials, start: tuple[int, ...], runs: int = 5000) -> Trial:
        found = shrink(run, run.follow(start), search_runs=1, cut_runs=runs)
        assert found.runs <= runs + 1
        assert not found.smallest
        return found.trial

    def test_nothing_can_be_taken_out_of_the_result(self):
        # 40 slices each, and nothing with fewer than three preemptions fails.
        fails = both(
            before((1, 3), (0, 20)), before((0, 24), (1, 9)), before((1, 15), (0, 33)), before((0, 36), (1, 30))
        )
        run = trials(40, fails)
        start = (0, 1) * 8 + sum(
            [(i,) * n for i, n in ((0, 17), (1, 3), (0, 2), (1, 5), (0, 10), (1, 10), (0, 3), (1, 14))], ()
        )
        failing = run.follow(start)
        assert failing.decisions == start and fails(start) and failing.size[0] == 14
        trial = self.cut(run, start)
        assert fails(trial.decisions)
        assert trial.size[0] == 3
        self.check_nothing_to_take(run, trial)

    def check_nothing_to_take(self, run: Trials, trial: Trial) -> None:
        picked = trial.decisions[: trial.size[1]]
        for position in range(len(picked)):
            less = run.follow(picked[:position] + picked[position + 1 :])
            assert less.finding is None or less.size >= trial.size
        stretches = [tuple(group) for _, group in itertools.groupby(picked)]
        for position in range(len(stretches) - 1):
            before, one, two, behind = (
                stretches[:position],
                *stretches[position : position + 2],
                stretches[position + 2 :],
            )
            other = run.follow(sum([*before, two, one, *behind], ()))
            assert other.finding is None or other.size >= trial.size

    @settings(max_examples=25)
    @given(st.lists(st.sampled_from(ORDERS), min_size=1, max_size=3), st.randoms(use_true_random=False))
    def test_wherever_it_begins(self, orders, chance):
        fails = both(*(before(*each) for each in orders))
        failing = [each for each in SIX if fails(each)]
        if not failing or fails((0,) * 6 + (1,) * 6):
            return
        run = trials(6, fails)
        start = run.follow(chance.choice(failing))
        found = shrink(run, start, search_runs=1)
        assert fails(found.trial.decisions)
        assert found.trial.size <= start.size
        self.check_nothing_to_take(run, found.trial)

    def test_no_run_is_left_for_it(self):
        run = trials(40, before((1, 0), (0, 35)))
        start = (0, 1) * 40
        assert shrink(run, run.follow(start), search_runs=0, cut_runs=0).trial.decisions == start


class TestPicked:
    def runner(self) -> StepRunner:
        return StepRunner(yields(3))

    def test_behind_what_is_picked_comes_the_default(self):
        policy = Picked((0, 1, 0))
        run = self.runner().run(policy)
        assert run.schedule.decisions == tuple(policy.made) == (0, 1, 0, 0, 0, 1, 1, 1)
        assert [list(each) for each in policy.runnable] == [[0, 1], [0, 1], [1], [1], [1]]

    def test_who_could_have_run_is_what_the_step_says(self):
        for decisions in interleavings((4, 4)):
            policy = Picked(decisions[:0])
            follow = Picked(decisions, skip=True)
            run = self.runner().run(follow, watch=True)
            assert run.schedule.decisions == decisions
            assert [tuple(each) for each in follow.runnable] == run.runnable
            run = self.runner().run(policy, watch=True)
            assert [tuple(each) for each in policy.runnable] == run.runnable

    def test_of_three_microbatches(self):
        policy = Picked(())
        run = StepRunner(yields(2), count=3).run(policy, watch=True)
        assert [tuple(each) for each in policy.runnable] == run.runnable

    def test_what_may_not_run_is_passed_over(self):
        run = self.runner().run(Picked((1, 0, 1, 1, 1, 0), skip=True))
        assert run.schedule.decisions == (0, 1, 0, 0, 0, 1, 1, 1)

    def test_or_fails_the_step(self):
        assert isinstance(self.runner().run(Picked((1,))).error, PolicyError)

    def test_the_decision_for_the_slice_that_fails_counts(self):
        def build(bed: TestBed):
            def entry(i: int) -> None:
                dbo_yield("a")
                if i:
                    raise ValueError("here")

            return [partial(entry, i) for i in range(bed.count)]

        policy = Picked(())
        run = StepRunner(build).run(policy)
        assert run.schedule.decisions == (0, 0, 1)
        assert decisions_of(run) == tuple(policy.made) == (0, 0, 1, 1)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_trials_count_their_runs(count):
    run = trials(2, lambda decisions: False, count)
    for _ in range(3):
        assert run.follow(()).decisions == tuple(i for i in range(count) for _ in range(2))
    assert run.number == 3
