"""What buffers hold: byte ranges against single bytes, and when an operation sees what another one writes."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo_greenlet.devices.virtual import VirtualDevice
from dbo_greenlet.errors import ConfigurationError
from dbo_greenlet.stream_program import Access, StreamProgram
from dbo_greenlet.testing.checksum import checksum
from dbo_greenlet.testing.values import Memory, Results, Value, values_of

SPANS = st.tuples(st.integers(0, 12), st.one_of(st.none(), st.integers(0, 12)))
FAR = 40


@given(st.lists(st.tuples(SPANS, st.integers(1, 5)), max_size=6), SPANS)
def test_ranges_are_those_of_single_bytes(writes: list[tuple[tuple[int, int | None], int]], asked: tuple) -> None:
    memory = Memory()
    untouched = memory.read("b")[0]
    cells = [(0, untouched)] * FAR  # who wrote it, and what
    for number, ((begin, end), value) in enumerate(writes, 1):
        memory.write(Access("b", True, begin, end), value)
        for place in range(begin, FAR if end is None else end):
            cells[place] = (number, value)
    begin, end = asked
    seen = cells[begin : FAR if end is None else end]
    # One number for each stretch that was written at once; a later write in its middle leaves two.
    runs = [cell for place, cell in enumerate(seen) if place == 0 or seen[place - 1] != cell]
    assert memory.read(Access("b", False, begin, end)) == tuple(value for _, value in runs)
    assert memory.read("other") != (untouched,)


class Rig:
    def __init__(self) -> None:
        self.device = VirtualDevice()
        self.a, self.b = (self.device.new_stream(name) for name in "ab")
        self.x, self.y = "x", "y"

    def outcome(self, buffer: str = "y") -> tuple[int, ...]:
        return values_of(self.device.program).read(buffer)


def reader_at(begin: float, length: float) -> tuple[int, ...]:
    """What a reader gets that begins then, where x is written from 10 to 20 and nobody waits for anybody."""
    rig = Rig()
    rig.device.work("idle", 10, stream=rig.a)
    rig.device.work("idle", begin, stream=rig.b)
    rig.device.work("writer", 10, writes=[rig.x], stream=rig.a)
    rig.device.work("reader", length, reads=[rig.x], writes=[rig.y], stream=rig.b)
    return rig.outcome()


def test_who_reads_while_somebody_writes_sees_neither_the_old_value_nor_the_new() -> None:
    old, new = reader_at(0, 5), reader_at(20, 5)
    assert old != new
    assert reader_at(25, 100) == new and reader_at(3, 6) == old
    torn = [reader_at(begin, length) for begin, length in [(5, 10), (12, 5), (12, 10), (5, 20), (19, 1.5)]]
    assert not {old, new} & set(torn)


def test_work_in_place_sees_what_was_there() -> None:
    def outcome(name: str) -> tuple[int, ...]:
        rig = Rig()
        rig.device.work(name, 3, writes=[rig.y])
        rig.device.work("doubles", 3, reads=[rig.y], writes=[rig.y])
        return rig.outcome()

    assert outcome("one") == outcome("one") != outcome("another")


def test_the_order_of_work_that_touches_nothing_in_common_does_not_matter() -> None:
    def outcome(order: list[str]) -> list[tuple[int, ...]]:
        rig = Rig()
        for buffer in order:
            rig.device.work("w", 1, reads=[buffer], writes=[buffer])
        return [rig.outcome(buffer) for buffer in "xy"]

    assert outcome(["x", "y", "x"]) == outcome(["y", "x", "x"]) == outcome(["x", "x", "y"])
    assert outcome(["x", "y"]) != outcome(["x", "x", "y"])


def test_two_buffers_of_one_writer_differ() -> None:
    rig = Rig()
    rig.device.work("w", 1, writes=["x", "y"])
    assert rig.outcome("x") != rig.outcome("y")


def test_what_arrives_is_what_was_there_when_it_left() -> None:
    def outcome(*, changed_before: bool = False, changed_after: bool = False) -> tuple[int, ...]:
        rig = Rig()
        if changed_before:
            rig.device.work("changes", 1, writes=[rig.x])
        sent = rig.device.send("D", 50, reads=[rig.x])
        if changed_after:
            rig.device.work("changes", 1, writes=[rig.x])
        rig.device.receive(sent, 2, writes=[rig.y])
        return rig.outcome()

    assert outcome() == outcome(changed_after=True) != outcome(changed_before=True)


def test_a_read_before_the_receive_sees_the_old_rows() -> None:
    def outcome(*, early: bool) -> tuple[int, ...]:
        rig = Rig()
        sent = rig.device.send("D", 50, reads=[rig.x])
        if not early:
            rig.device.receive(sent, writes=["rows"])
        rig.device.work("MLP", 100, reads=["rows"], writes=[rig.y])
        if early:
            rig.device.receive(sent, writes=["rows"])
        return rig.outcome()

    assert outcome(early=True) != outcome(early=False)


def test_a_partial_write_leaves_something_of_what_was_there() -> None:
    def outcome(before: str, *, partial: bool) -> tuple[int, ...]:
        rig = Rig()
        rig.device.work(before, 1, writes=[rig.y])
        rig.device.work("scatters", 1, writes=[Access(rig.y, True, partial=partial)])
        return rig.outcome()

    assert outcome("a", partial=True) == outcome("a", partial=True) != outcome("b", partial=True)
    assert outcome("a", partial=False) == outcome("b", partial=False)


def test_columns_have_no_values() -> None:
    rig = Rig()
    rig.device.work("w", 1, writes=[Access(rig.y, True, 0, 64, pitch=16, run=8)])
    with pytest.raises(ConfigurationError, match=r"no values for columns .*, as of #0 work 'w'"):
        rig.outcome()


def test_no_time_no_values() -> None:
    program = StreamProgram()
    program.add("work", "compute", "A0", (Access("x", True),))
    with pytest.raises(ConfigurationError, match=r"there are no values without times, and #0 work 'A0' on compute"):
        values_of(program)
    with pytest.raises(ConfigurationError, match="use a VirtualDevice"):
        repr(Results(program).of("x"))


def test_a_value_is_compared_by_its_number() -> None:
    def value(name: str) -> Value:
        device = VirtualDevice()
        made = Results(device.program).of("x")  # before anything ran: it is read when somebody asks
        device.work(name, 1, writes=["x"])
        return made

    assert value("a") == value("a") != value("b")
    assert value("a") != value("a").number
    assert len({value("a"), value("a"), value("b")}) == 2
    assert checksum([value("a")]) == checksum([value("a")]) != checksum([value("b")])
    assert repr(value("a")).startswith("Value(x: ")


def test_values_are_the_same_in_every_process() -> None:
    program = (
        "from dbo_greenlet.testing.layer_programs import low_latency\n"
        "from dbo_greenlet.testing.step_run import run_step\n"
        "print(run_step(low_latency(2)).checksum)"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1 and len(seen.pop().strip()) == 16
