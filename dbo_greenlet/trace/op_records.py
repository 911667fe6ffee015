"""A stream program as operation records of a trace.

    program = device.program                            # of a virtual device, a RecordingDevice, a MemoryRecorder
    writer.write(step_record, *op_records(program, step=0))

Nothing here imports torch: a program of the virtual device becomes a trace that `lint` and the others read like one of
a GPU.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from ..stream_program import Access, Operation, StreamProgram
from .records import OpRecord

__all__ = ["Freed", "op_records"]


class Freed(NamedTuple):
    """Memory that went back to its allocator.

    Attributes: `position` (number of the program's operations at that time), `access` (the memory, as written),
    `stream` (the one that may have it again, None if nobody knows), `microbatch` and `slice` (who let it go; None
    outside of all), `at` (nanoseconds of the host, None if nobody looked).
    """

    position: int
    access: Access
    stream: str | None
    microbatch: int | None
    slice: int | None
    at: int | None


def op_records(
    program: StreamProgram,
    *,
    step: int,
    rank: int = 0,
    run: str = "dbo",
    origin_ns: int = 0,
    freed: Sequence[Freed] = (),
    streams: Mapping[str, str] | None = None,
) -> list[OpRecord]:
    """The operations of a program, one record each, with what was freed between them.

    An entry of `OpRecord.memory` has further elements where an access is not to all of the bytes: true for some of
    them, of which nobody knows which (a scattered write); false, pitch and run for columns (`stream_program.Access`).

    Args:
        program: of one step.
        step, rank, run: the step.
        origin_ns: the host's clock at microsecond 0 of the trace.
        freed: in the order in which it was.
        streams: what to call a stream, by its name in the program; others keep theirs.
    """
    names = dict(streams or {})
    numbers: dict[int, int] = {}  # in the program -> in the records
    buffers = _Buffers()
    out: list[OpRecord] = []
    waiting = list(reversed(freed))

    def add(op: str, ubatch: int | None, slice: int | None, stream: str | None, at: int | None, **more: Any) -> None:
        stream = stream if stream is None else names.get(stream, stream)
        when = None if at is None else (at - origin_ns) / 1000
        out.append(OpRecord(step, rank, run, len(out), op, ubatch, slice, stream, when, **more))

    def add_freed(before: int | None) -> None:
        while waiting and (before is None or waiting[-1].position <= before):
            it = waiting.pop()
            memory = [buffers.entry(it.access)]
            add("free", it.microbatch, it.slice, it.stream, it.at, name=str(it.access.buffer), memory=memory)

    for operation in program.operations:
        add_freed(operation.number)
        numbers[operation.number] = len(out)
        add(
            operation.kind,
            operation.microbatch,
            operation.slice,
            operation.stream,
            operation.at,
            name=operation.name,
            event=operation.event,
            of=numbers.get(_of(operation, program)),
            owner=None if operation.owner == operation.microbatch else operation.owner,
            bytes=operation.transfer.bytes if operation.kind == "send" and operation.transfer is not None else None,
            memory=[buffers.entry(access) for access in operation.accesses],
        )
    add_freed(None)
    return out


def _of(operation: Operation, program: StreamProgram) -> int:
    """The operation that this one waits for, by its number in the program; -1 for none that is in it."""
    if operation.kind == "receive" and (transfer := operation.transfer) is not None:
        # One of an earlier step has a number in that step's program: here it is another operation's, this receive's own
        # perhaps, or nobody's.
        sends = program.operations[transfer.sent : transfer.sent + 1]
        return transfer.sent if sends and sends[0].kind == "send" and sends[0].transfer is transfer else -1
    return -1 if operation.of is None else operation.of


class _Buffers:
    """What a trace calls the buffers of a program: by their address, or by a name that no other one has."""

    def __init__(self) -> None:
        self._names: dict[Hashable, int | str] = {}
        self._taken: set[int | str] = set()

    def entry(self, access: Access) -> list[Any]:
        buffer = access.buffer
        name = self._names.get(buffer)
        if name is None:
            # A piece of memory has an address; everything else is a name.
            name = getattr(buffer, "address", None) or self._new_name(str(buffer))
            self._names[buffer] = name
        entry = ["write" if access.write else "read", name, access.begin, access.end]
        if access.pitch:
            return [*entry, access.partial, access.pitch, access.run]
        return [*entry, True] if access.partial else entry

    def _new_name(self, wanted: str) -> str:
        name, count = wanted, 1
        while name in self._taken:
            count += 1
            name = f"{wanted}#{count}"
        self._taken.add(name)
        return name
