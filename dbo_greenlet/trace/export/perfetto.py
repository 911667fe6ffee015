"""An export as Perfetto's own format: TrackEvent packets, by the protos of the `perfetto` package.

Unlike Chrome's JSON it has tracks by themselves (no threads to pretend), whole nanoseconds, arrows that hang on slices
and not on times, and counter tracks with a place. A file is a sequence of packets, so it is written as it comes.

Two serialized messages behind one another are the serialized merge of both (that is how protobuf defines its encoding).
So what recurs, a detail or a name on its track, is serialized by the protos once, and an event is put together of such
pieces. Building each event as a message of its own took four times as long.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import IO, Any

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos

from ...errors import TraceFileError
from .items import CounterSample, CounterTrack, Item, Process, Slice, SliceTrack

__all__ = ["write_perfetto"]

# All packets are of one writer, whose state begins with the first packet.
_SEQUENCE = 1
_BUFFERED = 10_000  # packets that are written at once
_KEPT = 1 << 16  # pieces of each kind that are kept


def write_perfetto(items: Iterable[Item], file: IO[bytes]) -> None:
    """Write the items as packets.

    Raises:
        TraceFileError: a time before zero, which Perfetto cannot say. The message names no file.
        Otherwise whatever iterating over `items` raises; OSError from the file.
    """
    writer = _Writer()
    packets = writer.packets
    for item in items:
        writer.write(item)
        if len(packets) > _BUFFERED:
            file.write(b"".join(packets))
            packets.clear()
    file.write(b"".join(packets))


class _Writer:
    """Makes packets.

    Attributes:
        packets: those that were not written to the file yet, as fields of a `Trace`.
    """

    def __init__(self) -> None:
        self.packets: list[bytes] = []
        self._first = True
        # Filled anew for each packet, which costs less than a new message.
        self._timed = protos.TracePacket(trusted_packet_sequence_id=_SEQUENCE)
        self._sample = protos.TrackEvent(type=protos.TrackEvent.TYPE_COUNTER)

    def write(self, item: Item) -> None:
        if isinstance(item, Slice):
            self._slice(item)
        elif isinstance(item, CounterSample):
            self._sample.track_uuid = item.track
            self._sample.counter_value = item.value
            self._event(item.at, self._sample.SerializeToString())
        else:
            self._track(item)

    def _track(self, item: Process | SliceTrack | CounterTrack) -> None:
        packet = protos.TracePacket(trusted_packet_sequence_id=_SEQUENCE)
        described = packet.track_descriptor
        # Numbers of processes (rank + 1) and of tracks do not meet.
        described.uuid = item.id
        described.name = _text(item.name)
        if isinstance(item, Process):
            described.process.pid = item.id
            described.process.process_name = described.name
            described.process.process_labels.extend(map(_text, item.labels))
            described.child_ordering = protos.TrackDescriptor.EXPLICIT
        else:
            described.parent_uuid = item.process
            described.sibling_order_rank = item.place
        if isinstance(item, CounterTrack):
            sized = item.unit == "bytes"
            described.counter.unit = (
                protos.CounterDescriptor.UNIT_SIZE_BYTES if sized else protos.CounterDescriptor.UNIT_COUNT
            )
            if not sized:
                described.counter.unit_name = item.unit
        self._send(packet.SerializeToString())

    def _slice(self, item: Slice) -> None:
        track = item.track
        parts = [_begin(track, item.name, item.category)]
        for name, value in item.details.items():
            parts.append(_annotation(name, value if isinstance(value, _SAID) else str(value)))
        if item.departs or item.arrives:
            arrows = protos.TrackEvent(
                flow_ids=[end.id for end in item.departs], terminating_flow_ids=[end.id for end in item.arrives]
            )
            parts.append(arrows.SerializeToString())
        self._event(item.begin, b"".join(parts))
        if item.waited:
            self._event(item.begin, _begin(track, "wait", "wait"))
            self._event(item.begin + item.waited, _end(track))
        self._event(item.end, _end(track))

    def _event(self, at: int, event: bytes) -> None:
        if at < 0:
            raise TraceFileError(
                f"a time of {at / 1000} us, before the trace's zero, cannot be said in Perfetto's format; "
                "--format chrome can"
            )
        self._timed.timestamp = at
        self._send(self._timed.SerializeToString() + _EVENT + _length(len(event)) + event)

    def _send(self, packet: bytes) -> None:
        if self._first:
            packet += _CLEARED
            self._first = False
        self.packets.append(_PACKET + _length(len(packet)) + packet)


def _key(message: Any, field: str) -> bytes:
    """What stands in front of the length of a field that is a message: its number, and wire type 2."""
    return _length(message.DESCRIPTOR.fields_by_name[field].number << 3 | 2)


@functools.cache
def _length(value: int) -> bytes:
    """A number as protobuf's varint: seven bits a byte, the lowest first, the eighth says that more follows."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


_PACKET = _key(protos.Trace, "packet")
_EVENT = _key(protos.TracePacket, "track_event")
_CLEARED = protos.TracePacket(sequence_flags=protos.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED).SerializeToString()
_SAID = (bool, int, float, str)


@functools.lru_cache(maxsize=_KEPT)
def _begin(track: int, name: str, category: str) -> bytes:
    event = protos.TrackEvent(type=protos.TrackEvent.TYPE_SLICE_BEGIN, track_uuid=track, name=_text(name))
    event.categories.append(category)
    return bytes(event.SerializeToString())


@functools.lru_cache(maxsize=_KEPT)
def _end(track: int) -> bytes:
    event = protos.TrackEvent(type=protos.TrackEvent.TYPE_SLICE_END, track_uuid=track)
    return bytes(event.SerializeToString())


# typed: true is not 1.
@functools.lru_cache(maxsize=_KEPT, typed=True)
def _annotation(name: str, value: bool | int | float | str) -> bytes:
    event = protos.TrackEvent()
    annotation = event.debug_annotations.add()
    annotation.name = name
    if isinstance(value, bool):
        annotation.bool_value = value
    elif isinstance(value, int) and -(2**63) <= value < 2**63:
        annotation.int_value = value
    elif isinstance(value, float):
        annotation.double_value = value
    else:
        annotation.string_value = _text(str(value))
    return bytes(event.SerializeToString())


def _text(text: str) -> str:
    """JSON may hold half of a surrogate pair, which no protobuf string can."""
    return text.encode("utf-8", "replace").decode("utf-8")
