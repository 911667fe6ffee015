"""What a stream program with times says: who ran when, and how much communication was hidden. Pure functions.

All times are microseconds. Operations without times (captured, never replayed) are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..stream_program import StreamProgram, Transfer

__all__ = ["WIRE", "Lane", "Overlap", "Window", "busy", "lanes", "overlap", "windows"]

WIRE = "wire"


class Lane(NamedTuple):
    """One piece on one timeline: `stream` is its name, or "wire" for a transfer in flight."""

    stream: str
    microbatch: int | None
    name: str
    begin: float
    end: float


class Window(NamedTuple):
    """A transfer in flight: it left at `begin`, `arrives`, and its receive was complete at `received` (None: never)."""

    transfer: Transfer
    begin: float
    arrives: float
    received: float | None


class Overlap(NamedTuple):
    """Microseconds in which something is so: `length` of all together, from the first begin to the last end.

    `compute`: the primary stream works. `comm`: a transfer is in flight or another stream works. `hidden`: both.
    """

    length: float
    compute: float
    comm: float
    hidden: float

    @property
    def exposed(self) -> float:
        """Communication in flight while nothing is computed."""
        return self.comm - self.hidden


def lanes(program: StreamProgram) -> list[Lane]:
    """Work, the working part of receives, and transfers in flight, by begin, then in the order of issue."""
    out: list[tuple[float, int, Lane]] = []
    for each in program.operations:
        begin, end = each.begin, each.end
        if begin is None or end is None:
            continue
        if each.kind == "work":
            lane = Lane(each.stream or "", each.microbatch, each.name, begin, end)
        elif each.transfer is None or each.transfer.arrives is None:
            continue
        elif each.kind == "send":
            lane = Lane(WIRE, each.microbatch, each.name, begin, each.transfer.arrives)
        else:
            works = max(begin, each.transfer.arrives)
            if works >= end:
                continue  # only the wait for what was in flight
            lane = Lane(each.stream or "", each.microbatch, each.name, works, end)
        out.append((lane.begin, each.number, lane))
    return [lane for _, _, lane in sorted(out, key=lambda it: it[:2])]


def busy(program: StreamProgram, stream: str) -> float:
    """Microseconds in which `stream` ("wire": any transfer) is at work."""
    return _length(_union((each.begin, each.end) for each in lanes(program) if each.stream == stream))


def windows(program: StreamProgram) -> list[Window]:
    """The transfers in the order of their sends; `received` is the end of the first receive."""
    received: dict[Transfer, float] = {}
    for each in program.operations:
        if each.kind == "receive" and each.transfer is not None and each.end is not None:
            received.setdefault(each.transfer, each.end)
    return [
        Window(each.transfer, each.begin, each.transfer.arrives, received.get(each.transfer))
        for each in program.operations
        if each.kind == "send" and each.transfer is not None and each.transfer.arrives is not None
        if each.begin is not None
    ]


def overlap(program: StreamProgram) -> Overlap:
    """Compute on the primary stream against communication: transfers in flight and work on every other stream."""
    pieces = lanes(program)
    if not pieces:
        return Overlap(0.0, 0.0, 0.0, 0.0)
    compute = _union((each.begin, each.end) for each in pieces if each.stream == program.primary)
    comm = _union((each.begin, each.end) for each in pieces if each.stream != program.primary)
    both = _length(compute) + _length(comm) - _length(_union([*compute, *comm]))
    length = max(each.end for each in pieces) - min(each.begin for each in pieces)
    return Overlap(length, _length(compute), _length(comm), both)


def _union(stretches: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    out: list[tuple[float, float]] = []
    for begin, end in sorted(stretches):
        if out and begin <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((begin, end))
    return out


def _length(stretches: list[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in stretches)
