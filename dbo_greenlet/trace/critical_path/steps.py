"""A recorded step of ours as a path graph: host, streams and what is in flight, put together.

The host's points, slice by slice:

    begin, vote, a slice begins, all of it is launched, it ends, (hand-over) the next one begins ... the step is over

Where the host itself computes, a slice's time is its stage's (`host`). Where there is a GPU, a slice on
the host is launching, and what was launched runs on the streams (`gpu`). A step that was replayed from
its graph has only streams; what it receives where follows from the ring's rule (`notation`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from ..notation import parse_site, ring_receives, why_no_notation
from ..reader import StepTrace
from ..schema import GpuRecord, RecvRecord, SliceRecord
from .gpu import GpuPath, Launching
from .graph import Edge, PathGraph
from .host import HostPath, receives_by_slice
from .names import HOST, StepNames

__all__ = ["StepGraph", "graph_of_step", "has_path"]


@dataclass(frozen=True)
class StepGraph:
    """The graph of one step, and what in it is not known.

    Attributes:
        graph, end: the graph, and the point at which the step is over.
        timed: whether the GPU's times were taken.
        streams: the streams that were used.
        replayed: whether it was replayed from its graph.
        receives: stretches (on the host: receives) in which the wait for what is in flight cannot be told from work.
        launching: stretches during which the host was still launching them.
        host_waits: slices in which the host may have waited for the GPU.
        unseen_waits: waits of a stream that nothing recorded explains.
        waits_known: whether the waits that took no time are known.
    """

    graph: PathGraph
    end: int
    timed: bool
    streams: list[str]
    replayed: bool
    receives: int
    launching: int
    host_waits: int
    unseen_waits: int
    waits_known: bool


def has_path(step: StepTrace) -> bool:
    """Whether there is more of a step than its length, and it neither failed nor was being captured."""
    record = step.record
    if any(each.failed for each in step.slices) or (record is not None and record.error is not None):
        return False
    execution = "" if record is None else record.execution
    if execution == "replayed":
        return bool(step.gpu)
    return execution != "captured" and bool(step.slices)


def graph_of_step(step: StepTrace, *, computes: bool, host_blocks: bool = False) -> StepGraph:
    """The graph of a step that has a path (`has_path`).

    Args:
        step: from the reader.
        computes: whether the host itself computes in the slices. Of no matter where the GPU was timed.
        host_blocks: whether the host waits for the GPU in slices that end at a dispatch, as it does for the counts of
            DeepEP's high throughput.
    """
    replayed = step.record is not None and step.record.execution == "replayed"
    builder = _Builder(step, host_blocks)
    if replayed:
        builder.replay()
    elif step.gpu:
        builder.launch()
    else:
        builder.run(computes)
    return builder.built(replayed)


class _Builder:
    def __init__(self, step: StepTrace, host_blocks: bool) -> None:
        self.step = step
        self.host_blocks = host_blocks
        self.names = StepNames(step.sites)
        record = step.record
        first = min([each.begin for each in step.slices[:1]] or [each.begin for each in step.gpu])
        begin = first if record is None or record.begin is None else min(record.begin, first)
        # How far the GPU's times may be off on the host's axis.
        error = max((each.error for each in step.gpu), default=0.0)
        self.graph = PathGraph(begin, tolerance=error)
        self.host = HostPath(self.graph, step, self.names)
        self.gpu = GpuPath(self.graph, step, self.names)
        self.host_waits = 0

    def run(self, computes: bool) -> None:
        """Nothing is known but the host."""
        self.host.vote()
        received, sent = receives_by_slice(self.step)
        for decision, entry in enumerate(self.step.slices):
            self.host.run_slice(entry, received[decision], sent[decision], computes=computes)

    # -- launched slice by slice --------------------------------------------------------------------------------------

    def launch(self) -> None:
        self.host.vote()
        received, _ = receives_by_slice(self.step)
        stretches = {(each.ubatch, each.slice, each.stream): each for each in self.step.gpu}
        for decision, entry in enumerate(self.step.slices):
            key = (entry.ubatch, entry.slice)
            self._launched(entry, stretches.get((*key, "compute")), stretches.get((*key, "comm")), received[decision])

    def _launched(
        self, entry: SliceRecord, compute: GpuRecord | None, comm: GpuRecord | None, received: list[RecvRecord]
    ) -> None:
        begun = self.host.hand_over(entry)
        until = entry.end
        if compute is not None and compute.end > entry.begin:
            # Behind the last launch the host only ends the slice; the GPU says when that was at the latest.
            until = min(until, compute.end)
        until = max(until, self.graph.at[begun])
        order = [each for each in (comm, compute) if each is not None]
        if len(order) == 2 and order[0].begin + order[0].waited > order[1].begin + order[1].waited:
            order.reverse()
        launching = Launching(begun, until)
        for stretch in order:
            works = self.gpu.begins(stretch, launching)
            if launching.launched < 0:
                self._launched_all(entry, launching, stretch, works)
            flights = [edge for each in received for edge in self._flights(each, stretch)] if stretch is compute else []
            self.gpu.ends(stretch, works, launching, flights)
        if launching.launched < 0:
            launching.launched = self.host.launches(launching, entry)
        self.host.ends_slice(launching.launched, entry)

    def _launched_all(self, entry: SliceRecord, launching: Launching, stretch: GpuRecord, works: int) -> None:
        """The host may have waited for what the slice does at first on a stream."""
        site = parse_site(entry.site)
        stage = "" if site is None else site.stage
        blocks = stage == "before_combine" or (self.host_blocks and stage == "dispatch")
        blocks = blocks or any(
            op.op == "host_wait" and (op.ubatch, op.slice) == (entry.ubatch, entry.slice) for op in self.step.ops
        )
        if blocks and self.graph.at[works] <= launching.until:
            self.host_waits += 1
            launching.waits.append((works, self.names.stretch_stage(stretch)))
        launching.launched = self.host.launches(launching, entry)

    def _flights(self, window: RecvRecord, into: GpuRecord) -> list[Edge]:
        if window.sent_decision is None or window.sent_decision >= len(self.step.slices):
            return []
        sender = self.step.slices[window.sent_decision]
        return self.gpu.flights(window.site, sender.ubatch, sender.slice, into)

    # -- replayed -----------------------------------------------------------------------------------------------------

    def replay(self) -> None:
        due: dict[int, list[int]] = defaultdict(list)
        decisions, sites = self.step.decisions, self.step.sites
        if why_no_notation(decisions, sites) is None:
            for receive in ring_receives(decisions, sites, self.step.count):
                due[receive.decision].append(receive.owner)
        sent: dict[int, tuple[str, int, int]] = {}  # microbatch -> where it sent last: site, itself, its slice
        decision = 0
        for stretch in sorted(self.step.gpu, key=lambda each: (each.begin + each.waited, each.end)):
            works = self.gpu.begins(stretch, None)
            flights: list[Edge] = []
            if stretch.stream == "compute":
                owners = [owner for owner in due[decision] if owner in sent]
                flights = [edge for owner in owners for edge in self.gpu.flights(*sent[owner], stretch)]
                sent[stretch.ubatch] = (stretch.site, stretch.ubatch, stretch.slice)
                decision += 1
            self.gpu.ends(stretch, works, None, flights)

    # -- the end ------------------------------------------------------------------------------------------------------

    def built(self, replayed: bool) -> StepGraph:
        graph, record = self.graph, self.step.record
        streams = [stream.last for stream in self.gpu.streams.values() if stream.last is not None]
        last = max([self.host.last, *streams], key=lambda point: graph.at[point])
        over = graph.at[last] if record is None or record.end is None else max(graph.at[last], record.end)
        # What comes behind the last of them is the host's: whoever reads the step's result has waited for the GPU.
        what = "behind the last slice" if last == self.host.last else "behind the GPU's last work"
        edges = [Edge(last, None, "host", HOST, what, "host")]
        edges += [Edge(point, 0.0, "end") for point in (self.host.last, *streams) if point != last]
        return StepGraph(
            graph=graph,
            end=graph.point(over, edges),
            timed=bool(streams),
            streams=[name for name, stream in self.gpu.streams.items() if stream.last is not None],
            replayed=replayed,
            receives=self.host.receives + self.gpu.receives,
            launching=self.gpu.launching,
            host_waits=self.host_waits,
            unseen_waits=self.gpu.unseen_waits,
            waits_known=self.gpu.waits_known,
        )
