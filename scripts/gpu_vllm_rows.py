"""The rows that scripts/gpu_vllm.py can run: which model, all-to-all and mode of execution, carried how.

A row is one or more sessions. A session is one engine in a pair of processes, one per data-parallel rank; the modes of
a session take turns in it, round by round. "threads" is vLLM as it is, "drop-in" is vLLM with this package engaged; one
core means that the thread which steps the engine, and those that it starts, are held on a single core.

In eager and compiled sessions the modes share one engine: a mode without microbatches raises the thresholds of vLLM's
vote, and this package takes its methods back for one of threads. CUDA graphs are captured once and keep the mode
they were captured in, so there each mode has a session of its own.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

NO_DBO = "no DBO"
THREADS = "threads"
THREADS_ONE_CORE = "threads, one core"
DROP_IN = "drop-in"
DROP_IN_ONE_CORE = "drop-in, one core"
MODES = (NO_DBO, THREADS, THREADS_ONE_CORE, DROP_IN, DROP_IN_ONE_CORE)

RANKS = 2  # of data and expert parallelism, a process each

Session = tuple[str, ...]
TOGETHER: tuple[Session, ...] = (MODES,)
FOUR: tuple[Session, ...] = ((NO_DBO, THREADS, THREADS_ONE_CORE, DROP_IN),)
PAIR: tuple[Session, ...] = ((THREADS, DROP_IN),)
APART: tuple[Session, ...] = ((NO_DBO,), (THREADS,), (DROP_IN,))
APART_PAIR: tuple[Session, ...] = ((THREADS,), (DROP_IN,))

# Shapes only; the weights are drawn. The numbers are those of the published configurations, cut to fewer layers.
DEEPSEEK_V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_layer_freq": 1,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "vocab_size": 102400,
    "rope_theta": 10000,
}
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "vocab_size": 151936,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
    "sliding_window": None,
}
COMMON = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
FAMILIES = {"deepseek-v2-lite": DEEPSEEK_V2_LITE, "qwen3-moe": QWEN3_MOE}


def model_config(family: str, layers: int) -> dict[str, Any]:
    """The contents of a config.json of that shape with so many layers."""
    return {**COMMON, **FAMILIES[family], "num_hidden_layers": layers}


@dataclass(frozen=True)
class Row:
    """One row of the matrix.

    kind "serve" compares tokens and times modes, "fault" makes a microbatch fail and reads what the user reads,
    "accuracy" counts exact matches on a trained checkpoint. `seconds` is the limit for one session, `options` go to
    the ranks as they are: of "serve" rows, "requests" is how many a rank has in flight, several numbers being run one
    after the other in the same engine, and "rounds" how often each mode has its turn with the first of them (half as
    often with the others).
    """

    name: str
    kind: str
    sessions: tuple[Session, ...]
    family: str = "deepseek-v2-lite"
    layers: int = 8
    all2all: str = "deepep_low_latency"
    execution: str = "eager"  # "eager", "compile" (mode 3, no graphs), "graph" (full decode graphs)
    seconds: float = 75
    timed: bool = True  # False: sessions may run beside others, and only their tokens or errors count
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def attention(self) -> str:
        return "TRITON_MLA" if self.family == "deepseek-v2-lite" else "TRITON_ATTN"

    @property
    def shape(self) -> str:
        title = {"deepseek-v2-lite": "DeepSeek-V2-Lite", "qwen3-moe": "Qwen3-MoE"}[self.family]
        return f"{title}, {self.layers} layers"

    def describe(self) -> dict[str, Any]:
        return {**asdict(self), "attention": self.attention, "shape": self.shape}


def requests_of(options: dict[str, Any]) -> list[int]:
    """How many requests a rank answers at once, each number in turn."""
    return list(options.get("requests", (64,)))


HIGH_THROUGHPUT = "deepep_high_throughput"
SIZES = [64, 8, 256]
# The step that takes the prompts is timed, not those that decode: 2 to 16 thousand tokens.
PREFILL = {
    "phase": "prefill",
    "requests": [4, 1, 2, 8],
    "prompt": 2048,
    "tokens": 1,
    "rounds": 16,
    "max_model_len": 2304,
    "max_batched_tokens": 16384,
}
# A part of the text of the error that starts it all, injected or DeepEP's own.
INJECTED, TOO_DEEP = "layer 2 of the second microbatch failed, on purpose", "nvshmem_qp_depth"
ONE = {"fault": "raise", "ranks": [0], "original": INJECTED}
BOTH = {"fault": "raise", "ranks": [0, 1], "original": INJECTED}
KILLED = {"fault": "kill", "ranks": [1], "patience": 30}
LONG = {"max_batched_tokens": 500}  # prompts of a hundred tokens and more
QUEUE = {"fault": "start", "ranks": [0, 1], "original": TOO_DEEP, "max_batched_tokens": 1024}

ROWS: dict[str, Row] = {
    row.name: row
    for row in (
        Row("ll-eager-8", "serve", TOGETHER, seconds=170, options={"rounds": 4, "requests": SIZES}),
        Row("ll-eager-27", "serve", FOUR, layers=27, seconds=180, options={"rounds": 2}),
        Row("ll-compile-8", "serve", PAIR, execution="compile", seconds=200, timed=False, options={"rounds": 2}),
        Row("ll-graph-8", "serve", APART, execution="graph", seconds=90, options={"rounds": 4, "requests": SIZES}),
        Row("ll-graph-27", "serve", APART, layers=27, execution="graph", seconds=100, options={"rounds": 3}),
        Row("ll-eager-qwen3-8", "serve", PAIR, family="qwen3-moe", timed=False, options={"rounds": 2}),
        Row(
            "ll-graph-qwen3-8",
            "serve",
            APART_PAIR,
            family="qwen3-moe",
            execution="graph",
            timed=False,
            options={"rounds": 2},
        ),
        Row("ht-eager-8", "serve", FOUR, all2all=HIGH_THROUGHPUT, seconds=120, options={"rounds": 2}),
        Row("ht-eager-27", "serve", FOUR, layers=27, all2all=HIGH_THROUGHPUT, seconds=180, options={"rounds": 2}),
        # For one GPU, where the host waits for its turn at every layer and a split step takes most of a second.
        Row(
            "ht-eager-27-short",
            "serve",
            FOUR,
            layers=27,
            all2all=HIGH_THROUGHPUT,
            seconds=180,
            options={"rounds": 2, "tokens": 8},
        ),
        Row(
            "ht-prefill-qwen3-8",
            "serve",
            FOUR,
            family="qwen3-moe",
            all2all=HIGH_THROUGHPUT,
            seconds=100,
            options=PREFILL,
        ),
        Row("fault-one-rank", "fault", APART_PAIR, layers=4, timed=False, options=ONE),
        Row("fault-killed", "fault", APART_PAIR, layers=4, timed=False, options=KILLED),
        Row("fault-killed-ht", "fault", APART_PAIR, layers=4, all2all=HIGH_THROUGHPUT, timed=False, options=KILLED),
        Row("fault-both-ranks", "fault", APART_PAIR, layers=4, timed=False, options=BOTH),
        Row("fault-both-ranks-ht", "fault", APART_PAIR, layers=4, all2all=HIGH_THROUGHPUT, timed=False, options=BOTH),
        Row("fault-queue-depth", "fault", APART_PAIR, layers=4, timed=False, options=QUEUE),
        Row(
            "accuracy-eager",
            "accuracy",
            ((NO_DBO, THREADS, DROP_IN),),
            layers=4,
            seconds=150,
            timed=False,
            options=LONG,
        ),
        Row("accuracy-graph", "accuracy", APART, layers=4, execution="graph", seconds=120, timed=False, options=LONG),
        # What needs nothing of this package: the machine and vLLM alone.
        Row("stock-eager-8", "serve", ((NO_DBO, THREADS, THREADS_ONE_CORE),), options={"rounds": 2}),
        Row("stock-queue-depth", "fault", ((THREADS,),), layers=4, timed=False, options=QUEUE),
    )
}
