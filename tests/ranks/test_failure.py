"""A rank that raises, is killed, stalls or leaves: every rank fails that step, and after a reset the next one works.

The groups' timeout is a minute unless a test is about stalling, and a task has less than that: if a failure were
noticed by the timeout only, the test would fail.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from dbo_greenlet.errors import BrokenGroupError, RankFailedError
from tests.ranks import rank_tasks
from tests.ranks.rank_pool import RankPool, RankProcessError


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(3)
    yield pool
    pool.close()


def assert_failed_then_broken(outcomes: list[Any], rank: int, microbatch: int | None, reason: str) -> None:
    first, second = outcomes
    assert isinstance(first, RankFailedError), first
    assert (first.rank, first.microbatch) == (rank, microbatch)
    assert reason in first.reason
    assert isinstance(second, BrokenGroupError), second
    assert f"rank {rank}" in str(second)
    assert "reset()" in str(second)


def assert_works_after_reset(pool: RankPool, name: str, generation: int = 1) -> None:
    assert pool.check(rank_tasks.reset, name=name) == [generation] * 3
    assert pool.check(rank_tasks.one_step, name=name) == [True] * 3


def test_a_raising_rank_releases_the_waiting_and_the_busy_hear_of_it_later(pool: RankPool) -> None:
    pool.make_groups("raising", 3)
    # Rank 0 waits for rank 2, which is busy until rank 0 was released: it has what rank 1 sent already.
    pool.send(0, rank_tasks.outcomes, name="raising", uses=2, then_say="raising/released")
    pool.send(1, rank_tasks.fail, name="raising", microbatch=1, in_flight=3)
    pool.send(2, rank_tasks.outcomes, name="raising", uses=2, wait_for="raising/released")
    assert_failed_then_broken(pool.receive(0), 1, 1, "ValueError: broken weights")
    # Its own step failed with its own error; what it had in flight and what comes next is refused.
    own = pool.receive(1)
    assert [type(error) for error in own] == [BrokenGroupError] * 4
    assert_failed_then_broken(pool.receive(2), 1, 1, "ValueError: broken weights")
    assert_works_after_reset(pool, "raising")


def test_a_group_breaks_and_is_reset_again_and_again(pool: RankPool) -> None:
    pool.make_groups("again", 3)
    for generation in range(1, 4):
        failing = generation % 3
        for rank in range(3):
            if rank == failing:
                pool.send(rank, rank_tasks.fail, name="again", microbatch=None, in_flight=generation - 1)
            else:
                pool.send(rank, rank_tasks.outcomes, name="again", uses=4)
        for rank in range(3):
            told = pool.receive(rank)
            if rank != failing:
                # What the failing rank had sent before, the others may have received.
                errors = [error for error in told if error is not None]
                assert isinstance(errors[0], RankFailedError)
                assert (errors[0].rank, errors[0].microbatch) == (failing, None)
        assert_works_after_reset(pool, "again", generation)


def test_all_ranks_failing_at_once_keep_their_own_errors(pool: RankPool) -> None:
    pool.make_groups("all", 3)
    for told in pool.check(rank_tasks.fail, name="all", microbatch=0):
        assert [type(error) for error in told] == [BrokenGroupError]
    assert_works_after_reset(pool, "all")


def test_a_killed_rank_is_named_and_a_new_process_takes_its_place(pool: RankPool) -> None:
    pool.make_groups("killed", 3)
    pool.send(1, rank_tasks.be_killed)
    for rank in (0, 2):
        pool.send(rank, rank_tasks.outcomes, name="killed", uses=2)
    for rank in (0, 2):
        assert_failed_then_broken(pool.receive(rank), 1, None, "its process ended without announcing a failure")
    pool.processes[1].join(5)
    assert pool.processes[1].exitcode == -signal.SIGKILL
    pool.start(1)
    for rank in (0, 2):
        pool.send(rank, rank_tasks.reset, name="killed")
    pool.make_groups_on(1, "killed", 3)
    assert [pool.receive(rank) for rank in (0, 2)] == [1, 1]
    assert pool.check(rank_tasks.one_step, name="killed") == [True] * 3


def test_a_stalled_rank_is_named_and_hears_of_it_itself(pool: RankPool) -> None:
    pool.make_groups("stalled", 3, timeout=3.0)
    pool.send(1, rank_tasks.outcomes, name="stalled", uses=2, wait_for="stalled/go on")
    for rank in (0, 2):
        pool.send(rank, rank_tasks.outcomes, name="stalled", uses=2)
    for rank in (0, 2):
        assert_failed_then_broken(pool.receive(rank), 1, None, "rank 1 is busy")
    pool.store.set("stalled/go on", "")
    assert_failed_then_broken(pool.receive(1), 1, None, "waited for it in vain")
    assert_works_after_reset(pool, "stalled")


def test_a_stopped_process_is_named(pool: RankPool) -> None:
    pool.make_groups("stopped", 3, timeout=3.0)
    os.kill(pool.processes[2].pid, signal.SIGSTOP)
    try:
        for rank in (0, 1):
            pool.send(rank, rank_tasks.outcomes, name="stopped", uses=2)
        for rank in (0, 1):
            assert_failed_then_broken(pool.receive(rank), 2, None, "rank 2 is silent")
    finally:
        os.kill(pool.processes[2].pid, signal.SIGCONT)
    pool.send(2, rank_tasks.outcomes, name="stopped", uses=2)
    assert_failed_then_broken(pool.receive(2), 2, None, "waited for it in vain")
    assert_works_after_reset(pool, "stopped")


def test_a_rank_that_left_is_a_failure_only_to_those_who_wait_for_it(pool: RankPool) -> None:
    pool.make_groups("left", 3)
    pool.send(1, rank_tasks.leave, name="left")
    assert pool.receive(1) is None
    # Rank 0 is late, and not to blame for it.
    pool.send(0, rank_tasks.outcomes, name="left", uses=2, wait_for="left/noticed")
    pool.send(2, rank_tasks.outcomes, name="left", uses=2, then_say="left/noticed")
    told = {rank: pool.receive(rank) for rank in (0, 2)}
    for rank in (0, 2):
        assert_failed_then_broken(told[rank], 1, None, "(rank 0 is busy, rank 1 is gone)")
    (used_after,) = pool.run(rank_tasks.one_step, range(1, 2), name="left")
    assert isinstance(used_after, BrokenGroupError)
    assert "closed" in str(used_after)


def test_an_error_that_leaves_the_with_block_is_announced(pool: RankPool) -> None:
    waiting, raising = pool.run(rank_tasks.fail_in_with_block, range(2), name="with block")
    assert isinstance(raising, ValueError)
    assert isinstance(waiting, RankFailedError)
    assert (waiting.rank, waiting.reason) == (1, "ValueError: left the with block")


def test_a_long_reason_is_shortened(pool: RankPool) -> None:
    pool.make_groups("long", 3)
    pool.send(0, rank_tasks.fail, name="long", microbatch=0, reason="x" * 1_000_000)
    for rank in (1, 2):
        pool.send(rank, rank_tasks.outcomes, name="long", uses=2)
    assert len(pool.receive(0)) == 1
    for rank in (1, 2):
        assert_failed_then_broken(pool.receive(rank), 0, 0, "xxx ...")


def test_a_dispatch_from_before_a_reset_is_refused(pool: RankPool) -> None:
    pool.make_groups("old", 3)
    pool.check(rank_tasks.keep_a_dispatch, name="old")
    assert_works_after_reset(pool, "old")
    for refused in pool.run(rank_tasks.finish_the_kept_dispatch, name="old"):
        assert isinstance(refused, BrokenGroupError)
        assert "before the group was reset" in str(refused)
    assert pool.check(rank_tasks.one_step, name="old") == [True] * 3


def test_without_the_process_that_hosts_the_store_there_is_no_reset() -> None:
    pool = RankPool(2)
    try:
        pool.send(0, rank_tasks.host_store_and_join)
        pool.send(1, rank_tasks.join_hosted)
        assert [pool.receive(rank) for rank in range(2)] == [None, None]
        pool.send(0, rank_tasks.be_killed)
        failed, not_reset = pool.check(rank_tasks.lose_the_host, range(1, 2))[0]
        assert isinstance(failed, RankFailedError)
        assert failed.rank == 0
        assert isinstance(not_reset, BrokenGroupError)
        assert "hosted its store" in str(not_reset)
    finally:
        pool.close()


def test_a_task_that_raises_on_a_rank_fails_its_test(pool: RankPool) -> None:
    with pytest.raises(RankProcessError, match="no such group"):
        pool.check(rank_tasks.one_step, name="no such group")
