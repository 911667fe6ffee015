from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo_greenlet.errors import ScheduleDecodeError
from dbo_greenlet.schedule import Schedule


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    count = draw(st.integers(1, 36))
    decisions = draw(st.lists(st.integers(0, count - 1), max_size=60))
    return Schedule(count, tuple(decisions), tuple(draw(st.sampled_from(["", "a", "b"])) for _ in decisions))


@given(schedules())
def test_decode_gives_back_what_was_encoded(schedule: Schedule) -> None:
    assert Schedule.decode(schedule.encode()) == Schedule(schedule.count, schedule.decisions)


@given(schedules(), st.integers(0, 40))
def test_a_truncated_string_is_refused(schedule: Schedule, keep: int) -> None:
    text = schedule.encode()
    if keep < len(text):
        with pytest.raises(ScheduleDecodeError):
            Schedule.decode(text[:keep])


@given(schedules(), st.data())
def test_a_mistyped_character_is_refused(schedule: Schedule, data: st.DataObject) -> None:
    text = schedule.encode()
    place = data.draw(st.integers(0, len(text) - 1))
    typo = data.draw(st.sampled_from("0123456789abcxyz(*):").filter(lambda c: c != text[place]))
    with pytest.raises(ScheduleDecodeError):
        Schedule.decode(text[:place] + typo + text[place + 1 :])


def test_round_robin_of_a_deep_model_is_one_short_line() -> None:
    schedule = Schedule(2, (0, 1) * 241)
    assert schedule.encode().startswith("dbo1:2:(01*241):")


def test_another_version_is_refused_by_name() -> None:
    with pytest.raises(ScheduleDecodeError, match=r"'dbo9'.*'dbo1'"):
        Schedule.decode("dbo9:2:01:abcdef")


def test_a_string_that_would_not_fit_in_memory_is_refused() -> None:
    body = "dbo1:2:" + "(01*999999999)" * 3
    import hashlib

    with pytest.raises(ScheduleDecodeError, match="more than"):
        Schedule.decode(f"{body}:{hashlib.blake2b(body.encode(), digest_size=3).hexdigest()}")


def test_an_index_that_is_not_below_n_is_refused() -> None:
    with pytest.raises(ScheduleDecodeError, match="not below its N = 2"):
        Schedule.decode(Schedule(2, (0, 5)).encode())


def test_the_hash_sees_decisions_sites_and_count() -> None:
    base = Schedule(2, (0, 1), ("a", "a"))
    others = [Schedule(3, (0, 1), ("a", "a")), Schedule(2, (1, 0), ("a", "a")), Schedule(2, (0, 1), ("a", "b"))]
    assert base.hash == Schedule(2, (0, 1), ("a", "a")).hash
    assert len({base.hash, *(o.hash for o in others)}) == 4
    # Frozen, because traces on disk carry it.
    assert base.hash == "257cca9c83081a17"


def test_the_hash_takes_any_string_for_a_site() -> None:
    broken, other = "caf\udce9.dispatch", "caf\udcea.dispatch"
    assert Schedule(1, (0, 0), (broken, "")).hash != Schedule(1, (0, 0), (other, "")).hash
    # Committed golden files and traces hold hashes: that of ordinary sites never changes.
    assert Schedule(2, (0, 1, 0, 1), ("a", "café", "", "")).hash == "8c49ca60fb4a4e04"


def test_yields_are_slices_less_the_returning_one() -> None:
    assert Schedule(3, (0, 1, 2, 0, 2, 2)).yields == (1, 0, 2)
