"""Flights on the path that another rank was late for: how much of them had passed before the last rank sent.

A receive is complete when every rank's part has arrived, so a rank that sends late looks like a slow wire to the
others. Beside the other ranks' sends, on one axis, the two can be told apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..clocks.offsets import CommonAxis
from ..notation import parse_site
from ..reader import StepTrace
from .names import StepNames
from .report import StepPath

__all__ = ["LateRanks", "StepFlights", "late_ranks", "step_flights"]


class StepFlights(NamedTuple):
    """What one rank sent in a step, and which flights are on its path.

    Attributes:
        run, step, rank: the step.
        sends: by what was sent ("D3 of microbatch 0"): microseconds at which it had left.
        flights: (what, begin, end) on the path.
    """

    run: str
    step: int
    rank: int
    sends: dict[str, float]
    flights: list[tuple[str, float, float]]


class LateRanks(NamedTuple):
    """Microseconds of flights on the paths, those alone for which other ranks' sends are known; `late` of them had
    passed before the last rank had sent."""

    flights: float
    late: float


def step_flights(step: StepTrace, path: StepPath) -> StepFlights:
    """The sends of a step and the flights on its path (`path` with its pieces)."""
    names = StepNames(step.sites)
    ends = {(each.ubatch, each.slice): each.end for each in step.gpu if each.stream == "compute"}
    sends: dict[str, float] = {}
    for window in step.receives:
        number = window.sent_decision
        if not step.gpu:
            sends[names.flight(window.site, window.ubatch)] = window.sent
        elif number is not None and number < len(step.slices):
            sender = step.slices[number]
            if (end := ends.get((sender.ubatch, sender.slice))) is not None:
                sends[names.flight(window.site, window.ubatch)] = end
    if not step.receives:
        # A replay, whose sites say what was sent.
        for each in step.gpu:
            if each.stream == "compute" and parse_site(each.site) is not None:
                sends[names.flight(each.site, each.ubatch)] = each.end
    flights = [(piece.what, piece.begin, piece.end) for piece in path.pieces if piece.kind == "receive"]
    return StepFlights(step.run, step.step, step.rank, sends, flights)


def late_ranks(steps: Iterable[StepFlights], axis: CommonAxis) -> LateRanks:
    """The flights of all steps together."""
    of_step: dict[tuple[str, int], list[StepFlights]] = {}
    for each in steps:
        of_step.setdefault((each.run, each.step), []).append(each)
    flights = late = 0.0
    for together in of_step.values():
        for mine in together:
            others = [each for each in together if each.rank != mine.rank]
            for what, begin, end in mine.flights:
                sent = [axis.place(each.rank, each.sends[what]) for each in others if what in each.sends]
                if sent:
                    flights += end - begin
                    late += min(max(max(sent) - axis.place(mine.rank, begin), 0.0), end - begin)
    return LateRanks(flights, late)
