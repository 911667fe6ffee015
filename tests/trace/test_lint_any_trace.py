"""The lint on traces that no run leaves: it says something of each, and never breaks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from dbo_greenlet.errors import TraceFileError
from dbo_greenlet.testing.layer_programs import high_throughput
from dbo_greenlet.trace.lint import RULES
from dbo_greenlet.trace.lint.text import render_report, report_json
from dbo_greenlet.trace.records import OpRecord, Record, StepRecord
from tests.trace.lint_runs import header, look, recorded, write
from tests.trace.random_traces import traces

KINDS = ["record", "wait", "send", "receive", "work", "host_wait", "free", "hold", "of a later version"]
maybe = st.none() | st.integers(0, 2)
ways, buffers, ends = st.sampled_from(["read", "write"]), st.sampled_from([64, "rows"]), st.sampled_from([None, 8, 12])
memory = st.lists(
    st.tuples(ways, buffers, st.integers(0, 8), ends)
    .map(list)
    .flatmap(lambda entry: st.sampled_from([entry, [*entry, True], [*entry, False, 16, 4]])),
    max_size=2,
)  # fmt: skip


@st.composite
def operations(draw: Any, step: StepRecord) -> list[Record]:
    """Any kinds in any order, waits for what is no event, receives of what was not sent."""
    return [
        OpRecord(
            step.step,
            step.rank,
            step.run,
            number,
            draw(st.sampled_from(KINDS)),
            draw(maybe),
            draw(maybe),
            draw(st.sampled_from(["compute", "comm", None])),
            draw(st.none() | st.floats(0, 100)),
            draw(st.sampled_from(["", "A", "dispatch"])),
            draw(maybe),
            draw(st.none() | st.integers(0, 9)),
            draw(maybe),
            memory=draw(memory),
        )
        for number in range(draw(st.integers(0, 9)))
    ]


def in_order(record: Any) -> tuple[str, int]:
    return getattr(record, "run", ""), getattr(record, "step", -1)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_rule_looks_or_says_why_not(tmp_path: Path, data: st.DataObject) -> None:
    records = data.draw(traces())
    records = [each for each in records if not isinstance(each, OpRecord)]
    for each in list(records):
        if isinstance(each, StepRecord):
            records += data.draw(operations(each))
    assume(any(hasattr(each, "step") for each in records))
    report = look(write(tmp_path / "t.jsonl", *sorted(records, key=in_order)))
    assert render_report(report) and report_json(report)
    spoke = {rule.id for rule in report.checked} | {each.rule.id for each in report.not_checked}
    split = any(isinstance(each, StepRecord) and len(each.slices) > 1 and not each.error for each in records)
    if split and not any(getattr(each, "failed", False) for each in records):
        # Of every step that succeeded these can be asked.
        assert {"race", "hook-after-use", "cross-stream-free", "unjoined-stream", "event-after-yield"} <= spoke
    assert spoke <= {rule.id for rule in RULES}


@pytest.mark.parametrize(
    "entry",
    [
        "read",
        ["read", "rows"],
        ["reads", "rows", 0, None],
        ["read", None, 0, None],
        ["read", "rows", None, 8],
        ["read", "rows", 0, 8, 1],
        ["read", "rows", 0, 8, False, 16, None],
        ["read", "rows", 0, 8, False, 16, 4, 2],
    ],
)
def test_memory_that_says_nothing_sensible(tmp_path: Path, entry: Any) -> None:
    records = recorded(high_throughput(1, numerics=False), step=4)
    place = next(n for n, each in enumerate(records) if isinstance(each, OpRecord) and each.number == 2)
    records[place] = replace(records[place], memory=[entry])
    trace = write(tmp_path / "t.jsonl", header(), records)
    with pytest.raises(TraceFileError) as raised:
        look(trace)
    assert str(raised.value) == (
        f"{trace}: operation 2 of step 4, run 'dbo', rank 0: what it says about memory is {entry!r}, expected "
        '["read" or "write", buffer, begin, end] and what `op_records` puts behind that'
    )
