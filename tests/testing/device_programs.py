"""Programs for the virtual device and its model, and what tests ask of a device."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from dbo_greenlet.devices.virtual import VirtualDevice, VirtualStream
from dbo_greenlet.stream_program import Operation
from tests.testing.device_model import Command

STREAMS = st.sampled_from("abc")
EVENTS = st.integers(0, 2)
TIMES = st.integers(0, 9)
ON_STREAMS = st.one_of(
    st.tuples(st.just("work"), STREAMS, TIMES),
    st.tuples(st.just("record"), STREAMS, EVENTS),
    st.tuples(st.just("wait"), STREAMS, EVENTS),
    st.tuples(st.just("send"), STREAMS, TIMES),
    st.tuples(st.just("receive"), STREAMS, st.integers(0, 9), st.integers(0, 3)),
)
OF_THE_HOST = st.one_of(
    st.tuples(st.just("host"), TIMES),
    st.tuples(st.just("host waits"), st.one_of(STREAMS, st.none())),
    st.tuples(st.just("host waits for event"), EVENTS),
)


def with_sends(commands: list[Command]) -> list[Command]:
    """Each receive is of an earlier send; those that have none are left out."""
    out: list[Command] = []
    sends = 0
    for command in commands:
        sends += command[0] == "send"
        if command[0] != "receive":
            out.append(command)
        elif sends:
            out.append((*command[:2], command[2] % sends, command[3]))
    return out


PROGRAMS = st.lists(st.one_of(ON_STREAMS, ON_STREAMS, OF_THE_HOST), max_size=14).map(with_sends)
COSTS = st.fixed_dictionaries({"launch": st.integers(0, 4), "record": st.integers(0, 2), "wait": st.integers(0, 2)})


def rig(**costs: float) -> tuple[VirtualDevice, dict[str, VirtualStream]]:
    device = VirtualDevice(**costs)
    return device, {name: device.new_stream(name) for name in "abc"}


def times(operations: list[Operation]) -> list[tuple[Any, Any]]:
    return [(each.begin, each.end) for each in operations]


def spans(device: VirtualDevice, *names: str) -> list[tuple[float, float]]:
    return [(each.begin, each.end) for each in device.lanes() if each.name in names]
