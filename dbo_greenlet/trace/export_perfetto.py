"""An export as Perfetto's own format: TrackEvent packets, by the protos of the `perfetto` package.

Unlike Chrome's JSON it has tracks by themselves (no threads to pretend), whole nanoseconds, arrows that hang on slices
and not on times, and counter tracks with a place. A file is a sequence of packets, so it is written as it comes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, Any

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos
from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder

from ..errors import TraceFileError
from .export_items import CounterSample, CounterTrack, Item, Process, Slice

__all__ = ["write_perfetto"]

# All packets are of one writer, whose state begins with the first packet.
_SEQUENCE = 1


def write_perfetto(items: Iterable[Item], file: IO[bytes]) -> None:
    """Write the items as packets.

    Raises:
        TraceFileError: a time before zero, which Perfetto cannot say. The message names no file.
        Otherwise whatever iterating over `items` raises; OSError from the file.
    """
    writer = _Writer(StreamingTraceProtoBuilder(file))
    for item in items:
        writer.write(item)


class _Writer:
    def __init__(self, builder: StreamingTraceProtoBuilder) -> None:
        self._builder = builder
        self._first = True

    def write(self, item: Item) -> None:
        if isinstance(item, Slice):
            self._slice(item)
        elif isinstance(item, CounterSample):
            event = self._event(item.at, item.track, protos.TrackEvent.TYPE_COUNTER)
            event.track_event.counter_value = item.value
            self._send(event)
        else:
            self._track(item)

    def _track(self, item: Any) -> None:
        packet = self._packet()
        described = packet.track_descriptor
        # Numbers of processes (rank + 1) and of tracks do not meet.
        described.uuid = item.id
        described.name = _text(item.name)
        if isinstance(item, Process):
            described.process.pid = item.id
            described.process.process_name = item.name
            described.process.process_labels.extend(map(_text, item.labels))
            described.child_ordering = protos.TrackDescriptor.EXPLICIT
        else:
            described.parent_uuid = item.process
            described.sibling_order_rank = item.place
        if isinstance(item, CounterTrack):
            described.counter.unit = protos.CounterDescriptor.UNIT_COUNT
            described.counter.unit_name = item.unit
        self._send(packet)

    def _slice(self, item: Slice) -> None:
        begin = self._event(item.begin, item.track, protos.TrackEvent.TYPE_SLICE_BEGIN)
        event = begin.track_event
        event.name = _text(item.name)
        event.categories.append(item.category)
        event.flow_ids.extend(end.id for end in item.departs)
        event.terminating_flow_ids.extend(end.id for end in item.arrives)
        for name, value in item.details.items():
            _annotate(event.debug_annotations.add(), name, value)
        self._send(begin)
        if item.waited:
            wait = self._event(item.begin, item.track, protos.TrackEvent.TYPE_SLICE_BEGIN)
            wait.track_event.name = "wait"
            wait.track_event.categories.append("wait")
            self._send(wait)
            self._send(self._event(item.begin + item.waited, item.track, protos.TrackEvent.TYPE_SLICE_END))
        self._send(self._event(item.end, item.track, protos.TrackEvent.TYPE_SLICE_END))

    def _event(self, at: int, track: int, kind: int) -> protos.TracePacket:
        if at < 0:
            raise TraceFileError(
                f"a time of {at / 1000} us, before the trace's zero, cannot be said in Perfetto's format; "
                "--format chrome can"
            )
        packet = self._packet()
        packet.timestamp = at
        packet.track_event.type = kind
        packet.track_event.track_uuid = track
        return packet

    def _packet(self) -> protos.TracePacket:
        packet = self._builder.create_packet()
        packet.trusted_packet_sequence_id = _SEQUENCE
        return packet

    def _send(self, packet: protos.TracePacket) -> None:
        if self._first:
            packet.sequence_flags = protos.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
            self._first = False
        self._builder.write_packet(packet)


def _annotate(annotation: protos.DebugAnnotation, name: str, value: Any) -> None:
    annotation.name = name
    if isinstance(value, bool):
        annotation.bool_value = value
    elif isinstance(value, int) and -(2**63) <= value < 2**63:
        annotation.int_value = value
    elif isinstance(value, float):
        annotation.double_value = value
    else:
        annotation.string_value = _text(str(value))


def _text(text: str) -> str:
    """JSON may hold half of a surrogate pair, which no protobuf string can."""
    return text.encode("utf-8", "replace").decode("utf-8")
