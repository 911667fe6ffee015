"""Multi-head latent attention (MLA) of DeepSeek-V2 over the compressed KV cache (arXiv 2405.04434, section 2.1)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dbo_greenlet.moe.config import DeepseekV2Config
from dbo_greenlet.moe.kv_cache import KVCache
from dbo_greenlet.moe.norm import RMSNorm
from dbo_greenlet.moe.rope import attention_scale, rotate
from dbo_greenlet.moe.step_plan import DecodeGroup, PrefillRequest, StepPlan

__all__ = ["LatentAttention"]

# The norms of the two latents keep this whatever rms_norm_eps says, as in DeepSeek's published code.
_LATENT_NORM_EPS = 1e-6


class LatentAttention(nn.Module):
    """One layer's attention, in the absorbed form: scores and values are taken in the latent space.

    With W_UK and W_UV the two halves of `kv_b_proj`, q^T (W_UK c) = (W_UK^T q)^T c, and the sum over positions commutes
    with W_UV. So keys and values of the context are never expanded; all heads share one entry per token, and one
    request's scores are one matrix product. For long prefills the expanded form needs fewer operations; it was left
    out because one formula for both makes a token's result independent of whether its prompt came in one piece.
    """

    def __init__(self, config: DeepseekV2Config) -> None:
        super().__init__()
        self._config = config
        self._scale = attention_scale(config)
        hidden, heads, bias = config.hidden_size, config.num_attention_heads, config.attention_bias
        query_width = heads * config.qk_head_dim
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(hidden, query_width, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden, config.q_lora_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, _LATENT_NORM_EPS)
            self.q_b_proj = nn.Linear(config.q_lora_rank, query_width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, config.cache_dim, bias=bias)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, _LATENT_NORM_EPS)
        expanded = heads * (config.qk_nope_head_dim + config.v_head_dim)
        self.kv_b_proj = nn.Linear(config.kv_lora_rank, expanded, bias=False)
        self.o_proj = nn.Linear(heads * config.v_head_dim, hidden, bias=bias)

    def forward(self, hidden: Tensor, rotations: Tensor, plan: StepPlan, cache: KVCache, layer: int) -> Tensor:
        """hidden [P, hidden_size] -> [P, hidden_size]; writes this step's tokens into the cache, then attends.

        Padding tokens get the output projection of zeros (its bias, or 0).
        """
        config = self._config
        entry = self.kv_a_proj_with_mqa.forward(hidden)
        latent, rope_key = torch.split(entry, [config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
        cache.write(layer, plan.write_slots, self.kv_a_layernorm.forward(latent), rotate(rope_key, rotations))

        # [heads, nope + v, kv_lora_rank]
        up = self.kv_b_proj.weight.view(config.num_attention_heads, -1, config.kv_lora_rank)
        queries = self._absorbed_queries(hidden, rotations, up[:, : config.qk_nope_head_dim])
        mixed = self._attend(queries, cache.entries(layer), plan)
        values = torch.bmm(mixed.transpose(0, 1), up[:, config.qk_nope_head_dim :].transpose(1, 2))
        # Sizes are spelled out because -1 cannot be inferred for a microbatch without tokens.
        width = config.num_attention_heads * config.v_head_dim
        return self.o_proj.forward(values.transpose(0, 1).reshape(hidden.shape[0], width))

    def _absorbed_queries(self, hidden: Tensor, rotations: Tensor, up_key: Tensor) -> Tensor:
        """Queries in the space of cache entries, [P, heads, kv_lora_rank + qk_rope_head_dim]."""
        config = self._config
        if config.q_lora_rank is None:
            flat = self.q_proj.forward(hidden)
        else:
            flat = self.q_b_proj.forward(self.q_a_layernorm.forward(self.q_a_proj.forward(hidden)))
        by_head = flat.view(hidden.shape[0], config.num_attention_heads, config.qk_head_dim)
        plain, rotary = torch.split(by_head, [config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
        absorbed = torch.bmm(plain.transpose(0, 1), up_key).transpose(0, 1)
        return torch.cat((absorbed, rotate(rotary, rotations)), dim=-1)

    def _attend(self, queries: Tensor, entries: Tensor, plan: StepPlan) -> Tensor:
        """queries [P, heads, D], entries [rows, max_len, D] -> latents mixed by attention, [P, heads, kv_lora_rank]."""
        if plan.decode is not None and plan.decode.tokens is None:
            return self._attend_decode(queries, entries, plan.decode)
        mixed = queries.new_zeros(*queries.shape[:-1], self._config.kv_lora_rank)
        if plan.decode is not None:
            tokens = plan.decode.tokens
            mixed[tokens] = self._attend_decode(queries[tokens], entries, plan.decode)
        for request in plan.prefills:
            self._attend_prefill(queries, entries, request, mixed)
        return mixed

    def _attend_decode(self, queries: Tensor, entries: Tensor, group: DecodeGroup) -> Tensor:
        """queries [R, heads, D] -> [R, heads, kv_lora_rank], all requests in one padded batch."""
        keys = entries[:, : group.context].index_select(0, group.rows)
        scores = torch.baddbmm(group.bias, queries, keys.transpose(1, 2), alpha=self._scale)
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(queries.dtype)
        return torch.bmm(weights, keys[..., : self._config.kv_lora_rank])

    def _attend_prefill(self, queries: Tensor, entries: Tensor, request: PrefillRequest, out: Tensor) -> None:
        """Fill out[start:stop] for each chunk of one request. Heads are rows of the product: they share the keys."""
        # Selected on the device: reading the row number on the host would wait for the device.
        context = entries[:, : request.context].index_select(0, request.row)[0]
        heads, width = queries.shape[1:]
        for chunk in request.chunks:
            keys = context[: chunk.context]
            count = chunk.stop - chunk.start
            scores = torch.mm(queries[chunk.start : chunk.stop].reshape(count * heads, width), keys.t())
            scores = torch.add(chunk.bias, scores.view(count, heads, chunk.context), alpha=self._scale)
            weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(queries.dtype)
            mixed = torch.mm(weights.view(count * heads, chunk.context), keys[:, : self._config.kv_lora_rank])
            out[chunk.start : chunk.stop] = mixed.view(count, heads, self._config.kv_lora_rank)
