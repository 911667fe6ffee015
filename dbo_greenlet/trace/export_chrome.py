"""An export as Chrome's JSON, which chrome://tracing, Perfetto and most other viewers open.

The format nests what one thread runs by its times alone, and viewers drop what overlaps without nesting. So a track is
a thread, on which no slices overlap (`export_model` sees to it), and the only nested slice is a wait inside its slice.
Threads are named and ordered by metadata events; their numbers are unique across processes, since viewers mix up
threads of two processes that share one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import IO, Any

from .export_items import CounterTrack, FlowEnd, Item, Process, Slice, SliceTrack

__all__ = ["microseconds", "write_chrome"]

_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
_EXACT = 2**50  # nanoseconds


def write_chrome(items: Iterable[Item], file: IO[bytes]) -> None:
    """Write the items as one JSON object, one event a line.

    Raises:
        whatever iterating over `items` raises; OSError from the file.
    """
    writer = _Writer()
    between = b'{"displayTimeUnit":"ns","traceEvents":[\n'
    for item in items:
        for event in writer.events(item):
            file.write(between + _ENCODER.encode(event).encode("ascii"))
            between = b",\n"
    file.write(b"\n]}\n")


def microseconds(nanoseconds: int) -> float:
    """The number to write for a time, in microseconds.

    Readers multiply it by 1000 and round or cut off. Of one number in some dozens that product is a hair below the
    nanosecond, and cutting off makes neighbours overlap by one; then the next larger number is taken. That is exact for
    13 days from the trace's zero; later the numbers of JSON are too coarse for it.
    """
    value = nanoseconds / 1000
    if int(value * 1000.0) == nanoseconds or abs(nanoseconds) >= _EXACT:
        return value
    return math.nextafter(value, math.copysign(math.inf, nanoseconds))


class _Writer:
    """Knows the tracks that came by."""

    def __init__(self) -> None:
        self._process: dict[int, int] = {}  # track -> process
        self._counters: dict[int, CounterTrack] = {}

    def events(self, item: Item) -> list[dict[str, Any]]:
        if isinstance(item, Slice):
            return self._slice(item)
        if isinstance(item, Process):
            out = [_metadata(item.id, 0, "process_name", name=item.name)]
            out.append(_metadata(item.id, 0, "process_sort_index", sort_index=item.rank))
            if item.labels:
                out.append(_metadata(item.id, 0, "process_labels", labels=", ".join(item.labels)))
            return out
        if isinstance(item, SliceTrack):
            self._process[item.id] = item.process
            return [
                _metadata(item.process, item.id, "thread_name", name=item.name),
                _metadata(item.process, item.id, "thread_sort_index", sort_index=item.place),
            ]
        if isinstance(item, CounterTrack):
            self._counters[item.id] = item
            return []
        track = self._counters[item.track]
        # Chrome has counters of a process, by name; an order it has none.
        event = {"ph": "C", "name": track.name, "pid": track.process, "ts": microseconds(item.at)}
        return [event | {"args": {track.unit: item.value}}]

    def _slice(self, item: Slice) -> list[dict[str, Any]]:
        where = {"pid": self._process[item.track], "tid": item.track}
        complete = {"ph": "X", "name": item.name, "cat": item.category, **where, "ts": microseconds(item.begin)}
        out = [complete | {"dur": microseconds(item.end - item.begin), "args": item.details}]
        if item.waited:
            out.append({**complete, "name": "wait", "cat": "wait", "dur": microseconds(item.waited)})
        out += [_flow("s", end, where) for end in item.departs]
        # bp e: the arrow ends in the slice round this time, and not in the next one.
        out += [_flow("f", end, where) | {"bp": "e"} for end in item.arrives]
        return out


def _flow(phase: str, end: FlowEnd, where: dict[str, int]) -> dict[str, Any]:
    return {"ph": phase, "name": end.name, "cat": "receive", "id": end.id, **where, "ts": microseconds(end.at)}


def _metadata(process: int, thread: int, what: str, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": arguments}
