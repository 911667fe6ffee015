"""How long ranks wait for each other: from entering a collective to the last rank's entering it, on one axis.

A communication kernel that waits for a late rank looks like a slow transfer in its own profile. Only beside the other
ranks' profiles the two can be told apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .bounds import Collective
from .offsets import CommonAxis

__all__ = ["Arrival", "arrivals", "arrivals_json", "render_arrivals"]


@dataclass(frozen=True)
class Arrival:
    """How one rank comes to its collectives.

    Attributes:
        rank: the rank, or the number of its file.
        collectives: how many it took part in.
        inside: microseconds a collective takes it on average, from entering to leaving.
        waits: microseconds of these before the last rank has entered.
        last: in how many it was that last one.
    """

    rank: int
    collectives: int
    inside: float
    waits: float
    last: int


def arrivals(axis: CommonAxis, collectives: Sequence[Collective]) -> list[Arrival]:
    """One entry for each rank that took part in any, ascending. Means nothing where the axis has a `problem`."""
    counts: dict[int, list[float]] = {rank: [0, 0.0, 0.0, 0] for rank in axis.clocks}
    for each in collectives:
        entered = {rank: axis.place(rank, enter) for rank, (enter, _) in each.items()}
        latest = max(entered, key=lambda rank: entered[rank])
        for rank, (enter, leave) in each.items():
            count = counts[rank]
            count[0] += 1
            count[1] += leave - enter
            # The clocks fit within their doubt only: nobody waits longer than it is inside.
            count[2] += min(entered[latest] - entered[rank], leave - enter)
            count[3] += rank == latest
    return [
        Arrival(rank, int(number), inside / number, waits / number, int(last))
        for rank, (number, inside, waits, last) in sorted(counts.items())
        if number
    ]


def render_arrivals(axis: CommonAxis, collectives: Sequence[Collective]) -> str:
    """The axis and who waits on it, for a terminal."""
    lines = axis.text().split("\n")
    found = [] if axis.problem is not None else arrivals(axis, collectives)
    if found:
        lines.append("a collective on average, in us, and in how many a rank was the last to come:")
        rows = [["", "inside", "waiting", "last"]]
        rows += [
            [axis.name(each.rank), f"{each.inside:.3f}", f"{each.waits:.3f}", f"{each.last} of {each.collectives}"]
            for each in found
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        for row in rows:
            cells = [row[0].ljust(widths[0])]
            cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
            lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def arrivals_json(axis: CommonAxis, collectives: Sequence[Collective]) -> dict[str, Any]:
    """The same as JSON values, microseconds."""
    found = [] if axis.problem is not None else arrivals(axis, collectives)
    return axis.as_json() | {"arrivals": [{"name": axis.name(each.rank)} | dataclasses.asdict(each) for each in found]}
