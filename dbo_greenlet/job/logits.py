"""How far the logits of two passes over the same requests are apart: measured, row by row.

Tokens alone say little: two passes can agree on every token with logits that differ in the last bit, or nearly not at
all. So the rows from which tokens were sampled are kept while a pass runs, and the next pass that is to agree with it
holds its own rows against them. A row counts where both passes had sampled the same tokens of that request before it:
then the two computed the same thing, each from the KV cache that its own steps had left. So this is the difference of
whole runs, roundings of all earlier steps included, and not of one step on equal inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .engine import RequestState
from .messages import LogitsCompared

__all__ = ["KEPT_BYTES", "LogitRows"]

# Host memory for the rows of one pass. A prompt file of 240 problems needs 2 MiB with the packaged model; with the
# 102,400 tokens of DeepSeek-V2-Lite it is enough for the first thousand samples.
KEPT_BYTES = 256 * 2**20


@dataclass
class _Row:
    history: tuple[int, ...]
    logits: Tensor


class LogitRows:
    """The sampled rows of logits of one pass, and what came of comparing them with an earlier one's.

    Args:
        run: the pass.
        against: the rows of the pass to compare with; None compares with nothing.
        keep: whether a later pass is to be compared with this one.
        kept_bytes: most memory for the rows; what comes after is left out, and counted where it is missed.
    """

    def __init__(
        self, run: str, against: LogitRows | None = None, *, keep: bool = False, kept_bytes: int = KEPT_BYTES
    ) -> None:
        self.run = run
        self._against = against
        self._keep = keep
        self._room = kept_bytes
        self._full = False
        self._rows: dict[tuple[int, int], _Row] = {}
        self._count = self._equal = self._left_out = self._parted = 0
        self._largest = 0.0
        self._place = (-1, -1)

    def take(self, sequences: Sequence[RequestState], logits: Tensor) -> None:
        """Row i of `logits` [N, vocabulary] is what the next token of `sequences[i]` is about to be sampled from."""
        if self._against is None and not self._keep:
            return
        for sequence, row in zip(sequences, logits.detach().cpu(), strict=True):
            place = (sequence.number, len(sequence.generated))
            history = tuple(sequence.generated)
            if self._against is not None:
                self._compare(place, history, row)
            if not self._keep:
                continue
            size = row.numel() * row.element_size()
            if size > self._room:
                self._full = True
                continue
            self._room -= size
            # A copy: a view would keep the whole step's rows.
            self._rows[place] = _Row(history, row.clone())

    def result(self) -> LogitsCompared | None:
        """What was compared; None where there was nothing to compare with."""
        if self._against is None:
            return None
        counts = (self._count, self._equal, self._left_out, self._parted)
        return LogitsCompared(self._against.run, *counts, self._largest, *self._place)

    def _compare(self, place: tuple[int, int], history: tuple[int, ...], row: Tensor) -> None:
        other = None if self._against is None else self._against._rows.get(place)
        if other is None and self._against is not None and self._against._full:
            self._left_out += 1
            return
        if other is None or other.history != history:
            self._parted += 1
            return
        self._count += 1
        if torch.equal(other.logits, row):
            self._equal += 1
            return
        difference = float((other.logits.double() - row.double()).abs().max())
        if difference > self._largest or math.isnan(difference):
            self._largest = difference
            self._place = place
