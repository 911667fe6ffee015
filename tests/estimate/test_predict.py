"""What is recommended, from how many tokens on, and why."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from dbo_greenlet.errors import ConfigurationError
from dbo_greenlet.estimate import CARRIERS, Setup, estimate, make_setup
from dbo_greenlet.estimate.predict import DO_NOT_SPLIT, SLOW_HOST, SPLIT, TOO_CLOSE, run_option, step_costs
from dbo_greenlet.estimate.reason import reason
from dbo_greenlet.estimate.text import render_estimate, render_setup, render_threshold, verdict_sentence
from dbo_greenlet.estimate.threshold import threshold
from tests.estimate.setups import lite

# DeepSeek-V3's decode as SGLang published it: 72 H100s, gains of -27 % at 32 tokens and +25.5 % at 256.
V3 = {"model": "deepseek-v3", "gpu": "H100", "link": "rdma", "ranks": 72, "dispatch_bytes": 1, "context": 4000}


def v3(tokens: int, layers: int = 13, **values: object) -> Setup:
    return make_setup({**V3, "tokens": tokens, "layers": layers, "graph": True, "outside_ms": 0, **values})


def test_small_decodes_lose_and_large_ones_win_between_nodes() -> None:
    verdicts = [estimate(v3(tokens), (2,), ("round_robin",)).verdict for tokens in (32, 64, 256)]
    assert verdicts == [DO_NOT_SPLIT, TOO_CLOSE, SPLIT]


def test_within_a_node_no_decode_is_split() -> None:
    for tokens in (8, 64, 128):
        for graph in (False, True):
            assert estimate(lite(tokens, layers=8, graph=graph)).verdict == DO_NOT_SPLIT


def test_an_eager_step_that_waits_for_its_host_loses_by_half_and_says_why() -> None:
    found = estimate(lite(64, outside_ms=0), (2,), ("round_robin",))
    assert 0.45 < found.best.gain < 0.6
    assert reason(found).startswith("The host is the bound: launching the split model takes it")


def test_the_reason_in_a_graph_is_the_weights() -> None:
    assert "each microbatch reads the weights again" in reason(estimate(lite(64, graph=True)))
    assert "the GPU is the bound" in reason(estimate(v3(256)))


def test_a_gain_that_a_slower_host_would_eat_up_is_no_recommendation() -> None:
    slow_link = {"layers": 9, "gbs": 10, "all2all": "stream", "ranks": 8, "context": 4000}
    for call_us in (8.0, 40.0):
        found = estimate(lite(512, call_us=call_us, **slow_link), (2,), ("round_robin",))
        assert found.best.gain > 1.1
        slower = lite(512, call_us=call_us * SLOW_HOST, **slow_link)
        assert found.best.slow_gain == pytest.approx(estimate(slower, (2,), ("round_robin",)).best.gain)
        assert (found.verdict == SPLIT) == (found.best.slow_gain > 1.1)
    assert found.verdict == TOO_CLOSE
    assert f"On a host {SLOW_HOST} times slower the gain would be" in reason(found)


def test_options_are_all_counts_and_policies_the_best_first() -> None:
    found = estimate(v3(256), (2, 3, 4), ("round_robin", "phase_offset:2"))
    gains = [option.gain for option in found.options]
    assert gains == sorted(gains, reverse=True)
    # Low latency has no more than two receives outstanding.
    assert {(o.count, o.policy) for o in found.options} == {
        (2, "round_robin"), (2, "phase_offset:2"), (3, "round_robin"), (4, "round_robin"),
    }  # fmt: skip
    on_stream = estimate(v3(256, all2all="stream"), (3,), ("round_robin", "phase_offset:1"))
    assert len(on_stream.options) == 2
    assert found.option(3, "round_robin").step > found.unsplit.step / 2
    with pytest.raises(ConfigurationError, match="4 microbatches with in_turn were not estimated"):
        found.option(4, "in_turn")


def test_there_must_be_a_token_for_each_microbatch() -> None:
    assert [option.count for option in estimate(lite(3, graph=True), (2, 3, 4), ("round_robin",)).options] == [2, 3]
    with pytest.raises(ConfigurationError, match="nothing to split: 1 tokens into 2, 3, 4 microbatches"):
        estimate(lite(1))


def test_more_receives_than_low_latency_takes_are_refused_by_what_they_are() -> None:
    with pytest.raises(ConfigurationError, match="3 microbatches with phase_offset:1 over deepep_ll: more than"):
        estimate(lite(64), (3,), ("phase_offset:1",))


def test_an_extrapolated_calibration_is_named() -> None:
    assert render_setup(lite(64)).splitlines()[1].endswith("calibrated as 'vllm-ll'")
    assert (
        render_setup(lite(64, ranks=4)).splitlines()[1].endswith("(on deepseek-v2-lite with 2 ranks: an extrapolation)")
    )


def test_in_turn_is_never_better_than_unsplit() -> None:
    for tokens in (32, 256):
        assert estimate(v3(tokens), (2,), ("in_turn",)).best.gain < 1


def test_threads_cost_more_than_greenlets_and_nothing_in_a_graph() -> None:
    steps = [run_option(replace(lite(64), carrier=carrier), 2, "round_robin").step for carrier in CARRIERS.values()]
    assert steps[0] < steps[2] < steps[1]
    graph = lite(64, graph=True)
    assert run_option(replace(graph, carrier=CARRIERS["threads"]), 2, "round_robin").step == pytest.approx(
        run_option(graph, 2, "round_robin").step
    )


def test_communication_kernels_take_multiprocessors_from_products_only() -> None:
    large = make_setup({"model": "deepseek-v3", "tokens": 16384, "ranks": 8, "all2all": "deepep_ht", "prefill": True})
    without = replace(large, communication=replace(large.communication, sms=0))
    longer = step_costs(large, 2).mlp / step_costs(without, 2).mlp
    assert 1.01 < longer < 132 / (132 - 20)
    assert step_costs(large, 1) == step_costs(without, 1)


def test_the_threshold_is_where_the_recommendation_begins() -> None:
    found = threshold(v3(1, layers=6), 510, precision=0.02)
    assert found.flag == "--dbo-decode-token-threshold"
    assert found.tokens is not None
    below = int(found.tokens / 1.05)
    verdicts = [estimate(v3(n, layers=6), (2,), ("round_robin",)).verdict for n in (below, found.tokens, 510)]
    assert verdicts == [TOO_CLOSE, SPLIT, SPLIT]
    assert render_threshold(found) == (
        f"--dbo-decode-token-threshold {found.tokens}   (at every number tried from there to 510 tokens a rank)"
    )


def test_a_threshold_of_low_latency_is_within_what_its_kernels_take() -> None:
    assert threshold(v3(1, layers=4), 100_000).most == 510


def test_where_nothing_pays_there_is_no_threshold() -> None:
    found = threshold(lite(1, graph=True))
    assert (found.tokens, found.until) == (None, None)
    assert "leave --enable-dbo off" in render_threshold(found)


def test_where_splitting_pays_in_between_no_threshold_can_say_so() -> None:
    # On this link sixty tokens travel for as long as the weights are read, and thousands far longer than they compute.
    odd = lite(1, layers=8, graph=True, all2all="stream", ranks=1, loopback=True, gbs=7, latency_us=0, context=16)
    found = threshold(odd, 4096)
    assert found.tokens is None
    assert found.until is not None
    assert f"splitting pays at {found.until} tokens a rank and not at 4096" in render_threshold(found)


def test_prefill_has_its_own_option() -> None:
    setup = make_setup({"model": "qwen3-moe", "layers": 4, "tokens": 1, "prefill": True, "all2all": "deepep_ht"})
    assert threshold(setup, 64).flag == "--dbo-prefill-token-threshold"
    with pytest.raises(ConfigurationError, match="at most 1 tokens"):
        threshold(setup, 1)


def test_the_table_has_a_line_for_each_way() -> None:
    found = estimate(v3(256), (2,), ("round_robin",))
    lines = render_estimate(found).splitlines()
    assert lines[0].split() == ["graph", "step,", "ms", "gain", "compute", "comm.", "hidden"]
    assert lines[1].startswith("unsplit ")
    assert lines[2].startswith("2 microbatches, round_robin ")
    shorter = round(100 * (1 - found.best.step / found.unsplit.step))
    assert shorter > 0
    assert lines[4].startswith(f"Split: 2 microbatches, round_robin; expected a step {shorter} % shorter (gain 1.")


@pytest.mark.parametrize(
    ("gain", "change"),
    [(0.5, "a step 100 % longer"), (1.25, "a step 20 % shorter"), (1.001, "a step of the same length")],
)
def test_the_verdict_says_what_the_gain_does_to_the_time(gain: float, change: str) -> None:
    found = estimate(v3(256), (2,), ("round_robin",))
    (option,) = found.options
    assert f"{change} (gain {gain:.2f};" in verdict_sentence(replace(found, options=[replace(option, gain=gain)]))


def test_nothing_is_minus_zero() -> None:
    found = estimate(v3(256), (2,), ("round_robin",))
    (option,) = found.options
    barely = replace(option, run=replace(option.run, hidden=option.run.comm + 1e-9))
    assert not re.search(r"-0(\.0+)?\b", render_estimate(replace(found, options=[barely])))
