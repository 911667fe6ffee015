"""The CPU: work is done when it is called, so a stream is only a name and an event only a mark.

They are kept all the same, per OS thread as CUDA keeps them: the schedule, the trace and the tests of stream handling
are then the same without a GPU. The marks are counters, so that a test can see which record a wait refers to.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["CpuDevice", "CpuEvent", "CpuStream"]


class CpuStream:
    """A named timeline; `marks` counts the events recorded on it."""

    __slots__ = ("marks", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.marks = 0

    def __repr__(self) -> str:
        return f"CpuStream({self.name!r})"


class CpuEvent:
    """The latest mark: which stream, and its how-manieth. None before the first record."""

    __slots__ = ("mark", "stream")

    def __init__(self) -> None:
        self.stream: CpuStream | None = None
        self.mark = 0


class _Current(threading.local):
    stream: CpuStream | None = None


class CpuDevice:
    """The device protocol on the CPU."""

    name = "cpu"

    def __init__(self) -> None:
        self.default_stream = CpuStream("compute")
        self._current = _Current()

    def new_stream(self, name: str) -> CpuStream:
        return CpuStream(name)

    def new_event(self) -> CpuEvent:
        return CpuEvent()

    def current_stream(self) -> CpuStream:
        return self._current.stream or self.default_stream

    def set_stream(self, stream: CpuStream) -> None:
        self._current.stream = stream

    def stream_key(self) -> CpuStream:
        """A stream of this device is its own key."""
        return self.current_stream()

    def put_stream(self, key: CpuStream) -> None:
        self.set_stream(key)

    def record(self, event: CpuEvent, stream: CpuStream) -> None:
        stream.marks += 1
        event.stream, event.mark = stream, stream.marks

    def wait(self, stream: CpuStream, event: CpuEvent) -> None:
        """Nothing to wait for: what the event marks was complete when it was called."""

    @contextmanager
    def stream_scope(self, stream: CpuStream) -> Iterator[None]:
        previous = self._current.stream
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = previous

    def synchronize(self) -> None:
        """Nothing is ever pending."""
