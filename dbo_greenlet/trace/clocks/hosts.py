"""Ranks of one host have one clock: it is looked for once, with what all of them say about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .bounds import ROUNDING, Collective

__all__ = ["Hosts", "hosts_of"]


@dataclass(frozen=True)
class Hosts:
    """Clocks, each named by the first of its ranks and read as that rank reads it.

    Attributes:
        lead: rank -> the rank that its clock is named by.
        offset: rank -> microseconds to add to its times for those of that rank.
        collectives: in order, by clock: when the last of its ranks entered and the first left.
    """

    lead: dict[int, int]
    offset: dict[int, float]
    collectives: list[Collective]


def hosts_of(collectives: Sequence[Collective], same_clock: Mapping[int, float]) -> Hosts:
    """Put ranks together that are on one clock, as far as their origins say so and no collective speaks against it.

    Args:
        collectives: in order of time.
        same_clock: rank -> a shift that is exact between any two ranks of one clock; a rank without one is alone.
    """
    ranks = sorted({rank for each in collectives for rank in each})
    lead: dict[int, int] = {}
    offset: dict[int, float] = {}
    spans: dict[int, dict[int, tuple[float, float]]] = {}
    waiting = ranks
    while waiting:
        later = []
        for rank in waiting:
            moved = same_clock.get(rank, 0.0)
            own = {
                number: (each[rank][0] + moved, each[rank][1] + moved)
                for number, each in enumerate(collectives)
                if rank in each
            }
            joined = next((host for host, theirs in spans.items() if rank in same_clock and _agree(theirs, own)), None)
            if joined is None and (rank == waiting[0] or rank not in same_clock or _met(spans, own)):
                joined = rank
            if joined is None:
                later.append(rank)  # no one placed was in a collective with it: the others first
                continue
            theirs = spans.setdefault(joined, {})
            for number, (enter, leave) in own.items():
                last, first = theirs.get(number, (enter, leave))
                theirs[number] = (max(last, enter), min(first, leave))
            lead[rank], offset[rank] = joined, moved - same_clock.get(joined, 0.0)
        waiting = later
    by_clock: list[dict[int, tuple[float, float]]] = [{} for _ in collectives]
    for host, theirs in spans.items():
        back = same_clock.get(host, 0.0)
        for number, (enter, leave) in theirs.items():
            by_clock[number][host] = (enter - back, leave - back)
    return Hosts(lead, offset, list(by_clock))


def _met(spans: Mapping[int, Mapping[int, tuple[float, float]]], own: Mapping[int, tuple[float, float]]) -> bool:
    return any(own.keys() & theirs.keys() for theirs in spans.values())


def _agree(theirs: Mapping[int, tuple[float, float]], own: Mapping[int, tuple[float, float]]) -> bool:
    """Whether they share a collective, and in each that they share nobody leaves before all have entered."""
    shared = theirs.keys() & own.keys()
    return bool(shared) and all(
        theirs[number][0] <= own[number][1] + ROUNDING and own[number][0] <= theirs[number][1] + ROUNDING
        for number in shared
    )
