"""Host time of a split step as the microbatches go from 2 to 8 and the layers from 1 to 100: is it linear?

    python scripts/bench_gpu_scaling.py [--quick] [--json FILE]

32 tokens a microbatch, so that each launches the same work however many there are. One straight line, host time over
(microbatches x layers), is fitted by least squares to the medians of all combinations; the largest deviation from it is
stated. The same for the microbatches one after the other; the difference of the two slopes is what a microbatch pays
per layer for its four yields.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from bench_gpu_common import Bench, Report, Table, main, spread, take_turns
from bench_gpu_model import YIELDS_PER_LAYER, SerialLane, make_model
from bench_gpu_step import Steps, timed

MICROBATCHES = (2, 3, 4, 8)
LAYERS = (1, 10, 30, 60, 100)
TOKENS_EACH = 32
SERIAL, SPLIT = "one after the other", "greenlets"


def fit(points: dict[tuple[int, int], float]) -> dict[str, Any]:
    """Least squares of host ms over microbatches x layers: slope and start in us, deviations in us and per cent."""
    xs = [count * layers for count, layers in points]
    ys = list(points.values())
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / sum((x - mean_x) ** 2 for x in xs)
    start = mean_y - slope * mean_x
    off = {key: y - (start + slope * x) for key, x, y in zip(points, xs, ys, strict=True)}
    worst = max(off, key=lambda key: abs(off[key]))
    of_range = max(abs(value) for value in off.values()) / (max(ys) - min(ys))
    return {
        "slope_us": slope * 1e3,
        "start_us": start * 1e3,
        "worst": {"microbatches": worst[0], "layers": worst[1], "off_us": off[worst] * 1e3},
        "worst_of_range": of_range,
        "worst_of_value": max(abs(off[key]) / points[key] for key in points if key[1] >= LAYERS[1]),
    }


def interval(hosts: dict[str, dict[tuple[int, int], list[float]]], times: int = 200) -> tuple[float, float]:
    """Between which slopes the difference of the two lies in 90 % of draws of as many rounds, with repetition."""
    draw = random.Random(0)
    rounds = len(next(iter(hosts[SPLIT].values())))
    found = []
    for _ in range(times):
        picked = [draw.randrange(rounds) for _ in range(rounds)]
        slopes = {
            name: fit({key: statistics.median(values[k] for k in picked) for key, values in held.items()})["slope_us"]
            for name, held in hosts.items()
        }
        found.append(slopes[SPLIT] - slopes[SERIAL])
    found.sort()
    return found[times // 20], found[-1 - times // 20]


def measure(bench: Bench) -> Report:
    layer_counts = (1, 10, 12) if bench.on_cpu else LAYERS
    model = make_model(max(layer_counts), bench.tensors, torch.bfloat16, small=bench.on_cpu)
    variants: dict[str, Callable[[], dict[str, float]]] = {}
    keys = {}
    for count, layers in product(MICROBATCHES, layer_counts):
        steps = Steps(bench, model, TOKENS_EACH * count, count, layers)
        for name, step in ((SERIAL, steps.serial(SerialLane)), (SPLIT, steps.split("greenlet"))):
            step()
            key = f"{name}: {count} x {layers}"
            keys[key] = (name, count, layers)
            variants[key] = partial(timed, bench, step)
    samples = take_turns(variants, bench.rounds(15, 3))
    report = Report()
    points: dict[str, dict[tuple[int, int], float]] = {SERIAL: {}, SPLIT: {}}
    held: dict[str, Any] = {}
    for key, (name, count, layers) in keys.items():
        held[key] = {quantity: spread(values) for quantity, values in samples[key].items()}
        points[name][count, layers] = held[key]["host"]["median"]
    for name, found in points.items():
        table = Table(f"Host time of a step, {name} (ms)", ["microbatches \\ layers", *map(str, layer_counts)])
        for count in MICROBATCHES:
            table.rows.append([str(count), *(f"{found[count, layers]:.2f}" for layers in layer_counts)])
        report.tables.append(table)
    fits = {name: fit(found) for name, found in points.items()}
    # The host is disturbed for seconds at a time; the least of the rounds is what it does undisturbed.
    least = {
        name: {key: held[f"{name}: {key[0]} x {key[1]}"]["host"]["min"] for key in points[name]} for name in points
    }
    fits |= {f"{name}, least of the rounds": fit(found) for name, found in least.items()}
    for name, line in fits.items():
        worst = line["worst"]
        report.said.append(
            f"{name}: {line['slope_us']:.1f} us a microbatch and layer, plus {line['start_us']:.0f} us a step; "
            f"furthest from the line: {worst['off_us']:+.0f} us at {worst['microbatches']} microbatches of "
            f"{worst['layers']} layers, {line['worst_of_range'] * 100:.1f} % of the range; from {LAYERS[1]} layers on "
            f"at most {line['worst_of_value'] * 100:.1f} % of the value"
        )
    more = fits[SPLIT]["slope_us"] - fits[SERIAL]["slope_us"]
    hosts = {name: {keys[key][1:]: samples[key]["host"] for key in keys if keys[key][0] == name} for name in points}
    low, high = interval(hosts)
    report.said.append(
        f"what yields add: {more:.1f} us a microbatch and layer, {more / YIELDS_PER_LAYER:.2f} us a yield (90 % of "
        f"resampled rounds: {low / YIELDS_PER_LAYER:.2f} to {high / YIELDS_PER_LAYER:.2f})"
    )
    report.numbers = {"samples": held, "fits": fits, "added_us": [more, low, high]}
    return report


if __name__ == "__main__":
    sys.exit(main(measure, __doc__.splitlines()[0]))
