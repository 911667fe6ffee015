"""The order of operations: the four kinds of edges, and random programs against a graph that is searched."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo_greenlet.stream_program import StreamProgram
from dbo_greenlet.testing.happens_before import Order
from tests.testing.hand_programs import Hand
from tests.testing.random_programs import any_program, sharing_program, step_program
from tests.testing.reachability import Graph


@given(st.one_of(any_program(), step_program(), sharing_program()), st.booleans())
def test_order_is_reachability(program: StreamProgram, together: bool) -> None:
    order, graph = Order(program, order_of_microbatches=together), Graph(program, together)
    placed = [each for each in program.operations if each.kind not in ("host_wait", "wait")]
    for first in placed:
        assert order.before_the_end(first) == graph.before_the_end(first)
        for second in placed:
            assert order.before(first, second) == graph.before(first, second), f"{first} and {second}"


def two(hand: Hand) -> bool:
    """Whether the first operation is before the last."""
    operations = hand.program.operations
    return Order(hand.program).before(operations[0], operations[-1])


@pytest.mark.parametrize("record_first", [True, False])
def test_a_wait_refers_to_the_record_before_it(record_first: bool) -> None:
    hand = Hand()
    hand.work("compute", "a")
    for each in ("record", "wait") if record_first else ("wait", "record"):
        getattr(hand, each)("compute" if each == "record" else "comm", 1)
    hand.work("comm", "b")
    assert two(hand) is record_first


def test_an_event_that_is_recorded_again_stands_for_the_later_mark_in_later_waits_only() -> None:
    hand = Hand()
    hand.record("compute", 1)
    hand.wait("comm", 1)
    a = hand.work("compute", "a")
    b = hand.work("comm", "b")
    hand.record("compute", 1)
    c = hand.work("comm", "c")
    hand.wait("comm", 1)
    d = hand.work("comm", "d")
    order = Order(hand.program)
    assert [order.before(a, each) for each in (b, c, d)] == [False, False, True]


def test_waits_pass_on_what_the_recording_stream_waited_for() -> None:
    hand = Hand()
    hand.work("other", "a")
    hand.record("other", 1)
    hand.wait("comm", 1)
    hand.record("comm", 2)
    hand.wait("compute", 2)
    hand.work("compute", "b")
    assert two(hand)


def test_a_receive_is_behind_what_the_sending_stream_held() -> None:
    hand = Hand()
    hand.work("comm", "a")
    sent = hand.send("comm", "dispatch")
    late = hand.work("comm", "late")
    receive = hand.receive("compute", sent)
    order = Order(hand.program)
    assert order.before(hand.program.operations[0], receive)
    assert not order.before(late, receive)


@pytest.mark.parametrize(("stream", "before"), [(None, True), ("comm", True), ("other", False)])
def test_what_the_host_waited_for_is_before_what_it_issues_next(stream: str | None, before: bool) -> None:
    hand = Hand()
    hand.work("comm", "a")
    hand.work("other", "unrelated")
    hand.host_wait(stream)
    hand.work("compute", "b")
    assert two(hand) is before


def test_the_host_waits_for_an_event_and_not_for_what_came_after_its_record() -> None:
    hand = Hand()
    a = hand.work("comm", "a")
    hand.record("comm", 1)
    b = hand.work("comm", "b")
    hand.host_wait("comm", 1)
    c = hand.work("compute", "c")
    order = Order(hand.program)
    assert (order.before(a, c), order.before(b, c)) == (True, False)


def test_between_microbatches_a_stream_may_count_for_nothing() -> None:
    hand = Hand()
    outside = hand.turn(None).work("compute", "outside")
    first = hand.turn(0).work("compute", "first")
    second = hand.turn(1).work("compute", "second")
    third = hand.turn(0).work("compute", "third")
    last = hand.turn(None).work("compute", "last")
    order = Order(hand.program, order_of_microbatches=False)
    assert [order.before(outside, each) for each in (first, second, third, last)] == [True] * 4
    assert [order.before(first, each) for each in (second, third, last)] == [False, True, True]
    assert [order.before(second, each) for each in (third, last)] == [False, True]
