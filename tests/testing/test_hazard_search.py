"""Hazards of random programs: the search against every pair looked at by hand, the quick look against the search."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dbo_greenlet.stream_program import StreamProgram
from dbo_greenlet.testing.hazard_scan import looks_clean
from dbo_greenlet.testing.hazard_search import search
from dbo_greenlet.testing.hazards import find_hazards
from tests.testing.hand_programs import Hand
from tests.testing.random_programs import any_program, sharing_program, step_program
from tests.testing.reachability import hazards

PROGRAMS = st.one_of(any_program(), any_program(("compute",)), step_program(), sharing_program())


@given(PROGRAMS, st.booleans())
@settings(max_examples=150)
def test_the_search_finds_what_every_pair_shows(program: StreamProgram, together: bool) -> None:
    found = [
        (each.kind, each.first.number, None if each.second is None else each.second.number)
        for each in search(program, together)
    ]
    assert not together or len(found) == len(set(found))
    assert set(found) == hazards(program, together), "\n".join(map(str, program.operations))


@given(PROGRAMS)
@settings(max_examples=300)
def test_what_looks_clean_is_clean(program: StreamProgram) -> None:
    if looks_clean(program):
        assert search(program) == [], "\n".join(map(str, program.operations))


def test_a_long_program_with_one_bug_is_searched_as_well() -> None:
    # Thousands of uses of the same few buffers: what looks at every two of them does not come back in a test's time.
    hand = Hand()
    layers = 1000
    for layer in range(layers):
        for i in range(2):
            hand.turn(i)
            hand.work("compute", "qkv", [f"h{i}"], ["workspace"])
            hand.work("compute", "attention", ["workspace"], [f"h{i}"])
            hand.record("compute", i)
            hand.wait("comm", i)
            hand.work("comm", "dispatch", [f"h{i}"], [f"rows{i}"])
            hand.record("comm", 2 + i)
            if (layer, i) != (layers // 2, 1):
                hand.wait("compute", 2 + i)
            hand.work("compute", "experts", [f"rows{i}"], [f"out{i}"])
            sent = hand.send("compute", "combine", [f"out{i}"])
            hand.receive("compute", sent, [f"h{i}"])
    (found,) = find_hazards(hand.program)
    assert (found.kind, found.first.name, found.buffer) == ("race", "dispatch", "rows1")
    assert found.second is not None and found.second.name == "experts"


@given(PROGRAMS)
def test_every_hazard_has_its_words(program: StreamProgram) -> None:
    for hazard in find_hazards(program):
        assert str(hazard).startswith(f"{hazard.kind}: ")
        assert f"#{hazard.first.number} " in str(hazard)
        assert hazard.second is None or f"#{hazard.second.number} " in str(hazard)
        assert ". Missing: " in str(hazard)
        assert str(hazard).endswith(".")
