"""Feed-forward networks: the gated one of dense layers and shared experts, and this rank's block of routed experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dbo_greenlet.all2all import DispatchedTokens, PaddedTokens
from dbo_greenlet.moe.config import DeepseekV2Config

__all__ = ["GatedMLP", "LocalExperts"]


def _gated(gate_up: Tensor) -> Tensor:
    """SwiGLU (arXiv 2002.05202): silu of the first half times the second half of the last dimension."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)); gate and up are one matrix [2 * inner, hidden], gate first."""

    def __init__(self, config: DeepseekV2Config, inner: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * inner, bias=config.mlp_bias)
        self.down_proj = nn.Linear(inner, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, hidden_size] -> [T, hidden_size]."""
        return self.down_proj.forward(_gated(self.gate_up_proj.forward(x)))


class LocalExperts(nn.Module):
    """The routed experts `first` .. `first + count - 1`, their weights stacked: [count, ...]."""

    def __init__(self, config: DeepseekV2Config, first: int, count: int) -> None:
        super().__init__()
        self.first = first
        self.count = count
        inner, hidden = config.moe_intermediate_size, config.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, hidden), requires_grad=False)
        self.down_proj = nn.Parameter(torch.empty(count, hidden, inner), requires_grad=False)

    def forward(self, received: DispatchedTokens | PaddedTokens) -> Tensor:
        """Each row through its expert, in the order and shape of `received.hidden`."""
        if isinstance(received, PaddedTokens):
            return self._padded(received.hidden)
        return self._exact(received)

    def _exact(self, received: DispatchedTokens) -> Tensor:
        """One pair of products per expert that received rows.

        Padding all experts to the fullest one and using a batched product was rejected: with 64 experts and few tokens
        most of that would be padding.
        """
        hidden = received.hidden
        out = torch.empty_like(hidden)
        gate_up_proj, down_proj = self.gate_up_proj, self.down_proj
        begin = 0
        for expert, rows in enumerate(received.counts.tolist()):
            if rows:
                end = begin + rows
                inner = _gated(F.linear(hidden[begin:end], gate_up_proj[expert]))
                torch.mm(inner, down_proj[expert].t(), out=out[begin:end])
                begin = end
        return out

    def _padded(self, hidden: Tensor) -> Tensor:
        """[E, M, hidden_size]: one pair of batched products over all places, taken or not.

        The host reads no count, so it neither waits nor has a shape follow from the data. Rows do not mix in a product,
        so what is in the places that are not taken, NaN included, stays there.
        """
        inner = _gated(torch.bmm(hidden, self.gate_up_proj.transpose(1, 2)))
        return torch.bmm(inner, self.down_proj.transpose(1, 2))
