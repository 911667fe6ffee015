"""Values of the documented layers: those of the microbatches in turn, and others where a bug is planted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo_greenlet import RoundRobin, Scheduler
from dbo_greenlet import yields as y
from dbo_greenlet.devices.virtual import VirtualDevice
from dbo_greenlet.errors import ConfigurationError, MicrobatchFailed
from dbo_greenlet.policies import InTurn, SeededRandom
from dbo_greenlet.policy import Policy
from dbo_greenlet.stream_program import whole
from dbo_greenlet.testing.layer_programs import Costs, HighThroughput, LowLatency, high_throughput, low_latency
from dbo_greenlet.testing.step_run import Build, StepUnderTest, TestBed, run_in_turn
from tests.testing.layer_runs import BOTH, NoCounts, device_of, ran


@BOTH
@given(count=st.integers(1, 4), layers=st.integers(0, 3), seed=st.integers(0, 10**6), shared=st.booleans())
def test_outputs_are_those_of_the_same_microbatches_in_turn(
    program: Callable[..., Build], count: int, layers: int, seed: int, shared: bool
) -> None:
    build = program(layers, shared_expert=shared)
    run = ran(build, SeededRandom(seed), count=count)
    expected = run_in_turn(build, count=count)
    assert run.outputs == expected
    assert run.checksum == ran(build, RoundRobin(), count=count).checksum
    assert len({each.number for each in expected}) == count
    assert all(each.received == 1 for each in run.program.transfers)


@BOTH
def test_threads_give_the_same_program_and_the_same_outputs(program: Callable[..., Build]) -> None:
    build = program(2)
    one, other = (ran(build, carrier=carrier) for carrier in ("greenlet", "thread"))
    assert (one.checksum, one.schedule.hash) == (other.checksum, other.schedule.hash)
    assert device_of(one).lanes() == device_of(other).lanes()


@BOTH
def test_costs_change_no_value(program: Callable[..., Build]) -> None:
    quick = Costs(*[0.0] * 9)
    assert ran(program(2), outputs=True).checksum == ran(program(2, costs=quick)).checksum


@BOTH
def test_captured_the_schedule_is_the_same_and_the_replay_gives_the_values(program: Callable[..., Build]) -> None:
    kind = {"kind": NoCounts} if program is high_throughput else {}
    build = program(2, **kind)
    bed = TestBed(VirtualDevice(), 2)
    step: StepUnderTest = build(bed)
    contexts = bed.contexts()
    streams = [contexts[0].compute_stream, contexts[0].comm_stream]
    graph = bed.device.capture(lambda: Scheduler().run(step.entries, contexts), streams)
    assert graph.output.schedule.hash == ran(build).schedule.hash
    with pytest.raises(ConfigurationError, match="there are no values without times"):
        graph.output.outputs[0].number  # noqa: B018
    graph.replay()
    assert graph.output.outputs == ran(build).outputs
    assert bed.device.overlap() == device_of(ran(build)).overlap()


def test_high_throughput_that_waits_for_counts_cannot_be_captured() -> None:
    bed = TestBed(VirtualDevice(), 1)
    step: StepUnderTest = high_throughput(1)(bed)
    contexts = bed.contexts()
    with pytest.raises(MicrobatchFailed, match="layer0.before_dispatch") as failed:
        bed.device.capture(
            lambda: Scheduler().run(step.entries, contexts), [contexts[0].compute_stream, contexts[0].comm_stream]
        )
    assert "the host waits for the device while stream 'comm' is being captured" in str(failed.value.__cause__)


def test_without_numerics_there_are_no_outputs() -> None:
    for program in (low_latency, high_throughput):
        run = ran(program(1, numerics=False))
        assert run.outputs == [None, None]
        assert device_of(run).lanes() == device_of(ran(program(1))).lanes()


# -- planted bugs ------------------------------------------------------------------------------------------------------


def wrong(build: Build, policy: Policy | None = None) -> list[int]:
    """The microbatches whose outputs are not those in turn."""
    expected = run_in_turn(build)
    return [i for i, (got, want) in enumerate(zip(ran(build, policy).outputs, expected, strict=True)) if got != want]


def test_a_compute_stream_that_does_not_wait_for_the_dispatch() -> None:
    def forgets(run: HighThroughput) -> None:
        run.back_to_compute = y.dbo_switch_to_compute  # type: ignore[method-assign]

    slow = Costs(dispatch=100)
    assert wrong(high_throughput(1, costs=slow)) == []
    assert wrong(high_throughput(1, costs=slow, mutate=forgets)) == [0, 1]
    # Where it is quick nothing goes wrong: values show what happened at these times, not what could have.
    assert wrong(high_throughput(1, costs=Costs(dispatch=5), mutate=forgets)) == []


def test_a_hook_that_receives_nothing() -> None:
    class Forgets(LowLatency):
        def receive(self, sent: Any, accesses: Any) -> None:
            if sent.owner != 1 or sent.name != "D":
                super().receive(sent, accesses)

    # In turn the dispatch has no owner, so only the step forgets.
    assert wrong(low_latency(1, kind=Forgets)) == [1]


def test_one_buffer_for_the_outputs_of_all_experts() -> None:
    def shares(run: HighThroughput) -> None:
        it = run.plan.outputs[0]
        run.plan.mlp[:] = [whole([rows], [it]) for rows in run.plan.rows]
        run.plan.c[:] = [whole([it], [combined]) for combined in run.plan.combined]

    # MLP_1 writes while C_0 still reads.
    assert wrong(high_throughput(1, mutate=shares)) == [0]


def test_a_workspace_that_is_still_in_use_after_a_yield() -> None:
    class YieldsBetween(LowLatency):
        def attention(self, i: int, layer: int) -> None:
            work, plan, costs = self.device.work, self.plan, self.costs
            work("A0", costs.a0, accesses=plan.a0[i][layer])
            y.dbo_yield(f"layer{layer}.attention")
            work("A1", costs.a1, accesses=plan.a1[i][layer])

    assert wrong(low_latency(1, kind=YieldsBetween)) == [0]
    assert wrong(low_latency(1, kind=YieldsBetween), InTurn()) == []


def test_an_event_behind_the_switch_costs_time_and_no_value() -> None:
    class Behind(NoCounts):
        def over_to_comm(self, site: str) -> None:
            y.dbo_yield(site)
            y.dbo_switch_to_comm_sync()

    build = high_throughput(3, kind=Behind)
    assert wrong(build) == []
    late, right = (device_of(ran(each)).overlap() for each in (build, high_throughput(3, kind=NoCounts)))
    assert late.compute == right.compute and late.hidden < right.hidden
