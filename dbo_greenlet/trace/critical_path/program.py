"""The program of a virtual device as a path graph, operation by operation: nothing in it is uncertain.

    device = VirtualDevice(launch=3.0)
    ...                                              # a step runs
    found = graph_of_program(device.program, launch=3.0)
    path = measure_path(found.graph, found.end, run="virtual", step=0, rank=0, pieces=True)

What a shorter stage gives is then what the same program takes when it is run again with shorter work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ...errors import ConfigurationError
from ...stream_program import Operation, StreamProgram
from .graph import Edge, PathGraph
from .names import HOST, OTHER

__all__ = ["ProgramGraph", "graph_of_program", "stage_by_name"]

# Names of `testing.layer_programs`.
_STAGES = {
    "A0": "attention", "A1": "attention", "D": "dispatch", "counts": "dispatch", "MLP": "experts", "C": "combine",
    "S": "shared",
}  # fmt: skip


class ProgramGraph(NamedTuple):
    """The graph, and the point at which the host, every stream and every transfer is done."""

    graph: PathGraph
    end: int


def stage_by_name(operation: Operation) -> str:
    """Whose time an operation of one of the documented layers is."""
    return _STAGES.get(operation.name, OTHER)


def graph_of_program(
    program: StreamProgram,
    *,
    launch: float = 0.0,
    record: float = 0.0,
    wait: float = 0.0,
    stage: Callable[[Operation], str] = stage_by_name,
) -> ProgramGraph:
    """The graph of what ran eagerly on a virtual device.

    Args:
        program: the device's.
        launch, record, wait: what the device was made with: microseconds that each takes the host.
        stage: whose time an operation is.

    Raises:
        ConfigurationError: an operation has no times: it was captured into a graph, or the device was no virtual one.
    """
    return _Builder(launch, {"record": record, "wait": wait, "host_wait": 0.0}, stage).build(program)


class _Builder:
    def __init__(self, launch: float, costs: dict[str, float], stage: Callable[[Operation], str]) -> None:
        self.graph = PathGraph()
        self.launch, self.costs, self.stage = launch, costs, stage
        self.host = 0
        self.streams: dict[str, int] = {}
        self.records: dict[int, int] = {}  # number of a record -> its point
        self.arrivals: dict[int, int] = {}  # number of a transfer -> its point

    def build(self, program: StreamProgram) -> ProgramGraph:
        for operation in program.operations:
            if operation.begin is None or operation.end is None:
                raise ConfigurationError(
                    f"operation {operation} has no times; a path needs a program that ran eagerly on a virtual device"
                )
            cost = self.costs.get(operation.kind, self.launch)
            what = f"{operation.kind} {operation.name}"
            self.host = self.graph.point(None, [Edge(self.host, cost, "host", HOST, what, "host")])
            if operation.kind == "host_wait":
                self._host_wait(operation)
            else:
                self._enqueued(operation, operation.begin, operation.end)
        lasts = [self.host, *self.streams.values(), *self.arrivals.values()]
        return ProgramGraph(self.graph, self.graph.point(None, [Edge(point, 0.0, "end") for point in lasts]))

    def _host_wait(self, operation: Operation) -> None:
        if operation.event is not None:
            awaited = [self.records[operation.of]] if operation.of is not None else []
        elif operation.stream is None:
            awaited = list(self.streams.values())
        else:
            awaited = [self.streams[operation.stream]] if operation.stream in self.streams else []
        edges = [Edge(self.host, 0.0, "host"), *(Edge(point, 0.0, "host wait") for point in awaited)]
        self.host = self.graph.point(None, edges)

    def _enqueued(self, operation: Operation, begin: float, end: float) -> None:
        graph, stream = self.graph, operation.stream or ""
        last = self.streams.get(stream)
        reached = max(graph.at[self.host], 0.0 if last is None else graph.at[last])
        if begin > reached:
            # The host did something else before (`VirtualDevice.host`), which the program does not show.
            self.host = graph.point(begin, [Edge(self.host, None, "host", HOST, "something else", "host")])
        edges = [] if last is None else [Edge(last, 0.0, "stream order")]
        edges.append(Edge(self.host, 0.0, "launch"))
        if operation.kind == "wait" and operation.of is not None:
            edges.append(Edge(self.records[operation.of], 0.0, "event"))
        point = graph.point(None, edges)
        transfer = operation.transfer
        stage, lane = self.stage(operation), f"{stream} {operation.microbatch}"
        if operation.kind == "work":
            point = graph.point(None, [Edge(point, end - begin, "work", stage, operation.name, lane)])
        elif operation.kind == "record":
            self.records[operation.number] = point
        elif operation.kind == "send" and transfer is not None:
            flight = (transfer.arrives or 0.0) - begin
            edge = Edge(point, flight, "receive", stage, operation.name, "in flight")
            self.arrivals[transfer.number] = graph.point(None, [edge])
        elif operation.kind == "receive" and transfer is not None:
            works = graph.point(
                None, [Edge(point, 0.0, "stream order"), Edge(self.arrivals[transfer.number], 0.0, "receive")]
            )
            took = end - max(begin, transfer.arrives or 0.0)
            point = graph.point(None, [Edge(works, took, "work", stage, operation.name, lane)])
        self.streams[stream] = point
