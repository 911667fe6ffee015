"""What a GPU timeline costs: a step of 60 layers with its timing events and without, as a graph and eager.

    python scripts/bench_gpu_timeline.py [--quick] [--rounds N] [--json FILE]

A step is two microbatches, 482 slices: in each layer attention, a dispatch on the comm stream, experts and a combine on
the comm stream, with a yield at each change of streams. "small" runs kernels of 1 to 2 us, so that the graph's own
overhead shows; "long" sleeps of known lengths, as long as those of a model at some thousand tokens. "plain" has no comm
stream and half the yields (low latency). A graph is replayed twice in each round: alone, which tells what its launch
takes and when its work is done, and behind a sleep that lasts longer than the launch, which tells what the GPU takes.

Times are also checked: in the "long" step those of the slices and the overlap of the streams against the construction.

Expected was 1 us of the GPU for each event between two kernels of the compute stream, nothing for those of a comm
stream beside it, and nothing of the host in a replay. On an H200 (torch 2.11, CUDA 13) came 2.3 us between two kernels
and 0.2 us beside a busy stream: the step of 21.7 ms becomes 6 % longer with its 1203 events. The launch of a graph
grows from 5 us by 1.4 to 2 us of the host for each event, because CUDA launches such a graph piece by piece; a step of
nothing but short kernels, alone, then takes as long as its launch. Eager steps pay 3 to 4 us of the host for each
event, 2 of them for the record. That neighbouring slices share an event takes more than a third off their number (1924
without).
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from bench_gpu_common import Bench, Report, Table, in_words, main, spread, take_turns

from dbo_greenlet import Scheduler, make_ubatch_contexts
from dbo_greenlet import dbo_yield_and_switch_from_comm_to_compute as to_compute
from dbo_greenlet import dbo_yield_and_switch_from_compute_to_comm as to_comm
from dbo_greenlet import yields as y
from dbo_greenlet.gpu_timeline import GpuTimeline, StepEvents
from dbo_greenlet.gpu_times import SliceTimes, as_records
from dbo_greenlet.graphs import GraphPool
from dbo_greenlet.trace import gpu_use
from dbo_greenlet.trace.schema import to_json

LAYERS = 60
LONG = {"attention": 80.0, "dispatch": 60.0, "experts": 100.0, "combine": 60.0}  # microseconds
# The site at which a slice of the "long" step ends -> what it ran.
RAN = {"before_dispatch": "attention", "dispatched": "dispatch", "before_combine": "experts", "combined": "combine"}
OFF, ON, EVERY, AGAIN = "off", "on", "on, every slice on both streams", "off, again"
LEAD = 10_000.0  # microseconds of sleep: longer than any of the launches


class Rig:
    """The device, its streams and the work."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.comm = device.new_stream("comm")
        self.cycles = self._cycles_per_microsecond()
        self.inputs = [torch.randn(64, 64, device=device.name) for _ in range(2)]

    def _cycles_per_microsecond(self) -> float:
        found = []
        for _ in range(7):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            torch.cuda._sleep(2_000_000)
            end.record()
            end.synchronize()
            found.append(2_000_000 / (begin.elapsed_time(end) * 1000))
        return statistics.median(found)

    def sleep(self, microseconds: float) -> None:
        torch.cuda._sleep(round(microseconds * self.cycles))

    def small(self, index: int) -> None:
        x = self.inputs[index]
        for layer in range(LAYERS):
            x.mul_(-1.0)
            to_comm(f"layer{layer}.before_dispatch")
            x.add_(1.0)
            to_compute(f"layer{layer}.dispatched")
            x.mul_(-1.0)
            to_comm(f"layer{layer}.before_combine")
            x.add_(1.0)
            to_compute(f"layer{layer}.combined")

    def plain(self, index: int) -> None:
        x = self.inputs[index]
        for layer in range(LAYERS):
            x.mul_(-1.0)
            y.dbo_yield(f"layer{layer}.dispatch")
            x.add_(1.0)
            y.dbo_yield(f"layer{layer}.combine")

    def long(self, index: int) -> None:
        for layer in range(LAYERS):
            self.sleep(LONG["attention"])
            to_comm(f"layer{layer}.before_dispatch")
            self.sleep(LONG["dispatch"])
            to_compute(f"layer{layer}.dispatched")
            self.sleep(LONG["experts"])
            to_comm(f"layer{layer}.before_combine")
            self.sleep(LONG["combine"])
            to_compute(f"layer{layer}.combined")

    def timelines(self) -> dict[str, GpuTimeline | None]:
        return {OFF: None, ON: GpuTimeline(self.device), EVERY: GpuTimeline(self.device, every_slice=True), AGAIN: None}

    def step(
        self, model: Callable[[int], None], compute: Any, timeline: GpuTimeline | None, graph: bool
    ) -> tuple[Callable[[], Any], StepEvents | None]:
        """What runs a step, and its events."""
        contexts = make_ubatch_contexts(2, compute, self.comm, device=self.device)
        events = None
        if timeline is not None:
            events = timeline.captured(contexts) if graph else timeline.eager(contexts)
        scheduler = Scheduler(strict=False)
        entries = [partial(model, 0), partial(model, 1)]
        return lambda: scheduler.run(entries, contexts, bracket=events), events


class Replays:
    """Replays of one captured step: microseconds of its launch and until its work was done."""

    def __init__(self, rig: Rig, model: Callable[[int], None], timeline: GpuTimeline | None) -> None:
        self.rig = rig
        pool = GraphPool(rig.device)
        run, self.events = rig.step(model, pool.stream, timeline, graph=True)
        self.graph = pool.capture(run, streams=[rig.comm])
        self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __call__(self) -> dict[str, float]:
        launch, alone = self._replay()
        _, ahead = self._replay(LEAD)
        return {"launch": launch, "alone": alone, "gpu": ahead}

    def _replay(self, lead: float = 0.0) -> tuple[float, float]:
        self.rig.device.synchronize()
        if lead:
            self.rig.sleep(lead)
        self.begin.record()
        began = time.perf_counter_ns()
        self.graph.replay()
        launch = (time.perf_counter_ns() - began) / 1000
        self.end.record()
        self.end.synchronize()
        return launch, self.begin.elapsed_time(self.end) * 1000


def eager_step(rig: Rig, run: Callable[[], Any]) -> dict[str, float]:
    rig.device.synchronize()
    began = time.perf_counter_ns()
    run()
    return {"host": (time.perf_counter_ns() - began) / 1000}


def reading(events: StepEvents) -> dict[str, float]:
    """Microseconds of what a reader pays once the step is done."""
    events.replayed()  # so that the times are asked of the GPU again
    marks = [time.perf_counter_ns()]
    for function in (events.read, events.anchor, lambda: events.records(step=0, origin_ns=0)):
        records: Any = function()
        marks.append(time.perf_counter_ns())
    for record in records:
        to_json(record)
    marks.append(time.perf_counter_ns())
    names = ("reading the events", "the anchor", "making records", "writing them as lines")
    return {
        name: (after - before) / 1000 for name, (before, after) in zip(names, itertools.pairwise(marks), strict=True)
    }


def compare(times: list[SliceTimes]) -> dict[str, tuple[float, float]]:
    """The "long" step: quantity -> (measured, built in), in microseconds; stops where slices are out of order."""
    found: dict[str, list[float]] = {name: [] for name in LONG}
    for each in times:
        name = RAN.get(each.end_site.rpartition(".")[2], "")
        stretch = each.comm if name in ("dispatch", "combine") else each.compute
        if name and stretch is not None:
            found[name].append(stretch.end - stretch.begin - stretch.waited)
    for stream in ("compute", "comm"):
        stretches = [s for t in times if (s := getattr(t, stream)) is not None]
        if any(earlier.end > later.begin for earlier, later in itertools.pairwise(stretches)):
            raise SystemExit(f"the timeline is wrong: slices out of order on the {stream} stream")
    use = gpu_use(as_records(times, step=0))
    # Compute never waits here: but for the last combine, all communication is under it.
    comm = 2 * LAYERS * (LONG["dispatch"] + LONG["combine"])
    return {name: (statistics.median(values), LONG[name]) for name, values in found.items()} | {
        "comm in use": (use.comm, comm),
        "comm under compute": (use.both, comm - LONG["combine"]),
    }


def wrong(compared: Mapping[str, tuple[float, float]]) -> list[str]:
    """What is further from the construction than 5 % and 2 us."""
    return [f"{name}: {got:.1f}, not {built:.1f} us" for name, (got, built) in compared.items()
            if not abs(got - built) <= 0.05 * built + 2]  # fmt: skip


def row(name: str, events: int, values: Mapping[str, Any], off: Mapping[str, Any], quantities: list[str]) -> list[str]:
    """Variant, number of events, and for each quantity its spread and what of its median is each event's."""
    cells = [name, str(events)]
    for quantity in quantities:
        cells.append(in_words(values[quantity], 1))
        each = (values[quantity]["median"] - off[quantity]["median"]) / events if events else None
        cells.append("" if each is None else f"{each:.2f}")
    return cells


def measure(bench: Bench) -> Report:
    report = Report()
    if bench.on_cpu:
        report.said.append("only a GPU has timing events: nothing was measured")
        return report
    rig = Rig(bench.device)
    rounds = bench.rounds(100, 10)
    report.numbers = {"graph": {}, "eager": {}}
    for name, model in (("small", rig.small), ("plain", rig.plain), ("long", rig.long)):
        replays = {variant: Replays(rig, model, timeline) for variant, timeline in rig.timelines().items()}
        for each in replays.values():
            each(), each()
        samples = take_turns(replays, rounds)
        held: dict[str, dict[str, Any]] = {
            variant: {quantity: spread(values) for quantity, values in samples[variant].items()} for variant in replays
        }
        table = Table(
            f'A replay of the step "{name}", {LAYERS} layers (us)',
            ["", "events", "GPU, host ahead", "per event", "alone", "per event", "launch", "per event"],
        )
        for variant, each in replays.items():
            count = 0 if each.events is None else each.events.count
            held[variant]["events"], held[variant]["capture_ms"] = count, each.graph.seconds * 1000
            table.rows.append(row(variant, count, held[variant], held[OFF], ["gpu", "alone", "launch"]))
        report.tables.append(table)
        report.numbers["graph"][name] = held
        if name == "long" and (events := replays[ON].events) is not None:
            read_back(report, replays[ON], events, rounds)
    for name, model in (("small", rig.small), ("plain", rig.plain)):
        compute = bench.device.current_stream()
        made = {v: rig.step(model, compute, timeline, graph=False) for v, timeline in rig.timelines().items()}
        for run, _ in made.values():
            run(), run()
        samples = take_turns({variant: partial(eager_step, rig, run) for variant, (run, _) in made.items()}, rounds)
        held = {variant: {"host": spread(samples[variant]["host"])} for variant in made}
        table = Table(f'The host\'s time of an eager step "{name}" (us)', ["", "events", "host", "per event"])
        for variant, (_, events) in made.items():
            count = held[variant]["events"] = 0 if events is None else events.count
            table.rows.append(row(variant, count, held[variant], held[OFF], ["host"]))
        report.tables.append(table)
        report.numbers["eager"][name] = held
    return report


def read_back(report: Report, replays: Replays, events: StepEvents, rounds: int) -> None:
    """The check of the "long" step and what reading it takes."""
    rig = replays.rig
    rig.sleep(LEAD)
    replays.graph.replay()
    events.replayed()
    compared = compare(events.read())
    if said := wrong(compared):
        raise SystemExit(f"the timeline is wrong: {'; '.join(said)}")
    table = Table('The step "long" as measured (us)', ["", "measured", "built in"])
    table.rows = [[name, f"{got:.1f}", f"{built:.1f}"] for name, (got, built) in compared.items()]
    report.tables.append(table)
    samples = take_turns({"read": partial(reading, events)}, max(rounds // 5, 3))
    held = {name: spread(values) for name, values in samples["read"].items()}
    table = Table("What a reader of that step pays (us)", ["", "host"])
    table.rows = [[name, in_words(values, 1)] for name, values in held.items()]
    report.tables.append(table)
    error = events.anchor().error
    report.said.append(f"the step's place on the host's clock: +- {error:.1f} us")
    report.numbers |= {"compared": compared, "reading": held, "anchor_error": error}


if __name__ == "__main__":
    sys.exit(main(measure, (__doc__ or "").partition("\n")[0]))
