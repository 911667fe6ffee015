"""What operations do to memory, of programs that know nothing of it: as a recorder set up by hand would note it."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch")

import torch

from dbo_greenlet import dbo_maybe_run_recv_hook, dbo_register_recv_hook, dbo_yield, record_notes
from dbo_greenlet.all2all.loopback import Loopback
from dbo_greenlet.batching import VoteSettings
from dbo_greenlet.devices import cpu_device
from dbo_greenlet.errors import MicrobatchFailed
from dbo_greenlet.memory_recorder import MemoryRecorder
from dbo_greenlet.microbatch import make_ubatch_contexts
from dbo_greenlet.runner import Runner
from dbo_greenlet.scheduler import Scheduler
from dbo_greenlet.trace import StepTrace
from dbo_greenlet.yields import dbo_switch_to_compute, dbo_yield_and_switch_from_compute_to_comm
from tests.ranks.rank_pool import RankPool
from tests.runner.tiny import tiny_cache, tiny_model, tiny_step
from tests.trace import process_memory_tasks
from tests.trace.lint_runs import found, look, missing
from tests.trace.process_memory_tasks import by_hand, in_short
from tests.trace.process_traces import steps

CARRIERS = pytest.mark.parametrize("carrier", ["greenlet", "thread"])
NO_JOIN = "needs a step of a runner: what the program did behind this one, and whether that joined its streams"


@pytest.fixture
def with_memory(recorded_to: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DBO_GREENLET_TRACE_MEMORY", "1")
    return recorded_to


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    pool = RankPool(2)
    pool.make_groups("two", 2)
    yield pool
    pool.close()


def kinds(step: StepTrace) -> list[tuple[str, str, int | None, int | None]]:
    return [(each.op, "" if each.op == "free" else each.name, each.ubatch, each.slice) for each in step.ops]


def layers(all_to_all: Any) -> list[Callable[[], Any]]:
    """Two microbatches of a layer whose experts double."""

    def entry(hidden: Any) -> Any:
        ids = torch.tensor([[0], [1]])
        dbo_maybe_run_recv_hook()
        sent = all_to_all.dispatch_send(hidden, ids, torch.ones(2, 1))
        dbo_register_recv_hook(sent.finish_dispatch)
        dbo_yield("layer0.dispatch")
        out = sent.tokens().hidden * 2
        dbo_maybe_run_recv_hook()
        sent.combine_send(out)
        dbo_register_recv_hook(sent.finish_combine)
        dbo_yield("layer0.combine")
        return sent.combined()

    given = [torch.rand(2, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    return [lambda each=each: entry(each) for each in given]


# -- what is noted -----------------------------------------------------------------------------------------------------


@CARRIERS
@pytest.mark.parametrize("streams", [True, False])
def test_a_program_with_a_scheduler_only(with_memory: Path, carrier: str, streams: bool) -> None:
    all_to_all = Loopback(2)
    expected = by_hand(layers, all_to_all, carrier=carrier)
    scheduler = Scheduler(carrier=carrier)
    for _ in range(2):
        contexts = make_ubatch_contexts(2, device=cpu_device()) if streams else None
        result = scheduler.run(layers(all_to_all), contexts)
        assert torch.equal(result.outputs[0], 2 * torch.rand(2, 4, generator=torch.Generator().manual_seed(0)))
    one, two = steps(with_memory)
    assert [in_short(each.ops) for each in (one, two)] == [expected, expected]
    assert {"send", "receive", "work", "free"} <= {each.op for each in one.ops}
    # What a microbatch lets go in its own slice is the same in every run.
    (doubled,) = {each.memory[-1][1] for each in one.ops if (each.name, each.ubatch, each.slice) == ("mul", 0, 1)}
    freed = [each for each in one.ops if each.op == "free" and each.memory[0][1] == doubled and each.ubatch == 0]
    assert [each.stream for each in freed][:1] == ["compute"]
    # The same clock as the slices.
    assert one.record is not None and one.record.begin is not None and one.record.end is not None
    times = [each.at for each in one.ops if each.at is not None]
    assert one.record.begin < min(times) < max(times) < one.record.end


@CARRIERS
@pytest.mark.parametrize("kind", ["gloo", "ll", "ht"])
def test_transports_between_ranks_are_noted_with_their_buffers_and_left_as_they_were(
    ranks: RankPool, kind: str, carrier: str
) -> None:
    for told in ranks.check(process_memory_tasks.over_a_transport, name="two", kind=kind, carrier=carrier):
        assert told["equal"] == [True] * 3 and told["left"] == []
        first, last = told["recorded"]
        assert first == last == told["hand"]
        if kind != "ht":
            assert all(memory for op, *_, memory in first if op == "send")


def test_a_runners_step_ends_with_its_join(with_memory: Path) -> None:
    model = tiny_model()
    runner = Runner(model, kv_cache=tiny_cache(), settings=VoteSettings(2, 2, 2))
    for requests in ([(0, 0, 9), (1, 0, 5)], [(0, 9, 1), (1, 5, 8)]):
        assert runner.step(tiny_step(requests)).schedule is not None
    found_steps = steps(with_memory)
    assert [each.record.split for each in found_steps if each.record] == [True, True]
    for step in found_steps:
        assert kinds(step)[-2:] == [("record", "record", None, None), ("wait", "wait", None, None)]
        assert [each.number for each in step.ops] == list(range(len(step.ops)))
        assert {each.ubatch for each in step.ops if each.op == "work"} == {0, 1}
    (file,) = with_memory.iterdir()
    report = look(file)
    # On a CPU the host reads what it computes.
    assert {each.rule.id for each in report.findings} <= {"cpu-block-before-peer-work"}
    checked = {each.id for each in report.checked}
    assert {"race", "hook-after-use", "workspace-reused", "hook-not-run", "unjoined-stream"} <= checked


def test_a_step_that_is_not_recorded_is_not_looked_at(with_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DBO_GREENLET_TRACE_EVERY", "2")
    modes: list[int] = []

    def entry() -> Any:
        modes.append(torch._C._len_torch_dispatch_stack())
        return torch.ones(2) + 1

    scheduler = Scheduler()
    for _ in range(3):
        scheduler.run([entry, entry])
    outside = torch._C._len_torch_dispatch_stack()
    assert [each - outside for each in modes] == [1, 1, 0, 0, 1, 1]
    assert [[op.name for op in each.ops if op.op == "work"] for each in steps(with_memory)] == [["ones", "add"] * 2] * 2


def test_steps_in_threads_are_noted_apart(with_memory: Path) -> None:
    scheduler, meet = Scheduler(), threading.Barrier(2)

    def run(name: str) -> None:
        def entry() -> None:
            meet.wait(30)
            dbo_yield("a")
            getattr(torch, name)(3)

        scheduler.run([entry])

    threads = [threading.Thread(target=run, args=(name,)) for name in ("zeros", "ones")]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert sorted(tuple(op.name for op in step.ops if op.op == "work") for step in steps(with_memory)) == [
        ("ones",),
        ("zeros",),
    ]


def test_a_step_inside_a_step_is_noted_once(with_memory: Path) -> None:
    scheduler = Scheduler()

    def outer() -> None:
        dbo_yield("a")
        scheduler.run([lambda: torch.zeros(1)])
        torch.ones(1)

    scheduler.run([outer])
    by_slices = {len(step.slices): [op.name for op in step.ops if op.op == "work"] for step in steps(with_memory)}
    assert by_slices == {1: [], 2: ["zeros", "ones"]}


def test_a_step_that_fails_leaves_nothing_behind(with_memory: Path) -> None:
    def fails() -> None:
        torch.ones(2) + 1
        raise RuntimeError("boom")

    device = cpu_device()
    contexts = make_ubatch_contexts(1, device=device)
    scheduler, modes = Scheduler(), torch._C._len_torch_dispatch_stack()
    with pytest.raises(MicrobatchFailed):
        scheduler.run([fails], contexts)
    assert contexts[0].device is device and torch._C._len_torch_dispatch_stack() == modes
    scheduler.run([lambda: torch.zeros(1)], contexts)
    failed, fine = steps(with_memory)
    assert failed.record is not None and failed.record.error is not None
    assert [op.name for op in failed.ops if op.op == "work"] == ["ones", "add"]
    assert [op.name for op in fine.ops if op.op == "work"] == ["zeros"]


def test_a_trace_that_cannot_be_written_is_the_end_of_the_noting(
    with_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DBO_GREENLET_TRACE", str(tmp_path / "file" / "folder"))
    scheduler = Scheduler()
    scheduler.run(layers(Loopback(2)))
    assert scheduler.recording is not None and scheduler.recording.problem is not None
    ((memory,),) = scheduler.recording._memories.values()
    assert memory.program.operations and not memory.program.noting


def test_events_of_a_library_do_not_stand_among_the_operations_twice(with_memory: Path) -> None:
    from dbo_greenlet.yields import dbo_get_previous_event

    def entry() -> None:
        dbo_get_previous_event(lambda: object())
        torch.zeros(1)

    contexts = make_ubatch_contexts(1, device=cpu_device())
    scheduler = Scheduler()
    scheduler.run([entry], contexts)
    assert "event_captured" not in vars(scheduler.recording.take_recorder()), "and the recorder is as it was"
    (only,) = steps(with_memory)
    assert [(op.number, op.op) for op in only.ops] == [(0, "work"), (1, "free")]


# -- what is not -------------------------------------------------------------------------------------------------------


def test_a_program_that_notes_it_itself_is_left_to_it(
    with_memory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    monkeypatch.setenv(record_notes.FOLDER, str(notes))
    memory = MemoryRecorder()
    contexts = make_ubatch_contexts(1, device=memory.device)
    scheduler = Scheduler(instruments=[memory])
    for _ in range(2):
        scheduler.run([lambda: torch.zeros(1)], contexts)
        assert [each.name for each in memory.records(step=0) if each.op == "work"] == ["zeros"]
    assert [step.ops for step in steps(with_memory)] == [[], []]
    (note,) = record_notes.read(notes)["partial"]
    assert note.endswith("the program notes it itself, or its device is a virtual one")


def test_a_fault_in_it_does_not_reach_the_step(
    with_memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "dbo_greenlet.process_memory", None)
    scheduler = Scheduler()
    with caplog.at_level(logging.WARNING, logger="dbo_greenlet"):
        for _ in range(2):
            assert scheduler.run([lambda: 1]).outputs == [1]
    assert len(caplog.messages) == 1 and "The trace of this process ends here" in caplog.messages[0]


# -- what the lint makes of it -----------------------------------------------------------------------------------------


def lets_go_at_the_end() -> None:
    """The comm stream is still at rows that are given back when the step is over."""
    rows = torch.ones(64)
    dbo_yield_and_switch_from_compute_to_comm("layer0.before_dispatch")
    rows.add_(1)
    dbo_switch_to_compute()


def test_of_a_scheduler_alone_what_joins_its_streams_is_not_known(with_memory: Path) -> None:
    """A program joins them by means of its own, so that a join that was not seen is no finding."""
    contexts = make_ubatch_contexts(2, device=cpu_device())
    Scheduler().run([lets_go_at_the_end] * 2, contexts)
    steps(with_memory)
    (file,) = with_memory.iterdir()
    report = look(file, only=["unjoined-stream", "cross-stream-free"])
    assert found(report) == []
    assert {rule: why.startswith(NO_JOIN) for rule, why in missing(report).items()} == {
        "unjoined-stream": True,
        "cross-stream-free": True,
    }
