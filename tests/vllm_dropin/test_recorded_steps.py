"""Counters and traces of vLLM's real runners: what was run is what is written, and writing changes nothing."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="needs vLLM, which is driven here (make test-vllm)")

import numpy as np
import torch
import torch.distributed as dist
from vllm.config import CUDAGraphMode, ParallelConfig
from vllm.forward_context import (
    BatchDescriptor,
    create_forward_context,
    get_forward_context,
    override_forward_context,
)
from vllm.v1.worker import dp_utils as v1_votes
from vllm.v1.worker import gpu_model_runner as v1_runner
from vllm.v1.worker.gpu import cudagraph_utils as v2_graphs
from vllm.v1.worker.gpu import model_runner as v2_runner

from dbo_greenlet.errors import MicrobatchFailed
from dbo_greenlet.trace import OpRecord, Trace, read_trace
from dbo_greenlet.vllm import decisions
from dbo_greenlet.vllm import step as step_module
from dbo_greenlet.vllm.counters import counters
from dbo_greenlet.vllm.recording import ServerTrace
from dbo_greenlet.vllm.step import record_to
from dbo_greenlet.vllm.watched_events import watched_events
from tests.vllm_dropin.drive import Case, Drive, Outcome, drop_in, harness, run_case
from tests.vllm_dropin.scenarios import break_at, captured, mend

pytestmark = pytest.mark.vllm

STRADDLING = {"queries": [5, 7, 4], "contexts": [2, 0, 6]}
SITES = {"LL": ("dispatch", "combine"), "HT": ("before_dispatch", "before_combine", "combine")}


@pytest.fixture
def trace(tmp_path: Path):
    made = ServerTrace(tmp_path, every=1, megabytes=8, rank=0, world=1, settings={})
    yield made
    record_to(None)
    made.close()


def recorded(case: Case, trace: ServerTrace) -> tuple[Outcome, Trace]:
    record_to(trace)
    with drop_in():
        outcome = run_case(case)
    return outcome, close(trace)


def close(trace: ServerTrace) -> Trace:
    path = trace.path
    record_to(None)
    trace.close()
    return read_trace(path)


@pytest.mark.parametrize("backend", ["LL", "HT"])
@pytest.mark.parametrize("runner", ["V1", "V2"])
@pytest.mark.parametrize("mode", ["eager", "capture"])
def test_recording_changes_nothing_and_names_every_yield(
    runner: str, backend: str, mode: str, trace: ServerTrace
) -> None:
    case = Case(runner, backend, mode, layers=3, batch=STRADDLING)
    with drop_in():
        plain = run_case(case)
    with_trace, read = recorded(case, trace)
    assert with_trace.log == plain.log
    for step, other in zip(with_trace.outputs, plain.outputs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(step, other, strict=True))
    steps = [step for step in read.steps.values() if step.record is not None and step.slices]
    # Two eager steps; one captured, for V2 after a warm-up. Replays have no slices.
    assert len(steps) == (1 if (runner, mode) == ("V1", "capture") else 2)
    sites = [f"layer{layer}.{kind}" for layer in range(3) for kind in SITES[backend]]
    for step in steps:
        assert step.record.slices == [[0, 8, 0, 2], [8, 16, 1, 3]]
        assert step.record.yields == [len(sites)] * 2
        assert step.decisions == (0, 1) * (len(sites) + 1)
        assert step.sites[0::2] == step.sites[1::2] == (*sites, "")
    if mode == "capture":
        assert steps[-1].record.execution == "captured"
    assert len({step.record.hash for step in steps}) == 1
    if backend == "LL":
        # The sibling runs every receive; the last one of microbatch 1 as microbatch 0 returns.
        owners = [(receive.ubatch, receive.by) for receive in steps[0].receives_as_run]
        assert owners == [(0, 1), (1, 0)] * len(sites)


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_the_events_of_high_throughput_and_the_streams_that_its_slices_end_on(runner: str, trace: ServerTrace) -> None:
    _, read = recorded(Case(runner, "HT", "eager", layers=1, batch=STRADDLING), trace)
    step = read.step(0)
    streams = ["compute", "compute", "comm", "compute"]  # a combine is launched, and handed over, on comm
    assert [each.stream for each in step.slices[0::2]] == [each.stream for each in step.slices[1::2]] == streams
    assert [each.layer for each in step.slices[0::2]] == [0, 0, 0, None]
    ops = [(op.ubatch, op.slice, op.op, op.stream, op.name) for op in step.ops]
    assert [op[1:] for op in ops if op[0] == 0] == [op[1:] for op in ops if op[0] == 1]
    assert [op[1:] for op in ops if op[0] == 0] == [
        (0, "record", "compute", "previous_event"),
        (0, "record", "compute", ""),
        # the yield before the dispatch
        (1, "wait", "comm", ""),
        (1, "record", "comm", ""),
        (1, "wait", "compute", ""),
        (1, "record", "compute", "previous_event"),
        (1, "record", "compute", ""),
        # the yield before the combine
        (2, "wait", "comm", ""),
        (2, "record", "comm", ""),
        # the yield behind it
        (3, "wait", "compute", ""),
    ]
    for op in step.ops:
        assert op.at is not None and op.of == (None if op.op == "record" else latest_record(step.ops, op))


def latest_record(ops: list[OpRecord], wait: OpRecord) -> int:
    return max(op.number for op in ops[: wait.number] if op.op == "record" and op.event == wait.event)


def test_only_the_steps_that_are_recorded_have_their_events_watched(tmp_path: Path, monkeypatch) -> None:
    watched = []

    def watch(contexts, recorder):
        watched.append(contexts)
        return watched_events(contexts, recorder)

    monkeypatch.setattr(step_module, "watched_events", watch)
    trace = ServerTrace(tmp_path, every=2, megabytes=8, rank=0, world=1, settings={})
    record_to(trace)
    with drop_in(), harness() as log:
        drive = Drive(Case("V2", "HT", layers=1), log)
        for _ in range(3):
            drive.step()
    read = close(trace)
    assert len(watched) == 2 and all("_wait_comm_done" not in vars(each) for each in (*watched[0], *watched[1]))
    assert [len(step.ops) for step in read.steps.values()] == [20, 20]


def test_a_failed_step_is_written_and_counted(trace: ServerTrace) -> None:
    record_to(trace)
    counters.reset()
    with drop_in(), harness() as log:
        drive = Drive(Case(layers=2), log)
        break_at(drive, 1, "layer1")
        with pytest.raises(MicrobatchFailed):
            drive.step()
        mend(drive)
        drive.step()
    failed, right = close(trace).steps.values()
    assert "Microbatch 1 of 2 failed" in failed.record.error
    assert "expert broke in layer1" in failed.record.error
    assert right.record.error is None
    assert counters.snapshot()["executed"] == {"eager": 1, "failed": 1}


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_steps_are_counted_by_how_they_ran(runner: str) -> None:
    decisions.install()
    try:
        counters.reset()
        with drop_in(), harness() as log:
            drive = Drive(Case(runner), log)
            drive.step()
            drive.step()
            assert counters.snapshot()["executed"] == {"eager": 2}
            counters.reset()
            drive = Drive(Case(runner, mode="capture"), log)
            captured(drive)
            warm_up = {"eager": 1} if runner == "V2" else {}
            assert counters.snapshot()["executed"] == {"captured": 1, **warm_up}
            drive.replay()
            drive.replay()
            assert counters.snapshot()["executed"] == {"captured": 1, "replayed": 2, **warm_up}
        counters.reset()
        with drop_in(decide=lambda config: False), harness() as log:
            Drive(Case(runner), log).step()
        assert counters.snapshot()["executed"] == {}, "vLLM's threads are not counted as ours"
    finally:
        decisions.uninstall()
        counters.reset()


# -- steps that are not split --------------------------------------------------------------------------------------


@pytest.fixture
def watched(trace: ServerTrace):
    """The observers and the trace, as `engagement` puts them on."""
    record_to(trace)
    decisions.install()
    decisions.listeners.append(lambda decision: None if decision.split else trace.unsplit_step(decision))
    try:
        yield trace
    finally:
        decisions.uninstall()
        decisions.listeners.clear()
        counters.reset()


def below_the_threshold(tokens: int, requests: int) -> None:
    """Both runners' way to their vote, for a batch that is not split, on two ranks that have the same one."""
    own = ParallelConfig(
        data_parallel_size=2, data_parallel_rank=0, ubatch_size=2, dbo_decode_token_threshold=10**6,
        dbo_prefill_token_threshold=10**6, disable_nccl_for_dp_synchronization=True,
    )  # fmt: skip
    groups = SimpleNamespace(cpu_group=None, device_group=None, device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(v1_votes, "get_dp_group", lambda: groups)
        patch.setattr(dist, "all_reduce", lambda tensor, group=None: tensor[:, 1].copy_(tensor[:, 0]))
        runner = SimpleNamespace(
            _is_uniform_decode=lambda **_: tokens == requests,
            uniform_decode_query_len=1,
            model_config=SimpleNamespace(is_encoder_decoder=False),
            input_batch=SimpleNamespace(lora_id_to_lora_request={}),
            cudagraph_dispatcher=SimpleNamespace(
                dispatch=lambda num_tokens, **_: (CUDAGraphMode.NONE, BatchDescriptor(num_tokens))
            ),
            vllm_config=SimpleNamespace(parallel_config=own, observability_config=SimpleNamespace(cudagraph_metrics=0)),
            parallel_config=own,
        )
        v1_runner.GPUModelRunner._determine_batch_execution_and_padding(
            runner, tokens, requests, np.full(requests, tokens // requests), tokens // requests, False, True
        )


def unsplit_context(drive: Drive, mode: CUDAGraphMode = CUDAGraphMode.NONE):
    return create_forward_context(
        None, drive.config, cudagraph_runtime_mode=mode, batch_descriptor=BatchDescriptor(drive.current.padded)
    )


def test_an_unsplit_step_of_the_older_runner_has_the_times_of_its_model(watched: ServerTrace) -> None:
    ran = []

    def model(**inputs):
        ran.append(time.perf_counter_ns())
        time.sleep(0.002)
        ran.append(time.perf_counter_ns())
        return "out"

    with drop_in(), harness() as log:
        drive = Drive(Case("V1"), log, runnable=model)
        for tokens, requests in ((8, 8), (500, 2)):
            below_the_threshold(tokens, requests)
            assert watched.awaits_model
            with override_forward_context(unsplit_context(drive)):
                assert drive.wrapper(input_ids=None) == "out"
        drive.use(drive.model)
        drive.step()
    origin = watched.recorder.origin_ns
    decode, prefill, split = (step.record for step in close(watched).steps.values())
    for record, (begin, end) in ((decode, ran[:2]), (prefill, ran[2:])):
        assert record.begin <= (begin - origin) / 1000 and (end - origin) / 1000 <= record.end
        assert (record.split, record.execution) == (False, "eager")
    assert (decode.slices, prefill.slices) == ([[0, 8, 0, 8]], [[0, 500, 0, 2]])
    assert [decode.reason, prefill.reason] == ["below-decode-threshold", "below-prefill-threshold"]
    assert prefill.end < split.begin


def test_unsplit_graphs_of_the_older_runner_have_no_times(watched: ServerTrace) -> None:
    class Graphs:
        """In the place of vLLM's wrapper for unsplit graphs: the first call of a batch captures it."""

        def __init__(self) -> None:
            self.concrete_cudagraph_entries = {}

        def __call__(self, **inputs):
            descriptor = get_forward_context().batch_descriptor
            self.concrete_cudagraph_entries[descriptor] = SimpleNamespace(cudagraph="graph")

    with drop_in(), harness() as log:
        drive = Drive(Case("V1", mode="capture"), log)
        drive.wrapper.cudagraph_wrapper = Graphs()
        for _ in range(2):
            below_the_threshold(8, 8)
            with override_forward_context(unsplit_context(drive, CUDAGraphMode.FULL)):
                drive.wrapper(input_ids=None)
    records = [step.record for step in close(watched).steps.values()]
    assert [(record.execution, record.begin, record.end) for record in records] == [
        ("captured", None, None),
        ("replayed", None, None),
    ]


def test_an_unsplit_step_of_the_newer_runner_has_the_times_of_its_forward_context(watched: ServerTrace) -> None:
    with drop_in(), harness() as log:
        drive = Drive(Case("V2"), log)
        watched.unsplit_step(decisions.StepDecision(False, "below-decode-threshold", 8, 8, None, requests=8))
        begin = time.perf_counter_ns()
        with v2_runner.set_forward_context(None, drive.config, num_tokens=8, num_tokens_across_dp=torch.tensor([8, 8])):
            assert get_forward_context().batch_descriptor is None
            inside = time.perf_counter_ns()
            time.sleep(0.002)
            left = time.perf_counter_ns()
        end = time.perf_counter_ns()
        drive.step()
    origin = watched.recorder.origin_ns
    unsplit, split = (step.record for step in close(watched).steps.values())
    times = [(at - origin) / 1000 for at in (begin, inside, left, end)]
    assert times[0] <= unsplit.begin <= times[1] and times[2] <= unsplit.end <= times[3]
    assert (unsplit.execution, unsplit.split, split.split) == ("eager", False, True)


def test_an_unsplit_graph_of_the_newer_runner_has_no_times(watched: ServerTrace) -> None:
    manager = v2_graphs.ModelCudaGraphManager.__new__(v2_graphs.ModelCudaGraphManager)
    description = v2_graphs.BatchExecutionDescriptor(CUDAGraphMode.FULL, 8, 8, 1)
    manager.graphs = {description: SimpleNamespace(replay=lambda: None)}
    manager.is_last_pp_rank, manager.use_aux_hidden_state_outputs = True, False
    manager.hidden_states = torch.arange(16)
    watched.unsplit_step(decisions.StepDecision(False, "below-decode-threshold", 8, 8, None, requests=8))
    manager.run_fullgraph(description)
    (record,) = (step.record for step in close(watched).steps.values())
    assert (record.execution, record.begin, record.slices) == ("replayed", None, [[0, 8, 0, 8]])
    assert counters.snapshot()["executed"] == {}
