"""Whose work an activity is: kind and stage by its name, stage, layer and microbatch by the ranges round its launch.

A range speaks for what was launched inside it on its thread; of nested ranges the innermost that says something does.
For communication the kernel's own name comes first (a combine is a combine, wherever it is launched), for compute the
range does (a matrix product belongs to whatever stage launches it).

The ranges of slices (`profile_slices`) say the microbatch and the layer like any other. Their stage is coarser, since a
slice holds whatever stands between two yields; so it is asked last, behind the kernel's own name. Of communication it
is asked only where the kernel can be an all-to-all and does not say which: NCCL's sends and receives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .kernels import KernelTable
from .launches import Launches
from .profile import GRAPH, Profile
from .profile_slices import ProfileSlice, slices_of

__all__ = ["Attribution", "attribute"]

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Attribution:
    """One entry per activity, except `stages`.

    Attributes:
        communication, compute, fused, background: what the table says of its name. What it calls a copy is none of
            these.
        stages: names of the stages.
        stage: index into `stages`; 0 is "".
        layer, microbatch: -1 where nothing tells.
        slice: index into `slices`; -1 where it was launched in none.
        slices: the slices that the profile's ranges show.
        libraries: number of communication kernels by library.
        doubtful: names of compute kernels that look like communication.
    """

    communication: Bools
    compute: Bools
    fused: Bools
    background: Bools
    stages: list[str]
    stage: Ints
    layer: Ints
    microbatch: Ints
    slice: Ints
    slices: list[ProfileSlice]
    libraries: dict[str, int]
    doubtful: list[str]


def attribute(profile: Profile, launches: Launches, table: KernelTable) -> Attribution:
    """Classify every activity of a profile."""
    activities = profile.activities
    used = np.unique(activities.name)
    meanings = {int(number): table.classify(profile.names[number]) for number in used}
    stages = [""]

    def stage_number(stage: str) -> int:
        if stage not in stages:
            stages.append(stage)
        return stages.index(stage)

    def of_name(values: dict[int, int]) -> Ints:
        by_name = np.zeros(len(profile.names) + 1, dtype=np.int64)
        for number, value in values.items():
            by_name[number] = value
        return by_name[activities.name]

    whole_graph = activities.kind == GRAPH
    kinds = of_name({number: _CODES[meaning.kind] for number, meaning in meanings.items()})
    communication = (kinds == _CODES["communication"]) & ~whole_graph
    named_stage = of_name({number: stage_number(meaning.stage) for number, meaning in meanings.items()})
    slices = slices_of(profile, table)
    ranged = _by_ranges(profile, launches, table, slices, stage_number)
    # One more than there are slices: what is in none finds nothing there.
    computed, sent = (
        np.array([*(stage_number(each) if each else 0 for each in stages_of), 0], dtype=np.int64)[ranged.slice]
        for stages_of in ([each.stage for each in slices], [each.message for each in slices])
    )
    messages = of_name({number: int(meaning.operation in _MESSAGES) for number, meaning in meanings.items()}) > 0
    stage = _first_said(
        np.where(communication, named_stage, ranged.stage),
        np.where(communication, ranged.stage, named_stage),
        np.where(communication, np.where(messages, sent, 0), computed),
    )
    libraries: dict[str, int] = {}
    for number, count in zip(*np.unique(activities.name[communication], return_counts=True), strict=True):
        library = meanings[int(number)].library or "other"
        libraries[library] = libraries.get(library, 0) + int(count)
    return Attribution(
        communication=communication,
        compute=((kinds == _CODES["compute"]) | (kinds == _CODES["fused"])) & ~whole_graph,
        fused=(kinds == _CODES["fused"]) & ~whole_graph,
        background=of_name({number: int(meaning.background) for number, meaning in meanings.items()}) > 0,
        stages=stages,
        stage=stage,
        layer=ranged.layer,
        microbatch=ranged.microbatch,
        slice=ranged.slice,
        slices=slices,
        libraries=dict(sorted(libraries.items())),
        doubtful=sorted(profile.names[number] for number, meaning in meanings.items() if meaning.doubtful),
    )


def _first_said(*stages: Ints) -> Ints:
    """The first of them that is one, 0 where none is."""
    found = stages[0]
    for further in stages[1:]:
        found = np.where(found > 0, found, further)
    return found


_CODES = {"compute": 0, "communication": 1, "copy": 2, "fused": 3}

# Operations, by the table, that may be an all-to-all's.
_MESSAGES = ("send and receive", "all to all")

# Of a range: stage, layer, microbatch, and which slice it is; -1 where it does not say.
_Said = tuple[int, int, int, int]
_NOTHING: _Said = (-1, -1, -1, -1)


@dataclass(frozen=True)
class _Ranged:
    stage: Ints
    layer: Ints
    microbatch: Ints
    slice: Ints


def _by_ranges(
    profile: Profile,
    launches: Launches,
    table: KernelTable,
    slices: list[ProfileSlice],
    stage_number: Callable[[str], int],
) -> _Ranged:
    count = len(profile.activities)
    out = np.full((count, len(_NOTHING)), -1, dtype=np.int64)
    ranges, calls = profile.ranges, profile.calls
    said = _said(profile, table, slices, stage_number)
    speaking = np.array(sorted(said), dtype=np.int64)
    launched = np.flatnonzero(launches.call >= 0)
    if len(speaking) and len(launched):
        at = launches.call[launched]
        for rank, thread in np.unique(np.column_stack((ranges.rank, ranges.thread))[speaking], axis=0):
            mine = speaking[(ranges.rank[speaking] == rank) & (ranges.thread[speaking] == thread)]
            times, values = _steps(ranges.begin[mine], ranges.end[mine], [said[row] for row in mine.tolist()])
            here = (calls.rank[at] == rank) & (calls.thread[at] == thread)
            place = np.searchsorted(times, calls.begin[at[here]], side="right")
            out[launched[here]] = values[place]
    return _Ranged(np.maximum(out[:, 0], 0), out[:, 1], out[:, 2], out[:, 3])


def _said(
    profile: Profile, table: KernelTable, slices: list[ProfileSlice], stage_number: Callable[[str], int]
) -> dict[int, _Said]:
    """What the ranges that say something say, by their index."""
    names = profile.ranges.name
    by_name: dict[int, _Said] = {}
    for number in np.unique(names):
        meaning = table.annotation(profile.names[number])
        if meaning.slice is None:
            by_name[int(number)] = (
                stage_number(meaning.stage) if meaning.stage else -1,
                -1 if meaning.layer is None else meaning.layer,
                -1 if meaning.microbatch is None else meaning.microbatch,
                -1,
            )
    speaking = [number for number, said in by_name.items() if said != _NOTHING]
    out = {row: by_name[int(names[row])] for row in np.flatnonzero(np.isin(names, speaking)).tolist()}
    return out | {each.range: (-1, each.layer, each.microbatch, number) for number, each in enumerate(slices)}


def _steps(
    begin: npt.NDArray[np.float64], end: npt.NDArray[np.float64], said: list[_Said]
) -> tuple[npt.NDArray[np.float64], Ints]:
    """What holds from which time on: times [n], and [n + 1, 4] values, the first before all times.

    The ranges of one thread, in the order of their begins. Each of the four values is that of the innermost open range
    that has it.
    """
    # At one time what ends comes before what begins; an outer range begins before the inner one and ends after it.
    events = sorted(
        [(time, 0, -number, number) for number, time in enumerate(end)]
        + [(time, 1, number, number) for number, time in enumerate(begin) if end[number] > time]
    )
    times: list[float] = []
    values: list[_Said] = [_NOTHING]
    open_ranges: dict[int, _Said] = {}
    for time, begins, _, number in events:
        if begins:
            open_ranges[number] = said[number]
        elif open_ranges.pop(number, None) is None:
            continue
        inner = list(_NOTHING)
        for values_of in open_ranges.values():
            for index, value in enumerate(values_of):
                if value >= 0:
                    inner[index] = value
        times.append(time)
        values.append((inner[0], inner[1], inner[2], inner[3]))
    return np.array(times, dtype=np.float64), np.array(values, dtype=np.int64)
