"""The router: which experts a token goes to, and with which weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dbo_greenlet.moe.config import DeepseekV2Config

__all__ = ["Gate"]


class Gate(nn.Module):
    """Softmax router of DeepSeek-V2 (arXiv 2405.04434, eq. 22-26), greedy or limited to the best groups of experts.

    What transformers 5.17 does differently: it ignores `norm_topk_prob`. Here the chosen weights are then divided by
    their sum. `routed_scaling_factor` applies in both cases, as in DeepSeek's later code (VL2, V3) and in vLLM; the
    first published V2 code skipped it when it normalised. All published V2 checkpoints have norm_topk_prob false.
    """

    def __init__(self, config: DeepseekV2Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size), requires_grad=False)
        self._config = config

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [T, hidden_size] -> (expert ids int64 [T, K], weights float32 [T, K]), best expert first.

        Computed in float32 whatever the model's dtype: a bfloat16 score flips close choices.
        """
        config = self._config
        scores = F.linear(hidden.float(), self.weight.float()).softmax(dim=-1)
        if config.topk_method == "group_limited_greedy":
            scores = self._only_best_groups(scores)
        weights, expert_ids = scores.topk(config.num_experts_per_tok, dim=-1)
        if config.norm_topk_prob and config.num_experts_per_tok > 1:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        if config.routed_scaling_factor != 1.0:
            weights = weights * config.routed_scaling_factor
        return expert_ids, weights

    def _only_best_groups(self, scores: Tensor) -> Tensor:
        """Scores [T, experts] with 0 outside the `topk_group` groups whose best expert scores highest.

        Sizes are spelled out because -1 cannot be inferred for a microbatch without tokens.
        """
        config = self._config
        tokens = scores.shape[0]
        grouped = scores.view(tokens, config.n_group, config.n_routed_experts // config.n_group)
        best_groups = grouped.amax(dim=-1).topk(config.topk_group, dim=-1).indices
        outside = torch.ones(tokens, config.n_group, dtype=torch.bool, device=scores.device)
        outside.scatter_(1, best_groups, False)
        return grouped.masked_fill(outside[:, :, None], 0.0).view(tokens, config.n_routed_experts)
