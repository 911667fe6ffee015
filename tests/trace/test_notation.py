from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo_greenlet import Scheduler, Scripted, dbo_maybe_run_recv_hook, dbo_register_recv_hook, dbo_yield
from dbo_greenlet.errors import TraceFileError
from dbo_greenlet.trace import RecvRecord, StepRecorder
from dbo_greenlet.trace.notation import Item, Receive, Site, order, parse_site, ring_receives, why_no_notation


def text(items: list[Item]) -> str:
    return ", ".join(map(str, items))


@pytest.mark.parametrize(
    ("label", "site"),
    [
        ("layer3.dispatch", Site(3, "dispatch")),
        ("layer27.combine", Site(27, "combine")),
        ("model.layers.12.combine", Site(12, "combine")),
        ("0.dispatch", Site(0, "dispatch")),
        ("layer3.gate", None),
        ("layer.dispatch", None),
        ("layer3.dispatch2", None),
        ("modular_kernel.py:1237", None),
        ("", None),
    ],
)
def test_site_labels(label: str, site: Site | None) -> None:
    assert parse_site(label) == site


def test_round_robin_is_the_documented_order(moe_schedule) -> None:
    decisions, sites = moe_schedule([0, 1] * 7, [0, 1, 2])
    assert text(order(decisions, sites)) == (
        "A0_0, A1_0, "
        + "D_0 send, A0_1, A1_1, D_0 recv, D_1 send, MLP_0, D_1 recv, C_0 send, S_0, MLP_1, C_0 recv, C_1 send, S_1, "
        "A0_0, A1_0, C_1 recv, "
        * 2
        + "D_0 send, A0_1, A1_1, D_0 recv, D_1 send, MLP_0, D_1 recv, C_0 send, S_0, MLP_1, C_0 recv, C_1 send, S_1, "
        "out_0, C_1 recv, out_1"
    )


def test_a_phase_offset_of_two_yields_is_the_order_of_vllm_literally(moe_schedule) -> None:
    decisions, sites = moe_schedule([0, 0] + [1, 0] * 5 + [1, 1], [0, 1, 2])
    steady = (
        "D_1 send, A0_0, A1_0, D_1 recv, D_0 send, MLP_1, D_0 recv, "
        "C_1 send, S_1, MLP_0, C_1 recv, C_0 send, S_0, A0_1, A1_1, C_0 recv, "
    )
    assert text(order(decisions, sites)) == (
        "A0_0, A1_0, D_0 send, D_0 recv*, MLP_0, C_0 send, S_0, A0_1, A1_1, C_0 recv, "
        + steady * 2
        + "D_1 send, out_0, D_1 recv, MLP_1, C_1 send, S_1, C_1 recv*, out_1"
    )


def test_layers_without_yields_are_named(moe_schedule) -> None:
    decisions, sites = moe_schedule([0] * 7, [2, 4, 7])
    assert text([item for item in order(decisions, sites) if not item.action]) == (
        "in_0, A0_0, A1_0, MLP_0, S_0, L3_0, A0_0, A1_0, MLP_0, S_0, L5..6_0, A0_0, A1_0, MLP_0, S_0, out_0"
    )


def test_a_model_without_a_shared_expert(moe_schedule) -> None:
    decisions, sites = moe_schedule([0] * 3, [0])
    assert text(order(decisions, sites, shared_expert=False)) == (
        "A0_0, A1_0, D_0 send, D_0 recv*, MLP_0, C_0 send, C_0 recv*, out_0"
    )


def test_recorded_receives_go_before_the_rule_of_the_ring(moe_schedule) -> None:
    decisions, sites = moe_schedule([0, 1, 0, 1, 0, 1], [0])
    # As if microbatch 1 had left the dispatch alone, and the step had failed before the last combine was received.
    receives = [Receive(0, None, 2), Receive(1, 0, 2), Receive(0, 1, 3)]
    assert text(order(decisions, sites, receives)) == (
        "A0_0, A1_0, D_0 send, A0_1, A1_1, D_1 send, D_0 recv*, MLP_0, D_1 recv, C_0 send, S_0, MLP_1, C_0 recv, "
        "C_1 send, S_1, out_0, out_1"
    )


def test_items_know_their_layer_and_their_decision(moe_schedule) -> None:
    decisions, sites = moe_schedule([0, 0, 0], [5])
    assert order(decisions, sites)[1:] == [
        Item("A0", 0, 5, "", 0),
        Item("A1", 0, 5, "", 0),
        Item("D", 0, 5, "send", 0),
        Item("D", 0, 5, "recv", 1, no_sibling=True),
        Item("MLP", 0, 5, "", 1),
        Item("C", 0, 5, "send", 1),
        Item("S", 0, 5, "", 1),
        Item("C", 0, 5, "recv", 2, no_sibling=True),
        Item("out", 0, 6, "", 2),
    ]


@pytest.mark.parametrize(
    ("decisions", "sites", "why"),
    [
        (
            [0, 0],
            ["model.py:7", ""],
            "its sites are not dispatch and combine labels (the first other one is 'model.py:7')",
        ),
        ([0, 0], ["layer0.combine", ""], "microbatch 0 came to 'layer0.combine' (decision 0) out of turn"),
        (
            [0, 0],
            ["layer0.dispatch", "layer0.dispatch"],
            "microbatch 0 came to 'layer0.dispatch' (decision 1) out of turn",
        ),
        (
            [0, 0],
            ["layer0.dispatch", "layer1.combine"],
            "microbatch 0 came to 'layer1.combine' (decision 1) out of turn",
        ),
        (
            [0, 0, 0],
            ["layer1.dispatch", "layer1.combine", "layer1.dispatch"],
            "microbatch 0 came to 'layer1.dispatch' (decision 2) out of turn",
        ),
        ([0, 0], ["layer0.dispatch", ""], "microbatch 0 returned between a dispatch and its combine"),
        ([0, 1], ["", ""], "it has no yields"),
        ([], [], "it has no yields"),
        ([0, 1, 0], [], "the schedule has 3 decisions and 0 sites"),
    ],
)
def test_a_schedule_that_is_no_dispatch_and_combine(decisions: list[int], sites: list[str], why: str) -> None:
    assert why_no_notation(decisions, sites) == why
    for function in (order, lambda d, s: ring_receives(d, s, 2)):
        with pytest.raises(TraceFileError, match=re.escape(why)):
            function(decisions, sites)


def test_a_step_that_failed_half_way_has_a_notation(moe_schedule) -> None:
    decisions, sites = moe_schedule([0, 1, 0], [0, 1])
    assert why_no_notation(decisions, sites) is None


@st.composite
def scripts(draw) -> tuple[int, int, list[int]]:
    """(N, layers, decisions) that law 6 allows: no microbatch overtakes an earlier one."""
    count = draw(st.integers(1, 4))
    layers = draw(st.integers(1, 3))
    left = [2 * layers + 1] * count
    decisions = []
    while any(left):
        open_to = [i for i in range(count) if left[i] and (i == 0 or left[i - 1] < left[i] or not left[i - 1])]
        decisions.append(draw(st.sampled_from(open_to)))
        left[decisions[-1]] -= 1
    return count, layers, decisions


def run(
    count: int, layers: int, decisions: list[int], log: Callable[[str], None]
) -> tuple[StepRecorder, tuple[str, ...]]:
    """A model that writes down what it does in the notation, run by the real scheduler."""

    def entry(index: int) -> Callable[[], None]:
        def layer_part(stage: str, layer: int, before: list[str], after: list[str]) -> None:
            for piece in before:
                log(f"{piece}_{index}")
            dbo_maybe_run_recv_hook()
            letter = stage[0].upper()
            log(f"{letter}_{index} send")
            dbo_register_recv_hook(lambda: log(f"{letter}_{index} recv"))
            for piece in after:
                log(f"{piece}_{index}")
            dbo_yield(f"layer{layer}.{stage}")

        def model() -> None:
            for layer in range(layers):
                layer_part("dispatch", layer, ["A0", "A1"], [])
                layer_part("combine", layer, ["MLP"], ["S"])
            log(f"out_{index}")

        return model

    watch = StepRecorder()
    result = Scheduler(Scripted(decisions), instruments=[watch]).run([entry(i) for i in range(count)])
    return watch, result.schedule.sites


@settings(deadline=None, max_examples=150)
@given(scripts())
def test_the_order_is_what_the_model_did(script: tuple[int, int, list[int]]) -> None:
    count, layers, decisions = script
    done: list[str] = []
    watch, sites = run(count, layers, decisions, done.append)
    recorded = sorted((r for r in watch.records(step=0) if isinstance(r, RecvRecord)), key=lambda r: (r.decision, r.at))
    receives = [Receive(r.ubatch, r.by, r.decision) for r in recorded]
    items = order(decisions, sites, receives)
    assert [str(item).rstrip("*") for item in items] == done
    assert receives == ring_receives(decisions, sites, count)
    assert order(decisions, sites) == items
