"""The kit on the project's all-to-alls: ranks explore in lockstep, also where one of them stalls or dies."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from dbo_greenlet.all2all.loopback import Loopback
from dbo_greenlet.testing import ExplorationFailed, explore
from dbo_greenlet.testing.rank_faults import DEAD
from dbo_greenlet.testing.recorded_all2all import RecordedAllToAll
from dbo_greenlet.testing.step_run import StepUnderTest, TestBed
from dbo_greenlet.testing.verdicts import DEFAULT, laws_kept
from dbo_greenlet.yields import dbo_enabled, dbo_maybe_run_recv_hook, dbo_register_recv_hook, dbo_yield
from tests.all2all.rank_cases import dense_reference, generator_of, random_inputs, run_experts
from tests.ranks import rank_tasks
from tests.ranks.rank_pool import RankPool
from tests.testing import own_all2all_tasks as tasks
from tests.testing.own_model import Recordings

EXPERTS = 3


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(2)
    assert pool.check(tasks.ready) == [True, True]
    yield pool
    pool.close()


# -- one rank ----------------------------------------------------------------------------------------------------------


class LoopbackLayer(Recordings):
    """One layer whose result is compared with the obvious way to compute it; token counts differ, one has none."""

    def __init__(self, static: bool, tokens: tuple[int, ...]) -> None:
        super().__init__()
        self.inner = Loopback(EXPERTS, static_shapes=static)
        self.inputs = [random_inputs(generator_of(0, number), count, 2, EXPERTS) for number, count in enumerate(tokens)]
        self.expected = [dense_reference(*each) for each in self.inputs]

    def build(self, bed: TestBed) -> StepUnderTest:
        recorded = RecordedAllToAll(self.inner, bed.device)
        return StepUnderTest([partial(_layer, recorded, *each) for each in self.inputs], check=self.check)

    def check(self, outputs: list[Tensor]) -> None:
        assert all(map(torch.equal, outputs, self.expected))


def _layer(all_to_all: RecordedAllToAll, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    def leave(hook: object, site: str) -> None:
        if dbo_enabled():
            dbo_register_recv_hook(hook)
            dbo_yield(site)
        else:
            hook()

    dbo_maybe_run_recv_hook()
    sent = all_to_all.dispatch_send(hidden, ids, weights)
    leave(sent.finish_dispatch, "dispatch")
    outputs = run_experts(all_to_all, sent)
    dbo_maybe_run_recv_hook()
    sent.combine_send(outputs)
    leave(sent.finish_combine, "combine")
    return sent.combined()


@pytest.mark.parametrize(("tokens", "number"), [((4, 2), 5), ((3, 0), 5), ((2, 1, 3), 42)])
@pytest.mark.parametrize("static", [False, True])
def test_the_loopback_is_right_in_every_schedule(static: bool, tokens: tuple[int, ...], number: int) -> None:
    layer = LoopbackLayer(static, tokens)
    with layer.recording():
        found = explore(layer.build, make_device=layer.make_device, count=len(tokens), verdicts=(*DEFAULT, laws_kept))
    assert found.complete and found.schedules == number


# -- ranks -------------------------------------------------------------------------------------------------------------


def test_two_ranks_go_through_every_schedule_together(pool: RankPool) -> None:
    pool.make_groups("together", 2)
    first, second = pool.check(tasks.model_over_gloo, name="together", capacity=None, static=False)
    assert first == second
    assert first["schedules"] == first["distinct"] == 5
    assert first["steps"] > 5  # in turn for the reference, and once more to see that runs are alike


def test_one_seed_gives_both_ranks_the_same_schedules(pool: RankPool) -> None:
    pool.make_groups("random", 2)
    run = partial(pool.check, tasks.model_over_gloo, name="random", capacity=16, static=True, how="random", schedules=3)
    first, second = run(seed=5)
    assert first == second and first["distinct"] > 1
    other, _ = run(seed=6)
    assert other["fingerprint"] != first["fingerprint"]


@pytest.mark.parametrize("kind", ["ll", "ht"])
def test_layers_over_deepep_are_right_in_every_schedule(pool: RankPool, kind: str) -> None:
    name = f"deepep {kind}"
    pool.make_groups(name, 2)
    first, second = pool.check(tasks.layer_over_deepep, name=name, kind=kind)
    assert first == second
    assert first["schedules"] == first["distinct"] == 5


def test_a_rank_that_stalls_changes_no_schedule(pool: RankPool) -> None:
    pool.make_groups("stalls", 2)
    run = partial(pool.check, tasks.model_over_gloo, name="stalls", capacity=None, static=False, preemptions=0)
    plain, _ = run()
    stalled = run(faults="stall@rank1:step2.1:30ms+stall@rank0:step1:20ms")
    assert [each["fingerprint"] for each in stalled] == [plain["fingerprint"]] * 2
    assert [each["struck"] for each in stalled] == [["stall@rank0:step1:20ms"], ["stall@rank1:step2.1:30ms"]]


def test_a_rank_that_dies_ends_the_exploration_of_the_others(pool: RankPool) -> None:
    pool.make_groups("dies", 2)
    options = {"how": "random", "schedules": 4, "seed": 5, "shrink_runs": 0}
    for rank in range(2):
        pool.send(
            rank, tasks.model_over_gloo, name="dies", capacity=None, static=False, faults="die@rank1:step4.1", **options
        )
    survivor = pool.receive(0)
    pool.processes[1].join(10)
    assert pool.processes[1].exitcode == DEAD
    error = survivor["error"]
    assert isinstance(error, ExplorationFailed), error
    assert "rank 1 failed: its process ended" in str(error)
    pool.start(1)
    assert pool.check(tasks.ready, range(1, 2)) == [True]
    pool.send(0, rank_tasks.reset, name="dies")
    pool.make_groups_on(1, "dies", 2)
    assert pool.receive(0) == 1
    first, second = pool.check(tasks.model_over_gloo, name="dies", capacity=None, static=False, preemptions=0)
    assert first == second and first["schedules"] == 1
