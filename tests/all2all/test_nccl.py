"""Dispatch and combine between two GPUs over NCCL, and a rank that fails while the other one's GPU waits for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dbo_greenlet.errors import BrokenGroupError, RankFailedError
from tests.all2all import rank_cases
from tests.ranks import rank_tasks
from tests.ranks.rank_pool import RankPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.fixture
def gpus() -> Iterator[RankPool]:
    pool = RankPool(2)
    pool.make_groups("gpus", 2, device="cuda")
    yield pool
    pool.close()


@pytest.mark.parametrize("capacity", [None, 9], ids=["exact", "capacity"])
def test_two_microbatches_in_flight_across_streams(gpus: RankPool, capacity: int | None) -> None:
    assert gpus.check(rank_cases.on_gpus, name="gpus", capacity=capacity) == [[], []]


def test_a_failing_rank_releases_the_gpu_that_waits_for_it(gpus: RankPool) -> None:
    # Once, so that the communicator exists: NCCL connects in its first operation.
    assert gpus.check(rank_cases.on_gpus, name="gpus", capacity=9) == [[], []]
    gpus.send(0, rank_cases.wait_on_gpu, name="gpus")
    gpus.send(1, rank_tasks.announce, name="gpus", microbatch=1)
    failed, broken = gpus.receive(0)
    assert isinstance(failed, RankFailedError)
    assert (failed.rank, failed.microbatch) == (1, 1)
    assert isinstance(broken, BrokenGroupError)
    assert gpus.receive(1) is None
    assert gpus.check(rank_tasks.reset, name="gpus") == [1, 1]
    assert gpus.check(rank_cases.on_gpus, name="gpus", capacity=9) == [[], []]
