"""The operations of a recorded step as the stream program that they were made from."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from ...errors import TraceFileError
from ...stream_program import Access, Operation, StreamProgram, Transfer

if TYPE_CHECKING:
    from ..schema import OpRecord
    from .checks import StepView

__all__ = ["PRIMARY", "accesses_of", "program_of"]

PRIMARY = "compute"
# What an access has whose entry says nothing about it: to all of the bytes, in one piece.
_ALL_OF_IT = [False, 0, 0]
_KINDS = {"record", "wait", "send", "receive", "work", "host_wait"}


def program_of(view: StepView) -> StreamProgram:
    """The program of a step; the number of an operation is its place, which is that of the record too.

    Frees and holds are no operations of a stream. They stand in the program as records of events that nobody waits
    for, so that numbers stay, and can be asked what is complete by then. Their memory is not in it; but what lies at
    an address that was freed is another buffer from there on. The allocator keeps the two apart, if it knows who used
    the first (`frees`).
    """
    program = StreamProgram(PRIMARY)
    sites = {(each.ubatch, each.slice + 1): each.site for each in view.step.slices}
    numbers = {record.number: place for place, record in enumerate(view.ops)}
    sends: dict[int, Transfer] = {}  # by place
    freed: dict[Hashable, int] = {}  # buffer -> how often it was
    for place, record in enumerate(view.ops):
        kind = record.op if record.op in _KINDS else "record"
        stream = record.stream if kind == "host_wait" else record.stream or PRIMARY
        operation = Operation(place, kind, stream, record.name or record.op, _accesses_now(record, freed))
        operation.microbatch = record.ubatch
        operation.slice = record.slice
        operation.owner = record.ubatch if record.owner is None else record.owner
        if record.ubatch is not None and record.slice is not None:
            operation.site = sites.get((record.ubatch, record.slice), "")
        operation.event = record.event
        of = -1 if record.of is None else numbers.get(record.of, -1)
        if kind != record.op:
            if record.op == "free":
                for access in accesses_of(record):
                    freed[access.buffer] = freed.get(access.buffer, 0) + 1
            operation.accesses, operation.event = (), -1 - place
        elif kind == "send":
            operation.transfer = sends[place] = Transfer(
                len(program.transfers), operation.name, operation.owner, operation.site
            )
            program.transfers.append(operation.transfer)
        elif kind == "receive":
            _receive(operation, sends, of)
        elif kind in ("wait", "host_wait") and 0 <= of < place and program.operations[of].kind == "record":
            operation.of = of
        program.operations.append(operation)
    return program


def _receive(operation: Operation, sends: dict[int, Transfer], of: int) -> None:
    transfer = sends.get(of)
    if transfer is None:
        # The trace does not say which; receives of one microbatch run in the order of its sends.
        transfer = next((each for each in sends.values() if each.owner == operation.owner and not each.received), None)
    if transfer is None:
        operation.kind = "work"  # of a send before the step, which is none of this program's transfers
        return
    operation.transfer = transfer
    operation.owner = transfer.owner
    transfer.received += 1
    if transfer.arrived is None:
        transfer.arrived = operation.number


def accesses_of(record: OpRecord) -> tuple[Access, ...]:
    """What a record says about memory.

    Raises:
        TraceFileError: an entry is not what `op_records` writes; names no file.
    """
    return tuple(_access(record, entry) for entry in record.memory)


def _accesses_now(record: OpRecord, freed: dict[Hashable, int]) -> tuple[Access, ...]:
    return tuple(
        each._replace(buffer=f"{each.buffer}, made anew after {times} free{'s' if times > 1 else ''},")
        if (times := freed.get(each.buffer))
        else each
        for each in accesses_of(record)
    )


def _access(record: OpRecord, entry: Any) -> Access:
    if isinstance(entry, list) and 4 <= len(entry) <= 7 and entry[0] in ("read", "write"):
        way, buffer, *rest = entry
        begin, end, partial, pitch, run = rest + _ALL_OF_IT[len(rest) - 2 :]
        numbers = (begin, 0 if end is None else end, pitch, run)
        if type(buffer) in (int, str) and all(type(each) is int for each in numbers) and isinstance(partial, bool):
            return Access(buffer, way == "write", begin, end, partial, pitch, run)
    raise TraceFileError(
        f"operation {record.number} of step {record.step}, run {record.run!r}, rank {record.rank}: what it says about "
        f'memory is {entry!r}, expected ["read" or "write", buffer, begin, end] and what `op_records` puts behind that'
    )
