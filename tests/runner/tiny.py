"""A DeepSeek-V2 model of a few thousand weights, made without transformers, and batches for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dbo_greenlet.all2all.loopback import Loopback
from dbo_greenlet.batching import StepInput
from dbo_greenlet.moe import DeepseekV2Config, DeepseekV2Model, KVCache
from dbo_greenlet.moe.config import RopeConfig

ROWS, ROW_LENGTH, VOCABULARY = 8, 48, 50

CONFIG = DeepseekV2Config(
    vocab_size=VOCABULARY,
    hidden_size=24,
    intermediate_size=32,
    moe_intermediate_size=16,
    num_hidden_layers=3,
    num_attention_heads=2,
    q_lora_rank=None,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    n_routed_experts=4,
    n_shared_experts=1,
    num_experts_per_tok=2,
    first_k_dense_replace=1,
    moe_layer_freq=1,
    topk_method="greedy",
    n_group=1,
    topk_group=1,
    norm_topk_prob=False,
    routed_scaling_factor=1.0,
    rms_norm_eps=1e-6,
    attention_bias=False,
    mlp_bias=False,
    tie_word_embeddings=False,
    max_position_embeddings=ROW_LENGTH,
    rope=RopeConfig(),
    bos_token_id=None,
    eos_token_ids=(),
)
SITES = ("layer1.dispatch", "layer1.combine", "layer2.dispatch", "layer2.combine", "")


def tiny_model() -> DeepseekV2Model:
    model = DeepseekV2Model(CONFIG, Loopback(CONFIG.n_routed_experts)).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 1 + 0.1 * noise)
    return model


def tiny_cache() -> KVCache:
    return KVCache(CONFIG, ROWS, ROW_LENGTH)


def tiny_step(requests: Sequence[tuple[int, int, int]], seed: int = 0) -> StepInput:
    """A step of (cache row, tokens computed before, new tokens) requests with random ids."""
    lengths = [new for _, _, new in requests]
    total = sum(lengths)
    positions = [past + j for _, past, new in requests for j in range(new)]
    slots = [row * ROW_LENGTH + past + j for row, past, new in requests for j in range(new)]
    return StepInput(
        positions=torch.tensor(positions, dtype=torch.int64),
        query_start_loc=torch.tensor([sum(lengths[:r]) for r in range(len(lengths) + 1)], dtype=torch.int32),
        seq_lens=torch.tensor([past + new for _, past, new in requests], dtype=torch.int32),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        request_rows=torch.tensor([row for row, _, _ in requests], dtype=torch.int64),
        num_tokens=total,
        num_padded_tokens=total,
        input_ids=torch.randint(0, VOCABULARY, (total,), generator=torch.Generator().manual_seed(seed)),
    )
