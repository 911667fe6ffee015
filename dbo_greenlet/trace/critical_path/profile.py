"""A profile as path graphs, one a GPU and step, and what all of them need to know of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ...errors import TraceFileError
from .. import intervals
from ..attribution import Attribution, attribute
from ..kernels import KernelTable
from ..launches import Launches, find_launches
from ..no_communication import WITH_A_TABLE, no_communication_note
from ..profile import COPY, GRAPH, KERNEL, SET, Profile
from ..profile_edges import wait_edges
from ..profile_steps import steps_of
from .activities import ProfileGraph, ProfileGraphBuilder
from .names import HOST, LAUNCH, OTHER, OTHER_COMMUNICATION
from .report import PERCENT, PathReport, StepPath, added_up, measure_path, typical

__all__ = ["ProfilePaths", "profile_path"]

_COPY = "copy"
_NAME_LENGTH = 60
# In a profile where every kernel was late for some other reason the shortest time says nothing.
_LONGEST_LAUNCH_US = 20.0
_LONGEST_GAP_US = 2.0
# A profile that begins or ends during a replay lacks that one; more than this share of them is another matter.
_UNSEEN_SHARE = 0.01
_UNLAUNCHED_SHARE = 0.05
# Of the path, above which it is said what the profiler itself does to it.
_HOST_SHARE = 0.2

Floats = npt.NDArray[np.float64]


class ProfilePaths:
    """Iterates over the graphs of a profile, GPU by GPU, step by step.

    Attributes:
        launches, found: what was found out about its events.
        awaited: what each kernel's stream waited for before it, by activities; None where the profile has no waits.
        counting: launches of kernels whose counts the host may wait for, by looking at memory.
        launch_us, gap_us: the shortest usual time from a launch to its kernel, and between two kernels of a stream.
    """

    def __init__(self, profile: Profile, table: KernelTable | None = None) -> None:
        self.profile = profile
        self.launches: Launches = find_launches(profile)
        self._table = KernelTable() if table is None else table
        self.found: Attribution = attribute(profile, self.launches, self._table)
        activities, call = profile.activities, self.launches.call
        alone = (call >= 0) & ~self.launches.in_graph & (activities.kind == KERNEL)
        self.launch_us = _usual(activities.begin[alone] - profile.calls.begin[call[alone]], _LONGEST_LAUNCH_US)
        self.gap_us = _usual(_gaps(profile), _LONGEST_GAP_US)
        self.counting = self._counting()
        self._pairs = self._receiving()
        self.awaited = self._awaited() if len(profile.waits) else None

    def __iter__(self) -> Iterator[ProfileGraph]:
        profile = self.profile
        groups, group = profile.groups()
        for number, (rank, device) in enumerate(groups):
            mine = np.flatnonzero(group == number)
            calls = np.flatnonzero(profile.calls.rank == rank)
            steps = steps_of(profile, rank)
            if len(steps) < 2:
                yield ProfileGraphBuilder(self, mine, calls, rank, device, steps[0][0] if steps else 0, None).build()
                continue
            launched = profile.activities.begin[mine].copy()
            known = self.launches.call[mine] >= 0
            launched[known] = profile.calls.begin[self.launches.call[mine[known]]]
            starts = np.array([begin for _, begin in steps])
            of = np.searchsorted(starts, launched, side="right") - 1
            of_call = np.searchsorted(starts, profile.calls.begin[calls], side="right") - 1
            for place, (step, begin) in enumerate(steps):
                here = mine[of == place]
                if len(here):
                    earlier = mine[of < place]
                    yield ProfileGraphBuilder(
                        self, here, calls[of_call == place], rank, device, step, begin, earlier
                    ).build()  # fmt: skip

    def stage(self, activity: int) -> str:
        """Whose time an activity is."""
        found = self.found
        if found.stage[activity]:
            return str(found.stages[found.stage[activity]])
        if found.communication[activity]:
            return OTHER_COMMUNICATION
        return _COPY if self.profile.activities.kind[activity] in (COPY, SET) else OTHER

    def name(self, activity: int) -> str:
        """What a kernel is called, short enough for a line."""
        name = str(self.profile.names[self.profile.activities.name[activity]]).removeprefix("void ")
        return name if len(name) <= _NAME_LENGTH else name[: _NAME_LENGTH - 3] + "..."

    def sent(self, activity: int) -> int:
        """The launch that sent what a low-latency launch receives; -1 where it does not receive."""
        return self._pairs.get(activity, -1)

    def _awaited(self) -> dict[int, list[int]]:
        out: dict[int, list[int]] = {}
        for source, target in zip(*wait_edges(self.profile, self.launches), strict=True):
            out.setdefault(int(target), []).append(int(source))
        return out

    def _counting(self) -> set[int]:
        """A dispatch's layout kernels, by the table."""
        activities, table = self.profile.activities, self._table
        meanings = {int(n): table.classify(self.profile.names[n]) for n in np.unique(activities.name)}
        names = [n for n, it in meanings.items() if (it.operation, it.stage) == ("layout", "dispatch")]
        return set(np.flatnonzero(np.isin(activities.name, names)).tolist())

    def _receiving(self) -> dict[int, int]:
        """Second launch -> first launch of the low-latency kernels of each GPU, by stage."""
        _, group = self.profile.groups()
        open_sends: dict[tuple[int, int], int] = {}
        out: dict[int, int] = {}
        for activity in np.flatnonzero(self.found.communication & self.found.background):
            key = (int(group[activity]), int(self.found.stage[activity]))
            first = open_sends.pop(key, None)
            if first is None:
                open_sends[key] = int(activity)
            else:
                out[int(activity)] = first
        return out


def _usual(times: Floats, longest: float) -> float:
    """The shortest that is no exception, and no longer than `longest`; 0.0 where there are none."""
    times = times[times >= 0]
    return min(float(np.percentile(times, 1, method="lower")), longest) if len(times) else 0.0


def _gaps(profile: Profile) -> Floats:
    activities = profile.activities
    order = np.lexsort((activities.begin, activities.stream, activities.device, activities.rank))
    same = np.ones(max(len(order) - 1, 0), dtype=bool)
    for column in (activities.rank, activities.device, activities.stream):
        same &= column[order][1:] == column[order][:-1]
    gaps: Floats = (activities.begin[order][1:] - activities.end[order][:-1])[same]
    return gaps


def profile_path(
    profile: Profile, table: KernelTable | None = None, *, step: int | None = None, percent: Sequence[float] = PERCENT
) -> PathReport:
    """Find the path of each step on each GPU of a profile.

    Args:
        profile: the profile.
        table: what its names mean.
        step: only the step that the profile's ranges call by this number.
        percent: by how much to shorten, from 0 to 100.

    Raises:
        TraceFileError: it has no such step; names the file.
    """
    paths = ProfilePaths(profile, table)
    found: list[StepPath] = []
    devices: list[int] = []
    seen: set[int] = set()
    counts = Counter[str]()
    for it in paths:
        seen.add(it.step)
        if step not in (None, it.step):
            continue
        name = f"GPU {it.device}"
        found.append(measure_path(it.graph, it.end, run=name, step=it.step, rank=it.rank, percent=percent, pieces=True))
        devices.append(it.device)
        counts.update(inferred=it.inferred, possible=it.possible, polled=it.polled)
    if not found:
        held = ", ".join(map(str, sorted(seen)[:12]))
        raise TraceFileError(f"{profile.path} has no step {step}; its ranges name {held}")
    shown = typical(found)
    gpus = len({(each.rank, each.run) for each in found})
    what = f"{len(found) // gpus} steps" if len(found) > gpus else f"step {found[0].step}"
    return PathReport(
        path=profile.path,
        source=", ".join([profile.source, *profile.gpus]),
        what=f"{what} on {gpus} GPUs" if gpus > 1 else f"{what} on one GPU",
        steps=[replace(each, pieces=[]) for each in found],
        total=added_up(found),
        shown=found[shown],
        lanes=_lanes(profile, found[shown], devices[shown]),
        unreliable=_unreliable(profile, paths),
        notes=[*profile.notes, *_notes(profile, paths, counts), *_of_the_host(added_up(found))],
    )


def _of_the_host(total: StepPath) -> list[str]:
    share = sum(each.on_path for each in total.stages if each.stage in (HOST, LAUNCH)) / max(total.length, 1e-9)
    if share < _HOST_SHARE:
        return []
    return [
        f"The host and its launches are {100 * share:.0f} % of the path; a profiler makes each call of the "
        "host slower, so without one they are less."
    ]


def _lanes(profile: Profile, shown: StepPath, device: int) -> dict[str, list[tuple[float, float]]]:
    """What ran on the streams meanwhile; neighbours as one."""
    activities = profile.activities
    end = shown.begin + shown.length
    here = (activities.rank == shown.rank) & (activities.device == device)
    here &= (activities.end > shown.begin) & (activities.begin < end)
    lanes = {}
    for stream in np.unique(activities.stream[here]):
        mine = here & (activities.stream == stream)
        spans = intervals.union(np.maximum(activities.begin[mine], shown.begin), np.minimum(activities.end[mine], end))
        lanes[f"stream {stream}"] = [(float(begin), float(over)) for begin, over in spans]
    return lanes


def _unreliable(profile: Profile, paths: ProfilePaths) -> list[str]:
    launches, out = paths.launches, []
    if pieces := int((profile.activities.kind == GRAPH).sum()):
        out.append(
            f"{pieces} graph replays are recorded in one piece, so what ran in them, and behind what, is not known; "
            "record with nsys profile --cuda-graph-trace=node"
        )
    elif launches.hidden_replays > _UNSEEN_SHARE * launches.replays:
        out.append(
            f"{launches.hidden_replays} of {launches.replays} graph replays have no kernels in the profile, so the "
            "path goes past what ran in them; profile eager steps, or with a driver and profiler that record graph "
            "nodes"
        )
    unseen = int((launches.call < 0).sum())
    if not len(profile.calls):
        out.append("the profile does not show the host's launches, so whether the host held up the GPU is not known")
    elif unseen > _UNLAUNCHED_SHARE * len(profile.activities):
        out.append(f"the launches of {unseen} of {len(profile.activities)} events are not in the profile")
    known = np.flatnonzero(launches.call >= 0)
    early = int((profile.activities.begin[known] < profile.calls.begin[launches.call[known]] - 1.0).sum())
    if early > 0.01 * len(profile.activities):
        out.append(f"{early} events begin before their launch: the clocks of host and GPU differ")
    return out


def _notes(profile: Profile, paths: ProfilePaths, counts: Counter[str]) -> list[str]:
    notes = [f"Not in the profile: {what}." for what in profile.missing]
    notes += no_communication_note(profile, paths.found, paths.launches, advice=WITH_A_TABLE)
    inferred, possible = counts["inferred"], counts["possible"]
    if inferred or possible:
        notes.append(
            f"A profile does not say what a stream waits for: of the kernels behind a wait, {inferred} are taken to "
            f"have waited for what ended last on another stream, and {possible} may have to when something else gets "
            "shorter, which makes gains ranges."
        )
    if polled := counts["polled"]:
        notes.append(f"{polled} times the host is taken to have waited for the counts of a dispatch, without a call.")
    if paths.found.communication.any():
        notes.append(
            "A communication kernel's time includes its wait for other ranks, which one profile does not show "
            "(`overlap` with all ranks' files does)."
        )
    if in_graph := int(paths.launches.in_graph.sum()):
        notes.append(
            f"{in_graph} events ran in graph replays, whose launches tell no layer or microbatch; between streams of a "
            "graph what waits for what is not in a profile."
        )
    return notes
