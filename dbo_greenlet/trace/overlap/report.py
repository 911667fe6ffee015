"""How much communication is hidden behind compute, and how much is exposed: the report, and the measure behind it.

Two definitions stand side by side, because each is blind where the other sees:

    kernels    communication is where a communication kernel runs (in our own traces: where the communication stream is
               in use). Blind with DeepEP's low latency, whose bytes fly while nothing runs on the GPU.
    in flight  communication is from a send being issued to its receive being complete. Blind for a wait for a late
               rank, which it counts as flight.

Hidden is communication during which compute runs, exposed the rest of it. Where several GPUs (or steps) are in a
report, each is measured on a time line of its own and times are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import intervals
from ..idle import Idle, LaunchDelay
from ..intervals import Floats, Spans

__all__ = ["Measure", "OverlapReport", "Row", "Unreliable", "View", "Work", "measure", "rows_by"]

Ints = npt.NDArray[np.signedinteger[Any]]


@dataclass(frozen=True)
class Measure:
    """Microseconds.

    Attributes:
        communication, compute: in which it was under way.
        both: in which both were: hidden communication.
        window: from the first event to the last.
        events: number of communications.
    """

    communication: float
    compute: float
    both: float
    window: float
    events: int

    @property
    def exposed(self) -> float:
        """Communication without compute."""
        return self.communication - self.both

    @property
    def hidden(self) -> float | None:
        """The share of communication that compute hides; None where there is none."""
        return self.both / self.communication if self.communication else None


@dataclass(frozen=True)
class Row:
    """One stage, layer, microbatch or rank. Microseconds.

    Attributes:
        key: its name or number.
        communication, exposed: its communication, and the part that no compute (of whatever stage or layer) hides.
        compute, hides: its compute, and how long communication (of whatever stage or layer) ran behind it.
        events: number of its communications.
    """

    key: str | int
    communication: float
    exposed: float
    compute: float
    hides: float
    events: int


@dataclass(frozen=True)
class View:
    """One definition's answer.

    Attributes:
        how: what counts as communication and as compute in it, a clause.
        measure: the whole.
        by_stage, by_layer, by_microbatch, by_rank: parts of it; empty where nothing tells them apart.
    """

    how: str
    measure: Measure
    by_stage: list[Row]
    by_layer: list[Row]
    by_microbatch: list[Row]
    by_rank: list[Row]


@dataclass(frozen=True)
class Unreliable:
    """A view that must not be trusted, and why.

    Attributes:
        view: "kernels" or "in_flight", "idle" or "launch_delay".
        why: a sentence.
        at_most: whether what the view says is hidden is known to be the most that it can be.
    """

    view: str
    why: str
    at_most: bool = False


@dataclass(frozen=True)
class OverlapReport:
    """What `dbo-greenlet overlap` prints.

    Attributes:
        path, source: the file, and what wrote it.
        gpus: names of the GPUs.
        kernels, in_flight: the two views; None where there is nothing to measure by.
        idle: time without compute, by cause.
        launch_delay: from the call to the kernel.
        libraries: number of communication kernels by library.
        unreliable: what must not be trusted.
        notes: what else to know, as sentences.
    """

    path: str
    source: str
    gpus: list[str]
    kernels: View | None
    in_flight: View | None
    idle: Idle | None = None
    launch_delay: LaunchDelay | None = None
    libraries: dict[str, int] = field(default_factory=dict)
    unreliable: list[Unreliable] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Work:
    """Intervals with what they belong to; columns of one length. Time lines must not overlap (`apart`).

    Attributes:
        begin, end: microseconds.
        stage: index into the names of stages that go with it; 0 where nothing tells.
        layer, microbatch: -1 where nothing tells.
        rank: the rank.
    """

    begin: Floats
    end: Floats
    stage: Ints
    layer: Ints
    microbatch: Ints
    rank: Ints

    def __len__(self) -> int:
        return len(self.begin)

    def select(self, which: npt.NDArray[Any]) -> Work:
        """The rows of a mask or an index."""
        return Work(
            self.begin[which], self.end[which], self.stage[which], self.layer[which], self.microbatch[which],
            self.rank[which],
        )  # fmt: skip

    def shifted(self, by: Floats) -> Work:
        """Each row later by this much."""
        return replace(self, begin=self.begin + by, end=self.end + by)

    @property
    def spans(self) -> Spans:
        """What the intervals cover together."""
        return intervals.union(self.begin, self.end)


def apart(group: Ints, begin: Floats, end: Floats) -> tuple[Floats, Spans]:
    """How far to move each interval so that groups follow one another on one time line, and the window of each group.

    Measuring several time lines as one costs nothing extra, and sums over them come by themselves.

    Args:
        group: number of the time line of each interval, 0 to k - 1, shape [n].
    """
    count = int(group.max()) + 1 if len(group) else 0
    low, high = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(low, group, begin)
    np.maximum.at(high, group, end)
    lengths = high - low
    # A microsecond between them: windows that touch would become one.
    starts = np.concatenate(([0.0], np.cumsum(lengths + 1.0)[:-1])) if count else np.zeros(0)
    return (starts - low)[group], intervals.union(starts, starts + lengths)


def measure(communication: Spans, compute: Spans, window: Spans, events: int) -> Measure:
    """The whole of it, from unions."""
    return Measure(
        communication=intervals.length(communication),
        compute=intervals.length(compute),
        both=intervals.cover(compute)(communication),
        window=intervals.length(window),
        events=events,
    )


def rows_by(
    column: str, communication: Work, compute: Work, *, names: Sequence[str] | None = None, unnamed: str = ""
) -> list[Row]:
    """One row per value of a column.

    Args:
        column: "stage", "layer", "microbatch" or "rank".
        names: what the values index; None takes the values themselves, and leaves out -1.
        unnamed: the key for the name "".
    """
    of_communication: Ints = getattr(communication, column)
    of_compute: Ints = getattr(compute, column)
    in_communication, in_compute = intervals.cover(communication.spans), intervals.cover(compute.spans)
    rows = []
    sending, computing = _by_value(of_communication), _by_value(of_compute)
    none = np.zeros(0, dtype=np.int64)
    for value in sorted(sending.keys() | computing.keys()):
        if names is None and value < 0:
            continue
        mine, own = sending.get(value, none), computing.get(value, none)
        sent = intervals.union(communication.begin[mine], communication.end[mine])
        computed = intervals.union(compute.begin[own], compute.end[own])
        took = intervals.length(sent)
        rows.append(
            Row(
                key=int(value) if names is None else names[value] or unnamed,
                communication=took,
                exposed=took - in_compute(sent),
                compute=intervals.length(computed),
                hides=in_communication(computed),
                events=len(mine),
            )
        )
    return rows


def _by_value(column: Ints) -> dict[int, npt.NDArray[np.int64]]:
    """Value -> the rows that have it, in order."""
    order = np.argsort(column, kind="stable")
    values, starts = np.unique(column[order], return_index=True)
    return dict(zip(values.tolist(), np.split(order, starts[1:]), strict=True)) if len(values) else {}
