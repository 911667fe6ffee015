"""What DeepEP does on the GPU, noted call by call: its kernels are no operators, and half run on a stream of its own.

Low latency: a send part reads the rows, the choices and, for a combine, the handle; what it returns belongs to the
transfer until its hook has run. High throughput: each call runs on DeepEP's stream (called "deepep" here), behind the
event that it is given, and ends with an event that it gives back; in a dispatch the host waits for the counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ..stream_program import Access, RecordingDevice, StreamProgram
from .tensor_memory import TensorMemory
from .torch_accesses import for_its_owner, memory_of

__all__ = ["record_deepep"]

_STREAM = "deepep"


def record_deepep(transport: Any, device: RecordingDevice) -> Callable[[], None]:
    """Note what `transport` (a `DeepEPTransport`) calls of the library; returns what ends that."""
    calls = _Calls(transport, device)
    replaced: dict[str, Callable[..., Any]] = {"call": calls.call}
    if hasattr(transport, "capture"):
        replaced["capture"] = calls.capture
    for name, method in replaced.items():
        setattr(transport, name, method)

    def restore() -> None:
        for name in replaced:
            delattr(transport, name)

    return restore


class _Calls:
    def __init__(self, transport: Any, device: RecordingDevice) -> None:
        self._device = device
        self._call = transport.call
        self._capture = getattr(transport, "capture", None)

    @property
    def _program(self) -> StreamProgram:
        return self._device.program

    @property
    def _memory(self) -> TensorMemory:
        return memory_of(self._device)

    def call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        with self._program.since_now():
            return self._noted(function, arguments, named)

    def _noted(self, function: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        inner = {key: value.inner if isinstance(value, _Event) else value for key, value in named.items()}
        with _paused(self._memory):
            result = self._call(function, *arguments, **inner)
        name = function.__name__
        given, made = list(_tensors((arguments, tuple(named.values())))), list(_tensors(result))
        if named.get("return_recv_hook"):
            return self._sent(name, given, made, result)
        behind = named.get("previous_event")
        if isinstance(behind, _Event):
            return self._ran(name, given, made, result, behind)
        return result

    def capture(self) -> _Event:
        event = self._capture() if self._capture is not None else None
        stream = self._device.name_stream(self._device.current_stream())
        with for_its_owner(self._program):
            self._program.add("record", stream, "capture", event=self._device.number_of(event))
        return _Event(event, self._device)

    def _sent(self, name: str, given: list[Tensor], made: list[Tensor], result: tuple[Any, ...]) -> tuple[Any, ...]:
        arrival = self._memory.accesses((), made)
        device, memory, hook = self._device, self._memory, result[-1]
        transfer = device.send(name, (*self._memory.accesses(given), *arrival)).transfer

        def receive() -> None:
            if transfer is not None:
                device.receive(transfer, arrival)
            with _paused(memory):
                hook()

        return (*result[:-1], receive)

    def _ran(
        self, name: str, given: list[Tensor], made: list[Tensor], result: tuple[Any, ...], behind: _Event
    ) -> tuple[Any, ...]:
        program, device = self._program, self._device
        accesses: tuple[Access, ...] = self._memory.accesses(given, made)
        with for_its_owner(program):
            program.add("wait", _STREAM, "wait", event=device.number_of(behind.inner))
            if name == "dispatch":
                program.add("work", _STREAM, "counts", tuple(each for each in accesses if not each.write))
                program.add("host_wait", _STREAM, "the host reads counts")
            program.add("work", _STREAM, name, accesses)
            done = result[-1]
            program.add("record", _STREAM, "record", event=device.number_of(done))
            if self._memory.notes_holds:
                self._note_holds(accesses)
        return (*result[:-1], _Event(done, device))

    def _note_holds(self, accesses: tuple[Access, ...]) -> None:
        """An asynchronous call marks all its tensors as used on DeepEP's stream and on the caller's.

        It does so below Python (`record_stream` in its C++ code, DeepEP 1.2), where no dispatch mode sees it.
        """
        device = self._device
        held = tuple(each._replace(write=False) for each in accesses)
        for stream in (_STREAM, device.name_stream(device.current_stream())):
            self._program.add("hold", stream, "record_stream", held)


class _Event:
    """An event of DeepEP's, with waits for it noted."""

    def __init__(self, inner: Any, device: RecordingDevice) -> None:
        self.inner = inner
        self._device = device

    def current_stream_wait(self) -> None:
        device = self._device
        stream = device.name_stream(device.current_stream())
        with for_its_owner(device.program):
            device.program.add("wait", stream, "wait", event=device.number_of(self.inner))
        with _paused(memory_of(device)):
            self.inner.current_stream_wait()


@contextmanager
def _paused(memory: TensorMemory) -> Iterator[None]:
    """What the library does to tensors is noted as a whole, and not by the operators that it may call for it."""
    memory.paused += 1
    try:
        yield
    finally:
        memory.paused -= 1


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
