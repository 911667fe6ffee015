"""The clocks of several profiles of one run on one axis, from the collective kernels that all of them hold.

A kernel that needs something from every rank before it can end binds the clocks as a vote does (`bounds`): the
all-to-all of experts, and those of NCCL's operations in which every rank receives from every other. Which kernels match
is not written in a profile. They run in the same order on all ranks, so the k-th is the k-th, except that profilers do
not start on all ranks at once: where one began earlier or ended later its collectives are moved against the others'
until the names are the same one by one and some offset of the clocks fits. Of several such places the one is taken for
which the wall clocks in the files differ least, since the clocks of hosts are set.

What is assumed, and cannot be told from a profile: that the collectives are of all these ranks. Where kernels of one
name belong to several groups of ranks, no offset fits, and the axis says so.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..kernels import KernelTable
from ..profile import Profile
from .bounds import Collective
from .offsets import CommonAxis, axis_of

__all__ = ["ProfileClocks", "profiles_axis"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Operations in which every rank receives something from every other, if only the word that there is nothing. Sends and
# receives, broadcasts and reductions to one rank let some ranks go early.
_BINDING = ("all-gather", "reduce-scatter", "all-reduce", "all to all", "barrier", "dispatch", "combine")
# Parts of a dispatch that run on one GPU alone.
_LOCAL = re.compile(r"epilogue|prologue")

MOST_MOVED = 4096  # collectives by which profiles may begin apart
_SAMPLE = 256  # collectives by which a place is judged: so few that clocks cannot drift apart within them
MOST_KEPT = 20_000
_NONE = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class _Track:
    """The binding collectives of one profile, in order of their begins."""

    name: Ints
    enter: Floats
    leave: Floats
    origin: float

    def __len__(self) -> int:
        return len(self.name)


class ProfileClocks:
    """Takes profiles one after the other, without keeping them, and puts their clocks on one axis.

    Args:
        table: what the names of kernels mean.
    """

    def __init__(self, table: KernelTable | None = None) -> None:
        self._table = KernelTable() if table is None else table
        self._codes: dict[str, int] = {}
        self._tracks: list[_Track] = []
        self._files: list[str] = []
        self._ranks: list[int] = []

    def add(self, profile: Profile) -> None:
        """Take the next profile: one rank's, or that of several ranks on one clock."""
        self._tracks.append(_track(profile, self._table, self._codes))
        self._files.append(os.path.basename(profile.path))
        self._ranks.append(int(profile.activities.rank[0]) if profile.ranks and len(profile.activities) else -1)

    @property
    def names(self) -> dict[int, str]:
        """What to call the profiles: by rank where each is of another one, by file where not."""
        if len(set(self._ranks)) == len(self._ranks) and min(self._ranks, default=0) >= 0:
            return {number: f"rank {rank}" for number, rank in enumerate(self._ranks)}
        return dict(enumerate(self._files))

    def match(self) -> tuple[list[Collective], list[str]]:
        """The collectives that the first profile shares with others, by the numbers of the profiles, from 0.

        Returns:
            The collectives in order of time, microseconds since each profile's origin; and what was done to match them,
            as sentences.
        """
        notes: list[str] = []
        first = self._tracks[0]
        known = [rank for rank in self._ranks if rank >= 0]
        if len(set(known)) < len(known):
            return [], ["Two of these profiles are of one rank, so they are of different runs and share no collective."]
        partner = {number: self._partners(number, notes) for number in range(1, len(self._tracks))}
        shared = np.flatnonzero(np.any([each >= 0 for each in partner.values()], axis=0)) if partner else _NONE
        if len(shared) > MOST_KEPT:
            shared = shared[np.arange(MOST_KEPT) * len(shared) // MOST_KEPT]
        spans = zip(first.enter[shared].tolist(), first.leave[shared].tolist(), strict=True)
        collectives: list[dict[int, tuple[float, float]]] = [{0: span} for span in spans]
        for number, each in partner.items():
            track, found = self._tracks[number], each[shared]
            for place in np.flatnonzero(found >= 0).tolist():
                at = found[place]
                collectives[place][number] = (float(track.enter[at]), float(track.leave[at]))
        return list(collectives), notes

    def axis(self, collectives: Sequence[Collective]) -> CommonAxis:
        """The axis that matched collectives give, on the clock of the first profile."""
        return axis_of(
            collectives,
            ranks=range(len(self._tracks)),
            origins={number: round(each.origin * 1000) for number, each in enumerate(self._tracks)},
            exact=False,
            what="collective kernel",
            names=self.names,
        )

    def _partners(self, number: int, notes: list[str]) -> Ints:
        return _partners(self._tracks[0], self._tracks[number], self.names[0], self.names[number], notes)


def profiles_axis(profiles: Sequence[Profile], table: KernelTable | None = None) -> CommonAxis:
    """The axis of profiles of one run, by the numbers of the files (0, 1, ...), on the clock of the first."""
    clocks = ProfileClocks(table)
    for profile in profiles:
        clocks.add(profile)
    return clocks.axis(clocks.match()[0])


def _partners(first: _Track, other: _Track, first_name: str, name: str, notes: list[str]) -> Ints:
    """Of each collective of the first profile the one of the other that is the same; -1 where it has none."""
    if not len(first) or not len(other):
        notes.append(f"{first_name if not len(first) else name} has no kernel of a collective that binds all ranks.")
        return np.full(len(first), -1, dtype=np.int64)
    most = min(MOST_MOVED, min(len(first), len(other)) // 2)
    places = range(-most, most + 1)
    by_name = _by_name(first, other)
    whole = bool((by_name >= 0).all()) and len(first) == len(other)
    # The quick question first: most places end with the first name, and those that are left with the times.
    candidates = {
        by: _moved(first, other, by)
        for by in places
        if _same_names(first, other, by, 1) and _fits_moved(first, other, by) and _same_names(first, other, by)
    }
    if whole and _fits(first, other, by_name):
        # Kernels of two streams may change places, and with them the order of the names.
        candidates[0] = by_name
    if not candidates:
        # Of one program, but no offset fits: the axis says by how much.
        for by in sorted(places, key=abs):
            if _same_names(first, other, by):
                return _moved(first, other, by)
        if left := int((by_name < 0).sum()):
            notes.append(
                f"{left} of {len(first)} collective kernels of {first_name} have no partner in {name}: their order "
                "differs, and one of the profiles has more of them."
            )
        return by_name
    by = min(candidates, key=lambda each: (abs(_apart(first, other, candidates[each])), abs(each)))
    if by and len(candidates) > 1:
        notes.append(
            f"The collective kernels of {name} fit those of {first_name} at {len(candidates)} places; taken is the one "
            "for which the wall clocks differ least."
        )
    if by:
        word = "earlier" if by > 0 else "later"
        notes.append(f"{name} begins {abs(by)} collective kernel{'s' if abs(by) > 1 else ''} {word} than {first_name}.")
    return candidates[by]


def _by_name(first: _Track, other: _Track) -> Ints:
    """The k-th of each name is the k-th, where both have as many."""
    out = np.full(len(first), -1, dtype=np.int64)
    for code in np.unique(first.name):
        mine, theirs = np.flatnonzero(first.name == code), np.flatnonzero(other.name == code)
        if len(mine) == len(theirs):
            out[mine] = theirs
    return out


def _moved(first: _Track, other: _Track, by: int) -> Ints:
    """The k-th of all is the (k + by)-th."""
    place = np.arange(len(first)) + by
    return np.where((place >= 0) & (place < len(other)), place, -1)


def _same_names(first: _Track, other: _Track, by: int, most: int | None = None) -> bool:
    """Whether the names are the same one by one, all of them or the first `most`."""
    begin = max(0, -by)
    count = min(len(first) - begin, len(other) - begin - by)
    end = begin + (count if most is None else min(most, count))
    return bool(np.array_equal(first.name[begin:end], other.name[begin + by : end + by]))


def _fits_moved(first: _Track, other: _Track, by: int) -> bool:
    """As `_fits`, of the collectives in the middle."""
    begin = max(0, -by)
    count = min(len(first) - begin, len(other) - begin - by)
    begin += max(0, count - _SAMPLE) // 2
    mine, theirs = (slice(at, at + min(count, _SAMPLE)) for at in (begin, begin + by))
    return bool((first.leave[mine] - other.enter[theirs]).min() >= (first.enter[mine] - other.leave[theirs]).max())


def _sample(partner: Ints) -> Ints:
    """Some of those that have a partner, in the middle of them."""
    paired = np.flatnonzero(partner >= 0)
    middle = max(0, (len(paired) - _SAMPLE) // 2)
    return paired[middle : middle + _SAMPLE]


def _fits(first: _Track, other: _Track, partner: Ints) -> bool:
    """Whether some offset of the clocks lets nobody leave before all have entered."""
    mine = _sample(partner)
    theirs = partner[mine]
    return bool((first.leave[mine] - other.enter[theirs]).min() >= (first.enter[mine] - other.leave[theirs]).max())


def _apart(first: _Track, other: _Track, partner: Ints) -> float:
    """Microseconds between the wall clocks then: all leave a collective at about the same time."""
    mine = _sample(partner)
    return float(np.median(first.leave[mine] - other.leave[partner[mine]])) + first.origin - other.origin


def _track(profile: Profile, table: KernelTable, codes: dict[str, int]) -> _Track:
    activities = profile.activities
    used = [int(number) for number in np.unique(activities.name)]
    meanings = {number: table.classify(profile.names[number]) for number in used}
    binding = [
        number
        for number, meaning in meanings.items()
        if meaning.kind == "communication"
        and meaning.operation in _BINDING
        and not _LOCAL.search(profile.names[number])
    ]
    code = np.full(len(profile.names) + 1, -1, dtype=np.int64)
    paired = np.zeros(len(profile.names) + 1, dtype=bool)
    for number in binding:
        code[number] = codes.setdefault(profile.names[number], len(codes))
        paired[number] = meanings[number].background
    # Several GPUs of one file are on one clock; the first of them stands for all.
    _, group = profile.groups()
    chosen = np.flatnonzero((code[activities.name] >= 0) & (group == 0))
    alone = chosen[~paired[activities.name[chosen]]]
    first, last = [alone], [alone]
    # A low-latency send ends when it has sent; what ends only after all have sent is the next launch, the receive.
    for number in binding:
        launches = chosen[activities.name[chosen] == number]
        if paired[number] and len(launches) % 2 == 0:
            first.append(launches[::2])
            last.append(launches[1::2])
    begins, ends = np.concatenate(first), np.concatenate(last)
    order = np.argsort(activities.begin[begins], kind="stable")
    begins, ends = begins[order], ends[order]
    return _Track(code[activities.name[begins]], activities.begin[begins], activities.end[ends], profile.origin)
