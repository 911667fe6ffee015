"""The DeepSeek-V2 language model over flattened batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dbo_greenlet.batching.inputs import StepInput
from dbo_greenlet.errors import ConfigurationError
from dbo_greenlet.moe.config import DeepseekV2Config
from dbo_greenlet.moe.kv_cache import KVCache
from dbo_greenlet.moe.layers import DecoderLayer
from dbo_greenlet.moe.norm import RMSNorm
from dbo_greenlet.moe.rope import RotaryEmbedding
from dbo_greenlet.moe.step_plan import plan_step

if TYPE_CHECKING:
    from dbo_greenlet.all2all import AllToAll

__all__ = ["DeepseekV2Model"]


class DeepseekV2Model(nn.Module):
    """DeepSeek-V2 for inference: embedding, decoder layers, norm and output head.

    Each rank holds its block of the routed experts (`all2all` says which) and everything else in full. Constructing
    it leaves the weights uninitialised: `loader.load_model` is the way to get one. No parameter requires a gradient.

    Raises `ConfigurationError` if the routed experts cannot be dealt out evenly or `all2all` was made for another
    number of experts.
    """

    def __init__(
        self,
        config: DeepseekV2Config,
        all2all: AllToAll,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        check_expert_placement(config, all2all)
        self.config = config
        self.dtype = dtype
        # Built without storage and then given some: nn.Linear would otherwise fill it with random numbers, which takes
        # time and moves the caller's random generator.
        with torch.device("meta"):
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
            self.layers = nn.ModuleList(
                DecoderLayer(config, layer, all2all) for layer in range(config.num_hidden_layers)
            )
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.requires_grad_(False)
        self.to(dtype).to_empty(device=device)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.rotary_embedding = RotaryEmbedding(config, device)

    def forward(self, step: StepInput, kv_cache: KVCache) -> Tensor:
        """Run one step or one microbatch of it: -> hidden states after the last norm, [P, hidden_size].

        P counts padding tokens; their rows are finite and mean nothing. Inside a step of the scheduler it yields in
        every MoE layer; outside it runs through. Positions are one per token ([P]).

        Raises `ConfigurationError` for a request longer than the cache's rows; errors of the all-to-all pass through.
        """
        if step.inputs_embeds is not None:
            hidden = step.inputs_embeds.to(self.dtype)
        elif step.input_ids is not None:
            hidden = F.embedding(step.input_ids, self.embed_tokens.weight)
        else:
            raise ConfigurationError("a StepInput with neither input_ids nor inputs_embeds; give one of them")
        plan = plan_step(step, kv_cache, self.config.num_attention_heads, self.dtype)
        rotations = self.rotary_embedding.forward(step.positions)
        for layer in self.layers:
            hidden = layer.forward(hidden, rotations, plan, kv_cache)
        return self.norm.forward(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, hidden_size] (the rows to sample from) -> scores [N, vocab_size] in the model's dtype."""
        return self.lm_head.forward(hidden)


def check_expert_placement(config: DeepseekV2Config, all2all: AllToAll) -> None:
    """Raise `ConfigurationError` unless every rank gets the same number of this model's routed experts."""
    experts, ranks = config.n_routed_experts, all2all.world_size
    if experts % ranks:
        divisors = [str(count) for count in range(1, experts + 1) if experts % count == 0]
        raise ConfigurationError(
            f"{experts} routed experts cannot be dealt out evenly to {ranks} expert-parallel ranks; "
            f"use {', '.join(divisors)} ranks"
        )
    if all2all.num_experts != experts or all2all.num_local_experts != experts // ranks:
        raise ConfigurationError(
            f"the all-to-all {all2all.name!r} was made for {all2all.num_experts} experts, "
            f"{all2all.num_local_experts} a rank; the model has {experts}, {experts // ranks} a rank: "
            "make it with num_experts from the model's n_routed_experts"
        )
