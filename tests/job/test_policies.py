"""A job under another policy than round robin: two ranks, from the prompts to the trace, its picture and its replay."""

from __future__ import annotations

import json
from pathlib import Path

from dbo_greenlet.schedule import Schedule
from dbo_greenlet.trace import read_trace
from tests.job.command import in_process

# Four layers with experts: eight yields, the second microbatch two of them behind.
OFFSET = (0, 0) + (1, 0) * 7 + (1, 1)


def test_a_run_under_a_phase_offset_is_recorded_shown_and_replayed(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    words = ["--policy", "phase_offset:2", "--limit", 4, "--max-new-tokens", 4, "--dbo-decode-token-threshold", 2]
    done = in_process("run", *words, "--strict", "--trace", trace, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["settings"]["policy"] == "phase_offset:2"
    # Law 4 and law 6: the tokens of the unsplit run, and the same order and bits on both ranks and with both carriers.
    assert report["tokens"]["equal"] and report["tokens"]["generated"] == 16
    assert report["steps"]["split"] == 4 and report["yields"]["per_microbatch"] == [8]
    assert report["schedule_hash"]["agreed"] and len(report["schedule_hash"]["distinct"]) == 1
    assert report["carriers"] == {"steps": 4, "replayed": 0, "differing": [], "missing": []}

    recorded = read_trace(trace)
    split = [step.record for step in recorded.steps.values() if step.record is not None and step.record.split]
    # Two ranks, two carriers.
    assert len(split) == 16
    assert {Schedule.decode(record.schedule).decisions for record in split} == {OFFSET}
    assert recorded.header.settings["policy"] == "phase_offset:2"

    shown = in_process("show", trace)
    assert shown.returncode == 0, shown.stderr
    assert "Comp: |-A0_0-A1_0-||-MLP_1-||-S_1-MLP_0-||-S_0-A0_1-A1_1-|" in shown.stdout.splitlines()

    replayed = in_process("replay", trace)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert replayed.stdout.splitlines()[1:] == [
        "Decisions: met on every rank and step.",
        "Output checksums: met on every rank and step.",
        "Tokens: equal to the recorded ones.",
    ]
