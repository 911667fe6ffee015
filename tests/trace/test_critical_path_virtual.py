"""What a shorter stage would give, against the virtual device that runs the same step again with shorter work."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo_greenlet.policies import InTurn, PhaseOffset
from dbo_greenlet.policy import Policy, RoundRobin
from dbo_greenlet.stream_program import Operation
from dbo_greenlet.testing.layer_programs import Costs, HighThroughput
from dbo_greenlet.trace.critical_path.program import graph_of_program
from dbo_greenlet.trace.critical_path.report import measure_path
from dbo_greenlet.trace.critical_path.steps import graph_of_step
from tests.testing.device_model import Command, act
from tests.testing.device_programs import COSTS, PROGRAMS, rig
from tests.trace.virtual_steps import STAGES, TOLD_BY_SLICES, VirtualStep, shorter

TIMES = st.integers(0, 60).map(lambda half: 2.0 * half)
LAYER_COSTS = st.builds(
    Costs, a0=TIMES, a1=TIMES, dispatch=TIMES, mlp=TIMES, combine=TIMES, shared=TIMES, out=TIMES, counts=TIMES
)
SHARES = st.sampled_from([0.0, 0.5, 1.0])
POLICIES = st.sampled_from([RoundRobin, InTurn, lambda: PhaseOffset(2)])


def of_stream(operation: Operation) -> str:
    return str(operation.stream)


def as_short(command: Command, factors: dict[str, float]) -> Command:
    """Work, flights and receives on a stream take a share less."""
    if command[0] in ("work", "send"):
        return (*command[:2], command[2] * (1 - factors[command[1]]))
    if command[0] == "receive":
        return (*command[:3], command[3] * (1 - factors[command[1]]))
    return command


@given(PROGRAMS, COSTS, st.fixed_dictionaries(dict.fromkeys("abc", SHARES)))
def test_any_program_with_less_work_takes_what_its_graph_says(
    commands: list[Command], costs: dict[str, int], factors: dict[str, float]
) -> None:
    # What the host does elsewhere is not in a program.
    commands = [command for command in commands if command[0] != "host"]
    device, streams = rig(**costs)
    act(device, streams, commands)
    found = graph_of_program(device.program, **costs, stage=of_stream)
    assert found.graph.at[found.end] == max(device.finished_at, device.now)
    again, streams = rig(**costs)
    act(again, streams, [as_short(command, factors) for command in commands])
    earliest, latest = found.graph.shortened([factors], found.end)
    assert earliest[0] == latest[0] == max(again.finished_at, again.now)


@given(st.sampled_from(["LL", "HT"]), LAYER_COSTS, POLICIES, st.integers(1, 3), st.integers(0, 5), st.data())
def test_the_documented_layers_with_a_shorter_stage(
    pattern: str, costs: Costs, policy: Any, count: int, launch: int, data: st.DataObject
) -> None:
    """Every stage by itself, exactly; and the path is as long as the step."""
    step = VirtualStep(pattern, 2, costs, policy(), count=count, launch=launch)
    found = graph_of_program(step.device.program, launch=launch)
    path = measure_path(found.graph, found.end, run="virtual", step=0, rank=0, percent=(50, 100), pieces=True)
    assert path.length == step.length == sum(piece.length for piece in path.pieces)
    stage = data.draw(st.sampled_from(sorted(STAGES)))
    for row in path.stages:
        if row.stage == stage:
            for gain in row.gains:
                costs_then = shorter(costs, {stage: gain.percent / 100})
                again = VirtualStep(pattern, 2, costs_then, policy(), count=count, launch=launch)
                assert gain.least == gain.most == step.length - again.length
    faster = VirtualStep(pattern, 2, costs, policy(), count=count, launch=launch / 2)
    (least,), (most,) = found.graph.shortened([{"host": 0.5}], found.end)
    assert least == most == faster.length


@settings(max_examples=200)
@given(
    st.sampled_from(["LL", "HT"]),
    LAYER_COSTS,
    POLICIES,
    st.integers(1, 3),
    st.sampled_from([0, 0, 1, 8, 40]),
    st.sampled_from([*TOLD_BY_SLICES, "host"]),
    st.sampled_from([0.25, 0.5, 1.0]),
)
def test_a_trace_tells_the_range_in_which_the_truth_lies(
    pattern: str, costs: Costs, policy: Any, count: int, launch: int, stage: str, share: float
) -> None:
    """Slices and stretches hide what happens inside them; what they leave open makes a range, and it holds."""
    stages = TOLD_BY_SLICES if pattern == "LL" else STAGES
    step = VirtualStep(pattern, 2, costs, policy(), count=count, launch=launch, timed=True)
    found = graph_of_step(step.trace, computes=False)
    assert found.timed and not found.graph.contradictions
    assert found.graph.at[found.end] == step.length
    if stage == "host":
        again = VirtualStep(pattern, 2, costs, policy(), count=count, launch=launch * (1 - share))
    else:
        again = VirtualStep(pattern, 2, shorter(costs, {stage: share}, stages), policy(), count=count, launch=launch)
    (earliest,), (latest,) = found.graph.shortened([{stage: share}], found.end)
    assert earliest - 1e-6 <= again.length <= latest + 1e-6


@given(LAYER_COSTS, POLICIES, st.integers(1, 3), st.sampled_from(sorted(TOLD_BY_SLICES)), SHARES)
def test_and_where_the_host_itself_computes(costs: Costs, policy: Any, count: int, stage: str, share: float) -> None:
    step = VirtualStep("CPU", 2, costs, policy(), count=count)
    found = graph_of_step(step.trace, computes=True)
    assert not found.timed and found.graph.at[found.end] == step.length
    again = VirtualStep("CPU", 2, shorter(costs, {stage: share}, TOLD_BY_SLICES), policy(), count=count)
    (earliest,), (latest,) = found.graph.shortened([{stage: share}], found.end)
    assert earliest - 1e-6 <= again.length <= latest + 1e-6


class OtherSites(HighThroughput):
    """High throughput at yield sites that say nothing."""

    def over_to_comm(self, site: str) -> None:
        super().over_to_comm(f"model.py:{len(site)}")

    def over_to_compute(self, site: str) -> None:
        super().over_to_compute(f"model.py:{len(site)}")


@given(LAYER_COSTS, POLICIES, st.integers(1, 3), st.sampled_from([0, 3, 20]), SHARES)
def test_recorded_events_say_what_streams_wait_for(
    costs: Costs, policy: Any, count: int, launch: int, share: float
) -> None:
    """Where sites do not tell stages everything is of one, and the operations tell who waits for whom."""
    step = VirtualStep(
        "HT", 2, costs, policy(), count=count, launch=launch, timed=True, operations=True, host_waits=False,
        kind=OtherSites,
    )  # fmt: skip
    found = graph_of_step(step.trace, computes=False)
    assert found.waits_known and not found.graph.contradictions
    everything = dict.fromkeys(STAGES, share)
    again = VirtualStep(
        "HT", 2, shorter(costs, everything), policy(), count=count, launch=launch, host_waits=False, kind=OtherSites
    )
    (earliest,), (latest,) = found.graph.shortened([{"other": share}], found.end)
    assert earliest - 1e-6 <= again.length <= latest + 1e-6
    if not launch:
        assert earliest == latest


@given(LAYER_COSTS, st.sampled_from(["attention", "dispatch", "experts", "combine", "shared"]), SHARES)
def test_a_trace_of_high_throughput_whose_launches_run_ahead_is_exact(costs: Costs, stage: str, share: float) -> None:
    """Nothing is open there: the streams show their waits, and the host neither waits nor is late."""
    step = VirtualStep("HT", 2, costs, RoundRobin(), timed=True, host_waits=False)
    found = graph_of_step(step.trace, computes=False)
    again = VirtualStep("HT", 2, shorter(costs, {stage: share}), RoundRobin(), host_waits=False)
    (earliest,), (latest,) = found.graph.shortened([{stage: share}], found.end)
    assert earliest == latest == again.length


def test_the_gain_is_not_the_share_of_the_path() -> None:
    """Dispatch sets the length here, but attention takes over as soon as it is a little shorter."""
    costs = Costs(a0=20, a1=40, dispatch=70, mlp=60, combine=60, shared=20)
    step = VirtualStep("LL", 3, costs, RoundRobin())
    found = graph_of_program(step.device.program)
    path = measure_path(found.graph, found.end, run="virtual", step=0, rank=0)
    rows = {row.stage: row for row in path.stages}
    dispatch = rows["dispatch"]
    assert dispatch.on_path > 0 and dispatch.gains[-1].most < dispatch.on_path / 2
    for gain in dispatch.gains:
        again = VirtualStep("LL", 3, shorter(costs, {"dispatch": gain.percent / 100}), RoundRobin())
        assert gain.least == gain.most == pytest.approx(step.length - again.length)


def test_a_policy_that_takes_turns_is_no_path_of_its_own() -> None:
    """One after the other: everything is on the path, and every gain is the stage's share of it."""
    policy: Policy = InTurn()
    costs = Costs()
    step = VirtualStep("LL", 2, costs, policy)
    found = graph_of_program(step.device.program)
    path = measure_path(found.graph, found.end, run="virtual", step=0, rank=0, percent=(100,))
    rows = {row.stage: row for row in path.stages}
    assert rows["attention"].on_path == 2 * 2 * 60 == rows["attention"].gains[0].most
