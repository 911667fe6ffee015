"""The test kit on vLLM's own runners and DeepEP classes with the drop-in: hazards, schedules, goldens, determinism."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

pytest.importorskip("vllm", reason="needs vLLM, which is under test here (make test-vllm)")

from vllm.model_executor.layers.fused_moe import modular_kernel
from vllm.v1.worker.ubatching import UBatchContext, dbo_current_ubatch_id

from dbo_greenlet.policies import InTurn, PhaseOffset, SeededRandom
from dbo_greenlet.policy import Policy, Scripted
from dbo_greenlet.schedule import Schedule
from dbo_greenlet.stream_program import Operation
from dbo_greenlet.testing import Golden, StepRun, find_hazards
from dbo_greenlet.testing.determinism import compare_runs
from dbo_greenlet.testing.interleavings import count_interleavings, interleavings
from dbo_greenlet.testing.plugin_runs import DboGolden
from dbo_greenlet.testing.verdicts import DEFAULT, first_finding, laws_kept
from dbo_greenlet.trace import read_trace
from dbo_greenlet.trace.notation import order
from dbo_greenlet.vllm.recording import ServerTrace
from dbo_greenlet.vllm.step import record_to
from tests.vllm_dropin.drive import Case, Drive, drop_in, harness, run_case
from tests.vllm_dropin.fake_deep_ep import import_deep_ep_classes
from tests.vllm_dropin.stand_in_program import DropInSteps

pytestmark = pytest.mark.vllm

GOLDENS = Path(__file__).parent / "goldens"
GOLDEN = {"LL": "low_latency", "HT": "high_throughput"}
# A request that is cut by the split: its second half reads keys that the first microbatch writes.
STRADDLING = {"queries": [2, 3, 1], "contexts": [2, 0, 6]}
VERDICTS = (*DEFAULT, laws_kept)
EVERY_WAY = [
    Case(runner, backend, mode, layers=2, batch=STRADDLING)
    for runner in ("V1", "V2")
    for backend in ("LL", "HT")
    for mode in ("eager", "capture")
]


@contextmanager
def steps_of(case: Case) -> Iterator[DropInSteps]:
    with drop_in(), harness() as log:
        yield DropInSteps(Drive(case, log))


def short(backend: str, runner: str = "V1") -> Case:
    return Case(runner, backend, batch=STRADDLING)


@pytest.mark.parametrize("case", EVERY_WAY, ids=lambda case: f"{case.runner}-{case.backend}-{case.mode}")
def test_every_way_of_running_is_clean_and_runs_as_committed(case: Case, dbo_golden: DboGolden) -> None:
    with steps_of(case) as steps:
        reference = steps.reference()
        run = steps.run()
    assert first_finding(run, reference, VERDICTS) is None
    dbo_golden(run, GOLDEN[case.backend])


def test_the_committed_schedule_is_the_one_that_vllm_documents() -> None:
    """In its own notation, with the ids exchanged: vLLM's text begins with microbatch 1."""
    schedule, _ = Golden(GOLDENS / "low_latency.txt").read()
    words = [(item.piece, item.microbatch, item.action) for item in order(schedule.decisions, schedule.sites)]
    documented = (
        "D_0 send, A0_1, A1_1, D_0 recv, D_1 send, MLP_0, D_1 recv, C_0 send, S_0, MLP_1, C_0 recv, C_1 send, S_1, "
        "A0_0, A1_0, C_1 recv"
    )
    wanted = []
    for item in documented.split(", "):
        name, _, action = item.partition(" ")
        piece, _, microbatch = name.partition("_")
        wanted.append((piece, int(microbatch), action))
    assert any(words[at : at + len(wanted)] == wanted for at in range(len(words)))


# -- what the program has ----------------------------------------------------------------------------------------------


def test_the_program_has_each_microbatchs_work_and_the_receives_that_siblings_run() -> None:
    with steps_of(short("LL")) as steps:
        program = steps.run().program
    assert {each.microbatch for each in program.operations if each.kind == "work"} == {None, 0, 1}
    assert [transfer.name for transfer in program.transfers] == [
        f"low_latency_{part}" for part in ("dispatch", "dispatch", "combine", "combine")
    ]
    receives = [each for each in program.operations if each.kind == "receive"]
    assert [(each.owner, each.microbatch, each.slice) for each in receives] == [
        (0, 1, 0), (1, 0, 1), (0, 1, 1), (1, 0, 2)
    ]  # fmt: skip
    assert program.primary == "compute" and {each.stream for each in program.operations} == {"compute"}


def test_a_capture_holds_the_program_of_the_eager_step() -> None:
    def issued(case: Case) -> list[tuple[str, ...]]:
        with steps_of(case) as steps:
            run = steps.run()
        assert run.program is not None
        return [
            (each.kind, each.stream, each.name, each.microbatch, each.slice)
            for each in run.program.operations
            if each.microbatch is not None
        ]

    eager = issued(short("HT"))
    assert eager == issued(Case("V1", "HT", "capture", batch=STRADDLING))
    assert {stream for _, stream, *_ in eager} == {"compute", "comm"}


@pytest.mark.parametrize(("runner", "backend"), [("V1", "LL"), ("V2", "HT")])
def test_two_runs_are_the_same_in_everything(runner: str, backend: str) -> None:
    with steps_of(short(backend, runner)) as steps:
        first, second = steps.run(), steps.run()
    assert first.succeeded and first.program.operations and first.runnable
    assert compare_runs(first, second) is None


def test_a_step_that_depends_on_the_one_before_is_told() -> None:
    with steps_of(short("LL")) as steps:
        first = steps.run()
        for layer in steps.drive.model.layers:
            layer.gate += 1  # as a counter that some step updates
        steps.drive.model.embedding *= 2
        difference = compare_runs(first, steps.run())
    assert difference is not None and "two runs of the same step differ" in difference
    assert "parameters or buffers that a run changes" in difference


# -- other schedules ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("runner", "backend", "slices", "number"), [("V1", "LL", 3, 5), ("V2", "HT", 4, 14)])
def test_one_layer_is_right_in_every_schedule(runner: str, backend: str, slices: int, number: int) -> None:
    """vLLM's threads know one order. All others that laws 4 and 6 allow give the same bits, without a hazard."""
    assert count_interleavings([slices, slices]) == number
    seen = set()
    with steps_of(short(backend, runner)) as steps:
        reference = steps.reference()
        for decisions in interleavings([slices, slices]):
            run = steps.run(Scripted(decisions))
            assert first_finding(run, reference, VERDICTS) is None, decisions
            seen.add(run.schedule.decisions)
    assert len(seen) == number


@pytest.mark.parametrize("policy", [PhaseOffset(2), InTurn(), SeededRandom(1)], ids=repr)
def test_two_layers_are_right_under_other_policies(policy: Policy) -> None:
    with steps_of(Case("V2", "HT", "capture", 2, batch=STRADDLING)) as steps:
        reference = steps.reference()
        run = steps.run(policy)
    assert first_finding(run, reference, VERDICTS) is None
    assert run.schedule.decisions != (0, 1) * 7


# -- the recording layer -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", EVERY_WAY, ids=lambda case: f"{case.runner}-{case.backend}-{case.mode}")
def test_a_recorded_step_has_the_committed_schedule(case: Case, tmp_path: Path) -> None:
    trace = ServerTrace(tmp_path, every=1, megabytes=8, rank=0, world=1, settings={})
    record_to(trace)
    try:
        with drop_in():
            run_case(case)
    finally:
        record_to(None)
        path = trace.path
        trace.close()
    golden = Golden(GOLDENS / f"{GOLDEN[case.backend]}.txt")
    steps = [step for step in read_trace(path).steps.values() if step.slices]
    assert steps
    for step in steps:
        golden.compare(Schedule(2, step.decisions, step.sites))
        assert step.record.hash == golden.read()[0].hash
        assert Schedule.decode(step.record.schedule).decisions == step.decisions


# -- bugs --------------------------------------------------------------------------------------------------------------


def kinds(run: StepRun) -> Counter[str]:
    return Counter(hazard.kind for hazard in find_hazards(run.program))


def test_an_event_captured_after_the_yield_is_found_as_vllm_once_had_it() -> None:
    """DeepEP's send waited for an event that was captured after the switch, and so for the sibling's work as well."""
    high_throughput, _ = import_deep_ep_classes()
    names = high_throughput._do_dispatch.__globals__  # its module is imported beside the stand-in and nowhere else
    yield_first, event = names["dbo_yield_and_switch_from_compute_to_comm"], names["dbo_get_previous_event"]

    def event_after_the_yield(capture: Callable[[], object]) -> object:
        yield_first()
        return event(capture)

    wrong = {
        "dbo_get_previous_event": event_after_the_yield,
        "dbo_yield_and_switch_from_compute_to_comm": lambda: None,
    }
    with steps_of(short("HT")) as steps, patch.dict(names, wrong):
        reference = steps.reference()
        run = steps.run()
    # No output is wrong and no law is broken: what is lost is the overlap.
    assert run.checksum == reference.checksum
    # The dispatch and the combine of each microbatch.
    hazards = find_hazards(run.program)
    assert {hazard.kind for hazard in hazards} == {"event-after-switch"}
    assert len(hazards) == 4
    for hazard in hazards:
        record = hazard.second
        assert isinstance(record, Operation) and record.kind == "record" and record.stream == "compute"
        assert hazard.first.stream == "compute" and hazard.first.microbatch == 1 - record.microbatch
    assert "dbo_get_previous_event is to be called before the yield" in hazards[0].missing


def test_a_dropped_recv_hook_is_found() -> None:
    with (
        steps_of(short("LL")) as steps,
        patch.object(modular_kernel, "dbo_register_recv_hook", lambda hook: None),
    ):
        reference = steps.reference()
        run = steps.run()
    assert kinds(run) == {"hook-never": 4}
    assert first_finding(run, reference, VERDICTS) is not None
    assert run.outputs[0].isnan().any()


def test_a_receive_that_comes_after_its_use_is_found() -> None:
    """Each microbatch keeps the hook of its dispatch to itself, and calls it when the experts have run."""
    kept: dict[int, Callable[[], None]] = {}
    register, experts = modular_kernel.dbo_register_recv_hook, modular_kernel.FusedMoEKernelModularImpl._fused_experts

    def keep_the_first(hook: Callable[[], None]) -> None:
        if dbo_current_ubatch_id() in kept:
            register(hook)
        else:
            kept[dbo_current_ubatch_id()] = hook

    def experts_then_hook(*arguments: object, **named: object) -> object:
        result = experts(*arguments, **named)
        kept[dbo_current_ubatch_id()]()
        return result

    with (
        steps_of(short("LL")) as steps,
        patch.object(modular_kernel, "dbo_register_recv_hook", keep_the_first),
        patch.object(modular_kernel.FusedMoEKernelModularImpl, "_fused_experts", experts_then_hook),
    ):
        run = steps.run()
    hazards = find_hazards(run.program)
    assert [(each.kind, each.first.name, each.first.owner, each.second.owner) for each in hazards] == [
        ("receive-before-use", "low_latency_dispatch", owner, owner) for owner in (0, 1)
    ]


def test_a_switch_that_does_not_wait_is_found() -> None:
    """Back on the compute stream without waiting for what the comm stream brings."""
    with steps_of(short("HT")) as steps, patch.object(UBatchContext, "_wait_comm_done", lambda self: None):
        reference = steps.reference()
        run = steps.run()
    # On a CPU the outputs cannot tell.
    assert run.checksum == reference.checksum
    races = [hazard for hazard in find_hazards(run.program) if hazard.kind == "race"]
    assert {(hazard.first.stream, hazard.second.stream) for hazard in races} >= {("comm", "compute")}
    assert all("compute waiting" in hazard.missing for hazard in races if hazard.first.stream == "comm")


def test_vllms_warm_up_before_a_capture_runs_beside_what_it_reads_and_what_reads_it() -> None:
    """Not planted: V2 warms up its microbatches on a stream of their own, and nothing orders it with the caller's, on
    which the metadata is made and the outputs are merged. What comes of the warm-up is thrown away; the captured step
    is in order (above). Were it mended, this test would say so."""
    with steps_of(Case("V2", "LL", "capture", batch=STRADDLING)) as steps:
        program = steps.capture_with_all_around_it()
    races = [hazard for hazard in find_hazards(program) if hazard.kind == "race"]
    assert [(each.first.microbatch, each.second.microbatch) for each in races] == [(None, 0), (None, 1), (1, None)]
    assert {(each.first.stream, each.second.stream) for each in races} == {
        ("compute", "stream1"),
        ("stream1", "compute"),
    }
    (synchronized,) = [each for each in program.operations if each.name == "synchronize"]
    assert all(each.second.number < synchronized.number for each in races)
