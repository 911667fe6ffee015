"""Clocks that run at different speeds: shifts that change over time.

Two quartzes differ by up to a hundred microseconds a second, so over minutes no constant shift satisfies collectives
that bound it to some microseconds. What is looked for then is a straight line for each rank. Where one line does not
fit, because the speeds themselves change (temperature, a time daemon that corrects), the time is halved, and halved
again, until one fits in each part; where two lines meet a few collectives may be left that fit neither, and the clock
goes straight from one line to the other.

For one rank beside the reference collective k bounds the shift at its time t[k] from both sides,
low[k] <= a + b t[k] <= high[k]. With the slope b fixed, the room for a is min(high - b t) - max(low - b t): a least one
of lines minus a largest one, so it is concave in b, and its maximum is found by trisection. The slopes are taken out of
all times, and the rest is the problem without drift, of all ranks together.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from .bounds import ROUNDING, Bounds, Collective, bounds_of

__all__ = ["LEAST_IN_A_WINDOW", "MOST_DRIFT", "RankClock", "drifting_clocks"]

# Fewer collectives than this satisfy almost any line.
LEAST_IN_A_WINDOW = 4
# The share of collectives that may fit no line.
MOST_LEFT_OUT = 0.1
# No clock runs faster or slower than this against another: quartz is good to 1e-4, and NTP corrects by 5e-4 at most
# (RFC 5905). A larger change is no drift.
MOST_DRIFT = 1e-3
_TRISECTIONS = 60


@dataclass(frozen=True)
class RankClock:
    """What to add to the times of one rank.

    Attributes:
        knots: (time on its own clock, microseconds to add), ascending; between two of them and beyond it goes straight.
            One knot is a constant.
        within: microseconds by which it may be wrong, to either side (where it drifts: at a collective; between two it
            may change its speed); 0 on one host's clock; None where nothing bounds it.
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


def drifting_clocks(collectives: Sequence[Collective], reference: int) -> dict[int, RankClock] | None:
    """A clock for each rank that collectives bind to the reference; None where no clocks that can exist fit them.

    Args:
        collectives: in order of time, at least two.
        reference: the rank whose clock stays as it is.
    """
    lines: list[_Line] = []
    left_out = _fit(collectives, reference, 0, len(collectives), lines)
    if not lines or left_out > MOST_LEFT_OUT * len(collectives):
        return None
    clocks = _knotted(lines, reference)
    if not all(_possible(clock) for clock in clocks.values()):
        return None
    return _widened(clocks, collectives, lines)


@dataclass(frozen=True)
class _Line:
    """The collectives from begin to end, whose times fit a line for each rank.

    Attributes:
        slopes: rank -> the slope.
        middles: rank -> the shift at its time 0, and half the room for it; without those that nothing bounds.
        times: rank -> its times from entering the first of them to leaving the last.
    """

    begin: int
    end: int
    slopes: dict[int, float]
    middles: dict[int, tuple[float, float]]
    times: dict[int, tuple[float, float]]


def _fit(collectives: Sequence[Collective], reference: int, begin: int, end: int, lines: list[_Line]) -> int:
    """Find lines for the collectives from begin to end; returns how many of them fit none."""
    if end - begin < LEAST_IN_A_WINDOW:
        return end - begin
    some = collectives[begin:end]
    ranks = {rank for each in some for rank in each}
    slopes = {rank: 0.0 if rank == reference else _slope(some, reference, rank) for rank in ranks}
    straight = [
        {rank: (enter * (1 + slopes[rank]), leave * (1 + slopes[rank])) for rank, (enter, leave) in each.items()}
        for each in some
    ]
    found = bounds_of(straight)
    if isinstance(found, Bounds):
        times = {}
        for rank in ranks:
            own = [each[rank] for each in some if rank in each]
            times[rank] = (own[0][0], own[-1][1])
        middles = found.middle(reference) if reference in ranks else {}
        lines.append(_Line(begin, end, slopes, middles, times))
        return 0
    half = (begin + end) // 2
    return _fit(collectives, reference, begin, half, lines) + _fit(collectives, reference, half, end, lines)


def _slope(collectives: Sequence[Collective], reference: int, rank: int) -> float:
    """The slope that leaves the most room for the rank's shift."""
    points = [
        (mine[0], base[0] - mine[1], base[1] - mine[0])
        for each in collectives
        if (mine := each.get(rank)) is not None and (base := each.get(reference)) is not None
    ]
    if len(points) < 2:
        return 0.0

    def room(slope: float) -> float:
        return min(high - slope * at for at, _, high in points) - max(low - slope * at for at, low, _ in points)

    left, right = -MOST_DRIFT, MOST_DRIFT
    for _ in range(_TRISECTIONS):
        third = (right - left) / 3
        if room(left + third) < room(right - third):
            left += third
        else:
            right -= third
    return (left + right) / 2


def _knotted(lines: Sequence[_Line], reference: int) -> dict[int, RankClock]:
    clocks = {reference: RankClock(((0.0, 0.0),), 0.0)}
    for rank in sorted({rank for line in lines for rank in line.middles} - {reference}):
        knots: list[tuple[float, float]] = []
        within = 0.0
        for line in lines:
            if rank in line.middles:
                shift, doubt = line.middles[rank]
                knots += [(at, shift + line.slopes[rank] * at) for at in line.times[rank]]
                within = max(within, doubt)
        clocks[rank] = RankClock(tuple(knots), within)
    return clocks


def _possible(clock: RankClock) -> bool:
    """Whether a clock can run like this. What the bounds leave open may look like a change of speed and is none."""
    room = 2 * (clock.within or 0.0)
    pairs = zip(clock.knots, clock.knots[1:], strict=False)
    return all(
        left < right and abs(high - low) <= MOST_DRIFT * (right - left) + room for (left, low), (right, high) in pairs
    )


def _widened(
    clocks: dict[int, RankClock], collectives: Sequence[Collective], lines: Sequence[_Line]
) -> dict[int, RankClock] | None:
    """Each clock's doubt at least as large as what it misses any collective by.

    Between two lines a clock may have gone astray by what it can drift in that time; what misses a collective by more
    is no drift, and then there are no clocks.
    """
    missed = dict.fromkeys(clocks, 0.0)
    in_lines = {number for line in lines for number in range(line.begin, line.end)}
    for number, each in enumerate(collectives):
        placed = {rank: _placed(clocks[rank], span) for rank, span in each.items() if rank in clocks}
        last = max((enter for enter, _ in placed.values()), default=0.0)
        for rank, (_, leave) in placed.items():
            missed[rank] = max(missed[rank], last - leave)
            if number not in in_lines and last - leave > MOST_DRIFT * _gap(lines, number, rank):
                return None
    return {
        rank: RankClock(clock.knots, max(clock.within or 0.0, missed[rank] - ROUNDING))
        for rank, clock in clocks.items()
    }


def _placed(clock: RankClock, span: tuple[float, float]) -> tuple[float, float]:
    enter, leave = span
    return enter + clock.shift(enter), leave + clock.shift(leave)


def _gap(lines: Sequence[_Line], number: int, rank: int) -> float:
    """The time on a rank's clock between the lines on both sides of a collective; none at either end of all."""
    before = [line.times[rank][1] for line in lines if line.end <= number and rank in line.times]
    behind = [line.times[rank][0] for line in lines if line.begin > number and rank in line.times]
    return behind[0] - before[-1] if before and behind else 0.0
