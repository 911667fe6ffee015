"""A trace of ours as columns: ten million slices without ten million objects.

`read_trace` makes an object of each record, which is right for looking at a step and too much for measuring a whole
run. This reads the same lines with msgspec, block by block, and keeps numbers only. A line that msgspec refuses goes to
the strict reader, which knows what is wrong with it, or that it is of a kind to pass over.
"""

from __future__ import annotations

import builtins
import json
import os
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import TraceFileError
from .importers.columns import Names
from .reader import TraceReader, open_trace
from .schema import SCHEMA_VERSION, GpuRecord, RecvRecord, SliceRecord, StepRecord, from_json

__all__ = ["StepColumns", "Table", "read_columns"]

BLOCK_BYTES = 8 * 1024 * 1024
RECORDS_AT_ONCE = 10_000

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]


class _Base(msgspec.Struct, gc=False, tag_field="t"):
    step: int
    rank: int
    run: str


class _Slice(_Base, tag="slice"):
    ubatch: int
    slice: int
    site: str
    begin: float
    end: float


class _Recv(_Base, tag="recv"):
    ubatch: int
    site: str
    sent: float
    by: int | None = None
    at: float | None = None
    decision: int | None = None
    sent_decision: int | None = None


class _Gpu(_Base, tag="gpu"):
    ubatch: int
    slice: int
    site: str
    stream: str
    begin: float
    end: float
    waited: float = 0.0
    after: str = ""
    error: float = 0.0


class _Op(_Base, tag="op"):
    pass


class _Step(_Base, tag="step"):
    split: bool
    execution: str = ""


class _Header(msgspec.Struct, gc=False, tag_field="t", tag="header"):
    schema: int = SCHEMA_VERSION


class _Prompt(msgspec.Struct, gc=False, tag_field="t", tag="prompt"):
    pass


class _End(msgspec.Struct, gc=False, tag_field="t", tag="end"):
    pass


@dataclass(frozen=True)
class Table:
    """Columns of one record kind.

    Attributes:
        group: index into `StepColumns.groups`.
        ubatch, slice: as in the records; slice is 0 for receives.
        site, after: index into `StepColumns.sites`.
        begin, end: microseconds; of a receive from its send to its completion.
        waited, error: of GPU records, 0 elsewhere.
        comm: whether a GPU record is of the communication stream.
        sent_in, ran_in: of receives, the decisions of the schedule (slices of the step, from 0) during which they were
            sent and ran; -1 where the trace does not say.
        alone: whether no sibling ran the receive, so that it ran when its owner was resumed.
    """

    group: Ints
    ubatch: Ints
    slice: Ints
    site: Ints
    after: Ints
    comm: npt.NDArray[np.bool_]
    begin: Floats
    end: Floats
    waited: Floats
    error: Floats
    sent_in: Ints
    ran_in: Ints
    alone: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.begin)

    def select(self, which: npt.NDArray[Any] | builtins.slice) -> Table:
        """The rows of a mask, an index or a slice."""
        return Table(**{name: getattr(self, name)[which] for name in self.__dataclass_fields__})


@dataclass(frozen=True)
class StepColumns:
    """A whole trace.

    Attributes:
        path: the file.
        groups: the steps, as (run, step, rank), in the order in which they come up.
        replayed: numbers of the groups that were replayed from graphs.
        sites: names of the yield sites.
        slices, receives, gpu: the records. Receives that never were complete are left out.
        open_receives: how many these are.
        torn: whether the last line was cut off.
    """

    path: str
    groups: list[tuple[str, int, int]]
    replayed: set[int]
    sites: list[str]
    slices: Table
    receives: Table
    gpu: Table
    open_receives: int
    torn: bool


def read_columns(path: str | os.PathLike[str]) -> StepColumns:
    """Read a trace of ours, plain or gzip.

    Raises:
        TraceFileError: as `reader.TraceReader`; and it has no steps.
    """
    # The strict reader judges the header; it is read again with the rest.
    header = TraceReader(path)
    next(iter(header))
    if header.version == SCHEMA_VERSION:
        builder = _Builder(os.fspath(path))
        try:
            torn = builder.read_quickly()
        except (EOFError, OSError, zlib.error):
            torn = None  # a damaged file
        if torn is not None:
            return builder.done(torn)
    # Of an older schema, or with something wrong in it. The strict reader says what, and on which line.
    builder = _Builder(os.fspath(path))
    return builder.done(builder.read_strictly())


class _Rows:
    """Columns that grow by pieces. One that never grew stands for zeros, and takes no memory."""

    def __init__(self) -> None:
        self.pieces: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in Table.__dataclass_fields__}
        self.count = 0

    def add(self, count: int, **values: Iterable[Any]) -> None:
        """Rows, as an iterable of `count` values for each column."""
        if count:
            self.count += count
            for name, more in values.items():
                self.pieces[name].append(np.fromiter(more, dtype=_TYPES[name], count=count))

    def table(self) -> Table:
        made = {}
        for name, pieces in self.pieces.items():
            if pieces:
                made[name] = np.concatenate(pieces)
                pieces.clear()
            else:
                made[name] = np.broadcast_to(np.zeros(1, dtype=_TYPES[name]), self.count)
        return Table(**made)


_TYPES: dict[str, Any] = dict.fromkeys(("begin", "end", "waited", "error"), np.float64)
_TYPES |= dict.fromkeys(("group", "ubatch", "slice", "site", "after", "sent_in", "ran_in"), np.int32)
_TYPES |= dict.fromkeys(("comm", "alone"), np.bool_)

# A map over one of these costs half of what a comprehension does.
_GROUP = attrgetter("run", "step", "rank")
_GET = {
    name: attrgetter(name)
    for name in ("ubatch", "slice", "site", "begin", "end", "sent", "at", "after", "waited", "error")
}


class _Numbers(dict[Any, int]):
    def __missing__(self, key: Any) -> int:
        number = self[key] = len(self)
        return number


class _Builder:
    def __init__(self, path: str) -> None:
        self.path = path
        self.groups: dict[Any, int] = _Numbers()
        self.sites = Names({"": 0})
        self.replayed: set[int] = set()
        self.rows = {kind: _Rows() for kind in ("slice", "recv", "gpu")}
        self.open_receives = 0

    def read_quickly(self) -> bool | None:
        """Whether the last line was torn; None where the strict reader has to look."""
        decoder = msgspec.json.Decoder(_Slice | _Recv | _Gpu | _Op | _Step | _Header | _Prompt | _End)
        for block, whole in self._blocks():
            # Ours are ASCII, and msgspec does not look at the encoding of what it passes over.
            if not block.isascii():
                return None
            try:
                records = decoder.decode_lines(block)
            except msgspec.DecodeError:
                lines = block.split(b"\n")
                known = [line for line in lines if not _is_of_unknown_kind(line)]
                if not whole and block.startswith(b"{") and b"\0" not in block and known:
                    return True
                try:
                    records = decoder.decode_lines(b"\n".join(known))
                except msgspec.DecodeError:
                    return None
                if len(records) != len(known):
                    return None
            else:
                if len(records) != block.count(b"\n") + 1:
                    return None  # it passes over empty lines, too
            self._add(records)
        return False

    def read_strictly(self) -> bool:
        """Whether the last line was torn."""
        reader = TraceReader(self.path)
        records = iter(reader)
        while some := list(islice(records, RECORDS_AT_ONCE)):
            self._add(some)
        return reader.torn

    def _blocks(self) -> Iterator[tuple[bytes, bool]]:
        """Lines, and whether the last of them has its newline."""
        rest = b""
        with open_trace(self.path) as file:
            while block := file.read(BLOCK_BYTES):
                whole, newline, tail = (rest + block).rpartition(b"\n")
                rest = tail
                if newline:
                    yield whole, True
        if rest:
            yield rest, False

    def _add(self, records: list[Any]) -> None:
        """Column by column, without a line of Python for a single record."""
        by_type: dict[type, list[Any]] = defaultdict(list)
        for record in records:
            by_type[type(record)].append(record)
        try:
            self._add_rows(by_type)
        except OverflowError:
            raise TraceFileError(
                f"{self.path}: the number of a microbatch, a slice or a decision in it is larger than any run has"
            ) from None
        for step in by_type[_Step] + by_type[StepRecord]:
            group = self.groups[step.run, step.step, step.rank]
            if step.execution == "replayed":
                self.replayed.add(group)

    def _add_rows(self, by_type: dict[type, list[Any]]) -> None:
        group, site, get = self.groups.__getitem__, self.sites.__getitem__, _GET
        slices = by_type[_Slice] + by_type[SliceRecord]
        self.rows["slice"].add(
            len(slices),
            group=map(group, map(_GROUP, slices)),
            ubatch=map(get["ubatch"], slices),
            slice=map(get["slice"], slices),
            site=map(site, map(get["site"], slices)),
            begin=map(get["begin"], slices),
            end=map(get["end"], slices),
        )
        windows = by_type[_Recv] + by_type[RecvRecord]
        whole = [r for r in windows if r.at is not None]
        self.open_receives += len(windows) - len(whole)
        self.rows["recv"].add(
            len(whole),
            group=map(group, map(_GROUP, whole)),
            ubatch=map(get["ubatch"], whole),
            site=map(site, map(get["site"], whole)),
            begin=map(get["sent"], whole),
            end=map(get["at"], whole),
            sent_in=(-1 if r.sent_decision is None else r.sent_decision for r in whole),
            ran_in=(-1 if r.decision is None else r.decision for r in whole),
            alone=(r.by is None for r in whole),
        )
        stretches = by_type[_Gpu] + by_type[GpuRecord]
        self.rows["gpu"].add(
            len(stretches),
            group=map(group, map(_GROUP, stretches)),
            ubatch=map(get["ubatch"], stretches),
            slice=map(get["slice"], stretches),
            site=map(site, map(get["site"], stretches)),
            after=map(site, map(get["after"], stretches)),
            comm=(r.stream == "comm" for r in stretches),
            begin=map(get["begin"], stretches),
            end=map(get["end"], stretches),
            waited=map(get["waited"], stretches),
            error=map(get["error"], stretches),
        )

    def done(self, torn: bool) -> StepColumns:
        if not self.groups:
            raise TraceFileError(f"{self.path}: the trace has no steps (yet)")
        return StepColumns(
            path=self.path,
            groups=list(self.groups),
            replayed=self.replayed,
            sites=list(self.sites),
            slices=self.rows["slice"].table(),
            receives=self.rows["recv"].table(),
            gpu=self.rows["gpu"].table(),
            open_receives=self.open_receives,
            torn=torn,
        )


def _is_of_unknown_kind(line: bytes) -> bool:
    try:
        return from_json(json.loads(line)) is None
    except (ValueError, RecursionError, TraceFileError):
        return False
