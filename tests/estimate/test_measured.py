"""Correcting an estimate by unsplit steps: what is put in comes out again, and what is open stays open."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo_greenlet.errors import ConfigurationError
from dbo_greenlet.estimate import Scale, Setup, UnsplitStep, readings
from dbo_greenlet.estimate.measured import GPU_BOUND, HOST_BOUND, misfits
from dbo_greenlet.estimate.predict import run_option, step_costs
from tests.estimate.setups import lite

GRAPH = lite(64, graph=True)
EAGER = lite(64)


def unsplit(setup: Setup, tokens: int = 64) -> float:
    return run_option(setup.with_tokens(tokens), 1, "").step


@settings(max_examples=25, deadline=None)
@given(st.floats(0.7, 20))
def test_one_graph_step_is_met_by_the_gpu(factor: float) -> None:
    wanted = GRAPH.outside + factor * (unsplit(GRAPH) - GRAPH.outside)
    (found,) = readings(GRAPH, [UnsplitStep(64, wanted)]).values()
    assert unsplit(found) == pytest.approx(wanted, rel=2e-3)
    assert found.scale.host == 1


def test_two_graph_steps_tell_slope_and_padding_apart() -> None:
    truth = replace(GRAPH, scale=Scale(gpu=1.7, padded_us=200.0))
    steps = [UnsplitStep(tokens, unsplit(truth, tokens)) for tokens in (8, 256)]
    (found,) = readings(GRAPH, steps).values()
    for tokens in (8, 64, 256):
        assert unsplit(found, tokens) == pytest.approx(unsplit(truth, tokens), rel=0.02)
    split = [run_option(setup.with_tokens(64), 2, "round_robin").step for setup in (found, truth)]
    assert split[0] == pytest.approx(split[1], rel=0.02)


def test_an_eager_step_alone_has_two_explanations_that_both_meet_it() -> None:
    large = lite(256, outside_ms=0)
    wanted = 1.3 * unsplit(large, 256)
    found = readings(large, [UnsplitStep(256, wanted)])
    assert set(found) == {HOST_BOUND, GPU_BOUND}
    for reading in found.values():
        assert unsplit(reading, 256) == pytest.approx(wanted, rel=2e-3)
    gains = [wanted / run_option(reading, 2, "round_robin").step for reading in found.values()]
    assert gains[0] < gains[1]


def test_an_explanation_that_needs_an_impossible_host_is_left_out() -> None:
    # Thousands of tokens: the GPU is the bound, and a host that takes as long would be many times slower than known.
    large = lite(8192, all2all="stream", prefill=True, context=2048)
    wanted = 1.4 * unsplit(large, 8192)
    assert list(readings(large, [UnsplitStep(8192, wanted)])) == [GPU_BOUND]
    small = lite(2, call_us=21)
    assert list(readings(small, [UnsplitStep(2, 1.2 * unsplit(small, 2))])) == [HOST_BOUND]


def test_with_the_hosts_time_there_is_one_explanation() -> None:
    truth = replace(EAGER, scale=Scale(host=2.0))
    run = run_option(truth, 1, "").run
    (found,) = readings(EAGER, [UnsplitStep(64, unsplit(truth), host=run.host - run.waited)]).values()
    assert found.scale.host == pytest.approx(2.0, rel=0.01)
    assert unsplit(found) == pytest.approx(unsplit(truth), rel=0.01)


def test_eager_steps_of_many_sizes_tell_host_and_gpu_apart() -> None:
    base = lite(64, all2all="stream", engine="torch")
    truth = replace(base, scale=Scale(host=1.5, gpu=2.0))
    steps = [UnsplitStep(tokens, unsplit(truth, tokens)) for tokens in (16, 1024, 8192)]
    (found,) = readings(base, steps).values()
    for tokens in (16, 8192):
        assert unsplit(found, tokens) == pytest.approx(unsplit(truth, tokens), rel=0.03)
    assert found.scale.host == pytest.approx(1.5, rel=0.03)
    assert found.scale.gpu == pytest.approx(2.0, rel=0.05)


def test_steps_that_do_not_depend_on_their_tokens_leave_the_gpu_as_calibrated() -> None:
    (found,) = readings(EAGER, [UnsplitStep(16, 30_000.0), UnsplitStep(64, 30_500.0)]).values()
    assert found.scale.gpu == 1
    assert unsplit(found) == pytest.approx(30_000, rel=0.15)


def test_stages_are_met_one_by_one() -> None:
    stages = {"attention": 400.0, "experts": 900.0, "shared": 50.0, "dispatch": 120.0, "combine": 180.0}
    (found,) = readings(lite(64, graph=True, link="rdma"), [UnsplitStep(64, stages=stages)]).values()
    costs = step_costs(found, 1)
    assert costs.a0 + costs.a1 == pytest.approx(400)
    assert costs.mlp == pytest.approx(900)
    assert costs.shared == pytest.approx(50)
    # A send part and a receive part each, and the flights.
    assert costs.dispatch + costs.combine + 2 * costs.latency + 4 * costs.receive == pytest.approx(300)


def test_compute_without_stages_scales_all_of_them() -> None:
    times = GRAPH.times(64)
    (found,) = readings(GRAPH, [UnsplitStep(64, stages={"compute": 3 * times.compute})]).values()
    assert step_costs(found, 1).mlp == pytest.approx(3 * step_costs(GRAPH, 1).mlp)


STAGES = {"attention": 400.0, "experts": 900.0, "shared": 50.0}


def test_what_a_graph_takes_beyond_its_stages_is_beside_the_model() -> None:
    steps = [UnsplitStep(64, stages=STAGES), UnsplitStep(64, 9_000.0)]
    (found,) = readings(GRAPH, steps).values()
    assert unsplit(found) == pytest.approx(9_000, rel=2e-3)
    run = run_option(found, 1, "").run
    assert found.outside == pytest.approx(9_000 - run.length, rel=0.02)


def test_a_step_that_was_timed_says_more_of_the_host_than_a_profile() -> None:
    steps = [UnsplitStep(64, layer_host=9_000.0, stages=STAGES), UnsplitStep(64, 15_000.0)]
    (found,) = readings(EAGER, steps).values()
    assert unsplit(found) == pytest.approx(15_000, rel=2e-3)
    assert step_costs(found, 1).host.layer < 4_000


def test_messages_that_waited_for_a_late_rank_do_not_count() -> None:
    waiting = {**STAGES, "dispatch": 9_000.0, "combine": 100.0}
    (found,) = readings(EAGER, [UnsplitStep(64, stages=waiting), UnsplitStep(64, 15_000.0)]).values()
    assert found.scale.wire == 1
    assert unsplit(found) == pytest.approx(15_000, rel=2e-3)


def test_of_steps_of_one_size_the_median_counts() -> None:
    steps = [UnsplitStep(64, us) for us in (9e3, 30e3, 10e3)]
    (found,) = readings(GRAPH, steps).values()
    assert unsplit(found) == pytest.approx(10e3, rel=2e-3)
    assert misfits(found, steps) == []


def test_a_step_that_is_not_met_well_is_said() -> None:
    steps = [UnsplitStep(8, 7_000.0), UnsplitStep(64, 13_000.0), UnsplitStep(256, 20_000.0)]
    (found,) = readings(GRAPH, steps).values()
    (said,) = misfits(found, steps)
    assert said == f"The unsplit step of 64 tokens is predicted as {unsplit(found) / 1e3:.1f} ms; measured: 13.0."


def test_a_hosts_time_that_leaves_no_room_has_what_is_beside_the_model_in_it() -> None:
    setup = lite(64, layers=8)
    (found,) = readings(setup, [UnsplitStep(64, 14_800.0, host=14_700.0)]).values()
    assert unsplit(found) == pytest.approx(14_800, rel=0.02)
    # The GPU has to read its weights, whatever the host takes.
    assert run_option(found, 1, "").run.compute > 0.5 * run_option(setup, 1, "").run.compute


def test_a_gpu_is_not_taken_to_be_faster_than_one_can_be() -> None:
    (found,) = readings(GRAPH, [UnsplitStep(64, GRAPH.outside + 600.0)]).values()
    assert found.scale.gpu >= 0.5


@pytest.mark.parametrize(
    ("steps", "wrong"),
    [
        ([], "no unsplit step"),
        ([UnsplitStep(64, 0.0)], "64 tokens in 0.0 us"),
        ([UnsplitStep(64, -5.0)], "64 tokens in -5.0 us"),
        ([UnsplitStep(64, 9e3, host=0.0)], "a host that takes 0.0 us"),
        ([UnsplitStep(64, layer_host=-1.0)], "a host that takes -1.0 us"),
        ([UnsplitStep(64, 9e11)], "no step of this model and machine"),
        ([UnsplitStep(64, 500.0)], "64 tokens in 0.5 ms: no correction meets it, the nearest is"),
        ([UnsplitStep(64, 5e3), UnsplitStep(128, 2e3)], "128 tokens in 2 ms: no correction meets it"),
        ([UnsplitStep(64, 5e3, host=100e3)], "a host that launches 100 ms of an unsplit step of 64 tokens in 5 ms"),
    ],
)
def test_what_no_machine_can_have_measured_is_refused(steps: list[UnsplitStep], wrong: str) -> None:
    setup = EAGER if "host" in wrong else GRAPH
    with pytest.raises(ConfigurationError, match=wrong):
        readings(setup, steps)
