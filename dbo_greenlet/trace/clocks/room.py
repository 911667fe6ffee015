"""The room that collectives leave for one clock beside others that are placed already.

In a collective that the placed ranks had all entered at E and of which the first left at L, on the axis, and that this
rank entered and left when its own clock showed `enter` and `leave`,

    E - leave <= shift(leave)        shift(enter) <= L - enter

A clock that runs straight has shift(t) = v + b (t - first). With b fixed the least v is a largest one of lines in b and
the greatest v a least one, so the room between them is concave in b: its maximum is found by trisection, and the slopes
that leave room are an interval, whose ends are found by bisection. v is largest at the least slope of that interval,
because every time is at or after `first`, and least at the greatest; at the last time it is the other way round.
Between the two times the largest shift is a largest one of lines and so convex: no straight clock that keeps all
collectives is further from a straight one than at one of the two ends.

Of the bounds only those on the convex hull ever are the tightest, some tens of thousands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf

from .bounds import ROUNDING, Collective

__all__ = ["MOST_DRIFT", "Room", "in_order", "room_of", "straight_doubts"]

# No clock runs faster or slower than this against another: quartz is good to 1e-4, and NTP corrects by 5e-4 at most
# (RFC 5905). A larger change is no drift.
MOST_DRIFT = 1e-3
_STEPS = 60

Point = tuple[float, float]
Shift = Callable[[float], float]


class Room:
    """What is left for a clock that runs straight.

    Args:
        low: (time, the least shift then), microseconds.
        high: (time, the greatest shift then).
        first: no time is before it.
        last: no time is after it.
    """

    def __init__(self, low: Iterable[Point], high: Iterable[Point], first: float, last: float) -> None:
        self.first, self.last = first, last
        self._low = [(at, -least) for at, least in _hull((at - first, -least) for at, least in low)]
        self._high = _hull((at - first, most) for at, most in high)

    def at_first(self, slope: float) -> tuple[float, float]:
        """The least and the greatest shift at `first` with this slope; where it does not fit the least is above."""
        low = max((least - slope * at for at, least in self._low), default=-inf)
        return low, min((most - slope * at for at, most in self._high), default=inf)

    def _width(self, slope: float) -> float:
        low, high = self.at_first(slope)
        return high - low

    def slope(self) -> float:
        """The slope that leaves the most room."""
        if len(self._low) + len(self._high) < 3:
            return 0.0  # one collective: any does
        left, right = -MOST_DRIFT, MOST_DRIFT
        for _ in range(_STEPS):
            third = (right - left) / 3
            if self._width(left + third) < self._width(right - third):
                left += third
            else:
                right -= third
        return (left + right) / 2

    def slopes(self, inside: float) -> tuple[float, float] | None:
        """The least and the greatest slope that leave room; None: none does.

        Args:
            inside: one that leaves room, if any does.
        """
        if self._width(inside) < -ROUNDING:
            return None
        return self._edge(inside, -MOST_DRIFT), self._edge(inside, MOST_DRIFT)

    def _edge(self, inside: float, outside: float) -> float:
        if self._width(outside) >= -ROUNDING:
            return outside
        for _ in range(_STEPS):
            half = (inside + outside) / 2
            if self._width(half) >= -ROUNDING:
                inside = half
            else:
                outside = half
        return outside

    def doubt(self, shift: Shift) -> float | None:
        """By how much this straight clock can differ from any that fits; None where none fits."""
        slopes = self.slopes(self.slope())
        if slopes is None:
            return None
        (least, _), (_, most) = self.at_first(slopes[1]), self.at_first(slopes[0])
        span, begun, ended = self.last - self.first, shift(self.first), shift(self.last)
        (low, _), (_, high) = self.at_first(slopes[0]), self.at_first(slopes[1])
        low, high = low + slopes[0] * span, high + slopes[1] * span
        return max(begun - least, most - begun, ended - low, high - ended, 0.0)


def _hull(points: Iterable[Point]) -> list[Point]:
    """The lower convex hull (Andrew 1979), by time."""
    out: list[Point] = []
    for at, value in sorted(points):
        while len(out) > 1 and (out[-1][1] - out[-2][1]) * (at - out[-2][0]) >= (value - out[-2][1]) * (
            out[-1][0] - out[-2][0]
        ):
            out.pop()
        if not out or out[-1][0] < at:
            out.append((at, value))
    return out


def in_order(collectives: Sequence[Collective], reference: int) -> list[int]:
    """The clocks bound to the reference, each behind one that it shares a collective with; the reference is not one."""
    shared: dict[int, dict[int, int]] = {}
    for each in collectives:
        for rank in each:
            counts = shared.setdefault(rank, {})
            for other in each:
                counts[other] = counts.get(other, 0) + 1
    out = [reference]
    for base in out:
        counts = shared.get(base, {})
        out += sorted(counts.keys() - set(out), key=lambda rank: (-counts[rank], rank))
    return out[1:]


def room_of(
    collectives: Sequence[Collective], rank: int, shifts: Mapping[int, Shift], doubts: Mapping[int, float]
) -> Room:
    """The room for a rank beside those that have shifts, each of which may be wrong by its doubt."""
    low: list[Point] = []
    high: list[Point] = []
    for (enter, leave), entered, left in beside(collectives, rank, shifts, doubts):
        low.append((leave, entered - leave))
        high.append((enter, left - enter))
    mine = [each[rank] for each in collectives if rank in each]
    return Room(low, high, min(enter for enter, _ in mine), max(leave for _, leave in mine))


def beside(
    collectives: Sequence[Collective], rank: int, shifts: Mapping[int, Shift], doubts: Mapping[int, float]
) -> list[tuple[Point, float, float]]:
    """Of each collective shared with a placed one: the rank's span, when all of those had entered, the first had left.

    Each placed one is taken to enter as early and leave as late as its doubt allows.
    """
    out = []
    for each in collectives:
        if rank not in each:
            continue
        entered, left = -inf, inf
        for other, (enter, leave) in each.items():
            if other != rank and (shift := shifts.get(other)) is not None:
                entered = max(entered, enter + shift(enter) - doubts[other])
                left = min(left, leave + shift(leave) + doubts[other])
        if left < inf:
            out.append((each[rank], entered, left))
    return out


def straight_doubts(
    collectives: Sequence[Collective], reference: int, shifts: Mapping[int, Shift]
) -> dict[int, float] | None:
    """By how much straight clocks can be wrong at the collectives, if the true ones run straight; None: those do not.

    Args:
        collectives: in order of time.
        reference: the clock that is right.
        shifts: the others', of each that collectives bind to the reference.
    """
    doubts = {reference: 0.0}
    placed: dict[int, Shift] = {reference: lambda at: 0.0}
    for rank in in_order(collectives, reference):
        doubt = room_of(collectives, rank, placed, doubts).doubt(shifts[rank])
        if doubt is None:
            return None
        placed[rank], doubts[rank] = shifts[rank], doubt
    return doubts
