"""The paths of our own traces: by hand, what is left open and said so, and what has no path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy", reason="numpy is not installed")
pytest.importorskip("msgspec", reason="msgspec is not installed")
from dbo_greenlet.errors import TraceFileError
from dbo_greenlet.policy import RoundRobin
from dbo_greenlet.testing.layer_programs import Costs
from dbo_greenlet.trace import GpuRecord, HeaderRecord, Record, RecvRecord, SliceRecord, StepRecord, TraceWriter
from dbo_greenlet.trace.critical_path.report import COMMUNICATION, StepPath
from dbo_greenlet.trace.critical_path.steps import graph_of_step
from dbo_greenlet.trace.critical_path.trace import trace_path
from dbo_greenlet.trace.reader import StepTrace
from dbo_greenlet.trace.schema import OpRecord
from tests.trace.virtual_steps import VirtualStep

D, C = "layer3.dispatch", "layer3.combine"
KEY: Any = {"step": 4, "rank": 0, "run": "dbo"}
ON_CPU = {"device": "cpu"}


def step_record(**more: Any) -> StepRecord:
    defaults: dict[str, Any] = {"begin": 100.0, "end": 300.0, "slices": [[0, 4, 0, 1], [4, 8, 1, 2]]}
    return StepRecord(tokens=8, padded=8, split=True, reason="", **(KEY | defaults | more))


# Two microbatches of one layer on the host: 0 sends at 130, and 1 has received that at 165.
HOST = [
    SliceRecord(**KEY, ubatch=0, slice=0, site=D, begin=110.0, end=132.0),
    SliceRecord(**KEY, ubatch=1, slice=0, site=D, begin=135.0, end=170.0),
    SliceRecord(**KEY, ubatch=0, slice=1, site="", begin=172.0, end=220.0),
    SliceRecord(**KEY, ubatch=1, slice=1, site="", begin=221.0, end=290.0),
]
RECEIVE = RecvRecord(**KEY, ubatch=0, site=D, sent=130.0, by=1, at=165.0, decision=1, sent_decision=0)


def written(path: Path, *records: Record, settings: dict[str, Any] | None = None, rank: int = 0) -> Path:
    with TraceWriter(path) as writer:
        writer.write(HeaderRecord("0.1", rank, 1, torch="2.13.0", settings=ON_CPU if settings is None else settings))
        writer.write(*records)
    return path


def stages(path: StepPath) -> dict[str, tuple[float, float]]:
    return {row.stage: (row.on_path, row.uncertain) for row in path.stages}


def gains(path: StepPath, stage: str) -> list[tuple[float, float]]:
    (row,) = (row for row in path.stages if row.stage == stage)
    return [(gain.least, gain.most) for gain in row.gains]


def test_a_step_on_the_cpu_by_hand(tmp_path: Path) -> None:
    """Waiting and computing before the receive was complete cannot be told apart: 30 us, or a flight of 35."""
    report = trace_path(written(tmp_path / "t", step_record(), *HOST, RECEIVE), percent=(50, 100))
    (path,) = report.steps
    assert path.length == 200 and (path.run, path.step, path.rank) == ("dbo", 4, 0)
    assert stages(path) == {
        "attention": (22 + 35, 30),
        "dispatch": (0, 0),
        "other": (48 + 69, 0),
        "host": (10 + 3 + 2 + 1 + 10, 0),
    }
    # Without its own 30 us the slice would have had to wait for the 35 of the flight, if that was what it did.
    assert gains(path, "attention") == [(20 / 2 + 5 / 2, 22 / 2 + 35 / 2), (20 + 5, 22 + 35)]
    assert gains(path, "dispatch") == [(0, 35 / 2), (0, 30)]
    assert gains(path, "other") == [(58.5, 58.5), (117, 117)]
    assert [(p.begin, p.length, p.stage, p.lane, p.kind, p.uncertain) for p in report.shown.pieces] == [
        (100, 10, "host", "host", "host", False),
        (110, 20, "attention", "host 0", "work", False),
        (130, 2, "attention", "host 0", "work", False),
        (132, 3, "host", "host", "hand-over", False),
        (135, 30, "attention", "host 1", "work", True),
        (165, 5, "attention", "host 1", "work", False),
        (170, 2, "host", "host", "hand-over", False),
        (172, 48, "other", "host 0", "work", False),
        (220, 1, "host", "host", "hand-over", False),
        (221, 69, "other", "host 1", "work", False),
        (290, 10, "host", "host", "host", False),
    ]
    assert report.shown.pieces[4].instead == ("D3 of microbatch 0",)
    assert path.links == {"host": 2, "hand-over": 3}
    assert "Receives on the host: 1." in report.notes[0] and report.unreliable == []
    assert report.lanes["in flight"] == [(130, 165)]


def test_where_the_receive_was_recorded_the_host_s_wait_is_known(tmp_path: Path) -> None:
    """Called at 150 and complete at 165: the 15 us before it are the slice's, these 15 the flight's or its own."""
    called = OpRecord(**KEY, number=0, op="receive", ubatch=1, slice=0, owner=0, at=150.0, stream="compute")
    report = trace_path(written(tmp_path / "t", step_record(), *HOST, RECEIVE, called), percent=(100,))
    (path,) = report.steps
    assert stages(path)["dispatch"] == (35, 35)
    assert stages(path)["attention"] == (20 + 5, 0)
    assert gains(path, "dispatch") == [(0, 15)]


def test_the_vote_is_a_piece_of_its_own(tmp_path: Path) -> None:
    record = step_record(vote_begin=102.0, vote_end=107.5)
    path = trace_path(written(tmp_path / "t", record, *HOST)).steps[0]
    assert stages(path)["vote"] == (5.5, 0) and stages(path)["host"] == (10 - 5.5 + 6 + 10, 0)
    # That of the step behind it, which a server takes while this one still runs, is none of this one's.
    later = replace(record, vote_begin=280.0, vote_end=285.0)
    assert "vote" not in stages(trace_path(written(tmp_path / "u", later, *HOST)).steps[0])


def test_launches_without_times_of_the_gpu_are_the_host_s_path(tmp_path: Path) -> None:
    report = trace_path(written(tmp_path / "t", step_record(), *HOST, RECEIVE, settings={"device": "cuda"}))
    assert stages(report.total) == {"host": (200, 0)}
    assert report.notes == [
        "Steps without times of the GPU, in which the host only launches: 1. This is the host's path, and what the GPU "
        "did meanwhile is not known."
    ]


def gpu(
    ubatch: int, number: int, after: str, site: str, stream: str, begin: float, end: float, waited: float = 0
) -> Any:
    return GpuRecord(**KEY, ubatch=ubatch, slice=number, site=site, stream=stream, begin=begin, end=end, waited=waited,
                     after=after)  # fmt: skip


BD, BC = "layer3.before_dispatch", "layer3.before_combine"
# A replay: 100 us of attention each; D of microbatch 0 flies beside attention 1 and for 50 us longer.
REPLAYED = [
    gpu(0, 0, "", BD, "compute", 1000, 1100),
    gpu(1, 0, "", BD, "compute", 1100, 1200),
    gpu(0, 1, BD, BC, "comm", 1000, 1250, 100),
    gpu(0, 1, BD, BC, "compute", 1200, 1310, 50),
    gpu(1, 1, BD, BC, "comm", 1250, 1300, 0),
    gpu(1, 1, BD, BC, "compute", 1310, 1370, 0),
]


def test_a_replayed_step_of_high_throughput_by_hand(tmp_path: Path) -> None:
    record = step_record(execution="replayed", begin=990.0, end=1400.0)
    report = trace_path(written(tmp_path / "t", record, *REPLAYED), percent=(10, 100))
    (path,) = report.steps
    assert stages(path) == {
        "attention": (100, 0),
        "dispatch": (150, 0),
        "experts": (60 + 60, 0),
        "host": (10 + 30, 0),
    }
    assert [(p.stage, p.length, p.lane, p.by) for p in report.shown.pieces] == [
        ("host", 10, "host", ()),
        ("attention", 100, "compute 0", ()),
        ("dispatch", 150, "comm 0", ("event",)),
        ("experts", 60, "compute 0", ("event",)),
        ("experts", 60, "compute 1", ("stream order",)),
        ("host", 30, "host", ()),
    ]
    # Of the 150 us of the dispatch attention 1 hides 100; and without attention both are gone.
    assert gains(path, "dispatch") == [(15, 15), (50, 50)]
    assert gains(path, "attention") == [(10, 10), (100, 100)]
    assert COMMUNICATION not in stages(path)
    assert any(note.startswith("Steps that were replayed from their graphs: 1.") for note in report.notes)


def test_a_replay_of_receives_says_that_they_cannot_be_told_from_work(tmp_path: Path) -> None:
    """Microbatch 1's attention has the receive of D_0 in it: 40 us where the other one takes 10."""
    stretches = [
        gpu(0, 0, "", D, "compute", 0, 10),
        gpu(1, 0, "", D, "compute", 10, 50),
        gpu(0, 1, D, C, "compute", 50, 60),
        gpu(1, 1, D, C, "compute", 60, 72),
        gpu(0, 2, C, "", "compute", 72, 74),
        gpu(1, 2, C, "", "compute", 74, 76),
    ]
    record = step_record(execution="replayed", begin=0.0, end=76.0)
    report = trace_path(written(tmp_path / "t", record, *stretches), percent=(100,))
    (path,) = report.steps
    assert report.shown.pieces[1].stage == "dispatch" and report.shown.pieces[1].instead == ("A3 of microbatch 1",)
    assert gains(path, "dispatch")[0][0] == 0 and gains(path, "dispatch")[0][1] == 40 + 10
    assert any(note.startswith("Stretches of the GPU with a receive in them: 4.") for note in report.notes)


def graph_path(step: StepTrace) -> Sequence[Any]:
    found = graph_of_step(step, computes=False)
    return found.graph.path(found.end)


def test_a_host_that_is_late_is_the_path_and_a_gpu_that_is_late_is_the_path() -> None:
    costs = Costs(dispatch=10, combine=10)
    slow_host = graph_path(VirtualStep("LL", 2, costs, RoundRobin(), launch=100, timed=True).trace)
    assert sum(piece.length for piece in slow_host if piece.stage == "host") > 0.9 * slow_host[-1].end
    slow_gpu = graph_path(VirtualStep("LL", 2, costs, RoundRobin(), launch=1, timed=True).trace)
    assert sum(piece.length for piece in slow_gpu if piece.stage in ("attention", "experts")) > 0.9 * slow_gpu[-1].end


def test_steps_are_added_up_and_the_one_of_median_length_is_shown(tmp_path: Path) -> None:
    records: list[Record] = []
    for number, later in enumerate((0.0, 40.0, 10.0)):
        records.append(step_record(step=number, end=300.0 + later))
        records += [replace(each, step=number) for each in HOST]
    report = trace_path(written(tmp_path / "t", *records), percent=(100,))
    assert [step.length for step in report.steps] == [200, 240, 210]
    assert report.total.length == 650 and stages(report.total)["attention"] == (3 * 57, 0)
    assert gains(report.total, "attention") == [(171, 171)]
    assert report.shown.step == 2 and len(report.shown.pieces) == 9
    only = trace_path(tmp_path / "t", step=1)
    assert [step.step for step in only.steps] == [1] and only.shown.length == 240


def many(path: Path, count: int) -> Path:
    records: list[Record] = []
    for number in range(count):
        records += [step_record(step=number, end=300.0 + number), *(replace(each, step=number) for each in HOST)]
    return written(path, *records)


def test_of_many_steps_a_part_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dbo_greenlet.trace.critical_path.trace.MOST_STEPS", 6)
    report = trace_path(many(tmp_path / "t", 30), percent=(100,))
    assert [step.step for step in report.steps] == [0, 8, 16, 24]
    assert report.notes[0] == "Measured: 4 of 30 steps, of each rank one in 8 (--every 1: all of them)."
    assert [step.step for step in trace_path(tmp_path / "t", every=10).steps] == [0, 10, 20]
    assert len(trace_path(tmp_path / "t", every=1).steps) == 30


def test_two_ranks_in_two_files(tmp_path: Path) -> None:
    for rank in (0, 1):
        records = [replace(each, rank=rank) for each in (step_record(end=300.0 + rank), *HOST)]
        written(tmp_path / f"rank{rank}.jsonl", *records, rank=rank)
    report = trace_path(tmp_path)
    assert [(step.rank, step.length) for step in report.steps] == [(0, 200), (1, 201)]
    assert report.what == "run dbo, 2 steps of ranks 0, 1"
    assert [step.rank for step in trace_path(tmp_path, rank=1).steps] == [1]


def test_flights_that_wait_for_a_late_rank_are_told_from_slow_ones(tmp_path: Path) -> None:
    """Rank 0 has sent at 130, rank 1 at 142; it is received at 165, so 23 us are left for the wire."""
    called = OpRecord(**KEY, number=0, op="receive", ubatch=1, slice=0, owner=0, at=150.0, stream="compute")
    for rank, later in ((0, 0.0), (1, 12.0)):
        slices = [replace(HOST[0], rank=rank, end=132.0 + later), *(replace(each, rank=rank) for each in HOST[1:])]
        records = [step_record(rank=rank), *slices, replace(RECEIVE, rank=rank, sent=130.0 + later)]
        # The clock of rank 1 began a millisecond earlier, so the same moment has a higher number there.
        moved = [_moved(each, 1000.0 * rank) for each in [*records, *([called] if rank == 0 else [])]]
        header = HeaderRecord("0.1", rank, 2, torch="2.13.0", settings=ON_CPU, origin_ns=5_000_000 - 1_000_000 * rank)
        with TraceWriter(tmp_path / f"rank{rank}.jsonl") as writer:
            writer.write(header, *moved)
    report = trace_path(tmp_path)
    (note,) = (note for note in report.notes if note.startswith("Of the"))
    assert note == (
        "Of the 35.0 us of flights on the paths 12.0 us (34 %) had passed when the last rank's sending slice ended: a "
        "rank that was late, and not the wire."
    )
    assert not any("late, and not the wire" in note for note in trace_path(tmp_path / "rank0.jsonl").notes)


def _moved(record: Any, by: float) -> Any:
    times = ("begin", "end", "sent", "at")
    return replace(record, **{name: getattr(record, name) + by for name in times if hasattr(record, name)})


def test_what_has_no_path_is_left_out(tmp_path: Path) -> None:
    captured = [step_record(step=5, execution="captured"), *(replace(each, step=5) for each in HOST)]
    failed = [step_record(step=6, error="ValueError"), *(replace(each, step=6) for each in HOST[:2])]
    unsplit = StepRecord(7, 0, "dbo", 8, 8, False, "few", begin=1.0, end=2.0)
    report = trace_path(written(tmp_path / "t", step_record(), *HOST, *captured, *failed, unsplit))
    assert [step.step for step in report.steps] == [4]
    assert "Left out, as they failed, were captured or have no times of the GPU: 2 of the steps." in report.notes


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"run": "thread"}, "has no steps of run thread; it holds the runs dbo of the ranks 0"),
        ({"rank": 3}, "has no steps on rank 3; it holds the runs dbo of the ranks 0"),
        ({"step": 9}, "has no step 9; it holds the runs dbo of the ranks 0"),
        ({"step": 7}, "of its step none has slices or times of the GPU to find a path in"),
    ],
)
def test_nothing_to_find_is_said_in_a_sentence(tmp_path: Path, asked: dict[str, Any], text: str) -> None:
    unsplit = StepRecord(7, 0, "dbo", 8, 8, False, "few", begin=1.0, end=2.0)
    file = written(tmp_path / "t", step_record(), *HOST, unsplit)
    with pytest.raises(TraceFileError, match=text):
        trace_path(file, **asked)


def test_a_trace_without_steps(tmp_path: Path) -> None:
    with pytest.raises(TraceFileError, match="the trace has no steps"):
        trace_path(written(tmp_path / "t"))
