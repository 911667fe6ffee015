"""Times and overlap of the documented layers, by hand and by a model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo_greenlet.devices.virtual import VirtualDevice
from dbo_greenlet.devices.virtual_times import Lane, Overlap
from dbo_greenlet.policies import InTurn, PhaseOffset, SeededRandom
from dbo_greenlet.policy import Policy
from dbo_greenlet.stream_program import Operation
from dbo_greenlet.testing.layer_programs import Costs, high_throughput, low_latency
from dbo_greenlet.testing.step_run import Build
from tests.testing.device_model import Command, Model
from tests.testing.layer_runs import BOTH, device_of, ran

# Each microbatch: A0 20, A1 40, MLP 60, S 20, and 10 behind the last layer; D and C as said.


def overlap_of(program: Callable[..., Build], layers: int, comm: float, policy: Policy | None = None) -> Overlap:
    costs = Costs(dispatch=comm, combine=comm)
    return device_of(ran(program(layers, costs=costs), policy)).overlap()


def test_one_layer_of_low_latency() -> None:
    assert device_of(ran(low_latency(1))).lanes() == [
        Lane("compute", 0, "A0", 0, 20),
        Lane("compute", 0, "A1", 20, 60),
        Lane("wire", 0, "D", 60, 120),
        Lane("compute", 1, "A0", 60, 80),
        Lane("compute", 1, "A1", 80, 120),
        Lane("wire", 1, "D", 120, 180),
        Lane("compute", 0, "MLP", 120, 180),
        Lane("wire", 0, "C", 180, 240),
        Lane("compute", 0, "S", 180, 200),
        Lane("compute", 1, "MLP", 200, 260),
        Lane("wire", 1, "C", 260, 320),  # the receive of C_0, before it, found it there since 240
        Lane("compute", 1, "S", 260, 280),
        Lane("compute", 0, "out", 280, 290),
        Lane("compute", 1, "out", 320, 330),  # nobody computes from 290 to 320
    ]


def test_one_layer_of_high_throughput() -> None:
    run = ran(high_throughput(1, costs=Costs(counts=5)))
    assert device_of(run).lanes() == [
        Lane("compute", 0, "A0", 0, 20),
        Lane("compute", 0, "A1", 20, 60),
        Lane("compute", 1, "A0", 60, 80),
        Lane("comm", 0, "counts", 60, 65),
        Lane("comm", 0, "D", 65, 125),
        Lane("compute", 1, "A1", 80, 120),
        Lane("compute", 0, "MLP", 125, 185),
        Lane("comm", 1, "counts", 125, 130),  # behind D_0 on the comm stream
        Lane("comm", 1, "D", 130, 190),
        Lane("compute", 1, "MLP", 190, 250),
        Lane("comm", 0, "C", 190, 250),  # MLP_0 was done at 185, D_1 not before 190
        Lane("compute", 0, "S", 250, 270),
        Lane("comm", 1, "C", 250, 310),
        Lane("compute", 1, "S", 270, 290),
        Lane("compute", 0, "out", 290, 300),
        Lane("compute", 1, "out", 310, 320),
    ]
    waits = [(o.stream, o.begin, o.end) for o in run.program.operations if o.kind == "host_wait"]
    # The host stands still until the counts are there: first behind A1_0, then behind D_0.
    assert waits == [("comm", 0, 65), ("comm", 65, 130)]


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_short_communication_is_hidden_all_but_the_last_of_it(layers: int) -> None:
    """Compute costs 2 * (20 + 40 + 60 + 20) a layer, and that is what a layer takes."""
    # C_1 of the last layer leaves when MLP_1 is done; beside it run S_1 and out_0, and nothing for 30.
    assert overlap_of(low_latency, layers, 60) == Overlap(
        280 * layers + 50, 280 * layers + 20, 240 * layers, 240 * layers - 30
    )
    # On one comm stream the combines follow each other, and C_1 begins with C_0's end, 40 before the last S's.
    expected = Overlap(280 * layers + 30, 280 * layers + 20, 240 * layers, 240 * layers - 10)
    assert overlap_of(high_throughput, layers, 60) == expected


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_long_communication_is_what_a_layer_takes(layers: int) -> None:
    """Its four transfers follow each other without a gap; only the first attention and the last out are not beside."""
    compute = 280 * layers + 20
    expected = Overlap(60 + 800 * layers + 10, compute, 800 * layers, compute - 60 - 10)
    assert overlap_of(low_latency, layers, 200) == expected
    assert overlap_of(high_throughput, layers, 200) == expected


@BOTH
def test_in_turn_only_the_shared_expert_hides_anything(program: Callable[..., Build]) -> None:
    # Each microbatch and layer: A0 and A1 60, D 60, MLP 60, C 60 with S beside it. Nobody computes beside D.
    # The sibling's work begins when a microbatch is through, and out, 10, comes last.
    assert overlap_of(program, 3, 60, InTurn()) == Overlap(2 * (240 * 3 + 10), 280 * 3 + 20, 240 * 3, 2 * 20 * 3)


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_with_an_offset_the_ends_are_exposed(layers: int) -> None:
    """The first dispatch has nobody beside it, nor has the last layer of microbatch 1."""
    # D_0 of the first layer: 60. In the last, D_1 beside out_0 only: 50; C_1 beside S_1 only: 40.
    expected = Overlap(280 * layers + 170, 280 * layers + 20, 240 * layers, 240 * layers - 60 - 50 - 40)
    assert overlap_of(low_latency, layers, 60, PhaseOffset(2)) == expected


LENGTHS = st.integers(0, 40)


@BOTH
@given(
    costs=st.builds(Costs, *[LENGTHS] * 9),
    host=st.fixed_dictionaries({"launch": st.integers(0, 6), "record": st.integers(0, 2), "wait": st.integers(0, 2)}),
    count=st.integers(1, 3),
    layers=st.integers(0, 2),
    seed=st.integers(0, 10**6),
)
def test_the_times_are_those_of_the_model(
    program: Callable[..., Build], costs: Costs, host: dict[str, int], count: int, layers: int, seed: int
) -> None:
    run = ran(program(layers, costs=costs), SeededRandom(seed), count=count, make_device=partial(VirtualDevice, **host))
    commands = [command_of(each, costs) for each in run.program.operations]
    expected = Model(**host).run(commands)
    assert [(each.begin, each.end) for each in run.program.operations] == [(e.begin, e.end) for e in expected]


def command_of(each: Operation, costs: Costs) -> Command:
    length = {
        "A0": costs.a0,
        "A1": costs.a1,
        "D": costs.dispatch,
        "MLP": costs.mlp,
        "C": costs.combine,
        "S": costs.shared,
        "out": costs.out,
        "counts": costs.counts,
    }.get(each.name)
    if each.kind == "host_wait":
        return ("host waits", each.stream)
    if each.kind in ("record", "wait"):
        return (each.kind, each.stream, each.event)
    if each.kind == "receive":
        return ("receive", each.stream, each.transfer.number, costs.receive)
    return (each.kind, each.stream, length)
