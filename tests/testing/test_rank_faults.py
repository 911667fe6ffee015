"""A rank that dies or stalls at a stated place: real processes, gloo, and what law 7 says must hold on the others.

The groups' timeout is a minute unless a test is about stalling, and a task has less than that: a failure that was
noticed by the timeout only would fail the test.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

from dbo_greenlet.errors import RankFailedError
from dbo_greenlet.testing.rank_faults import DEAD
from tests.ranks import rank_tasks
from tests.ranks.rank_pool import RankPool
from tests.testing import rank_fault_tasks
from tests.testing.rank_fault_tasks import COLLECTIVES


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


def assert_left_clean(told: dict[str, Any]) -> None:
    assert told["clean"]
    assert told["next step"] == [0, 1]


def bring_back(pool: RankPool, name: str, rank: int) -> None:
    """A new process for `rank`, and the group is whole again."""
    pool.start(rank)
    for other in range(pool.world_size):
        if other != rank:
            pool.send(other, rank_tasks.reset, name=name)
    pool.make_groups_on(rank, name, pool.world_size)
    for other in range(pool.world_size):
        if other != rank:
            assert pool.receive(other) == 1


# The vote; the dispatch of microbatch 0, when nobody has sent yet; the last combine, when both microbatches are parked.
@pytest.mark.parametrize("collective", [0, 1, COLLECTIVES - 1])
def test_a_rank_that_dies(pool: RankPool, collective: int) -> None:
    name = f"dies at {collective}"
    pool.make_groups(name, 2)
    place = "step1" if collective == 0 else f"step1.{collective}"
    for rank in range(2):
        pool.send(rank, rank_fault_tasks.steps, name=name, faults=f"die@rank1:{place}", count=3)
    survivor = pool.receive(0)
    pool.processes[1].join(10)
    assert pool.processes[1].exitcode == DEAD
    first, failed = survivor["told"]
    assert first is True
    assert isinstance(failed, RankFailedError), failed
    assert (failed.rank, failed.microbatch) == (1, None)
    assert survivor["struck"] == []
    # Whoever met it has the error, the sibling was unwound, unless it had returned or not begun; at the vote there were
    # no microbatches yet. Which of them meets it depends on how soon the connections close.
    assert bool(survivor["left by"]) == (collective > 0)
    assert set(survivor["left by"]) <= {"RankFailedError", "ReceiveHookError", "StepAborted"}
    assert_left_clean(survivor)
    bring_back(pool, name, 1)
    for told in pool.check(rank_fault_tasks.steps, name=name, faults="", count=2):
        assert told["told"] == [True, True]


def test_a_short_stall_only_costs_time(pool: RankPool) -> None:
    pool.make_groups("short stall", 2)
    faults = "stall@rank1:step0:50ms+stall@rank0:step1.2:50ms"
    outcomes = pool.check(rank_fault_tasks.steps, name="short stall", faults=faults, count=3)
    for told in outcomes:
        assert told["told"] == [True] * 3
        assert_left_clean(told)
    assert [told["struck"] for told in outcomes] == [["stall@rank0:step1.2:50ms"], ["stall@rank1:step0:50ms"]]


@pytest.mark.parametrize("collective", [0, 2])
def test_a_stall_beyond_the_timeout_fails_the_step_on_every_rank(pool: RankPool, collective: int) -> None:
    name = f"stalls at {collective}"
    pool.make_groups(name, 2, timeout=1.0)
    place = "step1" if collective == 0 else f"step1.{collective}"
    outcomes = pool.run(rank_fault_tasks.steps, name=name, faults=f"stall@rank1:{place}:4s", count=3)
    for told in outcomes:
        first, failed = told["told"]
        assert first is True
        assert isinstance(failed, RankFailedError), failed
        assert failed.rank == 1
        assert_left_clean(told)
    assert [told["struck"] for told in outcomes] == [[], [f"stall@rank1:{place}:4s"]]
    assert pool.check(rank_tasks.reset, name=name) == [1, 1]
    for told in pool.check(rank_fault_tasks.steps, name=name, faults="", count=2):
        assert told["told"] == [True, True]


def test_a_rank_that_dies_in_a_step_of_the_runner(pool: RankPool) -> None:
    """Also what the module's text shows: the same wrapped group for the runner and for its all-to-all."""
    pool.make_groups("runner", 2)
    for rank in range(2):
        # Two steps a round: the third one is the split step of the second round.
        faults = "stall@rank0:step1.3:20ms+die@rank1:step2.4"
        pool.send(rank, rank_fault_tasks.model_steps, name="runner", faults=faults, count=2)
    equal, failed = pool.receive(0)
    pool.processes[1].join(10)
    assert (equal, pool.processes[1].exitcode) == (True, DEAD)
    assert isinstance(failed, RankFailedError) and failed.rank == 1
    bring_back(pool, "runner", 1)
    for told in pool.check(rank_fault_tasks.model_steps, name="runner", faults="", count=2):
        assert told == [True, True]


def test_a_place_that_is_never_reached_strikes_nobody(pool: RankPool) -> None:
    pool.make_groups("missed", 2)
    faults = f"die@rank1:step7+die@rank0:step1.{COLLECTIVES}+die@rank5:step0+raise@0.0"
    for told in pool.check(rank_fault_tasks.steps, name="missed", faults=faults, count=3):
        assert told["told"] == [True] * 3
        assert told["struck"] == []


def test_what_is_no_collective_passes_through(pool: RankPool) -> None:
    pool.make_groups("through", 2)
    told = pool.check(rank_fault_tasks.attributes, name="through")
    assert told == [(0, 2, "cpu", 0, 60.0), (1, 2, "cpu", 0, 60.0)]
