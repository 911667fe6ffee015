"""What each stage of a layer takes, as a function of the tokens of a microbatch.

A kernel takes what it needs for its bytes or for its products, whichever is longer (the roofline), and its launch gap.
Formulas, for m tokens on this rank and R ranks that split alike:

    products        2 m w FLOP for w weights; each microbatch reads the w weights: what splitting pays twice
    experts         m top_k rows on the average rank; of its experts 1 - (1 - top_k / experts)^(m R) have a row at all,
                    and only their weights are read (every token draws its experts uniformly)
    attention       decode: m contexts read from the KV cache; prefill: half the prompt seen on average
    dispatch        low latency: a copy for each of top_k experts, (R - 1) / R of them to other ranks; high throughput:
                    one for each of the P - 1 other places that have one of its experts, 1 - (1 - 1 / P)^top_k of them,
                    where places are ranks within one node, else nodes (rows are forwarded within a node)
    combine         the same rows back, in bfloat16

All times are microseconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import ConfigurationError
from .engines import FITTED_MEMORY, Engine
from .gpus import Gpu, Link
from .models import ModelShape

__all__ = ["ALL2ALLS", "Communication", "StageTimes", "Workload", "padding_us", "stage_times"]

ALL2ALLS = ("deepep_ll", "deepep_ht", "stream")
_ACTIVATION = 2  # bytes, bfloat16


@dataclass(frozen=True)
class Workload:
    """What a step has to do on one rank.

    Attributes:
        tokens: of this rank.
        context: decode: keys and values that each token attends to. Prefill: tokens of a prompt.
        prefill: whether the tokens are of prompts.
        shared_context: decode where all tokens attend to one and the same context (a long common prefix).
    """

    tokens: int
    context: int = 1024
    prefill: bool = False
    shared_context: bool = False

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.context < 0:
            raise ConfigurationError(
                f"{self.tokens} tokens with a context of {self.context}; a step has 1 token or more"
            )

    @property
    def requests(self) -> float:
        return max(1.0, self.tokens / max(self.context, 1)) if self.prefill else float(self.tokens)


@dataclass(frozen=True)
class Communication:
    """How the rows travel.

    Attributes:
        kind: "deepep_ll": sends that occupy no stream while they fly, received by hooks. "deepep_ht": kernels of a comm
            stream on `sms` multiprocessors; the host waits for the counts of each dispatch. "stream": copies on a comm
            stream (NCCL with a fixed number of rows).
        ranks: expert-parallel ranks.
        link: what carries them.
        dispatch_bytes: of an element on the wire; 1 where the dispatch quantises to fp8, 2 for bfloat16.
        sms: multiprocessors that the kernels take while they run.
        ranks_per_node: where high throughput sends once to each node.
        loopback: the rank is its own peer, as in a benchmark on one GPU: all rows leave it, to it.
    """

    kind: str
    ranks: int
    link: Link
    dispatch_bytes: float = 2
    sms: int = 0
    ranks_per_node: int = 8
    loopback: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ALL2ALLS:
            raise ConfigurationError(f"no all-to-all {self.kind!r}; use one of {', '.join(ALL2ALLS)}")
        if self.ranks < 1 or self.ranks_per_node < 1:
            raise ConfigurationError(f"{self.ranks} ranks, {self.ranks_per_node} a node; use 1 or more")

    def copies(self, top_k: int) -> float:
        """How often a token's row leaves this rank."""
        if self.loopback:
            return float(top_k)
        if self.kind == "deepep_ht":
            places = math.ceil(self.ranks / self.ranks_per_node) if self.ranks > self.ranks_per_node else self.ranks
            return (places - 1) * (1 - (1 - 1 / places) ** top_k)
        return top_k * (self.ranks - 1) / self.ranks if self.ranks > 1 else 0.0


@dataclass(frozen=True)
class StageTimes:
    """One layer of one microbatch on the GPU, and what leaves it. Bytes are the rank's own."""

    attention: float
    shared: float
    experts: float
    unpack: float
    dense: float
    dispatch_bytes: float
    combine_bytes: float
    reads_weights: float  # of the above, what depends on the number of microbatches and not of the tokens
    bound_by_flops: float  # of the above, what slows down where multiprocessors are missing

    @property
    def compute(self) -> float:
        return self.attention + self.shared + self.experts + self.unpack


class _Sum:
    """Adds up kernels of one stage."""

    def __init__(self, gpu: Gpu, engine: Engine) -> None:
        self.gpu, self.engine = gpu, engine
        self.us = self.weights = self.flops = 0.0

    def product(
        self, weights: float, rows: float, width: float, bandwidth: float, reached: float, groups: float = 1
    ) -> None:
        """`rows` rows through `groups` matrices of together `weights` elements that each row meets one of."""
        read = weights * width / (self.gpu.bytes_per_us * bandwidth)
        padded = rows + groups * self.engine.padded_rows
        multiplied = 2 * padded * (weights / groups) / (self.gpu.flops_per_us(width) * reached)
        self.us += _both(read, multiplied)
        if read >= multiplied:
            self.weights += _both(read, multiplied)
        else:
            self.flops += _both(read, multiplied)

    def moved(self, count: float, part: float) -> None:
        self.us += count / (self.gpu.bytes_per_us * part)

    def kernels(self, count: float) -> None:
        self.us += count * self.engine.kernel_us
        self.weights += count * self.engine.kernel_us


def stage_times(
    shape: ModelShape, gpu: Gpu, engine: Engine, communication: Communication, work: Workload, tokens: int
) -> StageTimes:
    """The times of a microbatch of `tokens` tokens, of a step that does `work`."""
    width, hidden = shape.weight_bytes, shape.hidden

    attention = _Sum(gpu, engine)
    attention.kernels(engine.kernels[0])
    w = shape.attention_weights
    attention.product(w, tokens, width, engine.dense_bandwidth, engine.dense_flops)
    _attend(attention, shape, work, tokens)
    attention.moved(
        _ACTIVATION * tokens * (10 * hidden + 5 * shape.heads * shape.value_dim), engine.activation_bandwidth
    )

    shared = _Sum(gpu, engine)
    if shape.shared_inner:
        shared.kernels(engine.kernels[1])
        w = 3 * hidden * shape.shared_inner
        shared.product(w, tokens, width, engine.dense_bandwidth, engine.dense_flops)
        shared.moved(_ACTIVATION * tokens * (8 * shape.shared_inner + 2 * hidden), engine.activation_bandwidth)

    experts, unpack = _Sum(gpu, engine), _Sum(gpu, engine)
    rows = tokens * shape.top_k
    touched = 1 - (1 - shape.top_k / shape.experts) ** (tokens * communication.ranks)
    expert = 3 * hidden * shape.inner
    experts.kernels(engine.kernels[2])
    groups = touched * shape.experts / communication.ranks
    experts.product(groups * expert, rows, width, engine.grouped_bandwidth, engine.grouped_flops, groups)
    experts.moved(_ACTIVATION * rows * (8 * shape.inner + 2 * hidden), engine.activation_bandwidth)
    padded = padding_us(shape, gpu, engine)
    experts.us += padded
    experts.weights += padded
    unpack.kernels(engine.kernels[3])
    if communication.kind == "stream":  # DeepEP's kernels gather and weigh the rows themselves
        attention.moved(_ACTIVATION * rows * 2 * hidden, engine.activation_bandwidth)
        unpack.moved(_ACTIVATION * rows * 3 * hidden, engine.unpack_bandwidth)

    dense = _Sum(gpu, engine)
    if shape.dense_inner:
        dense.kernels(engine.kernels[1])
        w = 3 * hidden * shape.dense_inner
        dense.product(w, tokens, width, engine.dense_bandwidth, engine.dense_flops)

    copies = communication.copies(shape.top_k)
    parts = (attention, shared, experts, unpack)
    return StageTimes(
        attention.us,
        shared.us,
        experts.us,
        unpack.us,
        dense.us,
        dispatch_bytes=tokens * copies * hidden * communication.dispatch_bytes,
        combine_bytes=tokens * copies * hidden * _ACTIVATION,
        reads_weights=sum(part.weights for part in parts),
        bound_by_flops=sum(part.flops for part in parts),
    )


def padding_us(shape: ModelShape, gpu: Gpu, engine: Engine) -> float:
    """What a layer's work on padding takes, microseconds.

    By the rows that are padded and what is read and written of each: experts x (hidden + 8 inner), the ranks cancelling
    out. Measured for one model only; the growth is what the buffers' sizes say.
    """
    if not engine.padded_for:
        return engine.padded_us
    larger = shape.experts * (shape.hidden + 8 * shape.inner) / engine.padded_for
    return engine.padded_us * larger * FITTED_MEMORY / gpu.memory


def _attend(stage: _Sum, shape: ModelShape, work: Workload, tokens: int) -> None:
    """The attention itself, without its projections."""
    seen = work.context / 2 if work.prefill else work.context
    # Of this microbatch: a prompt that is cut has the keys of its first part read by both.
    prompts = max(1.0, tokens / max(work.context, 1))
    element = shape.cache_bytes
    if work.prefill or work.shared_context:
        widths = 2 * shape.head_dim if shape.kv_heads else shape.nope_dim + shape.rope_dim + shape.value_dim
        heads = shape.kv_heads or shape.heads
        if work.shared_context and not shape.kv_heads:
            widths = 2 * shape.value_dim  # expanded keys and values, the rotated part left out
        read = heads * work.context * widths * prompts if work.prefill else heads * work.context * widths
        flops = 2 * tokens * seen * shape.heads * widths
    elif shape.kv_heads:
        read = tokens * seen * 2 * shape.kv_heads * shape.head_dim
        flops = 4 * tokens * seen * shape.heads * shape.head_dim
    else:
        # Latent attention absorbs the projections: every head works on the latent itself.
        read = tokens * seen * (shape.kv_rank + shape.rope_dim)
        flops = 2 * tokens * seen * shape.heads * (2 * shape.kv_rank + shape.rope_dim)
    moved = read * element / (stage.gpu.bytes_per_us * stage.engine.dense_bandwidth)
    multiplied = flops / (stage.gpu.flops_per_us(2) * stage.engine.attention_flops)
    stage.us += _both(moved, multiplied)
    if work.shared_context and moved >= multiplied:
        stage.weights += moved


def _both(read: float, multiplied: float) -> float:
    """A kernel that needs memory and multipliers for so long each: near the corner it keeps neither always busy."""
    return float((read**4 + multiplied**4) ** 0.25)
