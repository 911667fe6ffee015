"""How many schedules a second an exploration runs and judges, on one core.

    python scripts/bench_explore.py [--quick] [--out FILE.json]

Each row explores one step exhaustively, again and again, on the virtual device: the step is built anew for each
schedule, run by the real scheduler, and judged by the verdicts that the row names. What an exploration does besides
(the reference, the comparison of two runs, the count) is in the time, and not in the number of schedules. The rows take
turns within each round, and medians over the rounds are printed. The aim is 2,000 schedules a second for two layers of
low latency with the verdicts on order and hazards, without numerics.

    order     the step succeeds; laws 4 and 6, read off the recorded program; nothing is left behind
    hazards   no hazard in the recorded program
    outputs   bit-equal to the microbatches one after the other: hashes of everything that was read (numerics)

The process has one thread and keeps to one core. Seconds are those that it had the core for (CPU time), so that other
processes do not count; they still take caches and clock from it. torch is imported at last, if it is there: with it the
scheduler also compares torch's thread state at every yield, which is what a test session pays that uses torch.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dbo_greenlet.testing.explore import Exploration, explore
from dbo_greenlet.testing.layer_programs import high_throughput, low_latency
from dbo_greenlet.testing.step_run import Build
from dbo_greenlet.testing.verdicts import Verdict, laws_kept, no_hazard, nothing_left, same_outputs, succeeded

AIM = 2000.0
AIMED_AT = "low latency, 2 layers: order, hazards"
ORDER: tuple[Verdict, ...] = (succeeded, laws_kept, nothing_left)


@dataclass(frozen=True)
class Row:
    """One step, how it is explored and judged."""

    name: str
    build: Build
    verdicts: tuple[Verdict, ...]
    how: str = "exhaustive"

    def explore(self) -> Exploration:
        return explore(self.build, how=self.how, schedules=200, verdicts=self.verdicts, report=None)


def rows() -> list[Row]:
    programs: dict[str, Callable[..., Build]] = {"low latency": low_latency, "high throughput": high_throughput}
    out = [
        Row(f"{name}, {layers} layer{'s' if layers > 1 else ''}: order, hazards", build(layers, numerics=False), JUDGED)
        for name, build in programs.items()
        for layers in ((1, 2, 3) if name == "low latency" else (1, 2))
    ]
    two = low_latency(2, numerics=False)
    return [
        *out,
        Row("low latency, 2 layers: order, hazards (random)", two, JUDGED, "random"),
        Row("low latency, 2 layers: order", two, ORDER),
        Row("low latency, 2 layers: none", two, ()),
        Row("low latency, 2 layers: order, hazards, outputs", low_latency(2), (*JUDGED, same_outputs)),
    ]


JUDGED: tuple[Verdict, ...] = (*ORDER, no_hazard)


def one_round(row: Row, seconds: float) -> tuple[float, int]:
    """(schedules a second, schedules of one exploration), measured for about `seconds`."""
    schedules, begin = 0, time.process_time()
    while (passed := time.process_time() - begin) < seconds or not schedules:
        found = row.explore()
        schedules += found.schedules
    return schedules / passed, found.schedules


def fixed_piece() -> float:
    """Microseconds of CPU time that a fixed piece of Python takes: how quick the host is just now."""

    class Counter:
        value = 0

        def add(self, number: int) -> None:
            self.value += number

    counter = Counter()
    begin = time.process_time()
    for number in range(20_000):
        counter.add(number)
    return (time.process_time() - begin) * 1e6


def measure(every: list[Row], rounds: int, seconds: float, pieces: list[float]) -> dict[str, dict[str, Any]]:
    """For each row the medians of the rounds, schedules of one exploration, and the lowest and highest round.

    `pieces` gets `fixed_piece()` for each round.
    """
    rates: dict[str, list[float]] = {row.name: [] for row in every}
    space: dict[str, int] = {}
    for row in every:
        row.explore()  # first run: caches, imports
    for number in range(rounds):
        # Each row is first in turn, so that none always runs on a warmer or a throttled core.
        turn = number % len(every)
        pieces.append(fixed_piece())
        for row in every[turn:] + every[:turn]:
            rate, space[row.name] = one_round(row, seconds)
            rates[row.name].append(rate)
    return {
        name: {
            "schedules": space[name],
            "per_second": statistics.median(values),
            "least": min(values),
            "most": max(values),
            "us": 1e6 / statistics.median(values),
        }
        for name, values in rates.items()
    }


def table(measured: dict[str, dict[str, Any]]) -> str:
    width = max(map(len, measured))
    lines = [f"{'':{width}} {'schedules':>10} {'a second':>10} {'(least':>9} {'most)':>9} {'us each':>9}"]
    for name, row in measured.items():
        lines.append(
            f"{name:{width}} {row['schedules']:10,} {row['per_second']:10,.0f} {row['least']:9,.0f} "
            f"{row['most']:9,.0f} {row['us']:9.0f}"
        )
    return "\n".join(lines)


def keep_to_one_core() -> int | None:
    """The core that this process now keeps to; None where the system cannot do that."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    return core


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few seconds, to see that it runs")
    parser.add_argument("--out", type=Path, default=Path("out/bench_explore.json"))
    asked = parser.parse_args(arguments)
    rounds, seconds = (2, 0.02) if asked.quick else (15, 0.3)
    core = keep_to_one_core()
    pieces: list[float] = []
    before = "torch" in sys.modules
    every = rows()
    measured = measure(every, rounds, seconds, pieces)
    if not before and importlib.util.find_spec("torch") is not None:
        importlib.import_module("torch")
        with_torch = measure([row for row in every if row.name == AIMED_AT], rounds, seconds, pieces)
        measured[f"{AIMED_AT} (torch imported)"] = with_torch[AIMED_AT]
    print(table(measured))
    rate = measured[AIMED_AT]["per_second"]
    print(f"aim: {AIM:,.0f} a second for {AIMED_AT}: {'reached' if rate >= AIM else 'missed'} with {rate:,.0f}")
    print(f"a fixed piece of Python took {statistics.median(pieces):,.0f} us ({min(pieces):,.0f} at best)")
    here = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "core": core,
        "load": os.getloadavg() if hasattr(os, "getloadavg") else None,
        "date": time.strftime("%Y-%m-%d"),
        "rounds": rounds,
        "seconds": seconds,
        "fixed_piece_us": {"median": statistics.median(pieces), "least": min(pieces)},
        "torch_imported_before": before,
    }
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(
        json.dumps({"machine": here, "aim": AIM, "aimed_at": AIMED_AT, "rows": measured}, indent=1) + "\n"
    )
    print(f"written to {asked.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
