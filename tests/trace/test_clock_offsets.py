"""Clocks on one axis: bounds from collectives against a slow reference, hosts, drift, and what fits nothing."""

from __future__ import annotations

import gzip
import json
import os
from itertools import permutations
from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo_greenlet.errors import TraceFileError
from dbo_greenlet.trace import HeaderRecord, StepRecord, TraceWriter
from dbo_greenlet.trace.clocks.arrivals import arrivals, render_arrivals
from dbo_greenlet.trace.clocks.bounds import Bounds, Contradiction, bounds_of
from dbo_greenlet.trace.clocks.offsets import axis_of, common_axis
from dbo_greenlet.trace.clocks.rank_clock import RankClock
from tests.trace.clocks import collectives

Some = list[dict[int, tuple[float, float]]]

# -- bounds ------------------------------------------------------------------------------------------------------------


def slow_bound(some: Some, first: int, second: int) -> float:
    """The most that shift[second] - shift[first] can be: over every way through other ranks."""
    ranks = sorted({rank for each in some for rank in each})
    others = [rank for rank in ranks if rank not in (first, second)]

    def step(r: int, s: int) -> float:
        return min((each[r][1] - each[s][0] for each in some if r in each and s in each), default=inf)

    ways = [way for length in range(len(others) + 1) for way in permutations(others, length)]
    return min(sum(step(*pair) for pair in zip((first, *way), (*way, second), strict=True)) for way in ways)


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[float], Some]:
    """Shifts of up to four clocks, and collectives that each take place between some of them."""
    times = st.integers(0, 400)
    shifts = [float(draw(st.integers(-3000, 3000))) for _ in range(draw(st.integers(2, 4)))]
    some = []
    for number in range(draw(st.integers(1, 6))):
        members = draw(st.sets(st.sampled_from(range(len(shifts))), min_size=2))
        entered = {rank: 1000.0 * number + draw(times) for rank in members}
        left = {rank: max(entered.values()) + draw(times) for rank in members}
        some.append({rank: (entered[rank] - shifts[rank], left[rank] - shifts[rank]) for rank in members})
    return shifts, some


@given(runs())
def test_bounds_hold_the_truth_and_are_the_tightest(
    run: tuple[list[float], Some],
) -> None:
    shifts, some = run
    found = bounds_of(some)
    assert isinstance(found, Bounds)
    for r, rank in enumerate(found.ranks):
        for s, other in enumerate(found.ranks):
            if rank != other:
                assert found.most[r][s] == slow_bound(some, rank, other)
                assert shifts[other] - shifts[rank] <= found.most[r][s]


@given(runs())
def test_all_middles_together_let_nobody_leave_early(
    run: tuple[list[float], Some],
) -> None:
    shifts, some = run
    axis = axis_of(some, ranks=range(len(shifts)))
    for each in some:
        placed = {rank: (axis.place(rank, enter), axis.place(rank, leave)) for rank, (enter, leave) in each.items()}
        known = [span for rank, span in placed.items() if axis.clocks[rank].within is not None]
        if known:
            assert min(leave for _, leave in known) >= max(enter for enter, _ in known) - 1e-6
    for rank, clock in axis.clocks.items():
        if clock.within is not None:
            assert abs(clock.shift(0.0) - (shifts[rank] - shifts[axis.reference])) <= clock.within + 0.002


def test_bounds_by_hand() -> None:
    # Rank 1's clock is 100 behind: it shows 0 when rank 0's shows 100.
    some = [{0: (100.0, 130.0), 1: (10.0, 25.0)}, {0: (220.0, 231.0), 1: (105.0, 140.0)}]
    found = bounds_of(some)
    assert isinstance(found, Bounds)
    # By the first at most 130 - 10 and at least 100 - 25, by the second at most 231 - 105 and at least 220 - 140.
    assert (found.most[0][1], -found.most[1][0]) == (120.0, 80.0)
    assert found.middle(0) == {0: (0.0, 0.0), 1: (100.0, 20.0)}
    axis = axis_of(some, ranks=(0, 1))
    assert axis.place(1, 10.0) == 110.0
    assert axis.text().splitlines() == [
        "The ranks lie on one axis by 2 collectives, which no rank leaves before all have entered.",
        # By up to 0.001 of the 130 us from the first enter to the last leave the clocks can have drifted apart.
        "rank 1: +100.000 us, give or take 20.130 us",
    ]


def test_a_contradiction_names_ranks_and_collectives() -> None:
    some = [{0: (0.0, 10.0), 1: (0.0, 10.0)}, {0: (100.0, 110.0), 1: (150.0, 160.0)}]
    found = bounds_of(some)
    # By the first the shift is -10 to 10, by the second -60 to -40.
    assert found == Contradiction((0, 1), 30.0, (1, 0))
    axis = axis_of(some, ranks=(0, 1), what="vote")
    assert axis.problem is not None and axis.shift(1) == 0.0
    assert "the bounds by vote 1 and vote 0 miss each other by 30.000 us" in axis.problem
    assert render_arrivals(axis, some).splitlines()[-1] == axis.problem, "who waits is not known then"


def test_three_ranks_that_contradict_each_other_only_together() -> None:
    # Each pair has an offset: 1 is at most 1 from 0, 2 at most 1 from 1, but 0 is 49 to 51 from 2.
    some = [{0: (0.0, 1.0), 1: (0.0, 1.0)}, {1: (0.0, 1.0), 2: (0.0, 1.0)}, {0: (0.0, 1.0), 2: (50.0, 51.0)}]
    found = bounds_of(some)
    assert isinstance(found, Contradiction)
    assert found.apart == 49 - 2
    assert sorted(found.ranks) == [0, 1, 2] and sorted(found.collectives) == [0, 1, 2]
    assert "of ranks" in str(axis_of(some, ranks=range(3)).problem)


@given(runs(), st.integers(0, 5), st.integers(1000, 9000))
def test_a_cycle_that_contradicts_itself_does(run: tuple[list[float], Some], place: int, moved: int) -> None:
    """One rank's part in one collective is moved: if that contradicts, the cycle that is named is shorter than zero."""
    _, some = run
    spoilt = [dict(each) for each in some]
    each = spoilt[place % len(spoilt)]
    rank = min(each)
    each[rank] = (each[rank][0] + moved, each[rank][1] + moved)
    found = bounds_of(spoilt)
    if isinstance(found, Contradiction):
        pairs = zip(found.ranks, (*found.ranks[1:], found.ranks[0]), found.collectives, strict=True)
        assert sum(spoilt[k][r][1] - spoilt[k][s][0] for r, s, k in pairs) == -found.apart < 0


# -- hosts -------------------------------------------------------------------------------------------------------------


def test_ranks_of_one_host_are_placed_exactly() -> None:
    some = collectives([0.0, 250.0, -9000.0], 40)
    origins = {0: 10**12, 1: 10**12 + 250_000, 2: 10**12 - 9_000_000}
    axis = axis_of(some, ranks=range(3), origins=origins, what="vote")
    assert [axis.shift(rank) for rank in range(3)] == [0.0, 250.0, -9000.0]
    assert axis.text() == "The ranks lie on one axis by the clock of their host, and 40 votes agree."


def test_headers_of_two_hosts_are_told_from_one() -> None:
    some = collectives([0.0, 250.0, -9000.0], 40)
    # Rank 2's host was switched on at another time.
    axis = axis_of(some, ranks=range(3), origins={0: 10**12, 1: 10**12 + 250_000, 2: 7 * 10**12})
    assert axis.clocks[1] == RankClock(((0.0, 250.0),), 0.0)
    within = axis.clocks[2].within
    assert within is not None and 0 < within < 1 and abs(axis.shift(2) + 9000) <= within
    assert "; rank 1 on the same host as rank 0." in axis.how
    both = axis_of(some, ranks=range(3), origins={0: 10**12, 1: 5 * 10**12, 2: 7 * 10**12})
    assert both.how.endswith("; the clocks in their headers are not of one host.")
    assert abs(both.shift(1) - 250) < 1


def test_without_a_collective_the_headers_stand_alone() -> None:
    axis = axis_of([], ranks=(0, 1), origins={0: 5_000, 1: 9_000})
    assert axis.shift(1) == 4.0 and axis.clocks[1].within is None
    assert "of ranks on several hosts it says nothing" in axis.how
    assert "Nothing says how the clocks" in axis_of([], ranks=(0, 1), origins={0: 0, 1: 9_000}).how
    assert axis_of([], ranks=(3,), origins={3: 9_000}).how == "One rank, one clock."


def test_a_rank_that_never_took_part_is_said() -> None:
    axis = axis_of(collectives([0.0, 40.0], 10), ranks=(0, 1, 5))
    assert axis.how.endswith("Where rank 5 belongs nothing says.")
    assert axis.clocks[5].within is None and axis.place(5, 7.0) == 7.0


# -- drift -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rates", [(0.0, 5e-5, -2e-5), (0.0, -1e-6, 4e-4)])
def test_clocks_of_different_speed(rates: tuple[float, ...]) -> None:
    shifts = [0.0, 1234.5, -9e6]
    axis = axis_of(collectives(shifts, 600, drift=rates), ranks=range(3))
    assert axis.problem is None and "run at different speeds" in axis.how
    for rank in (1, 2):
        clock = axis.clocks[rank]
        assert clock.within is not None and clock.within < 1
        for at in (0.0, 3e8, 6e8):
            assert abs(clock.shift(at) - (shifts[rank] + rates[rank] * at)) < 1.5
        assert abs(clock.drift - rates[rank] * 1e6) < 0.01


@pytest.mark.parametrize("bend", [4e8, 4.37e8])
def test_a_speed_that_changes(bend: float) -> None:
    # 20 millionths until the clock shows `bend`, then 80.
    def shows(true: float) -> float:
        early = (true - 10.0) / (1 + 2e-5)
        return early if early < bend else (true - 10.0 + (8e-5 - 2e-5) * bend) / (1 + 8e-5)

    axis = axis_of(collectives([0.0, 0.0], 800, shows={1: shows}), ranks=(0, 1))
    assert axis.problem is None
    clock = axis.clocks[1]
    assert len(clock.knots) > 2 and clock.within is not None

    def wrong(at: float) -> float:
        return abs(clock.shift(at) - (10.0 + 2e-5 * min(at, bend) + 8e-5 * max(at - bend, 0.0)))

    assert max(wrong(1e6 * second) for second in range(800)) < 20
    assert max(wrong(at) for at in (0.0, 1e8, 2e8, 6e8, 7e8)) < 0.5


def test_a_jump_is_no_drift() -> None:
    some = collectives([0.0, 0.0], 64)
    jumped = [
        each if number < 32 else {0: each[0], 1: tuple(at + 5e6 for at in each[1])} for number, each in enumerate(some)
    ]
    axis = axis_of(jumped, ranks=(0, 1))
    assert axis.problem is not None and "no drift explains it" in axis.problem


def test_a_clock_goes_straight_beyond_its_knots() -> None:
    clock = RankClock(((0.0, 10.0), (100.0, 20.0), (200.0, 20.0)), 1.0)
    assert [clock.shift(at) for at in (-100.0, 0.0, 50.0, 100.0, 150.0, 300.0)] == [0.0, 10.0, 15.0, 20.0, 20.0, 20.0]
    assert clock.drift == pytest.approx(50_000.0)


# -- who waits ---------------------------------------------------------------------------------------------------------


def test_who_waits_for_whom() -> None:
    # On rank 0's clock: rank 1 comes 20 later and leaves with it.
    some = [{0: (0.0, 30.0), 1: (1020.0, 1030.0)}, {0: (100.0, 130.0), 1: (1120.0, 1130.0)}]
    axis = axis_of(some, ranks=(0, 1), origins={0: 1_000_000_000, 1: 999_000_000})
    assert axis.shift(1) == -1000.0
    first, second = arrivals(axis, some)
    assert (first.inside, first.waits, first.last) == (30.0, 20.0, 0)
    assert (second.inside, second.waits, second.last) == (10.0, 0.0, 2)
    assert render_arrivals(axis, some).splitlines()[-2:] == [
        "rank 0  30.000   20.000  0 of 2",
        "rank 1  10.000    0.000  2 of 2",
    ]


# -- traces of ours ----------------------------------------------------------------------------------------------------


def write(path: Path, rank: int, origin: int, votes: list[tuple[float, float]]) -> Path:
    with TraceWriter(path) as writer:
        writer.write(HeaderRecord("0.1.0", rank, 2, origin_ns=origin))
        for step, (begin, end) in enumerate(votes):
            writer.write(StepRecord(step, rank, "dbo", 8, 8, False, "idle", vote_begin=begin, vote_end=end))
    return path


def test_votes_of_two_files(tmp_path: Path) -> None:
    some = collectives([0.0, 777.0], 20)
    files = [write(tmp_path / f"{rank}.jsonl", rank, 10**12, [each[rank] for each in some]) for rank in (0, 1)]
    axis = common_axis(files)
    within = axis.clocks[1].within
    # Half the room for a constant is 1; the rest is what the clocks may have drifted.
    assert within is not None and abs(axis.shift(1) - 777.0) <= within < 5
    assert axis.collectives == 20 and "not of one host" in axis.how
    assert json.loads(json.dumps(axis.as_json()))["ranks"]["1"]["within"] == within


def test_a_vote_that_does_not_fit_is_named_by_its_step(tmp_path: Path) -> None:
    some = collectives([0.0, 777.0], 20)
    moved = [each[1] if step != 7 else (each[1][0] + 9e4, each[1][1] + 9e4) for step, each in enumerate(some)]
    files = [write(tmp_path / "0.jsonl", 0, 5, [each[0] for each in some]), write(tmp_path / "1.jsonl", 1, 6, moved)]
    problem = common_axis(files).problem
    assert problem is not None and "the vote of step 7 of run dbo" in problem


def test_what_cannot_be_parsed_is_left_to_the_reader(tmp_path: Path) -> None:
    file = write(tmp_path / "0.jsonl", 0, 10**12, [(0.0, 1.0)])
    with open(file, "ab") as torn:
        torn.write(b'{"t":"step","step":1,"ra')
    assert common_axis(file).how == "One rank, one clock."
    (tmp_path / "1.jsonl.gz").write_bytes(b"\x1f\x8b broken")
    assert common_axis(tmp_path / "1.jsonl.gz").clocks == {0: RankClock(((0.0, 0.0),), 0.0)}
    assert common_axis(tmp_path / "absent.jsonl").how == "One rank, one clock."
    packed = gzip.compress(file.read_bytes() * 500)
    (tmp_path / "1.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    assert common_axis(tmp_path / "1.jsonl.gz").collectives == 0


def test_a_pipe_is_left_to_the_reader(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert common_axis(pipe).collectives == 0, "it was not opened: nobody writes to it"


def test_two_runs_are_not_aligned(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{name}.jsonl", 0, origin, [(0.0, 1.0)]) for name, origin in (("a", 5), ("b", 6))]
    with pytest.raises(TraceFileError, match=r"a\.jsonl and .*b\.jsonl both hold rank 0, so they are of two runs"):
        common_axis(files)
