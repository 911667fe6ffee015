"""What to add to the times of one rank."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import inf

__all__ = ["RankClock"]


@dataclass(frozen=True)
class RankClock:
    """What to add to the times of one rank.

    Attributes:
        knots: (time on its own clock, microseconds to add), ascending; between two of them and beyond it goes straight.
            One knot is a constant.
        within: microseconds by which it may be wrong, to either side, at a collective that went into it: 0 on one
            host's clock, None where nothing bounds it. Promised is no more than that, and only if between its knots
            (with one: always) the true clock runs at one speed, whatever that is, and if no rank left a collective
            before all had entered. Where speeds are not told (`how` says so), it holds for any that a clock can have.
            Between two collectives of such a clock, and outside all of them, it may be further off.
    """

    knots: tuple[tuple[float, float], ...]
    within: float | None

    def shift(self, at: float) -> float:
        """Microseconds to add at this time."""
        knots = self.knots
        if len(knots) == 1:
            return knots[0][1]
        place = min(max(bisect_right(knots, (at, inf)), 1), len(knots) - 1)
        (left, low), (right, high) = knots[place - 1], knots[place]
        return low + (high - low) * (at - left) / (right - left)

    @property
    def drift(self) -> float:
        """Microseconds per second by which it falls behind the reference (negative: gains on it), on the whole."""
        (first, low), (last, high) = self.knots[0], self.knots[-1]
        return 0.0 if first == last else (high - low) / (last - first) * 1e6

    def moved(self, by: float) -> RankClock:
        """The same for a rank of this host whose times are `by` behind those that this one is for."""
        if len(self.knots) == 1:
            return RankClock(((self.knots[0][0], self.knots[0][1] + by),), self.within)
        return RankClock(tuple((at - by, shift + by) for at, shift in self.knots), self.within)
