"""Routing against a slow plain version written from the paper: one token and one expert at a time."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from dbo_greenlet.all2all.loopback import Loopback
from dbo_greenlet.moe.config import DeepseekV2Config
from dbo_greenlet.moe.gate import Gate
from dbo_greenlet.moe.layers import MoELayer
from tests.moe.support import Loaded, assert_close

GROUPED = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
SETTINGS = [
    {},
    {"norm_topk_prob": True},
    {"norm_topk_prob": True, "routed_scaling_factor": 3.0},
    {"norm_topk_prob": True, "num_experts_per_tok": 1, "routed_scaling_factor": 3.0},
    {**GROUPED, "routed_scaling_factor": 16.0},
    {**GROUPED, "norm_topk_prob": True},
    {**GROUPED, "topk_group": 1, "num_experts_per_tok": 2},
    {**GROUPED, "topk_group": 4},
]


def slow_route(config: DeepseekV2Config, weight: list[list[float]], token: list[float]) -> dict[int, float]:
    """Expert -> weight for one token."""
    logits = [sum(w * x for w, x in zip(row, token, strict=True)) for row in weight]
    total = sum(math.exp(logit) for logit in logits)
    scores = {expert: math.exp(logit) / total for expert, logit in enumerate(logits)}
    size = len(scores) // config.n_group
    best_of_group = {group: max(scores[group * size + i] for i in range(size)) for group in range(config.n_group)}
    groups = sorted(best_of_group, key=best_of_group.__getitem__, reverse=True)[: config.topk_group]
    allowed = [expert for expert in scores if expert // size in groups]
    chosen = sorted(allowed, key=scores.__getitem__, reverse=True)[: config.num_experts_per_tok]
    weights = {expert: scores[expert] for expert in chosen}
    if config.norm_topk_prob and len(chosen) > 1:
        total = sum(weights.values())
        weights = {expert: value / total for expert, value in weights.items()}
    return {expert: value * config.routed_scaling_factor for expert, value in weights.items()}


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_gate_chooses_as_the_slow_version(v2: Loaded, settings: dict[str, object]) -> None:
    plain = {"topk_method": "greedy", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
    config = dataclasses.replace(v2.model.config, **{**plain, **settings})
    gate = Gate(config)
    torch.manual_seed(3)
    gate.weight.data.normal_()
    hidden = torch.randn(50, config.hidden_size) * 0.5
    expert_ids, weights = gate(hidden)
    assert expert_ids.dtype == torch.int64 and weights.dtype == torch.float32
    matrix = gate.weight.double().tolist()
    for token, ids, values in zip(hidden.double().tolist(), expert_ids.tolist(), weights.tolist(), strict=True):
        expected = slow_route(config, matrix, token)
        assert ids == list(expected)  # best first
        assert values == pytest.approx(list(expected.values()), rel=1e-4)


def test_bfloat16_is_routed_in_float32(v2: Loaded) -> None:
    gate = Gate(v2.model.config)
    torch.manual_seed(4)
    gate.weight.data.normal_()
    gate.to(torch.bfloat16)
    hidden = torch.randn(200, 32).to(torch.bfloat16)
    exact = Gate(v2.model.config)
    exact.weight.data.copy_(gate.weight.float())
    for ours, expected in zip(gate(hidden), exact(hidden.float()), strict=True):
        assert torch.equal(ours, expected)


def test_the_moe_layer_equals_a_loop_over_tokens_and_experts(v2: Loaded) -> None:
    config = dataclasses.replace(v2.model.config, norm_topk_prob=True)
    layer = MoELayer(config, 1, Loopback(8))
    layer.requires_grad_(False)
    torch.manual_seed(5)
    for parameter in layer.parameters():
        parameter.normal_(std=0.3)
    hidden = torch.randn(11, 32)

    def swiglu(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up[: len(gate_up) // 2] @ x, gate_up[len(gate_up) // 2 :] @ x
        return down @ (gate * torch.sigmoid(gate) * up)

    expected = torch.zeros(11, 32, dtype=torch.float64)
    shared = layer.shared_experts
    assert shared is not None
    for row, x in enumerate(hidden.double()):
        for expert, weight in slow_route(config, layer.gate.weight.double().tolist(), x.tolist()).items():
            gate_up, down = layer.experts.gate_up_proj[expert].double(), layer.experts.down_proj[expert].double()
            expected[row] += weight * swiglu(x, gate_up, down)
        expected[row] += swiglu(x, shared.gate_up_proj.weight.double(), shared.down_proj.weight.double())
    assert_close(layer(hidden), expected.float())
    assert layer(hidden[:0]).shape == (0, 32)
