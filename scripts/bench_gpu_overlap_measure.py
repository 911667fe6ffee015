"""One row of scripts/bench_gpu_overlap.py: one model and number of tokens, eager and as a graph, over all lengths."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from bench_gpu_common import take_turns
from bench_gpu_overlap_layers import NoWire, Program, Shape, make_batch, reference_layer
from bench_gpu_overlap_limit import Stages, limit, limit_with_ends, round_robin
from bench_gpu_overlap_wire import LEAD_OF_EAGER, LEAD_OF_GRAPHS, CarryingWire, EventPair, GpuWire, seconds_on_gpu

from dbo_greenlet.graphs import GraphPool

MICROBATCHES = 2
# Communication of a microbatch in a layer over its compute in a layer.
RATIOS = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
# In turn is measured at this one only, and from a graph: everywhere it is the compute plus the transfers.
IN_TURN_RATIO = 1.0
MOST_CONTEXT = 1 << 16

Enqueue = Callable[[], Any]
Variants = dict[str, Callable[[], Mapping[str, float]]]
Samples = Mapping[str, Mapping[str, list[float]]]  # variant -> "gpu" or "host" -> milliseconds, one a round


@dataclass(frozen=True)
class Row:
    """What to measure. `context` None: as long as makes attention and experts of a microbatch take the same time."""

    shape: Shape
    tokens: int
    layers: int
    context: int | None = None

    @property
    def name(self) -> str:
        return f"{self.shape.name}, {self.tokens} tokens" + ("" if self.context is None else ", short context")


def median_seconds(enqueue: Enqueue, repeats: int = 7) -> float:
    return statistics.median(seconds_on_gpu(enqueue) for _ in range(repeats))


def measure_stages(program: Program, graphs: GraphPool) -> Stages:
    found = {}
    for stage in ("attend", "experts", "unpack"):
        found[stage] = median_seconds(graphs.capture(program.only(stage)).replay) / program.layers
    return Stages(**found)


def balance(program: Program, graphs: GraphPool) -> None:
    """Choose the context so that what comes before a dispatch takes as long as what comes before a combine."""
    times = []
    for context in (2048, 8192):
        program.set_context(context)
        stages = measure_stages(program, graphs)
        times.append((context, stages.attend + stages.unpack - stages.experts))
    (c0, t0), (c1, t1) = times
    wanted = c0 - t0 * (c1 - c0) / (t1 - t0) if t1 > t0 else MOST_CONTEXT
    program.set_context(min(max(round(wanted / 128), 1) * 128, MOST_CONTEXT))


# -- correctness -----------------------------------------------------------------------------------------------------


def check(program: Program, graphs: GraphPool) -> dict[str, Any]:
    """Raises where one layer is not what float32 says, or the order or the execution changes a bit."""
    batch = make_batch(program.shape, 64, 1.0, program.device.name, program._generator)
    layers, program.layers = program.layers, 1
    try:
        got = program.forward(batch, NoWire()).float()
    finally:
        program.layers = layers
    wanted = reference_layer(program, batch)
    error = ((got - wanted).norm() / wanted.norm()).item()
    if not error < 1e-2:
        raise RuntimeError(f"one layer is off by {error:.2e} of its norm from float32")
    wire = CarryingWire()
    expected = program.in_turn(wire)
    if all(map(torch.equal, expected, program.in_turn(NoWire()))):
        raise RuntimeError("rows that arrive in another order changed nothing: this check could not fail")
    for name, run in (("split", program.split), ("in turn", program.in_turn)):
        captured = graphs.capture(lambda run=run: run(wire), streams=[program.comm_stream])
        eager = run(wire)
        for tensor in captured.output:
            tensor.fill_(math.nan)
        captured.replay()
        torch.cuda.synchronize()
        for kind, outputs in (("eager", eager), ("replayed", captured.output)):
            if not all(map(torch.equal, outputs, expected)):
                raise RuntimeError(f"{name}, {kind}: not bit-equal to the same microbatches eager and in turn")
    return {"error_of_a_layer": error, "bit_equal": True}


# -- the sweep -------------------------------------------------------------------------------------------------------


class Sweep:
    """All variants of one row."""

    def __init__(self, program: Program, wire: GpuWire, graphs: GraphPool, ratios: Sequence[float]) -> None:
        self.program, self.wire, self.graphs = program, wire, graphs
        self.stages = measure_stages(program, graphs)
        replay = graphs.capture(lambda: program.in_turn(NoWire())).replay
        of_a_layer = median_seconds(replay, 15) / (program.layers * MICROBATCHES)
        self.stages = self.stages.scaled_to(of_a_layer)
        self.transfers = {ratio: ratio * of_a_layer / 2 for ratio in ratios}
        self._lengths = {ratio: wire.lengths_for(each, MICROBATCHES) for ratio, each in self.transfers.items()}
        self._pair = EventPair()

    def replayed(self) -> Variants:
        """Each variant as a graph, and the transfers of each length alone."""
        runs = self._runs()
        for ratio, lengths in self._lengths.items():
            runs[f"wire {ratio}"] = self._on_wire(lengths, self._wire_alone)
        if IN_TURN_RATIO in self._lengths:
            in_turn = self._on_wire(self._lengths[IN_TURN_RATIO], lambda: self.program.in_turn(self.wire))
            runs[f"in turn {IN_TURN_RATIO}"] = in_turn
        runs["split, one stream"] = lambda: self.program.split_on_one_stream(NoWire())
        table: Variants = {}
        for name, run in runs.items():
            replay = self.graphs.capture(run, streams=[self.program.comm_stream]).replay
            table[name] = partial(self._time, replay, LEAD_OF_GRAPHS)
            if name == "compute":
                table["compute beside the wire"] = partial(self._time, replay, LEAD_OF_GRAPHS, self._busy_wire)
        return table

    def eager(self) -> Variants:
        return {name: partial(self._time, run, LEAD_OF_EAGER) for name, run in self._runs().items()}

    def _runs(self) -> dict[str, Enqueue]:
        program, nothing = self.program, NoWire()
        runs: dict[str, Enqueue] = {
            "compute": lambda: program.in_turn(nothing),
            "unsplit compute": lambda: program.unsplit(nothing),
            "split, no transfers": lambda: program.split(nothing),
        }
        for ratio, lengths in self._lengths.items():
            runs[f"unsplit {ratio}"] = self._on_wire(lengths, lambda: program.unsplit(self.wire))
            runs[f"split {ratio}"] = self._on_wire(lengths, lambda: program.split(self.wire))
        return runs

    def _on_wire(self, lengths: tuple[int, int], run: Enqueue) -> Enqueue:
        def enqueue() -> Any:
            self.wire.lengths = lengths
            return run()

        return enqueue

    def _wire_alone(self) -> None:
        rows = self.program.whole.hidden
        for _ in range(2 * self.program.layers * MICROBATCHES):
            self.wire.transfer(rows, rows, 1 / MICROBATCHES)

    def _busy_wire(self) -> None:
        """Transfers back to back for half as long again as the compute of a step, with no dependency on it."""
        self.wire.lengths = self.wire.lengths_for(self.stages.total / 2, MICROBATCHES)
        rows = self.program.whole.hidden
        with torch.cuda.stream(self.program.comm_stream.raw):
            for _ in range(3 * self.program.layers * MICROBATCHES):
                self.wire.transfer(rows, rows, 1 / MICROBATCHES)

    def _time(self, enqueue: Enqueue, lead: int, before: Enqueue | None = None) -> Mapping[str, float]:
        host = [0.0, 0.0]

        def watched() -> None:
            host[0] = time.perf_counter()
            enqueue()
            host[1] = time.perf_counter()

        return {"gpu": self._pair.seconds(watched, before, lead) * 1e3, "host": (host[1] - host[0]) * 1e3}


def take_turns_for(variants: Variants, seconds: float, least: int) -> tuple[Samples, int]:
    """As many rounds as fit into `seconds`, at least `least`, after one that warms up; the samples, and how many."""
    begin = time.perf_counter()
    take_turns(variants, 1)
    rounds = min(max(int(seconds / (time.perf_counter() - begin)), least), 60)
    return take_turns(variants, rounds), rounds


def measure_row(
    row: Row, device: Any, wire: GpuWire, *, ratios: Sequence[float], seconds: float, eager: bool
) -> dict[str, dict[str, Any]]:
    """Row name with its mode -> what was found; times in milliseconds.

    Raises:
        RuntimeError: the program is not right: see `check`.
    """
    graphs = GraphPool(device)
    program = Program(row.shape, row.tokens, row.layers, device, context=row.context or 1024, count=MICROBATCHES)
    if row.context is None:
        balance(program, graphs)
    checked = check(program, graphs)
    sweep = Sweep(program, wire, graphs, ratios)
    common = {
        "shape": row.shape.name,
        "tokens": row.tokens,
        "layers": row.layers,
        "context": program.context,
        "balanced": row.context is None,
        "wire": wire.name,
        "stages": {name: 1e3 * value for name, value in asdict(sweep.stages).items()},
        **checked,
    }
    replayed, rounds = take_turns_for(sweep.replayed(), 0.7 * seconds, 7)
    found = {f"{row.name}, graph": {**common, "mode": "graph", "rounds": rounds, **evaluate(sweep, replayed, replayed)}}
    if eager:
        samples, rounds = take_turns_for(sweep.eager(), 0.3 * seconds, 5)
        found[f"{row.name}, eager"] = {
            **common,
            "mode": "eager",
            "rounds": rounds,
            **evaluate(sweep, samples, replayed),
        }
    return found


def evaluate(sweep: Sweep, samples: Samples, replayed: Samples) -> dict[str, Any]:
    """The bounds come from `replayed`, the graphs' samples, whatever mode `samples` are of.

    Compute is what the GPU needs. Measured eagerly it would be the host's launches wherever these take longer, and a
    split step that is bound by its launches would look close to a limit that is made of launches.
    """

    def of(name: str, quantity: str = "gpu", where: Samples = samples) -> float:
        return statistics.median(where[name][quantity])

    layers = sweep.program.layers
    compute = of("compute", where=replayed)
    stages = sweep.stages.scaled_to(compute / (layers * MICROBATCHES))
    found: dict[str, Any] = {
        "compute": compute,
        "compute_same_mode": of("compute"),
        "compute_beside_wire": of("compute beside the wire", where=replayed),
        "unsplit_compute": of("unsplit compute"),
        "split_no_transfers": of("split, no transfers"),
        "split_one_stream": of("split, one stream", where=replayed),
        "host": {name: of(name, "host") for name in ("unsplit compute", "compute", "split, no transfers")},
        "points": [],
    }
    for ratio, asked in sweep.transfers.items():
        wire = of(f"wire {ratio}", where=replayed)
        transfer = wire / (2 * layers * MICROBATCHES)
        split, unsplit = of(f"split {ratio}"), of(f"unsplit {ratio}")
        bounds = {
            "limit": limit(compute, wire),
            "limit_with_ends": limit_with_ends(compute, wire, stages, transfer, MICROBATCHES),
            "round_robin": round_robin(stages, transfer, layers, MICROBATCHES),
            "limit_same_mode": limit(found["compute_same_mode"], wire),
        }
        found["points"].append(
            {
                "ratio": ratio,
                "transfer_asked": asked * 1e3,
                "transfer": transfer,
                "wire": wire,
                "unsplit": unsplit,
                "in_turn": of(f"in turn {ratio}") if f"in turn {ratio}" in samples else None,
                "split": split,
                "split_quartiles": _quartiles(samples[f"split {ratio}"]["gpu"]),
                "unsplit_quartiles": _quartiles(samples[f"unsplit {ratio}"]["gpu"]),
                "split_host": of(f"split {ratio}", "host"),
                "unsplit_host": of(f"unsplit {ratio}", "host"),
                "bounds": bounds,
                "over": {name: split / bound for name, bound in bounds.items()},
                "gain": unsplit / split,
                "host_bound": of(f"split {ratio}", "host") > bounds["limit"],
            }
        )
    return found


def _quartiles(values: Sequence[float]) -> list[float]:
    quartiles = statistics.quantiles(values, n=4)
    return [quartiles[0], quartiles[2]]
