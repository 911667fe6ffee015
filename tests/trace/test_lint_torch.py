"""The lint on steps of real tensors, with what they do to memory recorded as `dbo-greenlet run --memory` records it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dbo_greenlet.memory_recorder import MemoryRecorder
from dbo_greenlet.microbatch import make_ubatch_contexts
from dbo_greenlet.scheduler import Scheduler
from dbo_greenlet.trace import StepRecorder
from dbo_greenlet.trace.records import OpRecord
from dbo_greenlet.yields import (
    dbo_switch_to_compute,
    dbo_switch_to_compute_sync,
    dbo_yield,
    dbo_yield_and_switch_from_compute_to_comm,
)
from tests.trace.lint_runs import STEP, found, header, join, look, write


def recorded(*entries: Callable[[], Any]) -> list[Any]:
    """The records of a step on the CPU, whose streams are names."""
    recorder, memory = StepRecorder(), MemoryRecorder()
    contexts = make_ubatch_contexts(len(entries), device=memory.device)
    Scheduler(instruments=[recorder, memory]).run(list(entries), contexts)
    join(memory.device, contexts[0])
    operations = memory.records(step=0, origin_ns=recorder.origin_ns)
    return [*(each for each in recorder.records(step=0) if not isinstance(each, OpRecord)), *operations, STEP]


def lets_go(sync: bool) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Rows are sent on the comm stream and let go; with `sync` the compute stream waits first."""

    def entry() -> tuple[torch.Tensor, ...]:
        rows = torch.ones(64)
        hidden = rows + 1
        del rows
        dbo_yield_and_switch_from_compute_to_comm("layer0.before_dispatch")
        sent = hidden * 2
        (dbo_switch_to_compute_sync if sync else dbo_switch_to_compute)()
        del hidden
        shared = torch.zeros(64)
        dbo_switch_to_compute_sync()
        # What the comm stream made is kept: given back to it, it would have to wait for the sum.
        return shared + sent, sent

    return entry


@pytest.mark.parametrize("sync", [False, True])
def test_rows_that_are_let_go_while_they_are_sent(tmp_path: Path, sync: bool) -> None:
    trace = write(tmp_path / "t.jsonl", header(device="cpu"), recorded(lets_go(sync), lets_go(sync)))
    report = look(trace, only=["cross-stream-free"])
    expected = [] if sync else [("cross-stream-free", 2, 0, 0, 0, 1, "")]
    assert found(report) == expected and len(report.checked) == 1
    if not sync:
        what = report.findings[0].what
        assert "is used on comm (" in what and "'zeros' on compute may get it" in what


@pytest.mark.parametrize("own", [False, True])
def test_a_workspace_for_both(tmp_path: Path, own: bool) -> None:
    """With a workspace of its own for each it is right."""
    shared = torch.zeros(64)

    def entry() -> torch.Tensor:
        workspace = torch.zeros(64) if own else shared
        workspace.fill_(1.0)
        dbo_yield("layer0.attention")
        return workspace + 1

    report = look(write(tmp_path / "t.jsonl", header(device="cpu"), recorded(entry, entry)))
    assert found(report) == ([] if own else [("workspace-reused", 1, 0, 0, 0, 1, "")])
