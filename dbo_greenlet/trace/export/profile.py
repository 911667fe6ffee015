"""What a viewer is shown of profiles (torch.profiler, Nsight Systems), in no viewer's format.

One process per rank. Its tracks, from top to bottom:

    ranges of thread ...    named ranges of the host: record_function, NVTX
    calls of thread ...     launches, waits and synchronisations
    stream ...              what ran on each stream of the GPU, with its stage, layer and microbatch

On a track no two slices overlap: nested ranges, and kernels that ran at the same time on one stream (programmatic
dependent launch, branches of a graph), get further tracks below it. Arrows go from a call to the first that it
launched, and from a kernel to the one whose stream waited for an event behind it, where the profile says so
(`profile_edges`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import TraceFileError
from ..attribution import Attribution, attribute
from ..clocks.profiles import profiles_axis
from ..importers import read_profile
from ..kernels import KernelTable, function_name
from ..launches import find_launches
from ..no_communication import no_communication_note
from ..profile import COPY, GRAPH, KERNEL, SET, Activities, Calls, Profile, Ranges
from ..profile_edges import launch_edges, wait_edges
from .items import FIRST_TRACK, FlowEnd, Item, Process, Slice
from .tracks import Tracks

__all__ = ["ProfileModel"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_Arrow = tuple[int, str, str]

_HALF_NANOSECOND = 0.0005  # in microseconds
_AT_ONCE = 10_000  # events that are held as objects
_CATEGORIES = {KERNEL: "kernel", COPY: "copy", SET: "set", GRAPH: "graph"}


class ProfileModel:
    """Iterates, once, over what profiles show.

    Args:
        paths: one or more, of one run: a rank each.
        rank: only this rank.
        table: what the names of kernels and ranges mean; default: the built-in one.

    Attributes, whole when it was iterated over:
        path: what to call the files together.
        shown: number of slices, flows and counter samples.
        offsets: number of the process -> microseconds by which its times were moved onto the common axis. The number is
            the rank, where every file says its own.

    Iterating raises:
        TraceFileError: as `read_profile`; none is of the rank that is asked for.
    """

    def __init__(
        self, paths: Sequence[str | os.PathLike[str]], *, rank: int | None = None, table: KernelTable | None = None
    ) -> None:
        self.paths = [os.fspath(path) for path in paths]
        self.path = ", ".join(self.paths)
        self.offsets: dict[int, float] = {}
        self.notes: list[str] = []
        self._rank = rank
        self._table = KernelTable() if table is None else table
        self._tracks = Tracks()
        self.shown = self._tracks.shown
        self._axis_text: list[str] = []

    def axis_text(self) -> list[str]:
        """How the files were put on one axis, as lines; none for one file."""
        return self._axis_text

    def __iter__(self) -> Iterator[Item]:
        profiles = [read_profile(path) for path in self.paths]
        for profile in profiles:
            notes = profile.notes + self._silent(profile)
            self.notes += [f"{profile.path}: {note}" if len(profiles) > 1 else note for note in notes]
        axis = profiles_axis(profiles, self._table)
        if len(profiles) > 1:
            self._axis_text = axis.text().splitlines()
        zero = min(axis.shift(number) for number in range(len(profiles)))
        held = _processes(profiles)
        if self._rank is not None and self._rank not in (each.rank for each in held):
            ranks = ", ".join(str(each.rank) for each in held)
            raise TraceFileError(f"{self.path}: nothing to export of rank {self._rank}; there is {ranks}")
        for each in held:
            if self._rank not in (None, each.rank):
                continue
            profile = profiles[each.file]
            self.offsets[each.number] = axis.shift(each.file) - zero
            yield Process(each.number + 1, each.number, each.name, (profile.source, *profile.gpus))
            clock = _Clock(axis.clocks[each.file].knots, zero)
            yield from _ProcessItems(profile, each, self._tracks, self._table, clock).items()

    def _silent(self, profile: Profile) -> list[str]:
        launches = find_launches(profile)
        return no_communication_note(profile, attribute(profile, launches, self._table), launches)


@dataclass(frozen=True)
class _Held:
    """A process to show: its number and name, and the profile and the rank there that it is."""

    number: int
    name: str
    file: int
    rank: int


def _processes(profiles: Sequence[Profile]) -> list[_Held]:
    """Each file's ranks; under their own numbers where every file says its rank, and no two say the same."""
    found = []
    for file, profile in enumerate(profiles):
        tables = (profile.activities.rank, profile.calls.rank, profile.ranges.rank)
        found += [(file, int(rank)) for rank in np.unique(np.concatenate(tables))]
    ranks = {rank for _, rank in found}
    numbers = range(FIRST_TRACK - 1)  # what is more would be the number of a track
    if (
        all(profile.ranks for profile in profiles)
        and len(ranks) == len(found)
        and all(each in numbers for each in ranks)
    ):
        return [_Held(rank, f"rank {rank}", file, rank) for file, rank in sorted(found, key=lambda each: each[1])]
    several = len(profiles) > 1
    return [
        _Held(number, f"process {number}" + (f" ({Path(profiles[file].path).name})" if several else ""), file, rank)
        for number, (file, rank) in enumerate(found)
    ]


class _Clock:
    """Microseconds of one file as nanoseconds on the common axis."""

    def __init__(self, knots: Sequence[tuple[float, float]], zero: float) -> None:
        self.at, self.shift = (np.array(column, dtype=np.float64) for column in zip(*knots, strict=True))
        self.zero = zero

    def nanoseconds(self, times: Floats) -> Ints:
        if len(self.at) == 1:
            moved = times + (self.shift[0] - self.zero)
        else:
            # As `RankClock.shift`: straight between the knots, and on beyond them.
            place = np.clip(np.searchsorted(self.at, times, side="right"), 1, len(self.at) - 1)
            slope = np.diff(self.shift) / np.diff(self.at)
            moved = times + (self.shift[place - 1] - self.zero + slope[place - 1] * (times - self.at[place - 1]))
        rounded: Ints = np.rint(moved * 1000).astype(np.int64)
        return rounded


class _ProcessItems:
    """The tracks of one process."""

    def __init__(self, profile: Profile, held: _Held, tracks: Tracks, table: KernelTable, clock: _Clock) -> None:
        self.profile = profile
        self.held = held
        self.tracks = tracks
        self.table = table
        self.clock = clock
        launches = find_launches(profile)
        self.found: Attribution = attribute(profile, launches, table)
        # Arrows by their ends: index of a call or of an activity -> (number, name, category) of each.
        self.from_call: dict[int, list[_Arrow]] = {}
        self.from_activity: dict[int, list[_Arrow]] = {}
        self.to_activity: dict[int, list[_Arrow]] = {}
        self._add_arrows(*launch_edges(launches), self.from_call, "launch")
        self._add_arrows(*wait_edges(profile, launches), self.from_activity, "event")

    def _add_arrows(self, sources: Ints, targets: Ints, departs: dict[int, list[_Arrow]], category: str) -> None:
        names, activities = self.profile.names, self.profile.activities
        mine = activities.rank[targets] == self.held.rank
        for source, target in zip(sources[mine].tolist(), targets[mine].tolist(), strict=True):
            arrow = (self.tracks.flow(), function_name(names[activities.name[target]]), category)
            departs.setdefault(source, []).append(arrow)
            self.to_activity.setdefault(target, []).append(arrow)

    def items(self) -> Iterator[Item]:
        profile, rank = self.profile, self.held.rank
        on_host: tuple[tuple[str, Ranges | Calls, str], ...] = (
            ("ranges", profile.ranges, "range"),
            ("calls", profile.calls, "call"),
        )
        for place, (title, table, category) in enumerate(on_host, 1):
            mine = np.flatnonzero(table.rank == rank)
            for number, thread in enumerate(np.unique(table.thread[mine]).tolist()):
                rows = mine[table.thread[mine] == thread]
                name = f"{title} of thread {thread}"
                for some in self._slices(table, rows, category):
                    yield from self.tracks.placed(self.held.number + 1, name, 1000 * place + number, some)
        activities = profile.activities
        mine = np.flatnonzero(activities.rank == rank)
        lanes = np.unique(np.column_stack((activities.device[mine], activities.stream[mine])), axis=0).tolist()
        several = len({device for device, _ in lanes}) > 1
        for number, (device, stream) in enumerate(lanes):
            rows = mine[(activities.device[mine] == device) & (activities.stream[mine] == stream)]
            name = f"GPU {device}, stream {stream}" if several else f"stream {stream}"
            for some in self._slices(activities, rows, "kernel"):
                yield from self.tracks.placed(self.held.number + 1, name, 3000 + number, some)

    def _slices(self, table: Activities | Calls | Ranges, rows: Ints, category: str) -> Iterator[list[Slice]]:
        begin, end = self.clock.nanoseconds(table.begin[rows]), self.clock.nanoseconds(table.end[rows])
        if len(rows) > 1:
            # What ends where the next one begins may end a nanosecond behind it when both are rounded.
            rounded = (end[:-1] > begin[1:]) & (table.end[rows[:-1]] - table.begin[rows[1:]] < _HALF_NANOSECOND)
            end[:-1] = np.where(rounded, np.maximum(begin[1:], begin[:-1]), end[:-1])
        for first in range(0, len(rows), _AT_ONCE):
            some = slice(first, first + _AT_ONCE)
            make = self._activity if isinstance(table, Activities) else self._on_host
            columns = zip(
                rows[some].tolist(), begin[some].tolist(), end[some].tolist(), table.name[rows[some]].tolist(),
                strict=True,
            )  # fmt: skip
            yield [make(row, low, high, name, category) for row, low, high, name in columns]

    def _on_host(self, row: int, begin: int, end: int, name: int, category: str) -> Slice:
        made = Slice(0, begin, end, self.profile.names[name], category, {})
        if category == "call":
            made.details = {"correlation": int(self.profile.calls.correlation[row])}
            if arrows := self.from_call.get(row):
                made.departs = [FlowEnd(number, title, begin, kind) for number, title, kind in arrows]
        return made

    def _activity(self, row: int, begin: int, end: int, name: int, category: str) -> Slice:
        activities, found = self.profile.activities, self.found
        whole = self.profile.names[name]
        details: dict[str, Any] = {"kernel": whole, "stream": int(activities.stream[row])}
        if found.communication[row]:
            details["does"] = "communication"
        elif found.compute[row]:
            details["does"] = "both" if found.fused[row] else "compute"
        if stage := found.stages[found.stage[row]]:
            details["stage"] = stage
        for key, column in (
            ("layer", found.layer),
            ("microbatch", found.microbatch),
            ("correlation", activities.correlation),
            ("graph node", activities.graph_node),
            ("bytes", activities.size),
        ):
            if (value := column[row]) >= 0:
                details[key] = int(value)
        if found.slice[row] >= 0:
            of = found.slices[found.slice[row]]
            # A receive is launched in a slice of whoever runs it.
            details["launched in"] = f"microbatch {of.microbatch}, slice {of.number}"
        made = Slice(0, begin, end, function_name(whole), _CATEGORIES[int(activities.kind[row])], details)
        if arrows := self.from_activity.get(row):
            made.departs = [FlowEnd(n, title, max(end - 1, begin), kind) for n, title, kind in arrows]
        if arrows := self.to_activity.get(row):
            made.arrives = [FlowEnd(n, title, begin, kind) for n, title, kind in arrows]
        return made
