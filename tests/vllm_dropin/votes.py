"""Votes of several ranks on vLLM's own functions, in one process, with the observer on."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from vllm.config import CUDAGraphMode, ParallelConfig
from vllm.v1.worker import dp_utils as v1_votes
from vllm.v1.worker import gpu_model_runner as v1_runner
from vllm.v1.worker.gpu import dp_utils as v2_votes
from vllm.v1.worker.gpu import model_runner as v2_runner
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from dbo_greenlet.batching.vote import VoteSettings
from dbo_greenlet.vllm import decisions
from dbo_greenlet.vllm.counters import counters

GROUPS = SimpleNamespace(cpu_group=None, device_group=None, device="cpu")
NUMBERS = VoteSettings(2, 20, 40)


@pytest.fixture(autouse=True)
def observed(monkeypatch):
    monkeypatch.setattr(v1_votes, "get_dp_group", lambda: GROUPS)
    monkeypatch.setattr(v2_votes, "get_dp_group", lambda: GROUPS)
    counters.reset()
    decisions.install()
    yield
    decisions.uninstall()
    decisions.listeners.clear()
    counters.reset()


class _Sent(Exception):
    """Carries what a rank was about to send out of vLLM's function."""


def on_every_rank(count, call):
    """What `call(rank)` returns on each rank, and what was decided there; the all-reduce sums what the ranks send."""

    def stop(tensor, group=None):
        raise _Sent(tensor.clone())

    sent = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", stop)
        for rank in range(count):
            before = decisions.last()
            with pytest.raises(_Sent) as caught:
                call(rank)
            assert decisions.last() is before  # a vote that failed decided nothing
            sent.append(caught.value.args[0])
        total = torch.stack(sent).sum(dim=0).to(sent[0].dtype)
        patch.setattr(dist, "all_reduce", lambda tensor, group=None: tensor.copy_(total))
        return [(call(rank), decisions.last()) for rank in range(count)]


@cache
def config(ranks, numbers, rank):
    return ParallelConfig(
        data_parallel_size=ranks,
        data_parallel_rank=rank,
        ubatch_size=numbers.num_microbatches,
        dbo_decode_token_threshold=numbers.decode_threshold,
        dbo_prefill_token_threshold=numbers.prefill_threshold,
        disable_nccl_for_dp_synchronization=True,
    )


def v1_step(votes, numbers, *, graph=CUDAGraphMode.NONE, coordinate=None):
    configs = [config(len(votes), numbers, rank) for rank in range(len(votes))]
    coordinate = coordinate or v1_runner.coordinate_batch_across_dp

    def call(rank):
        return coordinate(
            num_tokens_unpadded=votes[rank].num_tokens,
            allow_microbatching=votes[rank].wants_split,
            parallel_config=configs[rank],
            num_tokens_padded=votes[rank].num_padded_tokens,
            uniform_decode=votes[rank].uniform_decode,
            cudagraph_mode=graph.value,
        )

    return on_every_rank(len(votes), call)


class GraphsForEverything:
    """A CudaGraphManager that has a FULL graph for each shape, padded to a multiple of 8."""

    def dispatch(self, num_reqs, num_tokens, uniform_token_count, num_active_loras=0, max_query_len=None, **more):
        padded = -(-num_tokens // 8) * 8
        return BatchExecutionDescriptor(CUDAGraphMode.FULL, padded, num_reqs, uniform_token_count, **more)


def v2_step(votes, numbers, *, graphs=None):
    configs = [config(len(votes), numbers, rank) for rank in range(len(votes))]

    def call(rank):
        vote = votes[rank]
        return v2_runner.dispatch_cg_and_sync_dp(
            graphs,
            vote.num_tokens,
            vote.num_tokens,
            vote.uniform_query_len or None,
            len(votes),
            rank,
            need_eager=graphs is None,
            parallel_config=configs[rank],
            allow_ubatching=vote.wants_split,
            uniform_decode=vote.uniform_decode,
        )

    return on_every_rank(len(votes), call)
