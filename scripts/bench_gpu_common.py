"""What the GPU benchmarks share: taking turns, medians, tables, and what is recorded of the machine.

Every comparison is a module with a `measure(bench)` that returns a `Report`, and runs in a process of its own. Within
it the variants take turns in each round, so that a clock that changes in between treats all alike.

`--cpu` runs the same code on the CPU device, to see that a benchmark works where there is no GPU. Its numbers mean
nothing.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import bench_switch
import torch

import dbo_greenlet
from dbo_greenlet.devices import Device, cpu_device

__all__ = ["Bench", "Report", "Table", "machine", "main", "print_report", "spread", "take_turns"]

PACKAGE = Path(dbo_greenlet.__file__).resolve().parent


@dataclass(frozen=True)
class Bench:
    """How a comparison is to be run: on which device, and whether a quick look is enough."""

    device: Device
    quick: bool
    asked_rounds: int | None = None

    @property
    def tensors(self) -> str:
        """The device in torch's words."""
        return "cpu" if self.on_cpu else self.device.name

    @property
    def on_cpu(self) -> bool:
        return self.device is cpu_device()

    def rounds(self, full: int, quick: int) -> int:
        """Rounds of taking turns: what `--rounds` says, or one of the two."""
        return self.asked_rounds or self.either(full, quick)

    def either(self, full: int, quick: int) -> int:
        return quick if self.quick else full


@dataclass
class Table:
    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)


@dataclass
class Report:
    """What a comparison found: tables to print, sentences, and the numbers behind them (JSON types)."""

    tables: list[Table] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least, most and number of `values`."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "rounds": len(values)}


def host_speed() -> float:
    """Milliseconds of a fixed piece of Python: what of a difference between two runs is the host's clock."""
    begin = time.perf_counter()
    total = 0
    for k in range(200_000):
        total += k & 7
    return (time.perf_counter() - begin) * 1e3


def in_words(held: Mapping[str, float], digits: int = 2) -> str:
    return f"{held['median']:.{digits}f} ({held['min']:.{digits}f} to {held['max']:.{digits}f})"


def take_turns(
    variants: Mapping[str, Callable[[], Mapping[str, float]]], rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Variant -> quantity -> one value a round. The order of the variants turns by one place from round to round.

    Python's garbage collector is off while a variant runs and called between two rounds: a collection costs
    milliseconds and would fall to whichever variant happens to cross the threshold.
    """
    names = list(variants)
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    gc.collect()
    gc.freeze()
    try:
        for number in range(rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                gc.disable()
                try:
                    values = variants[name]()
                finally:
                    gc.enable()
                for quantity, value in values.items():
                    samples[name].setdefault(quantity, []).append(value)
            gc.collect()
    finally:
        gc.unfreeze()
    return samples


# -- what is recorded ------------------------------------------------------------------------------------------------


def commit() -> str:
    """What DBO_GREENLET_COMMIT says, or the working copy's commit, with a "+" where the package differs from it."""
    if said := os.environ.get("DBO_GREENLET_COMMIT"):
        return said
    head, changed = git("rev-parse", "--short", "HEAD"), git("status", "--porcelain", "--", ".")
    return f"{head}+" if changed else head or "unknown"


def git(*arguments: str) -> str:
    asked = subprocess.run(["git", *arguments], cwd=PACKAGE, capture_output=True, text=True, check=False)
    return asked.stdout.strip()


def package_hash() -> str:
    """Eight hex characters over the package's sources: names what was measured where changes are not committed."""
    digest = hashlib.blake2b(digest_size=4)
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(PACKAGE).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def machine(bench: Bench) -> dict[str, Any]:
    known = bench_switch.machine()
    known["commit"], known["package"] = commit(), package_hash()
    known["date"] = time.strftime("%Y-%m-%d %H:%M")
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        known["cpu"] = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")
    if not bench.on_cpu:
        known["gpu"] = torch.cuda.get_device_name()
        known["versions"]["cuda"] = str(torch.version.cuda)
    return known


# -- printing --------------------------------------------------------------------------------------------------------


def print_report(report: Mapping[str, Any]) -> None:
    """Print a report as read from JSON: plain text, columns aligned."""
    for table in report["tables"]:
        print(f"\n{table['title']}")
        lines = [table["columns"], *table["rows"]]
        widths = [max(len(str(line[k])) for line in lines) for k in range(len(table["columns"]))]
        for line in lines:
            first, *rest = (str(cell) for cell in line)
            cells = [f"{cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True)]
            print("  ".join([f"{first:{widths[0]}}", *cells]).rstrip())
    for sentence in report["said"]:
        print(f"- {sentence}")
    sys.stdout.flush()


# -- one comparison as a program -------------------------------------------------------------------------------------


def open_device(on_cpu: bool) -> Device:
    if on_cpu:
        return cpu_device()
    from dbo_greenlet.devices.cuda import CudaDevice

    torch.cuda.init()
    return CudaDevice(0)


def main(measure: Callable[[Bench], Report], description: str) -> int:
    """Run one comparison: `[--quick] [--rounds N] [--cpu] [--json FILE]`; prints its tables."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a few seconds, to see that it runs")
    parser.add_argument("--rounds", type=int, default=None, help="rounds of taking turns")
    parser.add_argument("--cpu", action="store_true", help="on the CPU device: a dry run whose numbers mean nothing")
    parser.add_argument("--json", type=Path, default=None, help="also write the report there")
    arguments = parser.parse_args()
    bench = Bench(open_device(arguments.cpu), arguments.quick, arguments.rounds)
    begin = time.perf_counter()
    speeds = [host_speed() for _ in range(5)]
    with torch.inference_mode():
        report = asdict(measure(bench))
    speeds += [host_speed() for _ in range(5)]
    report["host_speed_ms"] = spread(speeds)
    report["said"].append(f"a fixed piece of Python took {in_words(report['host_speed_ms'])} ms here")
    report["machine"] = machine(bench)
    report["quick"] = arguments.quick
    report["seconds"] = round(time.perf_counter() - begin, 1)
    print_report(report)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    print(json.dumps(machine(Bench(open_device("--cpu" in sys.argv), False))))
