"""Streams and events of the yield API: the whole log of device calls, in order."""

from __future__ import annotations

from typing import Any

import pytest

from dbo_greenlet import (
    Scheduler,
    dbo_get_previous_event,
    dbo_switch_to_comm,
    dbo_switch_to_comm_sync,
    dbo_switch_to_compute,
    dbo_switch_to_compute_sync,
    dbo_yield,
    dbo_yield_and_switch_from_comm_to_compute,
    dbo_yield_and_switch_from_compute_to_comm,
    make_ubatch_contexts,
)
from dbo_greenlet.devices import CpuDevice, cpu_device
from dbo_greenlet.devices.cpu import CpuEvent, CpuStream
from dbo_greenlet.errors import ConfigurationError
from dbo_greenlet.step import running

CARRIERS = ["greenlet", "thread"]


class LoggingDevice(CpuDevice):
    """The CPU device, writing down what is asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[Any, ...]] = []
        self.events = 0

    def new_event(self) -> CpuEvent:
        event = super().new_event()
        self.events += 1
        return event

    def set_stream(self, stream: CpuStream) -> None:
        self.log.append(("current", stream.name))
        super().set_stream(stream)

    def record(self, event: CpuEvent, stream: CpuStream) -> None:
        super().record(event, stream)
        self.log.append(("record", stream.name, stream.marks))

    def wait(self, stream: CpuStream, event: CpuEvent) -> None:
        self.log.append(("wait", stream.name, "for", event.stream.name if event.stream else None, event.mark))
        super().wait(stream, event)


@pytest.fixture
def device() -> LoggingDevice:
    return LoggingDevice()


def test_high_throughput_layer_in_full(device: LoggingDevice) -> None:
    """A layer as DeepEP's high-throughput kernels are overlapped: yields before dispatch, before combine, after it."""
    log = device.log

    def layer(i: int) -> Any:
        def run() -> None:
            log.append((i, "attention"))
            dbo_yield_and_switch_from_compute_to_comm("dispatch")
            log.append((i, "dispatch", device.current_stream().name))
            dbo_switch_to_compute_sync()
            log.append((i, "experts", device.current_stream().name))
            dbo_yield_and_switch_from_compute_to_comm("combine")
            log.append((i, "combine", device.current_stream().name))
            dbo_switch_to_compute()
            log.append((i, "shared", device.current_stream().name))
            dbo_switch_to_comm()
            dbo_yield_and_switch_from_comm_to_compute("combined")
            log.append((i, "next", device.current_stream().name))

        return run

    contexts = make_ubatch_contexts(2, device=device)
    assert device.events == 4
    Scheduler(strict=True).run([layer(0), layer(1)], contexts)
    switches = [entry for entry in log if entry[0] != "current"]
    assert switches == [
        (0, "attention"),
        ("record", "compute", 1),
        (1, "attention"),
        ("record", "compute", 2),
        ("wait", "comm", "for", "compute", 1),  # microbatch 0 waits for its own attention, not for the sibling's
        (0, "dispatch", "comm"),
        ("record", "comm", 1),
        ("wait", "compute", "for", "comm", 1),
        (0, "experts", "compute"),
        ("record", "compute", 3),
        ("wait", "comm", "for", "compute", 2),
        (1, "dispatch", "comm"),
        ("record", "comm", 2),
        ("wait", "compute", "for", "comm", 2),
        (1, "experts", "compute"),
        ("record", "compute", 4),
        ("wait", "comm", "for", "compute", 3),
        (0, "combine", "comm"),
        (0, "shared", "compute"),
        ("record", "comm", 3),
        ("wait", "comm", "for", "compute", 4),
        (1, "combine", "comm"),
        (1, "shared", "compute"),
        ("record", "comm", 4),
        ("wait", "compute", "for", "comm", 3),
        (0, "next", "compute"),
        ("wait", "compute", "for", "comm", 4),
        (1, "next", "compute"),
    ]
    assert device.current_stream() is device.default_stream


@pytest.mark.parametrize("carrier", CARRIERS)
def test_sync_switches_wait_and_plain_ones_do_not(device: LoggingDevice, carrier: str) -> None:
    def entry() -> None:
        dbo_switch_to_comm_sync()
        dbo_switch_to_compute_sync()
        dbo_switch_to_comm()
        dbo_switch_to_comm()
        dbo_switch_to_compute()
        dbo_yield("a")

    contexts = make_ubatch_contexts(1, device=device)
    Scheduler(carrier=carrier).run([entry], contexts)
    log = device.log[1:] if carrier == "thread" else device.log  # a new thread is put on its compute stream first
    assert log == [
        ("record", "compute", 1),
        ("current", "comm"),
        ("wait", "comm", "for", "compute", 1),
        ("record", "comm", 1),
        ("current", "compute"),
        ("wait", "compute", "for", "comm", 1),
        ("current", "comm"),
        ("current", "compute"),
    ]


def test_previous_event_is_captured_on_the_compute_stream(device: LoggingDevice) -> None:
    def entry() -> tuple[str, str]:
        dbo_switch_to_comm()
        captured = dbo_get_previous_event(lambda suffix: device.current_stream().name + suffix, "!")
        name = device.current_stream().name
        dbo_switch_to_compute()
        return captured or "", name

    contexts = make_ubatch_contexts(1, device=device)
    assert Scheduler().run([entry], contexts).outputs == [("compute!", "comm")]


@pytest.mark.parametrize("carrier", CARRIERS)
def test_without_contexts_the_switches_are_yields(carrier: str) -> None:
    def entry() -> str | None:
        dbo_yield_and_switch_from_compute_to_comm("a")
        dbo_yield_and_switch_from_comm_to_compute("b")
        dbo_switch_to_comm_sync()
        return dbo_get_previous_event(lambda: "event")

    result = Scheduler(carrier=carrier, strict=True).run([entry, entry])
    assert result.outputs == ["event", "event"]
    assert result.schedule.sites == ("a", "a", "b", "b", "", "")


def test_contexts_share_streams_and_own_events() -> None:
    forward_contexts = [object(), object(), object()]
    contexts = make_ubatch_contexts(3, forward_contexts=forward_contexts)
    assert [c.id for c in contexts] == [0, 1, 2]
    assert len({id(c.compute_stream) for c in contexts}) == len({id(c.comm_stream) for c in contexts}) == 1
    assert len({id(e) for c in contexts for e in (c.gpu_compute_done_event, c.gpu_comm_done_event)}) == 6
    assert [c.forward_context for c in contexts] == forward_contexts
    assert contexts[0].device is cpu_device() and contexts[0].current_stream is cpu_device().current_stream()
    assert repr(contexts[1]) == "UBatchContext(id=1, device=cpu)"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_micro_batches": 0}, "num_micro_batches=0"),
        ({"num_micro_batches": 2, "forward_contexts": [None]}, "1 forward contexts for 2"),
        ({"num_micro_batches": 2, "schedule": "mlp"}, "'mlp'"),
    ],
)
def test_contexts_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_ubatch_contexts(**arguments)


def test_recv_hook_shows_what_the_sibling_left() -> None:
    contexts = make_ubatch_contexts(2)

    ran: list[str] = []

    def hook() -> None:
        ran.append("hook")

    from dbo_greenlet import dbo_maybe_run_recv_hook, dbo_register_recv_hook

    def first() -> None:
        dbo_register_recv_hook(hook)
        dbo_yield("a")

    def second() -> list[Any]:
        contexts[1].recv_hook()
        dbo_maybe_run_recv_hook()  # runs it no second time
        seen = [list(ran)]
        seen.append(contexts[1].recv_hook)
        dbo_yield("a")
        return seen

    assert Scheduler().run([first, second], contexts).outputs[1] == [["hook"], None]
    assert contexts[0].recv_hook is None
    assert running == {}


def test_streams_of_a_thread_are_its_own() -> None:
    import threading

    device = CpuDevice()
    other = device.new_stream("other")
    seen = []
    with device.stream_scope(other):
        thread = threading.Thread(target=lambda: seen.append(device.current_stream()))
        thread.start()
        thread.join()
        assert device.current_stream() is other
    assert seen == [device.default_stream] and device.current_stream() is device.default_stream
    device.synchronize()
