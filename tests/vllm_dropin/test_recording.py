"""The trace of a running server, driven by the real scheduler: what is written, and of which steps. Needs no vLLM."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dbo_greenlet
from dbo_greenlet.schedule import Schedule
from dbo_greenlet.trace import HeaderRecord, StepTrace, Trace, TraceReader, read_trace, render_lanes, render_step
from dbo_greenlet.vllm import decisions
from dbo_greenlet.vllm.decisions import StepDecision
from tests.vllm_dropin.servers import CUTS, ENVIRONMENT, HIGH_THROUGHPUT, entry, serving

SPLIT = StepDecision(True, "split-decode", 7, 16, (7, 8))
UNSPLIT = StepDecision(False, "below-decode-threshold", 3, 3, (3, 40))


@pytest.fixture(autouse=True)
def decision(monkeypatch: pytest.MonkeyPatch) -> Callable[[StepDecision | None], None]:
    def decide(value: StepDecision | None) -> None:
        monkeypatch.setattr(decisions, "last", lambda: value)

    decide(SPLIT)
    return decide


def split_steps(trace: Trace) -> list[StepTrace]:
    return [s for s in trace.steps.values() if s.record is not None and s.record.split]


# -- what is written ---------------------------------------------------------------------------------------------------


def test_a_recorded_step_whole(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        server.step()
        path = server.trace.path
    assert path == str(tmp_path / f"dbo-rank0-{os.getpid()}.jsonl")
    trace = read_trace(path)
    assert trace.ends[0].ok and not trace.torn
    (step,) = trace.steps.values()
    record = step.record
    assert (record.step, record.rank, record.run, record.split) == (0, 0, "dbo", True)
    assert (record.reason, record.votes, record.execution, record.error) == ("split-decode", [7, 8], "eager", None)
    assert (record.tokens, record.padded, record.slices) == (7, 16, [[0, 4, 0, 1], [4, 8, 1, 2]])
    schedule = Schedule(2, step.decisions, step.sites)
    assert step.decisions == (0, 1) * 5
    assert (record.schedule, record.hash, record.yields) == (schedule.encode(), schedule.hash, [4, 4])
    assert record.begin < step.slices[0].begin <= step.slices[-1].end < record.end
    assert (record.policy, record.seed, record.vote_begin, record.vote_end) == ("round_robin", None, None, None)
    assert [(r.ubatch, r.by, r.decision) for r in step.receives_as_run][:2] == [(0, 1, 1), (1, 0, 2)]


def test_the_header(tmp_path: Path) -> None:
    class Odd:
        def __str__(self) -> str:
            return "odd"

    given_settings = {"model": "org/name", "vllm": "0.32.0", "runner": "V2", "thresholds": {"decode": 32}, "x": Odd()}
    with serving(tmp_path, rank=3, world=4, every=7, megabytes=2.5, settings=given_settings) as server:
        path = server.trace.path
    (header,) = [r for r in TraceReader(path) if isinstance(r, HeaderRecord)]
    assert (header.rank, header.world, header.package) == (3, 4, dbo_greenlet.__version__)
    assert header.model == {"path": "org/name"}
    assert header.settings == {
        **given_settings,
        "x": "odd",
        "trace": {"every": 7, "megabytes": 2.5, "part": 0, "process": os.getpid()},
    }


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, [float("inf")]], ids=str)
def test_settings_that_json_does_not_know_are_text(tmp_path: Path, value: object) -> None:
    with serving(tmp_path, settings={"x": value}) as server:
        path = server.trace.path
    assert read_trace(path).header.settings["x"] == str(value)


def test_times_of_the_trace_are_on_the_axis_of_its_header(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        server.step()
        path, origin = server.trace.path, server.trace.recorder.origin_ns
    assert read_trace(path).header.origin_ns == origin


def test_the_vote_of_a_step_is_on_the_same_axis(tmp_path: Path, decision) -> None:
    with serving(tmp_path) as server:
        origin = server.trace.recorder.origin_ns
        decision(dataclasses.replace(SPLIT, voted=(origin + 1_500, origin + 4_000)))
        server.step()
        server.trace.unsplit_step(dataclasses.replace(UNSPLIT, voted=(origin + 10_000, origin + 11_000)))
        path = server.trace.path
    split, unsplit = (step.record for step in read_trace(path).steps.values())
    assert (split.vote_begin, split.vote_end) == (1.5, 4.0)
    assert (unsplit.vote_begin, unsplit.vote_end, unsplit.policy) == (10.0, 11.0, "")


class Slice:
    def __init__(self, tokens: slice, requests: slice) -> None:
        self.token_slice = tokens
        self.request_slice = requests


def test_vllms_own_slices(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        server.step(cuts=[Slice(slice(0, 4), slice(0, 2)), Slice(slice(4, 8), slice(1, 2))])
        path = server.trace.path
    assert read_trace(path).step(0).record.slices == [[0, 4, 0, 2], [4, 8, 1, 2]]


@pytest.mark.parametrize("known", [None, UNSPLIT])
def test_without_a_decision_for_the_step_there_is_no_reason(tmp_path: Path, decision, known) -> None:
    decision(known)
    with serving(tmp_path) as server:
        server.step()
        path = server.trace.path
    record = read_trace(path).step(0).record
    assert (record.split, record.reason, record.tokens) == (True, "", 8)


def test_the_trace_is_readable_as_a_timetable(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        server.step(kind="captured")
        path = server.trace.path
    lines = render_step(read_trace(path).step(0)).splitlines()
    assert lines[0].startswith("step 0, rank 0, run dbo: 7 tokens, 2 microbatches, 10 slices, schedule hash ")
    assert lines[0].endswith(", captured")
    assert "Order: A0_0, A1_0, D_0 send, A0_1, A1_1, D_0 recv, D_1 send, MLP_0, D_1 recv, C_0 send, S_0, " in lines[5]


def test_high_throughput_is_readable_as_a_timetable(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        server.step(3, stages=HIGH_THROUGHPUT)
        path = server.trace.path
    text = render_step(read_trace(path).step(0), layers=[1])
    assert "Comp: |-A0_1-A1_1-||-MLP_0-||-MLP_1-||-S_0-S_1-||-A0_0-A1_0-|" in text.splitlines()


def test_sites_of_another_model_are_listed(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        server.step(1, stages=["gate (model.py:7)", "all_reduce"])
        path = server.trace.path
    step = read_trace(path).step(0)
    assert "    0  microbatch 0  slice   0  to layer0.gate (model.py:7)" in render_step(step).splitlines()
    assert [line[:13] for line in render_lanes(step).splitlines()[1:]] == ["microbatch 0 ", "microbatch 1 "]


# -- which steps -------------------------------------------------------------------------------------------------------


@dataclass
class Counted:
    """What a list of steps must leave in the trace: step numbers by kind."""

    split: list[int]
    unsplit: list[int]


def expected(kinds: list[bool], every: int) -> Counted:
    split = [number for number, kind in enumerate(kinds) if kind]
    unsplit = [number for number, kind in enumerate(kinds) if not kind]
    return Counted(split[::every], unsplit[::every])


@settings(deadline=None, max_examples=40)
@given(kinds=st.lists(st.booleans(), max_size=25), every=st.integers(1, 6))
def test_the_first_and_every_nth_of_each_kind(tmp_path_factory, kinds: list[bool], every: int) -> None:
    folder = tmp_path_factory.mktemp("trace")
    told = []
    with serving(folder, every=every) as server:
        for number, split in enumerate(kinds):
            if not split:
                server.trace.unsplit_step(UNSPLIT)
            elif server.step(1):
                told.append(number)
        path = server.trace.path
    trace = read_trace(path)
    want = expected(kinds, every)
    assert told == want.split
    assert [s.step for s in split_steps(trace)] == want.split
    assert all(len(s.slices) == 6 for s in split_steps(trace))
    unsplit = [s for s in trace.steps.values() if not s.record.split]
    assert [s.step for s in unsplit] == want.unsplit
    assert all(
        (s.record.reason, s.record.votes, s.record.tokens) == ("below-decode-threshold", [3, 40], 3) for s in unsplit
    )
    assert all(not s.slices for s in unsplit)


def test_failed_steps_are_written_whether_they_were_recorded_or_not(tmp_path: Path) -> None:
    with serving(tmp_path, every=100) as server:
        server.step(fail=True)
        server.step()
        server.step(fail=True)
        path = server.trace.path
    trace = read_trace(path)
    assert [s.step for s in trace.steps.values()] == [0, 2]
    message = (
        "MicrobatchFailed: Microbatch 0 of 2 failed in slice 4 after the yield at 'layer1.combine': "
        "ValueError: out of experts"
    )
    assert [s.record.error for s in trace.steps.values()] == [message] * 2
    whole, bare = trace.steps.values()
    assert [(s.ubatch, s.slice) for s in whole.slices if s.failed] == [(0, 4)]
    assert bare.slices == [] and bare.record.begin is None
    assert "failed: " + message in render_step(bare).splitlines()
    # The server ended right after it.
    assert (trace.ends[0].ok, trace.ends[0].error) == (False, message)


def test_a_server_that_went_on_after_an_error_ended_well(tmp_path: Path) -> None:
    with serving(tmp_path, every=100) as server:
        server.step(fail=True)
        server.step()
        path = server.trace.path
    assert read_trace(path).ends[0].ok


def test_replays_are_counted_apart_and_say_what_they_are(tmp_path: Path) -> None:
    with serving(tmp_path, every=2) as server:
        server.step(kind="captured")
        for _ in range(4):
            server.trace.replayed_step()
        server.step()
        path = server.trace.path
    trace = read_trace(path)
    assert [(s.step, s.record.execution, len(s.slices)) for s in trace.steps.values()] == [
        (0, "captured", 10),
        (1, "replayed", 0),
        (3, "replayed", 0),
    ]
    replay = trace.step(3)
    assert (replay.record.split, replay.record.reason, replay.record.tokens) == (True, "split-decode", 7)
    assert render_step(replay).splitlines() == [
        "step 3, rank 0, run dbo: 7 tokens, replayed",
        "split: split-decode; replayed from its graph, which runs no slices on the host",
    ]


def test_a_step_that_fails_before_its_first_slice_does_not_show_those_of_the_step_before(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        server.step()
        server.trace.due()
        server.trace.split_step(
            kind="eager", slices=(), tokens=8, padded=16, schedule=None, error=ValueError("no stream")
        )
        path = server.trace.path
    failed = read_trace(path).step(1)
    assert failed.slices == [] and failed.record.begin is None and failed.record.error == "ValueError: no stream"


def test_without_due_a_failed_step_still_has_a_number_of_its_own(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        server.step()
        for _ in range(2):
            server.trace.split_step(
                kind="eager", slices=(), tokens=8, padded=16, schedule=None, error=ValueError("no stream")
            )
        path = server.trace.path
    assert [(s.step, len(s.slices)) for s in read_trace(path).steps.values()] == [(0, 10), (1, 0), (2, 0)]


def test_a_step_whose_end_was_never_told_is_not_mixed_with_the_next(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        server.trace.due()
        server.recording.run([entry(2)] * 2)
        server.step(1)
        path = server.trace.path
    assert [(s.step, len(s.slices)) for s in read_trace(path).steps.values()] == [(1, 6)]


def test_an_error_with_a_huge_message_is_cut(tmp_path: Path) -> None:
    with serving(tmp_path, megabytes=0.1) as server:
        server.trace.due()
        server.trace.split_step(
            kind="eager", slices=CUTS, tokens=8, padded=8, schedule=None, error=ValueError("\N{BRAIN}" * 100_000)
        )
        path = server.trace.path
    error = read_trace(path).step(0).record.error
    assert error.startswith("ValueError: \N{BRAIN}") and error.endswith(" ...") and len(error) < 1_100


def test_it_needs_neither_torch_nor_vllm() -> None:
    program = "import sys; sys.modules['torch'] = sys.modules['vllm'] = None; import dbo_greenlet.vllm.recording"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env=ENVIRONMENT)
