"""An export as Chrome's JSON, which chrome://tracing, Perfetto and most other viewers open.

The format nests what one thread runs by its times alone, and viewers drop what overlaps without nesting. So a track is
a thread, on which no slices overlap (`tracks` sees to it), and the only nested slice is a wait inside its slice.
Threads are named and ordered by metadata events; their numbers are unique across processes, since viewers mix up
threads of two processes that share one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from typing import IO, Any

from .items import CounterTrack, FlowEnd, Item, Process, Slice, SliceTrack

__all__ = ["microseconds", "write_chrome"]

_EXACT = 2**50  # nanoseconds
_BUFFERED = 10_000  # events that are written at once


def write_chrome(items: Iterable[Item], file: IO[bytes]) -> None:
    """Write the items as one JSON object, one event a line.

    Raises:
        whatever iterating over `items` raises; OSError from the file.
    """
    writer = _Writer()
    lines = writer.lines
    between = b'{"displayTimeUnit":"ns","traceEvents":[\n'
    for item in items:
        writer.write(item)
        if len(lines) > _BUFFERED:
            file.write(between + b",\n".join(lines))
            between = b",\n"
            lines.clear()
    file.write((between + b",\n".join(lines) if lines or between[:1] == b"{" else b"") + b"\n]}\n")


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


def _make_encoder() -> Callable[[Any], bytes]:
    encoder = json.JSONEncoder(separators=(",", ":"), allow_nan=False)

    def strict(event: Any) -> bytes:
        return encoder.encode(event).encode("ascii")

    try:
        import msgspec
    except ModuleNotFoundError:
        # The extra `trace` makes it several times faster, and nothing else.
        return strict
    quick = msgspec.json.encode

    def encode(event: Any) -> bytes:
        try:
            return quick(event)
        except UnicodeEncodeError:
            # JSON may hold half of a surrogate pair; only an escape can say it.
            return strict(event)

    return encode


class _Writer:
    """Knows the tracks that came by.

    Attributes:
        lines: the events that were not written to the file yet.
    """

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self._encode = _make_encoder()
        self._process: dict[int, int] = {}  # track -> process
        self._counters: dict[int, CounterTrack] = {}

    def write(self, item: Item) -> None:
        if isinstance(item, Slice):
            self._slice(item)
        elif isinstance(item, Process):
            self._metadata(item.id, 0, "process_name", name=item.name)
            self._metadata(item.id, 0, "process_sort_index", sort_index=item.rank)
            if item.labels:
                self._metadata(item.id, 0, "process_labels", labels=", ".join(item.labels))
        elif isinstance(item, SliceTrack):
            self._process[item.id] = item.process
            self._metadata(item.process, item.id, "thread_name", name=item.name)
            self._metadata(item.process, item.id, "thread_sort_index", sort_index=item.place)
        elif isinstance(item, CounterTrack):
            self._counters[item.id] = item
        else:
            track = self._counters[item.track]
            # Chrome has counters of a process, by name; an order it has none.
            self._add(
                {
                    "ph": "C",
                    "name": track.name,
                    "pid": track.process,
                    "ts": microseconds(item.at),
                    "args": {track.unit: item.value},
                }
            )

    def _slice(self, item: Slice) -> None:
        track = item.track
        process = self._process[track]
        begin = microseconds(item.begin)
        self._add(
            {
                "ph": "X",
                "name": item.name,
                "cat": item.category,
                "pid": process,
                "tid": track,
                "ts": begin,
                "dur": microseconds(item.end - item.begin),
                "args": item.details,
            }
        )
        if item.waited:
            where = {"pid": process, "tid": track, "ts": begin, "dur": microseconds(item.waited)}
            self._add({"ph": "X", "name": "wait", "cat": "wait", **where})
        for end in item.departs:
            self._add(_flow("s", end, process, track))
        for end in item.arrives:
            # bp e: the arrow ends in the slice round this time, and not in the next one.
            self._add(_flow("f", end, process, track) | {"bp": "e"})

    def _metadata(self, process: int, thread: int, what: str, **arguments: Any) -> None:
        self._add({"ph": "M", "name": what, "pid": process, "tid": thread, "args": arguments})

    def _add(self, event: dict[str, Any]) -> None:
        self.lines.append(self._encode(event))


def _flow(phase: str, end: FlowEnd, process: int, track: int) -> dict[str, Any]:
    return {
        "ph": phase,
        "name": end.name,
        "cat": end.category,
        "id": end.id,
        "pid": process,
        "tid": track,
        "ts": microseconds(end.at),
    }
