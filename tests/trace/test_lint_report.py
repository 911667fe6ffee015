"""The lint's engine and its report: what is grouped, what was not looked at, and how it is said."""

from __future__ import annotations

import json
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from dbo_greenlet.errors import ConfigurationError, TraceFileError
from dbo_greenlet.testing.layer_programs import high_throughput, low_latency
from dbo_greenlet.trace.files import TraceFiles
from dbo_greenlet.trace.lint import RULES, choose_rules, lint_trace
from dbo_greenlet.trace.lint.checks import Check, Facts, Looked, Rule, StepView
from dbo_greenlet.trace.lint.findings import ERROR, WARNING, Hit, Missing, Place
from dbo_greenlet.trace.lint.text import render_report, render_rules, report_json
from dbo_greenlet.trace.records import StepRecord
from tests.testing.planted_bugs import RecordsAfterTheSwitch
from tests.trace.lint_runs import found, header, look, missing, recorded, write

LOW = low_latency(1, numerics=False)
LATE = high_throughput(2, numerics=False, kind=RecordsAfterTheSwitch)


class EveryOther(Check):
    """Finds something in even steps, lacks something in every third, and counts at the end."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._steps = 0

    def step(self, view: StepView) -> Looked:
        number = view.step.step
        self._steps += 1
        if number == 5:
            return None
        if number % 3 == 2:
            return Missing("needs more")
        hit = Hit(f"step {number} is even", view.place(number % 2, 0), number % 4)
        return [hit] if number % 2 == 0 else []

    def end(self) -> list[Hit | Missing]:
        return [Hit(f"{self._steps} steps on {self.facts.world} ranks", Place(rank=0), "end", "count again")]


MINE = Rule("mine", WARNING, "It is mine.", "leave it", "a test", EveryOther)
QUIET = Rule("quiet", ERROR, "It is quiet.", "nothing", "a test", Check)


def test_the_engine_groups_what_rules_find(tmp_path: Path) -> None:
    steps = [replace(each, step=number) for number in range(9) for each in recorded(LOW)]
    trace = write(tmp_path / "t.jsonl", header(), steps)
    report = lint_trace(TraceFiles(trace), rules=[QUIET, MINE])
    assert [
        (each.what, each.count, sorted(each.steps), sorted(each.microbatches), each.remedy) for each in report.findings
    ] == [
        ("step 0 is even", 2, [0, 4], [0], "leave it"),
        ("step 6 is even", 1, [6], [0], "leave it"),
        ("9 steps on 1 ranks", 1, [], [], "count again"),
    ]
    assert [(each.rule.id, each.why, each.steps, each.checked) for each in report.not_checked] == [
        ("mine", "needs more", 2, 6)
    ]
    assert report.checked == [MINE]  # the quiet one had nothing to say of any step
    assert [rule.id for rule in report.ignored] == [rule.id for rule in RULES]


def test_errors_come_first(tmp_path: Path) -> None:
    """A warning of an earlier rule behind an error of a later one."""
    slices = [[0, 16, 0, 1], [16, 16, 1, 1]]
    records = recorded(LATE, slices=slices)
    unsent = recorded(low_latency(1, numerics=False), step=1, memory=False)
    closed = [replace(each, at=None) if getattr(each, "at", None) and each.kind == "recv" else each for each in unsent]
    report = look(write(tmp_path / "t.jsonl", header(), records, closed))
    assert [each[0] for each in found(report)] == ["hook-not-run", "event-after-yield", "empty-ubatch"]


def test_rules_are_chosen_by_id() -> None:
    assert choose_rules() == list(RULES)
    assert [rule.id for rule in choose_rules(["no-overlap", "race"])] == ["race", "no-overlap"]
    assert [rule.id for rule in choose_rules(["no-overlap", "race"], ["race"])] == ["no-overlap"]
    assert len(choose_rules(ignore=["race"])) == len(RULES) - 1
    with pytest.raises(ConfigurationError, match=r"^--ignore racy: no rule has this id; the ids are .*, race, "):
        choose_rules(ignore=["racy"])
    with pytest.raises(ConfigurationError, match=r"^--only and --ignore leave no rule; leave one of them out$"):
        choose_rules(["race"], ["race"])


def test_the_rules_are_told_apart_and_each_says_why() -> None:
    assert len({rule.id for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule.severity in (ERROR, WARNING)
        assert rule.why[0].isupper() and rule.why.endswith(".") and not rule.remedy.endswith(".") and rule.origin


def test_a_run_and_a_rank(tmp_path: Path) -> None:
    records = [recorded(LATE), recorded(LOW, rank=1), recorded(LATE, run="other", rank=1)]
    trace = write(tmp_path / "t.jsonl", header(world=2), header(world=2, rank=1), *records)
    late = ["event-after-yield"]
    assert look(trace, only=late).about == "steps: 2 of run dbo, 1 of run other; ranks 0, 1"
    assert look(trace, only=late, run="other").findings[0].place.run == "other"
    assert look(trace, only=late, rank=0).findings[0].place.rank == 0
    assert found(look(trace, only=late, run="dbo", rank=1)) == []
    with pytest.raises(TraceFileError, match=r"t\.jsonl has no steps of run thread on rank 1$"):
        look(trace, run="thread", rank=1)
    with pytest.raises(TraceFileError, match=r"e\.jsonl has no steps \(yet\)$"):
        look(write(tmp_path / "e.jsonl", header()))


def test_a_torn_line_is_said(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl", header(), recorded(LOW))
    with trace.open("a") as file:
        file.write('{"t":"slice","st')
    report = look(trace)
    assert found(report) == []
    assert report.notes == ["The last line is torn and was left out: the run is writing it right now, or died there."]


def test_steps_that_were_not_split_are_none_of_its_business(tmp_path: Path) -> None:
    unsplit = StepRecord(0, 0, "unsplit", 8, 8, False, "unsplit")
    report = look(write(tmp_path / "t.jsonl", header(), unsplit))
    assert (found(report), report.checked, report.not_checked) == ([], [], [])
    assert render_report(report).endswith("steps: 1 of run unsplit; rank 0\n\nNo findings; 0 rules looked.")


def test_the_text(tmp_path: Path) -> None:
    records = [recorded(LATE), recorded(LATE, step=1)]
    report = look(write(tmp_path / "t.jsonl", header(), *records), only=["event-after-yield", "long-hold"])
    text = render_report(replace(report, path="t.jsonl", ignored=report.ignored[:2]), width=90)
    assert text == textwrap.dedent("""\
        t.jsonl (dbo_greenlet), steps: 2 of run dbo; rank 0

        warning event-after-yield: run dbo, step 0, rank 0, microbatch 0, slice 1, at
          'layer0.before_combine', operation 4, 20.000 us
            #4 record 'record' on compute, microbatch 0 (slice 1, after 'layer0.before_dispatch')
              stands behind #3 work 'A1' on compute, microbatch 1 (slice 0, before its first
              yield), so comm waits (#5) for the sibling's work too; what microbatch 0 itself put
              on compute ends with #1 ('A1'), before the switch
            8 times: steps 0, 1, rank 0, microbatches 0, 1, layers 0, 1
            why it matters: An event recorded after a yield stands behind the sibling's work, so
              the stream that waits for it waits for that too: correct, and without overlap.
            remedy: put in what is missing: the record of event 1 before the yield, right behind
              #1: dbo_yield_and_switch_from_compute_to_comm does it, and dbo_get_previous_event is
              to be called before the yield

        1 finding, 0 of severity error; 1 rule looked.
        not checked: long-hold: needs GPU times of eager steps (run --gpu-timeline, record --gpu):
          whether the GPU's queue ran dry is not known (2 steps)
        left out: comm-on-compute, unjoined-stream""")


def test_the_json(tmp_path: Path) -> None:
    report = look(write(tmp_path / "t.jsonl", header(), recorded(LATE)), only=["event-after-yield", "long-hold"])
    data = json.loads(json.dumps(report_json(report)))
    (finding,) = data["findings"]
    assert (finding["id"], finding["severity"], finding["count"]) == ("event-after-yield", "warning", 4)
    assert finding["place"] == {
        "run": "dbo", "step": 0, "rank": 0, "microbatch": 0, "slice": 1, "site": "layer0.before_combine", "layer": 0,
        "operation": 4, "at": 20.0,
    }  # fmt: skip
    assert (finding["steps"], finding["ranks"], finding["microbatches"], finding["layers"]) == (
        [0],
        [0],
        [0, 1],
        [0, 1],
    )
    assert data["checked"] == ["event-after-yield"]
    assert data["not_checked"] == [
        {"id": "long-hold", "why": missing(report)["long-hold"], "steps": 1, "steps_checked": 0}
    ]
    assert set(data["ignored"]) == {rule.id for rule in RULES} - {"event-after-yield", "long-hold"}


def test_the_list_of_rules() -> None:
    text = render_rules()
    assert text.count("\n    remedy: ") == len(RULES)
    assert "order-mismatch (error)\n    Ranks that start their communications in different orders" in text
    assert max(map(len, text.splitlines())) <= 100
