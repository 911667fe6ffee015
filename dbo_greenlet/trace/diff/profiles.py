"""Two profiles compared: which kernels came, went, or ran another number of times, and where the time went.

Kernels are told apart by their whole names, as the profiler has them. What ran another number of times is a difference;
times never are, since no two runs take the same. Stages, and what of the communication is exposed, are those of the
`overlap` report.

The five classes of kernels are those of Meta's Holistic Trace Analysis (its trace diff): added, deleted, increased,
decreased, unchanged, by the number of times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from ...errors import TraceFileError
from ..attribution import Attribution, attribute
from ..idle import Idle
from ..kernels import KernelTable
from ..launches import find_launches
from ..no_communication import WITH_A_TABLE, no_communication_note
from ..overlap.profile import profile_overlap
from ..overlap.report import OverlapReport
from ..profile import Profile

__all__ = ["CHANGES", "KernelRow", "ProfileDiff", "Side", "StageRow", "diff_profiles"]

# Class of a row -> what it means, in the order in which they are counted.
CHANGES = {
    "added": "only in B",
    "deleted": "only in A",
    "increased": "more often in B",
    "decreased": "less often in B",
    "unchanged": "as often in both",
}
# Of the kernels of the side that has fewer. The same model over another all-to-all, split or not, eager or in a graph,
# has half of them or more in common; training on another GPU had one in thirty.
_LEAST_IN_COMMON = 0.1
OTHER = "other"  # the stage of what no name and no range tells


@dataclass(frozen=True)
class Numbers:
    """How often something ran, and how long in all (microseconds; what ran side by side counts twice)."""

    count: int = 0
    time: float = 0.0


def _change(a: Numbers, b: Numbers) -> str:
    if a.count == b.count:
        return "unchanged"
    if not a.count or not b.count:
        return "deleted" if a.count else "added"
    return "increased" if b.count > a.count else "decreased"


@dataclass(frozen=True)
class KernelRow:
    """One kernel, copy or set, by its name.

    Attributes:
        name: as the profiler has it.
        does: "communication", "compute", "both" (a fused kernel) or "" (copies, sets, whole graphs).
        a, b: its numbers in both profiles.
    """

    name: str
    does: str
    a: Numbers
    b: Numbers

    @property
    def change(self) -> str:
        """One of `CHANGES`."""
        return _change(self.a, self.b)


@dataclass(frozen=True)
class StageRow:
    """One stage: what ran in it, and in microseconds of time what the `overlap` report says of it.

    Attributes:
        stage: its name, "other" for what nothing tells.
        a, b: how often anything of it ran, and how long.
        communication, exposed, compute: (A, B), the time in which it was under way, and in which no compute ran.
    """

    stage: str
    a: Numbers
    b: Numbers
    communication: tuple[float, float]
    exposed: tuple[float, float]
    compute: tuple[float, float]

    @property
    def change(self) -> str:
        """One of `CHANGES`, by what ran in it."""
        return _change(self.a, self.b)


@dataclass
class Side:
    """One side of the comparison: a profile, or those of all ranks of a run added up.

    Attributes:
        path: what to call the files.
        sources, gpus: the profilers, and the GPUs.
        whole: times of the whole in microseconds, by name; see `WHOLE`.
        unreliable: why what of it must not be trusted, each as a sentence.
        silent: of the profiles without communication, a sentence each.
    """

    path: str
    sources: list[str] = field(default_factory=list)
    gpus: list[str] = field(default_factory=list)
    whole: dict[str, float] = field(default_factory=dict)
    unreliable: list[str] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)


@dataclass
class ProfileDiff:
    """What `diff_profiles` found.

    Attributes:
        a, b: the two sides.
        kernels: every kernel of either, those with the largest difference of times first.
        stages: every stage of either, likewise.
        notes: what else to know, as sentences.
    """

    a: Side
    b: Side
    kernels: list[KernelRow]
    stages: list[StageRow]
    notes: list[str]

    @property
    def equal(self) -> bool:
        """Whether everything ran as often in both."""
        return all(row.change == "unchanged" for row in self.kernels)

    def changes(self) -> dict[str, int]:
        """How many kernels there are of each class."""
        counts = Counter(row.change for row in self.kernels)
        return {change: counts[change] for change in CHANGES}


def diff_profiles(
    a: Sequence[Profile], b: Sequence[Profile], table: KernelTable | None = None, *, names: tuple[str, str] = ("", "")
) -> ProfileDiff:
    """Compare the profiles of two runs.

    Args:
        a, b: one or more each: what is of several ranks is added up.
        table: what the names of kernels and ranges mean; default: the built-in one.
        names: what to call the two; default: their files.

    Raises:
        TraceFileError: next to no kernel is in both, so they are of different programs.
    """
    table = KernelTable() if table is None else table
    first, second = _Sums(a, table, names[0]), _Sums(b, table, names[1])
    _of_one_program(first, second)
    kernels = [
        KernelRow(name, first.does.get(name) or second.does.get(name, ""), first.kernel(name), second.kernel(name))
        for name in first.kernels.keys() | second.kernels.keys()
    ]
    kernels.sort(key=lambda row: (-abs(row.b.time - row.a.time), row.name))
    stages = [
        StageRow(
            name,
            first.stages.get(name, Numbers()),
            second.stages.get(name, Numbers()),
            *((first.by_stage.get((name, what), 0.0), second.by_stage.get((name, what), 0.0)) for what in _OF_STAGES),
        )
        for name in first.stages.keys() | second.stages.keys()
    ]
    stages.sort(key=lambda row: (-abs(row.b.time - row.a.time), row.stage))
    notes = _notes(first.side, second.side, kernels)
    if len(a) != len(b):
        counts = f"A is of {len(a)} profile{'s' * (len(a) > 1)} and B of {len(b)}"
        notes.insert(0, f"{counts}, so their sums are not of as many ranks.")
    return ProfileDiff(first.side, second.side, kernels, stages, notes)


def _of_one_program(a: _Sums, b: _Sums) -> None:
    common, fewer = len(a.kernels.keys() & b.kernels.keys()), min(len(a.kernels), len(b.kernels))
    if common < _LEAST_IN_COMMON * fewer:
        raise TraceFileError(
            f"{a.side.path} and {b.side.path} are not of the same program, so their kernels cannot be compared: of "
            f"{len(a.kernels)} and {len(b.kernels)} kernels {common or 'none'} {'is' if common < 2 else 'are'} in both"
        )


_OF_STAGES = ("communication", "exposed", "compute")


class _Sums:
    """One side, added up."""

    def __init__(self, profiles: Sequence[Profile], table: KernelTable, name: str) -> None:
        self.side = Side(name or ", ".join(profile.path for profile in profiles))
        self.kernels: dict[str, Numbers] = {}
        self.does: dict[str, str] = {}
        self.stages: dict[str, Numbers] = {}
        self.by_stage: dict[tuple[str, str], float] = {}
        for profile in profiles:
            launches = find_launches(profile)
            found = attribute(profile, launches, table)
            self.side.silent += no_communication_note(profile, found, launches, advice=WITH_A_TABLE)
            self._count(profile, found)
            self._measure(profile_overlap(profile, table, needs_communication=False))
            self.side.sources = list(dict.fromkeys([*self.side.sources, profile.source]))
            self.side.gpus = list(dict.fromkeys([*self.side.gpus, *profile.gpus]))

    def kernel(self, name: str) -> Numbers:
        return self.kernels.get(name, Numbers())

    def _count(self, profile: Profile, found: Attribution) -> None:
        activities = profile.activities
        took = activities.end - activities.begin
        for numbers, keys, names in (
            (self.kernels, activities.name, profile.names),
            (self.stages, found.stage, [stage or OTHER for stage in found.stages]),
        ):
            counts, times = np.bincount(keys, minlength=len(names)), np.bincount(keys, took, minlength=len(names))
            for number in np.flatnonzero(counts).tolist():
                before = numbers.get(names[number], Numbers())
                time = before.time + float(times[number])
                numbers[names[number]] = Numbers(before.count + int(counts[number]), time)
        for number, row in zip(*np.unique(activities.name, return_index=True), strict=True):
            does = "communication" if found.communication[row] else "compute" if found.compute[row] else ""
            self.does[profile.names[number]] = "both" if found.fused[row] else does

    def _measure(self, report: OverlapReport) -> None:
        # The view by kernels: whether there were hooks, which makes the other one true, a profile cannot tell.
        view = report.kernels
        if view is None:
            return
        whole = self.side.whole
        for name in WHOLE:
            if hasattr(view.measure, name):
                whole[name] = whole.get(name, 0.0) + getattr(view.measure, name)
        if report.idle is not None:
            for each in fields(Idle):
                key = f"no compute: {each.name}"
                if key in WHOLE:
                    whole[key] = whole.get(key, 0.0) + getattr(report.idle, each.name)
        for row in view.by_stage:
            for what in _OF_STAGES:
                place = str(row.key), what
                self.by_stage[place] = self.by_stage.get(place, 0.0) + getattr(row, what)
        self.side.unreliable += [entry.why for entry in report.unreliable if entry.view != "in_flight"]


# What `Side.whole` holds, in the order in which it is shown. "both" is hidden communication; what follows "no compute:"
# is a cause of the `overlap` report.
WHOLE = (
    "window",
    "compute",
    "communication",
    "both",
    "exposed",
    "no compute: host",
    "no compute: event",
    "no compute: other",
    "no compute: unknown",
)


def _notes(a: Side, b: Side, kernels: Sequence[KernelRow]) -> list[str]:
    notes = []
    for what, first, second in (("GPUs", a.gpus, b.gpus), ("profilers", a.sources, b.sources)):
        if first != second:
            notes.append(f"The {what} differ: {', '.join(first) or 'not stated'}; {', '.join(second) or 'not stated'}.")
    ratios = Counter(row.b.count / row.a.count for row in kernels if row.a.count and row.b.count)
    if ratios and (most := ratios.most_common(1)[0])[0] != 1.0 and 2 * most[1] > ratios.total():
        notes.append(
            f"{most[1]} of {ratios.total()} kernels in both ran {most[0]:.3g} times as often in B: "
            "do the two hold another number of steps?"
        )
    for name, side in (("A", a), ("B", b)):
        notes += [f"Unreliable in {name}: {why}." for why in side.unreliable]
        notes += [f"{name}: {why}" for why in dict.fromkeys(side.silent)]
    return notes
