"""What it costs a server to be recorded: the step with the recorder on, the writing, and both spread over every n-th.

    python scripts/bench_trace.py [--quick] [--out FILE.json]

A step is two microbatches of 27 layers that do nothing but yield, with a receive at each yield (low latency, two yields
a layer) or with none (high throughput, three), so that what is measured is the scheduler and the recording and nothing
of a model. Everything goes through `ServerTrace` as in a server, into a folder of real files. Steps with and without
take turns, and medians are printed. The last rows are what a step costs more, on average, where every n-th is recorded.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dbo_greenlet import Scheduler, dbo_maybe_run_recv_hook, dbo_register_recv_hook, dbo_yield
from dbo_greenlet.trace.schema import to_json
from dbo_greenlet.vllm.recording import ServerTrace

LAYERS = 27
CUTS = [(0, 64, 0, 64), (64, 128, 64, 128)]
EVERY = (1, 10, 100)
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
        for stage in ("before_dispatch", "before_combine", "combine"):
            dbo_yield(f"layer{layer}.{stage}")


MODELS: dict[str, Callable[[], None]] = {"low latency": low_latency, "high throughput": high_throughput}


def measure(model: Callable[[], None], steps: int, folder: str) -> dict[str, Any]:
    """Medians in microseconds of a step of two such microbatches, and the bytes that it leaves in the trace."""
    trace = ServerTrace(folder, every=1, megabytes=8.0, rank=0, world=1, settings={"model": "none"})
    if trace.problem is not None:
        raise SystemExit(trace.problem)
    plain, recording = Scheduler(strict=False), Scheduler(strict=False, instruments=[trace.recorder])
    entries = [model, model]
    samples: dict[str, list[float]] = {name: [] for name in ("plain", "recorded", "written", "by records")}

    def timed(name: str, function: Callable[[], Any]) -> Any:
        begin = time.perf_counter_ns()
        result = function()
        samples[name].append((time.perf_counter_ns() - begin) / 1000)
        return result

    for _ in range(10):
        plain.run(entries), recording.run(entries)
    records = ""
    for _ in range(steps):
        timed("plain", lambda: plain.run(entries))
        trace.due()
        result = timed("recorded", lambda: recording.run(entries))
        timed(
            "written",
            lambda result=result: trace.split_step(
                kind="eager", slices=CUTS, tokens=128, padded=128, schedule=result.schedule, error=None
            ),
        )
        # For comparison: the same lines with a record made for each, as `dbo-greenlet run` writes them.
        records = timed("by records", lambda: "\n".join(map(to_json, trace.recorder.records(step=0))))
    if trace.problem is not None:
        raise SystemExit(trace.problem)
    samples["asked"] = [seconds * 1e6 / ASKED for seconds in timeit.repeat(trace.due, number=ASKED, repeat=9)]
    trace.close()
    return {name: statistics.median(values) for name, values in samples.items()} | {
        "lines": records.count("\n") + 2,
        "bytes": len(records) + 1,
    }


def rows_of(name: str, medians: dict[str, Any]) -> dict[str, float]:
    more = medians["recorded"] - medians["plain"] + medians["written"]
    rows = {
        f"{name}: a step, not recorded": medians["plain"],
        f"{name}: a step with the recorder on": medians["recorded"],
        f"{name}: writing it ({medians['lines']} lines, {medians['bytes'] / 1000:.0f} kB)": medians["written"],
        f"{name}: making its lines record by record instead": medians["by records"],
        f"{name}: asking whether a step is due": medians["asked"],
    }
    rows |= {f"{name}: more per step, every {n}": more / n + medians["asked"] for n in EVERY}
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few seconds, to see that it runs")
    parser.add_argument("--out", type=Path, default=Path("out/bench_trace.json"))
    arguments = parser.parse_args()
    steps = 100 if arguments.quick else 1000
    rows: dict[str, float] = {}
    for name, model in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            rows |= rows_of(name, measure(model, steps, folder))
    width = max(map(len, rows))
    print(f"{'':{width}}  median us")
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
