"""How much of a GPU's data sheet a program reaches, and what its host takes: one calibration for each kind of program.

`source` says which measurements a figure was fitted to: steps that were not split, and, for what threads cost, the rows
that are marked so in scripts/measured_steps.json. What comes out for split steps is compared with all measured ones by
scripts/check_estimate.py. An unsplit step of one's own replaces most of these figures (`measured`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..errors import ConfigurationError

__all__ = ["CARRIERS", "ENGINES", "FITTED_MEMORY", "Carrier", "Engine", "engine_named"]

FITTED_MEMORY = 4.8  # TB/s of the H200, which all calibrations are of


@dataclass(frozen=True)
class Carrier:
    """What carries the microbatches of a step, while its host launches it.

    Attributes:
        handoff_us: from one microbatch to the other, inside a model.
        start_us: for a step's start and join.
        slower: by how much each launch takes longer than in an unsplit step: threads move between cores.
        source: of the figures.
    """

    name: str
    handoff_us: float
    start_us: float
    slower: float
    source: str


CARRIERS = {
    carrier.name: carrier
    for carrier in (
        Carrier("greenlets", 34.0, 45.0, 1.0, "README: hand-offs inside vLLM 32 to 36 us, start and join 45"),
        Carrier("threads", 58.0, 950.0, 1.3, "README: 54 to 62 us, 951; launches: LL 8 layers, eager, 64 requests"),
        Carrier("threads, one core", 32.0, 430.0, 1.0, "README: 25 to 36 us, 428"),
    )
}


@dataclass(frozen=True)
class Engine:
    """A kind of program.

    Attributes:
        dense_flops, grouped_flops, attention_flops: of the GPU's FLOP/s, the part that plain products, the experts'
            grouped products and the attention itself reach where they are bound by them;
        padded_rows: how many rows more a product works on there: part of a tile of each expert is empty, and so is part
            of the last wave.
        dense_bandwidth, grouped_bandwidth, activation_bandwidth, unpack_bandwidth: of its memory bandwidth, the part
            that reading weights (or the KV cache), experts' weights, activations, and the rows that come back reach.
        kernel_us: what a kernel takes on the GPU at least, with the gap before the next one.
        event_us: what the GPU takes for each edge between streams.
        kernels: kernels of (attention, shared expert, experts, combine) in a layer.
        padded_us: of each layer with experts and each microbatch, however few tokens: work on padding.
        padded_for: experts x (hidden + 8 inner) of the model that `padded_us` was fitted to; with another one it grows
            with that product, and with a slower memory than `FITTED_MEMORY`. 0: it does not depend on the model.
        fitted_to: the model and the ranks of that fit, where others are an extrapolation; "" where nothing is.
        calls: launches by the host in (attention, dispatch, experts, combine, shared expert) of a layer.
        call_us: what one takes the host.
        outside_us, outside_us_per_request: what a step takes beside the model (scheduling, logits, sampling), once.
        shared_first: the shared expert runs before the dispatch, and not beside the combine.
        source: what the figures were fitted to.
    """

    name: str
    source: str
    dense_flops: float = 0.78
    grouped_flops: float = 0.72
    attention_flops: float = 0.38
    padded_rows: float = 100.0
    dense_bandwidth: float = 0.85
    grouped_bandwidth: float = 0.61
    activation_bandwidth: float = 0.85
    unpack_bandwidth: float = 0.37
    kernel_us: float = 3.7
    event_us: float = 2.5
    kernels: tuple[float, float, float, float] = (9, 4, 5, 2)
    padded_us: float = 0.0
    padded_for: float = 0.0
    fitted_to: tuple[str, int] = ("", 0)
    calls: tuple[float, float, float, float, float] = (9, 1, 5, 2, 4)
    call_us: float = 16.0
    outside_us: float = 0.0
    outside_us_per_request: float = 0.0
    shared_first: bool = False

    def with_host(self, us_per_layer: float) -> Engine:
        """The same where the launches of a layer take so many microseconds together."""
        return replace(self, call_us=us_per_layer / sum(self.calls))


_VLLM: dict[str, Any] = {"call_us": 21.0, "outside_us": 2400.0, "outside_us_per_request": 35.0}

ENGINES = {
    engine.name: engine
    for engine in (
        Engine(
            "torch",
            "bfloat16 layers with torch's grouped products on an H200: times of their stages, of a whole and of a half "
            "batch without communication, in scripts/bench_gpu_overlap.py (torch 2.11, 30 November 2026)",
        ),
        Engine(
            "runner",
            "this package's runner over NCCL: unsplit decode steps of the demo's job on two H200s, the recorder on "
            "(29 November 2026)",
            call_us=195.0,
            outside_us=1000.0,
        ),
        Engine(
            "deepgemm",
            "nothing of its own: memory is taken to be reached as torch's calibration says, and half of fp8's FLOP/s; "
            "launches, and what lies beside the model, are vLLM's",
            dense_flops=0.5,
            grouped_flops=0.5,
            calls=(30, 22, 12, 20, 10),
            **_VLLM,
        ),
        # Batched experts: every expert's rows are padded to the largest batch, and the activations work on all of them.
        # A rank has experts / ranks of these, each with room for the rows of all ranks: the ranks cancel out.
        Engine(
            "vllm-ll",
            "unsplit steps of vLLM 0.26 with triton experts on two H200s: full graphs of 8 layers with 8, 64 and 256 "
            "requests and of 27 with 64; launches: 8 layers, eager, 64 (30 November 2026)",
            grouped_flops=0.03,
            padded_rows=0.0,
            padded_us=475.0,
            padded_for=64 * (2048 + 8 * 1408),
            fitted_to=("deepseek-v2-lite", 2),
            calls=(30, 22, 18, 20, 10),
            **_VLLM,
        ),
        Engine(
            "vllm-ht",
            "unsplit steps of vLLM 0.26 with triton experts on two H200s: eager prefills of Qwen3-MoE, 2,048 to 16,384 "
            "tokens (30 November 2026)",
            grouped_flops=0.2,
            padded_rows=64.0,
            padded_us=300.0,
            fitted_to=("qwen3-30b-a3b", 2),
            calls=(30, 40, 18, 25, 10),
            **_VLLM,
        ),
    )
}


def engine_named(name: str) -> Engine:
    """Raises `ConfigurationError` where there is none."""
    try:
        return ENGINES[name]
    except KeyError:
        raise ConfigurationError(f"no engine {name!r}; use one of {', '.join(ENGINES)}") from None
