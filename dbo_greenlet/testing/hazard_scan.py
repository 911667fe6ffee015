"""The quick look: whether a stream program certainly has no hazard. Exploration asks it of every schedule.

One loop over the operations with a few numbers for each buffer: who wrote it last, where, and who read it since. It
answers False as soon as anything looks odd; then `hazard_search` looks at every pair, and may find nothing. It must
never answer True where that one finds something, and is tested against it for that.

Streams are numbered; `clock[k]` of a stream is the number of the last operation of stream k that is complete for what
comes next on it. Its own entry is not kept: what is on the same stream is always complete.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from ..stream_program import Access, Operation, StreamProgram

__all__ = ["looks_clean"]

# What is known of a buffer: number and stream of the last write, who wrote all of it last (one bit for each microbatch,
# 0 outside of all), everybody who ever did, number of the last read on each stream since the last write, and how many
# transfers are in flight into it and out of it.
_NUMBER, _STREAM, _WRITER, _WRITERS, _READS, _INTO, _OUT_OF = range(7)
_State = list[Any]


def looks_clean(program: StreamProgram) -> bool:
    """False where the program may have a hazard. Reads must come before writes in an operation's accesses."""
    for transfer in program.transfers:
        if transfer.received != 1:
            return False
    working = {operation.stream for operation in program.operations if operation.kind in _WORK}
    if working <= {program.primary}:
        return _one_stream(program)
    return _several_streams(program)


_WORK = frozenset(("work", "send", "receive"))
_BITS: dict[int | None, int] = {None: 0, **{index: 1 << index for index in range(256)}}


def _one_stream(program: StreamProgram) -> bool:
    """Where all work is on the primary stream, only transfers in flight and siblings' writes are left to look at."""
    operations = program.operations
    last: dict[Hashable, int] = {}  # whole buffer -> who wrote it last
    writers: dict[Hashable, int] = {}  # and everybody who ever did
    ranges: dict[Hashable, dict[tuple[int, int | None], int]] = {}  # range of a buffer -> who writes it
    flying: dict[Hashable, list[Access]] = {}  # what transfers touch until their receive, by buffer
    flights: dict[int, list[Access]] = {}  # the same by transfer
    for operation in operations:
        kind = operation.kind
        accesses = operation.accesses
        bit = _BITS[operation.owner]
        if kind == "send":
            transfer: Any = operation.transfer
            arrival = operations[transfer.arrived].accesses
            flight = [each for each in accesses if each[1] or each in arrival]
            brought = [each for each in arrival if each[1] and each not in accesses]
            flights[transfer.number] = flight + brought
            accesses = (*accesses, *brought)
        elif kind == "receive":
            transfer = operation.transfer
            if transfer.number not in flights:
                return False
            for each in flights.pop(transfer.number):
                those = flying[each[0]]
                those.remove(each)
                if not those:
                    del flying[each[0]]
        elif kind != "work":
            continue
        for access in accesses:
            buffer = access[0]
            if buffer in flying and _hits(flying[buffer], access):
                return False
            writer = last.get(buffer)
            if not access[1]:
                if writer != bit and writer and writers[buffer] & bit:
                    return False
            elif access[3] is None and not (access[2] or access[4] or access[5]):
                if writer != bit:
                    if buffer in ranges:
                        return False
                    last[buffer] = bit
                    writers[buffer] = writers.get(buffer, 0) | bit
            elif not _own_range(access, bit, ranges, last):
                return False
        if kind == "send":
            for each in flights[transfer.number]:
                flying.setdefault(each[0], []).append(each)
    return True


def _hits(flying: list[Access], access: Access) -> bool:
    return any((access.write or other.write) and other.meets(access) for other in flying)


def _own_range(
    access: Access,
    bit: int,
    ranges: dict[Hashable, dict[tuple[int, int | None], int]],
    last: dict[Hashable, int],
) -> bool:
    """Whether nobody but the microbatch `bit` writes what `access` does, a range of a buffer."""
    buffer, _, begin, end, partial, pitch, _ = access
    if partial or pitch or buffer in last:
        return False
    parts = ranges.setdefault(buffer, {})
    key = (begin, end)
    if parts.get(key) == bit:
        return True
    for (b, e), writer in parts.items():
        if writer != bit and (e is None or begin < e) and (end is None or b < end):
            return False
    parts[key] = bit
    return True


def _several_streams(program: StreamProgram) -> bool:
    operations = program.operations
    index: dict[str | None, int] = {program.primary: 0}
    for stream in {operation.stream for operation in operations}:
        if stream is not None and stream not in index:
            index[stream] = len(index)
    count = len(index)
    clocks = [[-1] * count for _ in index]
    marks: dict[int, list[int]] = {}
    last_owner: list[int | None] = [None] * count
    last_work = [-1] * count
    memory = _Memory(count)
    touch = memory.touch
    sent: dict[int, int] = {}
    for operation in operations:
        kind = operation.kind
        number = operation.number
        if kind == "host_wait":
            _host_wait(operation, index, clocks, marks)
            continue
        on = index[operation.stream]
        clock = clocks[on]
        if kind == "record":
            before, by = last_owner[on], operation.microbatch
            if before != by and before is not None and by is not None:
                return False
            mark = marks[number] = clock.copy()
            mark[on] = number
            continue
        last_owner[on] = owner = operation.owner
        if kind == "wait":
            if operation.of is not None:
                _join(clock, marks[operation.of])
            continue
        last_work[on] = number
        accesses = operation.accesses
        if kind == "work":
            if not touch(accesses, number, on, clock, _BITS[owner]):
                return False
            continue
        transfer: Any = operation.transfer
        if kind == "send":
            mark = marks[number] = clock.copy()
            mark[on] = number
            sent[transfer.number] = number
            arrival = operations[transfer.arrived].accesses
            brought = tuple(each for each in arrival if each[1] and each not in accesses)
            if not touch(accesses + brought, number, on, clock, _BITS[owner]):
                return False
            memory.take_off(transfer.number, accesses, arrival)
        else:
            if transfer.number not in sent:
                return False
            _join(clock, marks[sent[transfer.number]])
            memory.land(transfer.number)
            if not touch(accesses, number, on, clock, _BITS[owner]):
                return False
    ends = clocks[0]
    return all(last_work[k] <= ends[k] for k in range(1, count))


class _Memory:
    """What was done to each buffer so far. Between streams a range counts as the whole buffer."""

    def __init__(self, streams: int) -> None:
        self._streams = streams
        self._states: dict[Hashable, _State] = {}
        self._written: dict[Hashable, int] = {}  # those that were written as a whole
        self._ranges: dict[Hashable, dict[tuple[int, int | None], int]] = {}
        self._flying: dict[int, list[tuple[_State, int]]] = {}  # transfer -> states it occupies, and which way

    def touch(self, accesses: tuple[Access, ...], number: int, on: int, clock: list[int], bit: int) -> bool:
        """False where something looks odd."""
        states = self._states
        for access in accesses:
            buffer = access[0]
            state = states.get(buffer)
            if state is None:
                state = states[buffer] = [-1, on, 0, 0, [-1] * self._streams, 0, 0]
            elif state[_INTO] or (state[_STREAM] != on and clock[state[_STREAM]] < state[_NUMBER]):
                return False
            if not access[1]:
                writer = state[_WRITER]
                if writer != bit and writer and state[_WRITERS] & bit:
                    return False
                state[_READS][on] = number
                continue
            if state[_OUT_OF]:
                return False
            reads = state[_READS]
            for k, read in enumerate(reads):
                if clock[k] < read and k != on:
                    return False
                reads[k] = -1
            if access[3] is None and not (access[2] or access[4] or access[5]):
                if buffer in self._ranges:
                    return False
                self._written[buffer] = bit
                state[_WRITER] = bit
                state[_WRITERS] |= bit
            elif not _own_range(access, bit, self._ranges, self._written):
                return False
            state[_NUMBER] = number
            state[_STREAM] = on
        return True

    def take_off(self, transfer: int, sent: tuple[Access, ...], arrival: tuple[Access, ...]) -> None:
        flying = self._flying[transfer] = []
        for access in (*sent, *(each for each in arrival if each.write and each not in sent)):
            if access.write or access in arrival:
                flying.append((self._states[access.buffer], _INTO if access.write else _OUT_OF))
        for state, way in flying:
            state[way] += 1

    def land(self, transfer: int) -> None:
        for state, way in self._flying.pop(transfer):
            state[way] -= 1


def _join(clock: list[int], mark: list[int]) -> None:
    for k, number in enumerate(mark):
        if clock[k] < number:
            clock[k] = number


def _host_wait(
    operation: Operation, index: dict[str | None, int], clocks: list[list[int]], marks: dict[int, list[int]]
) -> None:
    if operation.event is not None:
        if operation.of is None:
            return
        mark = marks[operation.of]
    elif operation.stream is None:
        mark = [operation.number] * len(clocks)
    else:
        on = index[operation.stream]
        mark = clocks[on].copy()
        mark[on] = operation.number
    for clock in clocks:
        _join(clock, mark)
