"""What an export is made of, before any format has its say.

The dataclasses are not frozen: freezing one doubles what making it costs, and a trace makes millions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["FIRST_TRACK", "CounterSample", "CounterTrack", "FlowEnd", "Item", "Process", "Slice", "SliceTrack"]

# Above any number of a process: a viewer takes a thread that has its process's number for its main thread.
FIRST_TRACK = 1_000_000


@dataclass(slots=True)
class Process:
    """A rank.

    Attributes:
        id: rank + 1, since 0 is the idle process to viewers.
        name: "rank 0"; "process 0" where a profile does not say the rank.
        labels: versions it ran with; the profiler and the GPUs of a profile.
    """

    id: int
    rank: int
    name: str
    labels: tuple[str, ...]


@dataclass(slots=True)
class SliceTrack:
    """A track of slices that do not overlap.

    Attributes:
        id: unique in the trace.
        process: id of its process.
        place: its order within the process, ascending from the top.
    """

    id: int
    process: int
    name: str
    place: int


@dataclass(slots=True)
class CounterTrack:
    """A track of a number over time; the attributes are those of `SliceTrack`, `unit` is what it counts."""

    id: int
    process: int
    name: str
    place: int
    unit: str


@dataclass(slots=True)
class FlowEnd:
    """One end of an arrow, on the slice that holds it.

    Attributes:
        id: the same at both ends, unique in the trace.
        name: what travelled.
        at: nanoseconds, within the slice: not before its begin, and before its end unless it has no length. A receive
            that the hub ran for its owner was complete before the owner's slice began; the arrow ends at its begin.
        category: "receive" (from the slice that sent to the one that received), "event" (from what a recorded event
            stands for to what waited for it) or "launch" (from a call of the host to what it launched).
    """

    id: int
    name: str
    at: int
    category: str = "receive"


@dataclass(slots=True)
class Slice:
    """Something that took the nanoseconds from `begin` to `end`.

    Attributes:
        track: id of its track.
        category: "step", "slice", "in flight" or "gpu"; of a profile "kernel", "copy", "set", "graph", "call" or
            "range".
        details: what the trace says about it, as JSON values.
        waited: nanoseconds, from `begin` on, for which a GPU stream waited for the other one.
        departs, arrives: the arrows that begin and end in it.
    """

    track: int
    begin: int
    end: int
    name: str
    category: str
    details: dict[str, Any]
    waited: int = 0
    departs: tuple[FlowEnd, ...] | list[FlowEnd] = ()
    arrives: tuple[FlowEnd, ...] | list[FlowEnd] = ()


@dataclass(slots=True)
class CounterSample:
    """The value from `at` (nanoseconds) to the next sample of its track."""

    track: int
    at: int
    value: int


Item = Process | SliceTrack | CounterTrack | Slice | CounterSample
