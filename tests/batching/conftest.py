"""Steps made of a few numbers, and the per-token view of a step that splitting must not change."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from dbo_greenlet.batching import StepInput

KV_ROW_LENGTH = 1000  # slots per cache row in these tests

MakeStep = Callable[..., StepInput]
Requests = Sequence[tuple[int, int]]  # (new tokens, tokens already in the cache) per request


def build_step(requests: Requests, padding: int = 0, request_padding: int = 0, **others: object) -> StepInput:
    """A step whose every number can be told apart: ids count up, request r has cache row 7 + r."""
    lengths = [new for new, _ in requests]
    tokens = sum(lengths)
    padded = tokens + padding
    offsets = [sum(lengths[:r]) for r in range(len(requests) + 1)] + [tokens] * request_padding
    positions = [cached + j for new, cached in requests for j in range(new)]
    slots = [(7 + r) * KV_ROW_LENGTH + cached + j for r, (new, cached) in enumerate(requests) for j in range(new)]
    step = {
        "positions": torch.tensor(positions + [0] * padding, dtype=torch.int64),
        "query_start_loc": torch.tensor(offsets, dtype=torch.int32),
        "seq_lens": torch.tensor([sum(r) for r in requests] + [0] * request_padding, dtype=torch.int32),
        "slot_mapping": torch.tensor(slots + [-1] * padding, dtype=torch.int64),
        "request_rows": torch.arange(7, 7 + len(requests) + request_padding),
        "num_tokens": tokens,
        "num_padded_tokens": padded,
        "input_ids": torch.arange(100, 100 + padded),
        "num_requests": len(requests),
    }
    return StepInput(**{**step, **others})


def view_of_tokens(step: StepInput) -> list[tuple[int, int, int, int, int]]:
    """(id, cache row, position, KV slot, visible context length) of every real token: all that attention depends on."""
    offsets = step.query_start_loc.tolist()
    seen = []
    for request in range(step.num_requests):
        start, stop = offsets[request], offsets[request + 1]
        for token in range(start, stop):
            visible = int(step.seq_lens[request]) - (stop - 1 - token)
            seen.append(
                (
                    int(step.input_ids[token]),
                    int(step.request_rows[request]),
                    int(step.positions[token]),
                    int(step.slot_mapping[token]),
                    visible,
                )
            )
    return seen


# Session scope: Hypothesis refuses fixtures that are made anew for every test function.
@pytest.fixture(scope="session")
def make_step() -> MakeStep:
    return build_step


@pytest.fixture(scope="session")
def token_view() -> Callable[[StepInput], list[tuple[int, int, int, int, int]]]:
    return view_of_tokens
