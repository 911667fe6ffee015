"""Thread state belongs to the microbatch: saved when it leaves the thread, put on when it comes back (law 3).

Torch keeps grad mode, inference mode, autocast, the dispatcher's key sets and the mode stacks per OS thread, and
restores them in the order in which scopes end. Microbatches on one thread end them in another order: where two of them
enter inference mode in turn, the thread stays in it when both have left. So each microbatch gets its own.

Most microbatches change nothing: the caller enters inference mode once, round the step. Then `leave` reads some
getters, compares one tuple and is done. What differs is taken off by `torch_state.Parked`.

Not covered, because torch keeps it per process and not per thread: `torch.backends` flags and `sdpa_kernel`, the
default dtype, determinism flags, the random generators. Not covered, because a yield inside makes no sense there:
functorch transforms (`vmap`, `grad`), tracing, saved-tensor hooks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from . import direct_ops, profiling, yields
from .ambient import AmbientHandle, Pair, ambient_pairs, register_ambient_state
from .switch_state import StreamKeeper
from .torch_observe import _DISPATCH, _FUNCTION, brief_check, observe, quick_check
from .torch_state import Baseline, Parked

if TYPE_CHECKING:
    from .devices import Device
    from .step import Microbatch

__all__ = ["AmbientHandle", "TorchThreadState", "register_ambient_state"]

# Traced code asks `yields.dbo_enabled()`. Only with torch there can be traced code.
yields._is_tracing = torch.compiler.is_compiling

_HAS_CUDA = hasattr(torch._C, "_cuda_getDevice")


class TorchThreadState:
    """The `SwitchState` of one step on torch. Make a new one for each step, also for a step inside a microbatch.

    Covers grad mode, inference mode, the forward-AD, multithreaded-backward and view-replay flags, the dispatcher's
    include and exclude sets, dispatch and function mode stacks with the default device, the torch-function state,
    autocast (on or off, dtypes, cache, nesting), Dynamo's frame callback, the current stream and CUDA device, open
    `dbo_range`s, and what `register_ambient_state` was told of.

    Args:
        device: whose current stream the hub keeps apart. None: CUDA's, if CUDA is in use.
        ambient: (save, restore) pairs to keep apart instead of the registered ones.
        host: the caller puts each microbatch's stream on itself, and its model yields under nothing exotic: the stream
            is not kept, and each slice is followed by `torch_observe.brief_check` instead of the whole comparison.
    """

    __slots__ = (
        "_ambient",
        "_base",
        "_depth",
        "_device",
        "_device_index",
        "_engaged",
        "_extras",
        "_host",
        "_parked",
        "_seen",
        "_threads",
        "_values",
        "streams",
        "unchanged",
    )

    def __init__(
        self, device: Device | None = None, ambient: tuple[Pair, ...] | None = None, *, host: bool = False
    ) -> None:
        self._device = device
        self._device_index: int | None = None
        self._ambient = ambient
        self._host = host
        self._threads: dict[int, Baseline] = {}
        self._parked: list[Parked] = []
        self.streams: StreamKeeper | None = None

    # -- the step ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Remember the thread's state as the baseline, and let registered custom ops be called directly."""
        extras = ambient_pairs() if self._ambient is None else self._ambient
        plain = not extras and not profiling.used
        device = self._device
        index = None
        if _HAS_CUDA and torch.cuda.is_initialized():
            index = torch._C._cuda_getDevice()
            extras = (*extras, *_CUDA_PAIRS)
            if device is None and not self._host:
                from .devices.cuda import cuda_device

                device = cuda_device(index)
        self._device_index = index
        self.streams = None if device is None else StreamKeeper(device)
        self._depth = profiling.depth()
        last = _last.start
        if plain and last is not None and last.holds(self._host, index):
            # The usual case by far: nothing about the thread has changed since its last step began.
            self._extras, self._values, self._seen, self._base, self.unchanged = last.parts
        else:
            self._extras, self._values = extras, [save() for save, _ in extras]
            self._seen = observe()
            self._base = Baseline(self._seen)
            self.unchanged = self._check(plain, index)
            # Modes belong to the model, and are not to be kept alive from one step to the next.
            modes = self._seen[_DISPATCH] or self._seen[_FUNCTION]
            _last.start = _Start(self, index) if plain and not modes else None
        self._engaged = direct_ops.engage()

    def _check(self, plain: bool, index: int | None) -> Callable[[], bool]:
        """What is asked after each slice."""
        if not plain:
            return self._unchanged_with_extras
        brief = brief_check(self._seen) if self._host else None
        return brief or quick_check(self._seen, profiling, None if index is None else torch._C._cuda_getDevice)

    def leave(self, microbatch: Microbatch) -> None:
        """Compare with the baseline; what differs goes to `microbatch.saved_state` and is taken off the thread."""
        same = self._base.holds()
        if same and self._extras_unchanged() and profiling.depth() == self._depth:
            microbatch.saved_state = None
            return
        parked = Parked()
        # First of all, so that `finish` knows of its guards whatever happens from here on.
        self._parked.append(parked)
        microbatch.saved_state = parked
        if not same:
            parked.take_off(observe(), self._base)
        for (save, restore), base in zip(self._extras, self._values, strict=True):
            value = save()
            if value is not base and value != base:
                parked.extras.append((restore, value))
                restore(base)
        parked.ranges = profiling.close_above(self._depth)

    def resume(self, microbatch: Microbatch, switch: Callable[[Any], Any], argument: Any) -> Any:
        """Put the microbatch's state on, switch to it, and do what `leave` does when it gives the thread back.

        Whatever `switch` raises comes out with the baseline on.
        """
        parked: Parked = microbatch.saved_state
        try:
            profiling.reopen(parked.ranges)
            for restore, value in reversed(parked.extras):
                restore(value)
            parked.put_on(self._base)
            self._parked.remove(parked)
            return switch(argument)
        finally:
            self.leave(microbatch)

    def finish(self) -> None:
        """The thread's state is the baseline again, also after a failure in the middle of `leave` or `resume`."""
        try:
            profiling.close_above(self._depth)
            for parked in self._parked:
                parked.leave_guards()
            self._parked.clear()
            if not self._base.holds():
                self._base.restore(observe())
            for (save, restore), base in zip(self._extras, self._values, strict=True):
                value = save()
                if value is not base and value != base:
                    restore(base)
        finally:
            try:
                if self.streams is not None:
                    self.streams.restore()
            finally:
                # Where it is a method of this object, the two would keep each other, and the caller's modes.
                self.unchanged = _is_over
                if self._engaged:
                    direct_ops.disengage()

    def _unchanged_with_extras(self) -> bool:
        return self._base.holds() and self._extras_unchanged() and profiling.depth() == self._depth

    def _extras_unchanged(self) -> bool:
        for (save, _), base in zip(self._extras, self._values, strict=True):
            value = save()
            if value is not base and value != base:
                return False
        return True

    # -- microbatches on threads of their own ------------------------------------------------------------------------

    def thread_begin(self) -> None:
        """In a new OS thread: put the hub's torch state on. The thread's own is remembered for `thread_end`."""
        seen = observe()
        self._threads[get_ident()] = Baseline(seen)
        if seen != self._seen:
            self._base.restore(seen)
        # A new thread stands on GPU 0, whatever the step's is: kernels that are launched where no stream of a device is
        # put on, as an all-to-all's, would go there.
        if self._device_index is not None and torch._C._cuda_getDevice() != self._device_index:
            torch.cuda.set_device(self._device_index)

    def thread_end(self) -> None:
        """Give the OS thread the state back that it had: modes left on its stack would outlive the step."""
        own = self._threads.pop(get_ident(), None)
        if own is not None:
            seen = observe()
            if seen != own.seen:
                own.restore(seen)

    # -- law 2 -------------------------------------------------------------------------------------------------------

    def unsafe_call(self, frame: FrameType | None) -> str | None:
        """The operator whose C++ frame lies between a parked microbatch's yield and its entry; None where none does."""
        return direct_ops.find_unsafe_call(frame)


def _is_over() -> bool:
    return True


class _Start:
    """What the beginning of a step found out about its thread, for the next step that begins in the same state."""

    __slots__ = ("_host", "_index", "parts")

    def __init__(self, state: TorchThreadState, index: int | None) -> None:
        self._host = state._host
        self._index = index
        self.parts = (state._extras, state._values, state._seen, state._base, state.unchanged)

    def holds(self, host: bool, index: int | None) -> bool:
        extras, values, _, base, _ = self.parts
        return (
            host == self._host
            and index == self._index
            and base.holds()
            and base.cuda_dtype is torch.get_autocast_dtype("cuda")
            and all(save() == value for (save, _), value in zip(extras, values, strict=True))
        )


class _Last(threading.local):
    start: _Start | None = None


_last = _Last()

# Save and restore of what CUDA keeps per thread, but for the stream.
_CUDA_PAIRS: tuple[Pair, ...] = (
    (
        (torch._C._cuda_getDevice, torch.cuda.set_device),
        (lambda: torch.get_autocast_dtype("cuda"), lambda value: torch.set_autocast_dtype("cuda", value)),
    )
    if _HAS_CUDA
    else ()
)
