"""One rank of a case of scripts/bench_gpu_two_ranks.py, which starts two of them with a job in JSON."""

from __future__ import annotations

import gc
import json
import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dbo_greenlet.batching import StepInput, VoteSettings
from dbo_greenlet.devices import cpu_device
from dbo_greenlet.moe import DeepseekV2Config, DeepseekV2Model, KVCache
from dbo_greenlet.moe.config import RopeConfig
from dbo_greenlet.ranks import RankGroup
from dbo_greenlet.runner import Runner
from dbo_greenlet.trace.recorder import StepRecorder
from dbo_greenlet.trace.records import EndRecord, RecvRecord, SliceRecord, StepRecord
from dbo_greenlet.trace.run_header import make_header
from dbo_greenlet.trace.writer import TraceWriter

EXPERTS, CHOICES, PROMPTS, BEHIND = 64, 6, 8, 15
LEAD = 2  # steps that warm up
BY_THREADS = "split by threads, eager"  # timed, and neither profiled nor traced


def config(layers: int, small: bool) -> DeepseekV2Config:
    """DeepSeek-V2-Lite's shape with so many layers and a small vocabulary, which no layer sees; or a tiny shape."""
    size = 16 if small else 1
    return DeepseekV2Config(
        vocab_size=1024,
        hidden_size=2048 // size,
        intermediate_size=10944 // size,
        moe_intermediate_size=1408 // size,
        num_hidden_layers=layers,
        num_attention_heads=16 // min(size, 4),
        q_lora_rank=None,
        kv_lora_rank=512 // size,
        qk_nope_head_dim=128 // min(size, 4),
        qk_rope_head_dim=64 // min(size, 4),
        v_head_dim=128 // min(size, 4),
        n_routed_experts=EXPERTS,
        n_shared_experts=2,
        num_experts_per_tok=CHOICES,
        first_k_dense_replace=1,
        moe_layer_freq=1,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
        rms_norm_eps=1e-6,
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=False,
        max_position_embeddings=1024,
        rope=RopeConfig(),
        bos_token_id=None,
        eos_token_ids=(),
    )


def draw(model: Any, rank: int) -> None:
    """Weights by name, of experts by rank, too: outputs stay of the order of one, and routing is even."""
    for name, parameter in model.named_parameters():
        key = f"{name} of {rank}" if ".mlp.experts." in name else name
        generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(key.encode()))
        noise = torch.randn(parameter.shape, generator=generator, device=parameter.device, dtype=torch.float32)
        parameter.copy_(noise / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 1 + 0.1 * noise)


def make_step(rank: int, tokens: int, row_length: int, prefill: bool, device: Any) -> StepInput:
    """`tokens` requests with one new token behind others, or PROMPTS whole prompts."""
    requests = PROMPTS if prefill else tokens
    new, before = (tokens // PROMPTS, 0) if prefill else (1, BEHIND)
    starts = torch.arange(requests + 1, dtype=torch.int32) * new
    lengths = torch.full((requests,), before + new, dtype=torch.int32)
    positions = torch.arange(before, before + new).repeat(requests)
    rows = torch.arange(requests)
    ids = torch.randint(0, 1024, (tokens,), generator=torch.Generator().manual_seed(rank))
    return StepInput(
        positions=positions.to(device),
        query_start_loc=starts.to(device),
        seq_lens=lengths.to(device),
        slot_mapping=(rows.repeat_interleave(new) * row_length + positions).to(device),
        request_rows=rows.to(device),
        num_tokens=tokens,
        num_padded_tokens=tokens,
        input_ids=ids.to(device),
        query_start_loc_cpu=starts,
        seq_lens_cpu=lengths,
    )


def make_all_to_all(kind: str, group: RankGroup, hidden: int, tokens: int, prefill: bool) -> Any:
    if kind == "ll":
        from dbo_greenlet.all2all.deepep_ll import DeepEPLowLatency

        return DeepEPLowLatency(group, EXPERTS, hidden, tokens)
    if kind == "ht":
        from dbo_greenlet.all2all.deepep_ht import DeepEPHighThroughput

        return DeepEPHighThroughput(group, EXPERTS, hidden)
    from dbo_greenlet.all2all.torch_distributed import TorchDistributed

    # A capacity makes messages of one shape, which a graph needs; for a prefill it would pad too much.
    return TorchDistributed(group, EXPERTS, None if prefill else tokens)


class Rank:
    """The model, its step and a runner for each way."""

    def __init__(self, job: dict[str, Any], group: RankGroup, device: Any) -> None:
        self.job, self.group, self.torch_device = job, group, device
        self.kind, tokens = job["case"].rsplit("-", 1)
        self.tokens = int(tokens)
        self.prefill = self.tokens > 64
        self.row_length = self.tokens // PROMPTS if self.prefill else 2 * (BEHIND + 1)
        self.config = config(job["layers"], small=job["cpu"])
        self.dtype = torch.float32 if job["cpu"] else torch.bfloat16
        self.all_to_all = make_all_to_all(self.kind, group, self.config.hidden_size, self.tokens, self.prefill)
        self.model = DeepseekV2Model(self.config, self.all_to_all, self.dtype, device).eval()
        draw(self.model, job["rank"])
        self.step = make_step(job["rank"], self.tokens, self.row_length, self.prefill, device)
        if job["cpu"]:
            self.device: Any = cpu_device()
        else:
            from dbo_greenlet.devices.cuda import CudaDevice

            self.device = CudaDevice(device.index)
        graphs = not job["cpu"] and not self.prefill and self.all_to_all.not_capturable is None
        # The way's name -> mode of the step, whether it is a graph, and what carries the microbatches.
        self.ways = {
            "unsplit, eager": ("never", False, "greenlet"),
            "split, eager": ("auto", False, "greenlet"),
            BY_THREADS: ("auto", False, "thread"),
        }
        if graphs:
            self.ways |= {"unsplit, graph": ("never", True, "greenlet"), "split, graph": ("auto", True, "greenlet")}

    def runner(
        self, way: str, *, device: Any = None, timeline: Any = None, recorder: StepRecorder | None = None
    ) -> Runner:
        mode, graph, carrier = self.ways[way]
        rows = PROMPTS if self.prefill else self.tokens
        made = Runner(
            self.model,
            kv_cache=KVCache(self.config, rows, self.row_length, self.dtype, self.torch_device, static_shapes=True),
            settings=VoteSettings(2, 2, 2),
            group=self.group,
            device=device or self.device,
            carrier=carrier,
            instruments=() if recorder is None else (recorder,),
            graph_sizes=[self.tokens] if graph else (),
            all2all=self.all_to_all,
            timeline=timeline,
        )
        if graph:
            made.capture_graphs(mode)
        return made

    def run(self, runner: Runner, way: str) -> tuple[Any, float, float, float]:
        """One step: its output, the host's clock before, after the call and when the GPU was through."""
        mode, graph, _ = self.ways[way]
        self.group.wait_for_device()
        self.group.exchange([0])
        begin = time.perf_counter()
        out = runner.step(self.step, mode=mode)
        called = time.perf_counter()
        self.group.wait_for_device()
        done = time.perf_counter()
        if out.decision.split is (mode == "never") or (out.execution == "replayed") is not graph:
            raise SystemExit(f"{way} was not run that way: {out.decision}, {out.execution}")
        return out, begin, called, done

    # -- what is measured --------------------------------------------------------------------------------------------

    def times(self, runners: dict[str, Runner]) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {way: {"host_ms": [], "done_ms": []} for way in self.ways}
        for number in range(LEAD + self.job["rounds"]):
            for way in list(self.ways)[:: 1 if number % 2 else -1]:
                _, begin, called, done = self.run(runners[way], way)
                if number >= LEAD:
                    found[way]["host_ms"].append(round((called - begin) * 1e3, 3))
                    found[way]["done_ms"].append(round((done - begin) * 1e3, 3))
        return found

    def profile(self, runner: Runner, way: str, path: Path) -> None:
        """A few steps under torch.profiler, after one that it may spend on starting."""
        from torch.profiler import ProfilerActivity, profile, schedule

        activities = [ProfilerActivity.CPU] + ([] if self.job["cpu"] else [ProfilerActivity.CUDA])
        steps = self.job["profiled"]
        once = schedule(wait=0, warmup=1, active=steps, repeat=1)
        saved = partial(_save, path=path)
        with profile(activities=activities, schedule=once, on_trace_ready=saved) as profiler:
            for _ in range(1 + steps):
                self.run(runner, way)
                profiler.step()

    def trace(self, way: str, path: Path) -> None:
        """A few split steps with the recorder and, on a GPU, timing events round each slice."""
        recorder, timeline = StepRecorder(), None
        watched = recorder.device(self.device)
        if not self.job["cpu"]:
            from dbo_greenlet.gpu_timeline import GpuTimeline

            timeline = GpuTimeline(watched)
        runner = self.runner(way, device=watched, timeline=timeline, recorder=recorder)
        captured = recorder.records(step=0) if self.ways[way][1] else []
        for _ in range(LEAD):
            self.run(runner, way)
        rank, origin = self.job["rank"], recorder.origin_ns
        settings = {"case": self.job["case"], "way": way, "layers": self.job["layers"]}
        with TraceWriter(path) as writer:
            writer.write(make_header(rank=rank, world=self.job["world"], settings=settings, origin_ns=origin))
            for number in range(self.job["profiled"]):
                out, begin, _, done = self.run(runner, way)
                record = StepRecord(
                    step=number,
                    rank=rank,
                    run=way,
                    tokens=self.tokens,
                    padded=out.tokens,
                    split=True,
                    reason=str(out.decision.reason),
                    slices=[
                        [s.token_slice.start, s.token_slice.stop, s.request_slice.start, s.request_slice.stop]
                        for s in out.slices
                    ],
                    schedule="" if out.schedule is None else out.schedule.encode(),
                    hash="" if out.schedule is None else out.schedule.hash,
                    yields=list(out.yields),
                    begin=begin * 1e6 - origin / 1e3,
                    end=done * 1e6 - origin / 1e3,
                    execution=out.execution,
                )
                if out.execution == "eager":
                    details: list[Any] = recorder.records(step=number, rank=rank, run=way)
                else:
                    details = as_replayed(captured, record)
                if out.timeline is not None:
                    details += out.timeline.records(step=number, rank=rank, run=way, origin_ns=origin)
                writer.write(record, *details)
            writer.write(EndRecord(True, rank, None))
        if writer.problem is not None:
            raise SystemExit(writer.problem)
        runner.drop_graphs()


def as_replayed(captured: Sequence[Any], step: StepRecord) -> list[Any]:
    """What was recorded of a capture, as of a step that replays it: the host launches all of it at the step's begin.

    Which receive belongs to which send, and in which slices the two are, tells when bytes were in flight; the times of
    these slices are the GPU's.
    """
    out: list[Any] = []
    for record in captured:
        same = {"step": step.step, "rank": step.rank, "run": step.run}
        if isinstance(record, SliceRecord):
            out.append(replace(record, **same, begin=step.begin, end=step.begin))
        elif isinstance(record, RecvRecord):
            out.append(replace(record, **same, sent=step.begin, at=None if record.at is None else step.begin))
    return out


def _save(profiler: Any, path: Path) -> None:
    profiler.export_chrome_trace(str(path))


def main(job: dict[str, Any]) -> None:
    torch.set_num_threads(1 if job["cpu"] else 4)
    device = torch.device("cpu") if job["cpu"] else torch.device("cuda", job["rank"])
    if not job["cpu"]:
        torch.cuda.set_device(device)
    folder = Path(job["folder"])
    result = folder / f"{job['case']}-rank{job['rank']}.json"
    result.unlink(missing_ok=True)
    with RankGroup.connect(job["rank"], job["world"], job["port"], device=device) as group, torch.inference_mode():
        rank = Rank(job, group, device)
        runners = {way: rank.runner(way) for way in rank.ways}
        found: dict[str, Any] = {"ways": rank.times(runners)}
        if not job["cpu"]:
            found["gpu"] = torch.cuda.get_device_name(device)
            found["memory_mb"] = round(torch.cuda.max_memory_allocated(device) / 1e6)
        result.write_text(json.dumps(found))
        for way in [way for way in rank.ways if way != BY_THREADS]:
            stem = f"{job['case']}-{way.replace(', ', '-')}-rank{job['rank']}"
            profile, trace = folder / f"{stem}.pt.trace.json.gz", folder / f"{stem}.jsonl"
            rank.profile(runners[way], way, profile)
            found["ways"][way]["profile"] = str(profile)
            if way.startswith("split"):
                rank.trace(way, trace)
                found["ways"][way]["trace"] = str(trace)
            result.write_text(json.dumps(found))
        # Its graphs first: NCCL waits with the end of a communicator until those that captured it are gone.
        for runner in runners.values():
            runner.drop_graphs()
        del runners
        gc.collect()
        rank.all_to_all.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
