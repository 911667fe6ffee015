"""A trace of ours as columns: ten million slices without ten million objects.

`read_trace` makes an object of each record, which is right for looking at a step and too much for measuring a whole
run. This reads the same lines with msgspec, block by block, and keeps numbers only. A line that msgspec refuses goes to
the strict reader, which knows what is wrong with it, or that it is of a kind to pass over.
"""

from __future__ import annotations

import json
import os
from array import array
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import TraceFileError
from .importers.columns import Names
from .reader import TraceReader
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

    def select(self, which: npt.NDArray[Any]) -> Table:
        """The rows of a mask or an index."""
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
    """Read a trace of ours.

    Raises:
        TraceFileError: as `reader.TraceReader`; and it is compressed.
    """
    with open(path, "rb") as file:
        if file.read(2) == b"\x1f\x8b":
            raise TraceFileError(f"{os.fspath(path)}: a compressed trace of ours; decompress it first (gunzip)")
    # The strict reader judges the header; it is read again with the rest.
    header = TraceReader(path)
    next(iter(header))
    if header.version == SCHEMA_VERSION:
        builder = _Builder(os.fspath(path))
        torn = builder.read_quickly()
        if torn is not None:
            return builder.done(torn)
    # Of an older schema, or with something wrong in it. The strict reader says what, and on which line.
    builder = _Builder(os.fspath(path))
    return builder.done(builder.read_strictly())


class _Rows:
    """Columns that grow by lists. One that never grew stands for zeros, and takes no memory."""

    def __init__(self) -> None:
        self.columns = {name: array(_TYPES[name]) for name in Table.__dataclass_fields__}

    def add(self, **values: list[Any]) -> None:
        for name, more in values.items():
            self.columns[name].extend(more)

    def table(self) -> Table:
        count = len(self.columns["begin"])
        made = {}
        for name, values in self.columns.items():
            column = np.frombuffer(values, dtype=values.typecode)
            made[name] = column if len(column) else np.broadcast_to(np.zeros(1, dtype=values.typecode), count)
        return Table(**made | {"comm": made["comm"] != 0, "alone": made["alone"] != 0})


_TYPES = dict.fromkeys(("begin", "end", "waited", "error"), "d")
_TYPES |= dict.fromkeys(("group", "ubatch", "slice", "site", "after", "sent_in", "ran_in"), "i")
_TYPES |= {"comm": "b", "alone": "b"}


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
        decoder = msgspec.json.Decoder(_Slice | _Recv | _Gpu | _Step | _Header | _Prompt | _End)
        for block, whole in self._blocks():
            try:
                records = decoder.decode_lines(block)
            except (msgspec.DecodeError, UnicodeDecodeError):
                known = [line for line in block.split(b"\n") if not _is_of_unknown_kind(line)]
                if not whole and block.startswith(b"{") and b"\0" not in block and known:
                    return True
                try:
                    records = decoder.decode_lines(b"\n".join(known))
                except (msgspec.DecodeError, UnicodeDecodeError):
                    return None
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
        with open(self.path, "rb") as file:
            while block := file.read(BLOCK_BYTES):
                whole, newline, tail = (rest + block).rpartition(b"\n")
                rest = tail
                if newline:
                    yield whole, True
        if rest:
            yield rest, False

    def _add(self, records: list[Any]) -> None:
        """Column by column: a comprehension for each takes a quarter of the time of a loop over the records."""
        groups, sites = self.groups, self.sites
        by_type: dict[type, list[Any]] = defaultdict(list)
        for record in records:
            by_type[type(record)].append(record)
        slices = by_type[_Slice] + by_type[SliceRecord]
        self.rows["slice"].add(
            group=[groups[r.run, r.step, r.rank] for r in slices],
            ubatch=[r.ubatch for r in slices],
            slice=[r.slice for r in slices],
            site=[sites[r.site] for r in slices],
            begin=[r.begin for r in slices],
            end=[r.end for r in slices],
        )
        windows = by_type[_Recv] + by_type[RecvRecord]
        whole = [r for r in windows if r.at is not None]
        self.open_receives += len(windows) - len(whole)
        self.rows["recv"].add(
            group=[groups[r.run, r.step, r.rank] for r in whole],
            ubatch=[r.ubatch for r in whole],
            site=[sites[r.site] for r in whole],
            begin=[r.sent for r in whole],
            end=[r.at for r in whole],
            sent_in=[-1 if r.sent_decision is None else r.sent_decision for r in whole],
            ran_in=[-1 if r.decision is None else r.decision for r in whole],
            alone=[r.by is None for r in whole],
        )
        stretches = by_type[_Gpu] + by_type[GpuRecord]
        self.rows["gpu"].add(
            group=[groups[r.run, r.step, r.rank] for r in stretches],
            ubatch=[r.ubatch for r in stretches],
            slice=[r.slice for r in stretches],
            site=[sites[r.site] for r in stretches],
            after=[sites[r.after] for r in stretches],
            comm=[r.stream == "comm" for r in stretches],
            begin=[r.begin for r in stretches],
            end=[r.end for r in stretches],
            waited=[r.waited for r in stretches],
            error=[r.error for r in stretches],
        )
        for step in by_type[_Step] + by_type[StepRecord]:
            group = groups[step.run, step.step, step.rank]
            if step.execution == "replayed":
                self.replayed.add(group)

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
