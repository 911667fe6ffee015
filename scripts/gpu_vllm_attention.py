"""Variable-length attention in plain torch, in the place of vLLM's compiled FlashAttention (`vllm.vllm_flash_attn`).

scripts/vllm_bundle.py puts this file where the compiled package would be, which weighs 450 MB. In the runs of
scripts/gpu_vllm.py vLLM reaches it for the prefill of multi-head latent attention alone, on prompts of a few tokens:
right, in float32, one sequence at a time, slow, and the same whether microbatches are carried by threads or greenlets.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch

FA2_AVAILABLE = True
FA3_AVAILABLE = False


def is_fa_version_supported(fa_version: int, *_: Any, **__: Any) -> bool:
    return fa_version == 2


def fa_version_unsupported_reason(fa_version: int, *_: Any, **__: Any) -> str | None:
    return None if fa_version == 2 else "only the interface of version 2 is here, without compiled kernels"


def get_scheduler_metadata(*_: Any, **__: Any) -> None:
    return None


def compile_flash_attn_varlen_func_from_specs(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("compiled FlashAttention is not in this bundle")


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    max_seqlen_q: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_k: int | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_softmax_lse: bool = False,
    out: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(q k^T scale) v per sequence; q (tokens, heads, d), k (tokens, key heads, d), v (tokens, key heads, e).

    cu_seqlens_q and cu_seqlens_k hold the sequences' bounds (sequences + 1). With `causal`, query i of m sees the
    keys up to i + n - m of n. Returns (tokens, heads, e), and with `return_softmax_lse` the logarithm of each
    softmax's denominator, (heads, tokens), too.
    """
    tokens, heads, _width = q.shape
    if out is None:
        out = q.new_empty(tokens, heads, v.shape[-1])
    denominators = torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    bounds_q, bounds_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for sequence in range(len(bounds_q) - 1):
        here = slice(bounds_q[sequence], bounds_q[sequence + 1])
        there = slice(bounds_k[sequence], bounds_k[sequence + 1])
        queries, keys, values = (x.transpose(0, 1).float() for x in (q[here], k[there], v[there]))
        if keys.shape[0] != heads:
            keys, values = (x.repeat_interleave(heads // x.shape[0], dim=0) for x in (keys, values))
        scores = queries @ keys.transpose(1, 2) * scale
        if causal:
            m, n = scores.shape[-2:]
            rows = torch.arange(m, device=q.device)[:, None] + (n - m)
            scores = scores.masked_fill(torch.arange(n, device=q.device)[None, :] > rows, float("-inf"))
        denominators[:, here] = torch.logsumexp(scores, dim=-1)
        out[here] = (torch.softmax(scores, dim=-1) @ values).transpose(0, 1).to(out.dtype)
    return (out, denominators) if return_softmax_lse else out


# vLLM imports the functions from the package and from this submodule of it.
flash_attn_interface = types.ModuleType(f"{__name__}.flash_attn_interface")
flash_attn_interface.__dict__.update({name: thing for name, thing in globals().items() if not name.startswith("__")})
sys.modules[flash_attn_interface.__name__] = flash_attn_interface
