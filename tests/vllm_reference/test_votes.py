"""Both votes, answer by answer against vLLM 0.32's own functions.

Of vLLM only the process group is replaced: `all_reduce` adds up what the simulated ranks contributed.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="needs vLLM, whose functions are the reference here (make test-vllm)")

from vllm.config import ParallelConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker import dp_utils as v1_votes
from vllm.v1.worker.gpu import dp_utils as v2_votes
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from dbo_greenlet.batching import RankVote, Veto, VoteSettings, decide
from dbo_greenlet.errors import ConfigurationError

pytestmark = pytest.mark.vllm


class _Contribution(Exception):
    """Carries what a rank was about to send out of vLLM's function."""


def on_every_rank(count: int, call) -> list:
    """What `call(rank)` returns on each rank, with an all-reduce that sums what the ranks contribute.

    Two passes: the first stops each rank at its all-reduce and keeps its tensor, the second gives all of them the sum.
    """

    def stop(tensor, group=None):
        raise _Contribution(tensor.clone())

    contributions = []
    groups = SimpleNamespace(cpu_group=None, device_group=None, device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(v1_votes, "get_dp_group", lambda: groups)
        patch.setattr(v2_votes, "get_dp_group", lambda: groups)
        patch.setattr(dist, "all_reduce", stop)
        for rank in range(count):
            with pytest.raises(_Contribution) as caught:
                call(rank)
            contributions.append(caught.value.args[0])
        total = torch.stack(contributions).sum(dim=0).to(contributions[0].dtype)
        patch.setattr(dist, "all_reduce", lambda tensor, group=None: tensor.copy_(total))
        return [call(rank) for rank in range(count)]


def parallel_config(settings_: VoteSettings, ranks: int, rank: int) -> ParallelConfig:
    return ParallelConfig(
        data_parallel_size=ranks,
        data_parallel_rank=rank,
        ubatch_size=settings_.num_microbatches,
        dbo_decode_token_threshold=settings_.decode_threshold,
        dbo_prefill_token_threshold=settings_.prefill_threshold,
        disable_nccl_for_dp_synchronization=True,
    )


def votes_like_v1(votes: list[RankVote], configs: list[ParallelConfig]) -> None:
    settings_ = settings_of(configs[0], "v1")
    decision = decide(votes, settings_)
    answers = on_every_rank(
        len(votes),
        lambda rank: v1_votes.coordinate_batch_across_dp(
            num_tokens_unpadded=votes[rank].num_tokens,
            allow_microbatching=votes[rank].wants_split,
            parallel_config=configs[rank],
            num_tokens_padded=votes[rank].num_padded_tokens,
            uniform_decode=votes[rank].uniform_decode,
        ),
    )
    for split, tokens, _ in answers:
        assert split == decision.split, (votes, decision)
        assert tokens.tolist() == [decision.tokens_on(rank) for rank in range(len(votes))], (votes, decision)


def votes_like_v2(votes: list[RankVote], configs: list[ParallelConfig]) -> None:
    settings_ = settings_of(configs[0], "v2")
    decision = decide(votes, settings_)
    answers = on_every_rank(
        len(votes),
        lambda rank: v2_votes.sync_cudagraph_and_dp_padding(
            None,
            BatchExecutionDescriptor(
                cg_mode=CUDAGraphMode.NONE, num_tokens=votes[rank].num_padded_tokens, num_reqs=votes[rank].num_tokens
            ),
            num_tokens=votes[rank].num_padded_tokens,
            num_reqs=votes[rank].num_tokens,
            uniform_token_count=votes[rank].uniform_query_len or None,
            dp_size=len(votes),
            dp_rank=rank,
            parallel_config=configs[rank],
            allow_ubatching=votes[rank].wants_split,
            uniform_decode=votes[rank].uniform_decode,
        ),
    )
    for rank, (description, agreed) in enumerate(answers):
        assert description.num_ubatches == decision.num_microbatches, (votes, decision)
        assert description.num_tokens == decision.tokens_on(rank), (votes, decision)
        if agreed is not None:
            assert agreed.num_tokens_across_dp.tolist() == [decision.tokens_on(other) for other in range(len(votes))]


def settings_of(config: ParallelConfig, rule: str) -> VoteSettings:
    return VoteSettings(
        config.num_ubatches, config.dbo_decode_token_threshold, config.dbo_prefill_token_threshold, rule
    )


@pytest.mark.parametrize(("n", "decode", "prefill"), [(2, 2, 4), (2, 5, 3), (3, 3, 5)])
def test_two_ranks_of_every_small_size_vote_alike(n, decode, prefill):
    configs = [parallel_config(VoteSettings(n, decode, prefill), 2, rank) for rank in range(2)]
    sizes = [(tokens, uniform) for tokens in range(9) for uniform in range(min(tokens, 2) + 1)]
    for (a, ua), (b, ub) in itertools.product(sizes, repeat=2):
        votes = [RankVote(a, a, ua), RankVote(b, b, ub)]
        votes_like_v1(votes, configs)
        votes_like_v2(votes, configs)


ranks_strategy = st.lists(
    st.builds(
        lambda tokens, padding, uniform, veto: RankVote(tokens, tokens + padding, min(uniform, tokens), veto),
        st.integers(0, 60),
        st.integers(0, 10),
        st.integers(0, 2),
        st.sampled_from([Veto.NONE] * 5 + [Veto.SHARED_PREFIX]),
    ),
    min_size=2,
    max_size=4,
)


@settings(deadline=None)
@given(ranks_strategy, st.sampled_from([(2, 20, 30), (3, 3, 40), (4, 30, 4)]))
def test_ranks_of_any_size_vote_alike(votes, numbers):
    configs = [parallel_config(VoteSettings(*numbers), len(votes), rank) for rank in range(len(votes))]
    votes_like_v1(votes, configs)
    # The newer runner is told one token count, with the rank's own padding in it.
    votes_like_v2([RankVote(v.num_tokens, v.num_tokens, v.uniform_query_len, v.veto) for v in votes], configs)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_thresholds_are_refused_alike(n):
    for decode, prefill in itertools.product(range(1, 6), repeat=2):
        try:
            parallel_config(
                SimpleNamespace(num_microbatches=n, decode_threshold=decode, prefill_threshold=prefill), 2, 0
            )
            refused = False
        except ValueError:
            refused = True
        try:
            VoteSettings(n, decode, prefill)
            ours = False
        except ConfigurationError:
            ours = True
        assert ours == refused, (n, decode, prefill)
