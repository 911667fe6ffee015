"""What the buffers of a stream program hold: each operation at its own time, so that a race shows in the numbers.

Work reads and writes as long as it runs: a value that somebody else changes meanwhile is another input, and whoever
reads what is being written sees neither the old value nor the new. A send reads when it leaves; a receive writes, at
its end, what the send has read. A value is a hash over the name of what wrote it and its inputs. So two programs leave
the same numbers if every operation had the same inputs, whatever the order in which unrelated ones ran; and work that
should have waited for other work, and did not wait long enough, leaves others.

Nothing is computed while the program runs. It needs begin and end of every operation, as a virtual device gives them.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Hashable, Iterable

from ..errors import ConfigurationError
from ..stream_program import Access, Operation, StreamProgram, Transfer

__all__ = ["Memory", "Results", "Value", "values_of"]

_INFINITE = float("inf")


class Memory:
    """Byte ranges of buffers and the numbers in them. What was never written has a number that its name decides."""

    def __init__(self) -> None:
        self._parts: dict[Hashable, list[_Part]] = {}

    def read(self, access: Access | Hashable) -> tuple[int, ...]:
        """The numbers in the range of `access`, or in a whole buffer, from its first byte to its last."""
        return tuple(self.read_all([access if isinstance(access, Access) else Access(access, False)]))

    def read_all(self, accesses: Iterable[Access]) -> list[int]:
        """The numbers that these read, one after the other."""
        out: list[int] = []
        for each in accesses:
            buffer, begin, end = each.buffer, each.begin, each.end
            parts = self._of(buffer)
            if end is None:
                out += [value for _, part_end, value in parts if begin < part_end]
            elif begin < end:
                out += [value for part_begin, part_end, value in parts if part_begin < end and begin < part_end]
        return out

    def write(self, access: Access, value: int) -> None:
        """One number for the whole range of `access`; a partial write leaves one that depends on what was there."""
        begin, end = access.begin, _INFINITE if access.end is None else access.end
        if access.partial:
            value = _mix(value, self.read_all([access]))
        if not begin and end == _INFINITE:
            self._parts[access.buffer] = [(0, _INFINITE, value)]
        elif begin < end:
            kept: list[_Part] = []
            for part in self._of(access.buffer):
                if part[0] < begin:
                    kept.append((part[0], min(part[1], begin), part[2]))
                if part[1] > end:
                    kept.append((max(part[0], end), part[1], part[2]))
            self._parts[access.buffer] = sorted([*kept, (begin, end, value)])

    def _of(self, buffer: Hashable) -> list[_Part]:
        parts = self._parts.get(buffer)
        return [(0, _INFINITE, _number(f"before {buffer}"))] if parts is None else parts


_Part = tuple[float, float, int]  # begin, end, value; those of a buffer are sorted, without gaps


def values_of(program: StreamProgram) -> Memory:
    """What is in memory when everything is done.

    Raises:
        ConfigurationError: an operation with accesses has no times (a device that does not know them, or a captured
            graph that was not replayed), or an access to columns, for which there are no values.
    """
    moments: list[tuple[float, int, bool, Operation]] = []
    for each in program.operations:
        if not each.accesses and each.transfer is None:
            continue
        if each.begin is None or each.end is None:
            raise ConfigurationError(f"there are no values without times, and {each} has none; use a VirtualDevice")
        if any(it.pitch for it in each.accesses):
            raise ConfigurationError(f"there are no values for columns (an access with a pitch), as of {each}")
        # At the same moment the order of issue decides: what is ordered by events is issued in that order, too.
        moments.append((each.begin, each.number, False, each))
        moments.append((each.end, each.number, True, each))
    moments.sort()
    memory = Memory()
    under_way: dict[int, _UnderWay] = {}
    in_flight: dict[Transfer, list[int]] = {}
    for _, number, is_over, each in moments:
        if not is_over:
            under_way[number] = now = _UnderWay(memory, each)
            if each.kind == "send" and each.transfer is not None:
                in_flight[each.transfer] = now.inputs
        else:
            arrived = in_flight.get(each.transfer, []) if each.kind == "receive" and each.transfer is not None else []
            under_way.pop(number).ends(arrived)
    return memory


class _UnderWay:
    """An operation that has begun: it has read, and what it writes is neither old nor new."""

    __slots__ = ("inputs", "memory", "name", "reads", "writes")

    def __init__(self, memory: Memory, operation: Operation) -> None:
        self.memory = memory
        self.name = operation.name
        self.reads = [it for it in operation.accesses if not it.write]
        self.writes = [it for it in operation.accesses if it.write]
        self.inputs = memory.read_all(self.reads)
        torn = _number(f"being written by {self.name}")
        for access in self.writes:
            memory.write(access, torn)

    def ends(self, arrived: list[int]) -> None:
        """It has read all the time: what it finds now counts as well, and is no other than at its begin unless somebody
        else wrote (or itself, always the same)."""
        if self.writes:
            value = _mix(_number(self.name), self.inputs + self.memory.read_all(self.reads) + arrived)
            for place, access in enumerate(self.writes):
                self.memory.write(access, _mix(value, [place]))


class Results:
    """The values of one run. The whole program is run through once, when the first value is asked for."""

    __slots__ = ("_memory", "_program")

    def __init__(self, program: StreamProgram) -> None:
        self._program = program
        self._memory: Memory | None = None

    def of(self, buffer: Hashable) -> Value:
        """What `buffer` holds at the end, as an output of a microbatch."""
        return Value(self, buffer)

    def read(self, buffer: Hashable) -> int:
        """64 bits. Raises `ConfigurationError` as `values_of` does."""
        if self._memory is None:
            self._memory = values_of(self._program)
        return _mix(0, self._memory.read(buffer))


class Value:
    """What a buffer holds at the end of a run: equal to another if the numbers are.

    It is read when somebody compares, prints or hashes it, so a microbatch may return it before the device is done.
    """

    __slots__ = ("_buffer", "_results")

    def __init__(self, results: Results, buffer: Hashable) -> None:
        self._results = results
        self._buffer = buffer

    @property
    def number(self) -> int:
        """64 bits. Raises `ConfigurationError` as `values_of` does."""
        return self._results.read(self._buffer)

    def __eq__(self, other: object) -> bool:
        return self.number == other.number if isinstance(other, Value) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.number)

    def __repr__(self) -> str:
        return f"Value({self._buffer}: {self.number:016x})"


@functools.lru_cache(4096)
def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _mix(number: int, inputs: Iterable[int]) -> int:
    """64 bits, from all of these in their order (FNV-1a, with a shift so that high bits reach the low ones)."""
    for each in inputs:
        number = ((number ^ each) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
        number ^= number >> 29
    return number
