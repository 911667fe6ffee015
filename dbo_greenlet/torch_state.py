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
from operator import itemgetter
from typing import Any

import torch
import torch.utils._device as torch_device
import torch.utils._python_dispatch as torch_dispatch

from . import key_sets, thread_words

__all__ = ["Baseline", "Parked", "observe"]

# Bound once: these run at every yield, and an attribute look-up through `torch._C` costs as much as the call.
_include_set = torch._C._dispatch_tls_local_include_set
_exclude_set = torch._C._dispatch_tls_local_exclude_set
_is_grad = torch.is_grad_enabled
_is_inference = torch.is_inference_mode_enabled
_is_forward_grad = torch._C._is_fwd_grad_enabled
_is_multithreading = torch._C._is_multithreading_enabled
_is_view_replay = torch._C._is_view_replay_enabled
_set_grad = torch._C._set_grad_enabled
_set_forward_grad = torch._C._set_fwd_grad_enabled
_set_multithreading = torch._C._set_multithreading_enabled
_set_view_replay = torch._C._set_view_replay_enabled

_dispatch_depth = torch._C._len_torch_dispatch_stack
_dispatch_at = torch._C._get_dispatch_stack_at
_push_dispatch = torch._C._push_on_torch_dispatch_stack
_pop_dispatch = torch._C._pop_torch_dispatch_stack

_function_depth = torch._C._len_torch_function_stack
_function_at = torch._C._get_function_stack_at
_push_function = torch._C._push_on_torch_function_stack
_pop_function = torch._C._pop_torch_function_stack
_is_function_enabled = torch._C._is_torch_function_enabled
_is_function_all_disabled = torch._C._is_torch_function_all_disabled
_set_function_state = torch._C._set_torch_function_state
_FunctionState = torch._C._TorchFunctionState

_autocast_deeper = torch.autocast_increment_nesting
_autocast_shallower = torch.autocast_decrement_nesting
_autocast_dtype = torch.get_autocast_dtype
_set_autocast_dtype = torch.set_autocast_dtype
_is_autocast_cache = torch.is_autocast_cache_enabled
_set_autocast_cache = torch.set_autocast_cache_enabled
_is_any_autocast = torch._C._is_any_autocast_enabled
_clear_autocast_cache = torch.clear_autocast_cache

# Dynamo runs the eager code between two compiled graphs with its callback on; a sibling must not inherit it.
_frame_callback = torch._C._dynamo.eval_frame.get_eval_frame_callback
_set_frame_callback = torch._C._dynamo.eval_frame.set_eval_frame

_InferenceGuard = torch._C._InferenceMode  # entered by construction
_KeySetGuard = torch._C._ForceDispatchKeyGuard

# Module globals that a dispatch mode sets from its beginning to its end, also while it is off the stack because it
# handles a call. Which of them exist depends on the torch version.
_DISPATCH_FLAGS = tuple(
    name
    for name in (
        "_is_in_torch_dispatch_mode",
        "_is_in_non_infra_torch_dispatch_mode",
        "_is_in_any_mode_without_ignore_compile_internals",
    )
    if hasattr(torch_dispatch, name)
)
_read_dispatch_flags: Any = itemgetter(*_DISPATCH_FLAGS, "__name__")  # the name for a tuple whatever the version
_dispatch_globals = vars(torch_dispatch)
_set_ignore_flag = getattr(torch._C._dynamo.guards, "set_is_in_mode_without_ignore_compile_internals", None)

_ABSENT = object()

# Positions in an observation.
_INCLUDE, _EXCLUDE, _INFERENCE, _DISPATCH, _DISPATCH_ON, _GRAD, _FORWARD_GRAD, _MULTITHREADING, _VIEW_REPLAY = range(9)
_FUNCTION, _FUNCTION_ON, _FUNCTION_OFF, _DEVICE, _NESTING, _CACHE, _CPU_DTYPE, _CALLBACK = range(9, 17)
_GUARDED = slice(_INCLUDE, _DISPATCH + 1)  # what only guards can set, and what changes it
_DISPATCHES = slice(_DISPATCH, _DISPATCH_ON + 1)
_FLAGS = slice(_GRAD, _VIEW_REPLAY + 1)
_FUNCTIONS = slice(_FUNCTION, _DEVICE + 1)
_AUTOCAST = slice(_NESTING, _CPU_DTYPE + 1)

Observation = tuple[Any, ...]


def observe() -> Observation:
    """The thread's torch state as one comparable tuple (positions above).

    Mode stacks appear as the identities of their modes, 0 where empty. Whether autocast is on for a device type is in
    the exclude set; its dtypes are witnessed by the nesting depth, which every `torch.autocast` scope changes, and by
    the CPU dtype.
    """
    dispatch = _dispatch_depth()
    function = _function_depth()
    return (
        _include_set(),
        _exclude_set(),
        _is_inference(),
        dispatch and tuple(id(_dispatch_at(i)) for i in range(dispatch)),
        _read_dispatch_flags(_dispatch_globals),
        _is_grad(),
        _is_forward_grad(),
        _is_multithreading(),
        _is_view_replay(),
        function and tuple(id(_function_at(i)) for i in range(function)),
        _is_function_enabled(),
        _is_function_all_disabled(),
        torch_device.CURRENT_DEVICE,
        # There is no getter for the nesting depth; each of the two returns the depth after it.
        _autocast_deeper() and _autocast_shallower(),
        _is_autocast_cache(),
        _autocast_dtype("cpu"),
        _frame_callback(),
    )


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


def quick_check(
    wanted: Observation,
    current_stream: Callable[[], Any] | None = None,
    ranges: Any = None,
    cuda_device: Callable[[], int] | None = None,
) -> Callable[[], bool]:
    """A function that says whether the thread's state is `wanted`: `observe() == wanted` at a third of its price.

    Every component is compared; only the key sets are read in another way, where `key_sets` has one. With
    `current_stream`, what it answers now is part of the state; with `ranges` (the module `profiling`), that none of
    them was ever opened; with `cuda_device`, the current device and CUDA's autocast dtype. A closure and not a method,
    because this is what a yield spends most of its time on: what it compares with is then at hand.
    """
    stream = None if current_stream is None else current_stream()
    device_index = None if cuda_device is None else cuda_device()
    cuda_dtype = _autocast_dtype("cuda")
    words = key_sets.view()
    flags = None if wanted[_FUNCTION] else thread_words.view()
    if words is None or wanted[_DISPATCH] or wanted[_FUNCTION]:
        return lambda: (
            observe() == wanted
            and (current_stream is None or current_stream() is stream)
            and (ranges is None or not ranges.used)
            and (cuda_device is None or (cuda_device() == device_index and _autocast_dtype("cuda") is cuda_dtype))
        )
    include, exclude = words
    if flags is not None:
        return _quickest_check(wanted, words, flags, current_stream, stream, ranges, cuda_device)
    # In the order of the positions above; what is not named is in the words, or known to be empty.
    (_, _, inference, _, dispatch_on, grad, forward_grad, multithreading, view_replay, _, function_on, function_off,
     device, nesting, cache, cpu_dtype, callback) = wanted  # fmt: skip

    def holds() -> bool:
        return (
            words[0] == include
            and words[1] == exclude
            and _is_grad() is grad
            and _is_inference() is inference
            and _is_forward_grad() is forward_grad
            and _is_multithreading() is multithreading
            and _is_view_replay() is view_replay
            and not _dispatch_depth()
            and _read_dispatch_flags(_dispatch_globals) == dispatch_on
            and not _function_depth()
            and _is_function_enabled() is function_on
            and _is_function_all_disabled() is function_off
            and torch_device.CURRENT_DEVICE is device
            and (_autocast_deeper() and _autocast_shallower()) == nesting
            and _is_autocast_cache() is cache
            and _autocast_dtype("cpu") is cpu_dtype
            and _frame_callback() is callback
            and (current_stream is None or current_stream() is stream)
            and (ranges is None or not ranges.used)
            and (cuda_device is None or (cuda_device() == device_index and _autocast_dtype("cuda") is cuda_dtype))
        )

    return holds


def _quickest_check(
    wanted: Observation,
    words: memoryview,
    flags: thread_words.ThreadWords,
    current_stream: Callable[[], Any] | None,
    stream: Any,
    ranges: Any,
    cuda_device: Callable[[], int] | None,
) -> Callable[[], bool]:
    """`quick_check` with most of its getters replaced by loads from memory, where the baseline has no mode on a stack.

    What need not be asked for then: a dispatch mode is in the include set, a default device is a function mode.
    """
    include, exclude = words
    autograd, mask, disabled, stack = flags
    on, state = autograd[0] & mask, disabled[0]
    device_index, cuda_dtype = cuda_device and cuda_device(), _autocast_dtype("cuda")
    nesting, cache, cpu_dtype, callback = wanted[_NESTING:]
    dispatch_on = wanted[_DISPATCH_ON]

    def holds() -> bool:
        return (
            words[0] == include
            and words[1] == exclude
            and autograd[0] & mask == on
            and disabled[0] == state
            and stack[0] == stack[1]
            and _read_dispatch_flags(_dispatch_globals) == dispatch_on
            and (_autocast_deeper() and _autocast_shallower()) == nesting
            and _is_autocast_cache() is cache
            and _autocast_dtype("cpu") is cpu_dtype
            and _frame_callback() is callback
            and (current_stream is None or current_stream() is stream)
            and (ranges is None or not ranges.used)
            and (cuda_device is None or (cuda_device() == device_index and _autocast_dtype("cuda") is cuda_dtype))
        )

    return holds


def brief_check(wanted: Observation) -> Callable[[], bool] | None:
    """Like `quick_check`, for a host whose model is known to yield under none of the things that it leaves out.

    By loads from memory alone, and Dynamo's callback: grad, inference and forward-AD flags, key sets (and with them
    autocast on or off, and dispatch modes) and function modes (and with them a default device). Left out: what
    autocast would do if it were on, which has no effect as long as it is not; the CUDA device; open ranges. The end of
    a step compares everything. None where the loads are not to be had.
    """
    words = key_sets.view()
    flags = None if wanted[_FUNCTION] else thread_words.view()
    if words is None or flags is None or wanted[_DISPATCH]:
        return None
    include, exclude = words
    autograd, mask, disabled, stack = flags
    on, state, callback = autograd[0] & mask, disabled[0], wanted[_CALLBACK]

    def holds() -> bool:
        return (
            words[0] == include
            and words[1] == exclude
            and autograd[0] & mask == on
            and disabled[0] == state
            and stack[0] == stack[1]
            and _frame_callback() is callback
        )

    return holds


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
