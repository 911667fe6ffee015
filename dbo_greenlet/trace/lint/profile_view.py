"""What several rules ask of a profile.

A profile shows kernels and launches, and neither microbatches nor steps. So the first question is whether overlap was
wanted at all, for an unsplit step has nothing to hide behind: it was where ranges name two microbatches ("ubatch 1"),
or where two threads launch compute, as the classical carrier's do. Where nothing says so, rules about overlap have not
looked.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..attribution import Attribution, Ints, attribute
from ..kernels import KernelTable
from ..launches import Launches, find_launches
from ..profile import Profile
from .findings import Place

__all__ = ["UNWANTED", "ProfileView"]

# Of the compute kernels, which share a thread has to launch to count as the thread of a microbatch.
_SHARE_OF_A_THREAD = 0.2
UNWANTED = (
    "nothing in the profile says that microbatches ran: no range names one, and one thread launches the compute; put "
    "each microbatch's layers into ranges, as record_function('ubatch 0 layer 3 attention')"
)


@dataclass(frozen=True)
class ProfileView:
    """A profile, and what several rules ask of it."""

    profile: Profile
    table: KernelTable
    cutoff: int | None = None

    @cached_property
    def launches(self) -> Launches:
        return find_launches(self.profile)

    @cached_property
    def found(self) -> Attribution:
        return attribute(self.profile, self.launches, self.table)

    @cached_property
    def microbatches(self) -> bool:
        """Whether more than one microbatch ran, as far as the profile tells."""
        named = np.unique(self.found.microbatch[self.found.microbatch >= 0])
        return len(named) > 1 or self._two_threads_compute()

    def _two_threads_compute(self) -> bool:
        launched = np.flatnonzero(self.found.compute & (self.launches.call >= 0))
        calls = self.profile.calls
        at = self.launches.call[launched]
        for rank in np.unique(calls.rank[at]):
            _, counts = np.unique(calls.thread[at[calls.rank[at] == rank]], return_counts=True)
            if (counts >= _SHARE_OF_A_THREAD * counts.sum()).sum() > 1:
                return True
        return False

    @cached_property
    def owners(self) -> Ints:
        """Of each activity the microbatch, -1 where nothing tells: by its range, or where no range names any, the
        number of the thread that launched it."""
        if (self.found.microbatch >= 0).any():
            return self.found.microbatch
        call = self.launches.call
        owners = np.full(len(call), -1, dtype=np.int64)
        if len(self.profile.calls):
            _, thread = np.unique(self.profile.calls.thread, return_inverse=True)
            owners[call >= 0] = thread[call[call >= 0]]
        return owners

    def place(self, activity: int) -> Place:
        """Where an activity is."""
        profile, found = self.profile, self.found
        microbatch, layer = int(found.microbatch[activity]), int(found.layer[activity])
        return Place(
            rank=int(profile.activities.rank[activity]),
            microbatch=None if microbatch < 0 else microbatch,
            layer=None if layer < 0 else layer,
            at=float(profile.activities.begin[activity]),
        )

    def name(self, activity: int) -> str:
        text = self.profile.names[int(self.profile.activities.name[activity])]
        return text if len(text) <= 80 else text[:77] + "..."
