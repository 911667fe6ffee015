"""CUDA through torch, by the entry points that cost least.

On an H200 host `torch.cuda.current_stream()` takes 4.8 us, because it builds an object, and a yield would ask two or
three times. The raw handle takes 0.2 us, and one object for each stream is kept by handle. (Remembering which stream
was set, and not asking at all, was rejected: code inside a slice may change it behind our back, by
`with torch.cuda.stream(...)`.) Setting a stream, recording and waiting go past torch's Python wrappers to the methods
below them.

Every raw entry point is optional: where a torch does not have it, or where somebody has replaced the public function,
as engines do to keep their own note of the current stream, the public one is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch

from ..errors import ConfigurationError

__all__ = ["CudaDevice", "CudaStream", "EventPool", "cuda_device"]

_raw_current: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_raw_set: Callable[[int, int, int], None] | None = getattr(torch._C, "_cuda_setStream", None)
# None if somebody replaced it before this module was imported.
_is_torchs_own = getattr(torch.cuda.set_stream, "__module__", None) == torch.cuda.__name__
_public_set = torch.cuda.set_stream if _is_torchs_own else None
_event_base: Any = getattr(torch._C, "_CudaEventBase", None)
if _event_base is None or not issubclass(torch.cuda.Event, _event_base):
    _event_base = torch.cuda.Event


class CudaStream:
    """A torch stream with a name for traces; one object per CUDA stream and device. `key` is its raw handle."""

    __slots__ = ("address", "key", "name", "raw")

    def __init__(self, raw: torch.cuda.Stream, name: str) -> None:
        self.raw = raw
        self.name = name
        self.key: int = raw.cuda_stream
        # What torch sets a stream by.
        self.address = (raw.stream_id, raw.device_index, raw.device_type)

    def __repr__(self) -> str:
        return f"CudaStream({self.name!r}, {self.key:#x})"


class EventPool:
    """Events that are used again: making one costs as much as recording it, and freeing it as much once more.

    An event that is given back may still be waited for by work that is enqueued already: CUDA took note of the mark
    when the wait was enqueued, and recording it again changes nothing about that.
    """

    def __init__(self) -> None:
        self._idle: list[Any] = []

    def take(self) -> Any:
        """An event, to be recorded before anybody waits for it: what it marked last is another taker's."""
        return self._idle.pop() if self._idle else torch.cuda.Event()

    def give_back(self, event: Any) -> None:
        self._idle.append(event)


class CudaDevice:
    """The device protocol on one CUDA device.

    Args:
        index: device index; None takes the current one.

    Attributes: `index`, `name` ("cuda:0"), `event_pool`, and `stream_key()`, the raw handle of the stream that is
    current on this thread, as a number to compare with.

    Raises:
        ConfigurationError: torch sees no such CUDA device.
    """

    def __init__(self, index: int | None = None) -> None:
        if not torch.cuda.is_available():
            raise ConfigurationError("torch sees no CUDA device; use --device cpu, or a torch build with CUDA")
        self.index = torch.cuda.current_device() if index is None else index
        if not 0 <= self.index < torch.cuda.device_count():
            raise ConfigurationError(f"there is no CUDA device {self.index}; torch sees {torch.cuda.device_count()}")
        self.name = f"cuda:{self.index}"
        self.event_pool = EventPool()
        self._known: dict[int, CudaStream] = {}
        self.stream_key: Callable[[], int] = (
            self._public_key if _raw_current is None else partial(_raw_current, self.index)
        )
        # Bound here: an attribute of an instance costs less than a method, and there is one call at every yield.
        self.record: Callable[[Any, CudaStream], None] = _record
        self.wait: Callable[[CudaStream, Any], None] = _wait

    def _public_key(self) -> int:
        return int(torch.cuda.current_stream(self.index).cuda_stream)

    def _wrap(self, raw: torch.cuda.Stream, name: str) -> CudaStream:
        known = self._known.get(raw.cuda_stream)
        if known is None:
            known = self._known[raw.cuda_stream] = CudaStream(raw, name)
        return known

    def new_stream(self, name: str) -> CudaStream:
        return self._wrap(torch.cuda.Stream(device=self.index), name)

    def new_event(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def new_timing_event(self) -> torch.cuda.Event:
        """An event that keeps the time, and that a captured graph records anew in every replay."""
        return torch.cuda.Event(enable_timing=True, external=True)

    def current_stream(self) -> CudaStream:
        known = self._known.get(self.stream_key())
        return self._meet() if known is None else known

    def _meet(self) -> CudaStream:
        raw = torch.cuda.current_stream(self.index)
        return self._wrap(raw, "compute" if raw.cuda_stream == 0 else f"stream {raw.cuda_stream:#x}")

    def set_stream(self, stream: CudaStream) -> None:
        if _raw_set is not None and torch.cuda.set_stream is _public_set:
            _raw_set(*stream.address)
        else:
            torch.cuda.set_stream(stream.raw)

    def put_stream(self, key: int) -> None:
        """Make the stream with that handle current; it must have been met, by `current_stream` or `new_stream`."""
        if _raw_set is not None and torch.cuda.set_stream is _public_set:
            _raw_set(*self._known[key].address)
        else:
            torch.cuda.set_stream(self._known[key].raw)

    @contextmanager
    def stream_scope(self, stream: CudaStream) -> Iterator[None]:
        before = self.current_stream()
        # Setting a stream makes its device the current one.
        index = torch.cuda.current_device()
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(before)
            if index != self.index:
                torch.cuda.set_device(index)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.index)


def _record(event: Any, stream: CudaStream) -> None:
    _event_base.record(event, stream.raw)


def _wait(stream: CudaStream, event: Any) -> None:
    _event_base.wait(event, stream.raw)


@cache
def cuda_device(index: int) -> CudaDevice:
    """The process's one `CudaDevice` of that index, for whoever brings none of its own."""
    return CudaDevice(index)
