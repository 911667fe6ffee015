"""Continuous batching of one rank: which tokens the next step computes, and what follows from its output.

A step's batch is made of every running request's next token (decode) and, up to the token budget, of prompt tokens:
those of prompts that were begun and not finished, then those of requests that have arrived and find a free KV row. A
prompt that does not fit the rest of the budget is cut and goes on in the next step.

Nothing here depends on the clock: the batches follow from the requests, their arrivals, the settings and the sampled
tokens. So a run can be repeated step by step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..batching import StepInput, idle_step

__all__ = ["NOT_SAMPLED", "Batch", "Engine", "RequestState", "Sample", "pick"]

NOT_SAMPLED = -1


@dataclass
class RequestState:
    """One request on its way.

    Attributes:
        number, arrival: as in the prompt file.
        prompt: its token ids.
        generated: the tokens sampled so far, the end token included.
        close_calls: index in `generated` -> gap of the two best logits, where that was close (`Engine`).
        row: its KV cache row, -1 while it waits.
        computed: tokens of it that are in the KV cache.
    """

    number: int
    arrival: int
    prompt: list[int]
    generated: list[int] = field(default_factory=list)
    close_calls: dict[int, float] = field(default_factory=dict)
    row: int = -1
    computed: int = 0

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.generated)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Ids of the tokens [start, stop) of prompt and answer."""
        edge = len(self.prompt)
        return self.prompt[start:stop] + self.generated[max(start - edge, 0) : max(stop - edge, 0)]


@dataclass(frozen=True)
class Batch:
    """One step's work: `parts[i]` is (sequence, first token, end token) of request i of `input`.

    `last_tokens` are the indices, in the flattened batch, of the tokens that a sample follows, `sampling` the parts
    they belong to: those whose last known token is in this batch.
    """

    input: StepInput
    parts: list[tuple[RequestState, int, int]]
    sampling: list[int]
    last_tokens: list[int]

    @property
    def requests(self) -> list[int]:
        """Numbers of the requests, in batch order."""
        return [sequence.number for sequence, _, _ in self.parts]


@dataclass(frozen=True)
class Sample:
    """What was picked from one row of logits: the token, and how far the second best was behind."""

    token: int
    gap: float


class Engine:
    """The requests of one rank.

    Args:
        sequences: all of them, in the order in which they are served where arrivals are equal.
        rows: KV cache rows: how many run at once.
        row_length: tokens a row holds.
        token_budget: most tokens of one step. Decodes count, but none is ever put off: it is to be at least `rows`
            (`Settings.check` refuses less).
        max_new_tokens: most tokens to generate for a request.
        eos_ids: ids that end an answer.
        close_call: gap of the two best logits below which rounding may decide between them.
        device: of the step's tensors.
    """

    def __init__(
        self,
        sequences: Sequence[RequestState],
        *,
        rows: int,
        row_length: int,
        token_budget: int,
        max_new_tokens: int,
        eos_ids: Sequence[int],
        close_call: float,
        device: torch.device | str = "cpu",
    ) -> None:
        self._waiting = deque(sorted(sequences, key=lambda sequence: sequence.arrival))
        self._running: list[RequestState] = []
        self._free_rows = list(range(rows - 1, -1, -1))
        self._row_length = row_length
        self._token_budget = token_budget
        self._max_new_tokens = max_new_tokens
        self._eos_ids = frozenset(eos_ids)
        self._close_call = close_call
        self._device = device

    def next_batch(self, step: int) -> Batch:
        """The batch of this step; one without requests where there is nothing to do."""
        budget = self._token_budget
        decodes = [s for s in self._running if s.length - s.computed == 1]
        parts = [(s, s.computed, s.length) for s in decodes]
        budget -= len(parts)
        for sequence in self._running:
            if sequence.length - sequence.computed > 1 and budget > 0:
                stop = min(sequence.length, sequence.computed + budget)
                parts.append((sequence, sequence.computed, stop))
                budget -= stop - sequence.computed
        while self._waiting and self._waiting[0].arrival <= step and self._free_rows and budget > 0:
            sequence = self._waiting.popleft()
            sequence.row = self._free_rows.pop()
            self._running.append(sequence)
            stop = min(sequence.length, budget)
            parts.append((sequence, 0, stop))
            budget -= stop
        return self._make_batch(parts)

    def advance(self, batch: Batch, tokens: Sequence[Sample]) -> list[RequestState]:
        """Take over the samples, one for each of `batch.sampling`; returns the requests that are answered now."""
        for sequence, _, stop in batch.parts:
            sequence.computed = stop
        answered = []
        for part, sample in zip(batch.sampling, tokens, strict=True):
            sequence = batch.parts[part][0]
            if sample.gap < self._close_call:
                sequence.close_calls[len(sequence.generated)] = sample.gap
            sequence.generated.append(sample.token)
            if (
                sample.token in self._eos_ids
                or len(sequence.generated) >= self._max_new_tokens
                or sequence.length > self._row_length
            ):
                answered.append(sequence)
                self._running.remove(sequence)
                self._free_rows.append(sequence.row)
        return answered

    def _make_batch(self, parts: list[tuple[RequestState, int, int]]) -> Batch:
        if not parts:
            return Batch(idle_step(self._device), [], [], [])
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        offsets = [0]
        sampling: list[int] = []
        for index, (sequence, start, stop) in enumerate(parts):
            ids += sequence.tokens(start, stop)
            positions += range(start, stop)
            first_slot = sequence.row * self._row_length
            slots += range(first_slot + start, first_slot + stop)
            offsets.append(len(ids))
            if stop == sequence.length:
                sampling.append(index)
        query_start_loc = torch.tensor(offsets, dtype=torch.int32)
        seq_lens = torch.tensor([stop for _, _, stop in parts], dtype=torch.int32)
        step_input = StepInput(
            positions=self._tensor(positions),
            query_start_loc=query_start_loc.to(self._device),
            seq_lens=seq_lens.to(self._device),
            slot_mapping=self._tensor(slots),
            request_rows=self._tensor([sequence.row for sequence, _, _ in parts]),
            num_tokens=len(ids),
            num_padded_tokens=len(ids),
            input_ids=self._tensor(ids),
            query_start_loc_cpu=query_start_loc,
            seq_lens_cpu=seq_lens,
        )
        return Batch(step_input, parts, sampling, [offsets[index + 1] - 1 for index in sampling])

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._device)


def pick(logits: Tensor) -> list[Sample]:
    """Greedy decoding: logits [N, vocabulary] -> the best token of each row, the lowest id of several best ones."""
    if not logits.shape[0]:
        return []
    best = logits.float().topk(2, dim=-1).values
    # argmax gives the first of equals; topk promises no order among them.
    tokens = logits.argmax(dim=-1)
    gaps = (best[:, 0] - best[:, 1]).tolist()
    return [Sample(token, gap) for token, gap in zip(tokens.tolist(), gaps, strict=True)]
