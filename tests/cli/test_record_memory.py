"""`dbo-greenlet record --memory`: any program's operations, what is said about them, and the lint that wants them."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from dbo_greenlet.trace import read_trace
from dbo_greenlet.trace.files import TraceFiles
from tests.job.command import arguments, dbo_greenlet, in_process

PROGRAM = Path(__file__).with_name("script_recorded.py")


def test_what_operators_of_a_program_touch(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    out = tmp_path / "rec.jsonl"
    done = in_process("record", "--memory", "--every", 2, "-o", out, "--", sys.executable, PROGRAM, "torch")
    assert done.returncode == 0 and "2 steps, 2 split, 8 slices, 16 operations" in done.stderr
    trace = read_trace(out)
    assert trace.header.settings["trace"]["memory"] is True
    for step in trace.steps.values():
        assert Counter((op.op, op.name) for op in step.ops if op.op == "work") == {
            ("work", "mul"): 2, ("work", "sum"): 2,
        }  # fmt: skip
        assert sum(op.op == "free" for op in step.ops) == 4
    (looked,) = json.loads(in_process("lint", out, "--json").stdout)["reports"]
    assert {"race", "workspace-reused"} <= set(looked["checked"])


def test_without_it_no_operation_is_recorded(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = in_process("record", "-o", tmp_path / "rec.jsonl", "--", sys.executable, PROGRAM, "torch")
    assert done.returncode == 0 and "3 steps, 3 split, 12 slices\n" in done.stderr
    trace = read_trace(tmp_path / "rec.jsonl")
    assert "memory" not in trace.header.settings["trace"]
    assert [step.ops for step in trace.steps.values()] == [[], [], []]


def test_a_program_without_torch_is_told_why_there_are_none(tmp_path: Path) -> None:
    done = in_process("record", "--memory", "-o", tmp_path / "rec", "--", sys.executable, PROGRAM, "steps", 3, 0)
    assert done.returncode == 0 and "3 steps, 3 split, 30 slices\n" in done.stderr
    note = "note: what operations do to memory is not recorded: the program has not imported torch"
    assert done.stderr.count(note) == 1


@pytest.mark.slow
def test_our_own_job_between_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    words = ["run", "--limit", 4, "--max-new-tokens", 2, "--dbo-decode-token-threshold", 2, "--json"]
    done = dbo_greenlet("record", "--memory", "-o", tmp_path / "rec", "--", *arguments(*words))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tokens"]["unexplained"] == 0
    split = [step for step in TraceFiles(tmp_path / "rec") if step.record is not None and step.record.split]
    assert {step.rank for step in split} == {0, 1} and {step.run for step in split} == {"dbo", "thread"}
    for step in split:
        sends = [op for op in step.ops if op.op == "send"]
        # Four layers, a dispatch and a combine each, two microbatches; each with its buffers, where they hold anything.
        assert len(sends) == 16 == sum(op.op == "receive" for op in step.ops)
        assert {way for op in sends for way, *_ in op.memory} == {"read", "write"}
        assert all(op.bytes is not None for op in sends) and any(op.bytes for op in sends)
    (looked,) = json.loads(in_process("lint", tmp_path / "rec", "--json").stdout)["reports"]
    assert {each["id"] for each in looked["findings"]} <= {"cpu-block-before-peer-work"}
