"""Clocks of which nothing is believed but that they run about as fast as clocks do.

Where the speeds change faster than collectives come, no lines can be found. Still each collective bounds the shift of a
clock, and from one to the next it changes by MOST_DRIFT of the time between them at most. So the bounds of a
collective, widened by that, hold at the next, and at the one before. What is left of them, forwards and backwards, are
the tightest bounds that follow for each; where nothing is left no clock can have run like this, and the traces are not
of one run.
"""

from __future__ import annotations

from collections.abc import Sequence

from .bounds import ROUNDING, Collective
from .rank_clock import RankClock
from .room import MOST_DRIFT, Shift, beside, in_order

__all__ = ["wandering_clocks"]


def wandering_clocks(collectives: Sequence[Collective], reference: int) -> dict[int, RankClock] | None:
    """A clock for each rank that collectives bind to the reference; None where no clocks that can exist fit them.

    Args:
        collectives: in order of time, of ranks that do not share a clock.
        reference: the rank whose clock stays as it is.
    """
    clocks = {reference: RankClock(((0.0, 0.0),), 0.0)}
    for rank in in_order(collectives, reference):
        shifts: dict[int, Shift] = {each: clock.shift for each, clock in clocks.items()}
        doubts = {each: clock.within or 0.0 for each, clock in clocks.items()}
        clock = _clock(beside(collectives, rank, shifts, doubts))
        if clock is None:
            return None
        clocks[rank] = clock
    return clocks


def _clock(seen: Sequence[tuple[tuple[float, float], float, float]]) -> RankClock | None:
    bounds: dict[float, tuple[float, float]] = {}
    for (enter, leave), entered, left in seen:
        # Both at one time: while it was inside the clock may have drifted.
        low, high = entered - leave - MOST_DRIFT * (leave - enter), left - enter
        least, most = bounds.get(enter, (low, high))
        bounds[enter] = (max(low, least), min(high, most))
    times = sorted(bounds)
    lows, highs = [bounds[at][0] for at in times], [bounds[at][1] for at in times]
    ways = (range(1, len(times)), -1), (range(len(times) - 2, -1, -1), 1)
    for way, step in ways:
        for place in way:
            drift = MOST_DRIFT * abs(times[place] - times[place + step])
            lows[place] = max(lows[place], lows[place + step] - drift)
            highs[place] = min(highs[place], highs[place + step] + drift)
    rooms = [high - low for low, high in zip(lows, highs, strict=True)]
    if min(rooms) < -ROUNDING:
        return None
    knots = tuple((at, (low + high) / 2) for at, low, high in zip(times, lows, highs, strict=True))
    return RankClock(knots, max(rooms) / 2 if max(rooms) > 0 else 0.0)
