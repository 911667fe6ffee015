"""The documented layers on the virtual device: their timetable, their overlap by hand, and values that show bugs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo_greenlet import RoundRobin, Scheduler
from dbo_greenlet import yields as y
from dbo_greenlet.devices.virtual import VirtualDevice
from dbo_greenlet.devices.virtual_times import Lane, Overlap
from dbo_greenlet.errors import ConfigurationError, MicrobatchFailed
from dbo_greenlet.policies import InTurn, PhaseOffset, SeededRandom
from dbo_greenlet.policy import Policy
from dbo_greenlet.stream_program import Operation, StreamProgram, whole
from dbo_greenlet.testing.faults import Faults
from dbo_greenlet.testing.layer_programs import Costs, HighThroughput, LowLatency, high_throughput, low_latency
from dbo_greenlet.testing.step_run import Build, StepRun, StepUnderTest, TestBed, run_in_turn, run_step
from dbo_greenlet.trace.notation import order
from tests.testing.device_model import Command, Model

BOTH = pytest.mark.parametrize("program", [low_latency, high_throughput])


def ran(build: Build, policy: Policy | None = None, **settings: Any) -> StepRun:
    run = run_step(build, policy, **settings)
    assert run.error is None
    return run


def device_of(run: StepRun) -> VirtualDevice:
    """A device that has run this: for its arithmetic."""
    device = VirtualDevice()
    device.program = run.program  # type: ignore[assignment]
    return device


# -- the documented order ----------------------------------------------------------------------------------------------

# As the design has it, steady state under round robin.
ROUND_ROBIN = (
    "D_0 send, A0_1, A1_1, D_0 recv, D_1 send, MLP_0, D_1 recv, C_0 send, S_0, MLP_1, C_0 recv, C_1 send, S_1, "
    "A0_0, A1_0, C_1 recv"
)
LITERALLY = (
    "D_1 send, A0_0, A1_0, D_1 recv, D_0 send, MLP_1, D_0 recv, C_1 send, S_1, MLP_0, C_1 recv, C_0 send, S_0, "
    "A0_1, A1_1, C_0 recv"
)


def enqueued(program: StreamProgram) -> list[str]:
    """The pieces in the order in which the primary stream holds them, in the words of the notation."""
    words = []
    for each in program.operations:
        if each.stream != program.primary or each.microbatch is None:
            continue
        if each.kind == "work":
            words.append(f"{each.name}_{each.microbatch}")
        elif each.transfer is not None:
            words.append(f"{each.name}_{each.transfer.owner} {'send' if each.kind == 'send' else 'recv'}")
        elif each.kind in ("record", "wait"):
            # Dispatches and combines alternate; each has one record here and one wait.
            done = sum(w.endswith(f"_{each.microbatch} {DONE[each.kind]}") for w in words)
            words.append(f"{'DC'[done % 2]}_{each.microbatch} {DONE[each.kind]}")
    return words


DONE = {"record": "send", "wait": "recv"}


@pytest.mark.parametrize(("policy", "expected"), [(RoundRobin(), ROUND_ROBIN), (PhaseOffset(2), LITERALLY)])
def test_the_order_that_vllm_documents(policy: Policy, expected: str) -> None:
    run = ran(low_latency(4), policy)
    text = ", ".join(enqueued(run.program))
    assert text.count(expected) == 3  # the first and the last layer are not steady
    assert ", ".join([expected] * 3) in text


COMP = "|-A0_0-A1_0-||-MLP_1-||-S_1-MLP_0-||-S_0-A0_1-A1_1-|"
COMM = "|----D_1----||--D_0--||----C_1----||-----C_0------|"


def test_what_runs_while_each_transfer_is_in_flight_is_the_documented_timetable() -> None:
    cells = zip(COMM.strip("|").split("||"), COMP.strip("|").split("||"), strict=True)
    expected = [(comm.strip("-"), comp.strip("-").split("-")) for comm, comp in cells]
    device = device_of(ran(low_latency(4), PhaseOffset(2)))
    compute = [lane for lane in device.lanes() if lane.stream == "compute"]
    found = []
    for window in device.windows():
        beside = [lane for lane in compute if window.begin <= lane.begin and lane.end <= window.received]
        assert sum(lane.end - lane.begin for lane in beside) <= window.received - window.begin
        found.append(
            (f"{window.transfer.name}_{window.transfer.owner}", [f"{lane.name}_{lane.microbatch}" for lane in beside])
        )
    # Before: D_0 and C_0 of microbatch 0's first layer. Behind: the last layer of microbatch 1.
    assert found[2:-2] == expected * 3
    assert found[:2] == [("D_0", []), expected[3]]
    assert found[-2:] == [("D_1", ["out_0"]), ("C_1", ["S_1"])]


@BOTH
@given(layers=st.integers(1, 3), count=st.integers(1, 4), seed=st.integers(0, 10**6), shared=st.booleans())
def test_the_order_is_that_of_the_notation(
    program: Callable[..., Build], layers: int, count: int, seed: int, shared: bool
) -> None:
    run = ran(program(layers, shared_expert=shared), SeededRandom(seed), count=count)
    items = order(run.schedule.decisions, run.schedule.sites, shared_expert=shared)
    assert enqueued(run.program) == [str(item).rstrip("*") for item in items]


def accessed(run: StepRun, microbatch: int, after: str) -> list[str]:
    """What the pieces of the slices behind that site touch."""
    return [
        f"{each.name} {each.kind}: {', '.join(map(str, each.accesses))}"
        for each in run.program.operations
        if each.microbatch == microbatch and each.site == after and each.accesses
    ]


def test_what_the_pieces_touch() -> None:
    run = ran(low_latency(2))
    assert accessed(run, 1, "layer0.combine") == [
        "A0 work: reads hidden of microbatch 1, reads combined of microbatch 1, reads shared of microbatch 1, "
        "writes hidden of microbatch 1, writes workspace, writes KV cache of layer 1[1:2]",
        "A1 work: reads hidden of microbatch 1, reads workspace, reads KV cache of layer 1[0:2], "
        "writes hidden of microbatch 1",
        "D receive: writes rows of microbatch 0",
        "D send: reads hidden of microbatch 1",
    ]
    assert accessed(run, 1, "layer1.dispatch") == [
        "MLP work: reads rows of microbatch 1, writes expert outputs of microbatch 1",
        "C receive: writes combined of microbatch 0",
        "C send: reads expert outputs of microbatch 1",
        "S work: reads hidden of microbatch 1, writes shared of microbatch 1",
    ]
    assert accessed(run, 0, "layer1.combine") == [
        "out work: reads hidden of microbatch 0, reads combined of microbatch 0, reads shared of microbatch 0, "
        "writes result of microbatch 0",
        "C receive: writes combined of microbatch 1",
    ]
    run = ran(high_throughput(1))
    assert accessed(run, 0, "")[0] == (
        "A0 work: reads hidden of microbatch 0, writes hidden of microbatch 0, writes workspace, "
        "writes KV cache of layer 0[0:1]"
    )
    assert accessed(run, 0, "layer0.before_dispatch") == [
        "counts work: reads hidden of microbatch 0",
        "D work: reads hidden of microbatch 0, writes rows of microbatch 0",
        "MLP work: reads rows of microbatch 0, writes expert outputs of microbatch 0",
    ]
    assert accessed(run, 0, "layer0.before_combine") == [
        "C work: reads expert outputs of microbatch 0, writes combined of microbatch 0",
        "S work: reads hidden of microbatch 0, writes shared of microbatch 0",
    ]


def test_which_stream_is_current_at_the_yields() -> None:
    class Streams:
        def after_slice(self, microbatch: Any) -> None:
            seen.append((microbatch.site, devices[0].current_stream().name))

    seen: list[tuple[str, str]] = []
    devices = [VirtualDevice()]
    ran(high_throughput(1), count=1, make_device=lambda: devices[0], instruments=[Streams()])
    assert seen == [
        ("layer0.before_dispatch", "compute"),
        ("layer0.before_combine", "compute"),
        ("layer0.combine", "comm"),
        ("", "compute"),
    ]


# -- overlap, by hand --------------------------------------------------------------------------------------------------

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


# -- values ------------------------------------------------------------------------------------------------------------


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


class NoCounts(HighThroughput):
    """A host that waits cannot be captured."""

    host_blocks = False


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


# -- faults ------------------------------------------------------------------------------------------------------------


@BOTH
def test_an_empty_microbatch_computes_for_the_others_only(program: Callable[..., Build]) -> None:
    run = ran(program(1), faults=Faults.parse("empty@1"))
    lengths = {each.name: each.end - each.begin for each in run.program.operations if each.microbatch == 1}
    assert [lengths[name] for name in ("A0", "A1", "MLP", "S", "out")] == [0, 0, 60, 0, 0]
    assert run.outputs == run_in_turn(program(1))


@BOTH
def test_attention_and_experts_allocate(program: Callable[..., Build]) -> None:
    for number, name in enumerate(["A0", "MLP", "A0", "MLP"]):
        run = run_step(program(2), faults=Faults.parse(f"oom@0.{number}"))
        assert isinstance(run.error, MicrobatchFailed) and isinstance(run.error.__cause__, MemoryError)
        assert sum(each.name == name and each.microbatch == 0 for each in run.program.operations) == number // 2
    assert run_step(program(2), faults=Faults.parse("oom@0.4")).error is None


# -- the interface -----------------------------------------------------------------------------------------------------


def test_a_run_with_another_number_of_microbatches_has_buffers_of_its_own() -> None:
    build = low_latency(1)
    two, three = ran(build, count=2), ran(build, count=3)
    again = ran(build, count=2)
    assert len(three.outputs) == 3
    buffers = [{a.buffer for o in run.program.operations for a in o.accesses} for run in (two, three, again)]
    assert buffers[0] == buffers[2] and not buffers[0] & buffers[1]
    names = sorted(map(str, buffers[0]))
    assert names == [
        "KV cache of layer 0",
        *(f"combined of microbatch {i}" for i in (0, 1)),
        *(f"expert outputs of microbatch {i}" for i in (0, 1)),
        *(f"hidden of microbatch {i}" for i in (0, 1)),
        *(f"result of microbatch {i}" for i in (0, 1)),
        *(f"rows of microbatch {i}" for i in (0, 1)),
        *(f"shared of microbatch {i}" for i in (0, 1)),
        "workspace",
    ]


@BOTH
def test_a_model_without_a_shared_expert_runs_none(program: Callable[..., Build]) -> None:
    run = ran(program(2, shared_expert=False))
    assert {each.name for each in run.program.operations if each.kind == "work"} - {"counts", "D", "C"} == {
        "A0",
        "A1",
        "MLP",
        "out",
    }


@BOTH
def test_a_negative_number_of_layers(program: Callable[..., Build]) -> None:
    with pytest.raises(ConfigurationError, match="layers=-1"):
        program(-1)
    assert repr(program(3)) in ("LowLatency(3 layers)", "HighThroughput(3 layers)")
