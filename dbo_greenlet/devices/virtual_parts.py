"""What a virtual device is made of: buffers, streams, events, and the state that its copies share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import ConfigurationError, GraphCaptureError

if TYPE_CHECKING:
    from ..stream_program import Transfer
    from .virtual_clocks import VirtualClocks
    from .virtual_graph import VirtualGraph

__all__ = ["INFINITE", "Buffer", "Shared", "VirtualEvent", "VirtualStream", "foreign", "no_time", "refuse_two_captures"]

INFINITE = float("inf")


class Buffer:
    """Some memory of the device, to be named in accesses: equal only to itself."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"Buffer({self.name!r})"


class VirtualStream:
    """A timeline. `free` is the microsecond at which all that it holds is done."""

    __slots__ = ("free", "graph", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.free = 0.0
        self.graph: VirtualGraph | None = None  # into which it is being captured

    def __repr__(self) -> str:
        return f"VirtualStream({self.name!r}, free={self.free})"


class Shared:
    """What all copies of a device have in common; a GPU timeline makes one."""

    __slots__ = ("default", "events", "launch", "names", "now", "record", "streams", "thread", "transfer_time", "wait")

    def __init__(self, launch: float, record: float, wait: float, primary: str) -> None:
        self.launch = launch
        self.record = record
        self.wait = wait
        self.now = 0.0
        self.events = 0
        self.default = VirtualStream(primary)
        self.streams = [self.default]
        self.names = {primary}
        self.transfer_time: Callable[[Transfer, float], float] | None = None
        self.thread = CurrentStream()


class CurrentStream(threading.local):
    stream: VirtualStream | None = None


class VirtualEvent:
    """A mark in a stream. `at` is the microsecond at which its latest record is passed, None before the first.

    Every event keeps the time. Attributes: `number`, its own on its device.
    """

    __slots__ = ("at", "device", "external", "graph", "number", "stream")

    def __init__(self, device: VirtualClocks, number: int, external: bool) -> None:
        self.device = device
        self.number = number
        self.external = external  # a graph records it in every replay
        self.at: float | None = None
        self.graph: VirtualGraph | None = None  # into which its latest record was captured
        self.stream: str | None = None

    def query(self) -> bool:
        """Whether the host, now, would find all that it marks complete."""
        return self.at is None or self.at <= self.device.now

    def synchronize(self) -> None:
        """The host waits until what it marks is complete; its clock jumps there.

        Raises:
            GraphCaptureError: its latest record is being captured, or the current stream is.
        """
        self.device._wait_for_event(self)

    def elapsed_time(self, later: VirtualEvent) -> float:
        """Milliseconds, as CUDA has it, from this event to `later`.

        Raises:
            RuntimeError: one of them was never recorded, or is not complete by the host's clock (CUDA's "not ready").
        """
        if self.at is None or later.at is None:
            raise RuntimeError("an event was never recorded, or only into a graph that was not replayed")
        if not (self.query() and later.query()):
            raise RuntimeError("an event is not complete; synchronize with it before asking for its time")
        return (later.at - self.at) / 1000

    def __repr__(self) -> str:
        return f"VirtualEvent({self.number}, at={self.at})"


def no_time(what: str, us: float) -> ConfigurationError:
    return ConfigurationError(f"{what}: {us!r} microseconds; a time is a finite number, not below 0")


def foreign(event: VirtualEvent) -> ConfigurationError:
    return ConfigurationError(f"{event!r} belongs to another virtual device; use events of the device's own")


def refuse_two_captures(stream: VirtualStream, event: VirtualEvent) -> None:
    if stream.graph is not None:
        how = "was recorded outside the capture; record it inside, or wait for it before"
    elif event.external and event.graph is not None and not event.graph.open:
        return  # each replay records it like any other
    else:
        how = "was recorded into a graph, and the stream is not being captured into it; name it to capture()"
    raise GraphCaptureError(f"stream {stream.name!r} was to wait for an event that {how}")
