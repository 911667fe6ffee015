"""What an export must show of a trace, what Chrome's JSON shows, and what Perfetto's packets show: in one form.

Written from the formats' documents and from the schema of the trace, without the code under test.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dbo_greenlet.trace import OpRecord, StepTrace, read_trace
from dbo_greenlet.trace.notation import parse_site

protos = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2", reason="perfetto is not installed")

Where = tuple[int, str]  # rank, track without the number of its lane
Span = tuple[int, str, int, int]  # rank, track, begin, end (nanoseconds)


@dataclass
class Shown:
    """Each thing as often as it is shown.

    `flows` are pairs of the slices at both ends; `counters` are the samples of each counter, in order.
    """

    slices: Counter[Span] = field(default_factory=Counter)
    waits: Counter[Span] = field(default_factory=Counter)
    flows: Counter[tuple[Span, Span]] = field(default_factory=Counter)
    counters: dict[Where, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))


# -- what the trace says -----------------------------------------------------------------------------------------------


def expected(path: Path) -> Shown:
    trace = read_trace(path)
    origins = {rank: header.origin_ns for rank, header in trace.headers.items()}
    if not all(origins.values()):
        origins = dict.fromkeys(origins, 0)  # 0 is not known
    shown = Shown()
    for step in trace.steps.values():
        shift = origins[step.rank] - min(origins.values())
        _add_step(step, shift, shown)
    return shown


def _add_step(step: StepTrace, shift: int, shown: Shown) -> None:
    def ns(microseconds: float) -> int:
        return shift + round(microseconds * 1000)

    rank, record = step.rank, step.record
    if record is not None and record.begin is not None and record.end is not None:
        shown.slices[rank, "steps", ns(record.begin), ns(record.end)] += 1
    ran: list[Span] = [(rank, f"microbatch {s.ubatch}", ns(s.begin), ns(s.end)) for s in step.slices]
    shown.slices.update(ran)
    windows = []
    for r in step.receives:
        site = parse_site(r.site)
        stage = "" if site is None else f"{site.stage.removeprefix('before_')} "
        last = [r.sent, *(s.end for s in step.slices)] + ([record.end] if record and record.end is not None else [])
        windows.append((ns(r.sent), ns(max(last) if r.at is None else r.at)))
        begin, end = windows[-1]
        shown.slices[rank, f"{stage}in flight", begin, end] += 1
        if r.at is None or r.decision is None or r.sent_decision is None or r.decision <= r.sent_decision:
            continue
        if r.decision < len(ran) and ran[r.sent_decision][3] <= ran[r.decision][2]:
            runner = r.ubatch if r.by is None else r.by
            if (step.slices[r.sent_decision].ubatch, step.slices[r.decision].ubatch) == (r.ubatch, runner):
                shown.flows[ran[r.sent_decision], ran[r.decision]] += 1
    for g in step.gpu:
        shown.slices[rank, f"{g.stream} stream", ns(g.begin), ns(g.end)] += 1
        if (waited := min(round(g.waited * 1000), ns(g.end) - ns(g.begin))) > 0:
            shown.waits[rank, f"{g.stream} stream", ns(g.begin), ns(g.begin) + waited] += 1
    _add_waits(step, shift, shown)
    for at in sorted({time for window in windows for time in window}):
        value = sum(begin <= at < end for begin, end in windows)
        shown.counters[rank, "transfers in flight"].append((at, value))
    sized = [(*window, r.bytes) for window, r in zip(windows, step.receives, strict=True) if r.bytes is not None]
    for at in sorted({time for begin, end, _ in sized for time in (begin, end)}):
        value = sum(size for begin, end, size in sized if begin <= at < end)
        shown.counters[rank, "bytes in flight"].append((at, value))
    samples = {}
    for number, (_, _, begin, _) in enumerate(ran):
        past = step.slices[:number]
        passed = [sum(s.ubatch == i for s in past) for i in range(step.count)]
        over = [any(s.ubatch == i and (s.failed or not s.site) for s in past) for i in range(step.count)]
        samples[begin] = sum(
            not over[i] and all(over[j] or passed[j] > passed[i] for j in range(i)) for i in range(step.count)
        )
    if ran:
        samples[max(end for *_, end in ran)] = 0
        shown.counters[rank, "runnable microbatches"] += sorted(samples.items())


def _add_waits(step: StepTrace, shift: int, shown: Shown) -> None:
    """Arrows between GPU streams: from the slice that recorded to the slice that waited, once for each two."""
    pairs = set()
    for wait in step.ops:
        for record in step.ops:
            if (wait.op, record.op, record.number) != ("wait", "record", wait.of) or record.stream == wait.stream:
                continue
            ends = []
            for op in (record, wait):
                places = [n for n, g in enumerate(step.gpu) if (g.ubatch, g.slice, g.stream) == _place(op)]
                ends += places[:1]
            if len(ends) == 2:
                pairs.add(tuple(ends))
    for first, last in pairs:
        source, target = step.gpu[first], step.gpu[last]
        spans = [(shift + round(g.begin * 1000), shift + round(g.end * 1000)) for g in (source, target)]
        waited = min(round(target.waited * 1000), spans[1][1] - spans[1][0])
        if any(begin == end for begin, end in spans):
            continue
        # The wait is over within its slice, the last nanosecond of which is the one before its end.
        if spans[0][0] <= max(min(spans[1][0] + waited, spans[1][1] - 1), spans[1][0]):
            named = [(step.rank, f"{g.stream} stream", *span) for g, span in zip((source, target), spans, strict=True)]
            shown.flows[named[0], named[1]] += 1


def _place(op: OpRecord) -> tuple[int | None, int | None, str | None]:
    return op.ubatch, op.slice, op.stream


# -- Chrome ------------------------------------------------------------------------------------------------------------


def from_chrome(data: bytes) -> Shown:
    """Read and judge Chrome's JSON: every event known, every thread named, slices nested, arrows within slices."""
    events = json.loads(data)["traceEvents"]
    processes: dict[int, int] = {}
    threads: dict[int, tuple[int, str]] = {}
    places: dict[int, int] = {}
    by_thread: dict[int, list[tuple[int, int, dict[str, Any]]]] = defaultdict(list)
    flows: dict[int, dict[str, dict[str, Any]]] = defaultdict(dict)
    shown = Shown()
    for event in events:
        phase = event["ph"]
        if phase == "M":
            arguments = event["args"]
            if event["name"] == "process_name":
                assert event["pid"] not in processes
                processes[event["pid"]] = int(arguments["name"].removeprefix("rank "))
            elif event["name"] == "thread_name":
                assert event["tid"] not in threads, "a thread of two names, or of two processes"
                threads[event["tid"]] = (processes[event["pid"]], arguments["name"])
            elif event["name"] == "thread_sort_index":
                places[event["tid"]] = arguments["sort_index"]
        elif phase == "X":
            begin = _ns(event["ts"])
            by_thread[event["tid"]].append((begin, begin + _ns(event["dur"]), event))
        elif phase in ("s", "f"):
            assert phase not in flows[event["id"]], "two arrows with one number"
            flows[event["id"]][phase] = event
        else:
            assert phase == "C"
            (value,) = event["args"].values()
            shown.counters[processes[event["pid"]], event["name"]].append((_ns(event["ts"]), value))
    assert len(set(threads.values())) == len(threads), "two threads of a process with one name"
    assert threads.keys() == places.keys() >= by_thread.keys()
    # What stands first in the text comes first of what begins at the same time.
    for thread, slices in by_thread.items():
        rank, name = threads[thread]
        open_slices: list[tuple[int, int]] = []
        for begin, end, event in sorted(slices, key=lambda each: each[0]):
            assert begin <= end
            while open_slices and open_slices[-1][1] <= begin and (begin, end) != open_slices[-1]:
                open_slices.pop()
            if event["name"] == "wait" and event["cat"] == "wait":
                assert open_slices and end <= open_slices[-1][1], "a wait outside of its slice"
                shown.waits[rank, _track(name), begin, end] += 1
            else:
                assert not open_slices or open_slices[-1][1] <= begin, "two slices of a lane overlap"
                shown.slices[rank, _track(name), begin, end] += 1
                open_slices.append((begin, end))
    for ends in flows.values():
        assert ends.keys() == {"s", "f"}
        first, last = (_slice_at(by_thread[ends[phase]["tid"]], ends[phase]) for phase in ("s", "f"))
        assert ends["f"]["bp"] == "e" and ends["s"]["ts"] <= ends["f"]["ts"]
        assert first[0] <= last[0] or ends["s"]["cat"] == "event"
        assert (ends["s"]["name"], ends["s"]["cat"]) == (ends["f"]["name"], ends["f"]["cat"])
        (pair,) = {tuple((*_named(threads[ends[phase]["tid"]]), *span) for phase, span in (("s", first), ("f", last)))}
        shown.flows[pair] += 1
    return shown


def _ns(microseconds: float) -> int:
    """As viewers do it: some cut off, some round."""
    product = microseconds * 1000
    assert int(product) == round(product)
    return int(product)


def _slice_at(slices: list[tuple[int, int, dict[str, Any]]], flow: dict[str, Any]) -> tuple[int, int]:
    at = _ns(flow["ts"])
    within = [(b, e) for b, e, x in slices if x["cat"] != "wait" and (b <= at < e or b == at == e)]
    # Of slices without length at one time any may be meant; otherwise there is one.
    long = [span for span in within if span[0] < span[1]]
    assert within and len(long) <= 1
    return (long or within)[0]


def _track(name: str) -> str:
    return name.split(" (")[0]


def _named(thread: tuple[int, str]) -> Where:
    return thread[0], _track(thread[1])


# -- Perfetto ----------------------------------------------------------------------------------------------------------


def from_perfetto(data: bytes) -> Shown:
    """Read and judge TrackEvent packets: described tracks, begins with their ends, arrows with both of their ends."""
    trace = protos.Trace.FromString(data)
    assert trace.packet[0].sequence_flags == protos.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
    assert {packet.trusted_packet_sequence_id for packet in trace.packet} == {1}
    tracks: dict[int, protos.TrackDescriptor] = {}
    ranks: dict[int, int] = {}
    open_slices: dict[int, list[tuple[int, protos.TrackEvent]]] = defaultdict(list)
    ended: dict[int, int] = {}
    departs: dict[int, Span] = {}
    arrives: dict[int, Span] = {}
    shown = Shown()
    for packet in trace.packet:
        if packet.HasField("track_descriptor"):
            track = packet.track_descriptor
            assert track.uuid and track.uuid not in tracks
            tracks[track.uuid] = track
            if track.HasField("process"):
                ranks[track.uuid] = track.process.pid - 1
                assert track.process.process_name == f"rank {track.process.pid - 1}"
            else:
                assert track.parent_uuid in ranks and track.HasField("sibling_order_rank")
            continue
        event, at = packet.track_event, packet.timestamp
        track = tracks[event.track_uuid]
        rank, name = ranks[track.parent_uuid], _track(track.name)
        if event.type == protos.TrackEvent.TYPE_COUNTER:
            assert track.HasField("counter")
            shown.counters[rank, name].append((at, event.counter_value))
        elif event.type == protos.TrackEvent.TYPE_SLICE_BEGIN:
            assert at >= ended.get(event.track_uuid, 0), "a slice begins before the one in front of it has ended"
            open_slices[event.track_uuid].append((at, event))
        else:
            assert event.type == protos.TrackEvent.TYPE_SLICE_END
            begin, started = open_slices[event.track_uuid].pop()
            assert begin <= at
            span = (rank, name, begin, at)
            if open_slices[event.track_uuid]:
                assert started.name == "wait" and len(open_slices[event.track_uuid]) == 1
                shown.waits[span] += 1
            else:
                ended[event.track_uuid] = at
                shown.slices[span] += 1
            for ids, ends in ((started.flow_ids, departs), (started.terminating_flow_ids, arrives)):
                for flow in ids:
                    assert flow not in ends
                    ends[flow] = span
    assert not any(open_slices.values())
    assert departs.keys() == arrives.keys()
    names = Counter((track.parent_uuid, track.name) for track in tracks.values())
    assert set(names.values()) <= {1}, "a viewer merges tracks of one name"
    shown.flows.update((departs[flow], arrives[flow]) for flow in departs)
    return shown
