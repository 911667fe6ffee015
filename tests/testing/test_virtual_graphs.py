"""Captures and replays of the virtual device: against the model, and by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo_greenlet.devices.virtual import VirtualDevice, VirtualStream
from dbo_greenlet.devices.virtual_times import Lane
from dbo_greenlet.errors import ConfigurationError, GraphCaptureError
from tests.testing.device_model import Command, Model, act
from tests.testing.device_programs import COSTS, ON_STREAMS, STREAMS, rig, spans, times, with_sends


@given(
    st.lists(ON_STREAMS, max_size=10).map(with_sends),
    st.lists(st.one_of(ON_STREAMS, st.just(("replay",)), st.just(("replay",))), max_size=8),
    STREAMS,
    COSTS,
)
def test_replays_are_those_of_the_model(
    captured: list[Command], around: list[Command], launched_on: str, costs: dict[str, int]
) -> None:
    commands = with_sends([("replay", launched_on, captured) if each == ("replay",) else each for each in around])
    device, streams = rig(**costs)
    graph = device.capture(lambda: act(device, streams, captured), list(streams.values()))
    assert all(span == (None, None) for span in times(graph.operations))
    assert device.now == 0
    seen: list[list[tuple[Any, Any]]] = []

    class Recorded:
        def replay(self, stream: VirtualStream) -> None:
            graph.replay(stream)
            seen.append(times(graph.operations))

    act(device, streams, commands, [Recorded()] * len(commands))
    expected = Model(**costs).run(commands)
    outside = [entry for entry in expected if entry.command[0] != "replay"]
    assert times(device.program.operations[len(captured) :]) == [(entry.begin, entry.end) for entry in outside]
    replays = [entry for entry in expected if entry.command[0] == "replay"]
    assert seen == [[(part.begin, part.end) for part in entry.parts] for entry in replays]
    assert graph.replays == len(replays)


def test_a_replay_is_one_launch_and_does_not_touch_the_streams_that_were_captured() -> None:
    device, streams = rig(launch=5)
    a, b, c = streams.values()

    def run() -> str:
        event = device.new_event()
        device.work("first", 10, stream=a)
        device.record(event, a)
        device.wait(b, event)
        device.work("beside", 30, stream=b)
        device.work("second", 10, stream=a)
        return "output"

    graph = device.capture(run, [a, b])
    assert graph.output == "output"
    device.work("busy", 1000, stream=b)
    graph(c)
    assert spans(device, "first", "second", "beside") == [(10, 20), (20, 50), (20, 30)]
    device.work("behind", 1, stream=c)
    assert spans(device, "behind") == [(50, 51)]
    assert device.now == 15
    graph(c)
    assert spans(device, "first", "second", "beside") == [(51, 61), (61, 91), (61, 71)]


def test_a_captured_wait_keeps_its_record() -> None:
    device, streams = rig()
    a, b, _ = streams.values()
    event = device.new_event()

    def run() -> None:
        device.work("short", 10, stream=a)
        device.record(event, a)
        device.wait(b, event)
        device.work("long", 100, stream=a)
        device.record(event, a)
        device.work("behind the first", 1, stream=b)

    device.capture(run, [a, b]).replay(a)
    assert spans(device, "behind the first") == [(10, 11)]


def test_timing_events_are_recorded_by_each_replay() -> None:
    device = VirtualDevice()
    event, plain = device.new_timing_event(), device.new_event()

    def run() -> None:
        device.work("w", 10)
        device.record(event, device.default_stream)
        device.record(plain, device.default_stream)

    graph = device.capture(run)
    assert event.at is None
    graph.replay()
    event.synchronize()
    assert device.now == 10
    device.wait(device.new_stream("other"), event)
    graph.replay()
    assert (event.at, plain.at) == (20, None)
    with pytest.raises(GraphCaptureError, match="was captured into a graph; the host cannot wait for it"):
        plain.synchronize()


def test_what_a_capture_refuses() -> None:
    device, streams = rig()
    a, b, _ = streams.values()
    outside = device.new_event()
    device.record(outside, a)
    inside = device.new_event()
    sent = device.send("D", 1)
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: device.wait_for_host(a), "stream 'a' is being captured"),
        (device.synchronize, "stream 'a' is being captured"),
        (inside.synchronize, "stream 'a' is being captured"),
        (lambda: device.wait(a, outside), "recorded outside the capture; record it inside"),
        (lambda: (device.record(inside, a), device.wait(b, inside)), "into a graph, and the stream is not"),
        (lambda: device.receive(sent, stream=a), "'D' was sent outside and its receive is captured"),
        (lambda: device.receive(device.send("E", 1, stream=a), stream=b), "'E' was captured into a graph and its"),
        (lambda: empty.replay(), "cannot be replayed inside a capture"),
        (lambda: empty.replay(a), "cannot be replayed inside a capture"),
    ]
    empty = device.capture(lambda: None, [a])
    for call, message in refused:
        with device.stream_scope(a), pytest.raises(GraphCaptureError, match=message):
            device.capture(call, [a])
        assert not device.capturing() and a.graph is None
    with device.stream_scope(a), pytest.raises(ConfigurationError, match="none that is being captured already"):
        device.capture(lambda: device.capture(lambda: None, [a]), [a])
    with pytest.raises(ConfigurationError, match="at least one stream"):
        device.capture(lambda: None, [])
    device.record(inside, b)  # the device goes on as before
    device.wait(a, inside)
    device.synchronize()


def test_a_capture_that_fails_leaves_no_graph_and_no_times() -> None:
    device = VirtualDevice()

    def run() -> None:
        device.work("captured", 10)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        device.capture(run)
    device.work("eager", 5)
    assert device.lanes() == [Lane("compute", None, "eager", 0, 5)]
