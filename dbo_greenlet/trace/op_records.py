"""A stream program as operation records of a trace.

    program = device.program                            # of a virtual device, a RecordingDevice, a MemoryRecorder
    writer.write(step_record, *op_records(program, step=0))
    writer.write_lines([op_lines(program, step=0)])     # the same lines, several times quicker

Nothing here imports torch: a program of the virtual device becomes a trace that `lint` and the others read like one of
a GPU.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from json.encoder import encode_basestring_ascii as _quoted
from typing import Any, NamedTuple

from ..stream_program import Access, Operation, StreamProgram
from .records import OpRecord

__all__ = ["Freed", "op_lines", "op_records"]


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
    return [
        OpRecord(
            step, rank, run, number, row.op, row.ubatch, row.slice, row.stream, row.at, row.name, row.event, row.of,
            row.owner, row.bytes, row.memory,
        )
        for number, row in enumerate(_rows(program, freed, streams or {}, origin_ns))
    ]  # fmt: skip


def op_lines(
    program: StreamProgram,
    *,
    step: int,
    rank: int = 0,
    run: str = "dbo",
    origin_ns: int = 0,
    freed: Sequence[Freed] = (),
    streams: Mapping[str, str] | None = None,
) -> bytes:
    """What `schema.to_json` makes of the `op_records`, each line with its newline. Arguments as there."""
    head = f'{{"t":"op","step":{step},"rank":{rank},"run":{_quoted(run)},"number":'
    words = _Words()
    lines: list[str] = []
    for number, row in enumerate(_rows(program, freed, streams or {}, origin_ns)):
        parts = [f'{head}{number},"op":"{row.op}"']
        if row.ubatch is not None:
            parts.append(f'"ubatch":{row.ubatch}')
        if row.slice is not None:
            parts.append(f'"slice":{row.slice}')
        if row.stream is not None:
            parts.append(f'"stream":{words[row.stream]}')
        if row.at is not None:
            parts.append(f'"at":{row.at!r}')
        if row.name:
            parts.append(f'"name":{words[row.name]}')
        if row.event is not None:
            parts.append(f'"event":{row.event}')
        if row.of is not None:
            parts.append(f'"of":{row.of}')
        if row.owner is not None:
            parts.append(f'"owner":{row.owner}')
        if row.bytes is not None:
            parts.append(f'"bytes":{row.bytes}')
        if row.memory:
            parts.append(f'"memory":[{",".join(map(_entry, row.memory))}]')
        lines.append(",".join(parts) + "}\n")
    return "".join(lines).encode("ascii")


class _Words(dict[str, str]):
    """Names -> as JSON has them."""

    def __missing__(self, word: str) -> str:
        quoted = self[word] = _quoted(word)
        return quoted


def _entry(entry: list[Any]) -> str:
    way, name, begin, end, *rest = entry
    buffer = name if name.__class__ is int else _quoted(name)
    text = f'["{way}",{buffer},{begin},{"null" if end is None else end}'
    if rest:
        text += f",{'true' if rest[0] else 'false'}" + "".join(f",{number}" for number in rest[1:])
    return text + "]"


class _Row(NamedTuple):
    """An `OpRecord` but for the step and its number."""

    op: str
    ubatch: int | None
    slice: int | None
    stream: str | None
    at: float | None
    name: str
    event: int | None
    of: int | None
    owner: int | None
    bytes: int | None
    memory: list[Any]


def _rows(program: StreamProgram, freed: Sequence[Freed], streams: Mapping[str, str], origin_ns: int) -> Iterator[_Row]:
    numbers: dict[int, int] = {}  # in the program -> in the records
    entry = _Buffers().entry
    waiting = list(reversed(freed))
    number = 0

    def free(it: Freed) -> _Row:
        stream = None if it.stream is None else streams.get(it.stream, it.stream)
        at = None if it.at is None else (it.at - origin_ns) / 1000
        return _Row(
            "free", it.microbatch, it.slice, stream, at, str(it.access.buffer), None, None, None, None,
            [entry(it.access)],
        )  # fmt: skip

    for operation in program.operations:
        while waiting and waiting[-1].position <= operation.number:
            yield free(waiting.pop())
            number += 1
        numbers[operation.number] = number
        number += 1
        kind, stream, at, owner = operation.kind, operation.stream, operation.at, operation.owner
        sent = operation.transfer if kind == "send" else None
        yield _Row(
            kind,
            operation.microbatch,
            operation.slice,
            stream if stream is None else streams.get(stream, stream),
            None if at is None else (at - origin_ns) / 1000,
            operation.name,
            operation.event,
            numbers.get(_of(operation, program)),
            None if owner == operation.microbatch else owner,
            None if sent is None else sent.bytes,
            [entry(access) for access in operation.accesses],
        )
    while waiting:
        yield free(waiting.pop())


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
