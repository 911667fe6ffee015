"""Hypothesis strategies for stream programs: any operations at all, and programs that look like those of a step."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from dbo_greenlet.stream_program import Access, StreamProgram
from tests.testing.hand_programs import Hand

STREAMS = ("compute", "comm", "other")


@st.composite
def accesses(draw: Any, buffers: str = "abc") -> tuple[Access, ...]:
    """A few accesses, reads first; to whole buffers mostly."""
    found = []
    for write in (False, True):
        for buffer in draw(st.lists(st.sampled_from(buffers), max_size=2, unique=True)):
            begin, length = draw(st.sampled_from([(0, None), (0, None), (0, 4), (4, 4), (2, 4), (0, 8)]))
            partial = write and draw(st.integers(0, 7)) == 0
            found.append(Access(buffer, write, begin, None if length is None else begin + length, partial))
    return tuple(found)


@st.composite
def any_program(draw: Any, streams: tuple[str, ...] = STREAMS, most: int = 14) -> StreamProgram:
    """Operations without any sense."""
    hand = Hand()
    sent: list[Any] = []
    for _ in range(draw(st.integers(0, most))):
        if draw(st.integers(0, 2)) == 0:
            hand.turn(draw(st.sampled_from([0, 0, 1, 1, 2, None])))
        stream = draw(st.sampled_from(streams))
        kind = draw(st.sampled_from(["work", "work", "work", "record", "wait", "send", "receive", "host_wait"]))
        if kind == "work":
            touched = draw(accesses())
            reads, writes = split(touched)
            hand.work(stream, "w", reads, writes)
        elif kind == "send":
            reads, writes = split(draw(accesses()))
            sent.append(hand.send(stream, "s", reads, writes))
        elif kind == "receive":
            if sent:
                reads, writes = split(draw(accesses()))
                # The oldest that was not received, mostly; an old one again, sometimes.
                open_ones = [each for each in sent if not each.received]
                pool = open_ones if open_ones and draw(st.integers(0, 9)) else sent
                hand.receive(stream, draw(st.sampled_from(pool)), writes, reads)
        elif kind == "host_wait":
            if draw(st.booleans()):
                hand.host_wait(draw(st.sampled_from([None, *streams])))
            else:
                hand.host_wait(stream, draw(st.integers(0, 2)))
        else:
            getattr(hand, kind)(stream, draw(st.integers(0, 2)))
    return hand.program


@st.composite
def step_program(draw: Any) -> StreamProgram:
    """Microbatches in turn that hand over between streams by events and transfers, with now and then an edge left out.

    Buffers are a microbatch's own, for the most part.
    """
    hand = Hand()
    count = draw(st.integers(1, 3))
    careless = draw(st.sampled_from([0, 0, 3, 10]))

    def careful() -> bool:
        return not careless or draw(st.integers(0, careless)) > 0

    waiting: dict[int, Any] = {}
    for _ in range(draw(st.integers(1, 6))):
        i = draw(st.integers(0, count - 1))
        hand.turn(i, f"site{draw(st.integers(0, 1))}")
        for owner in list(waiting):
            if owner == i or draw(st.booleans()):
                stream, transfer = waiting.pop(owner)
                if careful():
                    hand.receive(stream, transfer, [f"rows{owner}"])
        mine = f"hidden{i}" if careful() else "hidden0"
        hand.work("compute", "attention", [mine, f"rows{i}"], [mine, "scratch"])
        hand.work("compute", "gate", ["scratch"], [f"gate{i}"])
        way = draw(st.integers(0, 2))
        if way == 1:
            waiting[i] = ("compute", hand.send("compute", "dispatch", [mine]))
        elif way == 2:
            late = not careful()
            if not late:
                hand.record("compute", i)
            if draw(st.booleans()):
                j = draw(st.integers(0, count - 1))
                hand.turn(j, "meanwhile").work("compute", "experts", [f"gate{j}"], [f"out{j}"])
                hand.turn(i, "later")
            if late and careful():
                hand.record("compute", i)
            if careful():
                hand.wait("comm", i)
            hand.work("comm", "dispatch", [mine], [f"rows{i}"])
            if careful():
                hand.record("comm", 10 + i)
                hand.wait("compute", 10 + i)
    hand.turn(None)
    for stream, transfer in waiting.values():
        hand.receive(stream, transfer, [f"rows{transfer.owner}"])
    if careful():
        hand.record("comm", 20)
        hand.wait("compute", 20)
    return hand.program


@st.composite
def sharing_program(draw: Any) -> StreamProgram:
    """Microbatches on one stream, or on two that wait for each other, that share a buffer or two."""
    hand = Hand()
    streams = draw(st.sampled_from([("compute",), ("compute", "comm")]))
    for _ in range(draw(st.integers(1, 8))):
        hand.turn(draw(st.sampled_from([0, 1, 1, 2])))
        stream = draw(st.sampled_from(streams))
        if len(streams) > 1:
            for each in streams:
                if each != stream and draw(st.integers(0, 9)):
                    hand.record(each, 1)
                    hand.wait(stream, 1)
        hand.work(stream, "w", *split(draw(accesses("ab"))))
    hand.turn(None).record("comm", 2)
    hand.wait("compute", 2)
    return hand.program


def split(touched: tuple[Access, ...]) -> tuple[list[Access], list[Access]]:
    return [each for each in touched if not each.write], [each for each in touched if each.write]
