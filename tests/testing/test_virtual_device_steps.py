"""Steps on the virtual device: each thread's stream, one clock for all, and one program however the step runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from dbo_greenlet import Scheduler, make_ubatch_contexts
from dbo_greenlet import yields as y
from dbo_greenlet.devices.virtual import VirtualDevice
from dbo_greenlet.devices.virtual_times import Lane
from dbo_greenlet.gpu_timeline import GpuTimeline
from dbo_greenlet.stream_program import Operation
from tests.testing.device_programs import times


def test_each_thread_has_its_current_stream_and_all_have_one_clock() -> None:
    device = VirtualDevice(launch=1)
    comm = device.new_stream("comm")
    device.set_stream(comm)
    seen = []

    def elsewhere() -> None:
        seen.append(device.current_stream())
        device.set_stream(device.new_stream("third"))
        device.work("elsewhere", 5)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [device.default_stream]
    assert device.current_stream() is device.stream_key() is comm
    device.work("here", 5)
    assert device.lanes() == [Lane("third", None, "elsewhere", 1, 6), Lane("comm", None, "here", 2, 7)]


def test_a_scope_ends_on_the_stream_before_it_also_by_an_error() -> None:
    device = VirtualDevice()
    comm = device.new_stream("comm")
    with pytest.raises(ZeroDivisionError), device.stream_scope(comm):
        assert device.current_stream() is comm
        raise ZeroDivisionError
    assert device.current_stream() is device.default_stream
    device.put_stream(comm)
    with device.stream_scope(device.default_stream):
        pass
    assert device.current_stream() is comm


def layer(device: VirtualDevice) -> Callable[[], int]:
    """Both kinds of communication: a transfer with a hook, and work on the comm stream."""

    def entry() -> int:
        device.work("attention", 100)
        y.dbo_maybe_run_recv_hook()
        sent = device.send("D", 70)
        y.dbo_register_recv_hook(lambda: device.receive(sent, 2))
        y.dbo_yield("dispatch")
        device.work("experts", 60)
        y.dbo_yield_and_switch_from_compute_to_comm("before_combine")
        device.work("C", 40)
        y.dbo_yield_and_switch_from_comm_to_compute("combine")
        device.work("out", 10)
        return y.dbo_current_ubatch_id()

    return entry


def what(operations: list[Operation]) -> list[tuple[Any, ...]]:
    return [
        (o.kind, o.stream, o.microbatch, o.slice, o.site, o.name, o.of, o.transfer and o.transfer.number)
        for o in operations
    ]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_one_schedule_and_one_program_eager_on_threads_and_captured(count: int) -> None:
    runs = {}
    for how in ("greenlet", "thread", "captured"):
        device = VirtualDevice()
        contexts = make_ubatch_contexts(count, device=device)
        scheduler = Scheduler(carrier="thread" if how == "thread" else "greenlet", strict=True)
        step = lambda: scheduler.run([layer(device)] * count, contexts)  # noqa: B023, E731
        if how == "captured":
            graph = device.capture(step, [contexts[0].compute_stream, contexts[0].comm_stream])
            result = graph.output
            assert device.now == device.finished_at == 0
            graph.replay()
        else:
            result = step()
        assert result.outputs == list(range(count))
        program = device.program.operations
        runs[how] = (result.schedule.hash, what(program), times(program), device.overlap())
    assert runs["greenlet"] == runs["thread"] == runs["captured"]


def test_a_timelines_twin_shares_the_clock_and_the_program() -> None:
    device = VirtualDevice(launch=1, record=1)
    twin = GpuTimeline(device, clock=device.clock, capturing=device.capturing).device
    twin.work("w", 10)
    twin.record(twin.new_event(), twin.default_stream)
    device.work("w", 10)
    twin.transfer_time = lambda transfer, us: 2 * us
    assert device.send("D", 4).arrives == 21 + 8
    assert (device.now, twin.now) == (4, 4)
    assert twin.program is device.program
