"""A stream program as records: what each operation refers to, what it touches, and what was freed between two."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from dbo_greenlet import Scheduler, dbo_maybe_run_recv_hook, dbo_register_recv_hook, dbo_yield
from dbo_greenlet.accesses import Access
from dbo_greenlet.devices import CpuDevice
from dbo_greenlet.devices.virtual import VirtualDevice
from dbo_greenlet.microbatch import make_ubatch_contexts
from dbo_greenlet.stream_program import RecordingDevice, StreamProgram
from dbo_greenlet.trace.op_records import Freed, op_records
from dbo_greenlet.trace.records import OpRecord
from dbo_greenlet.trace.schema import from_json, to_json


def test_a_step_of_the_virtual_device() -> None:
    device = VirtualDevice()
    contexts = make_ubatch_contexts(2, device=device)
    hidden = [device.new_buffer("hidden"), device.new_buffer("hidden")]

    def entry(index: int) -> Any:
        def layer() -> None:
            device.work("attention", 5.0, writes=[hidden[index]])
            dbo_maybe_run_recv_hook()
            sent = device.send("dispatch", 7.0, reads=[hidden[index]])
            sent.bytes = 100 + index
            dbo_register_recv_hook(lambda: device.receive(sent))
            dbo_yield("layer0.dispatch")

        return layer

    Scheduler().run([entry(0), entry(1)], contexts)
    device.synchronize()
    records = op_records(device.program, step=3, rank=1, run="x")
    # Kind, whose and in which slice, what it refers to, for whom, bytes, memory.
    assert [(r.op, r.name, r.ubatch, r.slice, r.of, r.owner, r.bytes, r.memory) for r in records] == [
        ("work", "attention", 0, 0, None, None, None, [["write", "hidden", 0, None]]),
        ("send", "dispatch", 0, 0, None, None, 100, [["read", "hidden", 0, None]]),
        ("work", "attention", 1, 0, None, None, None, [["write", "hidden#2", 0, None]]),
        ("receive", "dispatch", 1, 0, 1, 0, None, []),
        ("send", "dispatch", 1, 0, None, None, 101, [["read", "hidden#2", 0, None]]),
        ("receive", "dispatch", 0, 1, 4, 1, None, []),
        ("host_wait", "synchronize", None, None, None, None, None, []),
    ]
    assert [(r.step, r.rank, r.run, r.number, r.at) for r in records] == [(3, 1, "x", n, None) for n in range(7)]
    assert [r.stream for r in records] == ["compute"] * 6 + [None]
    assert [from_json(json.loads(to_json(r))) for r in records] == records


def test_events_times_and_names_of_streams() -> None:
    times = iter(range(10_000, 99_000, 1_000))
    device = RecordingDevice(CpuDevice(), StreamProgram(clock=lambda: next(times)))
    comm, event = device.new_stream("side"), device.new_event()
    device.wait(comm, event)
    device.record(event, device.current_stream())
    device.record(event, device.current_stream())
    device.wait(comm, event)
    records = op_records(device.program, step=0, origin_ns=4_000, streams={"side": "comm"})
    assert [(r.op, r.stream, r.event, r.of, r.at) for r in records] == [
        ("wait", "comm", 0, None, 6.0),
        ("record", "compute", 0, None, 7.0),
        ("record", "compute", 0, None, 8.0),
        ("wait", "comm", 0, 2, 9.0),
    ]


def test_an_operation_that_is_noted_when_its_call_returned_began_before() -> None:
    times = iter(range(0, 99_000, 1_000))
    program = StreamProgram(clock=lambda: next(times))
    with program.since_now():  # 0
        program.add("work", "compute", "inside")
        with program.since_now():  # 1
            program.add("work", "compute", "further inside")
        program.add("work", "compute", "inside")
    program.add("work", "compute", "behind")  # 2
    assert [r.at for r in op_records(program, step=0)] == [0.0, 1.0, 0.0, 2.0]


@dataclasses.dataclass(frozen=True)
class Somewhere:
    """Memory with an address."""

    address: int

    def __str__(self) -> str:
        return f"tensor at {self.address}"


def test_what_was_freed_stands_between_the_operations_and_moves_their_numbers() -> None:
    program, memory = StreamProgram(), Somewhere(4096)
    program.add("record", "compute", "record", event=0)
    program.add("wait", "comm", "wait", event=0)
    program.add("work", "comm", "copy", (Access(memory, False, 16, 32),))
    freed = [
        Freed(0, Access("early", True, 0, 8), None, None, None, None),
        Freed(2, Access(memory, True, 0, 64), "comm", 1, 5, 9_000),
        Freed(3, Access("late", True, 0, 8), "compute", 0, 6, 10_000),
        Freed(7, Access("later", True, 0, 8), "compute", 0, 6, 11_000),
    ]
    records = op_records(program, step=0, origin_ns=1_000, freed=freed, streams={"comm": "side"})
    assert [(r.number, r.op, r.name, r.of, r.stream, r.memory) for r in records] == [
        (0, "free", "early", None, None, [["write", "early", 0, 8]]),
        (1, "record", "record", None, "compute", []),
        (2, "wait", "wait", 1, "side", []),
        (3, "free", "tensor at 4096", None, "side", [["write", 4096, 0, 64]]),
        (4, "work", "copy", None, "side", [["read", 4096, 16, 32]]),
        (5, "free", "late", None, "compute", [["write", "late", 0, 8]]),
        (6, "free", "later", None, "compute", [["write", "later", 0, 8]]),
    ]
    assert [(r.ubatch, r.slice, r.at) for r in records if r.op == "free"] == [
        (None, None, None),
        (1, 5, 8.0),
        (0, 6, 9.0),
        (0, 6, 10.0),
    ]


def test_accesses_to_a_part_of_the_bytes_say_so() -> None:
    program = StreamProgram()
    accesses = (
        Access("cache", False, 0, 64),
        Access("cache", True, 0, 64, partial=True),
        Access("matrix", False, 8, 56, pitch=16, run=8),
        Access("matrix", True, 0, 48, partial=True, pitch=16, run=8),
    )
    program.add("work", "compute", "mixed", accesses)
    (record,) = op_records(program, step=0)
    assert record.memory == [
        ["read", "cache", 0, 64],
        ["write", "cache", 0, 64, True],
        ["read", "matrix", 8, 56, False, 16, 8],
        ["write", "matrix", 0, 48, True, 16, 8],
    ]
    assert from_json(json.loads(to_json(record))) == record


def test_a_receive_of_what_an_earlier_step_sent_refers_to_nothing_here() -> None:
    program = StreamProgram()
    transfer = program.send("compute", "dispatch").transfer
    assert transfer is not None
    program.clear()
    program.send("compute", "another")
    program.receive("compute", transfer)
    assert [(r.op, r.of) for r in op_records(program, step=1)] == [("send", None), ("receive", None)]


def test_what_is_added_while_nothing_is_noted_is_not_kept() -> None:
    device = RecordingDevice(CpuDevice())
    program, event = device.program, device.new_event()
    program.noting = False
    device.record(event, device.current_stream())
    assert program.send("compute", "dispatch").transfer is not None
    assert program.operations == program.transfers == [] and device._events == {}
    program.noting = True
    device.wait(device.current_stream(), event)
    assert [(r.op, r.of) for r in op_records(program, step=0)] == [("wait", None)]
    device.clear()
    assert op_records(program, step=0) == [] and device._events == {}


def test_the_records_of_no_program() -> None:
    none: list[OpRecord] = []
    assert op_records(StreamProgram(), step=0) == none


def test_a_receive_of_what_an_earlier_step_sent_refers_to_nothing() -> None:
    program = StreamProgram()
    for _ in range(2):
        program.add("work", "compute", "attention")
    early, late = program.send("comm", "dispatch").transfer, program.send("comm", "combine").transfer
    assert early is not None and late is not None and (early.sent, late.sent) == (2, 3)
    program.clear()
    for name in ("attention", "experts"):
        program.add("work", "compute", name)
    # The first has the very number here that its send had there, of the second there is no such number yet.
    program.receive("compute", early)
    assert [record.of for record in op_records(program, step=0)] == [None] * 3
    program.clear()
    program.receive("compute", late)
    assert [record.of for record in op_records(program, step=0)] == [None]
