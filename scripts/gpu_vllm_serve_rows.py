"""The rows that scripts/gpu_vllm_serve.py can run: model, flags, the servers beside each other, and their load."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpu_vllm_rows import COMMON, DROP_IN, HIGH_THROUGHPUT, NO_DBO, THREADS
from gpu_vllm_serve_left import STACKS_FILE
from gpu_vllm_serve_plugin import FAULT_FILE, PLACE, PLACES

FAULTS = {
    "kill": "rank 1 is killed",
    "kill-engine": "the engine core of rank 1 is killed, its worker is not",
    "raise": "a layer raises in the second microbatch of rank 1",
    "raise-early": "the first layer raises in the first microbatch of rank 1",
}
METRICS = ("ttft", "tpot", "itl", "e2el")
TOTALS = ("duration", "completed", "failed", "request_throughput", "output_throughput", "total_token_throughput")
EAGER = ("--enforce-eager",)
GRAPHS = (
    "--compilation-config",
    '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 8, 32, 48, 56, 64, 72, 80, 128]}',
)
LEAST_SPLIT = 32  # tokens of a decode step of one rank, vLLM's default threshold


@dataclass(frozen=True)
class ServeRow:
    """One row.

    `loads` are the arguments of `vllm bench serve` by the name of the load; the last of each tells how many are in
    flight. `flags` are those of `vllm serve` beside the ones that all rows share.
    """

    name: str
    kind: str = "bench"  # or "fault"
    family: str = "deepseek-v2-lite"
    layers: int = 8
    all2all: str = "deepep_low_latency"
    execution: tuple[str, ...] = EAGER
    most_tokens: int = 256  # of a step of one rank; DeepEP's low-latency kernels queue at most 511
    longest: int = 512  # tokens of a request
    modes: tuple[str, ...] = (NO_DBO, THREADS, DROP_IN)
    faults: tuple[str, ...] = ()  # of a row of faults: two servers each; of others: once all loads are through
    loads: dict[str, tuple[str, ...]] = field(default_factory=dict)
    config: dict[str, Any] | None = None  # of the dry runs, which have one rank and no all-to-all

    def describe(self) -> dict[str, Any]:
        return asdict(self)

    def servers(self) -> Iterator[tuple[str, str, str | None]]:
        """Name, mode and the fault that it has to be prepared for, of each server."""
        if self.kind == "bench":
            yield from ((mode, mode, None) for mode in self.modes)
        else:
            yield from ((f"{fault}, {mode}", mode, fault) for fault in self.faults for mode in self.modes)

    def ruins(self) -> Iterator[tuple[str, str, str]]:
        """Server, mode and fault of what is ruined in the end, all at once."""
        if self.kind == "fault":
            yield from ((name, mode, fault) for name, mode, fault in self.servers() if fault is not None)
        else:
            yield from ((mode, mode, fault) for fault in self.faults for mode in self.modes if mode != NO_DBO)

    def command(self, model: Path, mode: str, port: int) -> list[str]:
        flags = ["serve", str(model), "--port", str(port), "--load-format", "dummy", "--dtype", "bfloat16"]
        flags += [
            "--seed",
            "0",
            "--max-model-len",
            str(self.longest),
            "--max-num-batched-tokens",
            str(self.most_tokens),
        ]
        flags += ["--max-num-seqs", "128", "--no-enable-prefix-caching", *self.execution]
        if self.config is None:
            attention = "TRITON_MLA" if self.family == "deepseek-v2-lite" else "TRITON_ATTN"
            # One front end: by default there are as many as ranks, and each takes as long as a rank to start.
            flags += ["--data-parallel-size", "2", "--api-server-count", "1"]
            flags += ["--enable-expert-parallel", "--all2all-backend", self.all2all]
            flags += ["--attention-backend", attention, "--moe-backend", "triton", "--block-size", "64"]
            # Several engines share a GPU, so none may take most of it.
            flags += ["--kv-cache-memory-bytes", str(2 << 30), "--gpu-memory-utilization", "0.15"]
            flags += ["--enable-dbo"] if mode != NO_DBO else []
        return [sys.executable, "-m", "vllm.entrypoints.cli.main", *flags]

    def variables(self, mode: str, fault: str | None, trigger: Path) -> dict[str, str]:
        """Of this server alone. The package needs none; DBO_GREENLET=0 leaves vLLM as it is."""
        own = {STACKS_FILE: f"{trigger}.stacks"}
        if mode == THREADS:
            own["DBO_GREENLET"] = "0"
        if fault in PLACES:
            own |= {FAULT_FILE: str(trigger), PLACE: str(fault)}
        return own

    def bench(self, url: str, model: str, load: tuple[str, ...], seed: int) -> list[str]:
        """Arguments of `vllm bench serve`: the same prompts for every mode of a round."""
        common = ["--backend", "openai", "--base-url", url, "--model", model, "--dataset-name", "random"]
        common += ["--seed", str(seed), "--ignore-eos", "--temperature", "0", "--disable-tqdm"]
        common += ["--percentile-metrics", ",".join(METRICS), "--metric-percentiles", "50,90,99"]
        return [*common, *load]

    def kept(self, found: dict[str, Any]) -> dict[str, float]:
        names = [f"{point}_{metric}_ms" for metric in METRICS for point in ("mean", "p50", "p90", "p99")]
        return {name: round(found[name], 3) for name in (*TOTALS, *names)}

    def greedy(self) -> dict[str, Any]:
        """Prompts that are sent at once: enough for every decode step of both ranks to be split."""
        words = 100 if self.config else 50000
        count = 8 if self.config else 128
        return {
            "prompts": [[3 + (7919 * index + 104729 * place) % words for place in range(6)] for index in range(count)],
            "tokens": 16,
        }

    def problem(self, entry: dict[str, Any], cpu: bool) -> str | None:
        """How what was found is not what the row says, or None."""
        # A forked worker holds the end of the pipe by whose closing the front end would see that its engine core died:
        # only where processes are spawned can a client be answered.
        unseen = "kill-engine" if entry.get("started") == "fork" else None
        for name, found in entry["faults"].items():
            if found["client_gets"] is None and found["fault"] != unseen:
                return f"{name}: the client got no error"
        for mode, found in entry["modes"].items():
            if set(found["bench"]) != set(self.loads):
                return f"{mode}: not every load was run"
            last = list(found["counters_after"].values())[-1]
            steps = {key: value for key, value in last.items() if "steps_total" in key}
            if not cpu and (mode == DROP_IN) != (sum(steps.values()) > 0):
                return f"{mode}: the counters of steps run as greenlets are {steps}"
        return None


def load_of(prompts: int, at_once: int, inputs: int, outputs: int, *more: str) -> tuple[str, ...]:
    lengths = ("--random-input-len", str(inputs), "--random-output-len", str(outputs))
    return ("--num-prompts", str(prompts), *lengths, "--max-concurrency", str(at_once), *more)


# All at once, so that nearly every step decodes; and as they come, where most steps also take in a prompt.
DECODE = {
    "128 at once": load_of(128, 128, 16, 96),
    "40 a second": load_of(80, 128, 16, 64, "--request-rate", "40"),
}
PREFILL = {"32 prompts of 2,048": load_of(32, 32, 2048, 4)}
TINY = COMMON | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 64,
    "intermediate_size": 64,
    "vocab_size": 128,
    "num_hidden_layers": 3,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rope_theta": 10000.0,
    "sliding_window": None,
}

ROWS: dict[str, ServeRow] = {
    row.name: row
    for row in (
        ServeRow("ll-eager", faults=("kill",), loads=DECODE),
        ServeRow("ll-graph", execution=GRAPHS, faults=("kill-engine",), loads=DECODE),
        ServeRow(
            "ht-prefill",
            family="qwen3-moe",
            all2all=HIGH_THROUGHPUT,
            most_tokens=8192,
            longest=2304,
            loads=PREFILL,
        ),
        ServeRow("kill", "fault", layers=4, modes=(THREADS, DROP_IN), faults=("kill",)),
        ServeRow("raise", "fault", layers=4, modes=(THREADS, DROP_IN), faults=("raise",)),
        ServeRow("raise-both", "fault", layers=4, modes=(THREADS, DROP_IN), faults=("raise", "raise-early")),
        ServeRow("dry", modes=(DROP_IN,), faults=("kill",), config=TINY, loads={"8 at once": load_of(12, 8, 16, 16)}),
        ServeRow("dry-faults", "fault", modes=(DROP_IN,), faults=("kill",), config=TINY),
    )
}
