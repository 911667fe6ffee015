"""An export as the data of a page: columns, small enough for a hundred thousand slices and ready to be drawn.

One JSON object:

    strings     names of slices and arrows; everything below that names something holds an index into these
    stages      names of the stages
    processes   [{"id", "rank", "name", "labels"}], by rank
    tracks      [{"process", "name", "begin", "length", "text", "stage", "wait", "shape", "shapes"}], top to bottom.
                `begin` (nanoseconds) holds differences to the slice before, `length` nanoseconds, `wait` pairs of a
                slice's index and the nanoseconds for which it waits, from its begin on
    counters    [{"process", "name", "unit", "at", "value"}], `at` as differences too
    arrows      [from, to, departs, arrives, name, category]: the slices numbered through all tracks, `arrives` as a
                difference

A slice's details stand in the columns of its shape (its keys): a list of numbers, {"all": value} where it is one for
all, or {"of": values, "at": indices}. `shape` is one number where a track has one shape, which most have. A row per
slice, as objects, was four times as large, and took the browser as much longer to read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .export.items import CounterSample, CounterTrack, FlowEnd, Item, Process, Slice, SliceTrack
from .item_stages import STAGES, layer_of, stage_of

__all__ = ["PageColumns"]


@dataclass
class _Shape:
    keys: tuple[str, ...]
    columns: list[list[Any]]


@dataclass
class _Track:
    item: SliceTrack
    begin: list[int] = field(default_factory=list)
    length: list[int] = field(default_factory=list)
    text: list[int] = field(default_factory=list)
    stage: list[int] = field(default_factory=list)
    wait: list[int] = field(default_factory=list)
    shape: list[int] = field(default_factory=list)
    shapes: dict[tuple[str, ...], int] = field(default_factory=dict)
    rows: list[_Shape] = field(default_factory=list)
    latest: int = 0


@dataclass
class _Counter:
    item: CounterTrack
    at: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)
    latest: int = 0


class PageColumns:
    """Takes the items of an export, in their order, and gives the page's data.

    Attributes:
        slices: how many it holds.
    """

    def __init__(self) -> None:
        self.slices = 0
        self._strings: dict[str, int] = {}
        self._processes: list[Process] = []
        self._tracks: dict[int, _Track] = {}
        self._counters: dict[int, _Counter] = {}
        # id of an arrow -> its end: track, index of the slice on it, the end itself
        self._departs: dict[int, tuple[int, int, FlowEnd]] = {}
        self._arrives: dict[int, tuple[int, int, FlowEnd]] = {}

    def add(self, items: Iterable[Item]) -> None:
        """Raises whatever iterating over `items` raises."""
        for item in items:
            if isinstance(item, Slice):
                self._slice(item)
            elif isinstance(item, CounterSample):
                counter = self._counters[item.track]
                counter.at.append(item.at - counter.latest)
                counter.value.append(item.value)
                counter.latest = item.at
            elif isinstance(item, SliceTrack):
                self._tracks[item.id] = _Track(item)
            elif isinstance(item, CounterTrack):
                self._counters[item.id] = _Counter(item)
            else:
                self._processes.append(item)

    def data(self) -> dict[str, Any]:
        """The object that the module describes."""
        processes = sorted(self._processes, key=lambda process: (process.rank, process.id))
        order = {process.id: place for place, process in enumerate(processes)}
        tracks = sorted(self._tracks.values(), key=lambda t: (order[t.item.process], t.item.place, t.item.id))
        counters = sorted(self._counters.values(), key=lambda c: (order[c.item.process], c.item.place, c.item.id))
        first: dict[int, int] = {}  # id of a track -> number of its first slice
        total = 0
        for track in tracks:
            first[track.item.id] = total
            total += len(track.begin)
        return {
            "stages": list(STAGES),
            "processes": [
                {"id": process.id, "rank": process.rank, "name": process.name, "labels": list(process.labels)}
                for process in processes
            ],
            "tracks": [_track_data(track) for track in tracks],
            "counters": [
                {
                    "process": counter.item.process,
                    "name": counter.item.name,
                    "unit": counter.item.unit,
                    "at": counter.at,
                    "value": counter.value,
                }
                for counter in counters
            ],
            "arrows": self._arrows(first),
            "strings": list(self._strings),  # last: what is above adds to them
        }

    def _slice(self, item: Slice) -> None:
        track = self._tracks[item.track]
        number = len(track.begin)
        track.begin.append(item.begin - track.latest)
        track.latest = item.begin
        track.length.append(item.end - item.begin)
        track.text.append(self._string(item.name))
        track.stage.append(STAGES.index(stage_of(item)))
        if item.waited:
            track.wait += (number, item.waited)
        details = item.details
        if "layer" not in details and (layer := layer_of(item)) is not None:
            details = details | {"layer": layer}
        keys = tuple(details)
        shape = track.shapes.get(keys)
        if shape is None:
            shape = track.shapes[keys] = len(track.rows)
            track.rows.append(_Shape(keys, [[] for _ in keys]))
        track.shape.append(shape)
        for column, value in zip(track.rows[shape].columns, details.values(), strict=True):
            column.append(value)
        for end in item.departs:
            self._departs[end.id] = (item.track, number, end)
        for end in item.arrives:
            self._arrives[end.id] = (item.track, number, end)
        self.slices += 1

    def _string(self, text: str) -> int:
        return self._strings.setdefault(text, len(self._strings))

    def _arrows(self, first: dict[int, int]) -> list[list[int]]:
        arrows = []
        for number, (track, index, end) in self._departs.items():
            if (other := self._arrives.get(number)) is not None:
                to_track, to_index, arrival = other
                ends = [first[track] + index, first[to_track] + to_index]
                words = [self._string(end.name), self._string(end.category)]
                arrows.append([*ends, end.at, arrival.at - end.at, *words])
        return sorted(arrows, key=lambda arrow: arrow[2])


def _track_data(track: _Track) -> dict[str, Any]:
    return {
        "process": track.item.process,
        "name": track.item.name,
        "begin": track.begin,
        "length": track.length,
        "text": track.text,
        "stage": track.stage,
        "wait": track.wait,
        "shape": 0 if len(track.rows) <= 1 else track.shape,
        "shapes": [{"keys": list(shape.keys), "columns": [_column(c) for c in shape.columns]} for shape in track.rows],
    }


def _column(values: list[Any]) -> Any:
    """The column as the module describes it."""
    if all(type(value) in (int, float) for value in values):
        # One value for all, as a step's number on a track of one step, is worth finding among numbers too.
        return {"all": values[0]} if values and all(value == values[0] for value in values) else values
    strings = all(type(value) is str for value in values)
    # true and 1 are equal in Python, and two values here.
    texts = values if strings else [json.dumps(value) for value in values]
    places: dict[str, int] = {}
    at = [places.setdefault(text, len(places)) for text in texts]
    known = dict(zip(at, values, strict=True))
    if len(places) == 1:
        return {"all": known[0]}
    return {"of": [known[place] for place in range(len(places))], "at": at}
