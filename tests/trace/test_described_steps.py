"""What runners tell the trace of their process about steps: of whom each step is, when it is over, how it was run."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from dbo_greenlet import dbo_yield
from dbo_greenlet.devices import cpu_device
from dbo_greenlet.devices.virtual import VirtualDevice
from dbo_greenlet.microbatch import UBatchContext, make_ubatch_contexts
from dbo_greenlet.scheduler import Scheduler
from dbo_greenlet.trace import process_trace as module
from dbo_greenlet.trace import read_trace
from tests.trace.process_traces import details, model, steps


def test_what_a_runner_tells_is_in_the_step(recorded_to: Path) -> None:
    scheduler = Scheduler()
    origin = scheduler.recording.origin_ns
    with scheduler.recording.describe(details(voted=(origin + 5_000, origin + 9_000))):
        scheduler.run([model, model])
    with scheduler.recording.unsplit(details(split=False, tokens=5), timed=True):
        pass
    scheduler.run([model, model])  # of somebody who tells nothing
    told, unsplit, plain = steps(recorded_to)
    assert told.record is not None and unsplit.record is not None and plain.record is not None
    assert (told.rank, told.record.tokens, told.record.padded, told.record.votes) == (3, 24, 32, [[1, 2]])
    assert (told.record.vote_begin, told.record.vote_end, told.record.slices) == (5.0, 9.0, details().slices)
    assert (unsplit.record.split, unsplit.record.reason, unsplit.record.tokens, unsplit.slices) == (
        False,
        "idle",
        5,
        [],
    )
    assert unsplit.record.slices == [[0, 24, 0, 2]], "says how many requests it had"
    assert told.record.end is not None and unsplit.record.begin is not None and unsplit.record.end is not None
    assert told.record.end < unsplit.record.begin < unsplit.record.end
    assert (plain.record.tokens, plain.record.vote_begin, plain.step) == (0, None, 2)


def test_kinds_of_steps_are_counted_apart(recorded_to: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DBO_GREENLET_TRACE_EVERY", "3")
    scheduler = Scheduler()
    for number in range(9):
        told = details(split=number % 4 == 2)
        if told.split:
            with scheduler.recording.describe(told):
                scheduler.run([model, model])
        else:
            with scheduler.recording.unsplit(told, timed=False):
                pass
    # Split are 2 and 6, unsplit the others: each kind's first and every third.
    assert [(each.step, each.record.split) for each in steps(recorded_to) if each.record] == [
        (0, False), (2, True), (4, False), (8, False)
    ]  # fmt: skip


def test_captures_are_counted_apart_and_warm_ups_not_at_all(recorded_to: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DBO_GREENLET_TRACE_EVERY", "2")
    scheduler = Scheduler()
    for told in (None, details(captured=True, tokens=1), None, details(tokens=2)):
        with scheduler.recording.describe(told):
            scheduler.run([model, model])
    assert [(each.step, each.record.tokens) for each in steps(recorded_to) if each.record] == [(0, 1), (1, 2)]


def test_what_was_told_of_a_step_that_never_ran_is_not_said_of_the_next(recorded_to: Path) -> None:
    scheduler = Scheduler()
    with pytest.raises(ValueError, match="on the way"), scheduler.recording.describe(details(tokens=1)):
        raise ValueError("on the way to the scheduler")
    scheduler.run([model, model])
    with scheduler.recording.describe(details(tokens=2)):
        scheduler.run([model] * 3)  # somebody else's
    with scheduler.recording.describe(details(tokens=3)):
        scheduler.run([model, model])
    records = [each.record for each in steps(recorded_to)]
    assert [(each.tokens, each.slices, len(each.yields)) for each in records if each] == [
        (0, [], 2), (0, [], 3), (3, details().slices, 2)
    ]  # fmt: skip


def test_an_unsplit_step_that_fails_is_written(recorded_to: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DBO_GREENLET_TRACE_EVERY", "2")
    scheduler = Scheduler()
    for number in range(2):
        with (
            pytest.raises(KeyError) if number else nullcontext(),
            scheduler.recording.unsplit(details(split=False), timed=False),
        ):
            if number:
                raise KeyError("no such layer")
    first, second = [each.record for each in steps(recorded_to)]
    assert first is not None and second is not None
    assert (first.error, second.error) == (None, "KeyError: 'no such layer'")
    assert (first.begin, first.end) == (None, None), "nobody knows when the device was done"


def test_a_rank_that_is_told_early_is_that_of_the_steps_before_it_is_described(recorded_to: Path) -> None:
    scheduler = Scheduler()
    scheduler.recording.rank_is(3, 8)
    scheduler.run([model, model])
    with scheduler.recording.describe(details()):
        scheduler.run([model, model])
    module.end_process_trace()
    (file,) = recorded_to.iterdir()
    trace = read_trace(file)
    assert file.name.startswith("dbo-rank3-") and trace.headers[3].world == 8
    assert [each.rank for each in trace.steps.values()] == [3, 3]


def test_without_a_group_the_rank_is_found_out(recorded_to: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    scheduler = Scheduler()
    with scheduler.recording.describe(dataclasses.replace(details(), rank=None, world=None)):
        scheduler.run([model, model])
    (only,) = steps(recorded_to)
    assert only.rank == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_writes_its_steps_when_they_are_over(recorded_to: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("script_forked_steps.py"))],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("child: own device True, files 2\n", "")


def joining(scheduler: Scheduler, contexts: list[UBatchContext]) -> None:
    """A step as a runner runs it."""
    with scheduler.recording.describe(details()):
        scheduler.run([model, model], contexts)
        device = contexts[0].device
        event = device.new_event()
        device.record(event, contexts[0].comm_stream)
        device.wait(contexts[0].compute_stream, event)


def test_events_up_to_the_join_are_recorded_of_a_runners_steps(recorded_to: Path) -> None:
    device = cpu_device()
    contexts = make_ubatch_contexts(2, device=device)
    scheduler = Scheduler()
    joining(scheduler, contexts)
    assert all(each.device is device for each in contexts), "the contexts have their own device again"
    scheduler.run([model, model], contexts)
    told, plain = steps(recorded_to)
    assert [(op.op, op.stream, op.ubatch, op.of) for op in told.ops] == [
        ("record", "comm", None, None), ("wait", "compute", None, 0)
    ]  # fmt: skip
    assert [each.stream for each in told.slices] == ["compute"] * 10
    assert plain.ops == [], "who joins the streams of this one, nobody knows"


def test_a_failed_step_is_written_at_once(recorded_to: Path) -> None:
    def failing() -> None:
        dbo_yield("layer0.dispatch")
        raise ValueError("broke")

    contexts = make_ubatch_contexts(2, device=cpu_device())
    device = contexts[0].device
    scheduler = Scheduler()
    with scheduler.recording.describe(details()):
        with pytest.raises(RuntimeError, match="broke"):
            scheduler.run([failing, failing], contexts)
        (file,) = recorded_to.iterdir()
        (failed,) = read_trace(file).steps.values()
    assert failed.record is not None and "ValueError: broke" in str(failed.record.error)
    assert contexts[0].device is device
    scheduler.run([model, model], contexts)
    assert [each.record.error is None for each in steps(recorded_to) if each.record] == [False, True]


def test_a_step_that_is_not_over_is_written_with_the_next_or_the_last(recorded_to: Path) -> None:
    scheduler = Scheduler()
    blocks = [scheduler.recording.describe(details(tokens=tokens)) for tokens in (1, 2)]
    for block in blocks:
        block.__enter__()
        scheduler.run([model, model])
    (file,) = recorded_to.iterdir()
    assert len(read_trace(file).steps) == 1
    assert [each.record.tokens for each in steps(recorded_to) if each.record] == [1, 2]


def test_a_runner_is_recorded(recorded_to: Path) -> None:
    pytest.importorskip("torch")
    from dbo_greenlet.batching import VoteSettings
    from dbo_greenlet.runner import Runner
    from tests.runner.tiny import tiny_cache, tiny_model, tiny_step

    runner = Runner(tiny_model(), kv_cache=tiny_cache(), settings=VoteSettings(2, 4, 4))
    batch = tiny_step([(row, 0, 1) for row in range(6)])
    out = runner.step(batch)
    runner.step(batch, mode="sequential")  # not run by a scheduler, and no other step is to be taken for it
    runner.step(batch, mode="never")
    split, unsplit = steps(recorded_to)
    assert split.record is not None and unsplit.record is not None and out.schedule is not None
    assert (split.record.hash, split.record.tokens, split.record.split) == (out.schedule.hash, 6, True)
    assert split.record.slices == [[0, 3, 0, 3], [3, 6, 3, 6]]
    assert [op.op for op in split.ops][-2:] == ["record", "wait"]
    assert (unsplit.record.split, unsplit.record.tokens, unsplit.record.slices) == (False, 6, [[0, 6, 0, 6]])
    assert unsplit.record.begin is not None and unsplit.record.begin < (unsplit.record.end or 0)
    assert split.record.end is not None and split.record.end < unsplit.record.begin


class Ranks:
    """A group of one that says it is the third of four."""

    rank, world_size = 2, 4

    def exchange(self, row: Any) -> Any:
        return row[None]

    def announce_failure(self, microbatch: int | None, error: BaseException) -> None:
        raise error


def test_a_capture_is_recorded_as_one_and_its_warm_up_is_not(recorded_to: Path) -> None:
    pytest.importorskip("torch")
    from dbo_greenlet.batching import split_step
    from dbo_greenlet.runner_recording import recorded
    from tests.runner.tiny import tiny_step

    device = VirtualDevice(launch=1)
    contexts = make_ubatch_contexts(2, device=device)
    scheduler = Scheduler()
    step = tiny_step([(row, 0, 1) for row in range(6)])

    def run() -> None:
        told = recorded(scheduler.recording, step, split_step(step, 2), None, group=Ranks(), device=device, voted=None)
        with told:
            scheduler.run([model, model], contexts)

    run()
    device.capture(run)
    (only,) = steps(recorded_to)
    assert only.record is not None and (only.rank, only.step) == (2, 0)
    assert (only.record.execution, only.record.tokens, only.record.split) == ("captured", 6, True)
    assert only.record.slices == [[0, 3, 0, 3], [3, 6, 3, 6]] and len(only.slices) == 10


def test_steps_in_turn_take_no_place_in_every(recorded_to: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from dbo_greenlet.batching import VoteSettings
    from dbo_greenlet.runner import Runner
    from tests.runner.tiny import tiny_cache, tiny_model, tiny_step

    monkeypatch.setenv("DBO_GREENLET_TRACE_EVERY", "2")
    runner = Runner(tiny_model(), kv_cache=tiny_cache(), settings=VoteSettings(2, 4, 4))
    for tokens in range(6, 9):
        batch = tiny_step([(row, 0, 1) for row in range(tokens)])
        runner.step(batch, mode="sequential")
        runner.step(batch)
    assert [each.record.tokens for each in steps(recorded_to) if each.record] == [6, 8]


def test_a_runner_tells_its_rank_before_any_step(recorded_to: Path) -> None:
    pytest.importorskip("torch")
    from dbo_greenlet.runner import Runner

    Runner(lambda step: step.positions, group=Ranks())
    Scheduler().run([model, model])
    (only,) = steps(recorded_to)
    assert only.rank == 2
