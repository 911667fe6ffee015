"""Ranks compare their schedules: nobody complains where they are equal, and everybody names the one that differs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dbo_greenlet.errors import ScheduleDivergence
from dbo_greenlet.rank_schedules import compare_with_ranks, first_difference
from dbo_greenlet.schedule import Schedule
from tests.ranks import schedule_tasks
from tests.ranks.rank_pool import RankPool

A = (2, "0101", "d d  ")  # sites by blanks; no site is the end of a microbatch


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(3)
    pool.make_groups("three", 3)
    pool.make_groups("two", 2)
    yield pool
    pool.close()


def compare(pool: RankPool, *schedules: tuple[int, str, str]) -> tuple[int, str]:
    """What every rank said: (exchanges, error), which must be the same on all of them."""
    name = "two" if len(schedules) == 2 else "three"
    told = pool.check(schedule_tasks.compare, range(len(schedules)), name=name, schedules=list(schedules))
    assert len(set(told)) == 1
    return told[0]


LAST = ". Policy, seed and model must be the same on every rank"


def test_equal_schedules_cost_one_exchange(pool: RankPool) -> None:
    assert compare(pool, A, A) == compare(pool, A, A, A) == (1, "")


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_of_three_the_one_that_differs_is_named_with_its_first_decision(pool: RankPool, odd: int) -> None:
    schedules = [A, A, A]
    schedules[odd] = (2, "0011", "d  d ")
    one, other = (rank for rank in range(3) if rank != odd)
    most = f"ranks {one} and {other}"
    assert compare(pool, *schedules) == (
        4,
        f"ScheduleDivergence: rank {odd} ran this step in another order than {most}; decision 1: rank {odd} ran "
        f"microbatch 0 to its end, {most} ran microbatch 1 up to 'd'" + LAST,
    )


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ((2, "0101", "d e  "), "decision 1: rank 1 ran microbatch 1 up to 'e', rank 0 ran microbatch 1 up to 'd'"),
        ((2, "010", "d d "), "decision 3: rank 1 had ended, rank 0 ran microbatch 1 to its end"),
        (
            (2, "010101", "d d e e  "),
            "decision 2: rank 1 ran microbatch 0 up to 'e', rank 0 ran microbatch 0 to its end",
        ),
        ((3, "0101", "d d  "), "rank 1 has 3 microbatches and rank 0 has 2"),
    ],
)
def test_of_two_either_may_be_at_fault(pool: RankPool, other: tuple[int, str, str], difference: str) -> None:
    text = f"ScheduleDivergence: rank 0 and rank 1 ran this step in different orders; {difference}{LAST}"
    assert compare(pool, A, other) == (4, text)


def test_several_that_differ_are_all_named(pool: RankPool) -> None:
    _, text = compare(pool, A, (2, "0101", "e e  "), (2, "0101", "f f  "))
    # No two agree: the lowest rank stands for the right one.
    assert text.startswith(
        "ScheduleDivergence: ranks 1 and 2 ran this step in another order than rank 0; decision 0: rank 1 "
    )


def test_a_group_can_be_used_after_ranks_have_differed(pool: RankPool) -> None:
    assert compare(pool, A, (2, "0011", "d  d "), A)[0] == 4
    assert compare(pool, A, A, A) == (1, "")


# -- by the runner, which tells the group ------------------------------------------------------------------------------

SITES = [f"layer{layer}.{stage}" for layer in range(3) for stage in ("dispatch", "combine")]


@pytest.mark.parametrize("policy", ["round_robin", "phase_offset:2", "random:7", "pct:3,depth=3,length=14", "in_turn"])
def test_steps_under_one_policy_have_one_hash_on_every_rank(pool: RankPool, policy: str) -> None:
    pool.make_groups(f"same/{policy}", 3)
    told = pool.check(
        schedule_tasks.step_with, name=f"same/{policy}", policies=[policy] * 3, sites=[SITES] * 3, steps=3
    )
    hashes = [each for rank in told for each in rank[:-1]]
    assert len(hashes) == 9 and len(set(hashes)) == 1
    # A vote and a hash in each step.
    assert [rank[-1] for rank in told] == [6, 6, 6]


@pytest.mark.parametrize("late", [None, 0, 2])
def test_a_rank_with_another_policy_fails_the_step_on_every_rank(pool: RankPool, late: int | None) -> None:
    name = f"policies/{late}"
    pool.make_groups(name, 3)
    policies = ["random:7", "random:7", "random:8"]
    told = pool.check(schedule_tasks.step_with, name=name, policies=policies, sites=[SITES] * 3, steps=2, late=late)
    errors = [rank[0] for rank in told]
    assert {type(error) for error in errors} == {ScheduleDivergence}
    (text,) = {str(error) for error in errors}
    assert text.startswith("rank 2 ran this step in another order than ranks 0 and 1; decision ")
    assert text.endswith(LAST)


def test_a_rank_with_another_model_is_named_with_both_sites(pool: RankPool) -> None:
    pool.make_groups("models", 2)
    other = [*SITES[:4], "layer2.gate", *SITES[4:]]
    told = pool.check(
        schedule_tasks.step_with, range(2), name="models", policies=["round_robin"] * 2, sites=[SITES, other], steps=1
    )
    (text,) = {str(rank[0]) for rank in told}
    assert text == (
        "rank 0 and rank 1 ran this step in different orders; decision 8: rank 1 ran microbatch 0 up to 'layer2.gate', "
        "rank 0 ran microbatch 0 up to 'layer2.dispatch'" + LAST
    )


# -- the difference itself ---------------------------------------------------------------------------------------------


schedules = st.builds(
    lambda count, slices, with_sites: Schedule(
        count, tuple(i for i, _ in slices), tuple(site for _, site in slices) if with_sites else ()
    ),
    st.integers(1, 2),
    st.lists(st.tuples(st.integers(0, 1), st.sampled_from(["", "a", "b"])), max_size=6),
    st.booleans(),
)


@given(schedules, schedules)
def test_a_difference_is_found_where_there_is_one(a: Schedule, b: Schedule) -> None:
    with_sites = bool(a.sites) and bool(b.sites)
    same = a.count == b.count and a.decisions == b.decisions and (not with_sites or a.sites == b.sites)
    text = first_difference(a, b)
    assert (text == "") is same
    if text.startswith("decision "):
        at = int(text.split()[1].rstrip(":"))
        assert a.decisions[:at] == b.decisions[:at]
        cut = [replace(each, decisions=each.decisions[:at], sites=each.sites[:at]) for each in (a, b)]
        assert first_difference(*cut) == ""


def test_hashes_that_differ_over_equal_decisions_are_told_as_such() -> None:
    class OtherVersion:
        """A second rank that hashes in another way."""

        rank, world_size = 0, 2

        def exchange(self, row: torch.Tensor) -> torch.Tensor:
            return torch.stack([row, row + 1]) if row[0] > 1 << 40 else torch.stack([row, row])

        def announce_failure(self, microbatch: int | None, error: BaseException) -> None: ...

    with pytest.raises(
        ScheduleDivergence, match="their decisions are the same and their hashes are not, as between two"
    ):
        compare_with_ranks(OtherVersion(), Schedule(2, (0, 1, 0, 1), ("d", "d", "", "")))
