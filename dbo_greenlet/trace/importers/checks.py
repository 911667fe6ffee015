"""What a stream cannot have done: a profile that says it did was merged of several, or its clock is broken.

A stream runs its kernels in the order of their launches, one after the other. Two things may look otherwise and are
right: with programmatic dependent launch a kernel begins while the one in front of it ends, and the branches of a graph
may be booked to the stream that launched it.
"""

from __future__ import annotations

import numpy as np

from ...errors import TraceFileError
from ..launches import find_launches
from ..profile import Profile

__all__ = ["check_streams"]

# Microseconds; what rounding to whole ones can do.
_TOLERANCE = 1.0
# A share of the events that is taken for a profiler's own mistakes: said, and not refused.
_ODD_SHARE = 0.001


def check_streams(profile: Profile) -> list[str]:
    """Sentences about what is odd but may be.

    Raises:
        TraceFileError: events of one stream run inside each other, or not in the order of their launches.
    """
    activities = profile.activities
    lanes = np.column_stack((activities.rank, activities.device, activities.stream))
    # By lane and then by begin, which the columns are sorted by; what begins together, by end.
    order = np.lexsort((activities.end, activities.begin, lanes[:, 2], lanes[:, 1], lanes[:, 0]))
    lanes, begin, end = lanes[order], activities.begin[order], activities.end[order]
    same = (lanes[1:] == lanes[:-1]).all(axis=1)
    launches = find_launches(profile)
    in_graph = launches.in_graph[order]
    plain = same & ~(in_graph[1:] & in_graph[:-1])
    overlap = plain & (begin[1:] < end[:-1] - _TOLERANCE)
    twice = (begin[1:] == begin[:-1]) & (end[1:] == end[:-1])
    inside = overlap & ((end[1:] < end[:-1] - _TOLERANCE) | twice)
    if inside.sum() > _ODD_SHARE * len(order):
        where = int(np.flatnonzero(inside)[0])
        first, second = (profile.names[activities.name[order[where + n]]] for n in (0, 1))
        raise TraceFileError(
            f"{profile.path}: {int(inside.sum())} events overlap on one stream, which runs one at a time "
            f"(the first on stream {lanes[where, 2]}: {_short(second)} inside {_short(first)}); "
            "were the profiles of several processes merged into it?"
        )
    call = launches.call[order]
    both = same & (call[1:] >= 0) & (call[:-1] >= 0) & ~in_graph[1:] & ~in_graph[:-1]
    # The later one was launched, call and all, before the call that launched the earlier one began.
    swapped = np.zeros(len(both), dtype=bool)
    swapped[both] = (profile.calls.end[call[1:][both]] + _TOLERANCE < profile.calls.begin[call[:-1][both]]) & (
        begin[1:][both] > begin[:-1][both] + _TOLERANCE
    )
    if swapped.sum() > _ODD_SHARE * len(order):
        where = int(np.flatnonzero(swapped)[0])
        raise TraceFileError(
            f"{profile.path}: {int(swapped.sum())} events ran in another order than they were launched in, which a "
            f"stream never does (the first on stream {lanes[where, 2]}, at {begin[where + 1]:.0f} us of the profile); "
            "its times or its correlation ids are not to be trusted"
        )
    notes = []
    odd = int(inside.sum() + swapped.sum())
    if odd:
        notes.append(f"{odd} of {len(order)} events overlap on their stream or are out of its order.")
    if early := int((overlap & ~inside).sum()):
        notes.append(
            f"{early} events begin before the one in front of them on their stream has ended, as kernels do with "
            "programmatic dependent launch."
        )
    return notes


def _short(name: str) -> str:
    return name if len(name) <= 60 else name[:57] + "..."
