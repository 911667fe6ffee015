"""The step on the virtual device: against the queues written down by themselves, and against sums that are known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo_greenlet.devices.virtual import VirtualDevice
from dbo_greenlet.errors import ConfigurationError
from dbo_greenlet.estimate import StepCosts, simulate
from dbo_greenlet.estimate.program import HostCosts, Wire
from dbo_greenlet.policies.names import policy_from_text

COSTS = StepCosts(a0=20, a1=40, dispatch=60, mlp=70, combine=50, shared=30, out=10, unpack=10)
times = st.integers(0, 100).map(float)


def on_queues(costs: StepCosts, layers: int, count: int) -> float:
    """Round robin over copies on a stream, the shared expert before the dispatch: two queues, each in its order."""
    compute = wire = 0.0
    arrived = [0.0] * count
    attention = costs.a0 + costs.a1 + costs.shared
    for stage in range(2 * layers + 1):
        for i in range(count):
            if stage == 2 * layers:
                work = costs.out
            elif stage % 2:
                work = costs.mlp
            else:
                work = attention + (costs.unpack if stage else 0.0)
            compute = max(compute, arrived[i]) + work
            if stage < 2 * layers:
                wire = max(wire, compute) + (costs.combine if stage % 2 else costs.dispatch)
                arrived[i] = wire
    return max(compute, wire)


@settings(max_examples=60, deadline=None)
@given(st.builds(StepCosts, *[times] * 7, unpack=times), st.integers(1, 3), st.integers(2, 4))
def test_round_robin_on_the_virtual_device_is_the_queues(costs: StepCosts, layers: int, count: int) -> None:
    costs = replace(costs, shared_first=True, shared=costs.shared + 1)
    assert simulate("stream", layers, costs, count).length == pytest.approx(on_queues(costs, layers, count))


@pytest.mark.parametrize("kind", ["stream", "deepep_ht"])
def test_unsplit_nothing_is_hidden_on_a_stream(kind: str) -> None:
    run = simulate(kind, 3, replace(COSTS, latency=5))
    # The last layer's rows are unpacked behind it.
    compute = 3 * (20 + 40 + 70 + 30) + 2 * 10 + 10
    assert run.length == compute + 3 * (60 + 50 + 10)
    assert (run.compute, run.comm, run.hidden) == (compute, 3 * 120, 0)


def test_unsplit_low_latency_hides_the_combine_behind_the_shared_expert() -> None:
    run = simulate("deepep_ll", 2, COSTS)
    assert run.length == 2 * (20 + 40 + 60 + 70 + 50) + 10 + 10
    assert run.hidden == 2 * 30


@pytest.mark.parametrize("kind", ["stream", "deepep_ht", "deepep_ll"])
def test_two_microbatches_hide_communication_that_is_as_long_as_compute(kind: str) -> None:
    costs = StepCosts(a0=30, a1=30, dispatch=50, mlp=60, combine=50, shared=0, out=0)
    run = simulate(kind, 20, costs, 2)
    assert run.length < 1.03 * 2 * 20 * 120
    assert run.hidden > 0.95 * run.comm


def test_messages_share_the_wire_and_not_their_latency() -> None:
    device = VirtualDevice()
    device.transfer_time = Wire(device, 7)
    first, second = device.send("D", 100 + 7), device.send("D", 30 + 7)
    assert (first.arrives, second.arrives) == (100 + 7, 100 + 30 + 7)
    device.work("A", 500)
    assert device.send("C", 10 + 7).arrives == 500 + 10 + 7


def test_a_low_latency_receive_comes_before_the_next_send() -> None:
    at_once = StepCosts(a0=0, a1=0, dispatch=100, mlp=0, combine=0, shared=0, out=0, latency=7)
    # The second microbatch receives the first one's rows before it sends its own; each combine takes its latency.
    assert simulate("deepep_ll", 1, at_once, 2).length == 2 * 107 + 2 * 7


def test_in_turn_hides_nothing_and_phase_offset_keeps_the_step_whole() -> None:
    in_turn = simulate("stream", 4, replace(COSTS, shared_first=True), 2, policy_from_text("in_turn"))
    assert in_turn.length == 2 * simulate("stream", 4, replace(COSTS, shared_first=True)).length
    shifted = simulate("stream", 4, replace(COSTS, shared_first=True), 2, policy_from_text("phase_offset:2"))
    assert simulate("stream", 4, replace(COSTS, shared_first=True), 2).length < shifted.length < in_turn.length


HOST = HostCosts(attention=90, dispatch=20, experts=50, combine=20, shared=40, dense=40, handoff=34)


@pytest.mark.parametrize(("kind", "yields"), [("deepep_ll", 2), ("deepep_ht", 3), ("stream", 3)])
def test_where_the_host_is_the_bound_splitting_doubles_the_launches_and_adds_hand_offs(kind: str, yields: int) -> None:
    quick = StepCosts(a0=1, a1=1, dispatch=1, mlp=1, combine=1, shared=1, out=0, host=HOST)
    unsplit, split = simulate(kind, 5, quick), simulate(kind, 5, quick, 2)
    assert unsplit.host - unsplit.waited == pytest.approx(5 * 220)
    assert split.host - split.waited == pytest.approx(2 * 5 * (220 + yields * 34))
    assert unsplit.length == pytest.approx(unsplit.host, rel=0.01)


def test_high_throughput_makes_the_host_wait_for_the_gpu() -> None:
    slow = replace(COSTS, host=replace(HOST, handoff=0), a1=1000)
    assert simulate("deepep_ht", 3, slow).waited > 3 * 800
    assert simulate("stream", 3, slow).waited == simulate("deepep_ll", 3, slow).waited == 0


def test_dense_layers_come_first_and_are_not_overlapped() -> None:
    with_dense = replace(COSTS, dense=100, dense_layers=3)
    more = simulate("stream", 2, with_dense).length - simulate("stream", 2, COSTS).length
    assert more == 3 * (20 + 40 + 100)


@settings(max_examples=40, deadline=None)
@given(st.builds(StepCosts, *[times] * 7, unpack=times, latency=times), st.sampled_from(["stream", "deepep_ll"]))
def test_no_step_is_shorter_than_its_compute_or_its_wire(costs: StepCosts, kind: str) -> None:
    run = simulate(kind, 3, costs, 2)
    compute = 2 * (3 * (costs.a0 + costs.a1 + costs.mlp + costs.shared) + 2 * costs.unpack + costs.out)
    assert run.length >= compute - 1e-6
    assert run.length >= 2 * 3 * (costs.dispatch + costs.combine) - 1e-6


def test_an_unknown_all_to_all_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no all-to-all 'pigeon'"):
        simulate("pigeon", 1, COSTS)
