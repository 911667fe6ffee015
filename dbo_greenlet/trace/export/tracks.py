"""The tracks of an export: numbered, named once, and with further lanes where slices would overlap."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count

from .items import FIRST_TRACK, CounterSample, CounterTrack, Item, Slice, SliceTrack

__all__ = ["Tracks", "total_over_time"]


@dataclass(slots=True)
class _Lane:
    track: int
    end: int  # of its last slice


class Tracks:
    """Hands out tracks and puts slices on them.

    Attributes, counted as items go out:
        shown: number of slices (waits are part of their slice), flows and counter samples.
    """

    def __init__(self) -> None:
        self.shown = {"slices": 0, "flows": 0, "counter samples": 0}
        self._ids = count(FIRST_TRACK)
        self._flows = count(1)
        self._lanes: dict[tuple[int, str], list[_Lane]] = {}
        self._counters: dict[tuple[int, str], int] = {}

    def flow(self) -> int:
        """The number of a new arrow."""
        self.shown["flows"] += 1
        return next(self._flows)

    def placed(self, process: int, name: str, place: int, slices: Iterable[Slice]) -> Iterator[Item]:
        """Each slice on the first of the track's lanes that is free when it begins.

        Args:
            process: id of the process.
            name: of the track; its further lanes are "name (2)" and so on.
            place: its order within the process.
            slices: whose track is not set yet. Those of one call are put in order, the calls of one track follow it.
        """
        lanes = self._lanes.setdefault((process, name), [])
        for each in sorted(slices, key=_by_time):
            begin = each.begin
            for lane in lanes:
                if lane.end <= begin:
                    break
            else:
                lane = _Lane(next(self._ids), begin)
                lanes.append(lane)
                full_name = name if len(lanes) == 1 else f"{name} ({len(lanes)})"
                yield SliceTrack(lane.track, process, full_name, place * 1000 + min(len(lanes), 1000) - 1)
            lane.end = each.end
            each.track = lane.track
            self.shown["slices"] += 1
            yield each

    def counted(self, process: int, name: str, place: int, unit: str, samples: Mapping[int, int]) -> Iterator[Item]:
        """Samples of a counter: time -> value from there on."""
        if not samples:
            return
        track = self._counters.get((process, name))
        if track is None:
            track = self._counters[process, name] = next(self._ids)
            yield CounterTrack(track, process, name, place * 1000, unit)
        self.shown["counter samples"] += len(samples)
        for at, value in sorted(samples.items()):
            yield CounterSample(track, at, value)


def _by_time(each: Slice) -> tuple[int, int]:
    return each.begin, each.end


def total_over_time(spans: Collection[tuple[int, int, int]]) -> dict[int, int]:
    """Time -> the sum of the amounts of all spans (begin, end, amount) that are open from there on."""
    change: dict[int, int] = {}
    for begin, end, amount in spans:
        change[begin] = change.get(begin, 0) + amount
        change[end] = change.get(end, 0) - amount
    total = 0
    samples = {}
    for at in sorted(change):
        total += change[at]
        samples[at] = total
    return samples
