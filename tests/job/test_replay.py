"""Replaying the recorded run, as it is and edited."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dbo_greenlet.errors import CheckpointError, TraceFileError
from dbo_greenlet.job.replay import ReplayReport, plan_replay, replay
from dbo_greenlet.schedule import Schedule
from tests.job.command import in_process, one_sentence
from tests.job.conftest import Recorded


def edited(source: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The trace with `change` applied to every line."""
    lines = []
    for line in source.read_text(encoding="ascii").splitlines():
        data = json.loads(line)
        change(data)
        lines.append(json.dumps(data) + "\n")
    target.write_text("".join(lines), encoding="ascii")
    return target


def is_step(data: dict[str, Any], step: int, rank: int) -> bool:
    return data["t"] == "step" and (data["run"], data["step"], data["rank"]) == ("dbo", step, rank)


def test_a_replay_meets_every_decision_and_checksum(recorded: Recorded) -> None:
    done = in_process("replay", recorded.trace)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[1:] == [
        "Decisions: met on every rank and step.",
        "Output checksums: met on every rank and step.",
        "Tokens: equal to the recorded ones.",
    ]


@pytest.mark.parametrize("run", ["unsplit", "thread"])
def test_the_other_runs_can_be_replayed(recorded: Recorded, run: str) -> None:
    report = replay(plan_replay(recorded.trace, run=run))
    assert report.met, report.render()
    assert report.steps >= 4 and not report.outputs and not report.not_comparable


def test_a_trace_of_an_earlier_version_is_replayed_without_graphs(recorded: Recorded, tmp_path: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        data.pop("execution", None)
        if data["t"] == "header":
            del data["settings"]["cudagraph_sizes"], data["settings"]["gpu_timeline"], data["settings"]["memory"]

    plan = plan_replay(edited(recorded.trace, tmp_path / "older.jsonl", change))
    assert plan.spec.settings.cudagraph_sizes == "none"
    report = replay(plan)
    assert report.met and report.steps > 10 and not report.outputs


def as_graphs(data: dict[str, Any]) -> None:
    """The recorded run as a GPU would have it, with step 2 replayed from its graph."""
    if data["t"] == "header":
        data["settings"].update(device="cuda", all2all="nccl")
    if data.get("run") == "dbo":
        data.update(run="dbo-graph")
        if data["t"] == "step":
            data.update(execution="replayed" if data["step"] == 2 else "eager")


def test_a_replayed_step_is_replayed_by_its_graph_again(recorded: Recorded, tmp_path: Path) -> None:
    plan = plan_replay(edited(recorded.trace, tmp_path / "graphs.jsonl", as_graphs), run="dbo-graph")
    (only,) = plan.spec.passes
    assert (only.run, only.mode, only.carrier, only.graphs) == ("dbo-graph", "auto", "greenlet", True)
    first, third = plan.specs[0].recorded[0], plan.specs[0].recorded[2]
    # An eager step is held to its recorded schedule, one from a graph has the graph's.
    assert first.schedule is not None and third.schedule is None
    assert third.sampled == plan.recorded[2, 0].sampled


def test_a_step_that_was_replayed_and_is_eager_now_is_a_difference(recorded: Recorded, tmp_path: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        if is_step(data, 2, 0):
            data.update(execution="replayed")

    report = replay(plan_replay(edited(recorded.trace, tmp_path / "edited.jsonl", change)))
    assert report.decisions == ["step 2, rank 0: recorded as replayed, now eager"] and not report.met


def test_graphs_that_the_recorded_settings_rule_out_are_refused(recorded: Recorded, tmp_path: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        as_graphs(data)
        if data["t"] == "header":
            data["settings"].update(device="cpu", all2all="auto")

    trace = edited(recorded.trace, tmp_path / "edited.jsonl", change)
    with pytest.raises(TraceFileError, match="run dbo-graph has graphs, and its settings rule them out: needs a CUDA"):
        plan_replay(trace, run="dbo-graph")


def test_an_edited_decision_is_named_and_ends_the_replay(recorded: Recorded, tmp_path: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        if is_step(data, 1, 1):
            data.update(reason="rank-veto")
        elif is_step(data, 4, 1):
            # Microbatch 1 first: law 6 forbids it, so nothing from this step on can be met.
            data.update(schedule=Schedule(2, (1, 0) * 9).encode())

    trace = edited(recorded.trace, tmp_path / "edited.jsonl", change)
    done = in_process("replay", trace, "--json")
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads(done.stdout)
    first, second = report["decisions"]
    assert first.startswith("step 4, rank 1: replay parts at decision 0: the recorded step resumed microbatch 1")
    assert second.startswith("step 1, rank 1: recorded not split (rank-veto), now not split (below-decode-threshold)")
    assert report["not_reached"] == report["steps"] - 4
    assert not report["met"]


def test_outputs_that_differ_are_counted_and_named(recorded: Recorded, tmp_path: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        if is_step(data, 2, 0):
            data.update(output="0123456789abcdef")

    report = replay(plan_replay(edited(recorded.trace, tmp_path / "edited.jsonl", change)))
    assert not report.met and not report.decisions
    assert [text[:47] for text in report.outputs] == ["step 2, rank 0: recorded 0123456789abcdef, now "]
    assert "Output checksums: NOT met, 1 differ:" in report.render()


def test_recorded_tokens_are_taken_over(recorded: Recorded, tmp_path: Path) -> None:
    """An edited token changes what the next step computes, and is found where it was sampled."""

    def change(data: dict[str, Any]) -> None:
        if is_step(data, 2, 0):
            data["sampled"][0] ^= 1

    report = replay(plan_replay(edited(recorded.trace, tmp_path / "edited.jsonl", change)))
    assert report.tokens[0].startswith("step 2, rank 0: recorded [")
    assert report.outputs[0].startswith("step 3, rank 0: ")


@pytest.mark.parametrize(
    ("found", "met"),
    [
        ({}, True),
        ({"decisions": ["x"]}, False),
        ({"outputs": ["x"]}, False),
        ({"tokens": ["x"]}, False),
        ({"not_reached": 1}, False),
        ({"outputs": ["x"], "tokens": ["x"], "not_comparable": "threads was 1, here it is 2"}, True),
        ({"decisions": ["x"], "not_comparable": "threads was 1, here it is 2"}, False),
    ],
)
def test_a_report_that_prints_not_met_is_not_met(found: dict[str, Any], met: bool) -> None:
    report = ReplayReport("t.jsonl", "dbo", 2, 3, **found)
    assert report.met is met
    assert "NOT met" not in report.render() or not report.met


def test_checksums_of_another_processor_or_version_are_not_comparable(recorded: Recorded, tmp_path: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        if data["t"] == "header":
            data["package"] = "0.0.1"
            data["settings"]["processor"] = "abacus"
        elif is_step(data, 2, 0):
            data.update(output="0123456789abcdef")

    report = replay(plan_replay(edited(recorded.trace, tmp_path / "edited.jsonl", change)))
    assert report.met
    text = report.render()
    assert "Output checksums: not comparable: dbo_greenlet was 0.0.1, here it is " in text
    assert ", processor was abacus, here it is " in text


def test_a_plan_covers_the_steps_that_all_ranks_completed(recorded: Recorded, tmp_path: Path) -> None:
    lines = recorded.trace.read_text(encoding="ascii").splitlines(keepends=True)
    stop = next(n for n, line in enumerate(lines) if is_step(json.loads(line), 3, 1))
    torn = tmp_path / "torn.jsonl"
    torn.write_text("".join(lines[:stop]) + lines[stop][:40], encoding="ascii")
    plan = plan_replay(torn)
    assert sorted(plan.recorded) == [(step, rank) for step in (0, 1, 2) for rank in (0, 1)]
    assert plan.spec.passes[0].last_step == 2
    schedule = plan.specs[0].recorded[0].schedule
    assert schedule is not None and schedule.sites[0] == "layer1.dispatch"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data.pop("settings", None), 'the settings in the header lack "ranks"'),
        (
            lambda data: data.update(settings={"program": "serve.py"}) if data["t"] == "header" else None,
            "which keeps no prompts, so there is nothing to replay it from",
        ),
        (lambda data: data.update(run="other") if data.get("run") == "dbo" else None, "has no step of run dbo"),
        (lambda data: data.update(request=40) if data.get("request") == 3 else None, "does not hold all prompts"),
        (
            lambda data: data.get("settings", {}).update(ranks="two") if data["t"] == "header" else None,
            "\"ranks\" in the settings of the header is 'two', expected int",
        ),
        (
            lambda data: data.update(rank=0) if data["t"] == "header" and data["rank"] else None,
            "a second header of rank 0",
        ),
        (
            lambda data: data.update(sampled=[999]) if is_step(data, 2, 0) else None,
            "step 2 of run dbo on rank 0 sampled token 999, expected 0 to 258, the tokens of the model in ",
        ),
        (
            lambda data: data.update(sampled=[-2]) if is_step(data, 2, 0) else None,
            "step 2 of run dbo on rank 0 sampled token -2, expected 0 to 258",
        ),
        (
            lambda data: data.update(arrival=-3) if data.get("request") == 3 else None,
            "prompt 3 arrives at step -3, expected a step: 0 or more",
        ),
        (lambda data: data.update(text="") if data.get("request") == 3 else None, "the text of prompt 3 is empty"),
        (
            lambda data: data.update(model={}) if data["t"] == "header" else None,
            'the model in the header has no "path"; name the checkpoint\'s folder with --model',
        ),
    ],
)
def test_a_trace_that_cannot_be_replayed_is_refused(
    recorded: Recorded, tmp_path: Path, change: Callable[[dict[str, Any]], None], words: str
) -> None:
    with pytest.raises(TraceFileError, match=words):
        plan_replay(edited(recorded.trace, tmp_path / "edited.jsonl", change))


def test_another_model_is_refused(recorded: Recorded, tmp_path: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        if data["t"] == "header":
            data["model"]["sha256"] = "0" * 64

    with pytest.raises(CheckpointError, match="is not the model of the trace: its hash is"):
        replay(plan_replay(edited(recorded.trace, tmp_path / "edited.jsonl", change)))


def test_a_missing_trace_is_one_sentence(tmp_path: Path) -> None:
    done = in_process("replay", tmp_path / "absent.jsonl")
    assert done.returncode == 2
    assert one_sentence(done.stderr).endswith("absent.jsonl: no such file")
