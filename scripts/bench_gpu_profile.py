"""Where the host time of a split step goes: Python by sampling, torch's calls by its profiler.

    python scripts/bench_gpu_profile.py [--quick] [--json FILE]

The sampler is a timer signal. Its handler runs on the only thread that works, as soon as the C call that was going on
has returned, so the time of a C call is charged to the Python line that made it. A deterministic profiler would be
wrong here: it pairs each return with the last call, and a switch between greenlets breaks the pairs. (And a sampling
thread would see the other one only where that lets go of the interpreter.)

Beside the split step the same two microbatches one after the other: the difference is what splitting costs, and may
well lie in lines of the model, when a switch has pushed what they need out of the processor's caches.
"""

from __future__ import annotations

import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from bench_gpu_common import Bench, Report, Table, main
from bench_gpu_model import SerialLane, make_model
from bench_gpu_step import LAYERS, Steps

PERIOD_S = 0.0002
SERIAL, SPLIT = "one after the other", "greenlets"


class Sampler:
    """Counts where the main thread's Python frames are, every `PERIOD_S` seconds, inside `with`."""

    def __init__(self) -> None:
        self.hits: Counter[tuple[CodeType, int]] = Counter()

    def __enter__(self) -> Sampler:
        self._before = signal.signal(signal.SIGALRM, self._hit)
        signal.setitimer(signal.ITIMER_REAL, PERIOD_S, PERIOD_S)
        return self

    def __exit__(self, *exc: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)

    def _hit(self, number: int, frame: FrameType | None) -> None:
        if frame is not None:
            self.hits[frame.f_code, frame.f_lasti] += 1

    def by_line(self) -> Counter[str]:
        counted: Counter[str] = Counter()
        for (code, offset), hits in self.hits.items():
            line = next((n for start, end, n in code.co_lines() if start <= offset < end), code.co_firstlineno)
            counted[f"{short(code.co_filename)}:{line} {full_name(code)}"] += hits
        return counted

    def by_function(self) -> Counter[str]:
        counted: Counter[str] = Counter()
        for (code, _), hits in self.hits.items():
            counted[f"{short(code.co_filename)} {full_name(code)}"] += hits
        return counted

    def by_file(self) -> Counter[str]:
        counted: Counter[str] = Counter()
        for (code, _), hits in self.hits.items():
            counted[short(code.co_filename)] += hits
        return counted


def full_name(code: CodeType) -> str:
    """Python 3.10 has no qualified name in code objects."""
    return str(getattr(code, "co_qualname", code.co_name))


def short(path: str) -> str:
    """The last two parts of a path."""
    return "/".join(Path(path).parts[-2:])


def sample(bench: Bench, steps: dict[str, Callable[[], Any]], seconds: float) -> dict[str, tuple[Sampler, float, int]]:
    """Run the steps in turn for `seconds`, the GPU drained (unsampled) before each.

    Name -> samples, sampled seconds, number of steps.
    """
    samplers = {name: Sampler() for name in steps}
    spent, count = dict.fromkeys(steps, 0.0), 0
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, step in steps.items():
            bench.device.synchronize()
            with samplers[name]:
                begin = time.perf_counter()
                step()
                spent[name] += time.perf_counter() - begin
        count += 1
    return {name: (samplers[name], spent[name], count) for name in steps}


def sampled_table(title: str, counts: dict[str, Counter[str]], scale: dict[str, float], most: int) -> Table:
    """Microseconds a step and key, the keys in which the split step spends most or grows most."""
    split, serial = counts[SPLIT], counts[SERIAL]

    def us(name: str, key: str) -> float:
        return counts[name][key] * scale[name]

    keys = set(split) | set(serial)
    top = sorted(keys, key=lambda k: -max(us(SPLIT, k), 2 * (us(SPLIT, k) - us(SERIAL, k))))[:most]
    table = Table(title, ["", SERIAL, SPLIT, "more"])
    for key in sorted(top, key=lambda k: us(SERIAL, k) - us(SPLIT, k)):
        one, two = us(SERIAL, key), us(SPLIT, key)
        table.rows.append([key, f"{one:.0f}", f"{two:.0f}", f"{two - one:+.0f}"])
    return table


def profiled(bench: Bench, step: Callable[[], Any], steps: int) -> dict[str, tuple[float, float]]:
    """Torch's call -> (calls a step, own host microseconds a step), by torch.profiler, whose own cost is in it."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if not bench.on_cpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(steps):
            step()
            bench.device.synchronize()
    found = {}
    for event in profile.key_averages():
        if event.self_cpu_time_total > 0 and not event.key.startswith("cudaDeviceSynchronize"):
            found[event.key] = (event.count / steps, event.self_cpu_time_total / steps)
    return found


def measure(bench: Bench) -> Report:
    layers = 4 if bench.on_cpu else LAYERS
    steps = Steps(bench, make_model(layers, bench.tensors, torch.bfloat16, small=bench.on_cpu), 64)
    variants = {SERIAL: steps.serial(SerialLane), SPLIT: steps.split("greenlet")}
    for step in variants.values():
        for _ in range(3):
            step()
    report = Report()
    samplers: dict[str, Sampler] = {}
    scale: dict[str, float] = {}
    for name, (sampler, spent, count) in sample(bench, variants, bench.either(8, 1)).items():
        samplers[name] = sampler
        total = sum(sampler.hits.values())
        scale[name] = spent / count / total * 1e6 if total else 0.0
        report.said.append(f"{name}: {count} steps of {spent / count * 1e3:.2f} ms (sampled), {total} samples")
    for title, view, most in (
        ("Own host time by file (us a step, 64 tokens)", Sampler.by_file, 14),
        ("Own host time by function, C calls included", Sampler.by_function, 28),
        ("Own host time by line, C calls included", Sampler.by_line, 40),
    ):
        counts = {name: view(sampler) for name, sampler in samplers.items()}
        report.tables.append(sampled_table(title, counts, scale, most))
        report.numbers[title] = {
            name: {key: round(hits * scale[name], 1) for key, hits in held.most_common(80)}
            for name, held in counts.items()
        }
    calls = {name: profiled(bench, step, bench.either(5, 2)) for name, step in variants.items()}
    table = Table("Torch's calls by torch.profiler (own host us a step)", ["", "calls", SERIAL, "calls", SPLIT])
    for key in sorted(calls[SPLIT], key=lambda k: -calls[SPLIT][k][1])[:18]:
        one, two = calls[SERIAL].get(key, (0, 0)), calls[SPLIT][key]
        table.rows.append([key[:60], f"{one[0]:.0f}", f"{one[1]:.0f}", f"{two[0]:.0f}", f"{two[1]:.0f}"])
    report.tables.append(table)
    report.numbers["calls"] = calls
    return report


if __name__ == "__main__":
    sys.exit(main(measure, __doc__.splitlines()[0]))
