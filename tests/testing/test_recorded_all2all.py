"""No false alarm on what is right: the model over loopback and between ranks, layers over DeepEP's stand-in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dbo_greenlet.all2all.loopback import Loopback
from dbo_greenlet.batching import VoteSettings
from dbo_greenlet.runner import Runner
from dbo_greenlet.testing.hazards import find_hazards
from dbo_greenlet.testing.recorded_all2all import RecordedAllToAll
from dbo_greenlet.testing.torch_accesses import recorded_step
from tests.ranks.rank_pool import RankPool
from tests.runner.tiny import CONFIG, tiny_cache, tiny_step
from tests.testing import recorded_tasks

POLICIES = ["round_robin", "phase_offset:1", "phase_offset:2", "in_turn", "random:3", "random:4"]


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    pool = RankPool(2)
    pool.make_groups("two", 2)
    yield pool
    pool.close()


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_model_over_loopback_is_clean_and_runs_as_without_recording(count: int, policy: str, static: bool) -> None:
    all_to_all = Loopback(CONFIG.n_routed_experts, static_shapes=static)
    assert recorded_tasks.compare(all_to_all, count, policy) == []


def test_the_thread_carrier_is_recorded_alike() -> None:
    all_to_all = Loopback(CONFIG.n_routed_experts)
    assert recorded_tasks.compare(all_to_all, 2, "round_robin", carrier="thread") == []


@pytest.mark.parametrize("capacity", [None, (16, "static")])
def test_the_model_between_two_ranks_is_clean(ranks: RankPool, capacity: recorded_tasks.Capacity) -> None:
    for count, policies in ((2, ["round_robin", "phase_offset:2", "random:3"]), (3, ["phase_offset:1"])):
        told = ranks.check(
            recorded_tasks.model_over_gloo, name="two", capacity=capacity, policies=policies, count=count
        )
        assert told == [{policy: [] for policy in policies}] * 2


# DeepEP's low-latency buffer holds one operation at a time, so three microbatches can take turns in a ring only.
@pytest.mark.parametrize(("count", "policies"), [(1, POLICIES[:1]), (2, POLICIES), (3, POLICIES[:1])])
def test_low_latency_layers_are_clean(ranks: RankPool, count: int, policies: list[str]) -> None:
    for told in ranks.check(recorded_tasks.layers_over_deepep, name="two", kind="ll", policies=policies, count=count):
        noted = told.pop("noted")
        assert told == {policy: [] for policy in policies}
        assert noted == {
            (kind, "compute", f"low_latency_{part}") for kind in ("send", "receive") for part in ("dispatch", "combine")
        }


@pytest.mark.parametrize(("count", "policies"), [(1, POLICIES[:1]), (2, POLICIES), (3, POLICIES[2:4])])
def test_high_throughput_layers_are_clean(ranks: RankPool, count: int, policies: list[str]) -> None:
    for told in ranks.check(recorded_tasks.layers_over_deepep, name="two", kind="ht", policies=policies, count=count):
        noted = told.pop("noted")
        assert told == {policy: [] for policy in policies}
        assert noted >= {("work", "deepep", name) for name in ("get_dispatch_layout", "counts", "dispatch", "combine")}


def test_an_event_captured_after_the_yield_is_found_in_the_library_calls(ranks: RankPool) -> None:
    for told in ranks.check(recorded_tasks.event_after_the_yield, name="two"):
        assert len(told) == 1
        assert told[0].startswith("event-after-switch: ")
        assert "deepep waits" in told[0]


@pytest.mark.parametrize(
    ("writes", "said"),
    [
        (True, "'zero_' on compute, outside the microbatches (at recorded_tasks.py:"),
        (False, "'sum' on compute, outside the microbatches (at recorded_tasks.py:"),
    ],
)
def test_a_message_belongs_to_the_transfer_until_its_receive(ranks: RankPool, writes: bool, said: str) -> None:
    for told in ranks.check(recorded_tasks.message_touched_in_flight, name="two", writes=writes):
        (found,) = told
        assert found.startswith("race: " if writes else "receive-before-use: ")
        assert said in found
        assert ("is in flight out of the message when #" if writes else "reads the rows[") in found
        assert "Missing: the receive of #" in found


def test_what_was_replaced_in_a_transport_is_put_back(ranks: RankPool) -> None:
    for told in ranks.check(recorded_tasks.detached, name="two"):
        assert told == ["RankGroup", "no call of its own"]


@pytest.mark.parametrize("static", [False, True])
def test_steps_of_the_runner_are_clean_one_after_the_other(static: bool) -> None:
    with recorded_step() as recording:
        all_to_all = RecordedAllToAll(Loopback(CONFIG.n_routed_experts, static_shapes=static), recording.device)
        cache = tiny_cache()
        runner = Runner(
            recorded_tasks.make_model(all_to_all),
            kv_cache=cache,
            settings=VoteSettings(2, 2, 2),
            device=recording.device,
            all2all=all_to_all,
        )
        recording.name(cache._slots, "KV cache")
        recording.program.clear()
        # The second step reads what the first wrote, and both use the runner's buffers.
        for requests in ([(0, 0, 9), (1, 0, 5)], [(0, 9, 1), (1, 5, 8)]):
            assert runner.step(tiny_step(requests)).schedule is not None
    assert {each.microbatch for each in recording.program.operations} == {None, 0, 1}
    assert find_hazards(recording.program) == []
