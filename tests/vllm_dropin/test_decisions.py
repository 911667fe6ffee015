"""The reasons that the observer gives for vLLM's decisions are true, and the decisions are vLLM's."""

from __future__ import annotations

from time import perf_counter_ns
from typing import ClassVar

import pytest

pytest.importorskip("vllm")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.config import CUDAGraphMode, ParallelConfig
from vllm.v1.worker import dp_utils as v1_votes
from vllm.v1.worker import gpu_model_runner as v1_runner
from vllm.v1.worker.gpu import model_runner as v2_runner

from dbo_greenlet.batching.vote import RankVote, Reason, Veto, VoteSettings, decide
from dbo_greenlet.vllm import decisions, reasons
from dbo_greenlet.vllm.counters import counters
from dbo_greenlet.vllm.decisions import StepDecision
from tests.vllm_dropin.votes import (
    NUMBERS,
    GraphsForEverything,
    config,
    observed,  # noqa: F401 (used by every test)
    on_every_rank,
    v1_step,
    v2_step,
)

pytestmark = pytest.mark.vllm

SPLITS = {Reason.SPLIT_DECODE, Reason.SPLIT_PREFILL, Reason.SPLIT_MIXED}
GRAPH_MODES = [CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL]


def objections(votes, numbers):
    """Each reason that some rank of the older runner had against splitting; else that of the group."""
    found = set()
    n = numbers.num_microbatches
    for vote in votes:
        decode = vote.uniform_decode
        if not vote.wants_split:
            found.add(Reason.RANK_VETO)
        if vote.num_tokens < n:
            found |= {Reason.TOO_FEW_TOKENS, Reason.RANK_IDLE, Reason.ALL_IDLE}
        elif vote.num_tokens < (numbers.decode_threshold if decode else numbers.prefill_threshold):
            found.add(Reason.BELOW_DECODE_THRESHOLD if decode else Reason.BELOW_PREFILL_THRESHOLD)
    return found or {Reason.LAST_MICROBATCH_EMPTY}


def vote_lists(padding):
    return st.lists(
        st.builds(
            lambda tokens, padding, uniform, veto: RankVote(tokens, tokens + padding, min(uniform, tokens), veto),
            st.integers(0, 60),
            padding,
            st.integers(0, 2),
            st.sampled_from([Veto.NONE] * 5 + [Veto.UNSUPPORTED_BATCH]),
        ),
        min_size=2,
        max_size=4,
    )


settings_lists = st.sampled_from([VoteSettings(2, 20, 30), VoteSettings(3, 3, 40), VoteSettings(2, 30, 4)])


@settings(max_examples=100)
@given(vote_lists(st.integers(0, 10)), settings_lists, st.sampled_from(GRAPH_MODES))
def test_the_older_runners_decisions_are_named_truly_on_every_rank(votes, numbers, graph):
    counters.reset()
    decision = decide(votes, numbers)
    for rank, ((split, padded, mode), said) in enumerate(v1_step(votes, numbers, graph=graph)):
        assert split is said.split is decision.split
        assert mode == graph.value
        assert (said.tokens, said.padded) == (votes[rank].num_tokens, padded[rank])
        assert said.tokens_of_ranks == tuple(vote.num_tokens for vote in votes)
        own = objections([votes[rank]], numbers) - {Reason.LAST_MICROBATCH_EMPTY}
        if split:
            assert said.reason in SPLITS
            # What a rank cannot know is whether another rank's batch is a decode, where both thresholds are reached.
            kinds = {vote.uniform_decode for vote in votes}
            if said.reason != Reason.SPLIT_MIXED:
                assert (said.reason == Reason.SPLIT_DECODE) is votes[rank].uniform_decode
            if len(kinds) == 1 and min(vote.num_tokens for vote in votes) >= max(
                numbers.decode_threshold, numbers.prefill_threshold
            ):
                assert said.reason == decision.reason
        elif own:
            assert said.reason in objections(votes, numbers)
        else:
            assert said.reason in objections(votes, numbers) | {reasons.ANOTHER_RANK}
    counted = counters.snapshot()["split" if decision.split else "unsplit"]
    assert sum(counted.values()) == len(votes)


@settings(max_examples=100)
@given(vote_lists(st.just(0)), settings_lists, st.sampled_from([None, GraphsForEverything()]))
def test_the_newer_runners_decisions_are_named_exactly(votes, numbers, graphs):
    numbers = VoteSettings(numbers.num_microbatches, numbers.decode_threshold, numbers.prefill_threshold, "v2")
    counters.reset()
    decision = decide(votes, numbers)
    for rank, ((description, _), said) in enumerate(v2_step(votes, numbers, graphs=graphs)):
        assert said == StepDecision(
            description.num_ubatches > 1,
            decision.reason,
            votes[rank].num_tokens,
            description.num_tokens,
            tuple(vote.num_tokens for vote in votes),
        )
    snapshot = counters.snapshot()
    assert snapshot["split" if decision.split else "unsplit"] == {decision.reason: len(votes)}


@pytest.mark.parametrize("step", [v1_step, v2_step])
def test_the_answers_are_those_of_unobserved_functions(step):
    numbers = VoteSettings(2, 20, 30)
    lists = [
        [RankVote(40, 40, 1), RankVote(25, 25, 1)],
        [RankVote(40, 40), RankVote(41, 41)],
        [RankVote(40, 40), RankVote(25, 25)],
        [RankVote(0, 0), RankVote(0, 0)],
    ]
    watched = [[answer for answer, _ in step(votes, numbers)] for votes in lists]
    decisions.uninstall()
    alone = [[answer for answer, _ in step(votes, numbers)] for votes in lists]
    assert str(watched) == str(alone)


# --- what a rank knows --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("votes", "said"),
    [
        # each rank's own objection first, then what the bit of another can only mean, then "another-rank"
        ([RankVote(10, 10, 1), RankVote(50, 50, 1)], ["below-decode-threshold", "another-rank"]),
        ([RankVote(30, 30), RankVote(50, 50)], ["below-prefill-threshold", "another-rank"]),
        ([RankVote(1, 1, 1), RankVote(50, 50)], ["too-few-tokens", "too-few-tokens"]),
        ([RankVote(0, 0), RankVote(50, 50)], ["rank-idle", "rank-idle"]),
        ([RankVote(50, 50, veto=Veto.SWITCHED_OFF), RankVote(50, 50)], ["rank-veto", "rank-veto"]),
        ([RankVote(30, 30, veto=Veto.SWITCHED_OFF), RankVote(50, 50)], ["rank-veto", "another-rank"]),
        ([RankVote(45, 45), RankVote(90, 96)], ["last-microbatch-empty", "last-microbatch-empty"]),
        ([RankVote(10, 10, 1), RankVote(15, 15, 1)], ["below-decode-threshold", "below-decode-threshold"]),
        ([RankVote(0, 0), RankVote(0, 0)], ["all-idle", "all-idle"]),
        ([RankVote(30, 30, 1), RankVote(50, 50, 1)], ["split-decode", "split-decode"]),
        ([RankVote(25, 25, 1), RankVote(45, 45)], ["split-decode", "split-mixed"]),
        ([RankVote(50, 50), RankVote(50, 50)], ["split-prefill", "split-prefill"]),
    ],
)
def test_what_the_older_runner_says_on_each_rank(votes, said):
    assert [decision.reason for _, decision in v1_step(votes, NUMBERS)] == said


def test_a_whole_list_of_decisions():
    for votes in (
        [RankVote(600, 600), RankVote(700, 704)],
        [RankVote(40, 40, 1), RankVote(40, 40, 1)],
        [RankVote(40, 40, 1), RankVote(40, 40, 1)],
        [RankVote(40, 40, 1), RankVote(8, 8, 1)],
        [RankVote(40, 40, 1), RankVote(1, 1, 1)],
    ):
        v1_step(votes, VoteSettings())
        v2_step(votes, VoteSettings(rule="v2"))
    # Two ranks and two runners, all counted in this process; the older one's first rank cannot know about the fourth.
    assert counters.snapshot() == {
        "executed": {},
        "split": {"split-prefill": 4, "split-decode": 8},
        "unsplit": {"another-rank": 1, "below-decode-threshold": 3, "too-few-tokens": 4},
    }


@pytest.mark.parametrize("take_step", [v1_step, v2_step])
def test_a_decision_says_when_the_ranks_exchanged_their_votes(take_step):
    before = perf_counter_ns()
    answers = take_step([RankVote(50, 50), RankVote(60, 64)], NUMBERS)
    first, second = (decision.voted for _, decision in answers)
    assert before < first[0] < first[1] < second[0] < second[1] < perf_counter_ns()


def test_votes_on_a_device_are_not_read():
    """The exchange over NCCL leaves the votes on the device: reading them would wait for it once more."""

    class OnDevice(torch.Tensor):
        read: ClassVar[list[str]] = []
        is_cpu = False

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            cls.read.append(getattr(function, "__name__", str(function)))
            return super().__torch_function__(function, types, args, kwargs or {})

    def reads():
        OnDevice.read = []
        v1_step([RankVote(50, 50), RankVote(60, 64)], NUMBERS)
        return OnDevice.read

    decisions.uninstall()
    with pytest.MonkeyPatch.context() as patch:
        run_ar = v1_votes._run_ar
        patch.setattr(v1_votes, "_run_ar", lambda *a, **k: run_ar(*a, **k).as_subclass(OnDevice))
        alone = reads()
        assert "item" in alone
        decisions.install()
        assert reads() == alone
        for votes, said in (
            ([RankVote(50, 50), RankVote(60, 64)], ["split-prefill", "split-prefill"]),
            ([RankVote(50, 50, 1), RankVote(60, 64)], ["split-decode", "split-prefill"]),
            ([RankVote(30, 30), RankVote(60, 64)], ["below-prefill-threshold", "another-rank"]),
            ([RankVote(45, 45), RankVote(90, 96)], ["another-rank", "another-rank"]),
        ):
            answers = v1_step(votes, NUMBERS)
            assert [decision.reason for _, decision in answers] == said
            assert [(d.tokens_of_ranks, d.voted) for _, d in answers] == [(None, None)] * 2
        # With a graph the ranks agree on a size although they do not split, and the smaller one sees what that means.
        answers = v1_step([RankVote(45, 45), RankVote(90, 96)], NUMBERS, graph=CUDAGraphMode.FULL)
        assert [(d.reason, d.padded) for _, d in answers] == [("last-microbatch-empty", 96), ("another-rank", 96)]
        decisions.uninstall()


@pytest.mark.parametrize(("tokens", "said"), [(50, "split-prefill"), (30, "below-prefill-threshold")])
def test_a_step_without_exchange_is_named_from_the_ranks_own_vote(tokens, said):
    own = config(2, NUMBERS, 0)
    with v1_votes.skip_dp_coordination():
        v1_runner.coordinate_batch_across_dp(tokens, True, own, tokens, False, 0)
        assert decisions.last() == StepDecision(tokens == 50, said, tokens, tokens, None)
        v2_runner.dispatch_cg_and_sync_dp(
            None, 1, tokens, None, 2, 0, need_eager=True, parallel_config=own, allow_ubatching=True
        )
        assert decisions.last() == StepDecision(tokens == 50, said, tokens, tokens, None)


def test_a_single_rank_never_splits_and_says_so():
    own = config(1, NUMBERS, 0)
    v1_runner.coordinate_batch_across_dp(500, True, own, 500, False, 0)
    v2_runner.dispatch_cg_and_sync_dp(
        None, 1, 500, None, 1, 0, need_eager=True, parallel_config=own, allow_ubatching=True
    )
    assert counters.snapshot()["unsplit"] == {"one-rank": 2}


def test_without_microbatching_nothing_is_counted():
    def older(rank):
        own = ParallelConfig(data_parallel_size=2, data_parallel_rank=rank, disable_nccl_for_dp_synchronization=True)
        return v1_runner.coordinate_batch_across_dp(500, True, own, 500, False, 0)

    def newer(rank):
        return v2_runner.dispatch_cg_and_sync_dp(None, 1, 500, None, 2, rank, need_eager=True)

    for runner in (older, newer):
        assert [decision for _, decision in on_every_rank(2, runner)] == [None, None]
    assert counters.snapshot()["unsplit"] == {}
