"""A run that records what operations do to memory: two ranks over gloo, and the same tokens as without."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from dbo_greenlet.trace import StepTrace, read_trace
from tests.job.command import dbo_greenlet, write_prompts


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[StepTrace]:
    """The split steps of a run whose report says that all is well."""
    folder = tmp_path_factory.mktemp("memory")
    prompts = write_prompts(folder / "prompts.jsonl", [0] * 8)
    trace = folder / "trace.jsonl"
    options = ["--dbo-decode-token-threshold", 4, "--max-new-tokens", 2, "--memory", "--trace", trace, "--json"]
    done = dbo_greenlet("run", "--prompts", prompts, *options)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["tokens"]["unexplained"] == 0 and report["hand_off_us"]["memory"] is True
    assert report["hand_off_us"]["greenlet"] is None
    return [step for step in read_trace(trace).steps.values() if step.record is not None and step.record.split]


def test_every_kind_of_operation_is_there(steps: list[StepTrace]) -> None:
    assert len(steps) >= 4 and {step.run for step in steps} == {"dbo", "thread"}
    for step in steps:
        kinds = Counter(op.op for op in step.ops)
        # Four layers, a dispatch and a combine each, two microbatches; the runner's join of the streams.
        assert (kinds["send"], kinds["receive"], kinds["record"], kinds["wait"]) == (16, 16, 1, 1)
        assert kinds["work"] > 500 and kinds["free"] > 500
        assert [op.number for op in step.ops] == list(range(len(step.ops)))


def test_a_receive_belongs_to_its_send_and_both_to_the_window(steps: list[StepTrace]) -> None:
    for step in steps:
        ops = step.ops
        for op in ops:
            if op.op == "receive":
                sent = ops[op.of]
                assert sent.op == "send" and sent.ubatch == (op.ubatch if op.owner is None else op.owner)
                assert sent.memory == op.memory and sent.at < op.at
        # A rank's messages are what its dispatches and combines have sent, in the same order.
        assert [op.bytes for op in ops if op.op == "send"] == [window.bytes for window in step.receives]


def test_between_two_frees_of_an_address_it_was_touched(steps: list[StepTrace]) -> None:
    for step in steps:
        free: set[int] = set()
        for op in step.ops:
            for _, address, *_ in op.memory:
                if op.op == "free":
                    # What `empty` made may have been filled by gloo, as the counts of the exact sizes are.
                    assert address not in free or "made by empty" in op.name, op
                    free.add(address)
                else:
                    free.discard(address)
        assert len(free) > 20


def test_slices_and_times_agree(steps: list[StepTrace]) -> None:
    for step in steps:
        spans = {(each.ubatch, each.slice): (each.begin, each.end) for each in step.slices}
        for op in step.ops:
            if op.ubatch is not None and op.at is not None:
                begin, end = spans[op.ubatch, op.slice]
                assert begin <= op.at <= end
