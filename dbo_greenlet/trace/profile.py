"""A GPU profile in memory: columns of what ran on the GPU, of the host's calls that launched it, and of named ranges.

Columns are numpy arrays of equal length, one entry per event; names are kept once and columns hold their index. Times
are microseconds since `Profile.origin`, as float64, sorted by begin. -1 stands for "not there" in every integer column.

A profile is kept in a file (`save`, `load`) as numpy's .npz: a ZIP archive with one array per column, and one with the
rest as JSON. JSON Lines, the form of our own traces, was rejected for it: nothing appends to an imported profile, and
ten million kernels are read as columns in the time that JSON takes for a hundred thousand.
"""

from __future__ import annotations

import dataclasses
import json
import os
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ..errors import TraceFileError

__all__ = [
    "COPY",
    "GRAPH",
    "KERNEL",
    "SET",
    "Activities",
    "Calls",
    "Profile",
    "Ranges",
    "Waits",
    "empty",
    "load",
    "save",
]

# Kinds of activities. GRAPH is a whole graph in one piece, whose kernels the profile does not show.
KERNEL, COPY, SET, GRAPH = range(4)

_DEVICE_BITS = 16

FORMAT = "dbo_greenlet profile"
FORMAT_VERSION = 1

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

AnyColumns = TypeVar("AnyColumns", bound="Columns")


@dataclass(frozen=True)
class Columns:
    """Columns of one length."""

    begin: Floats
    end: Floats

    def __len__(self) -> int:
        return len(self.begin)

    def select(self: AnyColumns, which: npt.NDArray[Any]) -> AnyColumns:
        """The rows of a mask or an index."""
        return type(self)(**{f.name: getattr(self, f.name)[which] for f in dataclasses.fields(self)})

    def sorted(self: AnyColumns) -> AnyColumns:
        """By begin; what begins together stays in order."""
        if (self.begin[1:] >= self.begin[:-1]).all():
            return self
        return self.select(np.argsort(self.begin, kind="stable"))


@dataclass(frozen=True)
class Activities(Columns):
    """What ran on GPUs.

    Attributes:
        name: index into `Profile.names`.
        kind: KERNEL, COPY, SET or GRAPH.
        rank: the rank; where the profile does not tell, the number of the process in the order of the file.
        device: number of the GPU in its process.
        stream: number of the stream, as the profile has it.
        correlation: what its launch call has, too.
        graph_node: the node of the graph that it ran as; -1 where no graph launched it, or nobody recorded the node.
        size: bytes that were copied or set, or that this rank gave to a collective of NCCL; -1 where nobody says.
    """

    name: Ints
    kind: Ints
    rank: Ints
    device: Ints
    stream: Ints
    correlation: Ints
    graph_node: Ints
    size: Ints


@dataclass(frozen=True)
class Calls(Columns):
    """Calls of the CUDA or HIP runtime or driver: launches, waits, synchronisations.

    Attributes:
        name, rank, correlation: as in `Activities`.
        thread: the thread that called.
    """

    name: Ints
    rank: Ints
    thread: Ints
    correlation: Ints


@dataclass(frozen=True)
class Ranges(Columns):
    """Named ranges on the host: record_function, NVTX.

    Attributes:
        name, rank: as in `Activities`.
        thread: the thread that opened it.
    """

    name: Ints
    rank: Ints
    thread: Ints


@dataclass(frozen=True)
class Waits(Columns):
    """Streams that were made to wait for an event: `begin` and `end` of the call that did. Few profiles have them.

    Attributes:
        rank, device: as in `Activities`.
        stream: the stream that waits.
        on_stream: the stream on which the event was recorded.
        correlation: of the call that makes the stream wait.
        record_correlation: of the call that recorded the event.
        recorded: microseconds at which that call began; NaN where the profile does not have it.
    """

    rank: Ints
    device: Ints
    stream: Ints
    on_stream: Ints
    correlation: Ints
    record_correlation: Ints
    recorded: Floats


def empty(columns: type[AnyColumns]) -> AnyColumns:
    """Columns of length 0."""
    none: Any = {
        f.name: np.zeros(0, dtype=np.float64 if f.name in _FLOATS else np.int64) for f in dataclasses.fields(columns)
    }
    return columns(**none)


_FLOATS = ("begin", "end", "recorded")


@dataclass(frozen=True)
class Profile:
    """A profile.

    Attributes:
        path: the file it came from.
        source: the profiler: "torch.profiler", "Nsight Systems".
        names: what `name` columns index.
        activities, calls, ranges: the events.
        origin: the profiler's time at microsecond 0, in microseconds.
        unit: what the file counts in: "us" or "ns".
        ranks: whether `rank` columns hold ranks, or numbers of processes.
        gpus: names of the GPUs.
        missing: what the profile does not hold, each as a clause that says so.
        notes: what a reader should know about how it was read, each as a sentence.
        waits: streams that wait for events, where the profiler was asked for them (torch.profiler:
            `_ExperimentalConfig(enable_cuda_sync_events=True)`; Nsight Systems: `--cuda-event-trace=true`).
    """

    path: str
    source: str
    names: list[str]
    activities: Activities
    calls: Calls
    ranges: Ranges
    origin: float = 0.0
    unit: str = "us"
    ranks: bool = True
    gpus: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    waits: Waits = field(default_factory=lambda: empty(Waits))

    def groups(self) -> tuple[list[tuple[int, int]], Ints]:
        """The (rank, device) pairs that ran anything, ascending, and of each activity which it belongs to.

        Each pair is a GPU with a time line of its own.
        """
        keys = (self.activities.rank << _DEVICE_BITS) + self.activities.device
        unique, inverse = np.unique(keys, return_inverse=True)
        pairs = [(int(key) >> _DEVICE_BITS, int(key) & ((1 << _DEVICE_BITS) - 1)) for key in unique]
        return pairs, inverse.astype(np.int64)


_TABLES = {"activities": Activities, "calls": Calls, "ranges": Ranges, "waits": Waits}


def save(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write a profile to a file, which then is there whole or not at all.

    Raises:
        TraceFileError: the file cannot be written.
    """
    rest = {f.name: getattr(profile, f.name) for f in dataclasses.fields(profile) if f.name not in _TABLES} | {
        "format": FORMAT,
        "version": FORMAT_VERSION,
    }
    arrays = {
        f"{table}.{f.name}": getattr(getattr(profile, table), f.name)
        for table, columns in _TABLES.items()
        for f in dataclasses.fields(columns)
    }
    text = np.frombuffer(json.dumps(rest).encode(), dtype=np.uint8)
    target = Path(path)
    partial = target.with_name(f"{target.name}.part{os.getpid()}")
    try:
        try:
            with open(partial, "wb") as file:
                np.savez(file, rest=text, **arrays)
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise TraceFileError(f"{target} cannot be written: {(error.strerror or str(error)).lower()}") from error


def load(path: str | os.PathLike[str]) -> Profile:
    """Read what `save` wrote.

    Raises:
        TraceFileError: no such file, another kind of archive, a damaged one, or one of a newer version.
    """
    damaged = f"{os.fspath(path)}: the imported profile is damaged; import it again"
    try:
        with np.load(path, allow_pickle=False) as archive:
            if "rest" not in archive:
                raise TraceFileError(f"{os.fspath(path)}: a ZIP archive, but no imported profile")
            rest = json.loads(archive["rest"].tobytes())
            if rest.pop("format", None) != FORMAT:
                raise TraceFileError(f"{os.fspath(path)}: a ZIP archive, but no imported profile")
            version = rest.pop("version", None)
            if version != FORMAT_VERSION:
                raise TraceFileError(
                    f"{os.fspath(path)}: an imported profile of version {version}, this version of dbo_greenlet reads "
                    f"{FORMAT_VERSION}; import it again"
                )
            tables = {
                table: columns(**{f.name: archive[f"{table}.{f.name}"] for f in dataclasses.fields(columns)})
                for table, columns in _TABLES.items()
                # A file that was imported before there were waits has none.
                if f"{table}.begin" in archive or columns is not Waits
            }
            imported = f"Imported from {rest.pop('path')}."
            rest["notes"] = [imported, *rest["notes"]]
            return Profile(path=os.fspath(path), **rest, **tables)
    except OSError as error:
        raise TraceFileError(f"{os.fspath(path)}: {(error.strerror or str(error)).lower()}") from error
    except (zipfile.BadZipFile, EOFError, KeyError, TypeError, ValueError) as error:
        raise TraceFileError(damaged) from error
