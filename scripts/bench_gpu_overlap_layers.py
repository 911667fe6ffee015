"""The program that scripts/bench_gpu_overlap.py times: MoE layers in the shapes of DeepSeek-V2-Lite and DeepSeek-V3.

One layer, for one microbatch of T tokens:

    attend   RMSNorm, MLA's projections round one attention call, residual; RMSNorm, shared experts, residual; gather
             the rows to send
    dispatch the wire
    experts  two grouped products over this rank's experts, [T * top_k] rows
    combine  the wire
    unpack   weighted sum of a token's rows, residual

The rank talks to itself: what it would receive from its peers on average is what it sends. The routing is drawn once,
uniformly over this rank's experts; the gate is not computed. All tokens attend to one given context of keys and values,
whose length sets how long attention takes; the new tokens' own keys are computed and not attended to. Weights are
random and of two kinds, taken in turn by the layers: the experts' weights of one layer are larger than the L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from dbo_greenlet import Scheduler, make_ubatch_contexts
from dbo_greenlet.yields import dbo_switch_to_compute_sync, dbo_yield_and_switch_from_compute_to_comm

VALUE_DIM = 128  # of a head, also of the part of a key that is not rotated: both models
ROPE_DIM = 64

# Public since torch 2.10.
_grouped_mm: Callable[..., Tensor] = getattr(F, "grouped_mm", None) or torch._grouped_mm


@dataclass(frozen=True)
class Shape:
    """One model on one rank; `q_rank` 0 where queries are projected at once. Sizes are in elements."""

    name: str
    hidden: int
    heads: int
    q_rank: int
    kv_rank: int
    inner: int
    shared_inner: int
    local_experts: int
    top_k: int


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("V2-Lite", 2048, 16, 0, 512, 1408, 2816, 32, 6),  # 64 experts on 2 ranks
        Shape("V3", 7168, 128, 1536, 512, 2048, 2048, 32, 8),  # 256 experts on 8 ranks
    )
}


class Wire(Protocol):
    """What carries the rows from one rank to the next."""

    def arrival(self, rows: Tensor) -> Tensor:
        """The tensor in which `rows` arrive; asked for on the compute stream, before `transfer`."""

    def transfer(self, rows: Tensor, arrived: Tensor, share: float) -> None:
        """Enqueue the transfer of a microbatch that is `share` of the batch on the current stream."""


class NoWire:
    """Everything but the transfers."""

    def arrival(self, rows: Tensor) -> Tensor:
        return rows

    def transfer(self, rows: Tensor, arrived: Tensor, share: float) -> None:
        pass


class LayerWeights:
    """One layer's weights, bf16, scaled so that every product keeps the size of its input."""

    def __init__(self, shape: Shape, device: str, generator: torch.Generator) -> None:
        def matrix(*size: int) -> Tensor:
            weight = torch.randn(*size, device=device, dtype=torch.bfloat16, generator=generator)
            return weight.mul_(size[-1] ** -0.5)

        heads, hidden = shape.heads, shape.hidden
        queries = heads * (VALUE_DIM + ROPE_DIM)
        self.norm_attention = torch.ones(hidden, device=device, dtype=torch.bfloat16)
        self.norm_experts = torch.ones(hidden, device=device, dtype=torch.bfloat16)
        self.down = matrix((shape.q_rank or queries) + shape.kv_rank + ROPE_DIM, hidden)
        self.query_up = matrix(queries, shape.q_rank) if shape.q_rank else None
        self.kv_up = matrix(heads * 2 * VALUE_DIM, shape.kv_rank)
        self.out = matrix(hidden, heads * VALUE_DIM)
        self.shared_gate_up = matrix(2 * shape.shared_inner, hidden)
        self.shared_down = matrix(hidden, shape.shared_inner)
        self.gate_up = matrix(shape.local_experts, 2 * shape.inner, hidden)
        self.expert_down = matrix(shape.local_experts, hidden, shape.inner)


def _gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@dataclass(frozen=True)
class Batch:
    """The tokens of one microbatch, and where their rows go.

    Attributes:
        hidden: [T, hidden].
        token_of_row: [T * top_k], rows sorted by expert.
        ends: [local_experts] int32, where each expert's rows end.
        row_of_token: [T * top_k], its inverse: the rows of token 0, of token 1, ...
        weights: [T, 1, top_k].
        share: its part of the step's tokens.
    """

    hidden: Tensor
    token_of_row: Tensor
    ends: Tensor
    row_of_token: Tensor
    weights: Tensor
    share: float


def make_batch(shape: Shape, tokens: int, share: float, device: str, generator: torch.Generator) -> Batch:
    kwargs: dict[str, Any] = {"device": device, "generator": generator}
    hidden = torch.randn(tokens, shape.hidden, dtype=torch.bfloat16, **kwargs)
    chosen = torch.rand(tokens, shape.local_experts, **kwargs).topk(shape.top_k, dim=1)
    order = chosen.indices.flatten().argsort(stable=True)
    counts = torch.bincount(chosen.indices.flatten(), minlength=shape.local_experts)
    weights = torch.rand(tokens, 1, shape.top_k, **kwargs)
    return Batch(
        hidden,
        order // shape.top_k,
        counts.cumsum(0).to(torch.int32),
        order.argsort(),
        (weights / weights.sum(2, keepdim=True)).to(torch.bfloat16),
        share,
    )


class Program:
    """`layers` layers on a batch of `tokens`, whole and cut in `count` microbatches of the same size.

    Args:
        context: keys and values that every token attends to; `set_context` changes it.
        device: a `dbo_greenlet` device; "cuda:0" or the CPU, by its name.
    """

    def __init__(
        self, shape: Shape, tokens: int, layers: int, device: Any, *, context: int = 1024, count: int = 2, seed: int = 0
    ) -> None:
        self.shape, self.tokens, self.layers, self.device, self.count = shape, tokens, layers, device, count
        name = device.name
        self._generator = torch.Generator(name).manual_seed(seed)
        self._weights = [LayerWeights(shape, name, self._generator) for _ in range(min(2, layers))]
        self.whole = make_batch(shape, tokens, 1.0, name, self._generator)
        self.parts = [make_batch(shape, tokens // count, 1 / count, name, self._generator) for _ in range(count)]
        self._comm = device.new_stream("comm")
        self._contexts: dict[int, Any] = {}
        self.scheduler = Scheduler(strict=False)
        self.set_context(context)

    def set_context(self, context: int) -> None:
        size = (1, self.shape.heads, context, VALUE_DIM)
        self.context = context
        self._keys = torch.randn(size, device=self.device.name, dtype=torch.bfloat16, generator=self._generator)
        self._values = torch.randn(size, device=self.device.name, dtype=torch.bfloat16, generator=self._generator)

    @property
    def comm_stream(self) -> Any:
        return self._comm

    def layer_weights(self, layer: int) -> LayerWeights:
        return self._weights[layer % len(self._weights)]

    # -- the stages --------------------------------------------------------------------------------------------------

    def attend(self, x: Tensor, batch: Batch, w: LayerWeights) -> tuple[Tensor, Tensor]:
        """[T, hidden] -> the residual stream [T, hidden], the rows to send [T * top_k, hidden]."""
        shape = self.shape
        projected = F.linear(F.rms_norm(x, (shape.hidden,), w.norm_attention, 1e-6), w.down)
        queries = projected[:, : -shape.kv_rank - ROPE_DIM]
        if w.query_up is not None:
            queries = F.linear(queries, w.query_up)
        queries = queries.view(-1, shape.heads, VALUE_DIM + ROPE_DIM)[:, :, :VALUE_DIM]
        own = F.linear(projected[:, -shape.kv_rank - ROPE_DIM : -ROPE_DIM], w.kv_up)
        attended = F.scaled_dot_product_attention(queries.transpose(0, 1)[None], self._keys, self._values)
        mixed = attended[0].transpose(0, 1) + own.view(-1, shape.heads, 2 * VALUE_DIM)[:, :, VALUE_DIM:]
        x = torch.addmm(x, mixed.reshape(-1, shape.heads * VALUE_DIM), w.out.t())
        normed = F.rms_norm(x, (shape.hidden,), w.norm_experts, 1e-6)
        rows = normed.index_select(0, batch.token_of_row)
        return torch.addmm(x, _gated(F.linear(normed, w.shared_gate_up)), w.shared_down.t()), rows

    def experts(self, rows: Tensor, batch: Batch, w: LayerWeights) -> Tensor:
        """[T * top_k, hidden], sorted by expert -> the same shape and order."""
        inner = _gated(_grouped_mm(rows, w.gate_up.transpose(1, 2), offs=batch.ends))
        return _grouped_mm(inner, w.expert_down.transpose(1, 2), offs=batch.ends)

    def unpack(self, x: Tensor, rows: Tensor, batch: Batch) -> Tensor:
        """The residual stream [T, hidden] plus each token's rows, weighted."""
        rows = rows.index_select(0, batch.row_of_token).view(-1, self.shape.top_k, self.shape.hidden)
        return torch.baddbmm(x[:, None], batch.weights, rows)[:, 0]

    # -- the step ----------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch, wire: Wire) -> Tensor:
        """All layers. Outside a step the yields do nothing and the wire is on the compute stream: all of it exposed."""
        x = batch.hidden
        for layer in range(self.layers):
            weights = self.layer_weights(layer)
            x, rows = self.attend(x, batch, weights)
            rows = self._send(rows, batch, wire, "dispatch")
            rows = self.experts(rows, batch, weights)
            rows = self._send(rows, batch, wire, "combine")
            x = self.unpack(x, rows, batch)
        return x

    def _send(self, rows: Tensor, batch: Batch, wire: Wire, site: str) -> Tensor:
        arrived = wire.arrival(rows)
        # Records that the rows are there, and only then hands over. Sending before the yield would enqueue the same
        # order on the GPU, and the microbatch would park with another stream current than the hub's.
        dbo_yield_and_switch_from_compute_to_comm(site)
        wire.transfer(rows, arrived, batch.share)
        dbo_switch_to_compute_sync()
        return arrived

    def unsplit(self, wire: Wire) -> list[Tensor]:
        return [self.forward(self.whole, wire)]

    def in_turn(self, wire: Wire) -> list[Tensor]:
        return [self.forward(part, wire) for part in self.parts]

    def split(self, wire: Wire) -> list[Tensor]:
        entries = [lambda part=part: self.forward(part, wire) for part in self.parts]
        return self.scheduler.run(entries, self._contexts_on_current_stream()).outputs

    def split_on_one_stream(self, wire: Wire) -> list[Tensor]:
        """The order of `split` without its streams and events: every transfer exposed."""
        return self.scheduler.run([lambda part=part: self.forward(part, wire) for part in self.parts]).outputs

    def _contexts_on_current_stream(self) -> Any:
        compute = self.device.current_stream()
        known = self._contexts.get(id(compute))
        if known is None:
            known = make_ubatch_contexts(self.count, compute, self._comm, device=self.device)
            self._contexts[id(compute)] = known
        return known

    def only(self, stage: str) -> Callable[[], None]:
        """What enqueues one stage of one microbatch, `layers` times over the layers' weights."""
        batch = self.parts[0]
        x, rows = self.attend(batch.hidden, batch, self.layer_weights(0))

        def attend() -> None:
            for layer in range(self.layers):
                self.attend(x, batch, self.layer_weights(layer))

        def experts() -> None:
            for layer in range(self.layers):
                self.experts(rows, batch, self.layer_weights(layer))

        def unpack() -> None:
            for _ in range(self.layers):
                self.unpack(x, rows, batch)

        return {"attend": attend, "experts": experts, "unpack": unpack}[stage]


def reference_layer(program: Program, batch: Batch) -> Tensor:
    """The first layer of `program` on `batch`, in float32, expert by expert: [T, hidden]."""
    shape, w = program.shape, program.layer_weights(0)
    x = batch.hidden.float()

    def norm(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6)

    def product(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.float().t()

    def gated(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = product(x, gate_up).chunk(2, dim=-1)
        return product(gate * torch.sigmoid(gate) * up, down)

    projected = product(norm(x), w.down)
    split = projected.shape[1] - shape.kv_rank - ROPE_DIM
    queries = projected[:, :split]
    if w.query_up is not None:
        queries = product(queries, w.query_up)
    queries = queries.view(-1, shape.heads, VALUE_DIM + ROPE_DIM)[:, :, :VALUE_DIM].transpose(0, 1)
    scores = queries @ program._keys[0].float().transpose(1, 2) * VALUE_DIM**-0.5
    attended = (scores.softmax(2) @ program._values[0].float()).transpose(0, 1)
    own = product(projected[:, split : split + shape.kv_rank], w.kv_up).view(-1, shape.heads, 2 * VALUE_DIM)
    x = x + product((attended + own[:, :, VALUE_DIM:]).reshape(x.shape[0], -1), w.out)
    normed = norm(x)
    out = x + gated(normed, w.shared_gate_up, w.shared_down)
    begin = 0
    weight_of_row = batch.weights.flatten()[batch.row_of_token.argsort()].float()
    for expert, end in enumerate(batch.ends.tolist()):
        tokens = batch.token_of_row[begin:end]
        routed = gated(normed[tokens], w.gate_up[expert], w.expert_down[expert])
        out.index_add_(0, tokens, routed * weight_of_row[begin:end, None])
        begin = end
    return out
