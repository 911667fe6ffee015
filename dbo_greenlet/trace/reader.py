"""Reading a trace: line by line, or the whole of it with an index of its steps; plain or compressed with gzip.

One thing may be wrong with a trace and is no error: its last line may be torn, because the run is being recorded right
now or died while it wrote. Everything else (and a torn line anywhere else) is a `TraceFileError` that names the file
and the line.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, BinaryIO, cast

from ..errors import TraceFileError
from .schema import (
    EndRecord,
    GpuRecord,
    HeaderRecord,
    OpRecord,
    PromptRecord,
    Record,
    RecvRecord,
    SliceRecord,
    StepRecord,
    check_version,
    from_json,
)

__all__ = ["StepTrace", "Trace", "TraceReader", "open_trace", "read_trace", "reason_unread"]

# Longer than any record of a sane run; keeps a file that is no text at all from being read into memory as one line.
MAX_LINE_BYTES = 64 * 1024 * 1024


class TraceReader:
    """Iterates over the records of one trace, in file order, without holding them.

    Args:
        path: the trace, plain or gzip (which is seen by its first bytes). It may still be growing; each iteration opens
            it anew and reads what is there.

    Attributes, valid while and after iterating:
        line: number (1-based) of the line that was read last.
        torn: whether the last line was cut off, and dropped.
        unknown_kinds: kinds of records that this version does not know, and passed over.
        version: schema of the file.

    Iterating raises:
        TraceFileError: no such file, a directory, empty, binary, not JSON, no header, a newer schema, a wrong record;
            of a compressed file also: damaged, or cut off. Nobody writes such a file line by line, so one that is cut
            off is no trace that grows.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.line = 0
        self.torn = False
        self.unknown_kinds: set[str] = set()
        self.version = 0

    def __iter__(self) -> Iterator[Record]:
        self.unknown_kinds = set()
        for data in self._objects():
            try:
                record = from_json(data, self.version)
            except TraceFileError as error:
                raise TraceFileError(f"{self.path}, line {self.line}: {error}") from None
            if record is None:
                self.unknown_kinds.add(data["t"])
            else:
                yield record

    def _objects(self) -> Iterator[Any]:
        """Each line as parsed JSON. The first one is a header of a known schema."""
        self.line = 0
        self.torn = False
        try:
            with open_trace(self.path) as file:
                yield from self._objects_in(file)
        except (EOFError, zlib.error, OSError) as error:
            raise TraceFileError(f"{self.path}: {reason_unread(error)}") from error
        if self.line == 0:
            why = (
                "its first line is cut off; the run has only just started, or died"
                if self.torn
                else "the file is empty"
            )
            raise TraceFileError(f"{self.path}: no trace yet: {why}")

    def _objects_in(self, file: BinaryIO) -> Iterator[Any]:
        while line := file.readline(MAX_LINE_BYTES):
            number = self.line + 1
            try:
                data = _parse(line)
            except TraceFileError as error:
                # Only a writer that was cut short leaves a line without its newline.
                if (
                    line.startswith(b"{")
                    and b"\0" not in line
                    and not line.endswith(b"\n")
                    and len(line) < MAX_LINE_BYTES
                ):
                    self.torn = True
                    return
                raise TraceFileError(f"{self.path}, line {number}: {error}") from None
            if number == 1:
                try:
                    self.version = check_version(data)
                except TraceFileError as error:
                    raise TraceFileError(f"{self.path}: {error}") from None
            self.line = number
            yield data


@contextmanager
def open_trace(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """The bytes of a trace, decompressed where it is gzip. Where that is damaged, reading raises what `gzip` raises.

    Raises:
        OSError: it cannot be opened.
    """
    with open(path, "rb") as file:
        # Not opened a second time: it may be a pipe.
        if file.peek(2)[:2] == b"\x1f\x8b":
            with gzip.GzipFile(fileobj=file) as unpacked:
                yield cast(BinaryIO, unpacked)
        else:
            yield file


@dataclass
class StepTrace:
    """All records of one step of one rank.

    Attributes:
        run, step, rank: its identity.
        record: the step record; None in a run that died before the step was complete.
        slices: in the order in which they ran, a failed one included.
        receives: the in-flight windows, in the order in which they were sent.
        gpu: the slices on the GPU, where they were timed: of a step that was replayed from its graph, too.
        ops: the operations, in the order in which the host issued them; where they were recorded.
    """

    run: str
    step: int
    rank: int
    record: StepRecord | None = None
    slices: list[SliceRecord] = field(default_factory=list)
    receives: list[RecvRecord] = field(default_factory=list)
    gpu: list[GpuRecord] = field(default_factory=list)
    ops: list[OpRecord] = field(default_factory=list)

    @property
    def decisions(self) -> tuple[int, ...]:
        """The microbatch that ran, slice by slice: the schedule's decisions.

        Of a step without slices on the host, as the GPU ran them. So are `sites`.
        """
        return tuple(s.ubatch for s in self._in_order)

    @property
    def sites(self) -> tuple[str, ...]:
        """The site at which each of these slices ended: the schedule's sites."""
        return tuple(s.site for s in self._in_order)

    @property
    def _in_order(self) -> list[SliceRecord] | list[GpuRecord]:
        if self.slices:
            return [s for s in self.slices if not s.failed]
        return [s for s in self.gpu if s.stream == "compute"]

    @property
    def receives_as_run(self) -> list[RecvRecord]:
        """The windows whose receive ran, in the order in which it did."""
        ran = [(r.decision, r.at, r) for r in self.receives if r.decision is not None and r.at is not None]
        return [r for _, _, r in sorted(ran, key=lambda entry: entry[:2])]

    @property
    def count(self) -> int:
        """Number of microbatches N; 0 where the step was not split."""
        if self.record is not None and self.record.slices:
            return len(self.record.slices)
        ran = {s.ubatch for s in self.slices} | {s.ubatch for s in self.gpu}
        return 1 + max(ran, default=-1)


@dataclass
class Trace:
    """A whole trace in memory.

    Attributes:
        path: the file.
        headers, ends: by rank.
        prompts: in file order.
        steps: by (run, step, rank), in file order.
        torn: whether the last line was cut off.
        unknown_kinds: kinds of records that were passed over.
    """

    path: str
    headers: dict[int, HeaderRecord] = field(default_factory=dict)
    prompts: list[PromptRecord] = field(default_factory=list)
    steps: dict[tuple[str, int, int], StepTrace] = field(default_factory=dict)
    ends: dict[int, EndRecord] = field(default_factory=dict)
    torn: bool = False
    unknown_kinds: set[str] = field(default_factory=set)

    @property
    def header(self) -> HeaderRecord:
        """The header of the lowest rank."""
        return self.headers[min(self.headers)]

    @property
    def runs(self) -> list[str]:
        """Names of the runs in the file, in order of appearance."""
        return list(dict.fromkeys(run for run, _, _ in self.steps))

    @property
    def ranks(self) -> list[int]:
        """The ranks that left anything in the file, ascending."""
        return sorted(self.headers.keys() | {rank for _, _, rank in self.steps})

    def step(self, step: int, *, run: str | None = None, rank: int | None = None) -> StepTrace:
        """One step; `run` and `rank` default to the first that recorded it.

        Raises:
            TraceFileError: there is no such step; the message says which there are.
        """
        for found in self.steps.values():
            if found.step == step and run in (None, found.run) and rank in (None, found.rank):
                return found
        what = f"step {step}"
        what += f" of run {run}" if run is not None else ""
        what += f" on rank {rank}" if rank is not None else ""
        numbers = sorted({key[1] for key in self.steps})
        if numbers:
            steps = _steps_named(numbers)
            held = f"{steps} of {_named('run', self.runs)} on {_named('rank', self.ranks)}"
        else:
            held = "no steps (yet)"
        raise TraceFileError(f"{self.path} has no {what}; it holds {held}")


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a trace whole. For a file that is too large for that, iterate over `TraceReader(path)`.

    Raises:
        TraceFileError: as `TraceReader`, and for what a file must not hold twice (two files written one after the other
            into one, for example).
    """
    reader = TraceReader(path)
    trace = Trace(reader.path)

    def once(known: bool, what: str) -> None:
        if known:
            raise TraceFileError(
                f"{reader.path}, line {reader.line}: a second {what}; are these two traces in one file?"
            )

    for record in reader:
        if isinstance(record, HeaderRecord):
            once(record.rank in trace.headers, f"header of rank {record.rank}")
            trace.headers[record.rank] = record
        elif isinstance(record, PromptRecord):
            trace.prompts.append(record)
        elif isinstance(record, EndRecord):
            once(record.rank in trace.ends, f"end record of rank {record.rank}")
            trace.ends[record.rank] = record
        else:
            key = (record.run, record.step, record.rank)
            entry = trace.steps.get(key)
            if entry is None:
                entry = trace.steps[key] = StepTrace(*key)
            if isinstance(record, SliceRecord):
                entry.slices.append(record)
            elif isinstance(record, RecvRecord):
                entry.receives.append(record)
            elif isinstance(record, GpuRecord):
                entry.gpu.append(record)
            elif isinstance(record, OpRecord):
                entry.ops.append(record)
            else:
                once(entry.record is not None, f"record of step {record.step}, run {record.run!r}, rank {record.rank}")
                entry.record = record
    trace.torn = reader.torn
    trace.unknown_kinds = reader.unknown_kinds
    return trace


def _steps_named(numbers: list[int]) -> str:
    """Which steps there are, in ascending order; a server's trace holds every n-th of them."""
    if len(numbers) == 1:
        return f"step {numbers[0]}"
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"steps {numbers[0]} to {numbers[-1]}"
    if len(numbers) <= 12:
        return f"steps {', '.join(map(str, numbers))}"
    return f"{len(numbers)} of the steps {numbers[0]} to {numbers[-1]}, the latest {', '.join(map(str, numbers[-6:]))}"


def _named(what: str, values: list[str] | list[int]) -> str:
    return f"{what}{'s' if len(values) > 1 else ''} {', '.join(map(str, values))}"


def _parse(line: bytes) -> Any:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError:
        raise TraceFileError("not text; this is a binary file, not a trace") from None
    if "\0" in text:
        raise TraceFileError("not text; this is a binary file, not a trace")
    try:
        return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise TraceFileError(f"not JSON: {error}") from None


def _refuse_constant(text: str) -> None:
    # Python's parser takes NaN and Infinity, which JSON does not have and which no comparison of times survives.
    raise ValueError(f"{text} is no number in JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def reason_unread(error: EOFError | zlib.error | OSError) -> str:
    """Why a file could not be read to its end, a clause."""
    if isinstance(error, EOFError):
        return "the gzip data ends in the middle; the copy is not whole"
    if isinstance(error, (zlib.error, gzip.BadGzipFile)):
        return f"damaged gzip data ({error})"
    if isinstance(error, FileNotFoundError):
        return "no such file"
    if isinstance(error, IsADirectoryError):
        return "this is a directory; name the trace file in it"
    return (error.strerror or str(error)).lower()
