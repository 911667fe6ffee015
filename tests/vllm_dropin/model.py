"""A model of a few layers that is vLLM's own where it matters: attention-like part, then vLLM's `MoERunner`.

The MoE of a layer goes the way of a CUDA deployment: `torch.ops.vllm.moe_forward[_shared]` -> `MoERunner._forward_impl`
-> `RoutedExperts.forward_modular` -> `FusedMoEModularMethod` -> `FusedMoEKernel` -> vLLM's DeepEP class of the wanted
kind. vLLM selects the operator on CUDA only and calls its function directly on the CPU; the runner's `_forward_entry`
is set to the operator here. Ours: the routing function, the arithmetic of the experts and the fake `deep_ep` below.

The attention-like part writes its tokens' keys into a cache and reads back all keys of the request up to each token, so
a request cut by the split is right only if the first microbatch wrote before the second one reads; the cache starts as
NaN.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe import modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FUSED_MOE_UNQUANTIZED_CONFIG,
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
)
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.fused_moe_modular_method import FusedMoEModularMethod
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.runner import moe_runner
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)
from vllm.sequence import IntermediateTensors

from tests.vllm_dropin import fake_deep_ep
from tests.vllm_dropin.fake_cuda import recorder

EXPERTS, TOP_K, INTERMEDIATE, VOCABULARY = 4, 2, 8, 32
#: DeepEP's low-latency kernels take a list of hidden sizes, vLLM checks it; high throughput takes any
HIDDEN = {"LL": 2048, "HT": 256}
DTYPE = torch.bfloat16


def _swiglu(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    gate, up = (x.float() @ w1.float().T).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up) @ w2.float().T


class _Experts(mk.FusedMoEExpertsModular):
    """What the two formats share: which configurations they take is asked by vLLM's selection only."""

    _supports_current_device = _supports_no_act_and_mul = staticmethod(lambda: True)
    _supports_quant_scheme = staticmethod(lambda weight, activation: True)
    _supports_activation = staticmethod(lambda activation: True)
    _supports_parallel_config = staticmethod(lambda config: True)


class RowExperts(_Experts):
    """Standard format: rows [M, H] with their expert ids [M, K]; weights and sums itself."""

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    def workspace_shapes(self, M, N, K, topk, num_experts, num_local, meta, activation):
        return (0,), (0,), (M, K)

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceNoOP()

    def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, *args, **kwargs) -> None:
        recorder().work("experts", len(hidden_states))
        total = torch.zeros(hidden_states.shape, dtype=torch.float32)
        for expert in range(len(w1)):
            weight = (topk_weights * (topk_ids == expert)).sum(dim=1, keepdim=True)
            total += weight * _swiglu(hidden_states, w1[expert], w2[expert])
        output.copy_(total)


class BatchedExperts(_Experts):
    """Batched format: slots [experts, slots, H]; the combine weights and sums."""

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.BatchedExperts

    def workspace_shapes(self, M, N, K, topk, num_experts, num_local, meta, activation):
        return (0,), (0,), (num_local, M, K)

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceDelegate()

    def apply(self, output, hidden_states, w1, w2, *args, expert_tokens_meta=None, **kwargs) -> None:
        recorder().work("experts", hidden_states.size(1))
        for expert in range(len(w1)):
            output[expert] = _swiglu(hidden_states[expert], w1[expert], w2[expert]).to(output.dtype)


class Router(BaseRouter):
    """Softmax over the logits, the largest `TOP_K`."""

    @property
    def routing_method_type(self) -> RoutingMethodType:
        return RoutingMethodType.Default

    def _compute_routing(self, hidden_states, router_logits, indices_type, *, input_ids=None):
        recorder().work("router", len(router_logits))
        weights, ids = torch.softmax(router_logits.float(), dim=-1).topk(self.top_k, dim=-1)
        return weights, ids if indices_type is None else ids.to(indices_type)


class RoutedExperts(torch.nn.Module):
    """The part of vLLM's class that holds weights; its `forward_modular` is vLLM's own."""

    def __init__(self, moe_config: FusedMoEConfig, kernel: mk.FusedMoEKernel, generator: torch.Generator) -> None:
        super().__init__()
        hidden = moe_config.hidden_dim
        self.w13_weight = _random(generator, EXPERTS, 2 * INTERMEDIATE, hidden) * 0.05
        self.w2_weight = _random(generator, EXPERTS, hidden, INTERMEDIATE) * 0.05
        self.activation, self.global_num_experts = moe_config.activation, moe_config.num_experts
        self.apply_router_weight_on_input, self.expert_map = False, None
        base = _Weights(moe_config)
        base.moe_quant_config = FUSED_MOE_UNQUANTIZED_CONFIG
        self.quant_method = FusedMoEModularMethod(base, kernel)

    def _ensure_moe_quant_config_init(self) -> None:
        """Set at construction."""

    def forward_modular(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts as Real

        return Real.forward_modular(self, *args, **kwargs)


class _Weights(FusedMoEMethodBase):
    """The quantisation method that a modular kernel takes the place of."""

    def create_weights(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        return self.moe_quant_config


class SharedMlp(torch.nn.Module):
    def __init__(self, generator: torch.Generator, hidden: int) -> None:
        super().__init__()
        self.w1 = _random(generator, 2 * INTERMEDIATE, hidden) * 0.05
        self.w2 = _random(generator, hidden, INTERMEDIATE) * 0.05

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        recorder().work("shared_experts", len(x))
        return _swiglu(x, self.w1, self.w2).to(x.dtype)


def _random(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator).to(DTYPE)


def moe_layer(
    name: str,
    backend: str,
    config: Any,
    generator: torch.Generator,
    *,
    slots: int,
    shared: bool,
    runner_class: type = moe_runner.MoERunner,
    router: BaseRouter | None = None,
    **more: Any,
) -> Any:
    """vLLM's `MoERunner` on a modular kernel with vLLM's prepare/finalize class of `backend` ("HT" or "LL")."""
    high_throughput, low_latency = fake_deep_ep.import_deep_ep_classes()
    parallel = FusedMoEParallelConfig(
        tp_size=1, pcp_size=1, dp_size=2, ep_size=1, tp_rank=0, pcp_rank=0, dp_rank=0, ep_rank=0, sp_size=1,
        use_ep=True, enable_eplb=False,
        all2all_backend={"HT": "deepep_high_throughput", "LL": "deepep_low_latency"}[backend],
    )  # fmt: skip
    moe_config = FusedMoEConfig(
        num_experts=EXPERTS, experts_per_token=TOP_K, hidden_dim=HIDDEN[backend], intermediate_size=INTERMEDIATE,
        num_local_experts=EXPERTS, num_logical_experts=EXPERTS, activation=MoEActivation.SILU, device="cpu",
        routing_method=RoutingMethodType.Default, moe_parallel_config=parallel, in_dtype=DTYPE, max_num_tokens=slots,
    )  # fmt: skip
    buffer = fake_deep_ep.Buffer(EXPERTS, slots)
    if backend == "HT":
        kernel = mk.FusedMoEKernel(
            high_throughput(buffer, num_dispatchers=2, dp_size=2, rank_expert_offset=0),
            RowExperts(moe_config, FUSED_MOE_UNQUANTIZED_CONFIG),
        )
    else:
        kernel = mk.FusedMoEKernel(
            low_latency(buffer, max_tokens_per_rank=slots, num_dispatchers=1),
            BatchedExperts(moe_config, FUSED_MOE_UNQUANTIZED_CONFIG, max_num_tokens=slots, num_dispatchers=1),
        )
    with set_current_vllm_config(config):
        runner = runner_class(
            name,
            moe_config,
            router or Router(TOP_K, EXPERTS),
            RoutedExperts(moe_config, kernel, generator),
            enable_dbo=True,
            shared_experts=SharedMlp(generator, HIDDEN[backend]) if shared else None,
            **more,
        )
    operators = torch.ops.vllm
    runner._forward_entry = operators.moe_forward_shared if shared else operators.moe_forward
    return runner


class Attention(torch.nn.Module):
    """Mean over the keys of the request up to each token; writes the keys of its own tokens first."""

    def __init__(self, index: int, slots: int, hidden: int) -> None:
        super().__init__()
        self.index = index
        self.cache = torch.full((slots, hidden), float("nan"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        context = get_forward_context()
        recorder().work(f"layer{self.index}.attention", len(x))
        metadata = context.attn_metadata
        slots = context.slot_mapping[f"layer{self.index}"]
        real = slots >= 0
        self.cache[slots[real]] = x[real].float()
        out = x.clone()
        starts, lengths = metadata["query_start_loc"].tolist(), metadata["seq_lens"].tolist()
        local = metadata.get("dcp_local_seq_lens")
        for request, row in enumerate(metadata["block_table"][:, 0].tolist()):
            begin, end, length = starts[request], starts[request + 1], lengths[request]
            for token in range(begin, end):
                position = length - (end - token)
                if position < 0 or not real[token]:
                    continue
                keys = self.cache[row * metadata["max_len"] : row * metadata["max_len"] + position + 1]
                out[token] = (x[token].float() + keys.mean(dim=0)).to(DTYPE)
            if local is not None:
                out[begin:end] += local[request].to(DTYPE) / 16
        if context.is_padding is not None:
            out = torch.where(context.is_padding[:, None], x, out)
        return out


class Layer(torch.nn.Module):
    def __init__(self, index: int, backend: str, config: Any, generator: torch.Generator, kv_slots: int, slots: int,
                 shared: bool) -> None:  # fmt: skip
        super().__init__()
        hidden = HIDDEN[backend]
        self.attention = Attention(index, kv_slots, hidden)
        self.gate = _random(generator, EXPERTS, hidden) * 0.1
        self.moe = moe_layer(f"layer{index}.experts", backend, config, generator, slots=slots, shared=shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attention(x)
        return x + self.moe(x.clone(), x.float() @ self.gate.float().T)


class TinyMoe(torch.nn.Module):
    """The whole model: `output` is "hidden", "aux" (hidden states and those of every layer) or "intermediate"."""

    def __init__(self, config: Any, *, backend: str = "LL", layers: int = 1, output: str = "hidden",
                 shared: bool = True, kv_slots: int = 256, slots: int = 8) -> None:  # fmt: skip
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.hidden_size = HIDDEN[backend]
        self.output = output
        self.embedding = _random(generator, VOCABULARY, self.hidden_size)
        self.layers = torch.nn.ModuleList(
            Layer(index, backend, config, generator, kv_slots, slots, shared) for index in range(layers)
        )
        #: called with the place, e.g. "begin" or "layer1": tests raise, look or wait here
        self.hook = lambda place: None

    def forward(self, input_ids=None, positions=None, intermediate_tensors=None, inputs_embeds=None, **extra):
        arguments = dict(input_ids=input_ids, positions=positions, intermediate_tensors=intermediate_tensors,
                         inputs_embeds=inputs_embeds, **extra)  # fmt: skip
        out = self.compute(**arguments)
        graph = recorder().graph
        if graph is not None:
            context = get_forward_context()
            graph.programs.append(lambda: self.rerun(context, arguments, out))
        return out

    def rerun(self, context: Any, arguments: dict[str, Any], out: Any) -> None:
        """Replay of what was captured: the same microbatch on what its input tensors hold now."""
        from vllm.forward_context import override_forward_context

        with override_forward_context(context):
            for old, new in zip(tensors_of(out), tensors_of(self.compute(**arguments)), strict=True):
                old.copy_(new)

    def compute(self, input_ids, positions, intermediate_tensors, inputs_embeds, scale=None) -> Any:
        self.hook("begin")
        if intermediate_tensors is not None:
            x = intermediate_tensors["hidden_states"] + intermediate_tensors["residual"]
        else:
            x = inputs_embeds if inputs_embeds is not None else self.embedding[input_ids.long()]
        places = positions.float()
        if positions.ndim == 2:
            places = (places * torch.tensor([[1], [2], [4]])).sum(dim=0)
        x = x + torch.sin(places)[:, None].to(DTYPE)
        if scale is not None:
            x = x * scale
        kept = []
        for index, layer in enumerate(self.layers):
            self.hook(f"layer{index}")
            x = layer(x)
            kept.append(x)
        self.hook("end")
        if self.output == "aux":
            return x, *kept
        if self.output == "intermediate":
            return IntermediateTensors({"hidden_states": x, "residual": x / 2})
        return x


def tensors_of(output: Any) -> list[torch.Tensor]:
    """The tensors of any kind of model output, in a fixed order."""
    if isinstance(output, IntermediateTensors):
        return [output.tensors[key] for key in sorted(output.tensors)]
    return list(output) if isinstance(output, tuple | list) else [output]
