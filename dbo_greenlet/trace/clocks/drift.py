"""Clocks that run at different speeds: shifts that change over time.

Two quartzes differ by up to a hundred microseconds a second, so over minutes no constant shift satisfies collectives
that bound it to some microseconds. What is looked for then is a straight line for each clock. Where one line does not
fit, because the speeds themselves change (temperature, a time daemon that corrects), the time is halved, and halved
again, until one fits in each part; where two lines meet a few collectives may be left that fit neither, and the clock
goes straight from one line to the other.

Each line is first the one with the most room (`room`) beside those placed before it. Lines that fit one after the other
need not fit together: the slopes are taken out of all times, and the rest is the problem without drift, of all ranks
together. Where it contradicts itself, the cycle says which combination of slopes is wrong, linear in them, and they are
moved by what satisfies it (the relaxation method of Agmon 1954 and of Motzkin and Schoenberg 1954, which ends up inside
if there is an inside). Where that comes to no end the lines stay as they were first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .bounds import ROUNDING, Bounds, Collective, bounds_of
from .rank_clock import RankClock
from .room import MOST_DRIFT, Shift, in_order, room_of, straight_doubts

__all__ = ["LEAST_IN_A_WINDOW", "drifting_clocks"]

# Fewer collectives than this, cut out of more, satisfy almost any line.
LEAST_IN_A_WINDOW = 4
# The share of collectives that may fit no line.
MOST_LEFT_OUT = 0.1
_ROUNDS = 40
# Beyond the half-space and not only onto its edge: so an inside is reached in finitely many rounds.
_BEYOND = 1.5


def drifting_clocks(collectives: Sequence[Collective], reference: int) -> dict[int, RankClock] | None:
    """A clock for each rank that collectives bind to the reference; None where no few lines fit them.

    Args:
        collectives: in order of time, of ranks that do not share a clock.
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
        straight: rank -> its line.
        doubts: rank -> by how much that may be wrong.
        times: rank -> its times from entering the first of them to leaving the last.
    """

    begin: int
    end: int
    straight: dict[int, _Straight]
    doubts: dict[int, float]
    times: dict[int, tuple[float, float]]


@dataclass(frozen=True)
class _Straight:
    at_zero: float
    slope: float

    def __call__(self, at: float) -> float:
        return self.at_zero + self.slope * at


def _fit(collectives: Sequence[Collective], reference: int, begin: int, end: int, lines: list[_Line]) -> int:
    """Find lines for the collectives from begin to end; returns how many of them fit none."""
    count = end - begin
    if count < LEAST_IN_A_WINDOW and count < len(collectives):
        return count
    some = collectives[begin:end]
    if (straight := _straight(some, reference)) is not None:
        doubts = straight_doubts(some, reference, straight)
        if doubts is not None:
            times = {}
            for rank in straight:
                own = [each[rank] for each in some if rank in each]
                times[rank] = (own[0][0], max(leave for _, leave in own))
            lines.append(_Line(begin, end, straight, doubts, times))
            return 0
    if count < 2:
        return count
    half = (begin + end) // 2
    return _fit(collectives, reference, begin, half, lines) + _fit(collectives, reference, half, end, lines)


def _straight(collectives: Sequence[Collective], reference: int) -> dict[int, _Straight] | None:
    """A line for each rank bound to the reference; None where one has none."""
    if not any(reference in each for each in collectives):
        return {}
    shifts: dict[int, Shift] = {reference: lambda at: 0.0}
    doubts = {reference: 0.0}
    out = {reference: _Straight(0.0, 0.0)}
    for rank in in_order(collectives, reference):
        room = room_of(collectives, rank, shifts, doubts)
        slope = room.slope()
        low, high = room.at_first(slope)
        line = out[rank] = _Straight((low + high) / 2 - slope * room.first, slope)
        doubt = room.doubt(line)
        if doubt is None:
            return None
        shifts[rank], doubts[rank] = line, doubt
    together = _together(collectives, reference, {rank: line.slope for rank, line in out.items()})
    return out if together is None else together


def _together(
    collectives: Sequence[Collective], reference: int, slopes: dict[int, float]
) -> dict[int, _Straight] | None:
    """Lines for which nobody leaves before all have entered, from slopes near theirs; None where none were found."""
    bound = [{rank: span for rank, span in each.items() if rank in slopes} for each in collectives]
    for _ in range(_ROUNDS):
        rates = {rank: 1 + slope for rank, slope in slopes.items()}
        found = bounds_of(
            [
                {rank: (enter * rates[rank], leave * rates[rank]) for rank, (enter, leave) in each.items()}
                for each in bound
            ]
        )
        if isinstance(found, Bounds):
            middles = found.middle(reference)
            return {rank: _Straight(middles[rank][0], slope) for rank, slope in slopes.items()}
        change = dict.fromkeys(slopes, 0.0)
        cycle = zip(found.ranks, (*found.ranks[1:], found.ranks[0]), found.collectives, strict=True)
        for rank, other, number in cycle:
            change[rank] += bound[number][rank][1]
            change[other] -= bound[number][other][0]
        change[reference] = 0.0
        size = sum(each * each for each in change.values())
        if not size:
            return None
        step = _BEYOND * (found.apart + ROUNDING) / size
        slopes = {
            rank: min(max(slope + step * change[rank], -MOST_DRIFT), MOST_DRIFT) for rank, slope in slopes.items()
        }
    return None


def _knotted(lines: Sequence[_Line], reference: int) -> dict[int, RankClock]:
    clocks = {reference: RankClock(((0.0, 0.0),), 0.0)}
    for rank in sorted({rank for line in lines for rank in line.straight} - {reference}):
        knots: list[tuple[float, float]] = []
        within = 0.0
        for line in lines:
            if rank in line.straight:
                knots += [(at, line.straight[rank](at)) for at in line.times[rank]]
                within = max(within, line.doubts[rank])
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

    Between two lines a clock may have gone astray by what it can drift in that time, and within its line by its doubt
    and that of the others; what misses a collective by more is no drift, and then there are no clocks.
    """
    missed = dict.fromkeys(clocks, 0.0)
    in_lines = {number for line in lines for number in range(line.begin, line.end)}
    for number, each in enumerate(collectives):
        placed = {rank: _placed(clocks[rank], span) for rank, span in each.items() if rank in clocks}
        if not placed:
            continue
        late = max(placed, key=lambda rank: placed[rank][0])
        last = placed[late][0]
        for rank, (_, leave) in placed.items():
            missed[rank] = max(missed[rank], last - leave)
            doubt = (clocks[rank].within or 0.0) + (clocks[late].within or 0.0) + ROUNDING
            if number not in in_lines:
                doubt += MOST_DRIFT * (_gap(lines, number, rank) + _gap(lines, number, late))
            if last - leave > doubt:
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
