"""Exact match, differing tokens, and the report as text."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from dbo_greenlet.job.launch import JobResult
from dbo_greenlet.job.messages import PassDone, StepDone
from dbo_greenlet.job.report import findings, is_right, make_report, render_report
from dbo_greenlet.job.requests import Request
from dbo_greenlet.job.spec import JobSpec, Settings, passes_of
from dbo_greenlet.trace import StepRecord
from tests.job.conftest import Recorded

REQUESTS = (Request(0, 1, "a", "p", "42"), Request(1, 2, "b", "p", "7"), Request(2, 3, "c", "p"))
TOKENS = {0: [1, 2, 3], 1: [4, 5], 2: [6]}


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        (" 17+25=42", "42", True),
        (" 17+25=42;42-2=40", "42", False),
        ("042", "42", True),
        ("", "42", False),
        (" yes \n", "yes", True),
        ("yes!", "yes", False),
        (" 3-5=-2", "-2", True),
        (" 3-5=2", "-2", False),
        (" 3-5=-2", "2", False),
        (" 9-2", "2", True),
        (" so 7", "+07", True),
        ("-0", "0", True),
        ("9" * 5000, "9" * 5000, True),
    ],
)
def test_exact_match(text: str, answer: str, right: bool) -> None:
    assert is_right(text, answer) is right


def result(
    split: dict[int, list[int]], unsplit: dict[int, list[int]], close: dict[int, dict[int, float]] | None = None
) -> JobResult:
    settings = Settings(ranks=1)
    out = JobResult(JobSpec(settings, "model", "prompts", REQUESTS, passes_of(settings)))
    texts = {0: " 40+2=42", 1: " 8", 2: "?"}
    out.take(0, PassDone("dbo", 1.0, texts, split, close or {}))
    out.take(0, PassDone("unsplit", 1.0, texts, unsplit))
    return out


def step(rank: int, number: int, run: str, hash: str, reason: str = "split-decode") -> StepDone:
    record = StepRecord(number, rank, run, 4, 4, bool(hash), reason, hash=hash, yields=[2, 2] if hash else [])
    return StepDone(record, b"", 0, f"because of {reason}", (1000, 3000))


def test_accuracy_counts_the_requests_with_an_answer() -> None:
    table = make_report(result(TOKENS, TOKENS))["table"]
    assert table[2] == {"run": "eager, DBO", "exact_match": 0.5, "stderr": pytest.approx(0.125**0.5), "n": 2}


def test_equal_tokens_are_no_finding() -> None:
    report = make_report(result(TOKENS, TOKENS))
    assert report["tokens"] == {
        "equal": True,
        "generated": 6,
        "differing": [],
        "unexplained": 0,
        "close_below": 1e-3,
    }
    assert findings(report) == []


def test_a_close_call_explains_a_difference_and_is_listed() -> None:
    report = make_report(result(TOKENS | {0: [1, 9]}, TOKENS, {0: {1: 2e-4}}))
    (difference,) = report["tokens"]["differing"]
    assert difference == {"id": "a", "token": 1, "split": [9], "unsplit": [2], "gap": 2e-4, "close_call": True}
    assert findings(report) == []
    assert "equal to unsplit but for close calls" in render_report(report)
    assert "request a, token 1: [9] and [2], best logits 2.0e-04 apart" in render_report(report)


@pytest.mark.parametrize("tokens", [[1, 9, 3], [1, 2], [1, 2, 3, 4]])
def test_any_other_difference_is_a_finding(tokens: list[int]) -> None:
    report = make_report(result(TOKENS | {0: tokens}, TOKENS, {0: {0: 2e-4}}))
    assert not report["tokens"]["equal"]
    assert findings(report) == ["1 requests got other tokens than unsplit although the logits were not close."]
    assert "NOT equal to unsplit" in render_report(report)


def test_schedules_that_differ_between_ranks_are_a_finding() -> None:
    job = result(TOKENS, TOKENS)
    for rank, number, hash in ((0, 0, "aa"), (1, 0, "aa"), (0, 1, "aa"), (1, 1, "bb"), (0, 2, ""), (1, 2, "")):
        job.take(rank, step(rank, number, "dbo", hash, "split-decode" if hash else "rank-idle"))
    report = make_report(job)
    assert report["schedule_hash"]["apart"] == [1]
    assert findings(report) == ["The schedules of the ranks or carriers differ in steps 1."]
    assert report["steps"]["not_split"] == {"rank-idle": 1}
    assert "   1 rank-idle: the first: because of rank-idle" in render_report(report)


def test_hand_offs_are_compared_over_the_steps_that_both_carriers_ran() -> None:
    job = result(TOKENS, TOKENS)
    for number in (0, 1, 2):
        job.take(0, step(0, number, "dbo", "aa"))
    job.take(0, step(0, 1, "thread", "aa"))
    handoffs = make_report(job)["hand_off_us"]
    assert handoffs["steps"] == 1
    assert handoffs["greenlet"] == {"median": 2.0, "tenth": 1.0, "measured": 2}


def test_a_trace_problem_is_a_finding() -> None:
    job = result(TOKENS, TOKENS)
    job.trace_problem = "The trace x is not complete: full."
    assert findings(make_report(job)) == ["The trace x is not complete: full."]


def test_the_text_of_a_whole_run(recorded: Recorded) -> None:
    report: dict[str, Any] = copy.deepcopy(recorded.report)
    lines = render_report(report).splitlines()
    assert lines[0] == "| run           | exact match | stderr |"
    assert [line.split("|")[1].strip() for line in lines[2:6]] == [
        "eager, no DBO", "graph, no DBO", "eager, DBO", "graph, DBO"
    ]  # fmt: skip
    text = "\n".join(lines)
    assert f"Steps: {report['steps']['total']}, of which {report['steps']['split']} were split." in text
    assert "Yields: 16 a split step, 8 a microbatch." in text
    assert f"Schedule hash: equal on all 2 ranks in each of {report['steps']['split']} split steps." in text
    assert "Host time per yield: greenlets " in text and "threads are stock threads" in text
    assert "Comp: |-in_0-A0_0-A1_0-|" in text
