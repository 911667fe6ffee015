"""A captured run of the virtual device, and its replays.

As CUDA has it: a graph keeps order, not times. What was captured on one stream runs in that order, a captured wait
refers to the record that it had when it was captured, and each replay is one launch into the current stream. The nodes
run on timelines of their own, so that a replay neither waits for nor delays what else is on the captured streams.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import GraphCaptureError

if TYPE_CHECKING:
    from ..stream_program import Operation, Transfer
    from .virtual import VirtualDevice, VirtualEvent, VirtualStream

__all__ = ["VirtualGraph"]


class VirtualGraph:
    """What `VirtualDevice.capture` made.

    Attributes: `output` (what the captured run returned), `operations` (its nodes, in the order of their capture),
    `replays` (how many there were).
    """

    def __init__(self, device: VirtualDevice, streams: list[VirtualStream]) -> None:
        self.output: Any = None
        self.open = True
        self.replays = 0
        self.transfers: set[Transfer] = set()
        self._device = device
        self._streams = streams
        self._nodes: list[tuple[Operation, VirtualStream, float, VirtualEvent | None]] = []

    @property
    def operations(self) -> list[Operation]:
        return [node[0] for node in self._nodes]

    def note(
        self, operation: Operation, stream: VirtualStream, us: float = 0.0, *, event: VirtualEvent | None = None
    ) -> None:
        """Called by the device, in place of running `operation`."""
        self._nodes.append((operation, stream, us, event))
        if operation.kind == "send" and operation.transfer is not None:
            self.transfers.add(operation.transfer)

    def replay(self, stream: VirtualStream | None = None) -> None:
        """Enqueue all of it as one launch on `stream`, default the current one.

        Begin and end of the operations, arrivals of transfers and the times of timing events are then those of this
        replay.

        Raises:
            GraphCaptureError: it is still being captured, or `stream` is being captured.
        """
        device = self._device
        where = device.current_stream() if stream is None else stream
        if self.open or where.graph is not None:
            raise GraphCaptureError("a graph cannot be replayed inside a capture")
        shared = device._shared
        shared.now += shared.launch
        begin = max(where.free, shared.now)
        free = dict.fromkeys(self._streams, begin)
        passed: dict[int, float] = {}  # record -> when
        for operation, on, us, event in self._nodes:
            at = operation.begin = free[on]
            transfer = operation.transfer
            if operation.kind == "record":
                passed[operation.number] = at
                if event is not None and event.external:
                    event.at = at
            elif operation.kind == "wait":
                if operation.of is not None:
                    at = max(at, passed[operation.of])
            elif transfer is not None and operation.kind == "send":
                transfer.arrives = at + device._flight(transfer, us)
            elif transfer is not None:
                at = max(at, transfer.arrives or 0.0) + us
            else:
                at += us
            operation.end = free[on] = at
        where.free = max(free.values())
        self.replays += 1

    __call__ = replay

    def __repr__(self) -> str:
        return f"VirtualGraph({len(self._nodes)} operations, {self.replays} replays)"
