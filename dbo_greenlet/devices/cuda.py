"""CUDA through torch's public calls.

The current stream is asked of torch and mapped to one object per stream, because code inside a slice may change it
behind our back (`with torch.cuda.stream(...)`). The raw entry points that make this cheap are guarded and come with the
fast path; what is here is right first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..errors import ConfigurationError

__all__ = ["CudaDevice", "CudaStream"]


class CudaStream:
    """A torch stream with a name for traces; one object per CUDA stream and device."""

    __slots__ = ("name", "raw")

    def __init__(self, raw: torch.cuda.Stream, name: str) -> None:
        self.raw = raw
        self.name = name

    def __repr__(self) -> str:
        return f"CudaStream({self.name!r}, {self.raw.cuda_stream:#x})"


class CudaDevice:
    """The device protocol on one CUDA device.

    Args:
        index: device index; None takes the current one.

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
        self._known: dict[int, CudaStream] = {}

    def _wrap(self, raw: torch.cuda.Stream, name: str) -> CudaStream:
        known = self._known.get(raw.cuda_stream)
        if known is None:
            known = self._known[raw.cuda_stream] = CudaStream(raw, name)
        return known

    def new_stream(self, name: str) -> CudaStream:
        return self._wrap(torch.cuda.Stream(device=self.index), name)

    def new_event(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def current_stream(self) -> CudaStream:
        raw = torch.cuda.current_stream(self.index)
        return self._wrap(raw, "compute" if raw.cuda_stream == 0 else f"stream {raw.cuda_stream:#x}")

    def set_stream(self, stream: CudaStream) -> None:
        torch.cuda.set_stream(stream.raw)

    def record(self, event: torch.cuda.Event, stream: CudaStream) -> None:
        event.record(stream.raw)

    def wait(self, stream: CudaStream, event: torch.cuda.Event) -> None:
        stream.raw.wait_event(event)

    @contextmanager
    def stream_scope(self, stream: CudaStream) -> Iterator[None]:
        with torch.cuda.stream(stream.raw):
            yield

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.index)
