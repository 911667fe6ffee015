"""Profiles of several ranks on one axis: matching kernels, profilers that start apart, runs that are not one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("msgspec")
pytest.importorskip("numpy")

from dbo_greenlet.trace.clocks.arrivals import arrivals
from dbo_greenlet.trace.clocks.profiles import ProfileClocks, profiles_axis
from dbo_greenlet.trace.importers import read_profile
from dbo_greenlet.trace.profile import Profile
from tests.trace.profiles import COMBINE, DISPATCH, GEMM, LOW_LATENCY_COMBINE, LOW_LATENCY_DISPATCH, ChromeProfile

REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SEND = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
BASE = 1_700_000_000_000_000_000


def profile(
    path: Path,
    rank: int,
    *,
    shift: float = 0.0,
    drift: float = 0.0,
    part: tuple[int, int] = (0, 300),
    names: Sequence[str] = (DISPATCH, COMBINE, REDUCE),
    run: int = 3,
    says: int | None = None,
    period: float = 500.0,
) -> Profile:
    """The collectives `part` of those that all ranks of a run enter: the same true times for every rank of that run."""
    rng = random.Random(run)
    made = ChromeProfile(rank=rank if says is None else says, base=BASE)
    for number in range(300):
        begin = number * period + rng.uniform(0, 200)
        entered = [begin + rng.expovariate(1 / 30) for _ in range(2)]
        left = [max(entered) + 40 + rng.expovariate(1 / 3) for _ in range(2)]
        if part[0] <= number < part[1]:
            compute, enter, leave = (
                (true + 1000 - shift) / (1 + drift) for true in (begin - 100, entered[rank], left[rank])
            )
            made.kernel(GEMM, compute, compute + 50)
            made.kernel(names[number % len(names)], enter, leave, stream=20)
    return read_profile(made.write(path))


def shift_of(axis: object, profiles: Sequence[Profile]) -> float:
    """What the axis adds to the second profile's times, beside the difference of the origins."""
    return axis.shift(1) - (profiles[1].origin - profiles[0].origin)  # type: ignore[attr-defined]


def test_wall_clocks_that_agree_are_kept(tmp_path: Path) -> None:
    profiles = [profile(tmp_path / f"{rank}.json", rank) for rank in (0, 1)]
    axis = profiles_axis(profiles)
    assert shift_of(axis, profiles) == 0.0 and axis.problem is None
    assert axis.how == "The ranks lie on one axis by the wall clocks that they have, and 300 collective kernels agree."


@pytest.mark.parametrize("shift", [777.0, -5e6])
def test_wall_clocks_that_differ_are_corrected(tmp_path: Path, shift: float) -> None:
    profiles = [profile(tmp_path / "0.json", 0), profile(tmp_path / "1.json", 1, shift=shift)]
    axis = profiles_axis(profiles)
    within = axis.clocks[1].within
    assert within is not None and within < 43
    assert abs(shift_of(axis, profiles) - shift) <= within
    assert axis.how.endswith("; their wall clocks differ.")
    # A kernel that both left at about the same time.
    ends = [axis.place(rank, float(each.activities.end[-1])) for rank, each in enumerate(profiles)]
    assert abs(ends[0] - ends[1]) < 60


@pytest.mark.parametrize(
    ("part", "word"), [((7, 300), "7 collective kernels later"), ((1, 290), "1 collective kernel later")]
)
def test_a_profiler_that_started_later(tmp_path: Path, part: tuple[int, int], word: str) -> None:
    clocks = ProfileClocks()
    profiles = [profile(tmp_path / "0.json", 0), profile(tmp_path / "1.json", 1, part=part, shift=-2500.0)]
    for each in profiles:
        clocks.add(each)
    collectives, notes = clocks.match()
    assert notes == [f"rank 1 begins {word} than rank 0."]
    assert len(collectives) == part[1] - part[0]
    axis = clocks.axis(collectives)
    assert abs(shift_of(axis, profiles) + 2500.0) <= axis.clocks[1].within < 60  # type: ignore[operator]
    other = ProfileClocks()
    for each in reversed(profiles):
        other.add(each)
    assert other.match()[1] == [f"rank 0 begins {word.replace('later', 'earlier')} than rank 1."]


def test_where_the_names_leave_it_open_the_wall_clocks_decide(tmp_path: Path) -> None:
    # One name, and so regular that moved by one they fit as well.
    clocks = ProfileClocks()
    for rank in (0, 1):
        made = ChromeProfile(rank=rank, base=BASE)
        for number in range(40):
            made.kernel(DISPATCH, 1000.0 * (number + rank), 1000.0 * (number + rank) + 20, stream=20)
        clocks.add(read_profile(made.write(tmp_path / f"{rank}.json")))
    collectives, notes = clocks.match()
    assert len(collectives) == 39, "rank 1 began one period later by its clock, and missed the first"
    assert "places; taken is the one for which the wall clocks differ least" in notes[0]
    assert notes[1] == "rank 1 begins 1 collective kernel later than rank 0."


def test_two_runs_fit_nowhere(tmp_path: Path) -> None:
    axis = profiles_axis([profile(tmp_path / "0.json", 0), profile(tmp_path / "1.json", 1, run=4)])
    assert axis.problem is not None and "Are these files of one run?" in axis.problem


def test_one_rank_twice_is_two_runs(tmp_path: Path) -> None:
    clocks = ProfileClocks()
    for name in ("a.json", "b.json"):
        clocks.add(profile(tmp_path / name, 0))
    collectives, notes = clocks.match()
    assert collectives == [] and "Two of these profiles are of one rank" in notes[0]
    assert clocks.names == {0: "a.json", 1: "b.json"}


def test_clocks_of_profiles_drift(tmp_path: Path) -> None:
    profiles = [
        profile(tmp_path / "0.json", 0, period=20_000.0),
        profile(tmp_path / "1.json", 1, period=20_000.0, drift=8e-5),
    ]
    axis = profiles_axis(profiles)
    assert axis.problem is None and "different speeds" in axis.how
    assert axis.clocks[1].drift == pytest.approx(80.0, abs=2.0)


def test_sends_bind_nobody(tmp_path: Path) -> None:
    clocks = ProfileClocks()
    for rank in (0, 1):
        clocks.add(profile(tmp_path / f"{rank}.json", rank, names=(SEND,)))
    collectives, notes = clocks.match()
    assert collectives == [] and notes == ["rank 0 has no kernel of a collective that binds all ranks."]
    assert "there is no collective kernel to check it by" in clocks.axis(collectives).how


def test_a_low_latency_collective_lasts_from_its_send_to_its_receive(tmp_path: Path) -> None:
    profiles = []
    for rank in (0, 1):
        made = ChromeProfile(rank=rank, base=BASE)
        for number in range(20):
            begin = 1000.0 * number + 30 * rank
            # The sends end long before the other rank's begin.
            for name in (LOW_LATENCY_DISPATCH, LOW_LATENCY_COMBINE):
                made.kernel(name, begin, begin + 5, stream=20)
                made.kernel(name, 1000.0 * number + 200, 1000.0 * number + 220 + rank, stream=20)
                begin += 400
        profiles.append(read_profile(_untangled(made).write(tmp_path / f"{rank}.json")))
    clocks = ProfileClocks()
    for each in profiles:
        clocks.add(each)
    collectives, notes = clocks.match()
    assert notes == [] and len(collectives) == 20 and clocks.axis(collectives).problem is None


def _untangled(made: ChromeProfile) -> ChromeProfile:
    """The dispatches alone: on one stream nothing may overlap."""
    made.events = [event for event in made.events if event["name"] == LOW_LATENCY_DISPATCH]
    return made


def test_kernels_of_two_streams_may_change_places(tmp_path: Path) -> None:
    clocks = ProfileClocks()
    for rank in (0, 1):
        made = ChromeProfile(rank=rank, base=BASE)
        for number in range(10):
            at = 1000.0 * number
            # On rank 1 the dispatch comes first, on rank 0 the reduction; both are collectives of both ranks.
            made.kernel(REDUCE, at + 20 * rank, at + 100, stream=20)
            made.kernel(DISPATCH, at + 10, at + 90, stream=21)
        clocks.add(read_profile(made.write(tmp_path / f"{rank}.json")))
    collectives, notes = clocks.match()
    assert len(collectives) == 20 and notes == []
    axis = clocks.axis(collectives)
    assert axis.problem is None
    assert [each.last for each in arrivals(axis, collectives)] == [10, 10], "a tie goes to the first"
