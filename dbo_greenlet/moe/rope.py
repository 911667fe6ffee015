"""Rotary position embedding as DeepSeek-V2 uses it: interleaved pairs, plain, linear or YaRN frequencies."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from dbo_greenlet.moe.config import DeepseekV2Config, RopeConfig

__all__ = ["RotaryEmbedding", "attention_scale", "inverse_frequencies", "rotate"]


class RotaryEmbedding(nn.Module):
    """Turns positions into the rotations of one step, computed once and shared by all layers.

    A table of all positions was rejected: it costs max_position_embeddings rows (160k for V2) to save one
    multiplication and one `polar` per step.
    """

    inv_freq: Tensor

    def __init__(self, config: DeepseekV2Config, device: torch.device | str) -> None:
        super().__init__()
        frequencies = inverse_frequencies(config.rope, config.qk_rope_head_dim)
        self.register_buffer("inv_freq", frequencies.to(device), persistent=False)
        self.magnitude = rotation_magnitude(config.rope)

    def forward(self, positions: Tensor) -> Tensor:
        """positions int64 [T] -> rotations complex64 [T, qk_rope_head_dim / 2], always float32 precision."""
        angles = positions.to(torch.float32)[:, None] * self.inv_freq
        return torch.polar(torch.full_like(angles, self.magnitude), angles)


def rotate(x: Tensor, rotations: Tensor) -> Tensor:
    """Rotate neighbouring pairs of the last dimension: x [T, ..., D] by rotations [T, D / 2], result in x's dtype.

    The pairs are (0, 1), (2, 3), ...: the interleaved layout in which DeepSeek-V2's projections were trained.
    DeepSeek's published code moves the even elements in front of the odd ones first, which permutes queries and keys
    alike and so leaves every score as it is; here, as in transformers, the order stays.
    """
    # Not view_as_complex: a slice that starts at an odd element cannot be viewed as complex numbers.
    pairs = torch.complex(x[..., 0::2].float(), x[..., 1::2].float())
    between = (1,) * (x.dim() - 2)
    turned = pairs * rotations.view(rotations.shape[0], *between, rotations.shape[1])
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)


def inverse_frequencies(rope: RopeConfig, dim: int) -> Tensor:
    """Radians per position of each pair, float32 [dim / 2].

    Plain: theta^(-2i/dim) (RoFormer, arXiv 2104.09864, eq. 15). Linear: the same over `factor`. YaRN (arXiv
    2309.00071, eq. 17-23): pairs that turn more than `beta_fast` times over the original context keep their frequency,
    those that turn less than `beta_slow` times have it divided by `factor`, and a ramp over the index joins them.
    """
    plain = 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if rope.kind == "default":
        return plain
    stretched = plain / rope.factor
    if rope.kind == "linear":
        return stretched
    low = _pair_that_turns(rope.beta_fast, rope, dim)
    high = _pair_that_turns(rope.beta_slow, rope, dim)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    # Clamped to dim - 1 although there are dim / 2 pairs: so does the code the checkpoints were trained with.
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return stretched * ramp + plain * (1 - ramp)


def _pair_that_turns(rotations: float, rope: RopeConfig, dim: int) -> float:
    """Index (fractional) of the pair that makes `rotations` full turns over the original context."""
    context = rope.original_max_position_embeddings
    return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))


def _mscale(factor: float, weight: float) -> float:
    """YaRN's attention temperature 0.1 ln(factor) + 1 (arXiv 2309.00071, eq. 22), with DeepSeek's weight."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def rotation_magnitude(rope: RopeConfig) -> float:
    """The factor on cos and sin: mscale(mscale) / mscale(mscale_all_dim) for YaRN, else 1.

    This is the rule of DeepSeek's published code. transformers 5.17 uses it only where both weights are given and not
    zero, and mscale(1) otherwise: the two differ where exactly one is given and `mscale` is not 1 or
    `mscale_all_dim` not 0. No published V2 checkpoint does that.
    """
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)


def attention_scale(config: DeepseekV2Config) -> float:
    """The factor on attention scores: qk_head_dim^-0.5 and, with `mscale_all_dim`, its mscale squared."""
    scale: float = config.qk_head_dim**-0.5
    rope = config.rope
    if rope.kind != "default" and rope.mscale_all_dim:
        scale *= _mscale(rope.factor, rope.mscale_all_dim) ** 2
    return scale
