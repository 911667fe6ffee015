"""The dispatcher's thread-local key sets, read where they lie.

Whether a microbatch left the thread as it found it is asked at every yield, and most of the price of the answer is
reading two 64-bit words through torch's getters, which build an object for each (about 0.4 us a word with the
comparison; everything else together takes as long). libc10 exports the thread-local variable that holds them, and the
dynamic linker gives its address in the calling thread. Reading through that address takes a tenth.

Nothing is ever written, and nothing is believed: in each thread the view is first compared with the getters, with the
key sets as they are and with changed ones. Where the symbol is missing or anything differs there is no view, and the
getters are used.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from pathlib import Path

import torch

__all__ = ["view"]

_SYMBOL = b"_ZN3c104impl26raw_local_dispatch_key_setE"
_include_set = torch._C._dispatch_tls_local_include_set
_exclude_set = torch._C._dispatch_tls_local_exclude_set


class _PerThread(threading.local):
    # Per thread also because the address is: a thread that ends takes its view with it.
    looked = False
    words: memoryview | None = None


_here = _PerThread()


def view() -> memoryview | None:
    """The calling thread's two words, in libc10's own encoding: equal words mean equal key sets. None: no view."""
    if not _here.looked:
        _here.looked = True
        _here.words = _checked(_locate())
    return _here.words


def _locate() -> memoryview | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        # The library that torch runs on, or none: a second copy of it must never be loaded.
        path = str(Path(torch.__file__).parent / "lib" / "libc10.so")
        libc10 = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        dlsym = ctypes.CDLL(None).dlsym
    except (OSError, AttributeError):
        return None
    dlsym.restype = ctypes.c_void_p
    dlsym.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    address = dlsym(libc10._handle, _SYMBOL)
    if not address:
        return None
    return memoryview((ctypes.c_uint64 * 2).from_address(address)).cast("B").cast("Q")


def _checked(words: memoryview | None) -> memoryview | None:
    """`words`, if they are what the getters tell, up to a constant each (they are stored relative to the defaults)."""
    if words is None or not hasattr(torch._C.DispatchKeySet, "raw_repr"):
        return None
    before, constant = tuple(words), _difference(words)
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    include, exclude = _include_set(), _exclude_set()
    with torch._C._ForceDispatchKeyGuard(
        include - keys if include.has(torch._C.DispatchKey.AutocastCPU) else include | keys,
        exclude - keys if exclude.has(torch._C.DispatchKey.AutocastCPU) else exclude | keys,
    ):
        follows = words[0] != before[0] and words[1] != before[1] and _difference(words) == constant
    return words if follows and tuple(words) == before else None


def _difference(words: memoryview) -> tuple[int, int]:
    return (words[0] ^ _include_set().raw_repr(), words[1] ^ _exclude_set().raw_repr())
