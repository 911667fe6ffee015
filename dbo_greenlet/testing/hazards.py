"""What is wrong with a stream program, whatever the times are: hazards, each with the two accesses and what is missing.

    kind                  found where
    race                  two operations touch the same bytes, one writes, and nothing orders them; or a transfer is in
                          flight into (or out of) what somebody else touches
    receive-before-use    what a transfer brings is read before its receive
    hook-twice            a transfer is received twice
    hook-never            a transfer is never received
    workspace-reused      microbatch i wrote, j wrote over it, and i reads it as its own
    event-after-switch    an event that i waits for was recorded only after a switch, behind a sibling's work
    unjoined-stream       at the end the primary stream waits for what another stream holds at no point

One program stands for all timings, so what is not found in it cannot happen with these operations in this order of
issue; another schedule is another program. `explore` makes those.

Two things are left to whoever names the accesses. A scattered write (`Access.partial`) replaces nothing for certain, so
reading a KV cache that a sibling wrote into as well is no reuse. And a microbatch that reads what only earlier ones
wrote depends on law 6, which every policy keeps: that is no hazard either. Nor is a counter that all microbatches add
to: where two operations both read and write the same bytes, the second loses nothing of the first.

    check(run.program)              # raises HazardError with all of them
    for hazard in find_hazards(run.program): print(hazard)
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from ..stream_program import Operation, StreamProgram
from .errors import HazardError
from .hazard_scan import looks_clean
from .hazard_search import search
from .hazard_uses import Found

__all__ = ["KINDS", "Hazard", "check", "find_hazards"]

KINDS = (
    "race",
    "receive-before-use",
    "hook-twice",
    "hook-never",
    "workspace-reused",
    "event-after-switch",
    "unjoined-stream",
)


@dataclass(frozen=True)
class Hazard:
    """One hazard.

    Attributes:
        kind: one of `KINDS`.
        first: the operation that was issued first; of a transfer that is involved, its send.
        second: the other one; None where there is only one.
        buffer: what both touch; None where the hazard is not about a buffer.
        what: what collides, in words.
        missing: what would have to be there: an event, a receive, a buffer of its own.
    """

    kind: str
    first: Operation
    second: Operation | None
    buffer: Hashable
    what: str
    missing: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}. Missing: {self.missing}."


def find_hazards(program: StreamProgram, *, order_of_microbatches: bool = True) -> list[Hazard]:
    """The hazards of `program`, in the order in which they come about.

    Of races that one edge would mend only the one that needs it is listed, so there are as many races as edges missing.

    Args:
        program: what was enqueued, from the beginning of a step to its end: with the streams joined. An operation's
            accesses have its reads before its writes.
        order_of_microbatches: what one stream runs in order is in order. False: only within a microbatch, so that
            everything two microbatches share is listed, also what law 6 or this schedule keeps apart: for each buffer
            the first two operations of each two microbatches.
    """
    if order_of_microbatches and looks_clean(program):
        return []
    return [_hazard(found) for found in search(program, order_of_microbatches)]


def check(program: StreamProgram, *, order_of_microbatches: bool = True) -> None:
    """Raise `HazardError` if `program` has hazards; arguments as of `find_hazards`."""
    __tracebackhide__ = True  # to pytest, which would print this function above what was found
    hazards = find_hazards(program, order_of_microbatches=order_of_microbatches)
    if hazards:
        count = "1 hazard" if len(hazards) == 1 else f"{len(hazards)} hazards"
        listed = "\n".join(f"  {each}" for each in hazards)
        raise HazardError(f"{count} in a program of {len(program.operations)} operations:\n{listed}", tuple(hazards))


def _hazard(found: Found) -> Hazard:
    return Hazard(found.kind, found.first, found.second, found.buffer, found.what, found.missing)
