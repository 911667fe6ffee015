"""Whose work an activity is: kind and stage by its name, stage, layer and microbatch by the ranges round its launch.

A range speaks for what was launched inside it on its thread; of nested ranges the innermost that says something does.
For communication the kernel's own name comes first (a combine is a combine, wherever it is launched), for compute the
range does (a matrix product belongs to whatever stage launches it).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .kernels import KernelTable
from .launches import Launches
from .profile import GRAPH, Profile

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
    ranged = _by_ranges(profile, launches, table, stage_number)
    stage = np.where(
        communication,
        np.where(named_stage > 0, named_stage, ranged.stage),
        np.where(ranged.stage > 0, ranged.stage, named_stage),
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
        libraries=dict(sorted(libraries.items())),
        doubtful=sorted(profile.names[number] for number, meaning in meanings.items() if meaning.doubtful),
    )


_CODES = {"compute": 0, "communication": 1, "copy": 2, "fused": 3}


@dataclass(frozen=True)
class _Ranged:
    stage: Ints
    layer: Ints
    microbatch: Ints


def _by_ranges(profile: Profile, launches: Launches, table: KernelTable, stage_number: object) -> _Ranged:
    count = len(profile.activities)
    out = np.full((count, 3), -1, dtype=np.int64)
    ranges, calls = profile.ranges, profile.calls
    said: dict[int, tuple[int, int, int]] = {}
    for number in np.unique(ranges.name):
        meaning = table.annotation(profile.names[number])
        if meaning.stage or meaning.layer is not None or meaning.microbatch is not None:
            said[int(number)] = (
                stage_number(meaning.stage) if meaning.stage else -1,  # type: ignore[operator]
                -1 if meaning.layer is None else meaning.layer,
                -1 if meaning.microbatch is None else meaning.microbatch,
            )
    speaking = np.flatnonzero(np.isin(ranges.name, list(said)))
    launched = np.flatnonzero(launches.call >= 0)
    if len(speaking) and len(launched):
        at = launches.call[launched]
        for rank, thread in np.unique(np.column_stack((ranges.rank, ranges.thread))[speaking], axis=0):
            mine = speaking[(ranges.rank[speaking] == rank) & (ranges.thread[speaking] == thread)]
            times, values = _steps(ranges.begin[mine], ranges.end[mine], [said[int(n)] for n in ranges.name[mine]])
            here = (calls.rank[at] == rank) & (calls.thread[at] == thread)
            place = np.searchsorted(times, calls.begin[at[here]], side="right")
            out[launched[here]] = values[place]
    return _Ranged(np.maximum(out[:, 0], 0), out[:, 1], out[:, 2])


def _steps(
    begin: npt.NDArray[np.float64], end: npt.NDArray[np.float64], said: list[tuple[int, int, int]]
) -> tuple[npt.NDArray[np.float64], Ints]:
    """What holds from which time on: times [n], and [n + 1, 3] values, the first before all times.

    The ranges of one thread, in the order of their begins. Each of the three values is that of the innermost open range
    that has it.
    """
    # At one time what ends comes before what begins; an outer range begins before the inner one and ends after it.
    events = sorted(
        [(time, 0, -number, number) for number, time in enumerate(end)]
        + [(time, 1, number, number) for number, time in enumerate(begin) if end[number] > time]
    )
    times: list[float] = []
    values: list[tuple[int, int, int]] = [(-1, -1, -1)]
    open_ranges: dict[int, tuple[int, int, int]] = {}
    for time, begins, _, number in events:
        if begins:
            open_ranges[number] = said[number]
        elif open_ranges.pop(number, None) is None:
            continue
        inner = [-1, -1, -1]
        for values_of in open_ranges.values():
            for index, value in enumerate(values_of):
                if value >= 0:
                    inner[index] = value
        times.append(time)
        values.append((inner[0], inner[1], inner[2]))
    return np.array(times, dtype=np.float64), np.array(values, dtype=np.int64)
