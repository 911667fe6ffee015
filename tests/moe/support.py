"""Tiny DeepSeek-V2 checkpoints with a transformers model beside them, and flattened batches made of a few numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import DeepseekV2Config as ReferenceConfig
from transformers import DeepseekV2ForCausalLM

from dbo_greenlet.all2all.loopback import Loopback
from dbo_greenlet.batching.inputs import StepInput
from dbo_greenlet.moe import DeepseekV2Model, KVCache, load_model

VOCABULARY = 64
MAX_LEN = 64  # positions per cache row in these tests
TOLERANCE = 1e-4  # on logits of size 1, float32

BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "topk_method": "greedy",
    "routed_scaling_factor": 1.0,
    "max_position_embeddings": 128,
}


def rope(kind: str, **numbers: float) -> dict[str, object]:
    """Rotary parameters; positions beyond the 16 "original" ones make the scaled kinds differ from the plain one."""
    scaled = {} if kind == "default" else {"factor": 8.0}
    if kind == "yarn":
        scaled |= {"original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1}
    return {"rope_theta": 100.0, "rope_type": kind, **scaled, **numbers}


def make_reference(**overrides: object) -> DeepseekV2ForCausalLM:
    """A transformers model with random weights large enough that every part of it shows in the logits."""
    config = ReferenceConfig(**{**BASE, "rope_parameters": rope("default"), **overrides})
    reference = DeepseekV2ForCausalLM(config).eval()
    randomise(reference)
    return reference


def randomise(reference: nn.Module) -> None:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.copy_(noise * 0.2 + (0.0 if name.endswith("bias") else 1.0))
            elif parameter.numel():
                parameter.copy_(noise / parameter.shape[-1] ** 0.5 * (3.0 if "gate.weight" in name else 1.0))


def reference_logits(reference: DeepseekV2ForCausalLM, ids: Sequence[int]) -> Tensor:
    """Logits [len(ids), vocabulary] of one forward over the whole sequence, without a cache."""
    with torch.no_grad():
        return reference(torch.tensor([list(ids)]), use_cache=False).logits[0]


def token_ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass(frozen=True)
class Part:
    """The new tokens of one request in a step: cache row, tokens already cached, new ids."""

    row: int
    past: int
    ids: list[int] = field(default_factory=list)


def make_step(parts: Sequence[Part], padding: int = 0, request_padding: int = 0) -> StepInput:
    lengths = [len(part.ids) for part in parts]
    total = sum(lengths)
    positions = [part.past + j for part in parts for j in range(len(part.ids))]
    slots = [part.row * MAX_LEN + part.past + j for part in parts for j in range(len(part.ids))]
    contexts = [part.past + len(part.ids) for part in parts]
    offsets = [sum(lengths[:r]) for r in range(len(parts) + 1)]
    return StepInput(
        positions=torch.tensor(positions + [0] * padding, dtype=torch.int64),
        query_start_loc=torch.tensor(offsets + [total] * request_padding, dtype=torch.int32),
        seq_lens=torch.tensor(contexts + [0] * request_padding, dtype=torch.int32),
        slot_mapping=torch.tensor(slots + [-1] * padding, dtype=torch.int64),
        request_rows=torch.tensor([part.row for part in parts] + [-1] * request_padding, dtype=torch.int64),
        num_tokens=total,
        num_padded_tokens=total + padding,
        input_ids=torch.tensor([i for part in parts for i in part.ids] + [0] * padding, dtype=torch.int64),
        num_requests=len(parts),
    )


class Loaded:
    """A checkpoint folder, the transformers model it was saved from, and ours loaded from it."""

    def __init__(self, folder: Path, reference: DeepseekV2ForCausalLM) -> None:
        self.folder = folder
        self.reference = reference
        self.model: DeepseekV2Model = load_model(folder, Loopback(reference.config.n_routed_experts))

    def cache(self, rows: int = 4, **options: bool) -> KVCache:
        return KVCache(self.model.config, rows, MAX_LEN, **options)

    def logits(self, step: StepInput, cache: KVCache) -> Tensor:
        return self.model.logits(self.model(step, cache))

    def full_logits(self, ids: list[int]) -> Tensor:
        """Ours, one prefill of one request in a cache of its own."""
        return self.logits(make_step([Part(1, 0, ids)]), self.cache())


def assert_close(ours: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    assert ours.shape == expected.shape
    assert (ours - expected).abs().max().item() < tolerance
