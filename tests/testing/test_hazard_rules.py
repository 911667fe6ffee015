"""What a hazard is, and what is none: programs of a few operations, written by hand."""

from __future__ import annotations

import pytest

from dbo_greenlet.stream_program import Access
from dbo_greenlet.testing.hazards import find_hazards
from tests.testing.hand_programs import Hand


def kinds(hand: Hand) -> list[tuple[str, int, int | None]]:
    return [
        (each.kind, each.first.number, None if each.second is None else each.second.number)
        for each in find_hazards(hand.program)
    ]


def join(hand: Hand, stream: str = "comm") -> Hand:
    hand.turn(None).record(stream, 99)
    hand.wait("compute", 99)
    return hand


@pytest.mark.parametrize(
    ("one", "other", "collide"),
    [
        (Access("b", True, 0, 8), Access("b", False, 8, 16), False),
        (Access("b", True, 0, 8), Access("b", False, 7, 16), True),
        (Access("b", True), Access("b", False, 7, 16), True),
        (Access("b", True, 0, 60, False, 20, 12), Access("b", False, 12, 60, False, 20, 8), False),
        (Access("b", True, 0, 60, False, 20, 12), Access("b", False, 11, 60, False, 20, 8), True),
        (Access("b", True, 0, 60, False, 20, 12), Access("b", False, 32, 40), False),
        (Access("b", True, 0, 60, False, 20, 12), Access("b", False, 32, 41), True),
        (Access("b", True, 0, 60, False, 20, 12), Access("b", False, 0, 60, False, 10, 2), True),
        (Access("b", False, 0, 8), Access("b", False, 0, 8), False),
    ],
)
def test_only_common_bytes_collide(one: Access, other: Access, collide: bool) -> None:
    hand = Hand()
    hand.turn(0)
    for stream, access in (("comm", one), ("compute", other)):
        hand.work(stream, "w", [] if access.write else [access], [access] if access.write else [])
    assert kinds(join(hand)) == ([("race", 0, 1)] if collide else [])


def test_one_missing_edge_is_one_race_however_much_it_leaves_open() -> None:
    hand = Hand()
    hand.turn(0)
    for name in "abc":
        hand.work("comm", name, [], [name])
    for name in "abc":
        hand.work("compute", name, [name], [name])
    # From the last on the one to the first on the other: that would put all of them in order.
    assert kinds(join(hand)) == [("race", 0, 3), ("race", 1, 4), ("race", 2, 5)]
    hand = Hand()
    hand.turn(0)
    hand.work("comm", "all", [], ["a", "b", "c"])
    for name in "abc":
        hand.work("compute", name, [name], [name])
    assert kinds(join(hand)) == [("race", 0, 1)]


def test_what_a_send_reads_is_free_when_the_send_part_ends_unless_the_receive_names_it_too() -> None:
    for held in (False, True):
        hand = Hand()
        hand.turn(0).work("compute", "fill", [], ["message"])
        sent = hand.send("compute", "dispatch", ["message"])
        hand.work("compute", "fill again", [], ["message"])
        hand.receive("compute", sent, ["rows"], ["message"] if held else [])
        assert kinds(hand) == ([("race", 1, 2)] if held else [])


def test_a_transfer_that_is_never_received_names_who_reads_what_it_should_have_brought() -> None:
    hand = Hand()
    hand.turn(0).send("compute", "dispatch", ["hidden"], ["rows"])
    hand.turn(0).work("compute", "experts", ["rows"])
    (found,) = find_hazards(hand.program)
    assert (found.kind, found.first.number, found.second and found.second.number) == ("hook-never", 0, 1)
    assert "and #1 work 'experts'" in str(found)


def test_a_kv_cache_read_by_a_later_microbatch_is_no_reuse() -> None:
    for partial in (False, True):
        hand = Hand()
        everything = Access("cache", True, partial=partial)
        hand.turn(0).work("compute", "write", [], [everything])
        hand.work("compute", "attend", ["cache"])
        hand.turn(1).work("compute", "write", [], [everything])
        hand.work("compute", "attend", ["cache"])
        hand.turn(0).work("compute", "later", ["cache"])
        # The later read of microbatch 0 sees what 1 wrote: no reuse where both write rows of their own.
        assert kinds(hand) == ([] if partial else [("workspace-reused", 2, 4)])


@pytest.mark.parametrize(
    ("sibling", "found"), [("adds", []), ("clears", [("workspace-reused", 1, 3)]), ("clears alone", [])]
)
def test_what_all_microbatches_add_to_is_no_reuse(sibling: str, found: list[tuple[str, int, int]]) -> None:
    hand = Hand()
    if sibling != "clears alone":
        hand.turn(0).work("compute", "count", ["load"], ["load"])
    hand.turn(1)
    if sibling != "adds":
        hand.work("compute", "clear", [], ["load"])
    hand.work("compute", "count", ["load"], ["load"])
    hand.turn(0).work("compute", "count", ["load"], ["load"])
    hand.work("compute", "count", ["load"], ["load"])
    assert kinds(hand) == found


def test_who_first_reads_what_one_write_destroyed_in_several_buffers_is_told() -> None:
    hand = Hand()
    hand.turn(0).work("compute", "first", [], ["b", "a"])
    hand.turn(1).work("compute", "over", [], ["b", "a"])
    hand.turn(0).work("compute", "early", ["a"])
    hand.work("compute", "late", ["b"])
    assert kinds(hand) == [("workspace-reused", 1, 2)]


def test_what_is_added_by_a_sibling_is_seen_by_one_that_only_reads() -> None:
    hand = Hand()
    for i in (0, 1):
        hand.turn(i).work("compute", "residual", ["hidden"], ["hidden"])
    hand.turn(0).work("compute", "attention", ["hidden"], ["h0"])
    assert kinds(hand) == [("workspace-reused", 1, 2)]


def test_an_event_in_a_slice_with_nothing_of_its_own_is_no_late_event() -> None:
    hand = Hand()
    for i in range(2):
        hand.turn(i).work("compute", "attention", [], [f"h{i}"])
    for i in range(2):
        # It waits for its own communication first, finds no tokens, and goes on to communicate.
        hand.turn(i).record("comm", i)
        hand.wait("compute", i)
        hand.record("compute", 10 + i)
        hand.wait("comm", 10 + i)
        hand.work("comm", "dispatch", [f"h{i}"], [f"r{i}"])
    assert kinds(join(hand)) == []


def test_what_a_siblings_hook_received_could_not_be_marked_before_the_switch() -> None:
    hand = Hand()
    sent = []
    for i in range(2):
        hand.turn(i)
        for transfer in sent:
            hand.receive("compute", transfer, ["r0"])
        hand.work("compute", "attention", [], [f"h{i}"])
        sent = [hand.send("compute", "dispatch", [f"h{i}"])]
    hand.receive("compute", *sent, ["r1"])
    # Its rows arrived in the sibling's slice, and go on at once on the other stream.
    hand.turn(0).record("compute", 0)
    hand.wait("comm", 0)
    hand.work("comm", "experts", ["r0"], ["r0"])
    assert kinds(join(hand)) == []


def test_a_late_event_is_none_where_the_siblings_work_is_needed() -> None:
    for buffer, late in (("h1", True), ("h0", False)):
        hand = Hand()
        hand.turn(1).work("compute", "attention", [], ["h1"])
        hand.turn(0).work("compute", "attention", [], ["h0"])
        hand.turn(1).record("compute", 1)
        hand.wait("comm", 1)
        hand.work("comm", "dispatch", [buffer])
        assert kinds(join(hand)) == ([("event-after-switch", 1, 2)] if late else [])


def test_a_host_that_waits_joins_as_well() -> None:
    hand = Hand()
    hand.turn(0).work("comm", "log", [], ["log"])
    assert kinds(hand) == [("unjoined-stream", 0, None)]
    hand.host_wait("comm")
    assert kinds(hand) == []


@pytest.mark.parametrize(
    ("between", "said"),
    [
        ([], " for an event recorded on comm behind #0."),
        ([("record", "comm", 1)], "(#1 records one, and compute does not wait for it)."),
        ([("wait", "compute", 1)], "(#1 waits for an event that was not recorded yet, which waits for nothing)."),
    ],
)
def test_the_missing_edge_says_what_there_is_of_it(between: list[tuple[str, str, int]], said: str) -> None:
    hand = Hand()
    hand.turn(0).work("comm", "dispatch", [], ["rows"])
    for kind, stream, event in between:
        getattr(hand, kind)(stream, event)
    hand.work("compute", "experts", ["rows"])
    hand.host_wait()
    (found,) = find_hazards(hand.program)
    assert str(found).split("Missing: ")[1].startswith("compute waiting, before #")
    assert str(found).endswith(said)


def test_a_wait_for_an_older_record_is_named() -> None:
    hand = Hand()
    hand.turn(0).record("comm", 1)
    hand.work("comm", "dispatch", [], ["rows"])
    hand.wait("compute", 1)
    hand.work("compute", "experts", ["rows"])
    hand.host_wait()
    (found,) = find_hazards(hand.program)
    assert str(found).endswith("(#2 waits for #0, which was recorded before #1).")
