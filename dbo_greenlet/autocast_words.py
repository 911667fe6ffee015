"""Torch's autocast state of a thread, read where it lies: nesting depth, cache flag, and the dtypes for CPU and CUDA.

As in `key_sets` and `thread_words`, and for the same reason: five calls into torch at every yield, each of them code
that the model has pushed out of the caches by then, become a few loads.

Here no function gives an address: the variables are private to libtorch_cpu. But they are thread-local variables of
that library, and the dynamic linker tells where the calling thread's block of those is and how long. So each value is
changed once through torch's own setter, and what changes in the block is what is read from then on, by address and
mask. Nothing is written, nothing outside the block is read, and where the search finds anything but the expected there
is no view.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

__all__ = ["AutocastWords", "view"]

_PT_TLS = 7
_LIBRARY = "libtorch_cpu.so"
_MOST_WORDS = 2
_MOST_BYTES = 8  # that one value may change


class _ProgramHeader(ctypes.Structure):  # Elf64_Phdr
    _fields_ = (
        ("p_type", ctypes.c_uint32),
        ("p_flags", ctypes.c_uint32),
        ("p_offset", ctypes.c_uint64),
        ("p_vaddr", ctypes.c_uint64),
        ("p_paddr", ctypes.c_uint64),
        ("p_filesz", ctypes.c_uint64),
        ("p_memsz", ctypes.c_uint64),
        ("p_align", ctypes.c_uint64),
    )


class _LoadedObject(ctypes.Structure):  # struct dl_phdr_info
    _fields_ = (
        ("dlpi_addr", ctypes.c_uint64),
        ("dlpi_name", ctypes.c_char_p),
        ("dlpi_phdr", ctypes.POINTER(_ProgramHeader)),
        ("dlpi_phnum", ctypes.c_uint16),
        ("dlpi_adds", ctypes.c_ulonglong),
        ("dlpi_subs", ctypes.c_ulonglong),
        ("dlpi_tls_modid", ctypes.c_size_t),
        ("dlpi_tls_data", ctypes.c_void_p),
    )


_Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_LoadedObject), ctypes.c_size_t, ctypes.c_void_p)


class AutocastWords(NamedTuple):
    """Views on the calling thread's memory: two 64-bit words, each with the mask of the bits that are autocast's.

    Where one word holds them all, the two are the same.
    """

    first: memoryview
    first_mask: int
    second: memoryview
    second_mask: int


class _PerThread(threading.local):
    looked = False
    words: AutocastWords | None = None


_here = _PerThread()


def view() -> AutocastWords | None:
    """The calling thread's words. None: they cannot be read here."""
    if not _here.looked:
        _here.looked = True
        _here.words = _look()
    return _here.words


def _look() -> AutocastWords | None:
    # Elsewhere the libraries have other names, and nobody has looked.
    if not sys.platform.startswith("linux") or platform.machine() not in ("x86_64", "AMD64"):
        return None
    # The first use in a thread is what makes its block.
    torch.is_autocast_cache_enabled()
    found = _block()
    if found is None:
        return None
    address, size = found
    block = (ctypes.c_ubyte * size).from_address(address)
    changed: dict[int, int] = {}  # byte -> bits
    for change, undo in _changes():
        bits = _what_changes(block, change, undo)
        if bits is None:
            return None
        for byte, mask in bits.items():
            changed[byte] = changed.get(byte, 0) | mask
    return _as_words(address, size, changed)


def _block() -> tuple[int, int] | None:
    """Address and size of the calling thread's variables of libtorch_cpu; None where it has none yet."""
    library = Path(torch.__file__).parent / "lib" / _LIBRARY
    found: list[tuple[int, int]] = []

    def look(info: Any, size: int, _: Any) -> int:
        each = info.contents
        if size < ctypes.sizeof(_LoadedObject) or not each.dlpi_name or not each.dlpi_tls_data:
            return 0
        name = Path(each.dlpi_name.decode("utf-8", "replace"))
        if name.name != _LIBRARY or not name.exists() or not name.samefile(library):
            return 0
        for index in range(each.dlpi_phnum):
            header = each.dlpi_phdr[index]
            if header.p_type == _PT_TLS:
                found.append((each.dlpi_tls_data, header.p_memsz))
        return 0

    try:
        ctypes.CDLL(None).dl_iterate_phdr(_Callback(look), None)
    except (OSError, AttributeError):
        return None
    return found[0] if len(found) == 1 else None


def _changes() -> list[tuple[Callable[[], Any], Callable[[], Any]]]:
    """For each value: what changes it, and what undoes that."""
    cache = torch.is_autocast_cache_enabled()
    cpu, cuda = torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda")

    def dtype(kind: str, value: torch.dtype) -> Callable[[], Any]:
        return lambda: torch.set_autocast_dtype(kind, value)

    def other(value: torch.dtype) -> torch.dtype:
        return torch.float16 if value is torch.bfloat16 else torch.bfloat16

    return [
        (torch.autocast_increment_nesting, torch.autocast_decrement_nesting),
        (
            lambda: torch.set_autocast_cache_enabled(not cache),
            lambda: torch.set_autocast_cache_enabled(cache),
        ),
        (dtype("cpu", other(cpu)), dtype("cpu", cpu)),
        (dtype("cuda", other(cuda)), dtype("cuda", cuda)),
    ]


def _what_changes(block: Any, change: Callable[[], Any], undo: Callable[[], Any]) -> dict[int, int] | None:
    """Byte -> bits that the change changes, the same ones when it is made once more; None if that is not clear."""
    seen = []
    for _ in range(2):
        before = bytes(block)
        change()
        during = bytes(block)
        undo()
        after = bytes(block)
        seen.append({i: a ^ b for i, (a, b) in enumerate(zip(before, during, strict=True)) if a != b})
        if any(before[i] != after[i] for i in seen[-1]):
            return None
    first, second = seen
    return first if first == second and 0 < len(first) <= _MOST_BYTES else None


def _as_words(address: int, size: int, changed: dict[int, int]) -> AutocastWords | None:
    masks: dict[int, int] = {}  # address of a word -> its mask
    for byte in changed:
        at = (address + byte) & ~7
        if at < address or at + 8 > address + size:
            return None
        # The whole byte: a depth of 2 has other bits than one of 1.
        masks[at] = masks.get(at, 0) | (0xFF << 8 * ((address + byte) & 7))
    if len(masks) > _MOST_WORDS:
        return None
    first, second = min(masks), max(masks)
    return AutocastWords(_word(first), masks[first], _word(second), masks[second])


def _word(address: int) -> memoryview:
    return memoryview((ctypes.c_uint64 * 1).from_address(address)).cast("B").cast("Q")
