"""What a tensor is as memory: which buffer, and which bytes of it.

A buffer is a piece of memory and not a tensor: views share it, and so do storages that were made for the same address
(a library's receive buffer, a numpy array). Bytes are counted from its beginning. A view that leaves gaps, columns of a
matrix for example, touches only its columns (`Access.pitch`); where gaps are irregular, everything from its first byte
to its last.

Storages that were met are kept alive as long as this is: memory that was freed and given out again is another buffer at
the same address, and accesses to the two must not be taken for a collision. It costs the memory of everything that the
recorded step made. A storage that is resized lies elsewhere: from then on it is another buffer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..stream_program import Access

__all__ = ["Memory", "TensorMemory"]


class Memory:
    """A piece of memory that tensors lie in; `str` is what messages call it."""

    __slots__ = ("address", "end", "name", "number", "written")

    def __init__(self, number: int, address: int, end: int, name: str) -> None:
        self.number = number
        self.address = address
        self.end = end
        self.name = name
        self.written = False  # by anything that was noted

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"Memory({self.number}, {self.name!r})"


class TensorMemory:
    """The memory of all tensors met while recording; `paused` is how often noting was switched off."""

    # Whether it matters for which streams the allocator keeps memory; not where everything is kept alive.
    notes_holds = False

    def __init__(self) -> None:
        self.paused = 0
        self._kept: dict[int, Any] = {}  # storage -> itself: as long as it lives, no other one has its identity
        self._of_storage: dict[int, Memory] = {}
        self._starts: dict[torch.device, list[tuple[int, int]]] = {}  # device -> (address, number), sorted
        self._all: dict[int, Memory] = {}  # by number
        self._made = 0

    def find(self, tensor: Tensor, maker: str = "") -> Memory | None:
        """The memory that `tensor` lies in; None for one without any (empty, on the meta device, a wrapper).

        `maker` names what made it, if it is met for the first time.
        """
        try:
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
        except (NotImplementedError, RuntimeError):
            return None  # sparse tensors, fake ones and subclasses that hold others have none to point to
        key = storage._cdata
        end = address + storage.nbytes()
        memory = known = self._of_storage.get(key)
        if known is not None and address != known.address and not known.address < address < known.end:
            del self._of_storage[key]
            self._left(key, known)
            memory = None
        if not address:
            return None
        if memory is None:
            memory = self._of_storage[key] = self._place(tensor, address, end, maker if known is None else "resize_")
            if known is not None:
                memory.written = known.written  # what was there came along
                maker = "resize_"
            self._met(key, storage, memory, tensor, maker)
        elif end > memory.end:
            memory.end = end  # resized where it lay
        return memory

    def _met(self, key: int, storage: Any, memory: Memory, tensor: Tensor, maker: str) -> None:
        """A storage is met for the first time, through `tensor`."""
        self._kept[key] = storage

    def _left(self, key: int, memory: Memory) -> None:
        """A storage was resized and lies elsewhere now; its memory may be given out again."""
        self._forget(memory)

    def _forget(self, memory: Memory) -> None:
        del self._all[memory.number]
        entry = (memory.address, memory.number)
        for starts in self._starts.values():
            place = bisect_left(starts, entry)
            if place < len(starts) and starts[place] == entry:
                del starts[place]

    def _place(self, tensor: Tensor, address: int, end: int, maker: str) -> Memory:
        starts = self._starts.setdefault(tensor.device, [])
        position = bisect_right(starts, (address, self._made))
        # Storages of the same address, or inside or across another one.
        for near in starts[max(0, position - 1) : position + 1]:
            known = self._all[near[1]]
            if known.address < end and address < known.end:
                known.end = max(known.end, end)
                return known
        number = self._made
        self._made += 1
        dtype = str(tensor.dtype).removeprefix("torch.")
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        memory = self._all[number] = Memory(
            number, address, end, f"tensor {number} ({dtype} {shape}{f', made by {maker}' if maker else ''})"
        )
        insort(starts, (address, number))
        return memory

    def name(self, tensor: Tensor, name: str) -> None:
        """What messages call the memory of `tensor` from now on."""
        memory = self.find(tensor)
        if memory is not None:
            memory.name = name

    def access(self, tensor: Tensor, write: bool, *, partial: bool = False, maker: str = "") -> Access | None:
        """The access to all elements of `tensor`; None if there are none."""
        memory = self.find(tensor, maker) if tensor.numel() else None
        return None if memory is None else self.access_in(memory, tensor, write, partial=partial)

    def access_in(self, memory: Memory, tensor: Tensor, write: bool, *, partial: bool = False) -> Access | None:
        """The same where it is known that `tensor` lies in `memory`."""
        elements = tensor.numel()
        if not elements:
            return None
        if write:
            memory.written = True
        size = tensor.element_size()
        begin = tensor.data_ptr() - memory.address
        if tensor.is_contiguous():
            return Access(memory, write, begin, begin + elements * size, partial)
        run, span, pitch = _extent(tensor.shape, tensor.stride())
        if not pitch:
            return Access(memory, write, begin, begin + run * size, partial)
        return Access(memory, write, begin, begin + span * size, partial, pitch * size, run * size)

    def accesses(self, reads: Iterable[Any] = (), writes: Iterable[Any] = ()) -> tuple[Access, ...]:
        """Accesses to tensors; what is none is passed over. Reads first."""
        found = []
        for write, tensors in ((False, reads), (True, writes)):
            for tensor in tensors:
                if isinstance(tensor, Tensor):
                    access = self.access(tensor, write)
                    if access is not None and access not in found:
                        found.append(access)
        return tuple(found)


def _extent(shape: Iterable[int], stride: Iterable[int]) -> tuple[int, int, int]:
    """(elements without a gap from the first one on, elements from the first to behind the last, pitch or 0)."""
    steps = sorted((step, count) for count, step in zip(shape, stride, strict=True) if count > 1 and step > 0)
    run = span = 1
    outer: list[int] = []
    for step, count in steps:
        span += step * (count - 1)
        if outer or step > run:
            outer.append(step)
        else:
            run += step * (count - 1)
    if not outer:
        return run, span, 0
    pitch = outer[0]
    if any(step % pitch for step in outer):
        return span, span, 0
    return run, span, pitch
