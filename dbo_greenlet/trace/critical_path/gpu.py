"""The GPU's part of a step's path graph: the stretches of its streams, what they wait for, what is in flight.

A stretch (`GpuRecord`) has two points. It begins to work behind the stretch before it on its stream, behind the events
that its stream waits for, and not before the host came to the slice. It is done when its own work is; or, where the
host was still launching it meanwhile, when what was left behind the last launch is; or, where a receive is in it, when
what was in flight had arrived and what is left behind that is done. Which of these it was the stretch does not tell:
edges of the role ONE_OF.

Which event a stream waits for is said by the operations, where they were recorded; otherwise by the sites of high
throughput, whose waits are documented (`notation`). Without either, a wait that took time is put behind the stretch of
the other stream that ended then, and waits that took none are not known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..notation import parse_site
from ..reader import StepTrace
from ..schema import GpuRecord
from .graph import AT_MOST, ONE_OF, Edge, PathGraph
from .names import HOST, LAUNCH, StepNames

__all__ = ["GpuPath", "Launching", "StreamPath"]

# A kernel begins a few microseconds behind its launch: a stretch that is done no later than this behind the host's last
# launch has most likely been waiting for it.
_LAUNCH_US = 25.0
# A stretch with a receive inside that takes this many times as long as the step's shortest of its stage has most likely
# been waiting for what was in flight.
_WAITS_FACTOR = 2.0
# How far two times of a GPU may lie apart that are one moment: an event is an entry of its stream.
_SAME_EVENT_US = 3.0


@dataclass
class Launching:
    """The host in a slice.

    Attributes:
        begun, launched: the points at which it begins, and at which it has launched everything (-1: not made yet).
        until: when it has.
        waits: what it may have waited for in between, as points of the GPU and the stage that goes on there.
    """

    begun: int
    until: float
    launched: int = -1
    waits: list[tuple[int, str]] = field(default_factory=list)

    def moments(self, what: str, lane: str, stage: str = "") -> list[Edge]:
        """What may have decided when something happened for which the host had to come first, and then `stage` ran."""
        own = (stage, HOST) if stage else (HOST,)
        edges = [Edge(self.begun, None, "launch", own[0], what, lane, ONE_OF, own[1:])]
        for point, awaited in self.waits:
            edges.append(Edge(point, None, "host wait", own[0], what, lane, ONE_OF, (*own[1:], awaited)))
        return edges


@dataclass(frozen=True)
class _Stretch:
    """Points of a stretch: it begins to work; its own work is over, where that is known; its last event is passed."""

    works: int
    worked: int | None
    done: int
    stage: str


@dataclass
class StreamPath:
    """What a stream did so far: its last point, and its stretches by microbatch and slice."""

    last: int | None = None
    stretches: dict[tuple[int, int], _Stretch] = field(default_factory=dict)


class GpuPath:
    """Adds the streams' points to a graph, each stretch behind what it may wait for.

    Attributes:
        streams: by their names.
        receives: number of stretches with a receive inside.
        launching: number of stretches during which the host was still launching them.
        unseen_waits: number of waits that took time and that nothing recorded explains.
    """

    def __init__(self, graph: PathGraph, step: StepTrace, names: StepNames) -> None:
        self.graph = graph
        self.streams: dict[str, StreamPath] = defaultdict(StreamPath)
        self.receives = self.launching = self.unseen_waits = 0
        self._names = names
        self._by_operations = _waits(step)
        self._shortest: dict[str, float] = {}
        for each in step.gpu:
            if each.stream == "compute":
                stage = names.stretch_stage(each)
                worked = each.end - each.begin - each.waited
                self._shortest[stage] = min(self._shortest.get(stage, worked), worked)

    @property
    def waits_known(self) -> bool:
        """Whether every wait is known, those that took no time included."""
        return self._by_operations is not None or self._names.high_throughput

    def begins(self, stretch: GpuRecord, launching: Launching | None) -> int:
        """The point at which a stretch begins to work. In a graph there is no `launching`."""
        graph, stream = self.graph, self.streams[stretch.stream]
        at = stretch.begin + stretch.waited
        edges = [] if stream.last is None else [Edge(stream.last, 0.0, "stream order")]
        inside: list[_Stretch] = []
        for found, same_slice in self._awaited(stretch):
            if not same_slice:
                edges.append(Edge(found.done, 0.0, "event"))
            elif found.worked is not None:
                edges.append(Edge(found.worked, 0.0, "event"))
            else:
                inside.append(found)
        what = f"launching {self._names.stretch(stretch)}"
        if launching is None:
            return graph.point(at, edges or [Edge(0, None, "launch", HOST, "before the graph's first slice", "host")])
        at = max(at, graph.at[launching.begun])
        explained = max((graph.at[edge.source] for edge in edges), default=graph.at[0])
        least = [*edges, Edge(launching.begun, 0.0, "launch", "", what, "host")]
        if inside:
            # It waits for the other stream's part of the same slice, of which only the last event was timed.
            choice = launching.moments(what, "host")
            for found in inside:
                choice.append(Edge(found.works, None, "event", found.stage, what, stretch.stream, ONE_OF))
                least.append(Edge(found.works, 0.0, "event"))
            choice += [edge._replace(lag=None, role=ONE_OF) for edge in edges if graph.at[edge.source] >= at]
            return graph.point(at, [*choice, *least])
        if stretch.waited and self.waits_known and at > explained + _SAME_EVENT_US:
            # The wait lasted longer than what it waited for: the host was late with making the stream wait.
            return graph.point(at, [*launching.moments(what, "host"), *least])
        # The host came to it at some moment of the slice, early enough.
        latest = min(at, launching.until)
        for moment in launching.moments(what, "host"):
            if (lag := latest - graph.at[moment.source]) > 0:
                least.append(moment._replace(lag=lag, role=AT_MOST))
        return graph.point(at, least)

    def ends(self, stretch: GpuRecord, works: int, launching: Launching | None, flights: Sequence[Edge] = ()) -> None:
        """The point at which a stretch is done.

        Args:
            stretch: the stretch.
            works: the point at which it began to work.
            launching: the host in its slice; None in a graph.
            flights: what is in flight and received in it (`flights`).
        """
        graph, stage, what = self.graph, self._names.stretch_stage(stretch), self._names.stretch(stretch)
        lane = f"{stretch.stream} {stretch.ubatch}"
        end = max(stretch.end, graph.at[works])
        own = Edge(works, None, "work", stage, what, lane)
        least = [Edge(works, 0.0, "work")]
        choice = [own]
        worked: int | None = None
        if launching is not None and graph.at[launching.launched] > graph.at[works]:
            self.launching += 1
            launched = launching.launched
            late = end - graph.at[launched]
            if late >= 0:
                least.append(Edge(launched, 0.0, "launch"))
            if late < 0:
                choice += launching.moments(f"launching {what}", lane, stage)
            elif stretch.stream != "compute" and late > _SAME_EVENT_US:
                # The last event was waiting for the work and not for the host, which was still to record it.
                worked = graph.point(end, [own._replace(role=ONE_OF), *launching.moments(what, lane, stage), least[0]])
                choice = [Edge(worked, 0.0, "work")]
            elif late > _LAUNCH_US:
                choice.append(Edge(launched, None, "launch", stage, f"the last launch of {what}", lane))
            else:
                choice.insert(0, Edge(launched, None, "launch", LAUNCH, f"the last launch of {what}", lane))
        if flights:
            self.receives += 1
            # A guess, for the path alone: work of one stage takes about as long in every layer, a wait does not.
            waits = own in choice and end - graph.at[works] > _WAITS_FACTOR * self._shortest.get(stage, 0.0)
            place = choice.index(own) if waits else len(choice)
            choice[place:place] = flights
        edges = choice if len(choice) == 1 else [edge._replace(role=ONE_OF) for edge in choice]
        if launching is not None and graph.at[launching.launched] <= graph.at[works]:
            # All was launched in time. Were the stream earlier, it would have to wait for the last launch.
            least.append(own._replace(source=launching.launched, lag=end - graph.at[works], role=AT_MOST))
        stream = self.streams[stretch.stream]
        stream.last = graph.point(end, [*edges, *least])
        if launching is None or graph.at[launching.launched] <= graph.at[works]:
            worked = stream.last
        stream.stretches[stretch.ubatch, stretch.slice] = _Stretch(works, worked, stream.last, stage)

    def flights(self, site: str, ubatch: int, number: int, into: GpuRecord) -> list[Edge]:
        """From what a microbatch's slice sent before its yield at `site`, to whatever the receive holds up."""
        sent = self.streams["compute"].stretches.get((ubatch, number))
        if sent is None:
            return []
        stage, what = self._names.flight_stage(site), self._names.flight(site, ubatch)
        parsed = parse_site(site)
        # Behind the receive comes what is left of the stretch that it is in.
        behind = self._names.stretch_stage(into)
        edges = [Edge(sent.done, None, "receive", stage, what, "in flight", ONE_OF, (behind,))]
        if parsed is None or parsed.stage != "dispatch":
            # A combine leaves before the shared expert runs: at its stretch's end at the latest, or anywhere in it.
            edges.append(Edge(sent.works, None, "receive", stage, what, "in flight", ONE_OF, (sent.stage, behind)))
        return edges

    # -- events ------------------------------------------------------------------------------------------------------

    def _awaited(self, stretch: GpuRecord) -> list[tuple[_Stretch, bool]]:
        """Behind which stretches the stretch's stream may go on, and whether they are of the same slice."""
        if self._by_operations is not None:
            wanted = self._by_operations.get((stretch.ubatch, stretch.slice, stretch.stream), [])
        elif self._names.high_throughput:
            wanted = _by_pattern(stretch)
        else:
            return [(found, False) for found in self._by_time(stretch)]
        return [
            (found, (ubatch, number) == (stretch.ubatch, stretch.slice))
            for ubatch, number, name in wanted
            if (found := self.streams[name].stretches.get((ubatch, number))) is not None
        ]

    def _by_time(self, stretch: GpuRecord) -> list[_Stretch]:
        """The stretch of another stream that ended when the wait was over."""
        if not stretch.waited:
            return []
        at = stretch.begin + stretch.waited
        ended = [
            found
            for name, stream in self.streams.items()
            if name != stretch.stream
            for found in stream.stretches.values()
            if abs(self.graph.at[found.done] - at) <= _SAME_EVENT_US
        ]
        self.unseen_waits += not ended
        return ended[-1:]


def _waits(step: StepTrace) -> dict[tuple[int, int, str], list[tuple[int, int, str]]] | None:
    """(microbatch, slice, stream) -> the stretches whose events it waits for; None where nobody recorded operations."""
    if not any(op.op == "wait" for op in step.ops):
        return None
    records = {op.number: op for op in step.ops if op.op == "record"}
    out: dict[tuple[int, int, str], list[tuple[int, int, str]]] = defaultdict(list)
    for op in step.ops:
        if op.op != "wait" or op.of is None or op.ubatch is None or op.slice is None or op.stream is None:
            continue
        of = records.get(op.of)
        if of is not None and of.ubatch is not None and of.slice is not None and of.stream not in (None, op.stream):
            out[op.ubatch, op.slice, op.stream].append((of.ubatch, of.slice, of.stream or ""))
    return out


def _by_pattern(stretch: GpuRecord) -> list[tuple[int, int, str]]:
    """High throughput: communication waits for the compute before it, compute for what it needs of communication."""
    if stretch.stream == "comm":
        return [(stretch.ubatch, stretch.slice - 1, "compute")]
    before, after = parse_site(stretch.site), parse_site(stretch.after)
    if before is not None and before.stage == "before_combine":
        return [(stretch.ubatch, stretch.slice, "comm")]
    if after is not None and after.stage == "combine":
        return [(stretch.ubatch, stretch.slice - 1, "comm")]
    return []
