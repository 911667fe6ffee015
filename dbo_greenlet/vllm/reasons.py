"""Why vLLM split a step or did not, named from what the ranks told each other in its vote.

The answer is vLLM's; a reason that contradicts it is never given (it is "unexplained" then). The words are those of
`dbo_greenlet.batching.vote.Reason`, and these:

* "another-rank": this rank wanted to split, and what it knows does not say which other rank objected, or why.
* "shared-prefix": a request of this rank reads a prefix that another request of the same step writes.
* "warm-up": a dummy run of vLLM's start: profiling, warming up, capturing.
* "one-rank": there is no other rank; vLLM never splits then.
* "unexplained": vLLM decided otherwise than its own rule says; never seen, but its decision is what counts.

The older runner's ranks (rule "v1") send tokens, padded tokens and one bit: want to split or not. So a rank knows
another's objection only where the bit has one possible cause. The newer runner's ranks send all that decides.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from dbo_greenlet.batching.vote import RankVote, Reason, Veto, VoteSettings, decide

__all__ = [
    "ANOTHER_RANK",
    "ONE_RANK",
    "RANK_IDLE",
    "SHARED_PREFIX",
    "UNEXPLAINED",
    "WARM_UP",
    "Rows",
    "name_v1",
    "name_v2",
    "vote_settings",
]

Rows = tuple[tuple[int, ...], ...]  # what the ranks sent each other: a row per number, a column per rank

ANOTHER_RANK = "another-rank"
ONE_RANK = "one-rank"
SHARED_PREFIX = "shared-prefix"
UNEXPLAINED = "unexplained"
WARM_UP = "warm-up"
RANK_IDLE = Reason.RANK_IDLE.value


def vote_settings(parallel_config: Any, rule: str) -> VoteSettings:
    """The vote's settings in a ParallelConfig of vLLM; `rule` is "v1" or "v2".

    Raises ConfigurationError for thresholds that vLLM refuses, too.
    """
    config = parallel_config
    return _settings(config.num_ubatches, config.dbo_decode_token_threshold, config.dbo_prefill_token_threshold, rule)


_settings = lru_cache(maxsize=8)(VoteSettings)


# A steady decode votes alike for many steps; naming a reason afresh takes some 20 us.
@lru_cache(maxsize=256)
def name_v1(own: RankVote, rank: int, rows: Rows | None, settings: VoteSettings, split: bool, largest: int) -> str:
    """The reason for a decision of the older runner.

    Args:
        own: this rank's vote.
        rank: this rank's number.
        rows: what the ranks sent: tokens, padded tokens, 1 for wanting to split (a column per rank). None where it is
            not at hand.
        split: what vLLM decided.
        largest: the largest number of tokens that any rank runs.
    """
    if rows is None:
        return _from_own_vote(own, settings, split, largest)
    votes, unclear = [], False
    for other, (tokens, padded, wants) in enumerate(zip(*rows[:3], strict=True)):
        if other == rank:
            votes.append(own)
        elif wants:
            votes.append(RankVote(tokens, padded, _uniform_length(tokens, own, settings)))
        elif tokens < settings.num_microbatches:
            votes.append(RankVote(tokens, padded))
        elif tokens >= max(settings.decode_threshold, settings.prefill_threshold):
            votes.append(RankVote(tokens, padded, veto=Veto.UNSUPPORTED_BATCH))
        else:
            unclear = True  # below its threshold, or an objection: the bit does not say
    decision = decide(votes, settings)
    if not unclear:
        return _agreed(decision.reason.value, decision.split, split)
    if decision.split or decision.reason is Reason.LAST_MICROBATCH_EMPTY:
        return _agreed(ANOTHER_RANK, False, split)
    return _agreed(decision.reason.value, False, split)


@lru_cache(maxsize=256)
def name_v2(own: RankVote, rank: int, rows: Rows | None, settings: VoteSettings, split: bool, largest: int) -> str:
    """The reason for a decision of the newer runner.

    Args:
        rows: what the ranks sent: tokens, (something else), the uniform query length or 0, (something else), 1 if the
            batch may be split; further rows are not read. None where it is not at hand.
        (the others as in `name_v1`)
    """
    if rows is None:
        return _from_own_vote(own, settings, split, largest)
    votes = [
        RankVote(tokens, tokens, min(uniform, tokens), Veto.NONE if allowed else Veto.UNSUPPORTED_BATCH)
        for tokens, uniform, allowed in zip(rows[0], rows[2], rows[4], strict=True)
    ]
    # Only this rank knows whether its uniform length is that of a decode, and vLLM asks every rank about its own.
    votes[rank] = own
    decision = decide(votes, settings)
    return _agreed(decision.reason.value, decision.split, split)


def _uniform_length(tokens: int, own: RankVote, settings: VoteSettings) -> int:
    """The uniform query length (1 stands for any) of another rank that has reached the threshold of its kind of batch.
    Where both kinds have, it is taken for the kind of this rank's own."""
    if tokens < settings.prefill_threshold:
        return 1
    if tokens < settings.decode_threshold:
        return 0
    return int(own.uniform_decode)


def _from_own_vote(own: RankVote, settings: VoteSettings, split: bool, largest: int) -> str:
    """The reason as far as one rank's vote, and the number of tokens that the ranks agreed on, tell it."""
    alone = decide([own], settings)
    if alone.split is split:
        return alone.reason.value
    if split:
        return UNEXPLAINED
    padded = decide([replace(own, num_padded_tokens=max(largest, own.num_padded_tokens))], settings)
    return ANOTHER_RANK if padded.split else padded.reason.value


def _agreed(reason: str, ours: bool, theirs: bool) -> str:
    return reason if ours is theirs else UNEXPLAINED
