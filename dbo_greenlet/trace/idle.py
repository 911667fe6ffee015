"""Why a GPU did not compute, and how long launches took to arrive.

A gap is a stretch of a GPU's time line in which no compute kernel runs. The compute kernel that ends it says why it was
there: until its launch call returned, the host was late. After that, if a stream was made to wait for an event before
the launch, it was waiting for that event; otherwise for something else (the way from the call to the GPU, a copy, a
kernel of the same stream that is no compute, what holds a graph's node back). What is behind the last compute kernel is
"other", too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .intervals import Floats, Spans, cover, difference, length, union

__all__ = ["Idle", "LaunchDelay", "idle_time", "launch_delay"]

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Idle:
    """Microseconds without compute, by cause, and how much of each communication ran in.

    Attributes:
        host, event, other: by cause; see the module.
        host_exposed, event_exposed, other_exposed: the part of each in which communication ran: together the exposed
            communication.
        graph: the part of `other` before kernels that run in a graph, whose waits are the graph's own.
        unknown: without compute, before kernels whose launch the profile does not show.
        unknown_exposed: the part of it in which communication ran.
    """

    host: float
    event: float
    other: float
    unknown: float
    host_exposed: float
    event_exposed: float
    other_exposed: float
    unknown_exposed: float
    graph: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.host + self.event + self.other + self.unknown


@dataclass(frozen=True)
class LaunchDelay:
    """Microseconds from the begin of a launch call to the begin of its kernel, of kernels outside of graphs.

    Attributes:
        kernels: number of them.
        median, p95, longest: of their delays.
        early: kernels that began before their launch call did, which shows that the clocks of host and GPU differ.
    """

    kernels: int
    median: float
    p95: float
    longest: float
    early: int


def idle_time(
    window: Spans, compute: Spans, communication: Spans, begin: Floats, launched: Floats, waits: Bools, in_graph: Bools
) -> Idle:
    """The gaps in `compute`, by cause.

    Args:
        window: what counts as time at all.
        compute, communication: unions of the kernels.
        begin: of each compute kernel, ascending, shape [n].
        launched: when its launch call returned, NaN where that is not known.
        waits: whether a wait for an event came before its launch.
        in_graph: whether it ran in a graph.
    """
    gaps = difference(window, compute)
    # The kernel that ends a gap begins where the gap ends; behind the last one there is none.
    # The kernel that ends a gap begins where the gap ends; behind the last one there is none, and a kernel that never
    # comes stands for it.
    begin = np.append(begin, np.inf)
    launched, waits, in_graph = np.append(launched, np.nan), np.append(waits, False), np.append(in_graph, False)
    place = np.searchsorted(begin[:-1], gaps[:, 1], side="left")
    ended = begin[place] == gaps[:, 1]
    call = launched[place]
    unknown = ended & np.isnan(call)
    known = ended & ~unknown
    late_until = np.where(known, np.clip(np.nan_to_num(call), gaps[:, 0], gaps[:, 1]), gaps[:, 0])
    graph = known & in_graph[place]
    waiting = known & ~graph & waits[place]
    host = union(gaps[:, 0], late_until)
    event = union(late_until[waiting], gaps[waiting, 1])
    rest = ~waiting & ~unknown
    other = union(late_until[rest], gaps[rest, 1])
    lost = union(gaps[unknown, 0], gaps[unknown, 1])

    exposed = cover(communication)
    return Idle(
        host=length(host),
        event=length(event),
        other=length(other),
        unknown=length(lost),
        host_exposed=exposed(host),
        event_exposed=exposed(event),
        other_exposed=exposed(other),
        unknown_exposed=exposed(lost),
        graph=float((gaps[graph, 1] - late_until[graph]).sum()),
    )


def launch_delay(called: Floats, begin: Floats) -> LaunchDelay | None:
    """The delays of kernels, from the begin of their calls; None where there are none.

    Args:
        called, begin: shape [n].
    """
    if not len(begin):
        return None
    delays = begin - called
    return LaunchDelay(
        kernels=len(delays),
        median=float(np.median(delays)),
        p95=float(np.percentile(delays, 95)),
        longest=float(delays.max()),
        early=int((delays < -1.0).sum()),
    )
