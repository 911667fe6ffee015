"""The virtual device's streams, events and host, and the clocks that they share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import GraphCaptureError
from ..stream_program import Operation, StreamProgram
from .virtual_parts import INFINITE, Shared, VirtualEvent, VirtualStream, foreign, no_time, refuse_two_captures

__all__ = ["VirtualClocks"]


class VirtualClocks:
    """What of a `VirtualDevice` tells and spends time without working: its rules are in `virtual`."""

    def __init__(
        self,
        *,
        launch: float = 0.0,
        record: float = 0.0,
        wait: float = 0.0,
        primary: str = "compute",
        keep_places: bool = False,
    ) -> None:
        for what, value in (("launch", launch), ("record", record), ("wait", wait)):
            if not 0.0 <= value < INFINITE:
                raise no_time(what, value)
        self._shared = Shared(launch, record, wait, primary)
        self._thread = self._shared.thread
        self.default_stream = self._shared.default
        self.program = StreamProgram(primary, keep_places=keep_places)

    # -- streams and events --------------------------------------------------------------------------------------------

    def new_stream(self, name: str) -> VirtualStream:
        """A stream; its name gets a number where another stream of this device has it already."""
        shared = self._shared
        unique, count = name, 1
        while unique in shared.names:
            count += 1
            unique = f"{name}#{count}"
        shared.names.add(unique)
        stream = VirtualStream(unique)
        shared.streams.append(stream)
        return stream

    def new_event(self) -> VirtualEvent:
        shared = self._shared
        shared.events = number = shared.events + 1
        return VirtualEvent(self, number, False)

    def new_timing_event(self) -> VirtualEvent:
        """An event that a captured graph records anew in every replay."""
        event = self.new_event()
        event.external = True
        return event

    def current_stream(self) -> VirtualStream:
        return self._thread.stream or self.default_stream

    def set_stream(self, stream: VirtualStream) -> None:
        self._thread.stream = stream

    def stream_key(self) -> VirtualStream:
        """A stream of this device is its own key."""
        return self._thread.stream or self.default_stream

    def put_stream(self, key: VirtualStream) -> None:
        self._thread.stream = key

    @contextmanager
    def stream_scope(self, stream: VirtualStream) -> Iterator[None]:
        before = self._thread.stream
        self._thread.stream = stream
        try:
            yield
        finally:
            self._thread.stream = before

    def record(self, event: VirtualEvent, stream: VirtualStream) -> None:
        """See `Device`. Takes the host `record` microseconds.

        Raises:
            ConfigurationError: the event is another device's.
        """
        shared = self._shared
        if event.device._shared is not shared:
            raise foreign(event)
        operation = self.program.add("record", stream.name, "record", event=event.number)
        event.stream = stream.name
        event.graph = stream.graph
        if stream.graph is not None:
            stream.graph.note(operation, stream, event=event)
            return
        shared.now = now = shared.now + shared.record
        at = stream.free
        if now > at:
            at = now
        event.at = operation.begin = operation.end = stream.free = at

    def wait(self, stream: VirtualStream, event: VirtualEvent) -> None:
        """See `Device`. Takes the host `wait` microseconds.

        Raises:
            ConfigurationError: the event is another device's.
            GraphCaptureError: the one is being captured and the other is not, or belongs to another capture.
        """
        shared = self._shared
        if event.device._shared is not shared:
            raise foreign(event)
        if event.graph is not stream.graph and (event.graph is not None or event.at is not None):
            refuse_two_captures(stream, event)
        operation = self.program.add("wait", stream.name, "wait", event=event.number)
        if stream.graph is not None:
            stream.graph.note(operation, stream)
            return
        shared.now = now = shared.now + shared.wait
        begin = stream.free
        if now > begin:
            begin = now
        at = event.at
        operation.begin = begin
        operation.end = stream.free = begin if at is None or at < begin else at

    # -- the host ------------------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """The host's clock, in microseconds."""
        return self._shared.now

    def host(self, us: float) -> None:
        """The host does something else for `us` microseconds. Raises `ConfigurationError` if that is negative."""
        if not 0.0 <= us < INFINITE:
            raise no_time("host", us)
        self._shared.now += us

    def clock(self) -> int:
        """The host's clock in nanoseconds, for whoever takes a `perf_counter_ns`."""
        return round(self._shared.now * 1000)

    def wait_for_host(self, stream: VirtualStream | None = None) -> None:
        """The host waits until all that `stream` (default: the current one) holds is done.

        DeepEP's high-throughput dispatch does so, for its counts.

        Raises:
            GraphCaptureError: a stream that the host waits for is being captured.
        """
        if stream is None:
            stream = self._thread.stream or self.default_stream
        self._refuse_while_captured(stream)
        self._jump(self.program.add("host_wait", stream.name, "wait"), stream.free)

    def synchronize(self) -> None:
        """The host waits until everything enqueued so far is done, on every stream.

        Raises:
            GraphCaptureError: a stream is being captured.
        """
        for stream in self._shared.streams:
            self._refuse_while_captured(stream)
        self._jump(
            self.program.add("host_wait", None, "synchronize"), max(stream.free for stream in self._shared.streams)
        )

    def _wait_for_event(self, event: VirtualEvent) -> None:
        self._refuse_while_captured(self._thread.stream or self.default_stream)
        if event.graph is not None and (not event.external or event.graph.open):
            raise GraphCaptureError(f"event {event.number} was captured into a graph; the host cannot wait for it")
        operation = self.program.add("host_wait", event.stream, "wait for event", event=event.number)
        self._jump(operation, self.now if event.at is None else event.at)

    def _jump(self, operation: Operation, to: float) -> None:
        shared = self._shared
        operation.begin = shared.now
        if to > shared.now:
            shared.now = to
        operation.end = shared.now

    def _refuse_while_captured(self, stream: VirtualStream) -> None:
        if stream.graph is not None:
            raise GraphCaptureError(
                f"the host waits for the device while stream {stream.name!r} is being captured; nothing runs there, "
                "and CUDA makes the capture fail"
            )
