"""Two traces of one job: the first decision that differs, what else does, and the times side by side."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dbo_greenlet.errors import TraceFileError
from dbo_greenlet.schedule import Schedule
from dbo_greenlet.trace import (
    EndRecord,
    GpuRecord,
    HeaderRecord,
    PromptRecord,
    Record,
    RecvRecord,
    SliceRecord,
    StepRecord,
    TraceWriter,
)
from dbo_greenlet.trace.diff.text import diff_json, render_diff
from dbo_greenlet.trace.diff.traces import Difference, TraceDiff, diff_traces
from tests.trace.random_traces import traces

DISPATCH, COMBINE = "layer1.dispatch", "layer1.combine"
SETTINGS = {"ranks": 2, "policy": "round_robin", "processor": "a", "rank_timeout": 60.0, "gpu_timeline": False}
MODEL = {"path": "/models/a", "sha256": "abc"}
HEADERS = [HeaderRecord("0.1.0", rank, 2, torch="2.13.0", model=MODEL, settings=SETTINGS) for rank in (0, 1)]
PROMPTS = [PromptRecord(0, 0, 0, "one", [1, 2]), PromptRecord(1, 1, 3, "two", [3])]
ENDS = [EndRecord(True, 0), EndRecord(True, 1)]
ROUND_ROBIN = [(0, DISPATCH), (1, DISPATCH), (0, COMBINE), (1, COMBINE), (0, ""), (1, "")]


def step(
    number: int, rank: int = 0, ran: Sequence[tuple[int, str]] = ROUND_ROBIN, *, pace: float = 10.0, run: str = "dbo"
) -> list[Record]:
    """A split step, its slices `pace` microseconds each, every receive run by the sibling in the slice that follows."""
    schedule = Schedule(2, tuple(index for index, _ in ran), tuple(site for _, site in ran))
    out: list[Record] = [
        StepRecord(
            number,
            rank,
            run,
            8,
            8,
            True,
            "split-decode",
            [[1, 8]],
            [[0, 4, 0, 1], [4, 8, 1, 2]],
            schedule.encode(),
            schedule.hash,
            list(schedule.yields),
            "sum",
            [0],
            [5],
            0.0,
            pace * len(ran) + 1,
        )
    ]
    seen = {0: 0, 1: 0}
    for place, (index, site) in enumerate(ran):
        out.append(SliceRecord(number, rank, run, index, seen[index], site, pace * place, pace * (place + 1)))
        seen[index] += 1
    for place, (index, site) in enumerate(ran[:-1]):
        if site:
            sent, at = pace * (place + 1), pace * (place + 1.5)
            out.append(RecvRecord(number, rank, run, index, site, sent, 1 - index, at, place + 1, place))
    return out


def changed(records: list[Record], kind: type, which: int = 0, **values: Any) -> list[Record]:
    places = [place for place, record in enumerate(records) if isinstance(record, kind)]
    out = list(records)
    out[places[which]] = dataclasses.replace(out[places[which]], **values)  # type: ignore[type-var]
    return out


@pytest.fixture
def compare(tmp_path: Path) -> Callable[..., TraceDiff]:
    def compared(a: list[Record], b: list[Record], **asked: Any) -> TraceDiff:
        for name, records in (("a", a), ("b", b)):
            frame = [] if any(isinstance(each, HeaderRecord) for each in records) else [*HEADERS, *PROMPTS]
            with TraceWriter(tmp_path / name) as writer:
                writer.write(*frame, *records, *(ENDS if frame else ()))
            assert writer.problem is None
        return diff_traces(tmp_path / "a", tmp_path / "b", **asked)

    return compared


def test_equal_traces_of_different_speed(compare: Callable[..., TraceDiff]) -> None:
    ran = compare(step(0) + step(0, 1), step(0, 1, pace=20.0) + step(0, pace=20.0))
    assert ran.equal and ran.first is None and not ran.differing
    assert [(each.step, each.rank, each.delta) for each in ran.times] == [(0, 0, 60.0), (0, 1, 60.0)]


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (
            step(1, ran=[*ROUND_ROBIN[:2], (1, COMBINE), (0, COMBINE), *ROUND_ROBIN[4:]]),
            Difference(
                "dbo",
                1,
                0,
                "decision",
                2,
                "microbatch 0, to layer1.combine",
                "microbatch 1, to layer1.combine",
                (0, 1),
                (COMBINE, COMBINE),
            ),
        ),
        (
            step(1, ran=[*ROUND_ROBIN[:3], (1, "elsewhere"), *ROUND_ROBIN[4:]]),
            Difference(
                "dbo",
                1,
                0,
                "decision",
                3,
                "microbatch 1, to layer1.combine",
                "microbatch 1, to elsewhere",
                (1, 1),
                (COMBINE, "elsewhere"),
            ),
        ),
        (
            step(1, ran=ROUND_ROBIN[:5]),
            Difference(
                "dbo", 1, 0, "decision", 5, "microbatch 1, returns", "the schedule is over", (1, None), ("", None)
            ),
        ),
        (
            changed(step(1), RecvRecord, 1, by=None, decision=3),
            Difference(
                "dbo",
                1,
                0,
                "receive",
                2,
                "microbatch 0 ran the receive of microbatch 1 (layer1.dispatch)",
                "no (further) receive ran",
                (1, None),
                (DISPATCH, None),
            ),
        ),
        (
            changed(step(1), RecvRecord, 0, by=None),
            Difference(
                "dbo",
                1,
                0,
                "receive",
                1,
                "microbatch 1 ran the receive of microbatch 0 (layer1.dispatch)",
                "the microbatch itself, when it was resumed, ran the receive of microbatch 0 (layer1.dispatch)",
                (0, 0),
                (DISPATCH, DISPATCH),
            ),
        ),
        (
            changed(step(1), StepRecord, votes=[[1, 9]]),
            Difference("dbo", 1, 0, "votes", None, "[[1, 8]]", "[[1, 9]]"),
        ),
        (
            [StepRecord(1, 0, "dbo", 8, 8, False, "too-few-tokens", [[1, 8]])],
            Difference("dbo", 1, 0, "split", None, "split (split-decode)", "not split (too-few-tokens)"),
        ),
        (
            changed(step(1), StepRecord, slices=[[0, 5, 0, 1], [5, 8, 1, 2]]),
            Difference("dbo", 1, 0, "slices", None, "[[0, 4, 0, 1], [4, 8, 1, 2]]", "[[0, 5, 0, 1], [5, 8, 1, 2]]"),
        ),
        (
            changed(step(1), StepRecord, execution="captured"),
            Difference("dbo", 1, 0, "execution", None, "not stated", "captured"),
        ),
        (
            changed(step(1), StepRecord, error="ValueError: no"),
            Difference("dbo", 1, 0, "error", None, "none", "ValueError: no"),
        ),
    ],
)
def test_the_first_difference_of_each_kind(
    compare: Callable[..., TraceDiff], other: list[Record], expected: Difference
) -> None:
    # The step before is equal, and a later one of the other rank, which differs too, comes first in the files.
    late = step(2, 1, ran=ROUND_ROBIN[:4])
    found = compare([*step(2, 1), *step(0), *step(1)], [*late, *step(0), *other])
    assert found.first == expected
    assert found.differing == [("dbo", 1, 0), ("dbo", 2, 1)]
    assert not found.equal


def test_replays_are_compared_by_their_schedules(compare: Callable[..., TraceDiff]) -> None:
    """A step that was replayed from a graph has no slices: its record says the order, and by the hash the sites."""
    a = [each for each in step(0) if isinstance(each, StepRecord)]
    other = Schedule(2, (0, 0, 1, 1))
    found = compare(a, changed(a, StepRecord, schedule=other.encode(), hash=other.hash))
    assert found.first == Difference("dbo", 0, 0, "decision", 1, "microbatch 1", "microbatch 0", (1, 0), (None, None))
    found = compare(a, changed(a, StepRecord, hash="0" * 16))
    assert found.first is not None and (found.first.what, found.first.decision) == ("decision", None)
    assert found.first.b.endswith("hash 0000000000000000")
    # A schedule that is no schedule is text that differs.
    found = compare(a, changed(a, StepRecord, schedule="dbo1:nothing"))
    assert found.first is not None and "dbo1:nothing" in found.first.b
    # With its slices on one side and without on the other, the microbatches are all there is to compare.
    assert compare(a, step(0)).equal


def test_steps_in_one_trace_only(compare: Callable[..., TraceDiff]) -> None:
    found = compare(step(0) + step(1), step(0) + step(2))
    assert (found.only_a, found.only_b) == ([("dbo", 1, 0)], [("dbo", 2, 0)])
    assert found.first == Difference("dbo", 1, 0, "step", None, "it is in the trace", "the trace has no such step")
    assert found.differing == [] and not found.equal
    assert "Only in B: 1 step: step 2, rank 0, run dbo." in render_diff(found)


def test_outputs_and_tokens_count_where_they_are_comparable(compare: Callable[..., TraceDiff]) -> None:
    other = changed(step(0), StepRecord, output="another", sampled=[6])
    found = compare(step(0), other)
    assert found.first is None and not found.equal
    assert found.outputs == found.tokens == [("dbo", 0, 0)]
    headers = [dataclasses.replace(h, settings={**SETTINGS, "processor": "b"}, torch="2.14.0") for h in HEADERS]
    found = compare(step(0), [*headers, *PROMPTS, *other, *ENDS])
    assert found.equal
    assert found.not_comparable == 'torch is "2.13.0" and "2.14.0", the processor is "a" and "b"'


def test_times_by_stage(compare: Callable[..., TraceDiff]) -> None:
    gpu = [
        GpuRecord(0, 0, "dbo", 0, 0, DISPATCH, "compute", 0.0, 7.0),
        GpuRecord(0, 0, "dbo", 0, 1, COMBINE, "comm", 7.0, 10.0, 0.0, DISPATCH),
        GpuRecord(0, 0, "dbo", 0, 2, "", "comm", 10.0, 14.0, 0.0, COMBINE),
    ]
    unsplit = StepRecord(1, 0, "unsplit", 8, 8, False, "", begin=0.0, end=9.0)
    found = compare([*step(0), *gpu, unsplit], [*step(0, pace=20.0), *gpu[:2], unsplit])
    assert found.totals() == {
        "dbo": {
            ("step", ""): (61.0, 121.0),
            ("slices", "attention"): (20.0, 40.0),
            ("slices", "experts"): (20.0, 40.0),
            ("slices", "out"): (20.0, 40.0),
            ("in flight", "dispatch"): (10.0, 20.0),
            ("in flight", "combine"): (10.0, 20.0),
            ("compute stream", "attention"): (7.0, 7.0),
            ("comm stream", "dispatch"): (3.0, 3.0),
        },
        "unsplit": {("step", ""): (9.0, 9.0)},
    }
    lines = [line.split() for line in render_diff(found).splitlines()]
    assert ["attention", "20.0", "40.0", "+20.0", "+100.0", "%"] in lines
    assert ["step", "0,", "rank", "0,", "run", "dbo", "61.0", "121.0", "+60.0", "20.0", "40.0"] in lines
    rows = diff_json(found)["steps"][0]["times"]
    assert {"what": "comm stream", "stage": "combine", "a": 4.0, "b": None} in rows


def test_high_throughput_has_its_own_stages(compare: Callable[..., TraceDiff]) -> None:
    ran = [(0, "layer1.before_dispatch"), (0, "layer1.before_combine"), (0, COMBINE), (0, "x"), (0, "")]
    stages = compare(step(0, ran=ran), step(0, ran=ran)).totals()["dbo"]
    assert {stage for kind, stage in stages if kind == "slices"} == {"attention", "experts", "shared", "other", "out"}


@pytest.mark.parametrize(
    ("header", "prompts", "reason"),
    [
        ({"world": 4}, PROMPTS, "2 ranks and 4"),
        ({"model": {"path": "/models/a", "sha256": "xyz"}}, PROMPTS, 'the sha256 of the model is "abc" and "xyz"'),
        ({"model": {"path": "/models/b"}}, PROMPTS, 'the path of the model is "/models/a" and "/models/b"'),
        ({"settings": {**SETTINGS, "policy": "in_turn"}}, PROMPTS, 'policy is "round_robin" and "in_turn"'),
        ({"settings": {}}, PROMPTS, 'policy is "round_robin" and not stated, ranks is 2 and not stated'),
        ({}, PROMPTS[:1], "2 prompts and 1"),
        ({}, [PROMPTS[0], dataclasses.replace(PROMPTS[1], arrival=4)], "1 of 2 prompts differ, the first is 1"),
    ],
)
def test_two_programs_are_refused(
    compare: Callable[..., TraceDiff], tmp_path: Path, header: dict[str, Any], prompts: list[Record], reason: str
) -> None:
    headers = [dataclasses.replace(each, **header) for each in HEADERS]
    with pytest.raises(TraceFileError) as refused:
        compare(step(0), [*headers, *prompts, *step(0)])
    assert str(refused.value) == (
        f"{tmp_path / 'a'} and {tmp_path / 'b'} are not of the same program and settings, so their decisions cannot be "
        f"compared: {reason}"
    )


def test_what_says_nothing_about_the_program(compare: Callable[..., TraceDiff]) -> None:
    """The folder of a model with the same content, the machine, and how the run was recorded and supervised."""
    settings = {**SETTINGS, "processor": "b", "rank_timeout": 5.0, "gpu_timeline": True, "trace": {"part": 3}}
    headers = [dataclasses.replace(h, model={"path": "/b", "sha256": "abc"}, settings=settings) for h in HEADERS]
    assert compare(step(0), [*headers, *PROMPTS, *step(0), *ENDS]).equal


def test_nothing_in_common_is_no_comparison(compare: Callable[..., TraceDiff], tmp_path: Path) -> None:
    with pytest.raises(TraceFileError) as refused:
        compare(step(0) + step(4), step(0, 1))
    assert str(refused.value) == (
        f"no step is in both traces: {tmp_path / 'a'} holds 2 steps from 0 to 4 (run dbo, rank 0), "
        f"{tmp_path / 'b'} holds 1 step from 0 to 0 (run dbo, rank 1)"
    )
    with pytest.raises(
        TraceFileError, match="no step of run thread of rank 0 is in both traces: .*a holds none, .*b holds none"
    ):
        compare(step(0), step(0), run="thread", rank=0)


def test_a_run_and_a_rank_can_be_chosen(compare: Callable[..., TraceDiff]) -> None:
    a = [*step(0), *step(0, 1), *step(0, run="thread")]
    b = [*step(0), *step(0, 1, ran=ROUND_ROBIN[:4]), *step(0, run="thread", ran=ROUND_ROBIN[:3])]
    assert compare(a, b, run="dbo", rank=0).equal
    assert compare(a, b, rank=0).differing == [("thread", 0, 0)]
    assert compare(a, b, run="dbo").differing == [("dbo", 0, 1)]


def test_a_trace_that_still_grows(compare: Callable[..., TraceDiff], tmp_path: Path) -> None:
    compare(step(0), step(0))
    (tmp_path / "b").write_bytes((tmp_path / "b").read_bytes().split(b'{"t":"end"')[0] + b'{"t":"st')
    found = diff_traces(tmp_path / "a", tmp_path / "b")
    assert found.equal and found.torn == found.unended == [str(tmp_path / "b")]
    text = render_diff(found)
    assert "is torn and was left out" in text and "the run still goes on, or died" in text


def test_the_text_names_step_decision_microbatch_and_sites(compare: Callable[..., TraceDiff]) -> None:
    found = compare(step(3), step(3, ran=[*ROUND_ROBIN[:2], (1, COMBINE), (0, COMBINE), *ROUND_ROBIN[4:]]))
    assert render_diff(found).splitlines()[3:7] == [
        "The first decision that differs: step 3, rank 0, run dbo, decision 2",
        "  A: microbatch 0, to layer1.combine",
        "  B: microbatch 1, to layer1.combine",
        "Different decisions in 1 step of 1: step 3, rank 0, run dbo.",
    ]


@settings(
    max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
@given(records=traces(), data=st.data())
def test_a_trace_equals_itself_and_no_trace_with_one_decision_changed(
    compare: Callable[..., TraceDiff], records: list[Record], data: st.DataObject
) -> None:
    slices = [n for n, each in enumerate(records) if isinstance(each, SliceRecord) and not each.failed]
    if not slices:
        return
    found = compare(records, records)
    assert found.equal and json.dumps(diff_json(found)) and render_diff(found)
    place = data.draw(st.sampled_from(slices))
    this = records[place]
    assert isinstance(this, SliceRecord)
    other = list(records)
    other[place] = dataclasses.replace(this, site=this.site + "x")
    first = compare(records, other).first
    assert first is not None and (first.run, first.step, first.rank) == (this.run, this.step, this.rank)
    before = [records[n] for n in slices if n < place]
    assert first.decision == sum((s.run, s.step, s.rank) == (this.run, this.step, this.rank) for s in before)  # type: ignore[union-attr]
