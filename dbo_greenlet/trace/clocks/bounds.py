"""Bounds on the differences of clocks, from collectives: no rank leaves one before every rank has entered it.

What is looked for is a shift for each rank: microseconds to add to what its clock shows, so that all show one time. In
a collective that rank r left when its clock showed `leave[r]` and rank s entered at `enter[s]`,

    shift[s] - shift[r] <= leave[r] - enter[s]

for each pair. The smallest right side over all collectives is an upper bound of the difference, and the same with r and
s exchanged a lower one. These are difference constraints: the shortest path from r to s through other ranks is the
tightest bound that follows from all of them, and they contradict each other exactly where some cycle is shorter than
zero (Cormen, Leiserson, Rivest, Stein, Introduction to Algorithms, chapter on single-source shortest paths). All pairs
at once is Floyd's algorithm, ranks cubed.

Relative to a reference rank the middle of the bounds is taken. All middles together keep every constraint: with d the
shortest paths, shift[s] - shift[r] = (d[0,s] - d[s,0] - d[0,r] + d[r,0]) / 2, and both d[0,s] - d[0,r] and
d[r,0] - d[s,0] are at most d[r,s] by the triangle inequality.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

__all__ = ["Bounds", "Collective", "Contradiction", "bounds_of"]

# rank -> when it entered and when it left, microseconds on its own clock.
Collective = Mapping[int, tuple[float, float]]

# Microseconds: times have three decimals, and each side of a comparison is rounded.
ROUNDING = 0.002


@dataclass(frozen=True)
class Contradiction:
    """Ranks whose clocks no shifts can reconcile: two, or where each two can be reconciled, more.

    Attributes:
        ranks: in the order in which each bounds the next, the last one the first.
        apart: by how many microseconds the bounds miss each other.
        collectives: the collectives (places in the sequence) that give the bounds.
    """

    ranks: tuple[int, ...]
    apart: float
    collectives: tuple[int, ...]


@dataclass(frozen=True)
class Bounds:
    """What the collectives allow.

    Attributes:
        ranks: ascending.
        most: [r][s], by places in `ranks`: the most that shift[s] - shift[r] can be, microseconds; inf: nothing says.
    """

    ranks: tuple[int, ...]
    most: list[list[float]]

    def middle(self, reference: int) -> dict[int, tuple[float, float]]:
        """rank -> its shift relative to the reference and half the room left for it; ranks without bounds left out."""
        first = self.ranks.index(reference)
        out = {}
        for place, rank in enumerate(self.ranks):
            high, low = self.most[first][place], -self.most[place][first]
            if high < inf and low > -inf:
                out[rank] = ((high + low) / 2, max(high - low, 0.0) / 2)
        return out

    def allow(self, shifts: Mapping[int, float]) -> bool:
        """Whether these shifts keep every bound between ranks that have one."""
        return all(
            shifts[other] - shifts[rank] <= self.most[r][s] + ROUNDING
            for r, rank in enumerate(self.ranks)
            for s, other in enumerate(self.ranks)
        )


def bounds_of(collectives: Sequence[Collective]) -> Bounds | Contradiction:
    """The tightest bounds that the collectives give, to clocks that run alike.

    Args:
        collectives: in order of time; a rank may be missing in any.
    """
    ranks = tuple(sorted({rank for each in collectives for rank in each}))
    place = {rank: number for number, rank in enumerate(ranks)}
    most = [[0.0 if r == s else inf for s in ranks] for r in ranks]
    by = [[-1] * len(ranks) for _ in ranks]
    for number, each in enumerate(collectives):
        entered = [(place[rank], enter) for rank, (enter, _) in each.items()]
        for rank, (_, leave) in each.items():
            row, origin = most[place[rank]], by[place[rank]]
            for other, enter in entered:
                if leave - enter < row[other]:
                    row[other], origin[other] = leave - enter, number
    return _shortest(ranks, most, by)


def _shortest(ranks: tuple[int, ...], direct: list[list[float]], by: list[list[int]]) -> Bounds | Contradiction:
    most = [row[:] for row in direct]
    count = len(ranks)
    for k in range(count):
        through = most[k]
        for row in most:
            if (first := row[k]) < inf:
                row[:] = [min(old, first + rest) for old, rest in zip(row, through, strict=True)]
    # What rounding adds up to along a path of all ranks is no contradiction.
    worst = min(range(count), key=lambda r: most[r][r], default=0)
    if count and most[worst][worst] < -ROUNDING * count:
        return _contradiction(ranks, direct, by)
    for r in range(count):
        most[r][r] = 0.0
    return Bounds(ranks, most)


def _contradiction(ranks: tuple[int, ...], direct: list[list[float]], by: list[list[int]]) -> Contradiction:
    """The two ranks that contradict each other most, or a cycle of ranks that does."""
    pairs = [(direct[r][s] + direct[s][r], (r, s)) for r in range(len(ranks)) for s in range(r + 1, len(ranks))]
    apart, pair = min(pairs)
    cycle: tuple[int, ...] = pair
    if apart >= 0:
        cycle = _negative_cycle(direct)
        apart = sum(direct[r][s] for r, s in _edges(cycle))
    return Contradiction(tuple(ranks[r] for r in cycle), -apart, tuple(by[r][s] for r, s in _edges(cycle)))


def _edges(cycle: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(zip(cycle, (*cycle[1:], cycle[0]), strict=True))


def _negative_cycle(direct: list[list[float]]) -> tuple[int, ...]:
    """Bellman and Ford's algorithm: what still gets shorter in round n hangs on a cycle."""
    count = len(direct)
    length, before = [0.0] * count, list(range(count))
    last = 0
    for _ in range(count):
        for r in range(count):
            for s in range(count):
                if length[r] + direct[r][s] < length[s] - 1e-9:
                    length[s], before[s], last = length[r] + direct[r][s], r, s
    for _ in range(count):
        last = before[last]  # onto the cycle, wherever it hung
    cycle = [last]
    while (previous := before[cycle[-1]]) != last:
        cycle.append(previous)
    return tuple(reversed(cycle))
