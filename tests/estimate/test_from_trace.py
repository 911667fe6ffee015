"""Steps of a trace of ours as measurements, and the estimate's own error against its split steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dbo_greenlet.errors import ConfigurationError, TraceFileError
from dbo_greenlet.estimate import estimate, make_setup
from dbo_greenlet.estimate.from_trace import SplitStep, carried, read_steps
from dbo_greenlet.estimate.predict import SPLIT
from dbo_greenlet.estimate.report import Question, answer
from dbo_greenlet.schedule import Schedule
from dbo_greenlet.trace import HeaderRecord, StepRecord, TraceWriter
from tests.estimate.setups import LITE_ON_TWO, lite

HALVES = [[0, 256, 0, 256], [256, 512, 256, 512]]


def a_step(number: int, tokens: int, us: float, **changes: object) -> StepRecord:
    fields: dict[str, object] = {
        "step": number, "rank": 0, "run": "dbo", "tokens": tokens, "padded": tokens, "split": False, "reason": "below",
        "votes": [], "slices": [], "schedule": "", "hash": "", "yields": [], "output": "",
        "requests": list(range(tokens)), "sampled": [], "begin": 1000.0 * number, "end": 1000.0 * number + us,
        "error": None, "execution": "eager",
    }  # fmt: skip
    return StepRecord(**{**fields, **changes})  # type: ignore[arg-type]


def split(number: int, tokens: int, us: float, **changes: object) -> StepRecord:
    half = tokens // 2
    slices = [[0, half, 0, 1], [half, tokens, 1, 2]]
    return a_step(number, tokens, us, **{"split": True, "slices": slices, **changes})


def write(path: Path, steps: list[StepRecord]) -> Path:
    with TraceWriter(path) as writer:
        writer.write(HeaderRecord("0.1.0", 0, 2), *steps)
    return path


def test_steps_are_medians_by_tokens(tmp_path: Path) -> None:
    trace = write(
        tmp_path / "t.jsonl",
        [
            *(a_step(number, 64, us) for number, us in enumerate((20_000.0, 21_000.0, 90_000.0))),
            a_step(3, 8, 19_000.0),
            a_step(4, 64, 10_000.0, execution="replayed"),
            a_step(5, 510, 50_000.0, requests=[1, 2]),  # a prefill
            a_step(6, 64, 1.0, error="MicrobatchFailed"),
            *(split(number, 64, us) for number, us in ((7, 40_000.0), (8, 42_000.0), (9, 44_000.0))),
            split(10, 64, 60_000.0, run="thread"),
        ],
    )
    found = read_steps(trace, prefill=False, graph=False)
    assert [(step.tokens, step.step) for step in found.unsplit] == [(8, 19_000), (64, 21_000)]
    assert found.split == [
        SplitStep(64, 2, "round_robin", "greenlets", 42_000, 3),
        SplitStep(64, 2, "round_robin", "threads", 60_000, 1),
    ]
    assert [step.step for step in read_steps(trace, prefill=True, graph=False).unsplit] == [50_000]
    assert [step.step for step in read_steps(trace, prefill=False, graph=True).unsplit] == [10_000]
    with pytest.raises(
        TraceFileError,
        match=r"no unsplit prefill step .* as a graph; .* decode, eager; decode, eager, split; decode, gr",
    ):
        read_steps(trace, prefill=True, graph=True)


def test_the_error_is_stated_against_the_split_steps(tmp_path: Path) -> None:
    steps = [
        *(a_step(number, 64, 20_000.0) for number in range(3)),
        split(3, 64, 44_000.0),
        split(4, 64, 99_000.0, run="thread"),
    ]
    trace = write(tmp_path / "t.jsonl", steps)
    report = answer(Question(LITE_ON_TWO, file=trace, execution="eager", microbatches="2", policies=("round_robin",)))
    (section,) = report.sections
    (judged,) = section.judged  # threads are another question
    assert section.estimate.unsplit.step == pytest.approx(20_000, rel=0.01)
    assert judged.predicted == pytest.approx(section.estimate.best.step)
    assert judged.gain == pytest.approx(20 / 44)
    assert "1 of 64 tokens, 2 microbatches, round_robin, greenlets: 44.0 ms, predicted" in report.text()
    assert f"gain 0.45 (unsplit 20.0 ms), predicted {section.estimate.best.gain:.2f}" in report.text()
    by_threads = {**LITE_ON_TWO, "carrier": "threads"}
    (asked,) = answer(Question(by_threads, file=trace, execution="eager", microbatches="2")).sections
    assert [each.step.step for each in asked.judged] == [99_000]


def test_the_split_steps_may_be_in_another_file(tmp_path: Path) -> None:
    unsplit = write(tmp_path / "unsplit.jsonl", [a_step(0, 64, 20_000.0)])
    other = write(tmp_path / "split.jsonl", [split(0, 64, 39_000.0)])
    asked = {"execution": "eager", "microbatches": "2", "policies": ("round_robin",)}
    (section,) = answer(Question(LITE_ON_TWO, file=unsplit, split=other, **asked)).sections  # type: ignore[arg-type]
    assert [each.step.step for each in section.judged] == [39_000]
    with pytest.raises(TraceFileError, match=r"unsplit.jsonl: no split decode step .* kinds: decode, eager$"):
        answer(Question(LITE_ON_TWO, file=unsplit, split=unsplit, **asked))  # type: ignore[arg-type]
    (tmp_path / "p.json").write_text("{}")
    with pytest.raises(TraceFileError, match=r"p.json: JSON, but no profile"):
        answer(Question(LITE_ON_TWO, file=unsplit, split=tmp_path / "p.json", **asked))  # type: ignore[arg-type]


def test_an_execution_that_the_trace_lacks_is_left_out_and_named(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl", [a_step(0, 64, 20_000.0)])
    report = answer(Question(LITE_ON_TWO, file=trace, microbatches="2"))
    assert [section.estimate.setup.graph for section in report.sections] == [False]
    assert report.skipped == [f"Not estimated as a graph: {trace}: no unsplit decode step that ran as a graph; "
                              "it has steps of these kinds: decode, eager"]  # fmt: skip


def test_where_no_execution_can_be_estimated_both_reasons_are_told_once(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl", [a_step(0, 64, 20_000.0)])
    # What is wrong is the file that --split names; that the trace has no graph steps is not all.
    with pytest.raises(TraceFileError, match=r"none.jsonl: no such file; and as a graph: .*t.jsonl: no unsplit decode"):
        answer(Question(LITE_ON_TWO, file=trace, split=tmp_path / "none.jsonl"))
    with pytest.raises(TraceFileError, match=r"none.jsonl: no such file$"):
        answer(Question(LITE_ON_TWO, file=tmp_path / "none.jsonl"))
    with pytest.raises(TraceFileError, match=r"t.jsonl: no unsplit decode step that ran as a graph; .*eager$"):
        answer(Question(LITE_ON_TWO, file=trace, split=tmp_path / "none.jsonl", execution="graph"))


def test_a_trace_that_does_not_say_which_model_ran_is_told_so(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl", [a_step(0, 64, 200_000.0)])
    unnamed = {name: value for name, value in LITE_ON_TWO.items() if name not in ("model", "layers")}
    asked = {"file": trace, "execution": "eager", "microbatches": "2", "policies": ("round_robin",), "most": 64}
    said = "so this is an estimate of deepseek-v3 with the times of another model; --model names the one that ran"
    (section,) = answer(Question(unnamed, **asked)).sections  # type: ignore[arg-type]
    assert section.estimate.setup.shape.name == "deepseek-v3" and any(said in note for note in section.notes)
    with pytest.raises(
        ConfigurationError, match="no correction meets it.* or --model: of deepseek-v3 they need not be"
    ):
        answer(Question(unnamed, **{**asked, "file": write(tmp_path / "quick.jsonl", [a_step(0, 64, 20_000.0)])}))  # type: ignore[arg-type]
    (named,) = answer(Question(LITE_ON_TWO, **asked)).sections  # type: ignore[arg-type]
    assert not any(said in note for note in named.notes)


def test_steps_in_an_order_that_no_name_stands_for_are_not_judged(tmp_path: Path) -> None:
    steps = [
        a_step(0, 64, 20_000.0),
        split(1, 64, 40_000.0, policy="by hand"),
        split(2, 64, 41_000.0, policy="in_turn"),
    ]
    trace = write(tmp_path / "t.jsonl", steps)
    (section,) = answer(Question(LITE_ON_TWO, file=trace, execution="eager", microbatches="2")).sections
    assert [each.step.policy for each in section.judged] == ["in_turn"]
    assert section.notes == [
        "1 split step of the trace could not be predicted: they ran in an order that cannot be run again, by hand."
    ]


def test_how_many_requests_a_step_has_its_slices_say_too(tmp_path: Path) -> None:
    quarters = [[0, 32, 0, 32], [32, 64, 32, 64]]
    steps = [
        a_step(0, 64, 20_000.0),
        split(1, 64, 40_000.0, requests=[], slices=quarters),  # as the server plugin writes a decode step
        split(2, 64, 41_000.0, requests=[], slices=[[0, 32, 0, 1], [32, 64, 0, 2]]),  # two prompts
        a_step(3, 64, 1.0, requests=[]),
        a_step(4, 64, 1.0, requests=[]),
        a_step(5, 0, 1.0, requests=[]),  # a rank without requests runs along
        a_step(6, 1, 9_000.0, requests=[]),  # one token: one request
    ]
    steps[5] = replace(steps[5], padded=64)
    trace = write(tmp_path / "t.jsonl", steps)
    decode = read_steps(trace, prefill=False, graph=False)
    assert [(step.tokens, step.step) for step in decode.unsplit] == [(1, 9_000), (64, 20_000)]
    assert [step.step for step in decode.split] == [40_000]
    assert decode.unknown == 2
    assert decode.notes() == ["2 steps do not say how many requests they have; these do not count."]
    (section,) = answer(Question(LITE_ON_TWO, file=trace, execution="eager", microbatches="2")).sections
    assert decode.notes()[0] in section.notes
    prefill = read_steps(trace, prefill=True, graph=False, need_unsplit=False)
    assert [step.step for step in prefill.split] == [41_000]
    with pytest.raises(TraceFileError, match=r"no unsplit decode step that ran eagerly; 1 step does not say how many"):
        read_steps(write(tmp_path / "u.jsonl", steps[3:4]), prefill=False, graph=False)


def test_split_steps_that_cannot_be_predicted_do_not_end_the_answer(tmp_path: Path) -> None:
    thirds = [[0, 22, 0, 22], [22, 44, 22, 44], [44, 64, 44, 64]]
    steps = [
        a_step(0, 64, 20_000.0),
        split(1, 64, 40_000.0),
        split(2, 64, 40_000.0, policy="phase_offset:1", slices=thirds),
        split(3, 64, 40_000.0, slices=[]),
        split(4, 64, 41_000.0, slices=[], schedule=Schedule(3, (0, 1, 2)).encode()),
        split(5, 64, 41_000.0, slices=[], schedule="dbo1:cut", policy="in_turn"),
    ]
    trace = write(tmp_path / "t.jsonl", steps)
    (section,) = answer(Question(LITE_ON_TWO, file=trace, execution="eager", microbatches="2")).sections
    assert [(each.step.count, each.step.step) for each in section.judged] == [(2, 40_000), (3, 41_000)]
    text = "\n".join(section.notes)
    assert "1 split step of the trace could not be predicted: 3 microbatches with phase_offset:1 over deepep_ll" in text
    assert "2 split steps of the trace could not be predicted: the trace does not say into how many micro" in text


def test_what_the_trace_ran_on_is_taken_from_it(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    header = HeaderRecord("0.1.0", 0, 4, settings={"all2all": "nccl", "processor": "NVIDIA H100 80GB HBM3"})
    with TraceWriter(path) as writer:
        writer.write(header, a_step(0, 64, 20_000.0))
    asked = {"model": "deepseek-v2-lite", "layers": 4}
    (section,) = answer(Question(asked, file=path, execution="eager", microbatches="2")).sections
    setup = section.estimate.setup
    carried_by = setup.communication
    assert (carried_by.kind, carried_by.ranks, carried_by.link.name) == ("stream", 4, "nvlink")
    assert (setup.gpu.name, setup.engine.name) == ("H100", "runner")
    assert not any("The trace ran" in note for note in section.notes)
    other = answer(Question({**asked, "ranks": 8, "all2all": "stream"}, file=path, microbatches="2")).sections[0]
    assert other.estimate.setup.communication.ranks == 8
    assert "The trace ran with ranks 4; the estimate is of 8, corrected by steps of the former." in other.notes
    with TraceWriter(tmp_path / "cpu.jsonl") as writer:
        writer.write(replace(header, settings={"processor": "a CPU"}), a_step(0, 64, 20_000.0))
    with TraceWriter(tmp_path / "auto.jsonl") as writer:
        writer.write(replace(header, settings={"all2all": "auto"}), a_step(0, 64, 20_000.0))
    (auto,) = answer(Question(asked, file=tmp_path / "auto.jsonl", execution="eager", microbatches="2")).sections
    kept = auto.estimate.setup
    assert (kept.communication.kind, kept.communication.link.name, kept.engine.name) == ("stream", "nvlink", "runner")
    (cpu,) = answer(Question(asked, file=tmp_path / "cpu.jsonl", execution="eager", microbatches="2")).sections
    assert "The trace ran on a CPU, no GPU of the table; the estimate is of another one." in cpu.notes


def test_a_measured_loss_counts_more_than_a_predicted_gain(tmp_path: Path) -> None:
    # Over this link splitting would pay, if the measured split steps did not say otherwise.
    slow_link = {"all2all": "stream", "engine": "torch", "layers": 9, "gbs": 10, "context": 4000, "call_us": 8}
    asked = {**LITE_ON_TWO, **slow_link}
    found = estimate(make_setup({**asked, "tokens": 512}), (2,), ("round_robin",))
    assert found.verdict == SPLIT
    steps = [a_step(0, 512, found.unsplit.step), split(1, 512, 1.2 * found.unsplit.step, slices=HALVES)]
    for steps_there, code in ((steps, False), (steps[:1], True)):
        trace = write(tmp_path / "t.jsonl", steps_there)
        words = {"execution": "eager", "microbatches": "2", "policies": ("round_robin",), "host_ms": None, "most": 64}
        report = answer(Question(asked, file=trace, **words))  # type: ignore[arg-type]
        assert report.recommends == code
    trace = write(tmp_path / "t.jsonl", steps)
    text = answer(Question(asked, file=trace, **words)).text()  # type: ignore[arg-type]
    assert "more than the margin of 0.10, so it is unreliable; go by the measured gain, 0.83." in text


def test_a_folder_of_ranks_is_one_run(tmp_path: Path) -> None:
    for rank, us in enumerate((20_000.0, 22_000.0)):
        write(tmp_path / f"rank{rank}.jsonl", [a_step(0, 64, us, rank=rank)])
    assert [step.step for step in read_steps(tmp_path, prefill=False, graph=False).unsplit] == [21_000]


def test_steps_without_times_are_named(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl", [a_step(0, 64, 0.0, begin=None, end=None)])
    with pytest.raises(
        TraceFileError, match=r"no unsplit decode step that ran eagerly; .* decode, eager without times"
    ):
        read_steps(trace, prefill=False, graph=False)


def test_a_trace_without_a_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceFileError, match="no unsplit decode step that ran eagerly$"):
        read_steps(write(tmp_path / "t.jsonl", []), prefill=False, graph=False)


def test_a_carrier_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no carrier 'fibers'; use one of .*'threads', 'threads, one core'"):
        carried(lite(), SplitStep(64, 2, "round_robin", "fibers", 1.0, 1))
