"""Reading torch's thread state: all of it, or just enough to say that nothing changed.

`observe` asks for every component. The checks are what runs after each slice; they say what a comparison of
observations would say, at a fraction of its price.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
import torch.utils._device as torch_device
import torch.utils._python_dispatch as torch_dispatch

from . import autocast_words, key_sets, thread_words

__all__ = ["Observation", "brief_check", "observe", "quick_check"]

# Bound once: these run at every yield, and an attribute look-up through `torch._C` costs as much as the call.
_include_set = torch._C._dispatch_tls_local_include_set
_exclude_set = torch._C._dispatch_tls_local_exclude_set
_is_grad = torch.is_grad_enabled
_is_inference = torch.is_inference_mode_enabled
_is_forward_grad = torch._C._is_fwd_grad_enabled
_is_multithreading = torch._C._is_multithreading_enabled
_is_view_replay = torch._C._is_view_replay_enabled
_dispatch_depth = torch._C._len_torch_dispatch_stack
_dispatch_at = torch._C._get_dispatch_stack_at
_function_depth = torch._C._len_torch_function_stack
_function_at = torch._C._get_function_stack_at
_is_function_enabled = torch._C._is_torch_function_enabled
_is_function_all_disabled = torch._C._is_torch_function_all_disabled
_autocast_deeper = torch.autocast_increment_nesting
_autocast_shallower = torch.autocast_decrement_nesting
_autocast_dtype = torch.get_autocast_dtype
_is_autocast_cache = torch.is_autocast_cache_enabled
# Dynamo runs the eager code between two compiled graphs with its callback on; a sibling must not inherit it.
_frame_callback = torch._C._dynamo.eval_frame.get_eval_frame_callback

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
_FIRST_FLAG = "_is_in_torch_dispatch_mode"
_read_dispatch_flags: Any = itemgetter(*_DISPATCH_FLAGS, "__name__")  # the name for a tuple whatever the version
_dispatch_globals = vars(torch_dispatch)

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


def quick_check(
    wanted: Observation,
    ranges: Any = None,
    cuda_device: Callable[[], int] | None = None,
) -> Callable[[], bool]:
    """A function that says whether the thread's state is `wanted`: `observe() == wanted` at a third of its price.

    Every component is compared; only the key sets are read in another way, where `key_sets` has one. With `ranges` (the
    module `profiling`), it is part of the state that none of them was ever opened; with `cuda_device`, the current
    device and CUDA's autocast dtype. A closure and not a method, because this is what a yield spends most of its time
    on: what it compares with is then at hand.
    """
    device_index = None if cuda_device is None else cuda_device()
    cuda_dtype = _autocast_dtype("cuda")
    words = key_sets.view()
    flags = None if wanted[_FUNCTION] else thread_words.view()
    if words is None or wanted[_DISPATCH] or wanted[_FUNCTION]:
        return lambda: (
            observe() == wanted
            and (ranges is None or not ranges.used)
            and (cuda_device is None or (cuda_device() == device_index and _autocast_dtype("cuda") is cuda_dtype))
        )
    include, exclude = words
    if flags is not None:
        return _quickest_check(wanted, words, flags, ranges, cuda_device)
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
            and (ranges is None or not ranges.used)
            and (cuda_device is None or (cuda_device() == device_index and _autocast_dtype("cuda") is cuda_dtype))
        )

    return holds


def _quickest_check(
    wanted: Observation,
    words: memoryview,
    flags: thread_words.ThreadWords,
    ranges: Any,
    cuda_device: Callable[[], int] | None,
) -> Callable[[], bool]:
    """`quick_check` with most of its getters replaced by loads from memory, where the baseline has no mode on a stack.

    What need not be asked for then: a dispatch mode is in the include set, a default device is a function mode, and
    where there is one CUDA device, no other can be the current one. Of the globals that a dispatch mode sets, the first
    is set by every mode, so where none was set it tells for all. Where autocast's state can be read from memory too,
    what is left to call is Dynamo's callback.
    """
    include, exclude = words
    autograd, mask, disabled, stack = flags
    on, state = autograd[0] & mask, disabled[0]
    device_index, cuda_dtype = cuda_device and cuda_device(), cuda_device and _autocast_dtype("cuda")
    several = cuda_device if cuda_device is not None and torch.cuda.device_count() > 1 else None
    nesting, cache, cpu_dtype, callback = wanted[_NESTING:]
    dispatch_on = wanted[_DISPATCH_ON]
    autocast = autocast_words.view()
    if autocast is not None and _FIRST_FLAG in _dispatch_globals and not any(dispatch_on[:-1]):
        one, one_mask, two, two_mask = autocast
        one_value, two_value = one[0] & one_mask, two[0] & two_mask

        def loads_hold() -> bool:
            return (
                words[0] == include
                and words[1] == exclude
                and autograd[0] & mask == on
                and disabled[0] == state
                and stack[0] == stack[1]
                and one[0] & one_mask == one_value
                and two[0] & two_mask == two_value
                and not _dispatch_globals[_FIRST_FLAG]
                and _frame_callback() is callback
                and (ranges is None or not ranges.used)
                and (several is None or several() == device_index)
            )

        return loads_hold

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
            and (ranges is None or not ranges.used)
            and (cuda_dtype is None or _autocast_dtype("cuda") is cuda_dtype)
            and (several is None or several() == device_index)
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
