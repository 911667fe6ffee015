"""The host's part of a step's path graph: the vote, hand-overs, slices, and receives that the host waits for."""

from __future__ import annotations

from collections import defaultdict

from ..notation import parse_site
from ..reader import StepTrace
from ..schema import RecvRecord, SliceRecord
from .gpu import Launching
from .graph import CERTAIN, ONE_OF, Edge, PathGraph
from .names import HOST, VOTE, StepNames

__all__ = ["HostPath", "Receives", "receives_by_slice"]

Receives = dict[int, list[RecvRecord]]


def receives_by_slice(step: StepTrace) -> tuple[Receives, Receives]:
    """The windows that were completed, by the slice that did it and by the one that sent.

    Slices are counted as decisions of the schedule.
    """
    received: Receives = defaultdict(list)
    sent: Receives = defaultdict(list)
    for each in step.receives:
        if each.decision is not None and each.at is not None:
            received[each.decision].append(each)
            if each.sent_decision is not None:
                sent[each.sent_decision].append(each)
    return received, sent


class HostPath:
    """Adds the host's points to a graph, in the order in which they come.

    Attributes:
        last: the host's latest point.
        receives: number of receives of which a wait may have been a part.
    """

    def __init__(self, graph: PathGraph, step: StepTrace, names: StepNames) -> None:
        self.graph = graph
        self.last = 0
        self.receives = 0
        self._step = step
        self._names = names
        self._began = False
        # id of a window -> the points at which it was sent at the latest and at the soonest, and whose work is between
        self._sent: dict[int, tuple[int, int, str]] = {}

    def vote(self) -> None:
        """The ranks' vote, where it was timed in this step."""
        record = self._step.record
        if record is None or record.vote_begin is None or record.vote_end is None:
            return
        before = self._step.slices[0].begin
        if self.graph.at[0] <= record.vote_begin <= record.vote_end <= before:
            came = self.graph.point(record.vote_begin, [Edge(0, None, "host", HOST, "before the vote", "host")])
            self.last = self.graph.point(record.vote_end, [Edge(came, None, "vote", VOTE, "the ranks' vote", "host")])

    def hand_over(self, entry: SliceRecord, until: float | None = None) -> int:
        """To the begin of a slice, or to an earlier moment while the scheduler still runs."""
        if self._began:
            edge = Edge(self.last, None, "hand-over", HOST, f"hand-over to microbatch {entry.ubatch}", "host")
        else:
            edge = Edge(self.last, None, "host", HOST, "before the first slice", "host")
        self._began = True
        at = entry.begin if until is None else until
        self.last = self.graph.point(max(at, self.graph.at[self.last]), [edge])
        return self.last

    def run_slice(
        self, entry: SliceRecord, received: list[RecvRecord], sent: list[RecvRecord], *, computes: bool
    ) -> None:
        """A slice of which nothing else is known: its stage's time where the host computes, the host's elsewhere.

        It is cut where something was sent, and where a receive was complete.
        """
        names = self._names
        stage = names.stage(entry.site) if computes else HOST
        work = Edge(0, None, "work", stage, names.slice(entry.site, entry.ubatch), f"host {entry.ubatch}")
        marks = [(each.sent, True, each) for each in sent]
        if computes:
            marks += [(each.at, False, each) for each in received if each.at is not None]
        marks.sort(key=lambda mark: mark[:2])
        begun = False
        for time, is_send, window in marks:
            # A receive that no sibling ran is run by the scheduler, before the slice begins.
            if begun or time >= entry.begin:
                if not begun:
                    self.hand_over(entry)
                begun = True
                so_far = work._replace(source=self.last)
            else:
                text = f"hand-over to microbatch {entry.ubatch}"
                so_far = Edge(self.last, None, "hand-over", HOST, text, "host")
            time = max(time, self.graph.at[self.last])
            if is_send:
                before, self.last = self.last, self.graph.point(time, [so_far])
                site = parse_site(window.site)
                # A combine is sent before the shared expert runs, and registered at the end of the slice.
                soonest = self.last if site is not None and site.stage == "dispatch" else before
                self._sent[id(window)] = (self.last, soonest, stage)
            else:
                self.last = self._received(entry, window, time, so_far)
        if not begun:
            self.hand_over(entry)
        end = max(entry.end, self.graph.at[self.last])
        self.last = self.graph.point(end, [work._replace(source=self.last)])

    def _received(self, entry: SliceRecord, window: RecvRecord, time: float, work: Edge) -> int:
        """The point at which a receive is complete: behind what the host did until then, or behind the flight."""
        if (sent := self._sent.get(id(window))) is None:
            return self.graph.point(time, [work])
        latest, soonest, stage = sent
        called = self._hook_called(entry, window, time)
        if called is not None:
            # All before the call was the slice's own.
            work = work._replace(source=self.graph.point(called, [work]))
        names = self._names
        what = names.flight(window.site, window.ubatch)
        flights = [Edge(latest, None, "receive", names.flight_stage(window.site), what, "in flight", ONE_OF)]
        if soonest != latest:
            flights.append(flights[0]._replace(source=soonest, also=(stage,)))
        own = work._replace(role=ONE_OF)
        self.receives += 1
        least = Edge(work.source, 0.0, "work")
        return self.graph.point(time, [own, *flights, least] if called is None else [*flights, own, least])

    def _hook_called(self, entry: SliceRecord, window: RecvRecord, time: float) -> float | None:
        """When the receive's hook was called, where the operations tell."""
        for op in self._step.ops:
            if op.op == "receive" and op.at is not None and (op.ubatch, op.slice) == (entry.ubatch, entry.slice):
                owner = op.ubatch if op.owner is None else op.owner
                if owner == window.ubatch and self.graph.at[self.last] <= op.at <= time:
                    return op.at
        return None

    def launches(self, launching: Launching, entry: SliceRecord) -> int:
        """The point at which the host has launched all of a slice."""
        edges = launching.moments(f"launching {self._names.slice(entry.site, entry.ubatch)}", "host")
        if len(edges) == 1:
            edges = [edges[0]._replace(role=CERTAIN, kind="host")]
        else:
            edges += [Edge(edge.source, 0.0, edge.kind) for edge in edges]
        return self.graph.point(launching.until, edges)

    def ends_slice(self, launched: int, entry: SliceRecord) -> None:
        """The host leaves a slice that it has launched."""
        end = max(entry.end, self.graph.at[launched])
        self.last = self.graph.point(end, [Edge(launched, None, "host", HOST, "the end of a slice", "host")])
