"""One rank's engine of real vLLM for scripts/gpu_vllm_rank.py: how it is set up, switched between modes and stepped.

Two data-parallel ranks with expert parallelism and DeepEP run as two processes, with a GPU each or one for both. On one
they pass for two hosts (NCCL refuses two ranks on one device of one host): each has its own NCCL_HOSTID and they talk
over the loop-back device. `external_launcher` keeps engine core and worker in this process, where they can be measured.
"""

from __future__ import annotations

import importlib.util
import os
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_vllm_probe import Probe
from gpu_vllm_rows import DROP_IN, DROP_IN_ONE_CORE, NO_DBO, RANKS, THREADS_ONE_CORE, requests_of

NEVER = 1 << 30  # a threshold, in tokens, that no batch reaches
SPLIT_FROM = 4  # tokens; low, so that every step of a run is split


class RowFailed(Exception):
    """A run is not what its row says: no microbatches, the wrong carrier, other tokens."""


def environment(rank: int, job: dict[str, Any]) -> dict[str, str]:
    """The variables of one rank; those that are alike for all are set by the driver."""
    own = {
        "RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_RANK": str(rank) if job["gpus"] > 1 else "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(job["port"]),
        "VLLM_CACHE_ROOT": f"{job['scratch']}/vllm_cache_{rank}",
        "DBO_GREENLET": "require" if uses_drop_in(job) else "0",
    }
    if job["gpus"] == 1:
        own |= {"NCCL_HOSTID": f"host{rank}", "NCCL_IB_DISABLE": "1"}
    return own


def uses_drop_in(job: dict[str, Any]) -> bool:
    return any(mode in (DROP_IN, DROP_IN_ONE_CORE) for mode in job["modes"])


class Modes:
    """Switches this process, and the engine in it, between the modes of its session.

    An engine of a session with the drop-in is made with it; for a mode of threads the drop-in gives vLLM its methods
    back, and takes them again afterwards.
    """

    def __init__(self, job: dict[str, Any], rank: int, probe: Probe) -> None:
        self.installed = uses_drop_in(job)
        self.drop_in = self.installed
        self.probe = probe
        self.all_cores = os.sched_getaffinity(0)
        # The two ranks' single cores are apart.
        ordered = sorted(self.all_cores)
        self.one_core = {ordered[(len(ordered) * (2 * rank + 1)) // 4]}

    def enter(self, mode: str, config: Any) -> None:
        """Make `mode` the one that the next steps run in; both ranks do this between the same two steps."""
        parallel = config.parallel_config
        threshold = NEVER if mode == NO_DBO else SPLIT_FROM
        parallel.dbo_decode_token_threshold = parallel.dbo_prefill_token_threshold = threshold
        one_core = mode in (THREADS_ONE_CORE, DROP_IN_ONE_CORE)
        os.sched_setaffinity(0, self.one_core if one_core else self.all_cores)
        wanted = mode in (DROP_IN, DROP_IN_ONE_CORE)
        if wanted and not self.installed:
            raise RowFailed(f"mode {mode!r} in a session that was started without the drop-in")
        if wanted != self.drop_in:
            from dbo_greenlet.vllm import patching

            self.probe.leave_yields()
            if wanted:
                patching.install()
            else:
                patching.uninstall()
            self.probe.watch_yields()
            self.drop_in = wanted


def executed() -> dict[str, int]:
    """How many steps the drop-in has run in this process, by kind; nothing where it is not installed."""
    if importlib.util.find_spec("dbo_greenlet") is None:
        return {}
    import dbo_greenlet.vllm as drop_in

    return dict(drop_in.step_counts()["executed"])


def draw_weights(rank: int | None = None, afterwards: Callable[[Any, int], None] | None = None) -> None:
    """Make vLLM's loader of dummy weights draw weights with which greedy tokens mean something.

    vLLM's own are so small that logits tie. Each tensor is drawn from a generator seeded with its name, so that the
    ranks agree on what they share; the experts' tensors hold other experts on each rank and are seeded with the rank,
    which vLLM is asked for when none is given. `afterwards` gets the model and the rank.
    """
    import torch
    import vllm.model_executor.model_loader.dummy_loader as dummy_loader
    from vllm.distributed import get_dp_group

    @torch.no_grad()
    def load_weights(_loader: Any, model: torch.nn.Module, _model_config: Any) -> None:
        number = get_dp_group().rank_in_group if rank is None else rank
        for name, tensor in model.state_dict().items():
            if tensor.is_meta or not tensor.is_floating_point():
                continue
            if tensor.dim() < 2:
                tensor.fill_(1.0 if name.endswith("weight") else 0.0)  # norms and biases
                continue
            of_experts = ".experts." in name
            generator = torch.Generator(device=tensor.device)
            generator.manual_seed(zlib.crc32(f"{name} of rank {number}".encode() if of_experts else name.encode()))
            drawn = torch.randn(tensor.shape, generator=generator, device=tensor.device, dtype=torch.bfloat16)
            tensor.copy_(drawn.mul_(0.03))
        if afterwards is not None:
            afterwards(model, number)

    dummy_loader.DummyModelLoader.load_weights = load_weights


def make_engine(job: dict[str, Any]) -> Any:
    """vLLM's LLMEngine for a job; raises what vLLM raises."""
    from vllm import LLM

    graph, trained = job["execution"] == "graph", job["kind"] == "accuracy"
    sizes = sorted(requests_of(job["options"]))
    options: dict[str, Any] = {
        "model": job["model"],
        "load_format": "auto" if trained else "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "seed": 0,
        "tensor_parallel_size": 1,
        "data_parallel_size": RANKS,
        "enable_expert_parallel": True,
        "distributed_executor_backend": "external_launcher",
        "max_model_len": job["options"].get("max_model_len", 256),
        "max_num_seqs": sizes[-1],
        "max_num_batched_tokens": most_tokens(job),
        "kv_cache_memory_bytes": 2 << 30,
        "gpu_memory_utilization": 0.3,
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "disable_log_stats": True,
        "attention_backend": job["attention"],
        "moe_backend": "triton",
        "block_size": 64,
        "all2all_backend": job["all2all"],
        "disable_nccl_for_dp_synchronization": True,
        "enforce_eager": job["execution"] == "eager",
    }
    if job["execution"] != "eager":
        options["compilation_config"] = {
            "mode": 3 if job["execution"] == "compile" else 0,
            "cudagraph_mode": "FULL_DECODE_ONLY" if graph else "NONE",
            "cudagraph_capture_sizes": sizes,
        }
    if job["modes"] != [NO_DBO]:
        options |= {
            "enable_dbo": True,
            "dbo_decode_token_threshold": SPLIT_FROM,
            "dbo_prefill_token_threshold": SPLIT_FROM,
        }
    return LLM(**options).llm_engine


def most_tokens(job: dict[str, Any]) -> int:
    """Of a step of one rank. DeepEP's low-latency kernels queue at most 511 a rank."""
    return int(job["options"].get("max_batched_tokens", 256))


def model_runner(engine: Any) -> Any:
    worker = engine.model_executor.driver_worker
    return getattr(worker, "worker", worker).model_runner


def serve(
    engine: Any, probe: Probe, tag: str, prompts: list[list[int]], **sampling: Any
) -> tuple[dict[int, Any], list[dict[str, float]]]:
    """Answer the prompts; returns the outputs by prompt and, per engine step, its time and what the probe counted.

    The ranks leave together: vLLM steps an idle rank with dummy batches until the last one has finished.
    """
    from vllm import SamplingParams

    for index, prompt in enumerate(prompts):
        parameters = SamplingParams(temperature=0.0, detokenize=False, **sampling)
        engine.add_request(f"{tag}.{index}", {"prompt_token_ids": prompt}, parameters)
    outputs: dict[int, Any] = {}
    steps: list[dict[str, float]] = []
    while engine.has_unfinished_requests():
        before = (probe.yields, probe.replays, len(probe.forward_ns))
        begin = time.perf_counter_ns()
        finished = [output for output in engine.step() if output.finished]
        milliseconds = (time.perf_counter_ns() - begin) / 1e6
        for output in finished:
            # vLLM may append a random part to the request's name
            outputs[int(output.request_id.split(".")[1].split("-")[0])] = output.outputs[0]
        steps.append(
            {
                "step_ms": milliseconds,
                "forward_ms": sum(probe.forward_ns[before[2] :]) / 1e6,
                "yields": probe.yields - before[0],
                "replays": probe.replays - before[1],
            }
        )
    return outputs, steps


def write_model(folder: Path, config: dict[str, Any]) -> Path:
    """A folder with a config.json, which is all that dummy weights need."""
    import json

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder
