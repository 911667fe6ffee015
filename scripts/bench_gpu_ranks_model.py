"""The model of `bench_gpu_ranks.py`, its batch, and what its numbers are compared with."""

from __future__ import annotations

import zlib
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dbo_greenlet import Scheduler
from dbo_greenlet.batching import StepInput
from dbo_greenlet.moe import DeepseekV2Config, DeepseekV2Model
from dbo_greenlet.moe.config import RopeConfig

EXPERTS, CHOICES, HIDDEN, INNER = 16, 4, 2048, 512


def make_config(layers: int) -> Any:
    return DeepseekV2Config(
        vocab_size=1024,
        hidden_size=HIDDEN,
        intermediate_size=2 * INNER,
        moe_intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=8,
        q_lora_rank=None,
        kv_lora_rank=256,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        n_routed_experts=EXPERTS,
        n_shared_experts=1,
        num_experts_per_tok=CHOICES,
        first_k_dense_replace=1,
        moe_layer_freq=1,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        rms_norm_eps=1e-6,
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=False,
        max_position_embeddings=64,
        rope=RopeConfig(),
        bos_token_id=None,
        eos_token_ids=(),
    )


def weights(name: str, shape: tuple[int, ...], device: Any) -> Tensor:
    """The same random weights for a name on every rank; experts get theirs as a block of all."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    noise = torch.randn(shape, generator=generator, device=device)
    return noise / shape[-1] ** 0.5 if len(shape) > 1 else 1 + 0.1 * noise


def make_model(config: Any, all_to_all: Any, device: Any, dtype: str = "bfloat16") -> Any:
    """The model with weights that bfloat16 holds exactly, whatever its own dtype."""
    model = DeepseekV2Model(config, all_to_all, getattr(torch, dtype), device).eval()
    first = all_to_all.rank * all_to_all.num_local_experts
    for name, parameter in model.named_parameters():
        if ".mlp.experts." in name:
            whole = weights(name, (EXPERTS, *parameter.shape[1:]), device).bfloat16()
            parameter.copy_(whole[first : first + all_to_all.num_local_experts])
        else:
            parameter.copy_(weights(name, tuple(parameter.shape), device).bfloat16())
    return model


def decode_step(rank: int, tokens: int, row_length: int, device: Any) -> Any:
    """`tokens` requests with one new token each, behind 15 others."""
    rows = torch.arange(tokens)
    ids = torch.randint(0, 1024, (tokens,), generator=torch.Generator().manual_seed(rank))
    starts, lengths = torch.arange(tokens + 1, dtype=torch.int32), torch.full((tokens,), 16, dtype=torch.int32)
    return StepInput(
        positions=torch.full((tokens,), 15, device=device),
        query_start_loc=starts.to(device),
        seq_lens=lengths.to(device),
        slot_mapping=(rows * row_length + 15).to(device),
        request_rows=rows.to(device),
        num_tokens=tokens,
        num_padded_tokens=tokens,
        input_ids=ids.to(device),
        query_start_loc_cpu=starts,
        seq_lens_cpu=lengths,
    )


def layer_errors(model: Any, ways: list[str], tokens: int, rank: int, device: Any) -> dict[str, float]:
    """One MoE layer against float64, for two microbatches (or both at once) in each way; a graph as its eager step."""
    name = f"layers.{len(model.layers) - 1}.mlp"
    mlp = model.layers[-1].mlp
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(50 + rank)).bfloat16().to(device)

    def gated(rows: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = (rows @ gate_up.T).chunk(2, dim=-1)
        return (F.silu(gate) * up) @ down.T

    shared = mlp.shared_experts
    expected = gated(x.double(), shared.gate_up_proj.weight.double(), shared.down_proj.weight.double())
    ids, weight = mlp.gate.forward(x)
    gate_up = weights(f"{name}.experts.gate_up_proj", (EXPERTS, 2 * INNER, HIDDEN), device).bfloat16()
    down = weights(f"{name}.experts.down_proj", (EXPERTS, HIDDEN, INNER), device).bfloat16()
    for expert in range(EXPERTS):
        share = (weight.double() * (ids == expert)).sum(1, keepdim=True)
        expected += share * gated(x.double(), gate_up[expert].double(), down[expert].double())
    halves = x.split(tokens // 2)
    entries = [partial(mlp.forward, half) for half in halves]
    runs = {
        "unsplit": lambda: mlp.forward(x),
        "in turn": lambda: torch.cat([entry() for entry in entries]),
        "greenlets": lambda: torch.cat(Scheduler().run(entries).outputs),
        "threads": lambda: torch.cat(Scheduler(carrier="thread").run(entries).outputs),
    }
    return {way: relative(runs[way](), expected) for way in ways if way in runs}


def relative(ours: Tensor, expected: Tensor) -> float:
    return float((ours.double() - expected.double()).norm() / expected.double().norm())


def median_error(ours: Tensor, expected: Tensor) -> float:
    """The median over the tokens of each one's relative error; NaN if one is."""
    of_token = (ours.double() - expected.double()).norm(dim=1) / expected.double().norm(dim=1)
    return float(of_token.median() if of_token.isfinite().all() else of_token.sum())


def largest(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs.double()).abs().max())
