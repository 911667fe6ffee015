"""Collectives as ranks with clocks of their own see them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

Span = tuple[float, float]


def collectives(
    shifts: Sequence[float],
    count: int,
    *,
    drift: Sequence[float] | None = None,
    period: float = 1_000_000.0,
    late: float = 50.0,
    seed: int = 0,
    shows: Mapping[int, Callable[[float], float]] | None = None,
) -> list[Mapping[int, Span]]:
    """`count` of them; rank r's clock shows (t - shifts[r]) / (1 + drift[r]) at the true time t. Microseconds.

    Args:
        shows: rank -> what its clock shows at a true time, where it is nothing as simple.
        period: from one to the next.
        late: how much later than the first a rank comes, on average.
    """
    rng = random.Random(seed)
    rates = [0.0] * len(shifts) if drift is None else drift
    out = []
    for number in range(count):
        entered = [number * period + rng.expovariate(1 / late) for _ in shifts]
        left = [max(entered) + rng.expovariate(1 / 5) for _ in shifts]
        spans = {}
        for rank, shift in enumerate(shifts):
            show = (shows or {}).get(rank, lambda true, shift=shift, rate=rates[rank]: (true - shift) / (1 + rate))
            spans[rank] = (round(show(entered[rank]), 3), round(show(left[rank]), 3))
        out.append(spans)
    return out
