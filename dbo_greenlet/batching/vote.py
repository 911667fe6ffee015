"""Whether the ranks of a data-parallel group split this step: one pure function of what they told each other.

The expert all-to-all is a collective: if one rank split its step and another did not, they would wait for each other
for ever. So every rank sends one `RankVote`, receives all of them, and calls `decide` on the same list with the same
settings. `decide` reads nothing else, not even which rank it runs on, and so cannot come out differently. Ranks
without work vote too.

Two rules, named after the vLLM model runners whose decisions they reproduce:

* "v1": every rank must reach its own threshold with its unpadded tokens (the decode threshold if its batch is a uniform
  decode, the prefill threshold otherwise), and on the smallest rank the last microbatch must hold a real token.
* "v2": the smallest rank's tokens are held to one threshold, the decode threshold only if all ranks run a uniform
  decode of the same length; a last microbatch made of padding alone is allowed (it computes and its result is dropped).

Both pad every rank to the largest when they split. Unlike vLLM's, both also work for a group of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dbo_greenlet.batching.slices import BatchError, cut_points
from dbo_greenlet.errors import ConfigurationError, RanksDisagreeError

if TYPE_CHECKING:
    from dbo_greenlet.batching.inputs import StepInput

__all__ = ["ROW_SIZE", "RULES", "Decision", "RankVote", "Reason", "Veto", "VoteSettings", "decide"]

RULES = ("v1", "v2")
ROW_SIZE = 5  # int64 numbers of an encoded vote
_ROW_FORMAT = 1

MICROBATCHES_FLAG = "--ubatch-size"
DECODE_FLAG = "--dbo-decode-token-threshold"
PREFILL_FLAG = "--dbo-prefill-token-threshold"
RULE_FLAG = "--vote-rule"


class Veto(IntEnum):
    """Why one rank does not want its step split, whatever its size. The numbers travel between ranks."""

    NONE = 0
    SWITCHED_OFF = 1
    SHARED_PREFIX = 2
    UNSUPPORTED_BATCH = 3

    @property
    def sentence(self) -> str:
        return {
            Veto.NONE: "it has no objection",
            Veto.SWITCHED_OFF: "microbatching is switched off there for this step",
            Veto.SHARED_PREFIX: "one of its requests reads KV that another request of the same step writes",
            Veto.UNSUPPORTED_BATCH: "its batch holds something that cannot be split",
        }[self]


class Reason(str, Enum):
    """Why a step was split or not. The values are stable: they are written into traces."""

    SPLIT_DECODE = "split-decode"
    SPLIT_PREFILL = "split-prefill"
    SPLIT_MIXED = "split-mixed"
    OFF = "off"
    ALL_IDLE = "all-idle"
    RANK_VETO = "rank-veto"
    RANK_IDLE = "rank-idle"
    TOO_FEW_TOKENS = "too-few-tokens"
    BELOW_DECODE_THRESHOLD = "below-decode-threshold"
    BELOW_PREFILL_THRESHOLD = "below-prefill-threshold"
    LAST_MICROBATCH_EMPTY = "last-microbatch-empty"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class VoteSettings:
    """What decides besides the votes; the same on every rank.

    Attributes:
        num_microbatches: N; 1 never splits.
        decode_threshold, prefill_threshold: tokens per rank (unpadded) from which a uniform decode, or any other batch,
            is split. At least N.
        rule: "v1" or "v2".

    Raises ConfigurationError for anything else.
    """

    num_microbatches: int = 2
    decode_threshold: int = 32
    prefill_threshold: int = 512
    rule: str = "v1"

    def __post_init__(self) -> None:
        n = self.num_microbatches
        _require_whole_number(MICROBATCHES_FLAG, n)
        if n < 1:
            raise ConfigurationError(
                f"{MICROBATCHES_FLAG} is {n}, but a step has at least one microbatch; use 1 (unsplit), 2 or more"
            )
        for flag, value in ((DECODE_FLAG, self.decode_threshold), (PREFILL_FLAG, self.prefill_threshold)):
            _require_whole_number(flag, value)
            if value < n:
                raise ConfigurationError(
                    f"{flag} is {value}, but with {MICROBATCHES_FLAG} {n} a step of fewer than {n} tokens "
                    f"cannot be split; use {n} or more"
                )
        if self.rule not in RULES:
            raise ConfigurationError(f"{RULE_FLAG} is {self.rule!r}; use one of {', '.join(RULES)}")


def _require_whole_number(flag: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigurationError(f"{flag} is {value!r}; use a whole number")


@dataclass(frozen=True)
class RankVote:
    """What one rank tells the others about its step.

    Attributes:
        num_tokens: its tokens, without padding; 0 if it is idle.
        num_padded_tokens: its tokens with its own padding (to a graph's size, say).
        uniform_query_len: the tokens of each request if its batch is a uniform decode, else 0.
        veto: why it must not be split, or Veto.NONE.

    Raises BatchError for counts that no step has.
    """

    num_tokens: int
    num_padded_tokens: int
    uniform_query_len: int = 0
    veto: Veto = Veto.NONE

    def __post_init__(self) -> None:
        if not 0 <= self.num_tokens <= self.num_padded_tokens:
            raise BatchError(f"a vote has num_tokens {self.num_tokens} but num_padded_tokens {self.num_padded_tokens}")
        if not 0 <= self.uniform_query_len <= self.num_tokens:
            raise BatchError(f"a vote of {self.num_tokens} tokens has uniform_query_len {self.uniform_query_len}")

    @property
    def wants_split(self) -> bool:
        """Whether the rank has no objection of its own; its size is judged by `decide`."""
        return self.veto is Veto.NONE

    @property
    def uniform_decode(self) -> bool:
        return self.uniform_query_len > 0

    @classmethod
    def of_step(cls, step: StepInput, *, decode_query_len: int = 1, veto: Veto = Veto.NONE) -> RankVote:
        """The vote for a step. It is a uniform decode if every request has `decode_query_len` new tokens (1, or one
        more than the drafted tokens with speculative decoding)."""
        uniform = step.uniform_query_len
        return cls(
            num_tokens=step.num_tokens,
            num_padded_tokens=step.num_padded_tokens,
            uniform_query_len=uniform if uniform == decode_query_len else 0,
            veto=veto,
        )

    def to_row(self) -> Tensor:
        """int64 [ROW_SIZE] on the CPU: format version, tokens, padded tokens, uniform query length, veto."""
        row = [_ROW_FORMAT, self.num_tokens, self.num_padded_tokens, self.uniform_query_len, int(self.veto)]
        return torch.tensor(row, dtype=torch.int64)

    @classmethod
    def from_row(cls, row: Tensor | Iterable[int]) -> RankVote:
        """The vote that `to_row` encoded.

        Raises:
            RanksDisagreeError: another version of the package encoded it.
            BatchError: not a vote.
        """
        numbers = [int(number) for number in (row.tolist() if isinstance(row, Tensor) else row)]
        if len(numbers) != ROW_SIZE:
            raise BatchError(f"a vote is {ROW_SIZE} numbers, got {len(numbers)}")
        version, num_tokens, num_padded_tokens, uniform_query_len, veto = numbers
        if version != _ROW_FORMAT:
            raise RanksDisagreeError(
                f"a rank sent a vote of format {version}, this one reads format {_ROW_FORMAT}; "
                "start all ranks with the same version of dbo_greenlet"
            )
        if veto not in Veto.__members__.values():
            raise BatchError(f"a vote has veto {veto}, known are 0 to {max(Veto)}")
        return cls(num_tokens, num_padded_tokens, uniform_query_len, Veto(veto))


@dataclass(frozen=True)
class Decision:
    """What the ranks do with this step; equal on all of them.

    Attributes:
        split: whether it is split.
        reason: why, as a stable word.
        message: why, as a sentence with the numbers.
        num_microbatches: N if split, else 1.
        padded_tokens: the largest rank's padded tokens: what every rank pads to if split.
        rank: the rank that decided it: the one that objected or was too small; if split, the smallest one; None where
            the settings decided alone or no rank has work.
        votes: what it was decided from, by rank.
        padding_only_ranks: the ranks whose last microbatch has no real token, so that it must not replay a graph that
            was captured with some (rule "v2" only).
    """

    split: bool
    reason: Reason
    message: str
    num_microbatches: int
    padded_tokens: int
    rank: int | None
    votes: tuple[RankVote, ...]
    padding_only_ranks: tuple[int, ...] = ()

    def tokens_on(self, rank: int) -> int:
        """The tokens, with padding, that a rank is to run: the agreed number if split, else its own.

        A runner that pads to the sizes of its graphs may run more; `StepOutput.tokens` says how many it ran.
        """
        return self.padded_tokens if self.split else self.votes[rank].num_padded_tokens


def decide(votes: Sequence[RankVote], settings: VoteSettings) -> Decision:
    """Split this step or not, by the rule of the settings.

    Args:
        votes: one per rank, in rank order.
        settings: the same on every rank.

    Raises:
        BatchError: no votes.
    """
    if not votes:
        raise BatchError("there are no votes to decide from; a group of one decides from its own")
    votes = tuple(votes)
    objection = _common_objection(votes, settings)
    if objection is None:
        objection = (_v1_objection if settings.rule == "v1" else _v2_objection)(votes, settings)
    padded = max(vote.num_padded_tokens for vote in votes)
    if objection is not None:
        reason, rank, why = objection
        return Decision(False, reason, f"not split: {why}", 1, padded, rank, votes)
    return _split(votes, settings, padded)


_Objection = tuple[Reason, int | None, str]


def _smallest(votes: Sequence[RankVote], ranks: Iterable[int] | None = None) -> int:
    """The rank (of those given) with the fewest tokens. Of several, one without a uniform decode, and then the lowest:
    so the reason does not depend on how the ranks are numbered."""
    candidates = range(len(votes)) if ranks is None else ranks
    return min(candidates, key=lambda rank: (votes[rank].num_tokens, votes[rank].uniform_decode, rank))


def _common_objection(votes: Sequence[RankVote], settings: VoteSettings) -> _Objection | None:
    n = settings.num_microbatches
    if n == 1:
        return Reason.OFF, None, f"{MICROBATCHES_FLAG} is 1"
    if all(vote.num_tokens == 0 for vote in votes):
        return Reason.ALL_IDLE, None, f"none of the {len(votes)} ranks has a token"
    # A veto first: it is the only one of these that the numbers of another step would not change.
    for rank, vote in enumerate(votes):
        if not vote.wants_split:
            return Reason.RANK_VETO, rank, f"rank {rank} objects, {vote.veto.sentence}"
    rank = _smallest(votes)
    tokens = votes[rank].num_tokens
    if tokens == 0:
        return Reason.RANK_IDLE, rank, f"rank {rank} is idle (0 tokens), and all ranks split or none does"
    if tokens < n:
        return Reason.TOO_FEW_TOKENS, rank, f"rank {rank} has {tokens} tokens for {n} microbatches"
    return None


def _threshold(settings: VoteSettings, uniform_decode: bool) -> tuple[Reason, int, str]:
    if uniform_decode:
        return Reason.BELOW_DECODE_THRESHOLD, settings.decode_threshold, f"the decode threshold ({DECODE_FLAG})"
    return Reason.BELOW_PREFILL_THRESHOLD, settings.prefill_threshold, f"the prefill threshold ({PREFILL_FLAG})"


def _below_threshold(votes: Sequence[RankVote], rank: int, settings: VoteSettings, decode: bool) -> _Objection | None:
    reason, threshold, name = _threshold(settings, decode)
    tokens = votes[rank].num_tokens
    if tokens >= threshold:
        return None
    return reason, rank, f"rank {rank} has {tokens} tokens, {name} is {threshold}"


def _v1_objection(votes: Sequence[RankVote], settings: VoteSettings) -> _Objection | None:
    below = {
        rank: objection
        for rank, vote in enumerate(votes)
        if (objection := _below_threshold(votes, rank, settings, vote.uniform_decode)) is not None
    }
    if below:
        return below[_smallest(votes, below)]
    rank = _smallest(votes)
    largest = max(range(len(votes)), key=lambda other: votes[other].num_padded_tokens)
    last_start = _last_start(votes, settings)
    if votes[rank].num_tokens <= last_start:
        return (
            Reason.LAST_MICROBATCH_EMPTY,
            rank,
            f"rank {rank} has {votes[rank].num_tokens} tokens, and padded to the {votes[largest].num_padded_tokens} of "
            f"rank {largest} its last microbatch, from token {last_start} on, would be empty",
        )
    return None


def _v2_objection(votes: Sequence[RankVote], settings: VoteSettings) -> _Objection | None:
    objection = _below_threshold(votes, _smallest(votes), settings, _shared_uniform_decode(votes))
    lengths = sorted({vote.uniform_query_len for vote in votes})
    if objection is not None and objection[0] is Reason.BELOW_PREFILL_THRESHOLD and lengths[-1] > 0:
        reason, rank, why = objection
        shown = ", ".join(str(length) if length else "none" for length in lengths)
        return reason, rank, f"{why}, which applies because the ranks' uniform decode lengths differ: {shown}"
    return objection


def _shared_uniform_decode(votes: Sequence[RankVote]) -> bool:
    return votes[0].uniform_decode and all(vote.uniform_query_len == votes[0].uniform_query_len for vote in votes)


def _last_start(votes: Sequence[RankVote], settings: VoteSettings) -> int:
    """The first token of the last microbatch once all ranks are padded to the largest. Not called with too few."""
    return cut_points(max(vote.num_padded_tokens for vote in votes), settings.num_microbatches)[-2]


def _split(votes: tuple[RankVote, ...], settings: VoteSettings, padded: int) -> Decision:
    n = settings.num_microbatches
    kinds = {vote.uniform_decode for vote in votes}
    if settings.rule == "v2":
        kinds = {_shared_uniform_decode(votes)}
    smallest = _smallest(votes)
    if kinds == {True}:
        reason, held_to = Reason.SPLIT_DECODE, f"the decode threshold {settings.decode_threshold}"
    elif kinds == {False}:
        reason, held_to = Reason.SPLIT_PREFILL, f"the prefill threshold {settings.prefill_threshold}"
    else:
        reason = Reason.SPLIT_MIXED
        held_to = f"its threshold (decode {settings.decode_threshold}, prefill {settings.prefill_threshold})"
    last_start = _last_start(votes, settings)
    padding_only = tuple(rank for rank, vote in enumerate(votes) if vote.num_tokens <= last_start)
    message = (
        f"split into {n}: every rank reaches {held_to}, the smallest is rank {smallest} with "
        f"{votes[smallest].num_tokens} tokens; each runs {padded}"
    )
    if padding_only:
        ranks = ", ".join(map(str, padding_only))
        message += f"; the last microbatch is padding alone on rank {ranks}"
    return Decision(True, reason, message, n, padded, smallest, votes, padding_only)
