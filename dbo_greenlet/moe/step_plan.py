"""What all layers of one step have in common: which tokens attend to what, and which are padding. Worked out once.

Requests with one new token (decode) are handled together, as one padded batch; requests with several (prefill,
chunked prefill) one after the other, in chunks. One padded batch for all was rejected: a prompt of 500 tokens beside
31 decoding requests would pad those to 500 queries each. A loop over all was rejected too: 32 decoding requests would
cost 32 times the launches.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from dbo_greenlet.batching.inputs import StepInput
from dbo_greenlet.errors import ConfigurationError
from dbo_greenlet.moe.kv_cache import KVCache

__all__ = ["DecodeGroup", "PrefillChunk", "PrefillRequest", "StepPlan", "plan_step"]

# The most scores (queries x heads x keys) that are in memory at a time for a prefill; 16 MiB in float32.
MAX_SCORES = 1 << 22


@dataclass(frozen=True)
class DecodeGroup:
    """R requests with one query token each.

    `tokens` int64 [R] are their token indices, or None where they are all tokens of the step in order; `rows` int64
    [R] their cache rows; `context` the number of positions K that are read; `bias` [R, 1, K] is 0 or -inf.
    """

    tokens: Tensor | None
    rows: Tensor
    context: int
    bias: Tensor


@dataclass(frozen=True)
class PrefillChunk:
    """The tokens [start, stop) of one request, which see at most `context` positions.

    `bias` [stop - start, 1, context] is 0 or -inf.
    """

    start: int
    stop: int
    context: int
    bias: Tensor


@dataclass(frozen=True)
class PrefillRequest:
    """One request with several query tokens: cache row int64 [1], context length after this step, its chunks."""

    row: Tensor
    context: int
    chunks: tuple[PrefillChunk, ...]


@dataclass(frozen=True)
class StepPlan:
    """The plan of one step, or of one microbatch of it, with P tokens.

    `write_slots` int64 [P] says where each token's cache entry goes. Tokens that belong to neither `decode` nor a
    prefill (padding) get zeros from attention. `padding` bool [P, 1] marks those that are sent to no expert, or is
    None where there is none: all padding tokens are alike, so they would pile up on the same few experts.
    """

    write_slots: Tensor
    padding: Tensor | None
    decode: DecodeGroup | None
    prefills: tuple[PrefillRequest, ...]


def plan_step(step: StepInput, cache: KVCache, num_heads: int, dtype: torch.dtype) -> StepPlan:
    """Sort the requests of a step into one decode group and prefills; requests without a query token fall out.

    Reads the step's host copies of offsets and lengths, never the device. Masks follow from `positions`, so padding
    inside a request's token range (position 0) sees one key and stays finite.

    Raises `ConfigurationError` if a request has outgrown the cache, or if positions are not one per token.
    """
    positions = step.positions
    if positions.dim() != 1:
        raise ConfigurationError(
            f"positions of shape {tuple(positions.shape)}: DeepSeek-V2 takes one position per token, shape [tokens]"
        )
    offsets: list[int] = step.query_start_loc_cpu.tolist()
    contexts: list[int] = step.seq_lens_cpu.tolist()
    longest = max(contexts, default=0)
    if longest > cache.max_len:
        raise ConfigurationError(
            f"request {contexts.index(longest)} of this step has a context of {longest} tokens, the KV cache holds "
            f"{cache.max_len} a row; make the cache with a larger max_len or end the request earlier"
        )
    queries = [stop - start for start, stop in pairwise(offsets)]
    return StepPlan(
        write_slots=cache.write_slots(step.slot_mapping),
        # From the slots and not from num_tokens, so that the mask of a captured graph follows its inputs; and always,
        # where shapes are to be static: a graph made for a full step serves one with padding.
        padding=(step.slot_mapping < 0)[:, None]
        if cache.static_shapes or step.num_padded_tokens > step.num_tokens
        else None,
        decode=_decode_group(step, queries, offsets, contexts, cache, dtype),
        prefills=tuple(
            _prefill(step, request, offsets[request], queries[request], contexts[request], num_heads, dtype)
            for request in range(len(queries))
            if queries[request] > 1
        ),
    )


def _decode_group(
    step: StepInput, queries: list[int], offsets: list[int], contexts: list[int], cache: KVCache, dtype: torch.dtype
) -> DecodeGroup | None:
    requests = [request for request, count in enumerate(queries) if count == 1]
    if not requests:
        return None
    positions, rows = step.positions, step.request_rows
    tokens: Tensor | None
    if len(requests) == step.num_requests and step.num_padded_requests == step.num_padded_tokens:
        # Every real request decodes and padding tokens come with padding requests: token i is request i, as in a CUDA
        # graph made for a number of requests. What padding computes is finite and nobody reads it.
        tokens = None
    else:
        tokens = torch.tensor([offsets[request] for request in requests], device=positions.device)
        positions = positions[tokens]
        if len(requests) < len(queries):
            rows = rows[torch.tensor(requests, device=rows.device)]
    context = cache.max_len if cache.static_shapes else max(contexts[request] for request in requests)
    bias = _causal_bias(positions, context, dtype)
    # A padding request may carry any row, also -1.
    return DecodeGroup(tokens, rows.clamp(min=0) if tokens is None else rows, context, bias)


def _prefill(
    step: StepInput, request: int, first: int, count: int, context: int, num_heads: int, dtype: torch.dtype
) -> PrefillRequest:
    # Depends on this request only, so that its numbers do not change with the company it is in.
    chunk = max(1, MAX_SCORES // (num_heads * context))
    chunks = []
    for start in range(0, count, chunk):
        stop = min(start + chunk, count)
        visible = context - count + stop
        bias = _causal_bias(step.positions[first + start : first + stop], visible, dtype)
        chunks.append(PrefillChunk(first + start, first + stop, visible, bias))
    return PrefillRequest(step.request_rows[request : request + 1], context, tuple(chunks))


def _causal_bias(positions: Tensor, context: int, dtype: torch.dtype) -> Tensor:
    """[N, 1, context]: 0 where the key's position is at most the query's, -inf elsewhere."""
    hidden = torch.arange(context, device=positions.device) > positions[:, None]
    bias = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
    return bias.masked_fill_(hidden, float("-inf"))[:, None, :]
