"""What recording costs: each slice and event, the writing, and what is opt-in (memory, checksums).

    python scripts/bench_trace.py [--quick] [--out FILE.json]

A step is two microbatches of 27 layers that do nothing but yield, with a receive at each yield (low latency, two yields
a layer) or with a communication stream and its events (high throughput, three), so that what is measured is the
scheduler and the recording and nothing of a model. Everything goes through `ServerTrace` as in a server, into a folder
of real files. Steps with and without take turns, and printed is what a tenth of them stayed below, in processor time:
others may be at work on the machine. It is on CPU streams: what CUDA takes to record an event is no part of it.

The last rows are what nobody pays who does not ask for it: a checksum of a step's output, and noting what operators do
to memory. What GPU timelines cost measures `bench_gpu_timeline.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dbo_greenlet import Scheduler, dbo_maybe_run_recv_hook, dbo_register_recv_hook, dbo_yield
from dbo_greenlet.devices import CpuDevice
from dbo_greenlet.job.tracing import checksum
from dbo_greenlet.memory_recorder import MemoryRecorder
from dbo_greenlet.microbatch import make_ubatch_contexts
from dbo_greenlet.trace.schema import to_json
from dbo_greenlet.vllm.recording import ServerTrace
from dbo_greenlet.yields import (
    dbo_switch_to_compute_sync,
    dbo_yield_and_switch_from_comm_to_compute,
    dbo_yield_and_switch_from_compute_to_comm,
)

LAYERS = 27
CUTS = [(0, 64, 0, 64), (64, 128, 64, 128)]
EVERY = (1, 10, 100)
OPERATORS = 1_000
ASKED = 10_000  # calls that are timed together, because one is shorter than a look at the clock


def nothing() -> None:
    pass


def low_latency() -> None:
    for layer in range(LAYERS):
        for stage in ("dispatch", "combine"):
            dbo_maybe_run_recv_hook()
            dbo_register_recv_hook(nothing)
            dbo_yield(f"layer{layer}.{stage}")


def high_throughput() -> None:
    for layer in range(LAYERS):
        dbo_yield_and_switch_from_compute_to_comm(f"layer{layer}.before_dispatch")
        dbo_switch_to_compute_sync()
        dbo_yield_and_switch_from_compute_to_comm(f"layer{layer}.before_combine")
        dbo_yield_and_switch_from_comm_to_compute(f"layer{layer}.combine")


MODELS: dict[str, Callable[[], None]] = {"low latency": low_latency, "high throughput": high_throughput}


def low(values: list[float]) -> float:
    """What a tenth of them stays below."""
    return sorted(values)[len(values) // 10]


def measure(model: Callable[[], None], steps: int, folder: str) -> dict[str, Any]:
    """Microseconds of a step of two such microbatches, and what it leaves in the trace."""
    trace = ServerTrace(folder, every=1, megabytes=8.0, rank=0, world=1, settings={"model": "none"})
    if trace.problem is not None:
        raise SystemExit(trace.problem)
    device, recorder = CpuDevice(), trace.recorder
    deaf, telling = make_ubatch_contexts(2, device=device), make_ubatch_contexts(2, device=recorder.device(device))
    plain, recording = Scheduler(strict=False), Scheduler(strict=False, instruments=[recorder])
    entries = [model, model]
    samples: dict[str, list[float]] = {}

    def timed(name: str, function: Callable[[], Any]) -> Any:
        begin = time.thread_time_ns()
        result = function()
        samples.setdefault(name, []).append((time.thread_time_ns() - begin) / 1000)
        return result

    for _ in range(10):
        plain.run(entries, deaf), recording.run(entries, telling)
    records: list[Any] = []
    # Each of the four comes first equally often: the first one finds the processor's caches as the writing left them.
    kinds = [
        ("plain", plain, deaf),
        ("off", plain, telling),
        ("slices", recording, deaf),
        ("recorded", recording, telling),
    ]
    for number in range(steps):
        for name, scheduler, contexts in kinds[number % 4 :] + kinds[: number % 4]:
            timed(name, lambda s=scheduler, c=contexts: s.run(entries, c))
    for _ in range(steps // 4):
        trace.due()
        result = recording.run(entries, telling)
        # For comparison: the same lines with a record made for each.
        timed("by records", lambda: "\n".join(map(to_json, recorder.records(step=0))))
        timed(
            "written",
            lambda result=result: trace.split_step(
                kind="eager", slices=CUTS, tokens=128, padded=128, schedule=result.schedule, error=None
            ),
        )
        records = recorder.records(step=0)
    if trace.problem is not None:
        raise SystemExit(trace.problem)
    samples["asked"] = [
        seconds * 1e6 / ASKED
        for seconds in timeit.repeat(timer=time.thread_time, stmt=trace.due, number=ASKED, repeat=9)
    ]
    trace.close()
    found = [record.kind for record in records]
    return {name: low(values) for name, values in samples.items()} | {
        "count": {kind: found.count(kind) for kind in ("slice", "recv", "op")},
        "bytes": sum(len(to_json(record)) + 1 for record in records),
    }


def rows_of(name: str, figures: dict[str, Any]) -> dict[str, float]:
    more = figures["recorded"] - figures["plain"] + figures["written"]
    count = figures["count"]
    rows = {
        f"{name}: a step, not recorded": figures["plain"],
        f"{name}: the same, on a device that could tell of events": figures["off"],
        f"{name}: recorded, without events": figures["slices"],
        f"{name}: recorded": figures["recorded"],
        f"{name}: more per slice{', with its window' if count['recv'] else ''}": (figures["slices"] - figures["plain"])
        / count["slice"],
    }
    if count["op"]:
        rows[f"{name}: more per event ({count['op'] / count['slice']:.1f} a slice)"] = (
            figures["recorded"] - figures["slices"]
        ) / count["op"]
    rows |= {
        f"{name}: writing it ({sum(count.values()) + 1} lines, {figures['bytes'] / 1000:.0f} kB)": figures["written"],
        f"{name}: making its lines record by record instead": figures["by records"],
        f"{name}: asking whether a step is due": figures["asked"],
    }
    return rows | {f"{name}: more per step, every {n}": more / n + figures["asked"] for n in EVERY}


def opt_in(steps: int) -> dict[str, float]:
    """What a checksum of a step's output takes, and noting what an operator does to memory."""
    output = torch.rand(512, 2048)
    sums = [
        seconds * 1e6
        for seconds in timeit.repeat(
            timer=time.thread_time, stmt=lambda: checksum(output), number=1, repeat=max(5, steps // 20)
        )
    ]
    small = torch.rand(16, 16)

    def operators() -> None:
        for _ in range(OPERATORS):
            small + small

    memory = MemoryRecorder()
    figures = {}
    for name, instruments in (("plain", []), ("noted", [memory])):
        scheduler = Scheduler(strict=False, instruments=instruments)
        contexts = make_ubatch_contexts(1, device=memory.device)
        times = timeit.repeat(
            timer=time.thread_time,
            stmt=lambda s=scheduler, c=contexts: s.run([operators], c),
            number=1,
            repeat=max(5, steps // 50),
        )
        figures[name] = low(times) * 1e6 / OPERATORS
    lines = timeit.repeat(
        timer=time.thread_time, stmt=lambda: memory.json_lines(step=0), number=1, repeat=max(5, steps // 50)
    )
    return {
        "checksum of an output of [512, 2048] in float32": low(sums),
        "memory: an operator of 16 x 16 numbers, not noted": figures["plain"],
        "memory: the same, with what it reads, writes and frees": figures["noted"],
        "memory: making its two lines, behind the step": low(lines) * 1e6 / OPERATORS,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few seconds, to see that it runs")
    parser.add_argument("--out", type=Path, default=Path("out/bench_trace.json"))
    arguments = parser.parse_args()
    steps = 100 if arguments.quick else 1000
    torch.set_num_threads(1)
    rows: dict[str, float] = {}
    for name, model in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            rows |= rows_of(name, measure(model, steps, folder))
    rows |= opt_in(steps)
    width = max(map(len, rows))
    print(f"{'':{width}}  us")
    for name, value in rows.items():
        print(f"{name:{width}} {value:10.2f}")
    here = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "date": time.strftime("%Y-%m-%d"),
        "steps": steps,
        "layers": LAYERS,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({"machine": here, "unit": "us", "rows": rows}, indent=1) + "\n")
    print(f"written to {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
