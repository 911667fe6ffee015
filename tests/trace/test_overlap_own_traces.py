"""Overlap of our own traces: windows, compute by slices and by the GPU, and files that cannot be read."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from dbo_greenlet.errors import TraceFileError
from dbo_greenlet.trace import GpuRecord, RecvRecord, SliceRecord, StepRecord, step_columns
from dbo_greenlet.trace.overlap.report import OverlapReport, Row
from dbo_greenlet.trace.overlap.text import is_reliable
from dbo_greenlet.trace.step_columns import read_columns
from tests.trace.overlap_reports import hooks, own, row, write


def test_windows_over_the_hosts_slices(tmp_path: Path) -> None:
    found = own(write(tmp_path, *hooks()))
    assert found.kernels is None and found.in_flight is not None and found.idle is None
    whole = found.in_flight.measure
    # In flight from 8 to 45 in all; no slice from 20 to 22 and from 30 to 40.
    assert (whole.communication, whole.compute, whole.both, whole.exposed, whole.window) == (37, 38, 25, 12, 50)
    assert found.in_flight.by_microbatch == [Row(0, 20, 2, 18, 10, 1), Row(1, 27, 12, 20, 15, 1)]
    assert found.in_flight.by_layer == [Row(2, 37, 12, 20, 12, 2)]
    assert row(found.in_flight.by_stage, "dispatch") == Row("dispatch", 37, 12, 0, 0, 2)
    assert row(found.in_flight.by_stage, "attention").compute == 20
    assert [entry.view for entry in found.unreliable] == ["in_flight"] and not is_reliable(found)


def test_windows_on_the_gpus_axis(tmp_path: Path) -> None:
    found = own(write(tmp_path, *hooks(gpu=True)))
    assert found.in_flight is not None and found.kernels is not None and found.idle is not None
    # Compute from 5 to 25, 29 to 35, 46 to 60. Sent at 15 and 25, where the sending slices end on the GPU; received by
    # their owners at 29 and 46, where the slices begin that receive.
    whole = found.in_flight.measure
    assert (whole.communication, whole.compute, whole.both, whole.window) == (31, 40, 10 + 6, 55)
    assert [entry.view for entry in found.unreliable] == ["kernels", "kernels", "idle", "in_flight"]
    assert "nothing ran on the communication stream" in found.unreliable[0].why
    # 25 to 29 waited for; 35 to 46: the slice began on the host at 40, and then it took 6 to arrive.
    assert (found.idle.host, found.idle.event, found.idle.other) == (5, 4, 6)
    assert any("within 3 us" in note for note in found.notes)


def test_a_siblings_receive_ends_with_its_slice(tmp_path: Path) -> None:
    sent = "layer2.dispatch"
    file = write(
        tmp_path,
        SliceRecord(0, 0, "dbo", 0, 0, sent, 0, 1),
        SliceRecord(0, 0, "dbo", 1, 0, sent, 1, 2),
        RecvRecord(0, 0, "dbo", 0, sent, 0.9, 1, 1.9, decision=1, sent_decision=0),
        RecvRecord(0, 0, "dbo", 1, sent, 1.9, 0, 2.9, decision=7, sent_decision=1),  # ran in no slice of the trace
        GpuRecord(0, 0, "dbo", 0, 0, sent, "compute", 100, 120),
        GpuRecord(0, 0, "dbo", 1, 0, sent, "compute", 130, 170),
    )
    found = own(file)
    assert found.in_flight is not None and found.kernels is not None
    whole = found.in_flight.measure
    assert (whole.communication, whole.both, whole.events) == (50, 40, 1)
    # Both slices were launched before the GPU came to them, so nothing in them waited for the host.
    assert [entry.view for entry in found.unreliable] == ["kernels", "in_flight"]


def test_compute_that_the_host_was_still_launching(tmp_path: Path) -> None:
    def step(host_end: float) -> OverlapReport:
        return own(
            write(
                tmp_path,
                SliceRecord(0, 0, "dbo", 0, 0, "layer0.before_dispatch", 0, host_end),
                GpuRecord(0, 0, "dbo", 0, 0, "layer0.before_dispatch", "compute", 10, 110),
                GpuRecord(0, 0, "dbo", 0, 1, "", "comm", 60, 160, after="layer0.before_dispatch"),
            )
        )

    late = step(60)
    assert [entry.view for entry in late.unreliable] == ["kernels", "idle"] and not is_reliable(late)
    assert "0.050 ms of compute (50 %) are of slices that the host was still launching" in late.unreliable[0].why
    quick = step(13)
    assert quick.unreliable == [] and is_reliable(quick)
    assert any("0.003 ms of compute (3 %)" in note for note in quick.notes)
    assert not any("still launching" in note for note in step(10).notes)


def test_steps_whose_gpu_was_not_timed_are_left_out(tmp_path: Path) -> None:
    timed = own(write(tmp_path, *hooks(0, gpu=True)))
    both = own(write(tmp_path, *hooks(0, gpu=True), *hooks(1)))
    assert both.in_flight == timed.in_flight and both.kernels == timed.kernels and both.idle == timed.idle
    assert "Windows of 1 steps are left out, because the GPU's times of these were not taken." in both.notes


def test_high_throughput_by_streams(tmp_path: Path) -> None:
    def gpu(ubatch: int, number: int, site: str, *rest: Any) -> GpuRecord:
        stream, begin, end, after, waited = (*rest, "", 0.0)[:5] if len(rest) < 4 else (*rest, 0.0)[:5]
        return GpuRecord(4, 1, "dbo-graph", ubatch, number, site, stream, begin, end, waited, after)

    file = write(
        tmp_path,
        StepRecord(4, 1, "dbo-graph", 8, 8, True, "split", execution="replayed"),
        gpu(0, 0, "layer0.before_dispatch", "compute", 0, 10),
        gpu(0, 1, "layer0.before_combine", "comm", 10, 30, "layer0.before_dispatch"),
        gpu(1, 0, "layer0.before_dispatch", "compute", 10, 20),
        gpu(0, 1, "layer0.before_combine", "compute", 20, 50, "layer0.before_dispatch", 10),
        gpu(0, 2, "layer0.combine", "comm", 50, 70, "layer0.before_combine"),
        gpu(0, 2, "layer0.combine", "compute", 55, 60, "layer0.before_combine"),
    )
    found = own(file)
    assert found.kernels is not None and found.in_flight is None and found.unreliable == []
    whole = found.kernels.measure
    assert (whole.communication, whole.compute, whole.both, whole.window) == (40, 45, 15, 70)
    stages = {each.key: (each.communication, each.exposed, each.compute) for each in found.kernels.by_stage}
    assert stages == {
        "attention": (0, 0, 20),
        "dispatch": (20, 10, 0),
        "experts": (0, 0, 20),
        "combine": (20, 15, 0),
        "shared": (0, 0, 5),
    }
    # A replay has no slices on the host, so nothing there is late: 20 to 30 waited for, 50 to 55 and 60 to 70 other.
    assert found.idle is not None
    assert (found.idle.host, found.idle.event, found.idle.other, found.idle.unknown) == (0, 10, 15, 0)


def test_steps_ranks_and_runs(tmp_path: Path) -> None:
    unsplit = [
        StepRecord(0, 0, "unsplit", 8, 8, False, "reference"),
        SliceRecord(0, 0, "unsplit", 0, 0, "", 0.0, 100.0),
    ]
    # Steps at the same times on two ranks, and a second step: each on a time line of its own.
    records = [*unsplit, *hooks(0), *hooks(0, rank=1), *hooks(1, shift=0.5)]
    file = write(tmp_path, *records)
    found = own(file)
    assert found.in_flight is not None
    assert (found.in_flight.measure.communication, found.in_flight.measure.both) == (3 * 37, 3 * 25)
    assert [(each.key, each.events) for each in found.in_flight.by_rank] == [(0, 4), (1, 2)]
    assert found.notes[0] == "Run dbo, 3 steps. Others in the file: unsplit."
    one = own(file, rank=1)
    assert one.in_flight is not None and one.in_flight.measure.events == 2
    with pytest.raises(TraceFileError, match="no communication in run unsplit"):
        own(file, run="unsplit")
    with pytest.raises(TraceFileError) as error:
        own(file, run="other", rank=3)
    assert str(error.value) == (
        f"{file} has no steps of run other on rank 3; it holds the runs unsplit, dbo of the ranks 0, 1"
    )


def test_open_receives_and_a_torn_line(tmp_path: Path) -> None:
    file = write(tmp_path, *hooks(), RecvRecord(0, 0, "dbo", 1, "layer2.combine", 49.0))
    with open(file, "ab") as growing:
        growing.write(b'{"t":"slice","step":9')
    notes = own(file).notes
    assert "1 receives never were complete and are left out." in notes
    assert notes[-1].startswith("The last line is torn")


def test_unknown_kinds_and_keys_are_passed_over(tmp_path: Path) -> None:
    file = write(tmp_path, *hooks())
    plain = own(file)
    with open(file, "ab") as growing:
        growing.write(b'{"t":"weather","sky":"blue"}\n')
    assert own(file) == plain
    file.write_text(file.read_text().replace('"t":"slice"', '"t":"slice","colour":"red"'))
    assert own(file) == plain


def test_small_blocks_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, *hooks(gpu=True), *hooks(1))
    expected = own(file)
    monkeypatch.setattr(step_columns, "BLOCK_BYTES", 100)
    assert own(file) == expected


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"t":"slice","step":"one"}', 'line 9: "step" of a slice record is "one", expected int'),
        ("{nothing}", "line 9: not JSON"),
    ],
)
def test_a_wrong_record_is_named_by_the_strict_reader(tmp_path: Path, line: str, sentence: str) -> None:
    file = write(tmp_path, *hooks())
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(TraceFileError) as error:
        own(file)
    assert sentence in str(error.value) and str(error.value).startswith(str(file))


def test_a_compressed_trace(tmp_path: Path) -> None:
    file = write(tmp_path, *hooks())
    plain = own(file)
    packed = gzip.compress(file.read_bytes())
    file.write_bytes(packed)
    assert own(file) == plain
    file.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(TraceFileError, match="the gzip data ends in the middle; the copy is not whole"):
        own(file)


def test_a_trace_of_the_first_schema() -> None:
    columns = read_columns(Path(__file__).parent / "data" / "trace_of_the_first_schema.jsonl")
    assert (len(columns.groups), len(columns.slices), len(columns.receives), len(columns.gpu)) == (12, 72, 64, 0)


def test_a_trace_without_steps_and_one_of_a_newer_schema(tmp_path: Path) -> None:
    file = write(tmp_path)
    with pytest.raises(TraceFileError, match="the trace has no steps"):
        own(file)
    file.write_text('{"t":"header","schema":2,"package":"9","rank":0,"world":1}\n')
    with pytest.raises(TraceFileError, match="schema 2, this version of dbo_greenlet reads up to 1"):
        own(file)
