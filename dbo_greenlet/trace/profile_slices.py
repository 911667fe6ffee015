"""The slices of microbatches in a profile, by the ranges that the scheduler writes (`slice_ranges`).

A range names the site behind which its slice begins. What a slice runs follows from the site at which it ends
(`notation`), and that is the one that the next slice of the same microbatch names; where there is none, the microbatch
returned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .kernels import Annotation, KernelTable
from .notation import is_high_throughput, parse_site
from .profile import Profile

__all__ = ["ProfileSlice", "slices_of"]

Ints = npt.NDArray[np.int64]

# Site at the end -> what was computed and what was sent; `notation` has the whole of it.
_LOW_LATENCY = {"dispatch": ("attention", "dispatch"), "combine": ("experts", "combine")}
_HIGH_THROUGHPUT = {
    "before_dispatch": ("attention", ""),
    "before_combine": ("experts", "dispatch"),
    "combine": ("shared", "combine"),
}


@dataclass(frozen=True)
class ProfileSlice:
    """One slice.

    Attributes:
        range: its index in `Profile.ranges`.
        microbatch, number: which it is; as in `slice_bracket.Slice`.
        begin_site: the yield site behind which it begins, "" where the microbatch starts.
        end_site: the site at which it ended, "" where the microbatch returned, or where the profile does not show how
            it goes on.
        stage: what it computes, by the site at its end; "" where that does not say. A low-latency slice with the routed
            and the shared experts counts as the routed ones'.
        message: what it sends: "dispatch", "combine" or "".
        layer: -1 where no site says.
    """

    range: int
    microbatch: int
    number: int
    begin_site: str
    end_site: str
    stage: str
    message: str
    layer: int


def slices_of(profile: Profile, table: KernelTable) -> list[ProfileSlice]:
    """All of them, by rank, thread and microbatch, each of these in the order of time."""
    ranges = profile.ranges
    meanings: dict[int, Annotation] = {int(n): table.annotation(profile.names[n]) for n in np.unique(ranges.name)}
    named = {number: meaning for number, meaning in meanings.items() if meaning.slice is not None}
    high_throughput = is_high_throughput([meaning.site for meaning in named.values()])
    rows = np.flatnonzero(np.isin(ranges.name, list(named)))
    of = np.array([_microbatch(named[int(n)]) for n in ranges.name[rows]], dtype=np.int64)
    found: list[ProfileSlice] = []
    for who in np.unique(np.column_stack((ranges.rank[rows], ranges.thread[rows], of)), axis=0):
        same = (ranges.rank[rows] == who[0]) & (ranges.thread[rows] == who[1]) & (of == who[2])
        found += _in_turn(profile, rows[same], named, table, high_throughput)
    return found


def _in_turn(
    profile: Profile, mine: Ints, named: Mapping[int, Annotation], table: KernelTable, high_throughput: bool
) -> list[ProfileSlice]:
    ranges = profile.ranges
    # The first that begins when this one is over: not the slices of a step that runs inside this slice.
    following = np.searchsorted(ranges.begin[mine], ranges.end[mine], side="left")
    found = []
    for place, row in enumerate(mine.tolist()):
        meaning = named[int(ranges.name[row])]
        number = meaning.slice or 0
        end_site = ""
        if (next_place := max(int(following[place]), place + 1)) < len(mine):
            behind = named[int(ranges.name[mine[next_place]])]
            end_site = behind.site if behind.slice == number + 1 else ""
        work = _work(end_site, table, high_throughput)
        found.append(ProfileSlice(row, _microbatch(meaning), number, meaning.site, end_site, *work))
    return found


def _work(end_site: str, table: KernelTable, high_throughput: bool) -> tuple[str, str, int]:
    """Stage, message and layer."""
    if (site := parse_site(end_site)) is not None:
        stages = _HIGH_THROUGHPUT if high_throughput else _LOW_LATENCY
        return *stages.get(site.stage, ("", "")), site.layer
    layer = table.annotation(end_site).layer if end_site else None
    return "", "", -1 if layer is None else layer


def _microbatch(meaning: Annotation) -> int:
    return -1 if meaning.microbatch is None else meaning.microbatch
