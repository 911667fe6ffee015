"""Steps of a server that were not split: when they are written, and with which times; who reads them. Needs no vLLM."""

from __future__ import annotations

import gc
import time
import weakref
from pathlib import Path

import pytest

from dbo_greenlet.errors import TraceFileError
from dbo_greenlet.estimate.from_trace import read_steps
from dbo_greenlet.estimate.report import Question, answer
from dbo_greenlet.trace import StepRecord, TraceReader, read_trace, render_step
from dbo_greenlet.vllm.decisions import StepDecision
from tests.estimate.setups import LITE_ON_TWO
from tests.vllm_dropin.servers import Server, serving


def decision(tokens: int = 8, requests: int | None = 8, reason: str = "below-decode-threshold") -> StepDecision:
    return StepDecision(False, reason, tokens, tokens, (tokens, tokens), requests=requests)


def records(path: str) -> list[StepRecord]:
    return [record for record in TraceReader(path) if isinstance(record, StepRecord)]


def unsplit(server: Server, seconds: float = 0.0, **decided: object) -> None:
    server.trace.unsplit_step(decision(**decided))  # type: ignore[arg-type]
    with server.trace.model_call():
        time.sleep(seconds)


def test_its_times_are_those_of_the_call_of_the_model(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        origin = server.trace.recorder.origin_ns
        before = (time.perf_counter_ns() - origin) / 1000
        server.trace.unsplit_step(decision())
        assert server.trace.awaits_model
        with server.trace.model_call():
            time.sleep(0.002)
        assert not server.trace.awaits_model
        after = (time.perf_counter_ns() - origin) / 1000
        path = server.trace.path
    (record,) = records(path)
    assert (record.split, record.execution, record.error) == (False, "eager", None)
    assert (record.tokens, record.slices, record.schedule) == (8, [[0, 8, 0, 8]], "")
    assert record.begin is not None and record.end is not None
    assert before <= record.begin and record.end <= after
    assert record.end - record.begin >= 2_000


def test_only_the_first_call_of_a_step_counts(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        unsplit(server)
        with server.trace.model_call():
            pass
        path = server.trace.path
    assert len(records(path)) == 1


@pytest.mark.parametrize(("captured", "execution"), [(False, "replayed"), (True, "captured")])
def test_a_graph_has_no_times(tmp_path: Path, captured: bool, execution: str) -> None:
    with serving(tmp_path) as server:
        server.trace.unsplit_step(decision())
        server.trace.model_graph(captured=captured)
        path = server.trace.path
    (record,) = records(path)
    assert (record.execution, record.begin, record.end) == (execution, None, None)


@pytest.mark.parametrize("then", ["unsplit", "split", "replayed", "end"])
def test_a_step_whose_model_nobody_saw_is_written_without_times_before_the_next(tmp_path: Path, then: str) -> None:
    with serving(tmp_path) as server:
        server.trace.unsplit_step(decision(requests=None))
        if then == "unsplit":
            unsplit(server)
        elif then == "split":
            server.step()
        elif then == "replayed":
            server.trace.replayed_step()
        path = server.trace.path
    first, *rest = records(path)
    assert (first.step, first.split, first.begin, first.end, first.execution) == (0, False, None, None, "")
    assert first.slices == []
    assert [record.step for record in rest] == ([] if then == "end" else [1])
    assert read_trace(path).ends[0].ok


def test_steps_that_are_not_recorded_wait_for_nothing(tmp_path: Path) -> None:
    awaited = []
    with serving(tmp_path, every=3) as server:
        for _ in range(7):
            server.trace.unsplit_step(decision())
            awaited.append(server.trace.awaits_model)
            with server.trace.model_call():
                pass
        path = server.trace.path
    assert awaited == [True, False, False, True, False, False, True]
    assert [record.step for record in records(path)] == [0, 3, 6]
    assert all(record.begin is not None for record in records(path))


def test_a_model_that_raises_is_in_the_trace_and_its_error_goes_on(tmp_path: Path) -> None:
    class Held:
        pass

    def failing() -> None:
        held = Held()
        kept.append(weakref.ref(held))
        raise ArithmeticError("experts")

    kept: list[weakref.ref[Held]] = []
    with serving(tmp_path) as server:
        server.trace.unsplit_step(decision())
        with pytest.raises(ArithmeticError, match="experts"), server.trace.model_call():
            failing()
        gc.collect()
        assert kept[0]() is None
        unsplit(server)
        path = server.trace.path
    failed, right = records(path)
    assert (failed.error, right.error) == ("ArithmeticError: experts", None)


def test_a_trace_that_ended_lets_the_model_run(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        server.trace.unsplit_step(decision())
        server.trace.close()
        ran = []
        with server.trace.model_call():
            ran.append(True)
        server.trace.unsplit_step(decision())
        assert not server.trace.awaits_model
    assert ran == [True]


# -- what reads them ---------------------------------------------------------------------------------------------------

VLLM = {"engine": "vllm", "all2all_backend": "deepep_low_latency"}


def test_an_estimate_from_the_trace_of_a_server(tmp_path: Path) -> None:
    with serving(tmp_path, settings=VLLM) as server:
        unsplit(server, 0.02, tokens=256, requests=256, reason="warm-up")
        for _ in range(3):
            unsplit(server, 0.02, tokens=64, requests=64)
        unsplit(server, 0.02, tokens=1, requests=1, reason="rank-idle")
        unsplit(server, 0.03, tokens=500, requests=2)
        server.trace.unsplit_step(decision(64, 64))
        server.trace.model_graph(captured=False)
        path = server.trace.path
    decode = read_steps(path, prefill=False, graph=False)
    (step,) = decode.unsplit
    assert step.tokens == 64 and step.step is not None and step.step >= 20_000
    assert decode.machine == {"ranks": 2, "all2all": "deepep_ll"}
    (prefill,) = read_steps(path, prefill=True, graph=False).unsplit
    assert prefill.tokens == 500
    with pytest.raises(
        TraceFileError, match=r"no unsplit decode step that ran as a graph; .*decode, graph without tim"
    ):
        read_steps(path, prefill=False, graph=True)
    report = answer(Question(LITE_ON_TWO, file=Path(path), execution="eager", microbatches="2"))
    (section,) = report.sections
    assert section.estimate.unsplit.step == pytest.approx(step.step, rel=0.15)
    assert any(note.startswith("The steps are a server's, timed on the host") for note in section.notes)


def test_a_step_as_show_prints_it(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        unsplit(server, 0.002)
        path = server.trace.path
    trace = read_trace(path)
    (record,) = (step.record for step in trace.steps.values())
    heading, why, took = render_step(trace.step(0)).splitlines()
    assert (heading, why) == ("step 0, rank 0, run dbo: 8 tokens, eager", "not split: below-decode-threshold")
    assert record is not None and took == f"took {(record.end - record.begin) / 1000:.3f} ms"
