"""Streams and events in what the recorder makes: whose, where, and what each wait waits for; on both carriers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dbo_greenlet import Scheduler, dbo_yield
from dbo_greenlet.devices import CpuDevice
from dbo_greenlet.devices.cpu import CpuStream
from dbo_greenlet.devices.virtual import VirtualDevice
from dbo_greenlet.errors import MicrobatchFailed
from dbo_greenlet.gpu_timeline import GpuTimeline
from dbo_greenlet.microbatch import UBatchContext, make_ubatch_contexts
from dbo_greenlet.trace import OpRecord, SliceRecord, StepRecorder
from dbo_greenlet.yields import (
    dbo_get_previous_event,
    dbo_switch_to_compute_sync,
    dbo_yield_and_switch_from_compute_to_comm,
)
from tests.trace.recording import CARRIERS, contexts_of, recorder


def high_throughput(layers: int, context: list[UBatchContext]) -> Callable[[], None]:
    """The yields of a layer whose communication has a stream of its own."""

    def entry() -> None:
        for layer in range(layers):
            dbo_yield_and_switch_from_compute_to_comm(f"layer{layer}.before_dispatch")
            dbo_switch_to_compute_sync()

    return entry


def test_the_twin_of_a_device_is_that_device() -> None:
    device = CpuDevice()
    twin = StepRecorder().device(device)
    stream, event = twin.new_stream("comm"), twin.new_event()
    twin.record(event, stream)
    with twin.stream_scope(stream):
        assert device.current_stream() is stream
    assert (event.stream, event.mark, stream.marks) == (stream, 1, 1)
    assert twin.plain is device and StepRecorder().device(twin).plain is device


@CARRIERS
@pytest.mark.parametrize("make_device", [CpuDevice, VirtualDevice])
def test_events_and_streams_of_a_step(carrier: str, make_device: Callable[[], Any]) -> None:
    watch = recorder()
    contexts = contexts_of(watch, make_device())
    device, joined = contexts[0].device, contexts[0].device.new_event()
    device.record(joined, contexts[0].comm_stream)  # no part of a step
    Scheduler(carrier=carrier, instruments=[watch]).run([high_throughput(1, contexts)] * 2, contexts)
    device.record(joined, contexts[0].comm_stream)
    device.wait(contexts[0].compute_stream, joined)
    records = watch.records(step=4, rank=1, run="x")
    assert [(r.ubatch, r.slice, r.stream) for r in records if isinstance(r, SliceRecord)] == [
        (0, 0, "compute"),
        (1, 0, "compute"),
        (0, 1, "compute"),
        (1, 1, "compute"),
    ]
    ops = [r for r in records if isinstance(r, OpRecord)]
    assert [(r.op, r.ubatch, r.slice, r.stream, r.event, r.of) for r in ops] == [
        ("record", 0, 0, "compute", 0, None),
        ("record", 1, 0, "compute", 1, None),
        ("wait", 0, 1, "comm", 0, 0),
        ("record", 0, 1, "comm", 2, None),
        ("wait", 0, 1, "compute", 2, 3),
        ("wait", 1, 1, "comm", 1, 1),
        ("record", 1, 1, "comm", 3, None),
        ("wait", 1, 1, "compute", 3, 6),
        # what joins the streams behind the step
        ("record", None, None, "comm", 4, None),
        ("wait", None, None, "compute", 4, 8),
    ]
    assert [(r.number, r.step, r.rank, r.run, r.name, r.owner, r.bytes, r.memory) for r in ops] == [
        (number, 4, 1, "x", "", None, None, []) for number in range(10)
    ]
    times = [r.at for r in ops if r.at is not None]
    assert times == sorted(times) and len(set(times)) == 10
    # Taken: what the device does from now on belongs to no step, until the next one begins.
    device.record(joined, contexts[0].comm_stream)
    assert watch.records(step=4, rank=1, run="x") == records


def test_the_events_of_a_timeline_are_no_part_of_the_program() -> None:
    watch = recorder()
    twin = watch.device(VirtualDevice())
    contexts = make_ubatch_contexts(2, device=twin)
    timeline = GpuTimeline(twin, capturing=lambda: False)
    events = timeline.eager(contexts)
    Scheduler(instruments=[watch]).run([high_throughput(1, contexts)] * 2, contexts, bracket=events)
    ops = [r for r in watch.records(step=0) if isinstance(r, OpRecord)]
    assert [(r.op, r.ubatch) for r in ops] == [
        ("record", 0), ("record", 1), ("wait", 0), ("record", 0), ("wait", 0), ("wait", 1), ("record", 1), ("wait", 1),
    ]  # fmt: skip
    assert events.count > 4 and len(events.read()) == 4


@CARRIERS
def test_an_event_that_a_library_captures_is_a_record_on_the_compute_stream(carrier: str) -> None:
    watch = recorder()
    contexts = contexts_of(watch, CpuDevice(), 1)

    def entry() -> None:
        contexts[0].switch_to_comm()
        dbo_get_previous_event(object)
        dbo_get_previous_event(lambda: None)  # there was nothing to capture
        contexts[0].switch_to_compute_sync()

    Scheduler(carrier=carrier, instruments=[watch]).run([entry], contexts)
    ops = [r for r in watch.records(step=0) if isinstance(r, OpRecord)]
    assert [(r.op, r.ubatch, r.slice, r.stream, r.name, r.event) for r in ops] == [
        ("record", 0, 0, "compute", "previous_event", 0),
        ("record", 0, 0, "comm", "", 1),
        ("wait", 0, 0, "compute", "", 1),
    ]


@CARRIERS
def test_an_event_that_was_recorded_in_another_step_stands_for_no_operation_of_this_one(carrier: str) -> None:
    watch = recorder()
    contexts = contexts_of(watch, CpuDevice(), 1)
    scheduler = Scheduler(carrier=carrier, instruments=[watch])
    compute, event = contexts[0].compute_stream, contexts[0].gpu_comm_done_event
    scheduler.run([lambda: contexts[0].device.record(event, compute)], contexts)
    scheduler.run([lambda: contexts[0].device.wait(compute, event)], contexts)
    assert [(r.op, r.of) for r in watch.records(step=1) if isinstance(r, OpRecord)] == [("wait", None)]


def test_a_step_without_this_recorder_leaves_nothing_behind() -> None:
    watch = recorder()
    contexts = contexts_of(watch, CpuDevice())
    Scheduler().run([high_throughput(2, contexts)] * 2, contexts)
    assert watch.records(step=0) == []


@CARRIERS
def test_streams_that_are_neither_of_the_contexts_keep_their_own_names(carrier: str) -> None:
    watch = recorder()
    contexts = contexts_of(watch, CpuDevice(), 1)
    device = contexts[0].device
    other = device.new_stream("copies")

    def entry() -> None:
        dbo_yield("on compute")
        contexts[0].switch_to_comm()
        dbo_yield("on comm")
        device.set_stream(other)
        dbo_yield("elsewhere")
        contexts[0].switch_to_compute()

    Scheduler(carrier=carrier, instruments=[watch]).run([entry], contexts)
    assert [(r.site, r.stream) for r in watch.records(step=0) if isinstance(r, SliceRecord)] == [
        ("on compute", "compute"),
        ("on comm", "comm"),
        ("elsewhere", "copies"),
        ("", "compute"),
    ]


def test_a_stream_that_only_its_number_is_known_of() -> None:
    """As on CUDA, where the key of a stream is its handle and a model may make one that nobody named."""
    watch = recorder()
    contexts = contexts_of(watch, HandleDevice(), 1)
    device = contexts[0].device

    def entry() -> None:
        device.put_stream(device.key_of(contexts[0].comm_stream))
        dbo_yield("on comm")
        device.put_stream(0xABC)

    Scheduler(instruments=[watch]).run([entry], contexts)
    assert [r.stream for r in watch.records(step=0) if isinstance(r, SliceRecord)] == ["comm", "stream 0xabc"]


class HandleDevice(CpuDevice):
    """A device whose streams have numbers for keys."""

    def __init__(self) -> None:
        super().__init__()
        self.handle = 0
        self.default_stream = HandleStream("compute", 0)

    def new_stream(self, name: str) -> Any:
        return HandleStream(name, 7)

    def key_of(self, stream: Any) -> int:
        return stream.key

    def stream_key(self) -> Any:
        return self.handle

    def put_stream(self, key: Any) -> None:
        self.handle = key

    def set_stream(self, stream: Any) -> None:
        super().set_stream(stream)
        self.handle = stream.key


class HandleStream(CpuStream):
    __slots__ = ("key",)

    def __init__(self, name: str, key: int) -> None:
        super().__init__(name)
        self.key = key


@CARRIERS
def test_a_step_that_fails_keeps_its_events_and_what_is_unwound_has_its_own(carrier: str) -> None:
    watch = recorder()
    contexts = contexts_of(watch, CpuDevice())
    device, event = contexts[0].device, contexts[0].device.new_event()

    def parked() -> None:
        try:
            dbo_yield("layer0.dispatch")
        finally:
            device.record(event, contexts[0].compute_stream)

    def fails() -> None:
        device.wait(contexts[1].compute_stream, event)
        raise RuntimeError("boom")

    with pytest.raises(MicrobatchFailed):
        Scheduler(carrier=carrier, instruments=[watch]).run([parked, fails], contexts)
    ops = [(r.op, r.ubatch, r.slice) for r in watch.records(step=0) if isinstance(r, OpRecord)]
    assert ops == [("wait", 1, 0), ("record", 0, 1)]
