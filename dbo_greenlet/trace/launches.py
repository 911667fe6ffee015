"""Which call of the host launched what ran on the GPU, and which launches follow a wait for an event."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .profile import Activities, Calls, Profile

__all__ = ["Launches", "find_launches"]

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Launches:
    """One entry per activity.

    Attributes:
        call: index into `Profile.calls`; -1 where the profile does not show the launch.
        in_graph: it ran as part of a graph's replay.
        waits: its process made a stream wait for an event since the last launch onto the same stream. On whichever
            thread: autograd launches on its own behind a wait of the main one. Profiles do not say which stream waits,
            so a wait between the launches onto two streams counts for both.
        replays: number of calls that replay a graph.
        hidden_replays: of these, the ones without any activity.
    """

    call: Ints
    in_graph: Bools
    waits: Bools
    replays: int
    hidden_replays: int


def find_launches(profile: Profile) -> Launches:
    """Match activities and calls by rank and correlation id."""
    activities, calls = profile.activities, profile.calls
    is_replay = _named(profile, calls, "GraphLaunch")
    is_wait = _named(profile, calls, "WaitEvent")
    call = _matched(activities, calls)
    in_graph = activities.graph_node >= 0
    if len(calls):
        in_graph = in_graph | ((call >= 0) & is_replay[call])
    replayed = np.zeros(len(calls), dtype=bool)
    replayed[call[call >= 0]] = True
    return Launches(
        call=call,
        in_graph=in_graph,
        waits=_after_wait(activities, calls, call, is_wait),
        replays=int(is_replay.sum()),
        hidden_replays=int((is_replay & ~replayed).sum()),
    )


def _named(profile: Profile, calls: Calls, part: str) -> Bools:
    wanted = np.array([part in name for name in profile.names], dtype=bool)
    return wanted[calls.name] if len(calls) else np.zeros(0, dtype=bool)


def _matched(activities: Activities, calls: Calls) -> Ints:
    none = np.full(len(activities), -1, dtype=np.int64)
    known = np.flatnonzero(calls.correlation > 0)
    if not len(known):
        return none
    # Correlation ids are 32-bit counters of one process.
    keys = (calls.rank[known] << 40) + calls.correlation[known]
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    wanted = (activities.rank << 40) + activities.correlation
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    found = (keys[place] == wanted) & (activities.correlation > 0)
    return np.where(found, known[order][place], none)


def _after_wait(activities: Activities, calls: Calls, call: Ints, is_wait: Bools) -> Bools:
    waits = np.zeros(len(activities), dtype=bool)
    launched = np.flatnonzero(call >= 0)
    if not len(launched) or not is_wait.any():
        return waits
    at = call[launched]
    rank, device, stream = calls.rank[at], activities.device[launched], activities.stream[launched]
    order = np.lexsort((calls.begin[at], stream, device, rank))
    launched, begin = launched[order], calls.begin[at][order]
    rank, device, stream = rank[order], device[order], stream[order]
    same = (rank[1:] == rank[:-1]) & (device[1:] == device[:-1]) & (stream[1:] == stream[:-1])
    before = np.where(np.concatenate(([False], same)), np.concatenate(([0.0], begin[:-1])), -np.inf)
    # Sorted by rank, so each rank's launches are one piece.
    starts = np.flatnonzero(np.concatenate(([True], rank[1:] != rank[:-1])))
    for start, stop in zip(starts, np.append(starts[1:], len(rank)), strict=True):
        mine = slice(start, stop)
        times = calls.begin[is_wait & (calls.rank == rank[start])]
        waits[launched[mine]] = np.searchsorted(times, begin[mine]) > np.searchsorted(times, before[mine], side="right")
    return waits
