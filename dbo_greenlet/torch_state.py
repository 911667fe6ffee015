"""Reading torch's thread state, taking it off, putting it back.

There are setters for most parts of it, but none for inference mode and the dispatcher's key sets. There are guards for
these, and a guard restores on exit whatever was there when it was entered: unconditionally, and in any order. So the
guards that put the caller's state on when a microbatch leaves *are* its saved state. They stay entered while it is
parked; leaving them gives the thread back exactly what the microbatch had, whatever happened meanwhile. (Reading the
state and rebuilding it with guards round each switch works too and was rejected: it needs a second set of guards round
every slice.)

A guard that is garbage-collected while entered restores as well, at that moment. So no entered guard may outlive the
step: whoever owns a `Parked` whose microbatch never came back leaves its guards, and puts the caller's state on with
`Baseline.restore`, which keeps no guard entered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._device as torch_device
import torch.utils._python_dispatch as torch_dispatch

from .torch_observe import (
    _AUTOCAST,
    _CACHE,
    _CALLBACK,
    _CPU_DTYPE,
    _DEVICE,
    _DISPATCH,
    _DISPATCH_FLAGS,
    _DISPATCH_ON,
    _DISPATCHES,
    _EXCLUDE,
    _FLAGS,
    _FUNCTION,
    _FUNCTION_OFF,
    _FUNCTION_ON,
    _FUNCTIONS,
    _GUARDED,
    _INCLUDE,
    _INFERENCE,
    _NESTING,
    Observation,
    _autocast_deeper,
    _autocast_dtype,
    _autocast_shallower,
    _dispatch_at,
    _dispatch_depth,
    _dispatch_globals,
    _function_at,
    _function_depth,
    _is_forward_grad,
    _is_grad,
    _is_multithreading,
    _is_view_replay,
    observe,
    quick_check,
)

__all__ = ["Baseline", "Parked", "observe"]

# Bound once: these run at every yield, and an attribute look-up through `torch._C` costs as much as the call.
_set_grad = torch._C._set_grad_enabled
_set_forward_grad = torch._C._set_fwd_grad_enabled
_set_multithreading = torch._C._set_multithreading_enabled
_set_view_replay = torch._C._set_view_replay_enabled

_push_dispatch = torch._C._push_on_torch_dispatch_stack
_pop_dispatch = torch._C._pop_torch_dispatch_stack

_push_function = torch._C._push_on_torch_function_stack
_pop_function = torch._C._pop_torch_function_stack
_set_function_state = torch._C._set_torch_function_state
_FunctionState = torch._C._TorchFunctionState

_set_autocast_dtype = torch.set_autocast_dtype
_set_autocast_cache = torch.set_autocast_cache_enabled
_is_any_autocast = torch._C._is_any_autocast_enabled
_clear_autocast_cache = torch.clear_autocast_cache

_set_frame_callback = torch._C._dynamo.eval_frame.set_eval_frame

_InferenceGuard = torch._C._InferenceMode  # entered by construction
_KeySetGuard = torch._C._ForceDispatchKeyGuard

_set_ignore_flag = getattr(torch._C._dynamo.guards, "set_is_in_mode_without_ignore_compile_internals", None)

_ABSENT = object()


class Values:
    """An observation together with what it only identifies: the modes, the module globals, the other autocast dtype.

    Each `put_*` makes one part the thread's own; their argument `seen` is what the thread has now.
    """

    __slots__ = ("cuda_dtype", "device_context", "dispatch_modes", "function_modes", "seen")

    def __init__(self, seen: Observation) -> None:
        self.seen = seen
        self.cuda_dtype = _autocast_dtype("cuda")
        self.dispatch_modes: tuple[Any, ...] = ()
        self.function_modes: tuple[Any, ...] = ()
        # torch.set_default_device: a function mode at the bottom of the stack, and two variables.
        self.device_context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", _ABSENT)
        if seen[_DISPATCH]:
            self.dispatch_modes = tuple(_dispatch_at(i) for i in range(_dispatch_depth()))
        if seen[_FUNCTION]:
            self.function_modes = tuple(_function_at(i) for i in range(_function_depth()))

    def put_dispatch_modes(self, seen: Observation) -> None:
        if seen[_DISPATCHES] == self.seen[_DISPATCHES]:
            return
        if seen[_DISPATCH] != self.seen[_DISPATCH]:
            for _ in range(_dispatch_depth()):
                _pop_dispatch(None)  # whichever is on top
            for mode in self.dispatch_modes:
                _push_dispatch(mode)
        flags = self.seen[_DISPATCH_ON]
        if flags != seen[_DISPATCH_ON]:
            _dispatch_globals.update(zip(_DISPATCH_FLAGS, flags, strict=False))
            if _set_ignore_flag is not None:
                _set_ignore_flag(torch_dispatch._is_in_any_mode_without_ignore_compile_internals)

    def put_function_modes(self, seen: Observation) -> None:
        if seen[_FUNCTIONS] == self.seen[_FUNCTIONS]:
            return
        if seen[_FUNCTION] != self.seen[_FUNCTION]:
            for _ in range(_function_depth()):
                _pop_function()
            for mode in self.function_modes:
                _push_function(mode)
        torch_device.CURRENT_DEVICE = self.seen[_DEVICE]
        if self.device_context is not _ABSENT:
            torch._GLOBAL_DEVICE_CONTEXT.device_context = self.device_context
        elif hasattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context"):
            # Some versions take None there for a device.
            del torch._GLOBAL_DEVICE_CONTEXT.device_context

    def put_function_state(self) -> None:
        if self.seen[_FUNCTION_ON]:
            _set_function_state(_FunctionState.ENABLED)
        elif self.seen[_FUNCTION_OFF]:
            _set_function_state(_FunctionState.ALL_DISABLED)
        else:
            _set_function_state(_FunctionState.SUBCLASSES_DISABLED)

    def put_flags(self) -> None:
        """Grad mode and its relatives. An inference guard sets all of them."""
        grad, forward_grad, multithreading, view_replay = self.seen[_FLAGS]
        if _is_grad() is not grad:
            _set_grad(grad)
        if _is_forward_grad() is not forward_grad:
            _set_forward_grad(forward_grad)
        if _is_multithreading() is not multithreading:
            _set_multithreading(multithreading)
        if _is_view_replay() is not view_replay:
            _set_view_replay(view_replay)

    def put_autocast(self) -> None:
        """Everything of autocast but whether it is on, which is in the exclude set."""
        wanted = self.seen[_NESTING]
        depth = _autocast_deeper() and _autocast_shallower()
        while depth < wanted:
            depth = _autocast_deeper()
        while depth > wanted:
            depth = _autocast_shallower()
        _set_autocast_cache(self.seen[_CACHE])
        _set_autocast_dtype("cpu", self.seen[_CPU_DTYPE])
        _set_autocast_dtype("cuda", self.cuda_dtype)


def _hide_from_function_modes(seen: Observation, wanted: Observation) -> bool:
    """Torch's setters call the active function modes, and a mode of the model must not see the scheduler at work.

    Returns whether the torch-function state has to be put on afterwards.
    """
    if seen[_FUNCTION] or wanted[_FUNCTION]:
        _set_function_state(_FunctionState.ALL_DISABLED)
        return True
    return bool(seen[_FUNCTIONS] != wanted[_FUNCTIONS])


class Baseline(Values):
    """A state to come back to: the hub's at step begin, on the thread that makes this object."""

    __slots__ = ("holds",)

    def __init__(self, seen: Observation) -> None:
        super().__init__(seen)
        self.holds: Callable[[], bool] = quick_check(seen)

    def restore(self, seen: Observation) -> None:
        """Make this the thread's state, whatever it is now (`seen`), and keep no guard entered.

        The first two guards build the state and the third remembers it; leaving the first two undoes it, and leaving
        the third puts it on.
        """
        _hide_from_function_modes(seen, self.seen)
        self.put_dispatch_modes(seen)
        inference = self.seen[_INFERENCE]
        guard = _InferenceGuard(inference)
        keys = _KeySetGuard(self.seen[_INCLUDE], self.seen[_EXCLUDE])
        keys.__enter__()
        self.put_flags()
        remembered = _InferenceGuard(inference)
        keys.__exit__(None, None, None)
        guard.__exit__(None, None, None)
        remembered.__exit__(None, None, None)
        self.put_function_modes(seen)
        self.put_autocast()
        _clear_autocast_cache()
        _set_frame_callback(self.seen[_CALLBACK])
        self.put_function_state()


class Parked:
    """What a parked microbatch had on the thread, where that differs from the baseline.

    Attributes of its owner's, kept here: `extras` (what is not torch's: function, the microbatch's value), `ranges`.
    """

    __slots__ = ("_autocast_differs", "_guard", "_keys", "_values", "extras", "ranges")

    def __init__(self) -> None:
        self._values: Values | None = None
        self._guard: Any = None
        self._keys: Any = None
        self._autocast_differs = False
        self.extras: list[tuple[Any, Any]] = []
        self.ranges: list[Any] = []

    def take_off(self, seen: Observation, base: Baseline) -> None:
        """From the microbatch's state (`seen`) to the baseline."""
        values = Values(seen)
        wanted = base.seen
        self._values = values
        self._autocast_differs = (
            seen[_AUTOCAST] != wanted[_AUTOCAST]
            or seen[_EXCLUDE] != wanted[_EXCLUDE]
            or values.cuda_dtype != base.cuda_dtype
        )
        functions_differ = _hide_from_function_modes(seen, wanted)
        if _is_any_autocast():
            # The cache gives a weight's cast without asking for which dtype and grad mode it was made.
            _clear_autocast_cache()
        if seen[_GUARDED] != wanted[_GUARDED]:
            # In this order: the first guard must still see the microbatch's modes, which are part of its key sets,
            # and the key sets are forced after the stacks were changed, because that changes them, too.
            self._guard = _InferenceGuard(wanted[_INFERENCE])
            base.put_dispatch_modes(seen)
            self._keys = _KeySetGuard(wanted[_INCLUDE], wanted[_EXCLUDE])
            self._keys.__enter__()
        else:
            base.put_dispatch_modes(seen)
        base.put_flags()
        base.put_function_modes(seen)
        if self._autocast_differs:
            base.put_autocast()
        if seen[_CALLBACK] is not wanted[_CALLBACK]:
            _set_frame_callback(wanted[_CALLBACK])
        if functions_differ:
            base.put_function_state()

    def put_on(self, base: Baseline) -> None:
        """From the baseline to the microbatch's state."""
        values = self._values
        if values is None:
            return
        seen, wanted = base.seen, values.seen
        functions_differ = _hide_from_function_modes(seen, wanted)
        if _is_any_autocast():
            _clear_autocast_cache()
        if self._autocast_differs:
            values.put_autocast()
        if seen[_CALLBACK] is not wanted[_CALLBACK]:
            _set_frame_callback(wanted[_CALLBACK])
        values.put_function_modes(seen)
        values.put_dispatch_modes(seen)
        if self._guard is not None:
            self.leave_guards()
        else:
            values.put_flags()
        if functions_differ:
            values.put_function_state()

    def leave_guards(self) -> None:
        """Leave the guards: the thread then has the microbatch's key sets and flags. A second time does nothing."""
        keys, self._keys = self._keys, None
        if keys is not None:
            keys.__exit__(None, None, None)
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.__exit__(None, None, None)
