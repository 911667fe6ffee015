"""One GPU and step of a profile as a path graph.

    a call        comes behind the call before it on its thread ("host"); behind another thread's where its own stood
                  still while that one called (the backward pass: autograd's thread, and back)
    a kernel      begins behind its launch, behind the kernel before it on its stream, and behind what its stream waits
                  for; takes as long as it took
    a call that   returns behind the last thing that had ended until then; a thread whose last launch counts what will
    waits         be received (DeepEP's high throughput), and that goes on right behind its end, has waited for that

Most profiles do not say which stream waits for which event (`Profile.waits`), only that the host made some stream wait
before a launch. Such a kernel, and one in a graph, is taken to wait for what ended last on another stream before it
began, where nothing else explains its begin; where something does, the other stream may hold it up when that gets
shorter (AT_MOST).

A kernel that communicates takes as long as it took: how much of that it waited for another rank is not in a profile of
one rank. The second launch of a low-latency kernel is done when it is, or when what the first one sent has arrived.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .graph import AT_MOST, CERTAIN, IDLE, ONE_OF, Edge, PathGraph
from .names import HOST, LAUNCH

if TYPE_CHECKING:
    from .profile import ProfilePaths

__all__ = ["ProfileGraph", "ProfileGraphBuilder"]

STEP_BEFORE = "step before"
# A thread that makes no call for this long, while another makes some, stands still for it.
_STANDS_STILL_US = 100.0
# A thread that waits by looking at memory goes on this soon behind what it waits for.
_SEES_US = 100.0

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ProfileGraph:
    """The graph of one GPU's step.

    Attributes:
        graph, end: the graph, and the point at which the step is over.
        rank, device, step: which.
        inferred: number of kernels that are taken to wait for what another stream ended last.
        possible: number of those that may have to.
        polled: number of times that a thread waited for the GPU without a call.
    """

    graph: PathGraph
    end: int
    rank: int
    device: int
    step: int
    inferred: int
    possible: int
    polled: int


@dataclass
class _Stream:
    """A stream so far: points at which its last two activities ended, the begin of the last, and their launches."""

    last: int
    begun: int
    launched: float
    previous: int = -1
    previous_launched: float = 0.0


@dataclass
class _Thread:
    """A thread so far: its last point, and what it launched last (-1: nothing yet)."""

    last: int
    launched: int = -1


class ProfileGraphBuilder:
    """Makes the graph of one GPU and step.

    Args:
        paths: what is known of the profile.
        mine, calls: indices of the activities and of the process's calls, ascending in time.
        rank, device, step: which.
        begin: when the step begins; None: with the first of them.
        earlier: activities of the steps before.
    """

    def __init__(
        self,
        paths: ProfilePaths,
        mine: Ints,
        calls: Ints,
        rank: int,
        device: int,
        step: int,
        begin: float | None,
        earlier: Ints | None = None,
    ) -> None:
        self.paths = paths
        self.profile = paths.profile
        self.rank, self.device, self.step = rank, device, step
        activities, all_calls = self.profile.activities, self.profile.calls
        call = paths.launches.call[mine]
        # Of the host's calls those that launched something here, and those that wait.
        self.is_sync = set(calls[self._named(calls, "Synchronize")].tolist())
        known = np.flatnonzero(call >= 0)
        copies = known[self._named(call[known], "Memcpy")]
        # A copy from pageable memory, for one, has been made when its call returns.
        self.is_sync |= set(call[copies][activities.end[mine[copies]] <= all_calls.end[call[copies]]].tolist())
        calls = calls[np.isin(calls, call[known]) | np.isin(calls, list(self.is_sync))]
        starts = [float(activities.begin[mine].min()), *all_calls.begin[calls[:1]].tolist()]
        self.graph = PathGraph(min(starts) if begin is None else min(begin, *starts))
        self.streams: dict[int, _Stream] = {}
        self.threads: dict[int, _Thread] = {}
        self.latest_thread: int | None = None
        self.call_points: dict[int, int] = {}
        self.launched_by = dict(zip(call.tolist(), mine.tolist(), strict=True))
        self.end_points: dict[int, int] = {}
        self.inferred = self.possible = self.polled = 0
        if earlier is not None:
            self._carry_over(earlier)
        self.order = self._events(mine, calls)

    def _named(self, calls: Ints, part: str) -> npt.NDArray[np.bool_]:
        wanted = np.array([part in name for name in self.profile.names], dtype=bool)
        return np.asarray(wanted[self.profile.calls.name[calls]])

    def _carry_over(self, earlier: Ints) -> None:
        """What the steps before left running on the streams."""
        activities = self.profile.activities
        for activity in earlier[activities.end[earlier] > self.graph.at[0]]:
            stream = int(activities.stream[activity])
            known = self.streams.get(stream)
            if known is None or self.graph.at[known.last] < activities.end[activity]:
                edge = Edge(0, None, "work", STEP_BEFORE, "the step before", f"stream {stream}")
                point = self.graph.point(float(activities.end[activity]), [edge])
                self.streams[stream] = _Stream(point, point, -np.inf)

    def _events(self, mine: Ints, calls: Ints) -> list[tuple[float, int, int]]:
        """(time, what, index) in the order in which points are made: returns, then calls, then activities."""
        activities, all_calls = self.profile.activities, self.profile.calls
        events = [(float(all_calls.begin[c]), 1, int(c)) for c in calls]
        events += [(float(all_calls.end[c]), 0, int(c)) for c in calls if int(c) in self.is_sync]
        events += [(float(activities.begin[a]), 2, int(a)) for a in mine]
        # A call that takes no time returns behind its begin.
        events.sort(key=lambda e: (e[0], e[1] if e[1] or all_calls.begin[e[2]] < e[0] else 1.5, e[2]))
        return events

    def build(self) -> ProfileGraph:
        for time, what, index in self.order:
            if what == 2:
                self._activity(time, index)
            elif what == 1:
                self._call(time, index)
            else:
                self._returns(time, index)
        lasts = [stream.last for stream in self.streams.values()] + [thread.last for thread in self.threads.values()]
        over = max(self.graph.at[point] for point in lasts)
        end = self.graph.point(over, [Edge(point, 0.0, "end") for point in lasts])
        return ProfileGraph(
            self.graph, end, self.rank, self.device, self.step, self.inferred, self.possible, self.polled
        )

    # -- the host ----------------------------------------------------------------------------------------------------

    def _call(self, time: float, index: int) -> None:
        number = int(self.profile.calls.thread[index])
        thread = self.threads.get(number)
        lane = f"thread {number}"
        edges = self._polled(thread, time, lane)
        if not edges:
            source, kind = self._comes_behind(number, time)
            edges = [Edge(source, None, kind, HOST, "the host", lane)]
        point = self.graph.point(time, edges)
        launched = self.launched_by.get(index, -1 if thread is None else thread.launched)
        self.threads[number] = _Thread(point, launched)
        self.latest_thread = number
        self.call_points[index] = point

    def _comes_behind(self, number: int, time: float) -> tuple[int, str]:
        """The point that a call of a thread comes behind, and how they are connected."""
        at, thread = self.graph.at, self.threads.get(number)
        if self.latest_thread is not None and self.latest_thread != number:
            last = self.threads[self.latest_thread].last
            if thread is None:
                return last, "thread"
            if at[last] > at[thread.last] and time - at[thread.last] > _STANDS_STILL_US:
                return last, "thread"
        return (0 if thread is None else thread.last), "host"

    def _polled(self, thread: _Thread | None, time: float, lane: str) -> list[Edge]:
        """What a call comes behind whose thread has looked at memory until the GPU had written it; [] for others."""
        if thread is None or thread.launched not in self.paths.counting:
            return []
        awaited = self.end_points.get(thread.launched)
        if awaited is None or not self.graph.at[thread.last] < self.graph.at[awaited] <= time:
            return []
        if time - self.graph.at[awaited] > _SEES_US:
            return []
        self.polled += 1
        what = f"the host sees {self.paths.name(thread.launched)}"
        return [Edge(awaited, None, "host wait", HOST, what, lane), Edge(thread.last, 0.0, "host")]

    def _returns(self, time: float, index: int) -> None:
        """A call that waits, or may have waited, for the GPU."""
        begun = self.call_points[index]
        number = int(self.profile.calls.thread[index])
        lane = f"thread {number}"
        what = f"returns from {self.profile.names[self.profile.calls.name[index]]}"
        ended = [p for s in self.streams.values() for p in (s.last, s.previous) if p >= 0 and self.graph.at[p] <= time]
        source = max(ended, key=lambda point: self.graph.at[point], default=-1)
        if source >= 0 and self.graph.at[source] > self.graph.at[begun]:
            edges = [Edge(source, None, "host wait", HOST, what, lane), Edge(begun, 0.0, "host")]
        else:
            edges = [Edge(begun, None, "host", HOST, what, lane)]
        point = self.graph.point(time, edges)
        if self.threads[number].last == begun:
            self.threads[number].last = point

    # -- the GPU -----------------------------------------------------------------------------------------------------

    def _activity(self, time: float, index: int) -> None:
        paths, graph, activities = self.paths, self.graph, self.profile.activities
        number = int(activities.stream[index])
        lane, name, stage = f"stream {number}", paths.name(index), paths.stage(index)
        stream = self.streams.get(number)
        call = int(paths.launches.call[index])
        launched = self.call_points.get(call)
        launch_time = float(self.profile.calls.begin[call]) if call >= 0 else -np.inf
        edges = []
        if stream is not None:
            if graph.at[stream.last] <= time:
                edges.append(Edge(stream.last, paths.gap_us, "stream order", IDLE, name, lane))
            else:
                # Launched while the one before it still ran (programmatic dependent launch).
                edges.append(Edge(stream.begun, None, "stream order", stage, name, lane))
        if launched is not None:
            edges.append(Edge(launched, paths.launch_us, "launch", LAUNCH, name, lane))
        edges += self._event(time, index, number, launch_time, edges, name, lane)
        if launched is not None:
            edges = self._whose_launch(edges, launched, time)
        begun = graph.point(time, edges)
        own = Edge(begun, None, "work", stage, name, lane)
        sent = self.end_points.get(paths.sent(index))
        if sent is None:
            work = [own]
        else:
            flight = Edge(sent, None, "receive", stage, f"in flight: {name}", "in flight", ONE_OF)
            work = [own._replace(role=ONE_OF), flight, Edge(begun, 0.0, "work")]
        done = graph.point(max(float(activities.end[index]), time), work)
        self.end_points[index] = done
        if stream is None:
            self.streams[number] = _Stream(done, begun, launch_time)
        else:
            self.streams[number] = _Stream(done, begun, launch_time, stream.last, stream.launched)

    def _event(
        self, time: float, index: int, number: int, launch_time: float, known: list[Edge], name: str, lane: str
    ) -> list[Edge]:
        """What another stream had ended before, where the kernel's stream may have been made to wait for it."""
        launches, awaited = self.paths.launches, self.paths.awaited
        if awaited is not None and not launches.in_graph[index]:
            sources = [self.end_points[source] for source in awaited.get(index, ()) if source in self.end_points]
            return [Edge(source, self.paths.gap_us, "event", IDLE, name, lane) for source in sources]
        if not (launches.waits[index] or launches.in_graph[index]):
            return []
        graph = self.graph
        ended = [
            (graph.at[point], point)
            for other, stream in self.streams.items()
            if other != number
            for point, launched in ((stream.last, stream.launched), (stream.previous, stream.previous_launched))
            if point >= 0 and graph.at[point] <= time and launched <= launch_time
        ]
        if not ended:
            return []
        at, point = max(ended)
        gap = self.paths.gap_us
        explained = max((graph.at[edge.source] + (edge.lag or 0.0) for edge in known), default=graph.at[0])
        binds = at + gap > explained
        self.inferred += binds
        self.possible += not binds
        return [Edge(point, gap, "event", IDLE, name, lane, CERTAIN if binds else AT_MOST)]

    def _whose_launch(self, edges: list[Edge], launched: int, time: float) -> list[Edge]:
        """Where the launch explains the begin best, all of the time since is the launch's."""
        graph = self.graph
        latest = max(
            (graph.at[edge.source] + (edge.lag or 0.0) for edge in edges if edge.role == CERTAIN), default=-np.inf
        )
        return [
            edge._replace(lag=None)
            if edge.source == launched and graph.at[launched] + (edge.lag or 0.0) >= latest
            else edge
            for edge in edges
        ]
