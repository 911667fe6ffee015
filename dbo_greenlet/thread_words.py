"""Torch's per-thread flags, read where they lie: the autograd flags in one word, the function-mode state in another.

As in `key_sets`, and for the same reason: whether a microbatch left the thread as it found it is asked at every yield,
and each of torch's getters is some code that the model has pushed out of the caches by then. Cold, one of them costs a
microsecond; nine of them are replaced by two or three loads. libc10 and libtorch_cpu export a function each that gives
the address of the calling thread's struct.

Nothing is written and no layout is assumed: in each thread every flag is changed once through torch's own setters, and
what changes in the struct is what is read from then on. Where that finds anything but the expected there is no view.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.overrides import BaseTorchFunctionMode

__all__ = ["ThreadWords", "view"]

_AUTOGRAD = "_ZN3c1013AutogradState13get_tls_stateEv"
_FUNCTIONS = "_ZN2at4impl22PythonTorchFunctionTLS9get_stateEv"
_WORDS = 4  # of each struct are looked at: 32 bytes

_InferenceGuard = torch._C._InferenceMode
_State = torch._C._TorchFunctionState

_FLAGS = (
    (torch.is_grad_enabled, torch._C._set_grad_enabled),
    (torch._C._is_fwd_grad_enabled, torch._C._set_fwd_grad_enabled),
    (torch._C._is_multithreading_enabled, torch._C._set_multithreading_enabled),
    (torch._C._is_view_replay_enabled, torch._C._set_view_replay_enabled),
)


class ThreadWords(NamedTuple):
    """Views on the calling thread's memory.

    Attributes:
        autograd: one 64-bit word; grad, inference, forward-AD, multithreading and view-replay flags are in `mask`.
        mask: the bits of that word that are flags.
        disabled: one word that tells the torch-function states apart.
        stack: two words that are equal as long as no function mode is on the stack.
    """

    autograd: memoryview
    mask: int
    disabled: memoryview
    stack: memoryview


class _PerThread(threading.local):
    looked = False
    words: ThreadWords | None = None


_here = _PerThread()


def view() -> ThreadWords | None:
    """The calling thread's words. None: they cannot be read here. Ask while no function mode is on the stack."""
    if not _here.looked:
        _here.looked = True
        _here.words = _look()
    return _here.words


def _look() -> ThreadWords | None:
    # Elsewhere the libraries have other names, and nobody has looked.
    if not sys.platform.startswith("linux") or platform.machine() not in ("x86_64", "AMD64"):
        return None
    autograd, functions = _struct("libc10.so", _AUTOGRAD), _struct("libtorch_cpu.so", _FUNCTIONS)
    if autograd is None or functions is None:
        return None
    flags = _find_flags(autograd)
    disabled, stack = _find_disabled(functions), _find_stack(functions)
    if flags is None or disabled is None or stack is None:
        return None
    word, mask = flags
    return ThreadWords(
        autograd[word : word + 1], mask, functions[disabled : disabled + 1], functions[stack : stack + 2]
    )


def _struct(library: str, getter: str) -> memoryview | None:
    try:
        # The library that torch runs on, or none: a second copy of it must never be loaded.
        path = str(Path(torch.__file__).parent / "lib" / library)
        function = getattr(ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_NOLOAD), getter)
    except (OSError, AttributeError):
        return None
    function.restype = ctypes.c_void_p
    function.argtypes = []
    address = function()
    if not address or address % 8:
        return None
    return memoryview((ctypes.c_uint64 * _WORDS).from_address(address)).cast("B").cast("Q")


def _find_flags(words: memoryview) -> tuple[int, int] | None:
    """Index of the word that holds the flags, and their bits; None unless all five are in one word."""
    before = tuple(words)
    changed = [0] * _WORDS
    for get, put in _FLAGS:
        value = get()
        put(not value)
        now = tuple(words)
        put(value)
        if now == before:
            return None
        changed = [bits | (a ^ b) for bits, a, b in zip(changed, now, before, strict=True)]
    guard = _InferenceGuard(not torch.is_inference_mode_enabled())
    now = tuple(words)
    guard.__exit__(None, None, None)
    changed = [bits | (a ^ b) for bits, a, b in zip(changed, now, before, strict=True)]
    found = [index for index, bits in enumerate(changed) if bits]
    if len(found) != 1 or bin(changed[found[0]]).count("1") != len(_FLAGS) + 1 or tuple(words) != before:
        return None
    return found[0], changed[found[0]]


def _find_disabled(words: memoryview) -> int | None:
    """Index of the word that has another value in each torch-function state."""
    before = tuple(words)
    was: Any = _State.ENABLED
    if torch._C._is_torch_function_all_disabled():
        was = _State.ALL_DISABLED
    elif not torch._C._is_torch_function_enabled():
        was = _State.SUBCLASSES_DISABLED
    seen = []
    for state in (_State.ENABLED, _State.SUBCLASSES_DISABLED, _State.ALL_DISABLED):
        torch._C._set_torch_function_state(state)
        seen.append(tuple(words))
    torch._C._set_torch_function_state(was)
    found = [index for index in range(_WORDS) if len({each[index] for each in seen}) > 1]
    if len(found) != 1 or len({each[found[0]] for each in seen}) != len(seen) or tuple(words) != before:
        return None
    return found[0]


def _find_stack(words: memoryview) -> int | None:
    """Index of the first of the two pointers that are equal while the stack of function modes is empty."""
    if torch._C._len_torch_function_stack():
        return None
    torch._C._push_on_torch_function_stack(BaseTorchFunctionMode())
    filled = tuple(words)
    torch._C._pop_torch_function_stack()
    empty = tuple(words)
    pairs = range(_WORDS - 1)
    found = [i for i in pairs if empty[i] and empty[i] == empty[i + 1] and filled[i] != filled[i + 1]]
    return found[0] if len(found) == 1 else None
