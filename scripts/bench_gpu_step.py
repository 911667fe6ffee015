"""Host time of an eager step of 60 layers and 480 yields: unsplit, one after the other, threads, greenlets.

    python scripts/bench_gpu_step.py [--quick] [--json FILE]

Host time is from the call to its return, with nothing waited for; total time is until the GPU is done. The GPU is
drained before each. "One after the other" runs the two microbatches with the same calls, the stream switches included,
and without yielding: it is what splitting costs before anything is handed over, and the fair thing to compare with.

The outputs of all split variants must be equal bit for bit, and close to a float32 run of the unsplit batch; inputs are
drawn anew for each check and the transport's buffers poisoned before it.

Ratios are medians of the ratios within each round, because the host's speed changes by up to a factor of
two in between.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import greenlet
import torch
from bench_gpu_common import Bench, Report, Table, in_words, main, spread, take_turns
from bench_gpu_model import (
    YIELDS_PER_LAYER,
    Lane,
    Model,
    OneStreamLane,
    PlainLane,
    SerialLane,
    SplitLane,
    ThinLayer,
    called_directly,
    make_model,
    relative_error,
)
from bench_switch import PLACES
from torch import Tensor

from dbo_greenlet import Scheduler, UBatchContext, make_ubatch_contexts

AIM = 1.25
BASE = "one after the other"
LAYERS = 60


class BareLane(SerialLane):
    """The device's calls and a bare greenlet switch: what any scheduler on greenlets costs at least."""

    hub: Any = None

    def to_comm(self, site: str) -> None:
        context, device = self.context, self.device
        device.record(context.gpu_compute_done_event, context.compute_stream)
        self.hub.switch()
        device.set_stream(context.comm_stream)
        device.wait(context.comm_stream, context.gpu_compute_done_event)

    def to_compute(self, site: str) -> None:
        context, device = self.context, self.device
        device.record(context.gpu_comm_done_event, context.comm_stream)
        self.hub.switch()
        device.set_stream(context.compute_stream)
        device.wait(context.compute_stream, context.gpu_comm_done_event)


class Steps:
    """All ways to run one step of `tokens` rows through the first `layers` layers of `model`."""

    def __init__(
        self,
        bench: Bench,
        model: Model,
        tokens: int,
        microbatches: int = 2,
        layers: int | None = None,
        stream: Any = None,
    ) -> None:
        self.bench = bench
        self.model = model if layers is None else partial(model, layers=layers)
        self.tokens, self.count = tokens, microbatches
        like = next(model.parameters())
        self.whole = torch.empty(tokens, model.hidden, dtype=like.dtype, device=like.device)
        self.contexts = make_ubatch_contexts(microbatches, stream, device=bench.device)
        self.parts = list(self.whole.chunk(microbatches))
        self.lanes: dict[type[Lane], list[Lane]] = {}
        self.draw()

    def draw(self) -> None:
        """New random input, in place."""
        self.whole.normal_()

    def use_input_of(self, other: Steps) -> None:
        self.whole, self.parts = other.whole, other.parts

    def lanes_of(self, kind: type[Lane]) -> list[Any]:
        if kind not in self.lanes:
            self.lanes[kind] = [self.lane(kind, c, p) for c, p in zip(self.contexts, self.parts, strict=True)]
        return self.lanes[kind]

    def lane(self, kind: type[Lane], context: UBatchContext, part: Tensor) -> Lane:
        return kind(context, len(part), part)

    def poison(self) -> None:
        for lanes in self.lanes.values():
            for lane in lanes:
                lane.poison()

    # Each of these returns a step: a function without arguments that returns the outputs, in order of the tokens.

    def unsplit(self) -> Callable[[], list[Tensor]]:
        lane = self.lane(OneStreamLane, self.contexts[0], self.whole)
        return lambda: [self.model(self.whole, lane)]

    def serial(self, kind: type[Lane]) -> Callable[[], list[Tensor]]:
        lanes = self.lanes_of(kind)
        return lambda: [self.model(part, lane) for part, lane in zip(self.parts, lanes, strict=True)]

    def split(self, carrier: str, kind: type[Lane] = SplitLane, **settings: Any) -> Callable[[], list[Tensor]]:
        scheduler = Scheduler(carrier=carrier, strict=False, **settings)
        lanes, model = self.lanes_of(kind), self.model
        entries = [partial(model, part, lane) for part, lane in zip(self.parts, lanes, strict=True)]
        return lambda: scheduler.run(entries, self.contexts).outputs

    def bare(self) -> Callable[[], list[Tensor]]:
        lanes, device = self.lanes_of(BareLane), self.bench.device
        hub = greenlet.getcurrent()
        for lane in lanes:
            lane.hub = hub

        def body(part: Tensor, lane: Lane) -> Tensor:
            device.set_stream(lane.context.compute_stream)
            return self.model(part, lane)

        def step() -> list[Tensor]:
            carriers = [greenlet.greenlet(body) for _ in lanes]
            arrived = [c.switch(p, x) for c, p, x in zip(carriers, self.parts, lanes, strict=True)]
            while not carriers[-1].dead:
                arrived = [carrier.switch() for carrier in carriers]
            return arrived

        return step


def timed(bench: Bench, step: Callable[[], Any], place: str = "stock") -> dict[str, float]:
    """One run: milliseconds until the call returned ("host") and until the GPU was done ("total")."""
    with PLACES[place]():
        bench.device.synchronize()
        begin = time.perf_counter()
        outputs = step()
        middle = time.perf_counter()
        bench.device.synchronize()
        end = time.perf_counter()
    del outputs
    return {"host": (middle - begin) * 1e3, "total": (end - begin) * 1e3}


def all_steps(steps: Steps, direct: Steps) -> dict[str, tuple[str, Callable[[], list[Tensor]]]]:
    """Name -> (where it runs, step). `direct` is the same with `called_directly(model)`, and shares the input."""
    return {
        "unsplit": ("stock", steps.unsplit()),
        BASE: ("stock", steps.serial(SerialLane)),
        "one after the other, one stream": ("stock", steps.serial(OneStreamLane)),
        "stock threads": ("stock", steps.split("thread")),
        "pinned threads": ("pinned", steps.split("thread")),
        "pinned threads with locks": ("pinned", steps.split("thread with locks")),
        "greenlets": ("stock", steps.split("greenlet")),
        "greenlets, nothing compared but the stream": ("stock", steps.split("greenlet", thread_state=None)),
        "greenlets, plain yields on one stream": ("stock", steps.split("greenlet", PlainLane)),
        "bare greenlets and the device's calls": ("stock", steps.bare()),
        f"{BASE}, modules called directly": ("stock", direct.serial(SerialLane)),
        "greenlets, modules called directly": ("stock", direct.split("greenlet")),
    }


# -- correctness -----------------------------------------------------------------------------------------------------


def check(
    bench: Bench, model: Model, steps: Steps, variants: dict[str, tuple[str, Callable[[], list[Tensor]]]]
) -> dict[str, Any]:
    """Run every variant on fresh input: equal bits among the split ones, and the distance to float32."""
    found: dict[str, Any] = {"not_equal": [], "errors": {}}
    thin = isinstance(model.layers[0], ThinLayer)
    exact = make_model(len(model.layers), bench.tensors, torch.float32, small=bench.on_cpu, thin=thin)
    exact.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    for _ in range(2):
        steps.draw()
        whole = steps.whole.float()
        reference = exact(whole, steps.lane(OneStreamLane, steps.contexts[0], whole))
        first: Tensor | None = None
        for name, (place, step) in variants.items():
            steps.poison()
            bench.device.synchronize()
            with PLACES[place]():
                out = torch.cat(step())
            bench.device.synchronize()
            error = relative_error(out, reference)
            found["errors"][name] = max(error, found["errors"].get(name, 0.0)) if error == error else float("nan")
            if name == "unsplit":
                continue
            if first is None:
                first = out
            elif not torch.equal(first, out) and name not in found["not_equal"]:
                found["not_equal"].append(name)
    return found


class StackSaved:
    """An instrument: bytes of C stack that greenlet has copied for each microbatch that parked."""

    def __init__(self) -> None:
        self.bytes: list[int] = []

    def after_slice(self, microbatch: Any) -> None:
        if not microbatch.done:
            self.bytes.append(microbatch.greenlet._stack_saved)


def stack_saved(steps: Steps) -> dict[str, float]:
    watching = StackSaved()
    step = steps.split("greenlet", instruments=[watching])
    for _ in range(3):
        step()
    return {"p50": statistics.median(watching.bytes), "max": max(watching.bytes), "yields": len(watching.bytes) // 3}


# -- the report ------------------------------------------------------------------------------------------------------


def paired(values: Sequence[float], base: Sequence[float]) -> float:
    """Median of the ratios within each round: a host that is slow for a while is slow for both."""
    return statistics.median(value / of for value, of in zip(values, base, strict=True))


def measure_tokens(bench: Bench, model: Model, kind: str, tokens: int, rounds: int, report: Report) -> None:
    steps = Steps(bench, model, tokens)
    direct = Steps(bench, called_directly(model), tokens)
    direct.use_input_of(steps)
    variants = all_steps(steps, direct)
    checked = check(bench, model, steps, variants)
    samples = take_turns({name: partial(timed, bench, step, place) for name, (place, step) in variants.items()}, rounds)
    host = {name: spread(values["host"]) for name, values in samples.items()}
    total = {name: spread(values["total"]) for name, values in samples.items()}
    base = samples[BASE]["host"]
    ratios = {name: paired(values["host"], base) for name, values in samples.items()}
    yields = len(model.layers) * YIELDS_PER_LAYER * steps.count
    above = {
        name: statistics.median(v - b for v, b in zip(values["host"], base, strict=True)) / yields * 1e3
        for name, values in samples.items()
    }
    case = f"{kind} layers, {tokens} tokens"
    table = Table(
        f"Eager step, {len(model.layers)} {case}, {yields} yields (ms)",
        ["", "host time", f"x {BASE}", "us a yield above it", "until the GPU is done", "error"],
    )
    for name in variants:
        table.rows.append([
            name, in_words(host[name]), f"{ratios[name]:.2f}", f"{above[name]:.1f}",
            f"{total[name]['median']:.2f}", f"{checked['errors'][name]:.1e}",
        ])  # fmt: skip
    report.tables.append(table)
    saved, saved_directly = stack_saved(steps), stack_saved(direct)
    report.numbers[case] = {
        "host": host,
        "total": total,
        "ratios": ratios,
        "us_above": above,
        "checked": checked,
        "stack_saved": saved,
        "stack_saved_directly": saved_directly,
    }
    verdict = f"aim {AIM}: {'met' if ratios['greenlets'] <= AIM else 'NOT met'}"
    if not bench.on_cpu and total[BASE]["median"] > 1.1 * host[BASE]["median"]:
        verdict = "the GPU is the bound, and the host waits for room in its queue: this says nothing about the host"
    report.said += [
        f"{case}: greenlets take {ratios['greenlets']:.2f} x {BASE}, {verdict}",
        f"{case}: C stack saved per switch: median {saved['p50']:.0f}, most {saved['max']:.0f} bytes "
        f"({saved['yields']} yields a step); modules called directly: {saved_directly['p50']:.0f}",
        f"{case}: bits equal in all split variants: {checked['not_equal'] or 'yes'}",
    ]


def measure(bench: Bench, token_counts: Sequence[int] = (64, 4096)) -> Report:
    report = Report()
    layers = 4 if bench.on_cpu else LAYERS
    for thin in (False, True):
        model = make_model(layers, bench.tensors, torch.bfloat16, small=bench.on_cpu, thin=thin)
        for tokens in (64,) if bench.on_cpu else token_counts:
            measure_tokens(bench, model, "thin" if thin else "full", tokens, bench.rounds(31, 3), report)
    return report


if __name__ == "__main__":
    sys.exit(main(measure, __doc__.splitlines()[0]))
