"""The memory recorder on the CPU: what operations touch, what is freed when and by whom; and it changes nothing."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch")

import torch

from dbo_greenlet import Scheduler, dbo_maybe_run_recv_hook, dbo_register_recv_hook, dbo_yield
from dbo_greenlet.all2all.loopback import Loopback
from dbo_greenlet.devices import CpuDevice
from dbo_greenlet.errors import MicrobatchFailed
from dbo_greenlet.memory_recorder import MemoryRecorder
from dbo_greenlet.microbatch import make_ubatch_contexts
from dbo_greenlet.trace import OpRecord
from dbo_greenlet.trace.schema import to_json

CARRIERS = pytest.mark.parametrize("carrier", ["greenlet", "thread"])


def run(memory: MemoryRecorder, *entries: Callable[[], Any], carrier: str = "greenlet") -> list[OpRecord]:
    contexts = make_ubatch_contexts(len(entries), device=memory.device)
    with torch.inference_mode():
        Scheduler(carrier=carrier, instruments=[memory]).run(entries, contexts)
    return memory.records(step=0)


def short(records: list[OpRecord]) -> list[tuple[Any, ...]]:
    """(op, what, microbatch, slice, stream) of each."""
    return [
        (r.op, r.name.partition("made by ")[2].rstrip(")") if r.op == "free" else r.name, r.ubatch, r.slice, r.stream)
        for r in records
    ]


@CARRIERS
def test_what_is_read_written_and_freed(carrier: str) -> None:
    given = torch.ones(4, 8)
    kept: list[Any] = []

    def entry() -> None:
        doubled = given * 2
        dbo_yield("a")
        total = doubled[1:].sum()
        del doubled
        dbo_yield("b")
        kept.append(total)

    records = run(MemoryRecorder(), entry, carrier=carrier)
    assert short(records) == [
        ("work", "mul", 0, 0, "compute"),
        ("work", "sum", 0, 1, "compute"),
        ("free", "mul", 0, 1, "compute"),
    ]
    mul, total, free = records
    doubled = mul.memory[1][1]
    assert mul.memory == [["read", given.data_ptr(), 0, 128], ["write", doubled, 0, 128]]
    assert total.memory == [["read", doubled, 32, 128], ["write", kept[0].data_ptr(), 0, 4]]
    assert free.memory == [["write", doubled, 0, 128]]
    times = [r.at for r in records if r.at is not None]
    assert len(times) == 3 and times == sorted(times)


@CARRIERS
def test_memory_belongs_to_the_stream_that_was_current_when_it_was_made(carrier: str) -> None:
    def entry() -> None:
        context = contexts[0]
        on_compute = torch.empty(3)
        context.switch_to_comm_sync()
        on_comm = torch.zeros(3)
        on_compute.copy_(on_comm)
        context.switch_to_compute_sync()
        del on_comm, on_compute

    memory = MemoryRecorder()
    contexts = make_ubatch_contexts(1, device=memory.device)
    Scheduler(carrier=carrier, instruments=[memory]).run([entry], contexts)
    # What joins the streams behind the step is part of it.
    memory.device.record(contexts[0].gpu_comm_done_event, contexts[0].comm_stream)
    assert [(op, what, stream) for op, what, _, _, stream in short(memory.records(step=0))] == [
        ("record", "record", "compute"),
        ("wait", "wait", "comm"),
        ("work", "zeros", "comm"),
        ("work", "copy_", "comm"),
        ("record", "record", "comm"),
        ("wait", "wait", "compute"),
        ("free", "zeros", "comm"),
        ("free", "empty", "compute"),
        ("record", "record", "comm"),
    ]


def test_the_streams_of_another_steps_contexts_have_the_same_names() -> None:
    memory = MemoryRecorder()

    def entry() -> None:
        contexts[0].switch_to_comm_sync()
        contexts[0].switch_to_compute()

    for _ in range(2):  # each with a comm stream of its own
        contexts = make_ubatch_contexts(1, device=memory.device)
        Scheduler(instruments=[memory]).run([entry], contexts)
        assert [r.stream for r in memory.records(step=0)] == ["compute", "comm"]


def test_memory_that_was_made_before_the_step_has_no_stream() -> None:
    given = [torch.ones(4)]

    def entry() -> None:
        given[0].add_(1)
        given.clear()

    assert short(run(MemoryRecorder(), entry)) == [("work", "add_", 0, 0, "compute"), ("free", "", 0, 0, None)]


def test_a_view_keeps_memory_and_its_end_frees_it() -> None:
    def entry() -> None:
        whole = torch.zeros(4, 8)
        column = whole.t()[3]
        del whole
        dbo_yield("only the view is left")
        column.add_(1)
        del column

    records = run(MemoryRecorder(), entry)
    assert short(records) == [
        ("work", "zeros", 0, 0, "compute"),
        ("work", "add_", 0, 1, "compute"),
        ("free", "zeros", 0, 1, "compute"),
    ]
    assert [access[2:] for access in records[1].memory] == [[12, 112, False, 32, 4]] * 2


def test_a_free_is_charged_to_who_runs_when_it_comes() -> None:
    """Memory in a reference cycle goes when the collector comes, whoever happens to run then."""

    class Holder:
        def __init__(self) -> None:
            self.myself, self.tensor = self, torch.zeros(5)

    def leaves_a_cycle() -> None:
        Holder()
        dbo_yield("a")
        dbo_yield("b")

    def collects() -> None:
        dbo_yield("a")
        gc.collect()
        dbo_yield("b")

    gc.collect()
    gc.disable()
    try:
        records = run(MemoryRecorder(), leaves_a_cycle, collects)
    finally:
        gc.enable()
    assert short(records) == [("work", "zeros", 0, 0, "compute"), ("free", "zeros", 1, 1, "compute")]


def test_memory_that_is_used_again_has_the_same_address() -> None:
    memory, seen = MemoryRecorder(), []

    def entry() -> None:
        for _ in range(20):
            seen.append(torch.zeros(100_000).data_ptr())

    records = run(memory, entry)
    assert [r.op for r in records] == ["work", "free"] * 20
    assert [r.memory[0][1] for r in records[::2]] == [r.memory[0][1] for r in records[1::2]] == seen
    # And nothing is left of what is gone.
    assert not memory._memory._watched and not memory._memory._all and not memory._memory._made_on


def test_memory_that_is_resized_lies_elsewhere() -> None:
    seen: list[int] = []

    def entry() -> None:
        moved = torch.ones(4)
        seen.append(moved.data_ptr())
        moved.resize_(100_000)
        seen.append(moved.data_ptr())
        moved.fill_(1.0)

    records = run(MemoryRecorder(), entry)
    assert short(records) == [
        ("work", "ones", 0, 0, "compute"),
        ("free", "ones", 0, 0, "compute"),
        ("work", "fill_", 0, 0, "compute"),
        ("free", "resize_", 0, 0, "compute"),
    ]
    old, new = ["write", seen[0], 0, 16], ["write", seen[1], 0, 400_000]
    assert [record.memory for record in records] == [[old], [old], [new], [new]]


def test_memory_that_is_resized_to_nothing_is_freed() -> None:
    def entry() -> None:
        tensor = torch.ones(4)
        tensor.untyped_storage().resize_(0)  # no operator: seen when somebody asks where the tensor lies
        assert memory._memory.find(tensor) is None
        torch.zeros(1)

    memory = MemoryRecorder()
    assert [(op, name) for op, name, *_ in short(run(memory, entry))] == [
        ("work", "ones"), ("free", "ones"), ("work", "zeros"), ("free", "zeros")
    ]  # fmt: skip
    assert not memory._memory._watched and not memory._memory._all


def test_nothing_is_kept_alive() -> None:
    gone: list[weakref.ref[Any]] = []

    def entry() -> None:
        gone.append(weakref.ref((torch.ones(3) + 1).untyped_storage()))
        assert gone[0]() is None

    run(MemoryRecorder(), entry)
    assert len(gone) == 1


def test_memory_of_others_is_not_freed() -> None:
    """A buffer that a library owns, which tensors only look into."""
    buffer = np.ones(16, dtype=np.float32)

    def entry() -> None:
        for _ in range(2):
            torch.from_numpy(buffer).add_(1)

    records = run(MemoryRecorder(), entry)
    assert [r.op for r in records] == ["work", "work"]
    assert {access[1] for r in records for access in r.memory} == {buffer.ctypes.data}


@CARRIERS
def test_a_step_that_fails_leaves_no_mode_and_the_next_is_recorded(carrier: str) -> None:
    def fails() -> None:
        torch.ones(2) + 1
        raise RuntimeError("boom")

    memory = MemoryRecorder()
    modes = torch._C._len_torch_dispatch_stack()
    with pytest.raises(MicrobatchFailed):
        run(memory, fails, carrier=carrier)
    assert torch._C._len_torch_dispatch_stack() == modes
    assert [r.name for r in memory.records(step=0) if r.op == "work"] == ["ones", "add"]
    assert [r.name for r in run(memory, lambda: torch.zeros(1), carrier=carrier) if r.op == "work"] == ["zeros"]


def test_behind_a_step_that_failed_nothing_is_noted() -> None:
    def fails() -> None:
        torch.ones(2) + 1
        raise RuntimeError("boom")

    memory = MemoryRecorder()
    with pytest.raises(MicrobatchFailed):
        run(memory, fails)
    for _ in range(3):
        memory.device.record(memory.device.new_event(), memory.device.current_stream())
    assert [r.name for r in memory.records(step=0) if r.op != "free"] == ["ones", "add"]
    assert memory.device._events == {}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_tensor_that_cannot_be_noted_ends_the_noting_and_not_the_step(caplog: pytest.LogCaptureFixture) -> None:
    def strange() -> int:
        kept = torch.zeros(2)
        torch.nested.nested_tensor([torch.zeros(3), torch.zeros(2)]) + 1
        del kept
        torch.ones(1)
        return 1

    memory = MemoryRecorder()
    with caplog.at_level(logging.WARNING, logger="dbo_greenlet"):
        for _ in range(2):
            names = [(r.op, r.name) for r in run(memory, strange)]
            assert ("work", "zeros") in names and ("work", "ones") not in names
            assert not any(op == "free" and "2, made by zeros" in name for op, name in names)
    assert len(caplog.messages) == 1 and "whose tensors cannot be noted" in caplog.messages[0]
    assert [r.name for r in run(memory, lambda: torch.ones(1)) if r.op == "work"] == ["ones"]


class TorchStream:
    """What `record_stream` gets on CUDA: a stream of torch's."""

    stream_id, device_index, device_type = 7, 0, 1


class OwnStream:
    """The device's own object for it."""

    name, address = "copies", (7, 0, 1)


def test_memory_that_is_held_for_a_stream() -> None:
    memory, tensor = MemoryRecorder(CpuDevice()), torch.zeros(6)
    memory.device.inner._known = {0: OwnStream()}  # as a CUDA device keeps its streams
    hold = torch.ops.aten.record_stream.default  # no operator of CPU tensors, so it is not called

    def entry() -> None:
        memory._accesses._note(hold, (tensor[2:4], TorchStream()), {}, None)

    (record,) = run(memory, entry)
    assert (record.op, record.stream, record.memory) == ("hold", "copies", [["read", tensor.data_ptr(), 0, 24]])


def test_between_steps_nothing_is_noted() -> None:
    memory = MemoryRecorder()
    all_to_all = memory.all_to_all(Loopback(2))
    run(memory, lambda: None)
    for _ in range(3):
        sent = all_to_all.dispatch_send(torch.ones(2, 4), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1))
        sent.finish_dispatch()
        memory.device.record(memory.device.new_event(), memory.device.current_stream())
    assert memory.records(step=1) == [] and memory.program.transfers == [] and memory.device._events == {}


def layer(all_to_all: Any, hidden: Any) -> Callable[[], Any]:
    """A Mixture-of-Experts layer whose experts double."""

    def entry() -> Any:
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

    return entry


@CARRIERS
def test_sends_and_receives_of_a_layer_and_the_same_result(carrier: str) -> None:
    hidden = [torch.rand(2, 4), torch.rand(2, 4)]
    memory = MemoryRecorder()
    contexts = make_ubatch_contexts(2, device=memory.device)
    entries = [layer(memory.all_to_all(Loopback(2)), each) for each in hidden]
    result = Scheduler(carrier=carrier, instruments=[memory]).run(entries, contexts)
    records = memory.records(step=0)
    plain = Scheduler(carrier=carrier).run([layer(Loopback(2), each) for each in hidden])
    assert result.schedule == plain.schedule
    for mine, other in zip(result.outputs, plain.outputs, strict=True):
        assert torch.equal(mine, other)
    wire = [(r.op, r.name, r.ubatch, r.owner, r.bytes) for r in records if r.op in ("send", "receive")]
    assert wire == [
        ("send", "dispatch", 0, None, 0),
        ("receive", "dispatch", 1, 0, None),
        ("send", "dispatch", 1, None, 0),
        ("receive", "dispatch", 0, 1, None),
        ("send", "combine", 0, None, 0),
        ("receive", "combine", 1, 0, None),
        ("send", "combine", 1, None, 0),
        ("receive", "combine", 0, 1, None),
    ]
    sends = {r.number: r for r in records if r.op == "send"}
    for receive in (r for r in records if r.op == "receive"):
        assert receive.of is not None and receive.at is not None
        sent = sends[receive.of]
        assert (sent.name, sent.ubatch) == (receive.name, receive.owner) and (sent.at or 0) < receive.at


def test_lines_are_those_of_the_records() -> None:
    def entry() -> None:
        rows = torch.zeros(6, 4)
        rows.index_add_(0, torch.tensor([1, 2]), torch.ones(2, 4))
        rows.t()[1].add_(1)
        dbo_yield("a")
        float(rows.sum())

    memory = MemoryRecorder()
    records = run(memory, entry, entry)
    assert {record.op for record in records} == {"work", "free", "host_wait"}
    lines = memory.json_lines(step=0)
    assert lines == "".join(to_json(each) + "\n" for each in records).encode("ascii")


def test_recording_does_not_load_the_compiler_and_leaves_nothing_to_the_collector() -> None:
    """torch loads it to keep it out of a mode's code: seconds, in the middle of the first step."""
    code = (
        "import gc, sys, weakref, torch\n"
        "from dbo_greenlet.testing.torch_accesses import recorded_step\n"
        "gc.disable()\n"
        "with recorded_step() as recording:\n"
        "    torch.ones(2) + 1\n"
        "names = [each.name for each in recording.program.operations]\n"
        "gone = weakref.ref(recording)\n"
        "del recording\n"
        "print(names, gone() is None, 'torch._dynamo' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("['ones', 'add'] True False\n", "")
