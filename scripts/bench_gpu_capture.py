"""Capturing a step as a CUDA graph: time and memory, greenlets against the classical threads.

    python scripts/bench_gpu_capture.py [--quick] [--json FILE]

The classical way is written out in `bench_gpu_threads`, ours is `dbo_greenlet.graphs`. Both capture the same step, in
the same order, after one run of it as a warm-up.

Memory is what the driver says is in use after the capture, above what it said before the first split run, with the
allocator's unused blocks given back: graph, pool, cuBLAS handles and workspaces. Each way has a process of its own for
this, because handles and workspaces are never given back. Times are of one process in which the two take turns.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from bench_gpu_common import Bench, Report, Table, in_words, main, open_device, spread, take_turns
from bench_gpu_model import OneStreamLane, SerialLane, make_model
from bench_gpu_step import LAYERS, Steps
from bench_gpu_threads import ThreadedCapture
from torch import Tensor

TOKENS = 64
MICROBATCHES = 2
GREENLETS, THREADS, UNSPLIT = "greenlets", "threads", "unsplit"
# Whose calls may spoil a capture: any thread's (torch's default), or those of the thread that captures.
MODES = ("global", "thread_local")
# For one capture in a process of its own; it takes about five.
ALONE_SECONDS = 25


# -- memory: a process for each way ----------------------------------------------------------------------------------


def driver_bytes() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def prepare(bench: Bench) -> tuple[Steps, Any]:
    """A model that has run unsplit once, and steps whose compute stream is a graph pool's; also that pool."""
    from dbo_greenlet.graphs import GraphPool

    model = make_model(LAYERS, bench.tensors, torch.bfloat16)
    steps = Steps(bench, model, TOKENS)
    steps.unsplit()()
    pool = GraphPool(bench.device)  # type: ignore[arg-type]
    return Steps(bench, model, TOKENS, MICROBATCHES, stream=pool.stream), pool


@dataclass
class Copies:
    """What another thread has done meanwhile."""

    count: int = 0
    error: str | None = None


@contextlib.contextmanager
def copies_from_another_thread(bench: Bench) -> Iterator[Copies]:
    """Another thread copies to the device, on a stream of its own, and waits for each copy, all the time."""
    over, copies = threading.Event(), Copies()
    host = torch.randn(1 << 16)

    def copy() -> None:
        try:
            torch.cuda.set_device(bench.device.index)  # type: ignore[attr-defined]
            with torch.cuda.stream(torch.cuda.Stream()):
                while not over.is_set():
                    host.to(bench.tensors)
                    copies.count += 1
        except Exception as error:
            # Refused because of the capture: that is a finding.
            copies.error = f"{type(error).__name__}: {str(error).splitlines()[0]}"

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    try:
        while not copies.count and copies.error is None:
            time.sleep(0.001)
        yield copies
    finally:
        over.set()
        thread.join()


def alone(way: str) -> dict[str, Any]:
    """Capture once in this process: what memory it took, how long, and whether the replay equals the eager run."""
    bench = Bench(open_device(False), False)
    steps, pool = prepare(bench)
    bench.device.synchronize()
    torch.cuda.empty_cache()
    before, reserved = driver_bytes(), torch.cuda.memory_reserved()
    began = time.perf_counter()
    if way == UNSPLIT:
        lane = steps.lane(OneStreamLane, steps.contexts[0], steps.whole)
        captured: Any = pool.capture(lambda: [steps.model(steps.whole, lane)])
        outputs, seconds, replay = captured.output, captured.seconds, captured.replay
    elif way == GREENLETS:
        captured = pool.capture(steps.split("greenlet"), streams=[steps.contexts[0].comm_stream])
        outputs, seconds, replay = captured.output, captured.seconds, captured.replay
    else:
        graph, outputs, seconds = ThreadedCapture(steps, pool.stream).capture()
        replay = graph.replay
    whole = time.perf_counter() - began
    for output in outputs:
        output.fill_(float("nan"))
    steps.poison()
    replay()
    bench.device.synchronize()
    torch.cuda.empty_cache()
    # Before the eager run to compare with, which makes workspaces of its own.
    driver, allocator = driver_bytes() - before, torch.cuda.memory_reserved() - reserved
    with bench.device.stream_scope(pool.stream):
        eager = torch.cat(steps.serial(SerialLane)()) if way != UNSPLIT else steps.unsplit()()[0]
    bench.device.synchronize()
    equal = torch.equal(torch.cat(outputs), eager)
    return {
        "driver_mb": driver / 1e6,
        "reserved_mb": allocator / 1e6,
        "seconds": seconds,
        "with_warm_up_seconds": whole,
        "equal": equal,
    }


def alone_with_copies(mode: str) -> dict[str, Any]:
    """The classical capture in that mode while another thread copies to the device."""
    bench = Bench(open_device(False), False)
    steps, pool = prepare(bench)
    capture = ThreadedCapture(steps, pool.stream, mode)
    with copies_from_another_thread(bench) as copies:
        try:
            capture.capture()
        except Exception as error:
            # Whatever CUDA makes of it is the finding.
            return {"capture": f"{type(error).__name__}: {str(error).splitlines()[0]}", "copy": copies.error}
    return {"capture": "intact", "copy": copies.error}


def in_a_process(way: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--alone", way]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=ALONE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"took longer than {ALONE_SECONDS} s"}
    try:
        found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {"failed": ran.stderr[-1500:] or f"exit status {ran.returncode}"}
    return found


# -- times, taking turns ---------------------------------------------------------------------------------------------


def replay_ms(bench: Bench, replay: Callable[[], None]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    replay()
    bench.device.synchronize()
    begin.record()
    for _ in range(5):
        replay()
    end.record()
    bench.device.synchronize()
    return begin.elapsed_time(end) / 5


def measure(bench: Bench) -> Report:
    report = Report()
    memory = {way: in_a_process(way) for way in (UNSPLIT, THREADS, GREENLETS)}
    copied = {mode: in_a_process(mode) for mode in MODES}
    steps, pool = prepare(bench)
    split = steps.split("greenlet")
    comm = [steps.contexts[0].comm_stream]
    threaded = ThreadedCapture(steps, pool.stream)
    eager = steps.serial(SerialLane)
    unequal: list[str] = []

    def compare(name: str, outputs: list[Tensor], replay: Callable[[], None]) -> None:
        steps.draw()
        for output in outputs:
            output.fill_(float("nan"))
        steps.poison()
        bench.device.synchronize()
        with bench.device.stream_scope(pool.stream):
            wanted = torch.cat(eager())
            replay()
        bench.device.synchronize()
        if not torch.equal(torch.cat(outputs), wanted):
            unequal.append(name)

    def by_greenlets() -> dict[str, float]:
        began = time.perf_counter()
        captured = pool.capture(split, streams=comm)
        whole = time.perf_counter() - began
        compare(GREENLETS, captured.output, captured.replay)
        with bench.device.stream_scope(pool.stream):
            replay = replay_ms(bench, captured.replay)
        return {"capture": captured.seconds * 1e3, "with warm-up": whole * 1e3, "replay": replay}

    def by_threads() -> dict[str, float]:
        began = time.perf_counter()
        graph, outputs, seconds = threaded.capture()
        whole = time.perf_counter() - began
        compare(THREADS, outputs, graph.replay)
        with bench.device.stream_scope(pool.stream):
            replay = replay_ms(bench, graph.replay)
        return {"capture": seconds * 1e3, "with warm-up": whole * 1e3, "replay": replay}

    # Held to the end, so that neither pool is given up between two captures.
    held = [pool.capture(split, streams=comm), threaded.capture()]
    samples = take_turns({THREADS: by_threads, GREENLETS: by_greenlets}, bench.rounds(15, 3))
    times = {way: {quantity: spread(values) for quantity, values in samples[way].items()} for way in samples}
    with copies_from_another_thread(bench) as copies:
        before = copies.count
        captured = pool.capture(split, streams=comm)
        during = copies.count - before
    compare("greenlets, copies", captured.output, captured.replay)
    del held
    table = Table(
        f"Capturing a step of {LAYERS} layers, {MICROBATCHES} microbatches, {TOKENS} tokens",
        ["", "capture (ms)", "with its warm-up (ms)", "replay (ms)", "driver (MB)", "allocator (MB)"],
    )
    for way in (UNSPLIT, THREADS, GREENLETS):
        of_way, of_memory = times.get(way), memory[way]
        table.rows.append([
            way,
            in_words(of_way["capture"]) if of_way else f"{of_memory.get('seconds', 0) * 1e3:.2f} (first)",
            f"{of_way['with warm-up']['median']:.2f}" if of_way else "",
            in_words(of_way["replay"], 3) if of_way else "",
            f"{of_memory['driver_mb']:.0f}" if "driver_mb" in of_memory else "failed",
            f"{of_memory['reserved_mb']:.0f}" if "reserved_mb" in of_memory else "failed",
        ])  # fmt: skip
    report.tables.append(table)
    for way in (UNSPLIT, THREADS, GREENLETS):
        if "failed" in memory[way]:
            report.said.append(f"{way}, alone: {memory[way]['failed']}")
        else:
            report.said.append(
                f"{way}, first capture of a process: {memory[way]['seconds'] * 1e3:.1f} ms, with its warm-up "
                f"{memory[way]['with_warm_up_seconds'] * 1e3:.1f} ms; replay "
                f"{'equals' if memory[way]['equal'] else 'DOES NOT equal'} the eager run"
            )
    if copies.error or "greenlets, copies" in unequal:
        verdict = f"NOT intact; replay {'differs' if 'greenlets, copies' in unequal else 'equal'}, copy: {copies.error}"
    else:
        verdict = "capture intact, replay equal" if during else "no evidence, the other thread never had its turn"
    report.said += [
        f"replays equal to the eager run, bit for bit, after each capture: {unequal or 'yes'}",
        f"{during} copies by another thread during warm-up and capture: {verdict}",
        *(f"the same with threads and mode {mode!r}: {found}" for mode, found in copied.items()),
    ]
    report.numbers = {
        "alone": memory,
        "threads_with_copies": copied,
        "times": times,
        "unequal": unequal,
        "copies": [during, copies.error],
    }
    return report


def main_alone(way: str) -> int:
    with torch.inference_mode():
        print(json.dumps(alone_with_copies(way) if way in MODES else alone(way)), flush=True)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--alone"]:
        sys.exit(main_alone(sys.argv[2]))
    sys.exit(main(measure, __doc__.splitlines()[0]))
