"""What must be true of the thread whenever a microbatch runs on it, and who sees to it (law 3).

The scheduler only brackets: it calls these methods round every slice and knows nothing of what they keep. Torch's part
is in `thread_state`; what is here needs no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .devices import Device
    from .step import Microbatch

__all__ = ["PlainSwitchState", "StreamKeeper", "SwitchState"]


class SwitchState(Protocol):
    """Keeps thread state apart; one object serves one step.

    `start` remembers the thread's state as the baseline. After each slice `unchanged` says whether it is still on: most
    slices end with that, and it must cost next to nothing. Where it is not, `leave` moves the difference into
    `microbatch.saved_state` and puts the baseline back. `resume` is called only where `saved_state` is not None: it
    puts that state on round `switch(argument)` and then takes off again what differs. `finish` ends the step, also a
    failed one, with the baseline on.

    The current stream is no part of this: it changes at many yields, and putting the baseline's back between two
    slices that want the same other one would be two changes for nothing. The hub itself keeps it, by `streams`, and
    changes it only where the next slice wants another one than the last slice left.

    `thread_begin` and `thread_end` bracket a microbatch that is carried by an OS thread of its own.
    `unsafe_call(frame)` names the operator whose C++ frame lies between a parked microbatch's yield and its entry.
    """

    streams: StreamKeeper | None

    def start(self) -> None: ...
    def unchanged(self) -> bool: ...
    def leave(self, microbatch: Microbatch) -> None: ...
    def resume(self, microbatch: Microbatch, switch: Callable[[Any], Any], argument: Any) -> Any: ...
    def finish(self) -> None: ...
    def thread_begin(self) -> None: ...
    def thread_end(self) -> None: ...
    def unsafe_call(self, frame: FrameType | None) -> str | None: ...


class StreamKeeper:
    """The current stream of `device` during one step: `key()` names it, `put(key)` makes it current.

    `baseline` is the key of the stream on which the step began; `meet()` lets the device remember the current one, so
    that `put` can find it again.
    """

    __slots__ = ("baseline", "key", "meet", "put")

    def __init__(self, device: Device) -> None:
        self.meet: Callable[[], Any] = device.current_stream
        # A device without keys, as a test may write it, is served by its stream objects.
        keyed = hasattr(device, "stream_key") and hasattr(device, "put_stream")
        self.key: Callable[[], Any] = device.stream_key if keyed else device.current_stream
        self.put: Callable[[Any], None] = device.put_stream if keyed else device.set_stream
        self.meet()
        self.baseline = self.key()

    def restore(self) -> None:
        """The stream on which the step began is current."""
        if self.key() != self.baseline:
            self.put(self.baseline)


class PlainSwitchState:
    """Without torch: the current stream of `device` (None: nothing at all) is all there is to keep."""

    def __init__(self, device: Device | None = None) -> None:
        self._device = device
        self.streams: StreamKeeper | None = None

    def start(self) -> None:
        if self._device is not None:
            self.streams = StreamKeeper(self._device)

    def unchanged(self) -> bool:
        return True

    def leave(self, microbatch: Microbatch) -> None:
        microbatch.saved_state = None

    def resume(self, microbatch: Microbatch, switch: Callable[[Any], Any], argument: Any) -> Any:
        """Never called: nothing is ever saved."""
        return switch(argument)

    def finish(self) -> None:
        if self.streams is not None:
            self.streams.restore()

    def thread_begin(self) -> None:
        """A new thread has its own current stream, and the carrier puts it on the microbatch's."""

    def thread_end(self) -> None:
        """The thread ends, and its current stream with it."""

    def unsafe_call(self, frame: FrameType | None) -> str | None:
        """Also a program that wants no state kept apart may yield under an operator; without torch there is none."""
        if "torch" not in sys.modules:
            return None
        from .unsafe_calls import find_unsafe_call

        return find_unsafe_call(frame)
