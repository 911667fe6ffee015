"""The virtual device: against a model that looks at every microsecond, and against numbers worked out by hand."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given

from dbo_greenlet.devices.virtual import Buffer, VirtualDevice
from dbo_greenlet.devices.virtual_times import Lane, Overlap, Window
from dbo_greenlet.errors import ConfigurationError
from dbo_greenlet.stream_program import Access, Transfer
from tests.testing.device_model import Command, Model, act
from tests.testing.device_programs import COSTS, PROGRAMS, rig, spans, times

# -- against the model -------------------------------------------------------------------------------------------------


@given(PROGRAMS, COSTS)
def test_begin_and_end_of_everything_are_those_of_the_model(commands: list[Command], costs: dict[str, int]) -> None:
    device, streams = rig(**costs)
    act(device, streams, commands)
    model = Model(**costs)
    expected = model.run(commands)
    assert times(device.program.operations) == [(entry.begin, entry.end) for entry in expected]
    if commands:
        assert device.now == model.host
    arrivals = [entry.begin + entry.command[2] for entry in model.sends]
    assert [each.arrives for each in device.program.transfers] == arrivals
    ends = [entry.end for entry in expected if "host waits" not in entry.command[0]]
    assert device.finished_at == max([0, *ends, *arrivals])


# -- streams and events, by hand ---------------------------------------------------------------------------------------


def test_the_example_of_the_module() -> None:
    device = VirtualDevice(launch=3.0)
    device.work("attention", 60.0)
    sent = device.send("dispatch", 50.0)
    device.work("shared expert", 20.0)
    receive = device.receive(sent)
    device.synchronize()
    assert device.lanes() == [
        Lane("compute", None, "attention", 3.0, 63.0),
        Lane("wire", None, "dispatch", 63.0, 113.0),
        Lane("compute", None, "shared expert", 63.0, 83.0),
    ]
    assert (receive.begin, receive.end) == (83.0, 113.0)
    assert device.now == 113.0


def test_short_work_runs_as_fast_as_the_host_launches_it_and_long_work_queues() -> None:
    device = VirtualDevice(launch=10)
    for length in (3, 3, 50, 3, 3):
        device.work("w", length)
    assert spans(device, "w") == [(10, 13), (20, 23), (30, 80), (80, 83), (83, 86)]
    assert device.now == 50
    device.host(100)
    device.work("w", 1)
    assert spans(device, "w")[-1] == (160, 161)
    assert device.busy() == 3 + 3 + 50 + 3 + 3 + 1


def test_a_stream_that_waits_goes_on_behind_the_record() -> None:
    device, streams = rig()
    event = device.new_event()
    device.work("first", 30, stream=streams["a"])
    device.record(event, streams["a"])
    device.work("behind the record", 30, stream=streams["a"])
    device.work("before the wait", 10, stream=streams["b"])
    device.wait(streams["b"], event)
    device.work("after the wait", 5, stream=streams["b"])
    assert spans(device, "after the wait") == [(30, 35)]
    record, wait = (next(o for o in device.program.operations if o.kind == kind) for kind in ("record", "wait"))
    assert (record.begin, record.end, wait.begin, wait.end, wait.of) == (30, 30, 10, 30, record.number)


def test_an_event_that_was_never_recorded_holds_nobody_up() -> None:
    device, streams = rig(wait=2)
    event = device.new_event()
    device.work("busy", 50, stream=streams["a"])
    device.wait(streams["b"], event)
    device.work("free", 1, stream=streams["b"])
    event.synchronize()
    assert spans(device, "free") == [(2, 3)]
    assert device.now == 2
    assert [o.of for o in device.program.operations if o.kind in ("wait", "host_wait")] == [None, None]
    assert event.query()


def test_a_wait_keeps_the_record_that_was_the_latest_when_it_was_enqueued() -> None:
    device, streams = rig()
    event = device.new_event()
    device.work("short", 10, stream=streams["a"])
    device.record(event, streams["a"])
    device.wait(streams["b"], event)
    device.work("long", 100, stream=streams["a"])
    device.record(event, streams["a"])
    device.work("behind the first record", 1, stream=streams["b"])
    device.wait(streams["c"], event)
    device.work("behind the second record", 1, stream=streams["c"])
    assert spans(device, "behind the first record", "behind the second record") == [(10, 11), (110, 111)]
    assert [o.of for o in device.program.operations if o.kind == "wait"] == [1, 4]


def test_the_host_jumps_to_what_it_waits_for_and_never_back() -> None:
    device, streams = rig()
    event = device.new_event()
    device.work("counts", 10, stream=streams["a"])
    device.record(event, streams["a"])
    device.work("dispatch", 90, stream=streams["a"])
    device.work("other", 500, stream=streams["b"])
    assert not event.query()
    event.synchronize()
    assert (device.now, event.query()) == (10, True)
    device.wait_for_host(streams["a"])
    assert device.now == 100
    device.wait_for_host(streams["a"])
    event.synchronize()
    device.wait_for_host()  # the current stream, which holds nothing
    assert device.now == 100
    device.work("only now", 1, stream=streams["a"])
    assert spans(device, "only now") == [(100, 101)]
    device.synchronize()
    assert (device.now, device.finished_at, device.clock()) == (500, 500, 500_000)
    waits = [(o.stream, o.event, o.begin, o.end) for o in device.program.operations if o.kind == "host_wait"]
    number = event.number
    assert waits == [
        ("a", number, 0, 10),
        ("a", None, 10, 100),
        ("a", None, 100, 100),
        ("a", number, 100, 100),
        ("compute", None, 100, 100),
        (None, None, 101 - 1, 500),
    ]


def test_times_between_events() -> None:
    device = VirtualDevice()
    first, second = device.new_timing_event(), device.new_timing_event()
    with pytest.raises(RuntimeError, match="never recorded"):
        first.elapsed_time(second)
    device.record(first, device.default_stream)
    device.work("w", 1500)
    device.record(second, device.default_stream)
    with pytest.raises(RuntimeError, match="not complete; synchronize"):
        first.elapsed_time(second)
    second.synchronize()
    assert (first.elapsed_time(second), second.elapsed_time(first)) == (1.5, -1.5)


def test_streams_have_names_of_their_own() -> None:
    device = VirtualDevice(primary="main")
    assert [device.new_stream(name).name for name in ("comm", "comm", "main", "comm", "comm#2")] == [
        "comm",
        "comm#2",
        "main#2",
        "comm#3",
        "comm#2#2",
    ]
    assert device.program.primary == device.current_stream().name == "main"


# -- transfers ---------------------------------------------------------------------------------------------------------


def test_transfers_fly_beside_each_other_and_beside_their_stream() -> None:
    device = VirtualDevice()
    slow, quick = device.send("slow", 100), device.send("quick", 10)
    device.work("w", 5)
    assert spans(device, "slow", "quick", "w") == [(0, 100), (0, 10), (0, 5)]
    device.receive(quick, 3)
    device.receive(slow, 4)
    device.work("after", 1)
    assert device.windows() == [Window(slow, 0, 100, 104), Window(quick, 0, 10, 13)]
    assert spans(device, "after") == [(104, 105)]
    assert (device.busy("wire"), device.busy()) == (100, 5 + 3 + 4 + 1)


@pytest.mark.parametrize(("before", "span"), [(20, (20, 53)), (50, (50, 53)), (80, (80, 83))])
def test_a_receive_stands_still_until_the_transfer_is_there(before: float, span: tuple[float, float]) -> None:
    device = VirtualDevice()
    sent = device.send("D", 50)
    device.work("compute", before)
    receive = device.receive(sent, 3)
    assert (receive.begin, receive.end) == span
    # Only copying is work; standing still is none.
    assert device.lanes()[-1] == Lane("compute", None, "D", span[1] - 3, span[1])


def test_a_receive_on_another_stream_leaves_the_sender_alone() -> None:
    device, streams = rig()
    device.work("before", 10, stream=streams["a"])
    sent = device.send("D", 50, stream=streams["a"])
    device.receive(sent, stream=streams["b"])
    device.work("sender", 1, stream=streams["a"])
    device.work("receiver", 1, stream=streams["b"])
    assert spans(device, "sender", "receiver") == [(10, 11), (60, 61)]


def test_a_receive_that_runs_twice_is_noted_twice() -> None:
    device = VirtualDevice()
    sent = device.send("D", 50)
    device.receive(sent, 2)
    device.receive(sent, 2)
    assert sent.received == 2
    assert device.windows() == [Window(sent, 0, 50, 52)]
    assert device.finished_at == 54


def test_a_transfer_that_nobody_receives_is_still_in_flight_at_the_end() -> None:
    device = VirtualDevice()
    sent = device.send("D", 50)
    device.work("w", 10)
    assert device.windows() == [Window(sent, 0, 50, None)]
    assert device.finished_at == 50
    device.synchronize()
    assert device.now == 10  # nothing of it is on any stream


def test_transfer_time_makes_transfers_late_early_and_overtake() -> None:
    device = VirtualDevice()
    asked: list[tuple[str, float]] = []

    def decide(transfer: Transfer, us: float) -> float:
        asked.append((transfer.name, us))
        return {"late": us + 50, "early": 0.0}.get(transfer.name, us)

    device.transfer_time = decide
    sent = [device.send(name, 100) for name in ("late", "early", "as it is")]
    assert [each.arrives for each in sent] == [150, 0, 100]
    assert asked == [("late", 100), ("early", 100), ("as it is", 100)]
    device.transfer_time = lambda transfer, us: -1.0
    with pytest.raises(ConfigurationError, match="transfer_time of 'x': -1.0 microseconds"):
        device.send("x", 1)
    device.transfer_time = None
    assert device.send("x", 1).arrives == 1


# -- what happened -----------------------------------------------------------------------------------------------------


def test_overlap_by_hand() -> None:
    device, streams = rig()
    device.work("compute", 100)
    device.host(40)
    device.work("comm", 100, stream=streams["a"])  # 40 to 140
    device.work("comm", 30, stream=streams["b"])  # 40 to 70
    device.host(160)
    device.send("D", 50)  # 200 to 250
    device.work("compute", 20)  # 200 to 220
    measured = device.overlap()
    assert measured == Overlap(length=250, compute=120, comm=150, hidden=80)
    assert measured.exposed == 70
    assert VirtualDevice().overlap() == Overlap(0, 0, 0, 0)


@given(PROGRAMS)
def test_overlap_is_that_of_counted_microseconds(commands: list[Command]) -> None:
    device, streams = rig()
    streams["a"] = device.default_stream
    act(device, streams, commands)
    busy: dict[bool, set[int]] = {True: set(), False: set()}
    for lane in device.lanes():
        busy[lane.stream == "compute"].update(range(round(lane.begin), round(lane.end)))
    measured = device.overlap()
    assert (measured.compute, measured.comm) == (len(busy[True]), len(busy[False]))
    assert measured.hidden == len(busy[True] & busy[False])
    assert device.busy() == len(busy[True])
    assert [(lane.begin) for lane in device.lanes()] == sorted(lane.begin for lane in device.lanes())


def test_accesses_are_in_the_program() -> None:
    device = VirtualDevice()
    rows, cache = device.new_buffer("rows"), device.new_buffer("KV cache")
    assert rows != device.new_buffer("rows")
    assert (str(rows), repr(rows)) == ("rows", "Buffer('rows')")
    made = device.work("A0", 1, reads=[rows], writes=[Access(cache, False, 0, 8)])
    assert made.accesses == (Access(rows, False), Access(cache, True, 0, 8))
    assert device.work("A1", 1, accesses=made.accesses).accesses is made.accesses
    sent = device.send("D", 1, reads=[rows])
    received = device.receive(sent, writes=[cache])
    assert device.program.operations[-2].accesses == (Access(rows, False),)
    assert (received.accesses, received.transfer) == ((Access(cache, True),), sent)


def test_places_are_kept_on_request() -> None:
    device = VirtualDevice(keep_places=True)
    device.work("w", 1)
    device.record(device.new_event(), device.default_stream)
    assert all(each.where.startswith("test_virtual_device.py:") for each in device.program.operations)
    assert VirtualDevice().work("w", 1).where == ""


# -- bad input, and what it needs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("us", [-1, -0.001, math.nan, math.inf])
def test_times_that_are_none(us: float) -> None:
    device = VirtualDevice()
    sent = device.send("D", 1)
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("x", lambda: device.work("x", us)),
        ("x", lambda: device.send("x", us)),
        ("D", lambda: device.receive(sent, us)),
        ("host", lambda: device.host(us)),
        ("launch", lambda: VirtualDevice(launch=us)),
        ("record", lambda: VirtualDevice(record=us)),
        ("wait", lambda: VirtualDevice(wait=us)),
    ]
    for name, call in calls:
        with pytest.raises(ConfigurationError, match=rf"^{name}: {us!r} microseconds; a time is a finite number"):
            call()
    assert (device.now, len(device.program.operations), sent.received) == (0, 1, 0)


def test_events_of_another_device_are_refused() -> None:
    device, other = VirtualDevice(), VirtualDevice()
    for call in (
        lambda: device.record(other.new_event(), device.default_stream),
        lambda: device.wait(device.default_stream, other.new_event()),
    ):
        with pytest.raises(ConfigurationError, match="belongs to another virtual device"):
            call()


def test_names_say_what_things_are() -> None:
    device = VirtualDevice(launch=2)
    device.work("w", 3)
    assert repr(device) == "VirtualDevice(now=2.0, 1 operations)"
    assert repr(device.default_stream) == "VirtualStream('compute', free=5.0)"
    assert repr(device.new_event()) == "VirtualEvent(1, at=None)"
    assert repr(device.capture(lambda: None)) == "VirtualGraph(0 operations, 0 replays)"
    assert Buffer("x") != Buffer("x")


def test_it_needs_no_torch() -> None:
    program = (
        "import sys; from dbo_greenlet.testing.layer_programs import low_latency, high_throughput; "
        "from dbo_greenlet.testing.step_run import run_step; "
        "runs = [run_step(each(2)) for each in (low_latency, high_throughput)]; "
        "assert all(run.error is None and run.checksum for run in runs); "
        "assert not {'torch', 'hypothesis', 'pytest'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
