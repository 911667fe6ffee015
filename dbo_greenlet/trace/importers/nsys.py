"""SQLite that Nsight Systems exports (`nsys export --type sqlite`), by its documented schema.

Tables and columns that are read, all of them optional except StringIds, since they are created only where there is
something to put into them and grow with the versions:

    CUPTI_ACTIVITY_KIND_KERNEL       start end deviceId streamId correlationId globalPid demangledName graphNodeId
    CUPTI_ACTIVITY_KIND_MEMCPY       ... bytes copyKind srcDeviceId dstDeviceId
    CUPTI_ACTIVITY_KIND_MEMSET       ... bytes
    CUPTI_ACTIVITY_KIND_GRAPH_TRACE  ... a graph in one piece (without --cuda-graph-trace=node)
    CUPTI_ACTIVITY_KIND_RUNTIME      start end globalTid correlationId nameId
    NVTX_EVENTS                      start end globalTid text textId
    CUPTI_ACTIVITY_KIND_SYNCHRONIZATION  start end deviceId streamId correlationId globalPid syncType, and as below
    CUPTI_ACTIVITY_KIND_CUDA_EVENT   deviceId streamId correlationId globalPid eventId eventSyncId
    StringIds                        id value
    TARGET_INFO_GPU                  name

Times are nanoseconds. A globalTid is a globalPid with the thread in its lowest 24 bits.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterable
from itertools import chain
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from ...errors import TraceFileError
from ..profile import COPY, GRAPH, KERNEL, SET, Activities, Calls, Profile, Ranges, Waits, empty
from .columns import Names

__all__ = ["read_nsys"]

Ints = npt.NDArray[np.int64]

_KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
_COPIES = "CUPTI_ACTIVITY_KIND_MEMCPY"
_SETS = "CUPTI_ACTIVITY_KIND_MEMSET"
_GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
_CALLS = "CUPTI_ACTIVITY_KIND_RUNTIME"
_RANGES = "NVTX_EVENTS"
_SYNCHRONIZATIONS = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"
_RECORDS = "CUPTI_ACTIVITY_KIND_CUDA_EVENT"
# Of CUpti_ActivitySynchronizationType.
_STREAM_WAITS = 2
_EVENTS = (_KERNELS, _COPIES, _SETS, _GRAPHS, _CALLS, _RANGES)
_WORK = re.compile(r"Launch|Memcpy|Memset|WaitEvent|Synchronize")
# CUpti_ActivityMemcpyKind, as torch.profiler names them.
_COPY_KINDS = ("of another kind", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP")
_DEVICE_TO_DEVICE, _PEER_TO_PEER = 8, 10
_THREAD_BITS = 24


def read_nsys(path: str | os.PathLike[str]) -> Profile:
    """Read one database.

    Raises:
        TraceFileError: cannot be read, damaged, not of Nsight Systems, without GPU events, or with events that end
            before they begin; names the file.
    """
    file = os.fspath(path)
    try:
        database = sqlite3.connect(f"file:{quote(os.path.abspath(file))}?mode=ro", uri=True)
        try:
            return _Reader(file, database).profile()
        finally:
            database.close()
    except sqlite3.DatabaseError as error:
        raise TraceFileError(f"{file}: the SQLite database is damaged or not whole ({error})") from error


class _Reader:
    def __init__(self, file: str, database: sqlite3.Connection) -> None:
        self.file = file
        self.database = database
        self.names = Names()
        found = database.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")
        self.tables = {str(name) for (name,) in found}
        if any(name.startswith("rocpd_") for name in self.tables):
            raise TraceFileError(
                f"{file}: a database of ROCm's profiler, which is not read; profile with torch.profiler instead"
            )
        if "StringIds" not in self.tables:
            raise TraceFileError(f"{file}: an SQLite database, but not one that Nsight Systems exported")
        self.origin = min((low for table in _EVENTS if (low := self._earliest(table)) is not None), default=0)
        self.processes: dict[int, int] = {}

    def profile(self) -> Profile:
        tables = [self._kernels(), self._copies(), self._sets(), self._graphs()]
        activities = _joined(Activities, [table for table in tables if table is not None])
        if activities is None:
            raise TraceFileError(
                f"{self.file}: no event in it ran on a GPU; record with nsys profile --trace=cuda,nvtx"
            )
        if backward := int((activities.end < activities.begin).sum()):
            raise TraceFileError(f"{self.file}: {backward} of its events end before they begin")
        calls, ranges = self._calls(), self._ranges()
        missing = []
        if not len(calls):
            missing.append("no calls of the host (launches)")
        gpus: Iterable[Any] = []
        if "name" in self._columns("TARGET_INFO_GPU"):
            gpus = self.database.execute("SELECT name FROM TARGET_INFO_GPU")
        return Profile(
            path=self.file,
            source="Nsight Systems",
            names=list(self.names),
            activities=activities.sorted(),
            calls=calls.sorted(),
            ranges=ranges.sorted(),
            origin=self.origin / 1000,
            unit="ns",
            ranks=False,
            gpus=list(dict.fromkeys(str(name) for (name,) in gpus)),
            missing=missing,
            waits=self._waits().sorted(),
        )

    # -- tables ------------------------------------------------------------------------------------------------------

    def _kernels(self) -> Activities | None:
        named = self._first_column(_KERNELS, "demangledName", "shortName", "mangledName")
        rows = self._rows(_KERNELS, *_PLACE, named)
        return None if rows is None else self._activities(rows, KERNEL, self._strings(rows[:, 7]))

    def _copies(self) -> Activities | None:
        rows = self._rows(_COPIES, *_PLACE, "copyKind", "bytes", "srcDeviceId", "dstDeviceId")
        if rows is None:
            return None
        kind, source, target = rows[:, 7].copy(), rows[:, 9], rows[:, 10]
        # From one GPU's memory to another's is a peer copy, whatever the driver calls it.
        kind[(kind == _DEVICE_TO_DEVICE) & (source >= 0) & (target >= 0) & (source != target)] = _PEER_TO_PEER
        kind[(kind < 0) | (kind >= len(_COPY_KINDS))] = 0
        texts = {int(number): self.names[f"Memcpy {_COPY_KINDS[number]}"] for number in np.unique(kind)}
        return self._activities(rows, COPY, _mapped(kind, texts), rows[:, 8])

    def _sets(self) -> Activities | None:
        rows = self._rows(_SETS, *_PLACE, "bytes")
        if rows is None:
            return None
        return self._activities(rows, SET, np.full(len(rows), self.names["Memset (Device)"]), rows[:, 7])

    def _graphs(self) -> Activities | None:
        rows = self._rows(_GRAPHS, *_PLACE)
        if rows is None:
            return None
        return self._activities(rows, GRAPH, np.full(len(rows), self.names["CUDA graph, in one piece"]))

    def _calls(self) -> Calls:
        rows = self._rows(_CALLS, "start", "end", "globalTid", "correlationId", "nameId")
        if rows is None:
            return empty(Calls)
        texts = self._texts(rows[:, 4])
        work = {number for number, text in texts.items() if _WORK.search(text)}
        rows = rows[np.isin(rows[:, 4], list(work))]
        named = _mapped(rows[:, 4], {number: self.names[texts[number]] for number in work})
        return Calls(*self._times(rows), named, self._ranks(rows[:, 2]), rows[:, 2], rows[:, 3])

    def _ranges(self) -> Ranges:
        columns = self._columns(_RANGES)
        # Text stands in the row or in StringIds, by version and by how the program registered it.
        by_id, in_row = "textId" in columns, "text" in columns
        text = "COALESCE(e.text, s.value)" if by_id and in_row else "s.value" if by_id else "e.text"
        if not {"start", "end", "globalTid"} <= columns or not (by_id or in_row):
            return empty(Ranges)
        join = "LEFT JOIN StringIds AS s ON s.id = e.textId" if by_id else ""
        found = self.database.execute(
            f"SELECT e.start, e.end, e.globalTid, {text} FROM {_RANGES} AS e {join} "
            f"WHERE e.end IS NOT NULL AND e.globalTid IS NOT NULL AND {text} IS NOT NULL"
        )
        names = self.names
        rows = _array(([start, end, thread, names[str(name)]] for start, end, thread, name in found), 4)
        return Ranges(*self._times(rows), rows[:, 3].copy(), self._ranks(rows[:, 2]), rows[:, 2].copy())

    def _waits(self) -> Waits:
        rows = self._rows(_SYNCHRONIZATIONS, *_PLACE[:6], "syncType", "eventId", "eventSyncId")
        if rows is None or not (rows := rows[rows[:, 6] == _STREAM_WAITS]).size:
            return empty(Waits)
        records = self._rows(_RECORDS, *_PLACE[2:6], "eventId", "eventSyncId", timed=False)
        place = _latest_records(rows, np.zeros((0, 6), dtype=np.int64) if records is None else records)
        of = np.full((len(rows), 2), -1, dtype=np.int64)
        if records is not None:
            of[place >= 0] = records[place[place >= 0]][:, 1:3]
        return Waits(
            *self._times(rows),
            rank=self._ranks(rows[:, 5]),
            device=rows[:, 2].copy(),
            stream=rows[:, 3].copy(),
            on_stream=of[:, 0].copy(),
            correlation=rows[:, 4].copy(),
            record_correlation=of[:, 1].copy(),
            recorded=self._record_calls(rows[:, 5], of[:, 1]),
        )

    def _record_calls(self, processes: Ints, correlations: Ints) -> npt.NDArray[np.float64]:
        """When the calls that recorded an event began, by process and correlation id."""
        wanted = "SELECT id FROM StringIds WHERE value LIKE '%EventRecord%'"
        rows = self._rows(_CALLS, "start", "globalTid", "correlationId", where=f"nameId IN ({wanted})")
        began = {}
        if rows is not None:
            began = {(thread >> _THREAD_BITS, number): start for start, thread, number in rows.tolist()}
        keys = zip((processes >> _THREAD_BITS).tolist(), correlations.tolist(), strict=True)
        times = [began.get(key) for key in keys]
        return np.array([np.nan if time is None else (time - self.origin) / 1000 for time in times], dtype=np.float64)

    # -- parts of rows -----------------------------------------------------------------------------------------------

    def _activities(self, rows: Ints, kind: int, name: Ints, size: Ints | None = None) -> Activities:
        return Activities(
            *self._times(rows),
            name=name,
            kind=np.full(len(rows), kind),
            rank=self._ranks(rows[:, 5]),
            device=rows[:, 2].copy(),
            stream=rows[:, 3].copy(),
            correlation=rows[:, 4].copy(),
            graph_node=np.where(rows[:, 6] > 0, rows[:, 6], -1),
            size=np.full(len(rows), -1) if size is None else size.copy(),
        )

    def _times(self, rows: Ints) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        # Subtracted as integers: nanoseconds of a wall clock do not fit into a double.
        return (rows[:, 0] - self.origin) / 1000, (rows[:, 1] - self.origin) / 1000

    def _ranks(self, identifiers: Ints) -> Ints:
        """The number of the process of each globalPid or globalTid, in the order in which they come up."""
        processes = identifiers >> _THREAD_BITS
        for process in np.unique(processes):
            self.processes.setdefault(int(process), len(self.processes))
        return _mapped(processes, self.processes)

    def _strings(self, identifiers: Ints) -> Ints:
        texts = self._texts(identifiers)
        unnamed = "a kernel without a name"
        used = map(int, np.unique(identifiers))
        return _mapped(identifiers, {number: self.names[texts.get(number, unnamed)] for number in used})

    def _texts(self, identifiers: Ints) -> dict[int, str]:
        wanted = set(map(int, np.unique(identifiers)))
        found = self.database.execute("SELECT id, value FROM StringIds")
        return {number: str(value) for number, value in found if number in wanted}

    # -- SQL ---------------------------------------------------------------------------------------------------------

    def _columns(self, table: str) -> set[str]:
        return {str(row[1]) for row in self.database.execute(f"PRAGMA table_info({table})")}

    def _first_column(self, table: str, *choices: str) -> str:
        columns = self._columns(table)
        return next((name for name in choices if name in columns), choices[0])

    def _earliest(self, table: str) -> int | None:
        if "start" not in self._columns(table):
            return None
        (low,) = self.database.execute(f"SELECT MIN(start) FROM {table}").fetchone()
        return None if low is None else int(low)

    def _rows(self, table: str, *wanted: str, timed: bool = True, where: str = "") -> Ints | None:
        """The wanted columns as integers; -1 for what a version does not have. None for no rows."""
        columns = self._columns(table)
        if not columns or (timed and not {"start", "end"} <= columns):
            return None
        chosen = ", ".join(f"COALESCE({name}, -1)" if name in columns else "-1" for name in wanted)
        some = f"WHERE {where}" if where else ""
        rows = _array(self.database.execute(f"SELECT {chosen} FROM {table} {some}"), len(wanted))
        return rows if len(rows) else None


_PLACE = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid", "graphNodeId")


def _array(rows: Iterable[Any], width: int) -> Ints:
    return np.fromiter(chain.from_iterable(rows), dtype=np.int64).reshape(-1, width)


def _mapped(values: Ints, to: dict[int, int]) -> Ints:
    unique, inverse = np.unique(values, return_inverse=True)
    return np.array([to[int(value)] for value in unique], dtype=np.int64)[inverse]


def _joined(columns: type[Activities], tables: list[Activities]) -> Activities | None:
    if not tables:
        return None
    names = Activities.__dataclass_fields__
    return columns(**{name: np.concatenate([getattr(table, name) for table in tables]) for name in names})


def _latest_records(waits: Ints, records: Ints) -> Ints:
    """Of each wait the record of its event that it waits for, as an index; -1 where there is none.

    One number (eventSyncId) joins the two; versions without it know only the event, and then it is the event's latest
    record: correlation ids of a process ascend.
    """
    latest: dict[tuple[int, int], int] = {}
    by_number = {(int(row[3]), int(row[5])): place for place, row in enumerate(records) if row[5] >= 0}
    order = sorted(
        [(int(row[3]), int(row[2]), 0, place) for place, row in enumerate(records)]
        + [(int(row[5]), int(row[4]), 1, place) for place, row in enumerate(waits)]
    )
    found = np.full(len(waits), -1, dtype=np.int64)
    for process, _, waiting, place in order:
        if not waiting:
            latest[process, int(records[place][4])] = place
            continue
        row = waits[place]
        found[place] = by_number.get((process, int(row[8])), -1) if row[8] >= 0 else -1
        if found[place] < 0:
            found[place] = latest.get((process, int(row[7])), -1)
    return found
