"""Streams of a profile that were made to wait for an event behind a sibling's work, and did wait for that.

A wait says which stream waits and which call recorded the event. What the recording stream held by then is what had
been launched onto it by then. Where the last of that is a sibling's, and the waiting microbatch's own work there had
ended before, the time between is the sibling's alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..profile import Floats, Ints
from .findings import Hit, Missing
from .profile_view import UNWANTED, ProfileView

__all__ = ["events_after_yields"]

_NO_WAITS = (
    "needs streams that wait for events: torch.profiler has them with "
    "_ExperimentalConfig(enable_cuda_sync_events=True), Nsight Systems with --cuda-event-trace=true"
)


class _Launched:
    """Activities in the order of their launches: those of a stream, or of a microbatch on a stream."""

    def __init__(self, which: Ints, times: Floats) -> None:
        order = np.argsort(times[which], kind="stable")
        self.which = which[order]
        self.times = times[which][order]

    def last_before(self, time: float) -> int | None:
        place = int(np.searchsorted(self.times, time, side="left"))
        return int(self.which[place - 1]) if place else None

    def first_from(self, time: float) -> int | None:
        place = int(np.searchsorted(self.times, time, side="left"))
        return int(self.which[place]) if place < len(self.which) else None


def events_after_yields(view: ProfileView) -> list[Hit] | Missing:
    """Each wait that took time, and took it for a sibling."""
    waits = view.profile.waits
    if not len(waits):
        return Missing(_NO_WAITS)
    if not view.microbatches:
        return Missing(UNWANTED)
    return list(_late(view))


def _late(view: ProfileView) -> Iterator[Hit]:
    activities, waits, owners = view.profile.activities, view.profile.waits, view.owners
    times = np.full(len(activities), np.nan)
    called = view.launches.call >= 0
    times[called] = view.profile.calls.begin[view.launches.call[called]]
    by_stream, by_owner = _groups(view, times)
    for n in range(len(waits)):
        where = int(waits.rank[n]), int(waits.device[n])
        waiting = by_stream.get((*where, int(waits.stream[n])))
        source = (*where, int(waits.on_stream[n]))
        recording = by_stream.get(source)
        if waiting is None or recording is None:
            continue
        held, last = waiting.first_from(float(waits.begin[n])), recording.last_before(float(waits.recorded[n]))
        if held is None or last is None or owners[held] < 0 or owners[last] < 0 or owners[held] == owners[last]:
            continue
        mine = by_owner.get((*source, int(owners[held])))
        own = None if mine is None else mine.last_before(float(waits.recorded[n]))
        if own is None:
            continue  # it has nothing there to wait for, so it does want the sibling's
        before = waiting.last_before(float(waits.begin[n]))
        free = -np.inf if before is None else activities.end[before]
        ready = max(activities.end[own], free, times[held])
        lost = float(min(activities.begin[held], activities.end[last]) - ready)
        if lost > 0:
            what = (
                f"{view.name(held)} on stream {int(activities.stream[held])} waits {lost:.1f} us for the other "
                f"microbatch's {view.name(last)}: its event was recorded on stream {source[-1]} behind that, and "
                "not behind the work of its own microbatch"
            )
            yield Hit(what, view.place(held), view.name(held))


def _groups(
    view: ProfileView, times: Floats
) -> tuple[dict[tuple[int, ...], _Launched], dict[tuple[int, ...], _Launched]]:
    activities = view.profile.activities
    launched = np.flatnonzero(~np.isnan(times))
    keys = np.column_stack((activities.rank, activities.device, activities.stream, view.owners))[launched]
    out: list[dict[tuple[int, ...], _Launched]] = []
    for width in (3, 4):
        unique, inverse = np.unique(keys[:, :width], axis=0, return_inverse=True)
        inverse = inverse.reshape(-1)
        out.append(
            {tuple(map(int, key)): _Launched(launched[inverse == number], times) for number, key in enumerate(unique)}
        )
    return out[0], out[1]
