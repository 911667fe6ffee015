"""What in a profile came before what of necessity: kernels behind their launch, and behind the event they wait for."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .launches import Launches
from .profile import Profile

__all__ = ["launch_edges", "wait_edges"]

Ints = npt.NDArray[np.int64]


def launch_edges(launches: Launches) -> tuple[Ints, Ints]:
    """Calls, and the first activity that each launched: a graph's replay launches many.

    Returns:
        Indices into `Profile.calls` and `Profile.activities`, of one length, the calls ascending.
    """
    launched = np.flatnonzero(launches.call >= 0)
    calls, first = np.unique(launches.call[launched], return_index=True)
    return calls.astype(np.int64), launched[first]


def wait_edges(profile: Profile, launches: Launches) -> tuple[Ints, Ints]:
    """Waits of streams for events, as pairs of activities.

    The source is what was launched last onto the event's stream before the event was recorded, the target what was
    launched first onto the waiting stream after the wait. Left out are waits whose record the profile does not have,
    pairs of one stream, and pairs whose times say that nobody waited: the target began before the source ended, by
    more than a microsecond, which is what profiles are exact to.

    Returns:
        Indices into `Profile.activities`, of one length, each pair once.
    """
    activities, waits = profile.activities, profile.waits
    usable = ~np.isnan(waits.recorded) & (waits.on_stream >= 0) & (waits.on_stream != waits.stream)
    usable = np.flatnonzero(usable)
    none = np.zeros(0, dtype=np.int64)
    launched = np.flatnonzero(launches.call >= 0)
    if not len(usable) or not len(launched):
        return none, none
    begin = profile.calls.begin[launches.call[launched]]
    order = np.lexsort((begin, activities.stream[launched], activities.device[launched], activities.rank[launched]))
    launched, begin = launched[order], begin[order]
    lanes = np.column_stack((activities.rank, activities.device, activities.stream))[launched]
    starts = np.flatnonzero(np.concatenate(([True], (lanes[1:] != lanes[:-1]).any(axis=1))))
    stops = np.append(starts[1:], len(lanes))
    pieces = {tuple(lanes[start].tolist()): slice(start, stop) for start, stop in zip(starts, stops, strict=True)}
    pairs: dict[tuple[int, int], None] = {}
    for number in usable.tolist():
        place = (int(waits.rank[number]), int(waits.device[number]))
        before = pieces.get((*place, int(waits.on_stream[number])))
        behind = pieces.get((*place, int(waits.stream[number])))
        if before is None or behind is None:
            continue
        source = int(np.searchsorted(begin[before], waits.recorded[number])) - 1
        target = int(np.searchsorted(begin[behind], waits.end[number]))
        if source < 0 or target >= behind.stop - behind.start:
            continue
        pair = int(launched[before][source]), int(launched[behind][target])
        if activities.begin[pair[1]] >= activities.end[pair[0]] - 1.0:
            pairs[pair] = None
    edges = np.array(list(pairs), dtype=np.int64).reshape(-1, 2)
    return edges[:, 0], edges[:, 1]
