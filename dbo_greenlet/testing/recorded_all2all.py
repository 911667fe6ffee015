"""An all-to-all that notes its sends and receives in a stream program: what a dispatch mode cannot see.

`RecordedAllToAll` stands where the all-to-all would. What it notes depends on the transport:

    torch_distributed   a send and a receive for each message, with its buffers: in use from the one to the other
    DeepEP              what each call of the library touches, and its events (`recorded_deepep`)
    loopback, others    a send and a receive for each part, without buffers: what they copy are operators. Whether each
                        receive ran, and once, can be told from that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..all2all.torch_distributed import TorchDistributed
from ..stream_program import RecordingDevice, Transfer
from .torch_accesses import memory_of

__all__ = ["RecordedAllToAll"]


class RecordedAllToAll:
    """An `AllToAll` that is `all_to_all`, and notes what it does in the program of `device`.

    `detach()` ends that; until then `all_to_all` itself notes as well, where its inner calls are what is noted.
    """

    def __init__(self, all_to_all: Any, device: RecordingDevice) -> None:
        self.inner = all_to_all
        self._device = device
        self._restore: Callable[[], None] = _nothing
        self._generic = False
        if isinstance(all_to_all, TorchDistributed):
            group = all_to_all.group
            all_to_all.group = _RecordedGroup(group, device)  # type: ignore[assignment]
            self._restore = lambda: setattr(all_to_all, "group", group)
        elif str(all_to_all.name).startswith("deepep"):
            from .recorded_deepep import record_deepep

            self._restore = record_deepep(all_to_all, device)
        else:
            self._generic = True

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # while being copied or unpickled there is none yet
            raise AttributeError(name)
        return getattr(self.inner, name)

    def detach(self) -> None:
        """Note nothing more, also of dispatches that are under way."""
        self._restore()
        self._restore = _nothing
        self._generic = False

    def dispatch_send(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Any:
        sent = self.inner.dispatch_send(hidden, topk_ids, topk_weights)
        return _RecordedDispatch(sent, self._device) if self._generic else sent


class _RecordedDispatch:
    """A dispatch whose four communicating parts are noted; everything else is the transport's own."""

    def __init__(self, inner: Any, device: RecordingDevice) -> None:
        self.inner = inner
        self._device = device
        self._transfer = device.send("dispatch").transfer
        self._sent = inner.bytes_sent
        if self._transfer is not None:
            self._transfer.bytes = self._sent

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def finish_dispatch(self) -> None:
        self._receive(self.inner.finish_dispatch)

    def combine_send(self, expert_outputs: Tensor) -> None:
        self.inner.combine_send(expert_outputs)
        self._transfer = self._device.send("combine").transfer
        if self._transfer is not None:
            self._transfer.bytes = self.inner.bytes_sent - self._sent

    def finish_combine(self) -> None:
        self._receive(self.inner.finish_combine)

    def _receive(self, part: Callable[[], None]) -> None:
        with self._device.program.since_now():
            part()
            if self._transfer is not None:
                self._device.receive(self._transfer)


class _RecordedGroup:
    """A group of ranks whose all-to-alls are noted."""

    def __init__(self, inner: Any, device: RecordingDevice) -> None:
        self.inner = inner
        self._device = device

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def all_to_all(self, received: Tensor, message: Tensor, *arguments: Any, **named: Any) -> Any:
        memory = memory_of(self._device)
        transfer = self._device.send("all-to-all", memory.accesses([message], [received])).transfer
        if transfer is not None:
            transfer.bytes = self._to_others(message, *arguments)
        in_flight = self.inner.all_to_all(received, message, *arguments, **named)
        return in_flight if transfer is None else _InFlight(in_flight, self._device, transfer, received, message)

    def _to_others(self, message: Tensor, received_rows: Sequence[int] = (), sent_rows: Sequence[int] = ()) -> int:
        """Bytes of the message for other ranks: rows for each, or the same number for all."""
        rows, ranks = message.shape[0], self.inner.world_size
        own = sent_rows[self.inner.rank] if len(sent_rows) else rows // ranks
        return int((rows - own) * message.shape[1] * message.element_size())


class _InFlight:
    """What `all_to_all` returned, with the wait noted."""

    def __init__(
        self, inner: Any, device: RecordingDevice, transfer: Transfer, received: Tensor, message: Tensor
    ) -> None:
        self._inner = inner
        self._device = device
        self._transfer = transfer
        self._accesses = memory_of(device).accesses([message], [received])

    def wait(self, *arguments: Any) -> Any:
        self._device.receive(self._transfer, self._accesses)
        return self._inner.wait(*arguments)


def _nothing() -> None:
    """There is nothing to undo."""
