"""Hand-off per yield, start and join per step on CUDA, and what the hand-off is made of.

    python scripts/bench_gpu_handoff.py [--quick] [--json FILE]

Two microbatches with CUDA contexts do nothing but yield; the start and join of the step is measured beside it and
taken out. "Stream-switching" yields are those of a high-throughput transport: record an event, hand over, change to
the other stream, let it wait for the event. The parts are measured by leaving them out: no device (no stream to look
after), no comparison of torch's thread state, no scheduler at all.

"Threads" are this package's thread carrier, which keeps the same books as the greenlets and gives each thread the
caller's torch state; "Thread and Event alone" is the bare classical design beside it.

In a loop like this everything is in the processor's caches. What a yield costs inside a model is in bench_gpu_step.
"""

from __future__ import annotations

import contextvars
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import bench_switch
import greenlet
import torch
from bench_gpu_common import Bench, Report, Table, in_words, main, spread, take_turns
from bench_switch import PLACES

from dbo_greenlet import Scheduler, dbo_yield, make_ubatch_contexts
from dbo_greenlet import dbo_yield_and_switch_from_comm_to_compute as to_compute
from dbo_greenlet import dbo_yield_and_switch_from_compute_to_comm as to_comm
from dbo_greenlet.step import Microbatch, Step
from dbo_greenlet.thread_state import TorchThreadState
from dbo_greenlet.torch_state import Baseline, observe

# (what, its aim in microseconds)
AIMS = (
    ("greenlets, nothing compared but the stream", 2.0),
    ("greenlets", 4.0),
    ("step: greenlets", 20.0),
)
DEVICE_CALLS = "the device's calls of a stream-switching yield"


def plain(yields: int) -> None:
    for _ in range(yields):
        dbo_yield("site")


def switching(yields: int) -> None:
    for _ in range(yields // 2):
        to_comm("send")
        to_compute("receive")


class HandOff:
    """Microseconds a yield, of steps of two microbatches, start and join taken out."""

    def __init__(self, bench: Bench, carrier: str, body: Callable[[int], None], device: bool, **settings: Any) -> None:
        self.bench = bench
        self.scheduler = Scheduler(carrier=carrier, strict=False, **settings)
        self.contexts = make_ubatch_contexts(2, device=bench.device) if device else None
        self.body = body

    def __call__(self, yields: int, repeats: int) -> float:
        full, empty = [partial(self.body, yields)] * 2, [partial(self.body, 0)] * 2
        self.scheduler.run(empty, self.contexts)
        total = 0.0
        for _ in range(repeats):
            # Drained, so that no call waits for room in the queue of the GPU.
            self.bench.device.synchronize()
            begin = time.perf_counter()
            self.scheduler.run(empty, self.contexts)
            middle = time.perf_counter()
            self.scheduler.run(full, self.contexts)
            total += (time.perf_counter() - middle) - (middle - begin)
        return total / (repeats * yields * 2) * 1e6


class StartAndJoin:
    """Microseconds of a step of two microbatches that do nothing."""

    def __init__(self, bench: Bench, carrier: str, device: bool, **settings: Any) -> None:
        self.scheduler = Scheduler(carrier=carrier, strict=False, **settings)
        self.contexts = make_ubatch_contexts(2, device=bench.device) if device else None

    def __call__(self, steps: int) -> float:
        entries = [partial(plain, 0)] * 2
        self.scheduler.run(entries, self.contexts)
        begin = time.perf_counter()
        for _ in range(steps):
            self.scheduler.run(entries, self.contexts)
        return (time.perf_counter() - begin) / steps * 1e6


class PlainThreads:
    """The classical design with nothing round it: two threads, an event each, no scheduler, no torch state.

    Microseconds of the whole step with `yields` yields a thread.
    """

    def __init__(self, bench: Bench) -> None:
        self.device = bench.device
        self.stream = bench.device.current_stream()

    def __call__(self, yields: int) -> float:
        turns = [threading.Event(), threading.Event()]

        def body(number: int) -> None:
            mine, other = turns[number], turns[1 - number]
            self.device.set_stream(self.stream)
            mine.wait()
            mine.clear()
            for _ in range(yields):
                other.set()
                mine.wait()
                mine.clear()
            other.set()

        begin = time.perf_counter()
        pair = [threading.Thread(target=body, args=(number,)) for number in range(2)]
        for thread in pair:
            thread.start()
        turns[0].set()
        for thread in pair:
            thread.join()
        return (time.perf_counter() - begin) * 1e6

    def hand_off(self, yields: int, repeats: int) -> float:
        return sum(self(yields) - self(0) for _ in range(repeats)) / (repeats * yields * 2)

    def start_and_join(self, steps: int) -> float:
        return sum(self(0) for _ in range(steps)) / steps


def bare_switching(bench: Bench, yields: int, repeats: int, switch: bool) -> float:
    """Microseconds a stream-switching yield with nothing but the device's calls and, if asked, bare greenlets."""
    device, contexts = bench.device, make_ubatch_contexts(2, device=bench.device)
    hub = greenlet.getcurrent()

    def body(number: int) -> None:
        context = contexts[number]
        compute, comm = context.compute_stream, context.comm_stream
        pairs = ((context.gpu_compute_done_event, compute, comm), (context.gpu_comm_done_event, comm, compute))
        for _ in range(yields // 2):
            for event, here, there in pairs:
                device.record(event, here)
                if switch:
                    hub.switch()
                device.set_stream(there)
                device.wait(there, event)

    total = 0.0
    for _ in range(repeats):
        device.synchronize()
        carriers = [greenlet.greenlet(body), greenlet.greenlet(body)]
        begin = time.perf_counter()
        if switch:
            for number, carrier in enumerate(carriers):
                carrier.switch(number)
            while not carriers[1].dead:
                for carrier in carriers:
                    carrier.switch()
        else:
            body(0), body(1)
        total += time.perf_counter() - begin
    device.set_stream(contexts[0].compute_stream)
    return total / (repeats * yields * 2) * 1e6


def rows(bench: Bench) -> dict[str, Callable[[], float]]:
    """Name -> one measurement, in microseconds."""
    repeats = bench.either(8, 2)
    yields, thread_yields, steps = bench.either(240, 60), bench.either(240, 60), bench.either(200, 20)

    def placed(place: str, measure: Callable[[], float]) -> Callable[[], float]:
        def run() -> float:
            with PLACES[place]():
                return measure()

        return run

    def greenlets(body: Callable[[int], None], device: bool, **settings: Any) -> Callable[[], float]:
        return partial(HandOff(bench, "greenlet", body, device, **settings), yields, repeats)

    table = {
        "bare greenlet switches": partial(bench_switch.bare_greenlets, yields * repeats * 2),
        "greenlets, no device, nothing compared": greenlets(plain, False, thread_state=None),
        "greenlets, no device": greenlets(plain, False),
        "greenlets, nothing compared but the stream": greenlets(plain, True, thread_state=None),
        "greenlets": greenlets(plain, True),
        "greenlets, stream-switching, nothing compared but the stream": greenlets(switching, True, thread_state=None),
        "greenlets, stream-switching": greenlets(switching, True),
        DEVICE_CALLS: partial(bare_switching, bench, yields, repeats, False),
        "bare greenlets, stream-switching": partial(bare_switching, bench, yields, repeats, True),
    }
    for place in PLACES:
        for carrier, name in (("thread", "threads"), ("thread with locks", "threads with locks")):
            measure = partial(HandOff(bench, carrier, plain, True), thread_yields, max(1, repeats // 4))
            table[f"{place} {name}"] = placed(place, measure)
        plain_threads = PlainThreads(bench)
        table[f"{place} threads, Thread and Event alone"] = placed(
            place, partial(plain_threads.hand_off, thread_yields, max(1, repeats // 4))
        )
        measure = partial(HandOff(bench, "thread", switching, True), thread_yields, max(1, repeats // 4))
        table[f"{place} threads, stream-switching"] = placed(place, measure)
    table["step: greenlets"] = partial(StartAndJoin(bench, "greenlet", True), steps)
    table["step: greenlets, nothing compared but the stream"] = partial(
        StartAndJoin(bench, "greenlet", True, thread_state=None), steps
    )
    table["step: greenlets, no device"] = partial(StartAndJoin(bench, "greenlet", False), steps)
    for place in PLACES:
        table[f"step: {place} threads"] = placed(place, partial(StartAndJoin(bench, "thread", True), steps // 4))
        alone = partial(PlainThreads(bench).start_and_join, steps // 4)
        table[f"step: {place} threads, Thread and Event alone"] = placed(place, alone)
    return table


# -- single calls ----------------------------------------------------------------------------------------------------


def calls(bench: Bench) -> dict[str, Callable[[], Any]]:
    """Name -> a call whose cost is of interest; those that this torch or this package has."""
    device: Any = bench.device
    contexts = make_ubatch_contexts(1, device=device)
    compute, comm, event = contexts[0].compute_stream, contexts[0].comm_stream, contexts[0].gpu_compute_done_event
    state = TorchThreadState(device)
    state.start()

    def start_and_finish() -> None:
        other = TorchThreadState(device)
        other.start()
        other.finish()

    nobody = Microbatch(0, start_and_finish, None)
    found: dict[str, Callable[[], Any]] = {
        "an empty call": lambda: None,
        "thread state unchanged?": state.unchanged,
        "thread state, start and finish of a step": start_and_finish,
        "thread state, observed whole": observe,
        "thread state, start of a step: its baseline": partial(Baseline, observe()),
        "two microbatches and a step": lambda: Step([Microbatch(0, start_and_finish, None), nobody], "none", False),
        "contextvars.copy_context()": contextvars.copy_context,
        "device.current_stream()": device.current_stream,
        "device.set_stream(the same)": partial(device.set_stream, compute),
        "device.record(event, stream)": partial(device.record, event, compute),
        "device.wait(stream, event)": partial(device.wait, comm, event),
    }
    if hasattr(device, "stream_key"):
        found["device.stream_key()"] = device.stream_key
        found["device.put_stream(the same)"] = partial(device.put_stream, device.stream_key())
    if bench.on_cpu:
        return found
    index = torch.cuda.current_device()
    raw = torch.cuda.current_stream()
    found["torch.cuda.current_stream()"] = torch.cuda.current_stream
    found["torch.cuda.set_stream(stream)"] = partial(torch.cuda.set_stream, raw)
    found["torch.cuda.Event.record(stream)"] = partial(event.record, raw)
    found["torch.cuda.Stream.wait_event(event)"] = partial(comm.raw.wait_event, event)
    for name in ("_cuda_getCurrentRawStream", "_cuda_getCurrentStream"):
        if hasattr(torch._C, name):
            found[f"torch._C.{name}"] = partial(getattr(torch._C, name), index)
    if hasattr(torch._C, "_cuda_setStream"):
        key = {"stream_id": raw.stream_id, "device_index": raw.device_index, "device_type": raw.device_type}
        found["torch._C._cuda_setStream"] = lambda: torch._C._cuda_setStream(**key)
    for name in ("record", "wait"):
        if hasattr(torch._C._CudaEventBase, name):
            bound = partial(getattr(torch._C._CudaEventBase, name), event)
            found[f"torch._C._CudaEventBase.{name}(event, stream)"] = partial(bound, raw)
    found["torch.cuda.is_initialized()"] = torch.cuda.is_initialized
    found["torch._C._cuda_getDevice()"] = torch._C._cuda_getDevice
    return found


def single_call(bench: Bench, call: Callable[[], Any], times: int) -> float:
    """Nanoseconds a call, warm, the GPU drained every hundred calls."""
    total = 0.0
    for _ in range(max(1, times // 100)):
        bench.device.synchronize()
        begin = time.perf_counter()
        for _ in range(100):
            call()
        total += time.perf_counter() - begin
    return total / (max(1, times // 100) * 100) * 1e9


# -- the report ------------------------------------------------------------------------------------------------------


def measure(bench: Bench) -> Report:
    measured = rows(bench)
    single = calls(bench)
    variants: dict[str, Callable[[], dict[str, float]]] = {
        name: lambda m=run: {"value": m()} for name, run in measured.items()
    }
    for name, call in single.items():
        variants[f"call: {name}"] = lambda c=call: {"value": single_call(bench, c, bench.either(2000, 200))}
    samples = take_turns(variants, bench.rounds(11, 3))
    results = {name: spread(values["value"]) for name, values in samples.items()}
    report = Report(numbers={"us": {n: results[n] for n in measured}, "ns": {n: results[f"call: {n}"] for n in single}})
    hand_offs = [[n, in_words(results[n])] for n in measured if not n.startswith("step: ")]
    report.tables.append(Table("Hand-off per yield (us)", ["", "median (least to most)"], hand_offs))
    steps = [[n[6:], in_words(results[n], 1)] for n in measured if n.startswith("step: ")]
    report.tables.append(Table("Start and join of a step of two (us)", ["", "median (least to most)"], steps))
    costs = [[n, in_words(results[f"call: {n}"], 0)] for n in single]
    report.tables.append(Table("Single calls, warm (ns)", ["", "median (least to most)"], costs))

    def median(name: str) -> float:
        return results[name]["median"]

    bare, hub = median("bare greenlet switches"), median("greenlets, no device, nothing compared")
    parts = {
        "two bare switches": bare,
        "the hub and the yield": hub - bare,
        "comparing torch's state": median("greenlets, no device") - hub,
        "the stream": median("greenlets") - median("greenlets, no device"),
        "streams that switch, more than plain": median("greenlets, stream-switching") - median("greenlets"),
        "  of that the device's calls": median(DEVICE_CALLS),
    }
    table = Table("Parts of a greenlet's hand-off (us)", ["", "by leaving it out"])
    table.rows = [[name, f"{value:.2f}"] for name, value in parts.items()]
    report.tables.append(table)
    for name, aim in AIMS:
        verdict = "met" if median(name) <= aim else "NOT met"
        report.said.append(f"{name}: {median(name):.2f} us, aim {aim:g}: {verdict}")
    return report


if __name__ == "__main__":
    sys.exit(main(measure, __doc__.splitlines()[0]))
