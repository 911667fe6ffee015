"""The pattern of DeepEP high throughput: three yields a layer, stream waits instead of receive hooks."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo_greenlet import Scheduler, Scripted, dbo_yield
from dbo_greenlet.errors import TraceFileError
from dbo_greenlet.trace import SliceRecord, StepRecorder, StepTrace, render_lanes, render_order, render_step
from dbo_greenlet.trace.notation import (
    Site,
    is_high_throughput,
    order,
    parse_site,
    ring_receives,
    why_no_notation,
)

STAGES = ("before_dispatch", "before_combine", "combine")


def schedule(decisions: list[int], layers: list[int]) -> tuple[list[int], list[str]]:
    stations = [f"layer{layer}.{stage}" for layer in layers for stage in STAGES] + [""]
    reached = dict.fromkeys(decisions, 0)
    sites = []
    for index in decisions:
        sites.append(stations[reached[index]])
        reached[index] += 1
    return decisions, sites


def picture(text: str) -> str:
    return textwrap.dedent(text).strip("\n")


def test_round_robin_on_the_two_streams() -> None:
    """Derived by hand from what the streams are given, layer by layer.

    Compute: A_0, event; A_1, event; wait for D_0, MLP_0, event; wait for D_1, MLP_1, event; S_0; S_1; wait for C_0, the
    next layer. Communication, each after its event: D_0, D_1, C_0, C_1. So D_0 has A_1 to hide behind, D_1 has MLP_0,
    C_0 has MLP_1 and the shared experts, and C_1 these and the next layer's A_0.
    """
    items = order(*schedule([0, 1] * 13, [1, 2, 3, 4]))
    assert render_order(items) == picture("""
        layer 1
        Comp: |-in_0-A0_0-A1_0-||-in_1-A0_1-A1_1-||-MLP_0-||-MLP_1-||-S_0-S_1-||-A0_0-A1_0-|
        Comm:                   |------D_0-------||--D_1--||-------C_0--------|
                                                                    |---------C_1----------|
        Order: in_0, A0_0, A1_0, D_0 send, in_1, A0_1, A1_1, D_1 send, D_0 recv, MLP_0, C_0 send, D_1 recv,
               MLP_1, C_1 send, S_0, S_1, C_0 recv, A0_0, A1_0

        layers 2 to 3
        Comp: |-A0_1-A1_1-||-MLP_0-||-MLP_1-||-S_0-S_1-||-A0_0-A1_0-|
        Comm: |----D_0----||--D_1--||-------C_0--------|
                                             |---------C_1----------|
        Order: D_0 send, C_1 recv, A0_1, A1_1, D_1 send, D_0 recv, MLP_0, C_0 send, D_1 recv, MLP_1,
               C_1 send, S_0, S_1, C_0 recv, A0_0, A1_0

        layer 4
        Comp: |-A0_1-A1_1-||-MLP_0-||-MLP_1-||-S_0-S_1-||-out_0-||-out_1-|
        Comm: |----D_0----||--D_1--||-------C_0--------|
                                             |-------C_1--------|
        Order: D_0 send, C_1 recv, A0_1, A1_1, D_1 send, D_0 recv, MLP_0, C_0 send, D_1 recv, MLP_1,
               C_1 send, S_0, S_1, C_0 recv, out_0, C_1 recv, out_1
    """)


def test_one_microbatch_after_the_other_hides_no_dispatch() -> None:
    items = order(*schedule([0] * 10 + [1] * 10, [1, 2, 3]))
    assert render_order(items).splitlines()[:3] == [
        "layer 1",
        "Comp: |-in_0-A0_0-A1_0-|         |-MLP_0-||-S_0-||-A0_0-A1_0-|",
        "Comm:                   |--D_0--|         |-C_0-|",
    ]


def test_a_model_without_a_shared_expert() -> None:
    items = order(*schedule([0] * 4, [0]), shared_expert=False)
    assert ", ".join(map(str, items)) == "A0_0, A1_0, D_0 send, D_0 recv, MLP_0, C_0 send, C_0 recv, out_0"


@st.composite
def scripts(draw) -> tuple[int, int, list[int]]:
    """(N, layers, decisions) in which no microbatch overtakes an earlier one (law 6)."""
    count = draw(st.integers(1, 4))
    layers = draw(st.integers(1, 3))
    left = [3 * layers + 1] * count
    decisions = []
    while any(left):
        open_to = [i for i in range(count) if left[i] and (i == 0 or left[i - 1] < left[i] or not left[i - 1])]
        decisions.append(draw(st.sampled_from(open_to)))
        left[decisions[-1]] -= 1
    return count, layers, decisions


@settings(deadline=None, max_examples=100)
@given(scripts())
def test_the_order_is_that_of_the_compute_stream(script: tuple[int, int, list[int]]) -> None:
    """A model that writes down what it puts on its compute stream, events and waits included."""
    count, layers, decisions = script
    compute: list[str] = []

    def entry(index: int) -> Callable[[], None]:
        def put(*pieces: str) -> None:
            compute.extend(f"{piece}_{index}" for piece in pieces)

        def event_for(piece: str) -> None:
            compute.append(f"{piece}_{index} send")

        def wait_for(piece: str) -> None:
            compute.append(f"{piece}_{index} recv")

        def model() -> None:
            for layer in range(layers):
                put("A0", "A1")
                event_for("D")
                dbo_yield(f"layer{layer}.before_dispatch")
                wait_for("D")
                put("MLP")
                event_for("C")
                dbo_yield(f"layer{layer}.before_combine")
                put("S")
                dbo_yield(f"layer{layer}.combine")
                wait_for("C")
            put("out")

        return model

    watch = StepRecorder()
    result = Scheduler(Scripted(decisions), instruments=[watch]).run([entry(i) for i in range(count)])
    sites = result.schedule.sites
    assert [str(item) for item in order(decisions, sites)] == compute
    assert ring_receives(decisions, sites, count) == []
    # As the command shows it: nothing is missing from a drawing of any schedule.
    slices = [r for r in watch.records(step=0) if isinstance(r, SliceRecord)]
    text = render_step(StepTrace("dbo", 0, 0, None, slices, []), width=10_000)
    drawn = [word for line in text.splitlines() if line.startswith("Order: ") for word in line[7:].split(", ")]
    # Equal layers are drawn once, so a word may stand for several.
    assert set(drawn) == set(compute)
    assert "never received" not in text


def test_which_sites_are_known() -> None:
    assert parse_site("layer3.before_dispatch") == Site(3, "before_dispatch")
    assert parse_site("model.layers.3.before_combine") == Site(3, "before_combine")
    assert parse_site("layer3.before_gate") is None
    assert is_high_throughput(["layer3.before_dispatch"]) and not is_high_throughput(["layer3.dispatch", "x", ""])


@pytest.mark.parametrize(
    ("sites", "why"),
    [
        (["layer0.before_dispatch", "layer0.combine"], "came to 'layer0.combine' (decision 1) out of turn"),
        (["layer0.before_dispatch", "layer1.before_combine"], "came to 'layer1.before_combine' (decision 1) out of"),
        (["layer0.before_dispatch", "layer0.dispatch"], "came to 'layer0.dispatch' (decision 1) out of turn"),
        (["layer0.dispatch", "layer0.before_dispatch"], "came to 'layer0.dispatch' (decision 0) out of turn"),
        (["layer0.before_combine", ""], "came to 'layer0.before_combine' (decision 0) out of turn"),
        (["layer0.before_dispatch", ""], "microbatch 0 returned between a dispatch and its combine"),
        (
            ["layer1.before_dispatch", "layer1.before_combine", "layer1.combine", "layer1.before_dispatch"],
            "came to 'layer1.before_dispatch' (decision 3) out of turn",
        ),
    ],
)
def test_sites_out_of_turn(sites: list[str], why: str) -> None:
    decisions = [0] * len(sites)
    assert why in why_no_notation(decisions, sites)
    with pytest.raises(TraceFileError, match=re.escape(why)):
        order(decisions, sites)


def step(decisions: list[int], layers: list[int]) -> StepTrace:
    seen = dict.fromkeys(decisions, 0)
    slices = []
    for position, (index, site) in enumerate(zip(*schedule(decisions, layers), strict=True)):
        slices.append(SliceRecord(0, 0, "dbo", index, seen[index], site, 10.0 * position, 10.0 * position + 10))
        seen[index] += 1
    return StepTrace("dbo", 0, 0, None, slices)


def test_a_step_that_failed_half_way_leaves_its_combine_open() -> None:
    failed = step([0, 1, 0, 1], [0])
    assert "sent and never received: C_0 of layer 0, C_1 of layer 0" in render_step(failed)


def test_the_legend_says_what_send_and_recv_stand_for() -> None:
    text = " ".join(render_step(step([0] * 4, [0])).split())
    assert "high throughput: send is the event that a dispatch or combine waits for, recv the compute stream's" in text
    low_latency = StepTrace("dbo", 0, 0, None, [SliceRecord(0, 0, "dbo", 0, 0, "layer0.dispatch", 0.0, 1.0)])
    assert "high throughput" not in render_step(low_latency)


def test_the_lanes_name_three_slices_a_layer() -> None:
    assert render_lanes(step([0, 1] * 4, [3]), width=93) == picture("""
                     0 us                                                     80 us (1.0 us a column)
        microbatch 0 ┃A3━━━━━━━          ┃M3━━━━━━━          ┃S3━━━━━━━          ┃out━━━━━━
        microbatch 1           ┃A3━━━━━━━          ┃M3━━━━━━━          ┃S3━━━━━━━          ┃out━━━━━━
    """)
