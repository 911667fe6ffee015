"""How fast a split step can be: two lower bounds, and the time of the given order on machines without overheads.

Two microbatches that take `attend`, `experts` and `unpack` seconds a layer, and four transfers a layer of `transfer`
seconds on one wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Stages:
    """Seconds of one layer of one microbatch."""

    attend: float
    experts: float
    unpack: float

    @property
    def total(self) -> float:
        return self.attend + self.experts + self.unpack

    def scaled_to(self, total: float) -> Stages:
        factor = total / self.total
        return Stages(self.attend * factor, self.experts * factor, self.unpack * factor)


def limit(compute: float, communication: float) -> float:
    """No step is faster than its compute, or than its communication."""
    return max(compute, communication)


def limit_with_ends(compute: float, communication: float, stages: Stages, transfer: float, microbatches: int) -> float:
    """Also true of every order: nothing can be sent before the first `attend`, and what is sent last has all experts
    before it and its own `unpack` behind it; of the compute, only the other microbatches' last `unpack` fits beside it.
    """
    drained = compute + transfer - (microbatches - 1) * stages.unpack
    filled = stages.attend + communication + stages.unpack
    return max(drained, filled, compute)


def round_robin(stages: Stages, transfer: float, layers: int, microbatches: int = 2) -> float:
    """Seconds of a step in round robin's order, where launches, events and hand-offs cost nothing.

    Two queues, each in order: compute takes stage by stage all microbatches in turn, the wire takes the transfers in
    the order in which they were enqueued. A stage waits for its own transfer, a transfer for its own stage.
    """
    compute_free = wire_free = 0.0
    arrived = [0.0] * microbatches
    for number in range(2 * layers + 1):
        for i in range(microbatches):
            begin = max(compute_free, arrived[i])
            compute_free = begin + _length(stages, number, 2 * layers)
            if number < 2 * layers:
                wire_free = max(wire_free, compute_free) + transfer
                arrived[i] = wire_free
    return max(compute_free, wire_free)


def _length(stages: Stages, number: int, last: int) -> float:
    """Between two transfers of a microbatch: experts, or the unpacking of what came and the next layer's attention."""
    if number == last:
        return stages.unpack
    if number % 2:
        return stages.experts
    return stages.attend + (stages.unpack if number else 0.0)


def where_it_loses(ratios: Sequence[float], gains: Sequence[float]) -> list[tuple[float, float]]:
    """Where the gain is under 1: intervals of the ratio, by straight lines between the measured points."""
    found: list[tuple[float, float]] = []
    points = list(zip(ratios, gains, strict=True))
    for (r0, g0), (r1, g1) in pairwise(points):
        if g0 >= 1 and g1 >= 1:
            continue
        begin, end = r0, r1
        if (g0 < 1) != (g1 < 1):
            crossing = r0 + (1 - g0) * (r1 - r0) / (g1 - g0)
            begin, end = (r0, crossing) if g0 < 1 else (crossing, r1)
        if found and found[-1][1] == begin:
            found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
    return found
