"""The vote: every small combination of ranks against a slow version of both rules, and what must hold for all."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo_greenlet.batching import (
    BatchError,
    RankVote,
    Reason,
    UBatchBuffers,
    Veto,
    VoteSettings,
    decide,
    idle_step,
    pad_step,
    slice_all,
    split_step,
)
from dbo_greenlet.batching.vote import ROW_SIZE
from dbo_greenlet.errors import ConfigurationError, RanksDisagreeError

SPLIT_REASONS = {Reason.SPLIT_DECODE, Reason.SPLIT_PREFILL, Reason.SPLIT_MIXED}


def slow_reason(votes: list[RankVote], n: int, decode: int, prefill: int, rule: str) -> set[str]:
    """The reasons that apply, rank by rank, without any order of precedence; {"split"} if none does."""
    padded = max(vote.num_padded_tokens for vote in votes)
    one_length = len({vote.uniform_query_len for vote in votes}) == 1
    last_microbatch = range((padded // n) * (n - 1), padded)
    found = set()
    for vote in votes:
        decodes = vote.uniform_query_len > 0 and (rule == "v1" or one_length)
        threshold = decode if decodes else prefill
        if vote.veto is not Veto.NONE:
            found.add("rank-veto")
        if vote.num_tokens == 0:
            found.add("rank-idle")
        if 0 < vote.num_tokens < n:
            found.add("too-few-tokens")
        if vote.num_tokens < threshold:
            found.add("below-decode-threshold" if decodes else "below-prefill-threshold")
        if rule == "v1" and padded >= n and not any(token < vote.num_tokens for token in last_microbatch):
            found.add("last-microbatch-empty")
    if all(vote.num_tokens == 0 for vote in votes):
        found.add("all-idle")
    return found or {"split"}


def check_against_slow_version(votes: list[RankVote], settings_: VoteSettings) -> bool:
    decision = decide(votes, settings_)
    allowed = slow_reason(
        votes, settings_.num_microbatches, settings_.decode_threshold, settings_.prefill_threshold, settings_.rule
    )
    if allowed == {"split"}:
        assert decision.split and decision.reason in SPLIT_REASONS, (votes, settings_, decision)
    else:
        assert not decision.split and str(decision.reason) in allowed, (votes, settings_, decision)
    check_consistency(decision, settings_)
    return decision.split


def check_consistency(decision, settings_) -> None:
    votes = decision.votes
    assert decision.split == (decision.reason in SPLIT_REASONS)
    assert decision.num_microbatches == (settings_.num_microbatches if decision.split else 1)
    assert decision.padded_tokens == max(vote.num_padded_tokens for vote in votes)
    for rank, vote in enumerate(votes):
        assert decision.tokens_on(rank) == (decision.padded_tokens if decision.split else vote.num_padded_tokens)
    assert decision.message.startswith("split into" if decision.split else "not split: ")
    if decision.rank is not None:
        assert f"rank {decision.rank}" in decision.message
        if decision.reason is not Reason.RANK_VETO:
            assert str(votes[decision.rank].num_tokens) in decision.message


@pytest.mark.parametrize("rule", ["v1", "v2"])
@pytest.mark.parametrize(("n", "decode", "prefill"), [(2, 2, 4), (2, 3, 3), (2, 5, 2), (3, 3, 5), (4, 4, 4)])
def test_two_ranks_of_every_small_size(rule, n, decode, prefill):
    settings_ = VoteSettings(n, decode, prefill, rule)
    sizes = [(tokens, uniform) for tokens in range(11) for uniform in range(min(tokens, 2) + 1)]
    outcomes = [
        check_against_slow_version([RankVote(a, a, ua), RankVote(b, b, ub)], settings_)
        for (a, ua), (b, ub) in itertools.product(sizes, repeat=2)
    ]
    assert len(outcomes) == 30 * 30
    assert any(outcomes) and not all(outcomes)


@pytest.mark.parametrize("rule", ["v1", "v2"])
@pytest.mark.parametrize("n", [2, 3])
def test_three_ranks_with_padding_and_vetoes(rule, n):
    settings_ = VoteSettings(n, n, n + 1, rule)
    sizes = [
        RankVote(tokens, tokens + padding, uniform, veto)
        for tokens in (0, 1, 3, 4, 8)
        for padding in (0, 3)
        for uniform in ((0, 1) if tokens else (0,))
        for veto in ((Veto.NONE, Veto.SHARED_PREFIX) if tokens == 8 else (Veto.NONE,))
    ]
    outcomes = [check_against_slow_version(list(votes), settings_) for votes in itertools.product(sizes, repeat=3)]
    assert any(outcomes) and not all(outcomes)


@pytest.mark.parametrize("rule", ["v1", "v2"])
def test_one_rank_of_every_size_round_the_defaults(rule):
    settings_ = VoteSettings(rule=rule)
    for tokens in range(600):
        assert decide([RankVote(tokens, tokens)], settings_).split == (tokens >= 512)
        assert decide([RankVote(tokens, tokens, min(tokens, 1))], settings_).split == (tokens >= 32)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_v1_splits_only_where_every_rank_has_work_in_the_last_microbatch(n):
    """Round the boundary at which the smallest rank's last microbatch becomes empty, rank by rank."""
    for largest in range(4 * n, 6 * n):
        last_start = (largest // n) * (n - 1)
        for smallest in range(n, largest + 1):
            votes = [RankVote(largest, largest), RankVote(smallest, smallest)]
            v1 = decide(votes, VoteSettings(n, n, n, "v1"))
            v2 = decide(votes, VoteSettings(n, n, n, "v2"))
            assert v1.split == (smallest > last_start)
            assert v1.reason is (Reason.SPLIT_PREFILL if smallest > last_start else Reason.LAST_MICROBATCH_EMPTY)
            assert v2.split
            assert v2.padding_only_ranks == ((1,) if smallest <= last_start else ())


vote_strategy = st.builds(
    lambda tokens, padding, uniform, veto: RankVote(tokens, tokens + padding, min(uniform, tokens), veto),
    st.integers(0, 40),
    st.integers(0, 8),
    st.integers(0, 2),
    st.sampled_from([Veto.NONE] * 6 + list(Veto)),
)
settings_strategy = st.integers(1, 4).flatmap(
    lambda n: st.builds(VoteSettings, st.just(n), st.integers(n, 30), st.integers(n, 30), st.sampled_from(["v1", "v2"]))
)


@settings(deadline=None)
@given(st.lists(vote_strategy, min_size=1, max_size=5), settings_strategy)
def test_every_rank_decides_the_same_from_the_rows_it_received(votes, settings_):
    table = torch.stack([vote.to_row() for vote in votes])
    decisions = [decide([RankVote.from_row(row) for row in table], settings_) for _ in votes]
    assert decisions == [decide(votes, settings_)] * len(votes)


@settings(deadline=None)
@given(st.lists(vote_strategy, min_size=1, max_size=5), settings_strategy, st.randoms())
def test_the_order_of_the_ranks_does_not_matter(votes, settings_, random):
    shuffled = random.sample(votes, len(votes))
    one, other = decide(votes, settings_), decide(shuffled, settings_)
    assert (one.split, one.reason, one.padded_tokens) == (other.split, other.reason, other.padded_tokens)
    if one.rank is not None:
        assert votes[one.rank].num_tokens == shuffled[other.rank].num_tokens or one.reason is Reason.RANK_VETO


@pytest.mark.parametrize("rule", ["v1", "v2"])
def test_equally_small_ranks_of_different_kinds_give_one_reason_in_either_order(rule):
    votes = [RankVote(20, 20, 1), RankVote(20, 20), RankVote(900, 900)]
    decisions = [decide(list(order), VoteSettings(rule=rule)) for order in itertools.permutations(votes)]
    assert {decision.reason for decision in decisions} == {Reason.BELOW_PREFILL_THRESHOLD}
    assert {decision.votes[decision.rank] for decision in decisions} == {votes[1]}


@pytest.mark.parametrize("n", [2, 3])
def test_under_v1_one_more_rank_can_only_take_a_split_away(n):
    """Not so under "v2", where a rank of another kind moves all ranks to the prefill threshold, which may be lower."""
    settings_ = VoteSettings(n, n, n + 2, "v1")
    sizes = [RankVote(tokens, tokens, uniform) for tokens in range(10) for uniform in ((0, 1) if tokens else (0,))]
    taken_away = 0
    for first, second in itertools.product(sizes, repeat=2):
        alone, together = decide([first], settings_), decide([first, second], settings_)
        assert alone.split or not together.split, (first, second)
        taken_away += alone.split and not together.split
    assert taken_away > 0


@settings(deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=4), settings_strategy)
def test_what_the_ranks_run_after_the_vote_fits_together(make_step, token_counts, settings_):
    """Split for real: all ranks run the same microbatch sizes, and `padding_only_ranks` is what it says."""
    steps = [make_step([(tokens, 2)]) if tokens else idle_step() for tokens in token_counts]
    decision = decide([RankVote.of_step(step) for step in steps], settings_)
    n = decision.num_microbatches
    sizes, without_work = set(), []
    for rank, step in enumerate(steps):
        step = pad_step(step, decision.tokens_on(rank))
        parts = slice_all(step, split_step(step, n), UBatchBuffers(1, n))
        assert len(parts) == n
        sizes.add(tuple(part.num_padded_tokens for part in parts))
        if parts[-1].num_tokens == 0:
            without_work.append(rank)
    if decision.split:
        assert len(sizes) == 1
        assert decision.padding_only_ranks == tuple(without_work)
        assert not (settings_.rule == "v1" and without_work)


def reason_of(votes: list[RankVote], **settings_: object) -> tuple[str, str]:
    decision = decide(votes, VoteSettings(**settings_))
    return str(decision.reason), decision.message


def test_the_sentences_name_the_numbers_and_the_rank():
    decode, prefill = RankVote(64, 64, 1), RankVote(700, 700)
    cases = [
        (([decode], {"num_microbatches": 1}), ("off", "not split: --ubatch-size is 1")),
        (([RankVote(0, 0)] * 2, {}), ("all-idle", "not split: none of the 2 ranks has a token")),
        (
            ([decode, RankVote(0, 0)], {}),
            ("rank-idle", "not split: rank 1 is idle (0 tokens), and all ranks split or none does"),
        ),
        (
            ([RankVote(0, 0), RankVote(64, 64, 1, Veto.SHARED_PREFIX)], {}),
            (
                "rank-veto",
                "not split: rank 1 objects, one of its requests reads KV that another request of the same step writes",
            ),
        ),
        (([decode, RankVote(1, 64, 1)], {}), ("too-few-tokens", "not split: rank 1 has 1 tokens for 2 microbatches")),
        (
            ([RankVote(31, 31, 1), decode], {}),
            (
                "below-decode-threshold",
                "not split: rank 0 has 31 tokens, the decode threshold (--dbo-decode-token-threshold) is 32",
            ),
        ),
        (
            ([decode, RankVote(511, 511)], {}),
            (
                "below-prefill-threshold",
                "not split: rank 1 has 511 tokens, the prefill threshold (--dbo-prefill-token-threshold) is 512",
            ),
        ),
        (
            ([prefill, decode], {}),
            (
                "last-microbatch-empty",
                "not split: rank 1 has 64 tokens, and padded to the 700 of rank 0 its last microbatch, from token 350 "
                "on, would be empty",
            ),
        ),
        (
            ([decode, RankVote(64, 64, 2)], {"rule": "v2"}),
            (
                "below-prefill-threshold",
                "not split: rank 0 has 64 tokens, the prefill threshold (--dbo-prefill-token-threshold) is 512, which "
                "applies because the ranks' uniform decode lengths differ: 1, 2",
            ),
        ),
        (
            ([decode, RankVote(48, 48, 1)], {}),
            (
                "split-decode",
                "split into 2: every rank reaches the decode threshold 32, the smallest is rank 1 with 48 tokens; "
                "each runs 64",
            ),
        ),
        (
            ([prefill, RankVote(600, 640)], {}),
            (
                "split-prefill",
                "split into 2: every rank reaches the prefill threshold 512, the smallest is rank 1 with 600 tokens; "
                "each runs 700",
            ),
        ),
        (
            ([prefill, RankVote(400, 400, 1)], {}),
            (
                "split-mixed",
                "split into 2: every rank reaches its threshold (decode 32, prefill 512), the smallest is rank 1 with "
                "400 tokens; each runs 700",
            ),
        ),
        (
            ([RankVote(128, 128, 1), RankVote(64, 64, 1), RankVote(32, 32, 1)], {"rule": "v2"}),
            (
                "split-decode",
                "split into 2: every rank reaches the decode threshold 32, the smallest is rank 2 with 32 tokens; each "
                "runs 128; the last microbatch is padding alone on rank 1, 2",
            ),
        ),
    ]
    assert [reason_of(votes, **kw) for (votes, kw), _ in cases] == [expected for _, expected in cases]
    assert {reason for _, (reason, _) in cases} == {str(reason) for reason in Reason}


@pytest.mark.parametrize("veto", [veto for veto in Veto if veto is not Veto.NONE])
def test_every_veto_has_its_own_sentence(veto):
    decision = decide([RankVote(64, 64, 1, veto), RankVote(64, 64, 1)], VoteSettings())
    assert (decision.reason, decision.rank) == (Reason.RANK_VETO, 0)
    assert veto.sentence in decision.message
    assert len({other.sentence for other in Veto}) == len(Veto)


def test_the_vote_of_a_step(make_step):
    decode = make_step([(1, 5)] * 6, padding=2)
    assert RankVote.of_step(decode) == RankVote(6, 8, 1)
    assert RankVote.of_step(decode, decode_query_len=2) == RankVote(6, 8, 0)
    assert RankVote.of_step(make_step([(2, 5)] * 3), decode_query_len=2) == RankVote(6, 6, 2)
    assert RankVote.of_step(make_step([(1, 5), (4, 0)]), veto=Veto.SWITCHED_OFF) == RankVote(5, 5, 0, Veto.SWITCHED_OFF)
    assert RankVote.of_step(idle_step()) == RankVote(0, 0)


# --- rows and settings --------------------------------------------------------------------------------------------


@given(vote_strategy)
def test_a_vote_survives_its_row(vote):
    row = vote.to_row()
    assert row.shape == (ROW_SIZE,)
    assert row.dtype == torch.int64
    assert RankVote.from_row(row) == vote == RankVote.from_row(row.tolist())


def test_a_row_of_another_version_is_refused():
    row = RankVote(4, 4).to_row()
    row[0] += 1
    with pytest.raises(RanksDisagreeError, match="vote of format 2, this one reads format 1"):
        RankVote.from_row(row)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([1, 4, 4, 0], "5 numbers, got 4"),
        ([1, 5, 4, 0, 0], "num_tokens 5 but num_padded_tokens 4"),
        ([1, -1, 4, 0, 0], "num_tokens -1"),
        ([1, 4, 4, 5, 0], "uniform_query_len 5"),
        ([1, 4, 4, 0, 9], "veto 9, known are 0 to 3"),
    ],
)
def test_a_row_that_is_no_vote_is_refused(row, message):
    with pytest.raises(BatchError, match=message):
        RankVote.from_row(row)


def test_no_votes_is_an_error():
    with pytest.raises(BatchError, match="no votes"):
        decide([], VoteSettings())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_microbatches": 0}, "--ubatch-size is 0, .* use 1"),
        ({"num_microbatches": -2}, "--ubatch-size is -2"),
        ({"num_microbatches": 2.0}, "--ubatch-size is 2.0; use a whole number"),
        ({"num_microbatches": True}, "--ubatch-size is True; use a whole number"),
        ({"decode_threshold": 1}, "--dbo-decode-token-threshold is 1, .* --ubatch-size 2 .* use 2 or more"),
        ({"num_microbatches": 4, "prefill_threshold": 3}, "--dbo-prefill-token-threshold is 3, .* use 4 or more"),
        ({"prefill_threshold": "512"}, "--dbo-prefill-token-threshold is '512'; use a whole number"),
        ({"rule": "v3"}, "--vote-rule is 'v3'; use one of v1, v2"),
    ],
)
def test_settings_that_cannot_work_name_flag_value_and_remedy(wrong, message):
    with pytest.raises(ConfigurationError, match=message):
        VoteSettings(**wrong)


def test_the_smallest_thresholds_are_the_number_of_microbatches():
    assert decide([RankVote(3, 3)], VoteSettings(3, 3, 3)).split
