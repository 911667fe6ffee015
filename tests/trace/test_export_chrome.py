"""Chrome's JSON: what nests, what is named, and that everything in the trace is in it once."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from dbo_greenlet.errors import TraceFileError
from dbo_greenlet.trace import (
    GpuRecord,
    HeaderRecord,
    OpRecord,
    Record,
    RecvRecord,
    SliceRecord,
    StepRecord,
    TraceWriter,
    quick_records,
)
from dbo_greenlet.trace.export.chrome import microseconds, write_chrome
from dbo_greenlet.trace.export.model import ExportModel
from tests.trace.exported import expected, from_chrome
from tests.trace.random_traces import traces

HEADER = HeaderRecord("0.1.0", 0, 1, torch="2.13.0")
DISPATCH, COMBINE = "layer3.dispatch", "layer3.combine"
STEP = [
    StepRecord(7, 0, "dbo", 8, 8, True, "split-decode", slices=[[0, 4, 0, 1], [4, 8, 1, 2]], begin=5.0, end=90.0),
    SliceRecord(7, 0, "dbo", 0, 0, DISPATCH, 10.0, 20.0),
    SliceRecord(7, 0, "dbo", 1, 0, DISPATCH, 20.0, 40.0),
    SliceRecord(7, 0, "dbo", 0, 1, COMBINE, 41.0, 50.0),
    SliceRecord(7, 0, "dbo", 1, 1, "", 50.0, 60.0),
    SliceRecord(7, 0, "dbo", 0, 2, "", 60.0, 70.0),
    RecvRecord(7, 0, "dbo", 0, DISPATCH, 18.0, 1, 30.0, 1, 0),
    # The hub ran it for its owner, before the owner's slice.
    RecvRecord(7, 0, "dbo", 1, DISPATCH, 39.5, None, 49.9, 3, 1),
    RecvRecord(7, 0, "dbo", 0, COMBINE, 49.0, 1, 55.0, 3, 2),
    GpuRecord(7, 0, "dbo", 0, 0, DISPATCH, "compute", 30.0, 60.0),
    GpuRecord(7, 0, "dbo", 0, 1, COMBINE, "comm", 55.0, 80.0, 5.0, DISPATCH, 6.0),
]


def write(path: Path, *records: Record) -> Path:
    with TraceWriter(path) as writer:
        writer.write(*records)
    assert writer.problem is None
    return path


def exported(path: Path, **asked: Any) -> bytes:
    file = io.BytesIO()
    write_chrome(ExportModel(path, **asked), file)
    return file.getvalue()


def events(data: bytes, phase: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(data)["traceEvents"] if event["ph"] == phase]


def test_a_step_on_named_threads_in_their_order(tmp_path: Path) -> None:
    data = exported(write(tmp_path / "t", HEADER, *STEP))
    named = {(e["name"], e["tid"]): e["args"] for e in events(data, "M")}
    assert named["process_name", 0] == {"name": "rank 0"}
    assert named["process_labels", 0] == {"labels": "dbo_greenlet 0.1.0, torch 2.13.0"}
    threads = {tid: args["name"] for (what, tid), args in named.items() if what == "thread_name"}
    order = sorted(threads, key=lambda tid: named["thread_sort_index", tid]["sort_index"])
    assert [threads[tid] for tid in order] == [
        "steps",
        "microbatch 0",
        "microbatch 1",
        "dispatch in flight",
        "combine in flight",
        "compute stream",
        "comm stream",
    ]
    drawn = [(threads[e["tid"]], e["name"], e["ts"], e["dur"]) for e in events(data, "X")]
    assert drawn == [
        ("steps", "step 7", 5.0, 85.0),
        ("microbatch 0", "A3", 10.0, 10.0),
        ("microbatch 0", "M3", 41.0, 9.0),
        ("microbatch 0", "out", 60.0, 10.0),
        ("microbatch 1", "A3", 20.0, 20.0),
        ("microbatch 1", "out", 50.0, 10.0),
        ("dispatch in flight", "D3, microbatch 0", 18.0, 12.0),
        ("dispatch in flight", "D3, microbatch 1", 39.5, 10.4),
        ("combine in flight", "C3, microbatch 0", 49.0, 6.0),
        ("compute stream", "A3, microbatch 0", 30.0, 30.0),
        ("comm stream", "D3, microbatch 0", 55.0, 25.0),
        ("comm stream", "wait", 55.0, 5.0),
    ]
    assert events(data, "X")[1]["args"] == {"step": 7, "run": "dbo", "microbatch": 0, "slice": 0, "site": DISPATCH}
    assert events(data, "X")[7]["args"]["received by"] == "its owner"


def test_arrows_go_from_the_send_to_the_slice_in_which_its_receive_ran(tmp_path: Path) -> None:
    data = exported(write(tmp_path / "t", HEADER, *STEP))
    starts = {e["id"]: e for e in events(data, "s")}
    ends = {e["id"]: e for e in events(data, "f")}
    assert starts.keys() == ends.keys() and len(starts) == 3
    assert sorted((starts[n]["name"], starts[n]["ts"], ends[n]["ts"]) for n in starts) == [
        ("C3, microbatch 0", 49.0, 55.0),
        ("D3, microbatch 0", 18.0, 30.0),
        # Complete at 49.9: before the slice, so the arrow ends where that begins.
        ("D3, microbatch 1", 39.5, 50.0),
    ]


def test_arrows_between_streams_are_the_waits_that_were_recorded(tmp_path: Path) -> None:
    where = {"step": 7, "rank": 0, "run": "dbo"}
    ops = [
        OpRecord(**where, number=0, op="record", ubatch=0, slice=0, stream="compute", name="dispatch ready"),
        OpRecord(**where, number=1, op="wait", ubatch=0, slice=1, stream="comm", of=0, name="dispatch ready"),
        OpRecord(**where, number=2, op="wait", ubatch=0, slice=1, stream="comm", of=0),
        # Of an event that is not in the trace, by the stream that recorded it, and outside of what was timed.
        OpRecord(**where, number=3, op="wait", ubatch=0, slice=1, stream="comm", of=None),
        OpRecord(**where, number=4, op="wait", ubatch=0, slice=0, stream="compute", of=0),
        OpRecord(**where, number=5, op="wait", ubatch=1, slice=1, stream="comm", of=0),
    ]
    data = exported(write(tmp_path / "t", HEADER, *STEP, *ops))
    (start,) = [e for e in events(data, "s") if e["cat"] == "event"]
    (end,) = [e for e in events(data, "f") if e["id"] == start["id"]]
    threads = {e["tid"]: e["args"]["name"] for e in events(data, "M") if e["name"] == "thread_name"}
    # Recorded in a slice from 30 to 60, waited for until 60, from 55 on.
    assert (threads[start["tid"]], start["ts"], start["name"]) == ("compute stream", 59.999, "dispatch ready")
    assert (threads[end["tid"]], end["ts"]) == ("comm stream", 60.0)


def test_bytes_in_flight(tmp_path: Path) -> None:
    windows = [
        RecvRecord(0, 0, "dbo", index, DISPATCH, sent, 0, at, bytes=size)
        for index, sent, at, size in [(0, 0, 10, 100), (1, 4, 12, 1000), (0, 20, 22, None)]
    ]
    data = exported(write(tmp_path / "t", HEADER, *windows))
    counted = [(e["ts"], e["args"]) for e in events(data, "C") if e["name"] == "bytes in flight"]
    assert counted == [(at, {"bytes": value}) for at, value in [(0.0, 100), (4.0, 1100), (10.0, 1000), (12.0, 0)]]
    assert [e["args"].get("bytes") for e in events(data, "X")] == [100, 1000, None]


def test_details_are_what_was_recorded(tmp_path: Path) -> None:
    step = StepRecord(0, 0, "dbo", 8, 8, True, "r", [[1, 8]], begin=0.0, end=9.0, policy="pct:7,depth=2", seed=7)
    ran = SliceRecord(0, 0, "dbo", 0, 0, DISPATCH, 1.0, 2.0, stream="compute", layer=3)
    data = exported(write(tmp_path / "t", HEADER, step, ran))
    of_step, of_slice = (e["args"] for e in events(data, "X"))
    assert (of_step["policy"], of_step["seed"], of_step["votes"]) == ("pct:7,depth=2", 7, "[[1, 8]]")
    assert (of_slice["stream"], of_slice["layer"]) == ("compute", 3)


def test_without_msgspec_the_same_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "t", HEADER, *STEP)
    quick = exported(path)
    monkeypatch.setitem(sys.modules, "msgspec", None)
    quick_records.decoder.cache_clear()
    try:
        assert json.loads(exported(path)) == json.loads(quick)
    finally:
        quick_records.decoder.cache_clear()


def test_counters(tmp_path: Path) -> None:
    data = exported(write(tmp_path / "t", HEADER, *STEP))
    transfers = [(e["ts"], e["args"]) for e in events(data, "C") if e["name"] == "transfers in flight"]
    assert transfers == [
        (at, {"transfers": value}) for at, value in [(18.0, 1), (30.0, 0), (39.5, 1), (49.0, 2), (49.9, 1), (55.0, 0)]
    ]
    runnable = [(e["ts"], e["args"]) for e in events(data, "C") if e["name"] == "runnable microbatches"]
    # Who is level with the first may not overtake it; once the first is ahead, both may go.
    assert runnable == [
        (at, {"microbatches": value})
        for at, value in [(10.0, 1), (20.0, 2), (41.0, 1), (50.0, 2), (60.0, 1), (70.0, 0)]
    ]


def test_a_receive_that_never_was_complete_lasts_as_long_as_the_step_and_has_no_arrow(tmp_path: Path) -> None:
    slices = [
        SliceRecord(0, 0, "dbo", 0, 0, DISPATCH, 0.0, 10.0),
        SliceRecord(0, 0, "dbo", 1, 0, DISPATCH, 10.0, 15.0, failed=True),
    ]
    window = RecvRecord(0, 0, "dbo", 0, DISPATCH, 5.0, sent_decision=0)
    data = exported(write(tmp_path / "t", HEADER, *slices, window))
    flight = events(data, "X")[-1]
    assert (flight["ts"], flight["dur"], flight["args"]["complete"]) == (5.0, 10.0, False)
    assert not events(data, "s") and not events(data, "f")
    assert events(data, "X")[1]["name"] == "failed" and events(data, "X")[1]["args"]["failed"] is True


def test_what_would_overlap_gets_a_lane_of_its_own(tmp_path: Path) -> None:
    windows = [
        RecvRecord(0, 0, "dbo", index, DISPATCH, sent, 0, at)
        for index, sent, at in [(0, 0, 10), (1, 4, 12), (2, 10, 20)]
    ]
    data = exported(write(tmp_path / "t", HEADER, *windows))
    names = {e["tid"]: e["args"]["name"] for e in events(data, "M") if e["name"] == "thread_name"}
    assert [(names[e["tid"]], e["ts"]) for e in events(data, "X")] == [
        ("dispatch in flight", 0.0),
        ("dispatch in flight (2)", 4.0),
        ("dispatch in flight", 10.0),
    ]


def test_ranks_are_processes_on_one_axis(tmp_path: Path) -> None:
    late = HeaderRecord("0.1.0", 1, 2, origin_ns=1_000_500)
    early = HeaderRecord("0.1.0", 0, 2, origin_ns=1_000_000)
    slices = [SliceRecord(0, rank, "dbo", 0, 0, "", 3.0, 4.0) for rank in (1, 0)]
    path = write(tmp_path / "t", late, early, *slices)
    assert {(e["pid"], e["ts"]) for e in events(exported(path), "X")} == {(1, 3.0), (2, 3.5)}
    # Alone, a rank keeps its own times.
    assert {(e["pid"], e["ts"]) for e in events(exported(path, rank=1), "X")} == {(2, 3.0)}


def test_runs_and_steps_can_be_chosen(tmp_path: Path) -> None:
    slices = [SliceRecord(n, 0, run, 0, 0, "", 0.0, 1.0) for run in ("dbo", "thread") for n in range(4)]
    path = write(tmp_path / "t", HEADER, *slices)
    chosen = events(exported(path, run="thread", steps=range(1, 3)), "X")
    assert [(e["args"]["run"], e["args"]["step"]) for e in chosen] == [("thread", 1), ("thread", 2)]
    with pytest.raises(TraceFileError, match="nothing to export: none of its 8 steps is asked for"):
        exported(path, run="unsplit")


@settings(
    max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
@given(records=traces())
def test_everything_arrives_once_and_nests(tmp_path: Path, records: list[Record]) -> None:
    path = write(tmp_path / "t", *records)
    assume(any(not isinstance(record, HeaderRecord) for record in records))
    shown, wanted = from_chrome(exported(path)), expected(path)
    assert shown == wanted


@given(st.integers(-(2**50), 2**50) | st.integers(-(10**7), 10**7))
def test_a_time_survives_cutting_off_and_rounding(nanoseconds: int) -> None:
    product = json.loads(json.dumps(microseconds(nanoseconds))) * 1000.0
    assert int(product) == nanoseconds
    assert round(product) == nanoseconds


def test_some_times_would_not_survive_as_they_are() -> None:
    assert any(int(n / 1000 * 1000.0) != n for n in range(100_000)), "then `microseconds` has nothing to do"


@pytest.mark.parametrize(
    ("records", "sentence"),
    [
        ([], "nothing to export: it has no steps yet"),
        ([SliceRecord(0, 0, "dbo", 0, 0, "", 5.0, 4.0)], "slice 0 of microbatch 0 of step 0, run dbo, rank 0 ends at"),
        ([StepRecord(0, 0, "dbo", 1, 1, False, "", begin=2.0, end=1.0)], "the record of step 0, run dbo, rank 0 ends"),
        ([GpuRecord(0, 0, "dbo", 0, 2, "", "comm", 5.0, 4.0)], "slice 2 of microbatch 0 on the comm stream of step 0"),
        ([RecvRecord(0, 0, "dbo", 1, DISPATCH, 9.0, 0, 8.0)], "what microbatch 1 sent before layer3.dispatch"),
        ([SliceRecord(0, 0, "dbo", 0, 0, "", 5.0, 1e20)], "the time 1e+20 us, 1157407407 days from the rank's"),
        ([SliceRecord(0, 0, "dbo", 10**12, 0, "", 5.0, 6.0)], "names microbatch 1000000000000, expected 0 to 35"),
        ([SliceRecord(0, -1, "dbo", 0, 0, "", 5.0, 6.0)], "is of rank -1, expected 0 to"),
        ([StepRecord(n, 0, "dbo", 1, 1, False, "") for n in (1, 0)], "step 0 of run dbo, rank 0 behind its step 1"),
        ([HEADER], "line 2: a second header of rank 0; are these two traces in one file?"),
    ],
)
def test_what_no_run_writes_is_refused_with_the_place(tmp_path: Path, records: list[Record], sentence: str) -> None:
    path = write(tmp_path / "t", HEADER, *records)
    with pytest.raises(TraceFileError) as refused:
        exported(path)
    assert str(refused.value).startswith(str(path)) and sentence in str(refused.value)


def test_clocks_that_have_nothing_in_common_are_refused_with_the_way_out(tmp_path: Path) -> None:
    headers = [HeaderRecord("0.1.0", rank, 2, origin_ns=origin) for rank, origin in ((0, 1), (1, 10**18))]
    path = write(tmp_path / "t", *headers, *(SliceRecord(0, r, "dbo", 0, 0, "", 5.0, 6.0) for r in (0, 1)))
    with pytest.raises(TraceFileError, match="the clock of rank 1 is 11574 days from that of another rank: .* --rank"):
        exported(path)
    assert exported(path, rank=1)
