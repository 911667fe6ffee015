"""The observer around vLLM's runners: what it tells apart, and that it goes on and comes off without a trace."""

from __future__ import annotations

import inspect
import logging
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import numpy as np
import torch
import torch.distributed as dist
from vllm.config import CUDAGraphMode
from vllm.v1.worker import dp_utils as v1_votes
from vllm.v1.worker import gpu_model_runner as v1_runner
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.gpu import cudagraph_utils as v2_graphs
from vllm.v1.worker.gpu import dp_utils as v2_votes
from vllm.v1.worker.gpu import model_runner as v2_runner
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from dbo_greenlet.batching.vote import RankVote
from dbo_greenlet.vllm import decisions, reasons
from dbo_greenlet.vllm.counters import counters
from dbo_greenlet.vllm.decisions import StepDecision
from tests.vllm_dropin.votes import (
    NUMBERS,
    config,
    observed,  # noqa: F401 (used by every test)
    v1_step,
    v2_step,
)

pytestmark = pytest.mark.vllm


@pytest.fixture
def warnings():
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    decisions.logger.addHandler(handler)
    yield records
    decisions.logger.removeHandler(handler)


# --- the runner around the vote -----------------------------------------------------------------------------------


def runner_with(cls, votes, rank=0):
    """A runner whose dummy run is nothing but the vote."""
    decisions.uninstall()
    patch = pytest.MonkeyPatch()
    patch.setattr(dist, "all_reduce", lambda tensor, group=None: tensor[:, 1].copy_(torch.tensor(votes)))
    own = config(2, NUMBERS, rank)

    def dummy_run(self, tokens, *args, **kwargs):
        return v1_runner.coordinate_batch_across_dp(
            num_tokens_unpadded=tokens, allow_microbatching=True, parallel_config=own, uniform_decode=True
        )

    patch.setattr(cls, "_dummy_run", dummy_run)
    patch.setattr(
        gpu_worker.Worker, "determine_available_memory", lambda self: self.model_runner._dummy_run(100, is_profile=True)
    )
    patch.setattr(gpu_worker.Worker, "compile_or_warm_up_model", lambda self: self.model_runner._dummy_run(1))
    decisions.install()
    return patch, SimpleNamespace(model_runner=cls.__new__(cls), randomize_dummy_inputs=False), dummy_run


@pytest.mark.parametrize("cls", [v1_runner.GPUModelRunner, v2_runner.GPUModelRunner])
def test_dummy_runs_of_the_start_and_of_an_idle_rank_are_told_apart(cls):
    patch, worker, dummy_run = runner_with(cls, [100, 100, 1, 0])
    try:
        assert gpu_worker.Worker.determine_available_memory(worker)[0] is True
        assert decisions.last().reason == "warm-up" and decisions.last().split
        gpu_worker.Worker.compile_or_warm_up_model(worker)
        assert decisions.last().reason == "warm-up" and not decisions.last().split
        gpu_worker.Worker.execute_dummy_batch(worker)
        assert decisions.last().reason == "rank-idle"
        dummy_run(worker.model_runner, 100)  # not through the method that says it is a dummy run: a step that serves
        assert decisions.last().reason == "split-decode"
    finally:
        decisions.uninstall()
        patch.undo()
    assert counters.snapshot()["unsplit"] == {"warm-up": 1, "rank-idle": 1}


def test_a_request_that_reads_a_prefix_of_the_same_step_is_named():
    """Request 1 continues after two blocks of which request 0 writes the second in this step."""

    def allow(first_block):
        table = SimpleNamespace(block_size=4, get_numpy_array=lambda: np.array([[7, 8, 9], [first_block, 5, 6]]))
        runner = SimpleNamespace(
            parallel_config=config(2, NUMBERS, 0),
            reorder_batch_threshold=1,
            input_batch=SimpleNamespace(
                num_computed_tokens_cpu=np.array([0, 4]), block_table=SimpleNamespace(block_tables=[table])
            ),
        )
        return v1_runner.GPUModelRunner._allow_microbatching(runner, 2, np.array([10, 6]))

    own = config(2, NUMBERS, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", lambda tensor, group=None: tensor[:, 1].copy_(torch.tensor([50, 50, 1, 0])))
        said = []
        for first_block in (3, 7, 3):
            v1_runner.coordinate_batch_across_dp(50, allow(first_block), own, 50, False, 0)
            said.append(decisions.last().reason)
        v1_runner.coordinate_batch_across_dp(50, False, own, 50, False, 0)
        said.append(decisions.last().reason)
    assert said == ["split-prefill", "shared-prefix", "split-prefill", "rank-veto"]


def test_replays_of_microbatched_graphs_are_counted_and_others_are_not():
    manager = v2_graphs.ModelCudaGraphManager.__new__(v2_graphs.ModelCudaGraphManager)
    replayed = []
    descriptions = [BatchExecutionDescriptor(CUDAGraphMode.FULL, 8, 8, 1, num_ubatches=n) for n in (1, 2, 2)]
    manager.graphs = {d: SimpleNamespace(replay=lambda d=d: replayed.append(d)) for d in descriptions}
    manager.is_last_pp_rank, manager.use_aux_hidden_state_outputs = True, False
    manager.hidden_states = torch.arange(16)
    for description in descriptions:
        assert torch.equal(manager.run_fullgraph(description), torch.arange(8))
    assert replayed == descriptions
    assert counters.snapshot()["executed"] == {"replayed": 2}
    with pytest.raises(AssertionError):
        manager.run_fullgraph(BatchExecutionDescriptor(CUDAGraphMode.FULL, 9, 9, 1, num_ubatches=2))
    assert counters.snapshot()["executed"] == {"replayed": 2}


@pytest.mark.skipif(
    "dp_sync_state" not in inspect.signature(v2_runner.dispatch_cg_and_sync_dp).parameters,
    reason="drafters of this vLLM vote by themselves",
)
def test_a_drafter_that_goes_by_its_steps_decision_is_not_a_step():
    answers = v2_step([RankVote(50, 50), RankVote(50, 50)], NUMBERS)
    before = counters.snapshot()
    own = config(2, NUMBERS, 0)
    state = answers[0][0][1]
    v2_runner.dispatch_cg_and_sync_dp(
        None, 1, 50, None, 2, 0, need_eager=True, parallel_config=own, dp_sync_state=state
    )
    assert counters.snapshot() == before


# --- putting it on and taking it off ------------------------------------------------------------------------------


def test_installing_twice_counts_once_and_uninstalling_puts_everything_back():
    decisions.uninstall()
    owners = [
        v1_votes,
        v1_runner,
        v2_votes,
        v2_runner,
        v1_runner.GPUModelRunner,
        v2_runner.GPUModelRunner,
        gpu_worker.Worker,
        v2_graphs.ModelCudaGraphManager,
    ]
    before = [dict(vars(owner)) for owner in owners]
    decisions.install()
    once = [dict(vars(owner)) for owner in owners]
    assert all(a != b for a, b in zip(before, once, strict=True))
    decisions.install()
    assert [dict(vars(owner)) for owner in owners] == once
    v1_step([RankVote(50, 50), RankVote(50, 50)], NUMBERS)
    assert counters.snapshot()["split"] == {"split-prefill": 2}
    decisions.uninstall()
    assert [dict(vars(owner)) for owner in owners] == before
    assert decisions.last() is None


def test_a_function_that_somebody_still_holds_is_silent_after_uninstall_and_never_counts_twice():
    held = v1_votes.coordinate_batch_across_dp
    decisions.uninstall()
    votes = [RankVote(50, 50), RankVote(50, 50)]
    assert [answer[0] for answer, _ in v1_step(votes, NUMBERS, coordinate=held)] == [True, True]
    assert counters.snapshot()["split"] == {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(v1_runner, "coordinate_batch_across_dp", held)
        decisions.install()
        v1_step(votes, NUMBERS)
        assert counters.snapshot()["split"] == {"split-prefill": 2}
        decisions.uninstall()


def test_what_somebody_else_put_around_ours_stays():
    ours = v1_votes._run_ar

    def theirs(*args, **kwargs):
        return ours(*args, **kwargs)

    v1_votes._run_ar = theirs
    try:
        decisions.uninstall()
        assert v1_votes._run_ar is theirs
        v1_step([RankVote(50, 50), RankVote(50, 50)], NUMBERS)
        assert counters.snapshot()["split"] == {}
    finally:
        v1_votes._run_ar = ours.__wrapped__


def test_what_a_version_does_not_have_is_not_observed(monkeypatch):
    """vLLM before 0.30: a vote of the newer runner that knows no microbatches, and no check for shared prefixes."""
    decisions.uninstall()

    def old_dispatch(cudagraph_manager, num_reqs, num_tokens, uniform_token_count, dp_size, dp_rank):
        return "old", None

    monkeypatch.setattr(v2_votes, "dispatch_cg_and_sync_dp", old_dispatch)
    monkeypatch.setattr(v2_runner, "dispatch_cg_and_sync_dp", old_dispatch)
    monkeypatch.delattr(v1_runner.GPUModelRunner, "_allow_microbatching")
    monkeypatch.delattr(v2_graphs.ModelCudaGraphManager, "run_fullgraph")
    decisions.install()
    assert v2_runner.dispatch_cg_and_sync_dp is old_dispatch and v2_votes.dist is dist
    assert "run_fullgraph" not in vars(v2_graphs.ModelCudaGraphManager)
    v1_step([RankVote(50, 50), RankVote(50, 50)], NUMBERS)
    assert counters.snapshot()["split"] == {"split-prefill": 2}
    decisions.uninstall()


def test_an_observer_that_fails_leaves_the_answer_and_goes(monkeypatch, warnings):
    monkeypatch.setattr(reasons, "name_v1", lambda *args: {}[0])
    answers = v1_step([RankVote(50, 50), RankVote(50, 50)], NUMBERS)
    assert [answer[0] for answer, _ in answers] == [True, True]
    assert len(warnings) == 1 and "observing the vote failed: KeyError(0)" in warnings[0]
    assert not hasattr(v1_runner.coordinate_batch_across_dp, "__wrapped__")
    assert counters.snapshot()["split"] == {}


def test_votes_of_a_layout_that_nobody_knows_are_not_guessed_at(monkeypatch):
    decisions.uninstall()
    run_ar = v1_votes._run_ar
    post = v1_votes._post_process_ubatch
    monkeypatch.setattr(v1_votes, "_post_process_ubatch", lambda tensor, n: post(tensor[[2, 1, 0, 3]], n))
    monkeypatch.setattr(v1_votes, "_run_ar", lambda *a, **k: run_ar(*a, **k)[[2, 1, 0, 3]])
    decisions.install()
    answers = v1_step([RankVote(50, 50), RankVote(30, 30)], NUMBERS)
    assert [(d.reason, d.tokens_of_ranks) for _, d in answers] == [
        ("another-rank", None),
        ("below-prefill-threshold", None),
    ]
    decisions.uninstall()


def test_a_decision_that_contradicts_the_rule_counts_and_is_not_explained(monkeypatch):
    monkeypatch.setattr(v1_votes, "_post_process_ubatch", lambda tensor, n: True)
    answers = v1_step([RankVote(10, 10, 1), RankVote(50, 50)], NUMBERS)
    assert [(answer[0], d.split, d.reason) for answer, d in answers] == [(True, True, "unexplained")] * 2


def test_listeners_hear_each_decision_and_one_that_fails_is_taken_off(warnings):
    heard: list[StepDecision] = []

    def failing(decision):
        raise ValueError("no ears")

    decisions.listeners.extend([failing, heard.append])
    v1_step([RankVote(50, 50), RankVote(50, 50)], NUMBERS)
    assert [decision.split for decision in heard] == [True, True]
    assert decisions.listeners == [heard.append]
    assert len(warnings) == 1 and "no ears" in warnings[0]
