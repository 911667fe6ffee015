"""Rotary frequencies and rotations against their definitions, and what transformers computes."""

from __future__ import annotations

import cmath
import math

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dbo_greenlet.moe.config import DeepseekV2Config, RopeConfig
from dbo_greenlet.moe.rope import inverse_frequencies, rotate, rotation_magnitude
from tests.moe.support import ReferenceConfig, rope


def test_a_rotation_turns_neighbouring_pairs() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 3, 8)
    angles = torch.randn(5, 4)
    turned = rotate(x, torch.polar(torch.full_like(angles, 1.5), angles))
    for t in range(5):
        for h in range(3):
            for pair in range(4):
                point = complex(x[t, h, 2 * pair].item(), x[t, h, 2 * pair + 1].item())
                expected = point * cmath.rect(1.5, angles[t, pair].item())
                assert turned[t, h, 2 * pair].item() == pytest.approx(expected.real, abs=1e-5)
                assert turned[t, h, 2 * pair + 1].item() == pytest.approx(expected.imag, abs=1e-5)


def test_any_slice_can_be_rotated() -> None:
    # An odd offset and an odd stride cannot be viewed as complex numbers in place, nor can one row at an odd offset.
    wide = torch.randn(4, 2, 11)
    rotations = torch.polar(torch.ones(4, 2), torch.randn(4, 2))
    assert torch.equal(rotate(wide[..., 7:], rotations), rotate(wide[..., 7:].clone(), rotations))
    assert torch.equal(rotate(wide[:1, 0, 7:], rotations[:1]), rotate(wide[:1, 0, 7:].clone(), rotations[:1]))
    assert rotate(wide[:0, :, 7:], rotations[:0]).shape == (0, 2, 4)
    assert rotate(wide.to(torch.bfloat16)[..., 7:], rotations).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "numbers",
    [
        {},
        {"factor": 40.0, "original_max_position_embeddings": 4096, "rope_theta": 10000.0},
        {"mscale": 0.707, "mscale_all_dim": 1.0},
        {"truncate": False},
        {"attention_factor": 1.3},
        {"beta_fast": 1.0, "beta_slow": 1.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("dim", [4, 64])
def test_yarn_equals_transformers(numbers: dict[str, float], dim: int) -> None:
    reference = ReferenceConfig(
        qk_rope_head_dim=dim, num_experts_per_tok=2, rope_parameters=rope("yarn", **numbers), architectures=None
    )
    frequencies, magnitude = ROPE_INIT_FUNCTIONS["yarn"](reference)
    ours = DeepseekV2Config.from_transformers(reference).rope
    torch.testing.assert_close(inverse_frequencies(ours, dim), frequencies, rtol=1e-6, atol=0)
    assert rotation_magnitude(ours) == pytest.approx(magnitude)


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones() -> None:
    config = RopeConfig("yarn", theta=10000.0, factor=40.0, original_max_position_embeddings=4096)
    plain = inverse_frequencies(RopeConfig(theta=10000.0), 64)
    ratio = inverse_frequencies(config, 64) / plain
    turns = plain * 4096 / (2 * math.pi)
    assert ratio[turns > 40] == pytest.approx([1.0] * int((turns > 40).sum()))
    assert ratio[turns < 0.7] == pytest.approx([1 / 40] * int((turns < 0.7).sum()))
    assert (ratio.diff() <= 1e-6).all()
    assert torch.equal(inverse_frequencies(RopeConfig("linear", theta=10000.0, factor=4.0), 64), plain / 4)


def test_mscale_without_mscale_all_dim_follows_deepseek_not_transformers() -> None:
    # DeepSeek: mscale(0.5) / mscale(0) = 0.05 ln 8 + 1. transformers drops the 0.5 unless both are given.
    numbers = rope("yarn", mscale=0.5)
    reference = ReferenceConfig(num_experts_per_tok=2, rope_parameters=numbers)
    ours = rotation_magnitude(DeepseekV2Config.from_transformers(reference).rope)
    assert ours == pytest.approx(0.05 * math.log(8) + 1)
    assert ROPE_INIT_FUNCTIONS["yarn"](reference)[1] == pytest.approx(0.1 * math.log(8) + 1)
