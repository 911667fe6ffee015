"""What a device must be able to do: streams, events, which stream is current, and one waiting for the other.

A handful of verbs is enough for every schedule this package knows, and few enough that a device can be written for a
test in a screen. Streams and events are opaque to everybody but their device.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from .cpu import CpuDevice

__all__ = ["CpuDevice", "Device", "Event", "Stream", "cpu_device"]


class Stream(Protocol):
    """An ordered queue of work."""

    @property
    def name(self) -> str: ...


class Event(Protocol):
    """A mark in a stream that another stream can wait for. May be recorded again; a wait means the latest mark."""


class Device(Protocol):
    """Raises nothing of its own; what the backend raises passes through."""

    @property
    def name(self) -> str: ...

    def new_stream(self, name: str) -> Any: ...
    def new_event(self) -> Any: ...

    def current_stream(self) -> Any:
        """The stream that is current on this OS thread. The same object as long as it is the same stream."""

    def set_stream(self, stream: Any) -> None: ...

    def stream_key(self) -> Any:
        """The current stream as something that is cheap to get and to compare with `==`."""

    def put_stream(self, key: Any) -> None:
        """Make the stream with that key current; `current_stream` was called while it was."""

    def record(self, event: Any, stream: Any) -> None:
        """Mark, in `event`, everything enqueued on `stream` so far."""

    def wait(self, stream: Any, event: Any) -> None:
        """What is enqueued on `stream` from now on runs behind the mark of `event`; the host does not wait."""

    def stream_scope(self, stream: Any) -> AbstractContextManager[None]:
        """`stream` is current inside, the previous one again afterwards."""

    def synchronize(self) -> None:
        """Block the host until everything enqueued so far is complete."""


_cpu = CpuDevice()


def cpu_device() -> CpuDevice:
    """The process's one CPU device."""
    return _cpu
