"""The chance with which probabilistic concurrency testing meets a bug, against the bound that it promises."""

from __future__ import annotations

import itertools
import math

import pytest

from dbo_greenlet import Scheduler, dbo_yield
from dbo_greenlet.policies import Pct
from dbo_greenlet.testing.explore import explore
from dbo_greenlet.testing.interleavings import interleavings
from tests.testing.exploring import (
    yields,
)


class TestPctsBound:
    """A bug that shows when d decisions come in a certain order has a chance of 1 / (N k^(d-1)) in a step of k."""

    SLICES = 5

    def schedules(self, policies) -> list[dict[tuple[int, int], int]]:
        def entry() -> None:
            for k in range(self.SLICES - 1):
                dbo_yield(f"y{k}")

        return [self.places(Scheduler(policy).run([entry, entry]).schedule.decisions) for policy in policies]

    def places(self, decisions) -> dict[tuple[int, int], int]:
        seen = [0, 0]
        out = {}
        for position, index in enumerate(decisions):
            out[index, seen[index]] = position
            seen[index] += 1
        return out

    def bugs(self, depth: int):
        """Every set of `depth` orders between slices of the two microbatches that some schedule has."""
        numbers = range(self.SLICES)
        orders = [((i, a), (1 - i, b)) for i in (0, 1) for a in numbers for b in numbers]
        possible = [self.places(each) for each in interleavings((self.SLICES, self.SLICES))]
        for bug in itertools.combinations(orders, depth):
            if any(self.shows(bug, each) for each in possible):
                yield bug

    def shows(self, bug, places) -> bool:
        return all(places[first] < places[then] for first, then in bug)

    @pytest.mark.parametrize("depth", [1, 2])
    def test_over_everything_it_can_draw(self, depth):
        length = 2 * self.SLICES
        drawn = itertools.product(range(2), range(1), *(range(length - n) for n in range(depth - 1)))
        ran = self.schedules([Pct(0, depth, length, rng=Drawn(each)) for each in drawn])
        bound = 1 / (2 * length ** (depth - 1))
        chances = {bug: sum(self.shows(bug, each) for each in ran) / len(ran) for bug in self.bugs(depth)}
        assert min(chances.values()) >= bound
        # The bound is no understatement: some bug is met no more often.
        assert min(chances.values()) == pytest.approx(bound)

    @pytest.mark.parametrize("depth", [1, 2])
    def test_with_seeds(self, depth):
        length, runs = 2 * self.SLICES, 1500
        ran = self.schedules([Pct(seed, depth, length) for seed in range(runs)])
        bound = 1 / (2 * length ** (depth - 1))
        # Four standard deviations: the seeds are fixed, and several hundred bugs are looked at.
        least = bound - 4 * math.sqrt(bound * (1 - bound) / runs)
        for bug in self.bugs(depth):
            assert sum(self.shows(bug, each) for each in ran) / runs > least, bug

    def test_a_greater_depth_reaches_what_a_smaller_one_cannot(self):
        # Depth 1 has two schedules only: in turn and round robin.
        assert explore(yields(4), how="pct", depth=1, schedules=100, report=None).distinct == 2
        assert explore(yields(4), how="pct", depth=4, schedules=100, report=None).distinct > 15


class Drawn:
    """A generator whose numbers are given."""

    def __init__(self, numbers) -> None:
        self._numbers = iter(numbers)

    def randrange(self, bound: int) -> int:
        number = next(self._numbers)
        assert number < bound
        return number
