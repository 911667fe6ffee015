"""Perfetto's packets, parsed back through the protos: tracks, slices, arrows and counters as the trace has them.

Perfetto's trace processor would be one more judge. The `perfetto` package downloads that program when it is first used
and does not hold it, so it is not asked here.
"""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings

from dbo_greenlet.errors import TraceFileError
from dbo_greenlet.trace import HeaderRecord, Record, SliceRecord, StepRecord
from dbo_greenlet.trace.export.model import ExportModel
from dbo_greenlet.trace.export.write import export_trace
from tests.trace.exported import expected, from_perfetto, protos
from tests.trace.random_traces import traces
from tests.trace.test_export_chrome import HEADER, STEP, write

write_perfetto = pytest.importorskip("dbo_greenlet.trace.export.perfetto").write_perfetto


def exported(path: Path) -> bytes:
    file = io.BytesIO()
    write_perfetto(ExportModel(path), file)
    return file.getvalue()


def test_tracks_are_children_of_their_rank_in_their_order(tmp_path: Path) -> None:
    trace = protos.Trace.FromString(exported(write(tmp_path / "t", HEADER, *STEP)))
    tracks = [p.track_descriptor for p in trace.packet if p.HasField("track_descriptor")]
    process, children = tracks[0], sorted(tracks[1:], key=lambda track: track.sibling_order_rank)
    assert process.process.pid == 1 and process.child_ordering == protos.TrackDescriptor.EXPLICIT
    assert list(process.process.process_labels) == ["dbo_greenlet 0.1.0", "torch 2.13.0"]
    assert {track.parent_uuid for track in children} == {process.uuid}
    assert [track.name for track in children] == [
        "steps",
        "microbatch 0",
        "microbatch 1",
        "dispatch in flight",
        "combine in flight",
        "compute stream",
        "comm stream",
        "transfers in flight",
        "runnable microbatches",
    ]
    assert [track.counter.unit_name for track in children[-2:]] == ["transfers", "microbatches"]


def test_a_slice_says_what_the_trace_says_about_it(tmp_path: Path) -> None:
    trace = protos.Trace.FromString(exported(write(tmp_path / "t", HEADER, *STEP)))
    step = next(p.track_event for p in trace.packet if p.track_event.name == "step 7")
    said = {}
    for each in step.debug_annotations:
        said[each.name] = getattr(each, each.WhichOneof("value"))
    assert said == {
        "step": 7,
        "run": "dbo",
        "tokens": 8,
        "padded": 8,
        "split": True,
        "reason": "split-decode",
        "requests": 0,
    }
    assert list(step.categories) == ["step"]


def test_arrows_hang_on_the_slices(tmp_path: Path) -> None:
    trace = protos.Trace.FromString(exported(write(tmp_path / "t", HEADER, *STEP)))
    events = [(p.timestamp, p.track_event) for p in trace.packet if p.HasField("track_event")]
    departs = {flow: (at, e.name) for at, e in events for flow in e.flow_ids}
    arrives = {flow: (at, e.name) for at, e in events for flow in e.terminating_flow_ids}
    assert sorted((departs[n], arrives[n]) for n in departs) == [
        ((10_000, "A3"), (20_000, "A3")),
        ((20_000, "A3"), (50_000, "out")),
        ((41_000, "M3"), (50_000, "out")),
    ]


@settings(
    max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
@given(records=traces())
def test_everything_arrives_once(tmp_path: Path, records: list[Record]) -> None:
    path = write(tmp_path / "t", *records)
    assume(any(not isinstance(record, HeaderRecord) for record in records))
    assert from_perfetto(exported(path)) == expected(path)


def test_a_file_is_packets_one_after_the_other(tmp_path: Path) -> None:
    """So a file that was cut off can be read up to its last whole packet, and two can be written into one."""
    one = exported(write(tmp_path / "t", HEADER, *STEP))
    assert len(protos.Trace.FromString(one + one).packet) == 2 * len(protos.Trace.FromString(one).packet)


def test_text_that_no_protobuf_holds(tmp_path: Path) -> None:
    path = tmp_path / "t"
    write(path, HEADER, StepRecord(0, 0, "\ud800x", 2**70, 8, True, "", begin=0.0, end=1.0))
    path.write_bytes(
        path.read_bytes() + b'{"t":"slice","step":0,"rank":0,"run":"\\ud800x","ubatch":0,"slice":0,'
        b'"site":"a\\udfffb","begin":0.0,"end":1.0}\n'
    )
    trace = protos.Trace.FromString(exported(path))
    names = [p.track_event.name for p in trace.packet if p.track_event.name]
    assert names == ["step 0", "a?b"]
    tokens = {e.name: e for p in trace.packet for e in p.track_event.debug_annotations}["tokens"]
    assert tokens.string_value == str(2**70)


def test_a_time_before_zero_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path, out = write(tmp_path / "t", HEADER, SliceRecord(0, 0, "dbo", 0, 0, "", -2.0, 1.0)), tmp_path / "out"
    with pytest.raises(TraceFileError) as refused:
        export_trace(ExportModel(path), out, write_perfetto)
    assert str(refused.value) == (
        f"{path}: a time of -2.0 us, before the trace's zero, cannot be said in Perfetto's format; --format chrome can"
    )
    assert [each.name for each in tmp_path.iterdir()] == ["t"]
