"""Counting, listing and ordering schedules, against a brute force that tries every sequence of decisions."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo_greenlet.errors import ConfigurationError
from dbo_greenlet.step import Microbatch, Step
from dbo_greenlet.testing.interleavings import (
    SmallestFirst,
    count_interleavings,
    count_up_to,
    default_choice,
    interleavings,
    largest_bound,
    may_run,
    size_of,
)

# Small enough that every sequence of decisions can be tried.
SHAPES = [
    (1,),
    (3,),
    (1, 1),
    (2, 2),
    (3, 3),
    (4, 4),
    (5, 5),
    (1, 4),
    (4, 1),
    (2, 4),
    (1, 1, 1),
    (2, 2, 2),
    (3, 3, 3),
    (1, 3, 2),
    (3, 1, 2),
    (2, 1, 3),
    (1, 2, 3),
    (2, 2, 2, 2),
]


def allowed(decisions: tuple[int, ...], slices: tuple[int, ...]) -> bool:
    """Law 6, as it is written: slice k of j starts when every earlier i has completed its slice k, or is done."""
    completed = [0] * len(slices)
    for j in decisions:
        k = completed[j]
        for i in range(j):
            if completed[i] <= k and completed[i] < slices[i]:
                return False
        completed[j] += 1
    return True


def every(slices: tuple[int, ...]) -> list[tuple[int, ...]]:
    """All sequences with the right number of decisions for each microbatch that law 6 allows."""
    letters = [index for index, number in enumerate(slices) for _ in range(number)]
    return (
        sorted({each for each in itertools.permutations(letters) if allowed(each, slices)})
        if len(letters) < 9
        else [
            each
            for each in itertools.product(range(len(slices)), repeat=len(letters))
            if all(each.count(i) == number for i, number in enumerate(slices)) and allowed(each, slices)
        ]
    )


def could_run(completed: list[int], slices: tuple[int, ...]) -> list[int]:
    return [
        j
        for j in range(len(slices))
        if completed[j] < slices[j] and all(completed[i] > completed[j] or completed[i] == slices[i] for i in range(j))
    ]


def preemptions(decisions: tuple[int, ...], slices: tuple[int, ...]) -> int:
    """How often another one ran while the last one could have gone on."""
    found = 0
    for position in range(1, len(decisions)):
        before = decisions[:position]
        completed = [before.count(i) for i in range(len(slices))]
        found += decisions[position] != before[-1] and before[-1] in could_run(completed, slices)
    return found


class TestCounting:
    @pytest.mark.parametrize("slices", SHAPES)
    def test_as_many_as_brute_force_finds(self, slices):
        assert count_interleavings(slices) == len(every(slices))

    @pytest.mark.parametrize("slices", SHAPES)
    def test_with_every_bound_on_preemptions(self, slices):
        found = [preemptions(each, slices) for each in every(slices)]
        for bound in range(max(found) + 2):
            assert count_interleavings(slices, bound) == sum(number <= bound for number in found)

    @pytest.mark.parametrize("slices", range(1, 31))
    def test_two_microbatches_are_counted_by_the_catalan_numbers(self, slices):
        catalan = math.comb(2 * slices, slices) // (slices + 1)
        assert count_interleavings((slices, slices)) == catalan
        # The sum over states, which has no formula in it.
        assert count_interleavings((slices, slices), 2 * slices) == catalan

    def test_three_microbatches(self):
        # Standard Young tableaux of three equal rows: 2 (3n)! / (n! (n+1)! (n+2)!).
        for n in range(1, 8):
            wanted = 2 * math.factorial(3 * n) // math.factorial(n) // math.factorial(n + 1) // math.factorial(n + 2)
            assert count_interleavings((n, n, n)) == wanted
            assert count_interleavings((n, n, n), 3 * n) == wanted

    def test_a_deep_model_at_once(self):
        # 60 layers of low latency: 121 slices each.
        assert count_interleavings((121, 121)) == math.comb(242, 121) // 122
        assert count_interleavings((121, 121, 121)) > 10**150

    def test_no_preemption_leaves_the_schedule_in_turn(self):
        assert list(interleavings((3, 3), 0)) == [(0, 0, 0, 1, 1, 1)]
        assert count_interleavings((9, 9, 9), 0) == 1

    def test_one_preemption_is_one_place_to_switch(self):
        assert count_interleavings((7, 7), 1) == 7

    def test_round_robin_is_among_those_with_one_preemption_less_than_slices(self):
        round_robin = (0, 1) * 4
        assert round_robin in interleavings((4, 4), 3)
        assert round_robin not in interleavings((4, 4), 2)

    def test_a_lower_bound_where_the_sum_gets_too_large(self):
        slices = (6, 7, 8)  # increasing, so that there is no formula
        number, exact = count_up_to(slices, None, most_states=50)
        assert not exact
        assert 1 < number < count_interleavings(slices)
        assert count_up_to(slices, None) == (count_interleavings(slices), True)

    @pytest.mark.parametrize("slices", [(), (0,), (2, 0), (1,) * 37])
    def test_no_step_has_such_slices(self, slices):
        with pytest.raises(ConfigurationError, match="microbatches, at least 1 slice each"):
            count_interleavings(slices)

    def test_no_negative_bound(self):
        with pytest.raises(ConfigurationError, match="preemptions=-1"):
            interleavings((2, 2), -1)


class TestSuggestedBound:
    @pytest.mark.parametrize("slices", [(5, 5), (7, 7), (4, 4, 4), (2, 4)])
    @pytest.mark.parametrize("most", [1, 10, 100, 400])
    def test_it_is_the_largest_that_is_small_enough(self, slices, most):
        bound, number = largest_bound(slices, most)
        assert number == count_interleavings(slices, bound) <= most
        assert count_interleavings(slices, bound + 1) > most or bound >= sum(slices)

    def test_of_a_deep_model(self):
        # Of about 10^69 schedules; those with three preemptions are too many already.
        bound, number = largest_bound((121, 121), 100_000)
        assert (bound, number <= 100_000) == (2, True)


class TestListing:
    @pytest.mark.parametrize("slices", SHAPES)
    def test_each_once_in_lexicographic_order(self, slices):
        assert list(interleavings(slices)) == every(slices)

    @pytest.mark.parametrize("slices", SHAPES)
    @pytest.mark.parametrize("bound", [0, 1, 2])
    def test_within_a_bound(self, slices, bound):
        wanted = [each for each in every(slices) if preemptions(each, slices) <= bound]
        assert list(interleavings(slices, bound)) == wanted

    def test_made_one_by_one(self):
        # There are 10^69 of them, of 242 decisions each.
        first = list(itertools.islice(interleavings((121, 121)), 3))
        assert first[0] == (0,) * 121 + (1,) * 121
        assert len(set(first)) == 3


class TestWhoMayRun:
    @given(st.data())
    def test_as_the_scheduler_says(self, data):
        slices = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
        completed = [0] * len(slices)
        step = Step([Microbatch(i, lambda: None, None) for i in range(len(slices))], "any", False)
        while (runnable := may_run(completed, slices)) and data.draw(st.integers(0, 9)):
            assert runnable == step.runnable() == could_run(completed, tuple(slices))
            index = data.draw(st.sampled_from(runnable))
            completed[index] += 1
            step.microbatches[index].slice_number += 1
            step.microbatches[index].done = completed[index] == slices[index]
        assert may_run(completed, slices) == step.runnable()


def go_through(slices: tuple[int, ...], bound: int | None = None) -> list[tuple[tuple[int, ...], tuple[int, int]]]:
    """The schedules in the order of `SmallestFirst`, on a scheduler of a few lines."""
    order, out = SmallestFirst(bound), []
    while (start := order.next()) is not None:
        completed, decisions, runnable = [0] * len(slices), [], []
        while could := may_run(completed, slices):
            position = len(decisions)
            last = decisions[-1] if decisions else -1
            decisions.append(start.decisions[position] if position < start.length else default_choice(last, could))
            runnable.append(could)
            completed[decisions[-1]] += 1
        order.ran(start, tuple(decisions), ("",) * len(decisions), runnable[start.length :])
        assert size_of(decisions, runnable) == (start.preemptions, start.length, tuple(decisions))
        out.append((tuple(decisions), (start.preemptions, start.length)))
    return out


class TestSmallestFirst:
    @pytest.mark.parametrize("slices", SHAPES)
    def test_every_schedule_once(self, slices):
        assert sorted(decisions for decisions, _ in go_through(slices)) == every(slices)

    @pytest.mark.parametrize("slices", SHAPES)
    def test_in_the_order_of_their_size(self, slices):
        ran = go_through(slices)
        sizes = [(*size, decisions) for decisions, size in ran]
        assert sizes == sorted(sizes)
        assert [size[0] for size in sizes] == [preemptions(decisions, slices) for decisions, _ in ran]

    @pytest.mark.parametrize("slices", SHAPES)
    @pytest.mark.parametrize("bound", [0, 1, 2])
    def test_within_a_bound(self, slices, bound):
        wanted = [each for each in every(slices) if preemptions(each, slices) <= bound]
        assert sorted(decisions for decisions, _ in go_through(slices, bound)) == wanted
