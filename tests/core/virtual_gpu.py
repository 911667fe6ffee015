"""A GPU whose clock is a number: streams that run work of stated lengths, timing events, and graphs of both.

Work starts when its stream is free and no earlier than the host enqueued it. In a capture everything is noted instead,
and each replay runs the notes. The host's clock moves only where a test or a wait for the GPU moves it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class VirtualStream:
    def __init__(self, name: str) -> None:
        self.name = name
        self.free = 0.0  # microseconds at which everything enqueued so far is done
        self.capture: list[Callable[[], None]] | None = None


class Host:
    """What every copy of the device shares."""

    def __init__(self) -> None:
        self.now = 0.0  # microseconds
        self.ask = 0.0  # microseconds that a look at the clock takes
        self.records = 0
        self.ran: list[tuple[str, float, float]] = []  # (stream, begin, end) of each piece of work


class VirtualEvent:
    def __init__(self, host: Host) -> None:
        self._host = host
        self.at: float | None = None  # of the latest record that ran

    def synchronize(self) -> None:
        if self.at is not None:
            self._host.now = max(self._host.now, self.at)

    def elapsed_time(self, later: VirtualEvent) -> float:
        if self.at is None or later.at is None:
            raise RuntimeError("an event was never recorded")
        assert max(self.at, later.at) <= self._host.now, "asked for before the host waited for it"
        return (later.at - self.at) / 1000


class VirtualGpu:
    """The device protocol, with timing events; also its own clock."""

    name = "cuda:0"

    def __init__(self) -> None:
        self.host = Host()
        self.default = VirtualStream("compute")
        self.events: list[VirtualEvent] = []
        self._thread = threading.local()

    # -- the device ----------------------------------------------------------------------------------------------------

    def new_stream(self, name: str) -> VirtualStream:
        return VirtualStream(name)

    def new_event(self) -> VirtualEvent:
        return VirtualEvent(self.host)

    def new_timing_event(self) -> VirtualEvent:
        self.events.append(VirtualEvent(self.host))
        return self.events[-1]

    def current_stream(self) -> VirtualStream:
        return getattr(self._thread, "stream", self.default)

    def set_stream(self, stream: VirtualStream) -> None:
        self._thread.stream = stream

    stream_key = current_stream
    put_stream = set_stream

    def record(self, event: VirtualEvent, stream: VirtualStream) -> None:
        self.host.records += 1

        def mark() -> None:
            event.at = max(stream.free, self.host.now)

        self._enqueue(stream, mark)

    def wait(self, stream: VirtualStream, event: VirtualEvent) -> None:
        def hold() -> None:
            stream.free = max(stream.free, event.at or 0.0)

        self._enqueue(stream, hold)

    @contextmanager
    def stream_scope(self, stream: VirtualStream) -> Iterator[None]:
        before = self.current_stream()
        self._thread.stream = stream
        try:
            yield
        finally:
            self._thread.stream = before

    def synchronize(self) -> None:
        """Nobody here asks for it."""

    # -- what tests call -----------------------------------------------------------------------------------------------

    def clock(self) -> int:
        """The host's nanoseconds; its microsecond 0 is 5 ms."""
        self.host.now += self.host.ask
        return round((self.host.now + 5000) * 1000)

    def work(self, length: float, stream: VirtualStream | None = None) -> None:
        """Enqueue work that takes `length` microseconds."""
        where = self.current_stream() if stream is None else stream

        def run() -> None:
            begin = max(where.free, self.host.now)
            where.free = begin + length
            self.host.ran.append((where.name, begin, where.free))

        self._enqueue(where, run)

    def capturing(self) -> bool:
        return self.current_stream().capture is not None

    def capture(self, run: Callable[[], Any], streams: Sequence[VirtualStream]) -> Callable[[], None]:
        """What `run` enqueues on `streams`, as a function that replays it: forked from the first, joined to it."""
        nodes: list[Callable[[], None]] = []
        for stream in streams:
            stream.capture = nodes
        try:
            run()
        finally:
            for stream in streams:
                stream.capture = None

        def replay() -> None:
            for stream in streams:
                stream.free = max(streams[0].free, self.host.now)
            for node in nodes:
                node()
            streams[0].free = max(stream.free for stream in streams)

        return replay

    def _enqueue(self, stream: VirtualStream, action: Callable[[], None]) -> None:
        if stream.capture is None:
            action()
        else:
            stream.capture.append(action)
