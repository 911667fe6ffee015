"""The decoder layer, and the MoE layer whose two all-to-alls are the yield points of a step.

Inner layers are called by `.forward`, not by `nn.Module.__call__`, everywhere in `moe/`: each `__call__` between a
microbatch's entry and its yield adds about 1.8 kB of C stack that is copied at every switch, where a call from Python
to Python adds none. The price is documented behaviour: forward hooks on inner layers do not run. The model itself may
be called either way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from dbo_greenlet.moe.attention import LatentAttention
from dbo_greenlet.moe.config import DeepseekV2Config
from dbo_greenlet.moe.experts import GatedMLP, LocalExperts
from dbo_greenlet.moe.gate import Gate
from dbo_greenlet.moe.kv_cache import KVCache
from dbo_greenlet.moe.norm import RMSNorm
from dbo_greenlet.moe.step_plan import StepPlan
from dbo_greenlet.yields import dbo_enabled, dbo_maybe_run_recv_hook, dbo_register_recv_hook, dbo_yield

if TYPE_CHECKING:
    from dbo_greenlet.all2all import AllToAll

__all__ = ["DecoderLayer", "MoELayer"]

NO_EXPERT = -1  # an expert id by which the all-to-all sends a token nowhere


class MoELayer(nn.Module):
    """Routed experts behind an all-to-all, plus the shared experts that every token passes.

    Inside a step it yields twice, at the sites "layer{L}.dispatch" and "layer{L}.combine": after each send, with the
    receive left to a recv hook. A microbatch without tokens takes part all the same, because other ranks wait for
    it. Outside a step nothing yields and the receives are finished on the spot.
    """

    def __init__(self, config: DeepseekV2Config, layer: int, all2all: AllToAll) -> None:
        super().__init__()
        self._all2all = all2all
        # Made once: a label built per call would cost more than the yield's own bookkeeping.
        self._dispatch_site = f"layer{layer}.dispatch"
        self._combine_site = f"layer{layer}.combine"
        self.gate = Gate(config)
        self.experts = LocalExperts(config, all2all.rank * all2all.num_local_experts, all2all.num_local_experts)
        shared = config.moe_intermediate_size * config.n_shared_experts
        self.shared_experts = GatedMLP(config, shared) if shared else None

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """x [P, hidden_size] -> [P, hidden_size]. Tokens marked in `padding` (bool [P, 1]) pass no routed expert.

        Raises what the all-to-all raises, for example `RankFailedError`.
        """
        expert_ids, weights = self.gate.forward(x)
        if padding is not None:
            expert_ids = expert_ids.masked_fill(padding, NO_EXPERT)
        in_step = dbo_enabled()

        # The sibling's combine receive, if it left one: complete before this send, as the documented order has it.
        dbo_maybe_run_recv_hook()
        dispatch = self._all2all.dispatch_send(x, expert_ids, weights)
        if in_step:
            dbo_register_recv_hook(dispatch.finish_dispatch)
            dbo_yield(self._dispatch_site)
        else:
            dispatch.finish_dispatch()

        expert_out = self.experts.forward(dispatch.tokens())
        dbo_maybe_run_recv_hook()
        dispatch.combine_send(expert_out)
        # Between send and yield, so that it runs while the combine travels.
        shared_out = None if self.shared_experts is None else self.shared_experts.forward(x)
        if in_step:
            dbo_register_recv_hook(dispatch.finish_combine)
            dbo_yield(self._combine_site)
        else:
            dispatch.finish_combine()

        routed_out = dispatch.combined()
        return routed_out if shared_out is None else routed_out + shared_out


class DecoderLayer(nn.Module):
    """Attention and feed-forward network, each behind a norm and with a residual connection."""

    def __init__(self, config: DeepseekV2Config, layer: int, all2all: AllToAll) -> None:
        super().__init__()
        self._layer = layer
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = LatentAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        # Two classes under one name, because that is what the checkpoint calls both.
        self.mlp: MoELayer | GatedMLP
        if config.is_moe_layer(layer):
            self.mlp = MoELayer(config, layer, all2all)
        else:
            self.mlp = GatedMLP(config, config.intermediate_size)

    def forward(self, hidden: Tensor, rotations: Tensor, plan: StepPlan, cache: KVCache) -> Tensor:
        """hidden [P, hidden_size] -> [P, hidden_size]; yields if the layer is a MoE layer and a step runs."""
        normed = self.input_layernorm.forward(hidden)
        hidden = hidden + self.self_attn.forward(normed, rotations, plan, cache, self._layer)
        normed = self.post_attention_layernorm.forward(hidden)
        mlp = self.mlp
        return hidden + (mlp.forward(normed, plan.padding) if isinstance(mlp, MoELayer) else mlp.forward(normed))
