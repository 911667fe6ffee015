"""Hand-off per yield in the middle of a model: what is left of `bench_switch.py`'s figures once the caches are cold.

    chrt -f 50 taskset -c 1 python scripts/bench_cold_switch.py [--quick] [--out FILE.json] [--rows NAME ...]

Between two yields a model pushes the hand-off's code and data out of the processor's caches: a loop that does nothing
but yield tells little of what a yield costs in a server. Here two microbatches run decoder layers (attention, router
and experts in eager torch, some 150 operators a slice) and read weights; only the way from one microbatch's yield to
the other's going on is timed, twice a layer. The carriers take turns, some steps each, and the percentiles are over all
of their hand-offs. On a machine with other work the rows of one run are to be compared, and no figure of two runs.

    bare greenlets, direct           each switches to the other: the floor, against law 1
    bare greenlets, through a hub    the same through the caller, and nothing else: the floor that keeps law 1
    greenlets, no torch              our scheduler, comparing nothing
    greenlets                        our scheduler, comparing every component of torch's thread state
    greenlets in vLLM                the drop-in: vLLM's `dbo_yield` and contexts
    ..., streams                     vLLM's yields that change between its two streams, which cost nothing here
    threads                          ours and vLLM's, where the operating system puts them and pinned to one core

"C stack" is how many bytes greenlet moves out and in at each switch: what lies between a microbatch's entry and its
yield. Where the process may use one core only, stock threads are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import greenlet
import torch
from bench_switch import PLACES, machine, vllm_contexts

from dbo_greenlet import Scheduler, dbo_yield, make_ubatch_contexts

WIDTH = 256
HEADS = 4
EXPERTS = 8
TOKENS = 32
WARM = 500  # yields without a model
STEPS = 8  # of one carrier, until the next one's turn

Yield = Callable[[], None]
clock = time.perf_counter_ns


# -- the model -------------------------------------------------------------------------------------------------------


class Norm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("mask", torch.full((TOKENS, TOKENS), float("-inf")).triu(1))
        angles = torch.arange(TOKENS)[:, None] / 10_000 ** (torch.arange(WIDTH // HEADS // 2) / (WIDTH // HEADS // 2))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.cat((even * self.cos - odd * self.sin, odd * self.cos + even * self.sin), -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.view(TOKENS, HEADS, WIDTH // HEADS).transpose(0, 1) for part in self.qkv(x).split(WIDTH, -1)
        )
        scores = torch.matmul(self.turned(query), self.turned(key).transpose(-1, -2)) * (WIDTH // HEADS) ** -0.5
        mixed = torch.softmax(scores + self.mask, -1) @ value
        return self.out(mixed.transpose(0, 1).reshape(TOKENS, WIDTH))  # type: ignore[no-any-return]


class Expert(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = torch.nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(torch.nn.functional.silu(gate) * up)  # type: ignore[no-any-return]


class Experts(torch.nn.Module):
    """Yields before the routed experts and before their outputs are put together, as dispatch and combine do."""

    def __init__(self) -> None:
        super().__init__()
        self.router = torch.nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = torch.nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor, yield_: Yield) -> torch.Tensor:
        weights, chosen = torch.topk(torch.softmax(self.router(x), -1), 2)
        weights = weights / weights.sum(-1, keepdim=True)
        yield_()
        outputs = []
        for number, expert in enumerate(self.experts):
            rows, slot = torch.where(chosen == number)
            outputs.append((rows, expert(x[rows]) * weights[rows, slot, None]))
        yield_()
        result = torch.zeros_like(x)
        for rows, output in outputs:
            result.index_add_(0, rows, output)
        return result


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_experts = Norm(), Norm()
        self.attention, self.experts = Attention(), Experts()

    def forward(self, x: torch.Tensor, yield_: Yield) -> torch.Tensor:
        x = x + self.attention(self.before_attention(x))
        return x + self.experts(self.before_experts(x), yield_)  # type: ignore[no-any-return]


class Decoder(torch.nn.Module):
    """`layers` layers; a microbatch also reads `megabytes` of other weights in each."""

    def __init__(self, layers: int, megabytes: float) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(layers))
        self.others = torch.nn.ParameterList(torch.rand(int(megabytes * 2**18)) for _ in range(layers))

    def forward(self, x: torch.Tensor, yield_: Yield) -> torch.Tensor:
        for layer, others in zip(self.layers, self.others, strict=True):
            x = layer(x, yield_) + others.sum() * 1e-9
        return x


# -- the carriers ----------------------------------------------------------------------------------------------------


class Bench:
    """Runs steps of the model and keeps how long each hand-off took.

    The last microbatch to stop writes the time down; the next to go on reads it, unless it is the same one: its sibling
    has ended in between.
    """

    def __init__(self, layers: int, megabytes: float) -> None:
        self.model = Decoder(layers, megabytes)
        self.inputs = [torch.randn(TOKENS, WIDTH) for _ in range(2)]
        self.warming = False
        self.stopped = (-1, 0)
        self.nanoseconds: list[int] = []
        self.c_stack: list[int] = []

    def entries(self, yield_: Yield) -> list[Callable[[], None]]:
        return [self.entry(index, yield_) for index in range(2)]

    def entry(self, index: int, yield_: Yield) -> Callable[[], None]:
        def timed() -> None:
            self.stopped = (index, clock())
            yield_()
            back = clock()
            who, when = self.stopped
            if who != index:
                self.nanoseconds.append(back - when)

        def run() -> None:
            if self.warming:
                for _ in range(WARM):
                    yield_()
            else:
                self.model(self.inputs[index], timed)

        return run

    def take(self) -> list[int]:
        taken, self.nanoseconds = self.nanoseconds, []
        return taken

    # Each of these runs one step.

    def bare_direct(self) -> None:
        pair: list[Any] = []
        runs = self.entries(lambda: pair[greenlet.getcurrent() is pair[0]].switch())
        pair[:] = [greenlet.greenlet(run) for run in runs]
        pair[0].switch()
        while not (pair[0].dead and pair[1].dead):
            next(each for each in pair if not each.dead).switch()

    def bare_hub(self) -> None:
        to_hub = greenlet.getcurrent().switch
        pair = [greenlet.greenlet(run) for run in self.entries(lambda: to_hub(None))]
        while not pair[1].dead:
            for each in pair:
                each.switch()
                if not self.warming and not each.dead:
                    self.c_stack.append(each._stack_saved)

    def scheduled(self, carrier: str, thread_state: Any = "auto") -> Callable[[], None]:
        scheduler = Scheduler(carrier=carrier, strict=False, thread_state=thread_state)
        contexts = make_ubatch_contexts(2)

        def step() -> None:
            scheduler.run(self.entries(lambda: dbo_yield("site")), contexts)

        return step

    def drop_in(self, streams: bool = False) -> None:
        from dbo_greenlet.vllm.step import run_step

        contexts, _ = vllm_contexts(threading.Barrier(3))
        run_step(contexts, self.vllm_entries(streams), kind="eager")

    def vllm_threads(self, streams: bool = False) -> None:
        from vllm.utils import torch_utils

        barrier = threading.Barrier(3)
        contexts, stream = vllm_contexts(barrier)

        def body(context: Any, run: Callable[[], None]) -> None:
            torch_utils._current_stream_tls.value = stream
            with context, torch.inference_mode():
                run()

        pairs = zip(contexts, self.vllm_entries(streams), strict=True)
        threads = [threading.Thread(target=body, args=pair) for pair in pairs]
        for thread in threads:
            thread.start()
        barrier.wait()
        contexts[0].cpu_wait_event.set()
        for thread in threads:
            thread.join()

    def vllm_entries(self, streams: bool) -> list[Callable[[], None]]:
        from vllm.v1.worker import ubatching

        if not streams:
            return self.entries(ubatching.dbo_yield)
        to_comm = ubatching.dbo_yield_and_switch_from_compute_to_comm
        to_compute = ubatching.dbo_yield_and_switch_from_comm_to_compute
        turns = [itertools.cycle((to_comm, to_compute)) for _ in range(2)]
        return [self.entry(index, lambda turn=turn: next(turn)()) for index, turn in enumerate(turns)]


@contextlib.contextmanager
def streams_put_nowhere() -> Iterator[None]:
    """vLLM notes which stream is current, and no device hears of it."""
    from vllm.utils import torch_utils

    def note(stream: Any) -> None:
        torch_utils._current_stream_tls.value = stream

    original, torch.cuda.set_stream = torch.cuda.set_stream, note
    try:
        yield
    finally:
        torch.cuda.set_stream = original


@contextlib.contextmanager
def dropped_in() -> Iterator[None]:
    from dbo_greenlet.vllm import patching

    patching.install(lambda config: True)
    try:
        yield
    finally:
        patching.uninstall()


@dataclass(frozen=True)
class Row:
    """What runs one step, and what is put round several of them."""

    step: Callable[[], None]
    around: Sequence[Callable[[], AbstractContextManager[None]]] = ()


def rows(bench: Bench) -> dict[str, Row]:
    in_vllm = importlib.util.find_spec("vllm") is not None
    table = {
        "bare greenlets, direct": Row(bench.bare_direct),
        "bare greenlets, through a hub": Row(bench.bare_hub),
        "greenlets, no torch": Row(bench.scheduled("greenlet", None)),
        "greenlets": Row(bench.scheduled("greenlet")),
    }
    if in_vllm:
        table["greenlets in vLLM"] = Row(bench.drop_in, (dropped_in,))
        table["greenlets in vLLM, streams"] = Row(lambda: bench.drop_in(True), (dropped_in, streams_put_nowhere))
    for place in PLACES if len(os.sched_getaffinity(0)) > 1 else ("pinned",):
        table[f"{place} threads"] = Row(bench.scheduled("thread"), (PLACES[place],))
        if in_vllm:
            table[f"{place} threads of vLLM"] = Row(bench.vllm_threads, (PLACES[place],))
            around = (PLACES[place], streams_put_nowhere)
            table[f"{place} threads of vLLM, streams"] = Row(lambda: bench.vllm_threads(True), around)
    return table


def measure(bench: Bench, table: dict[str, Row], rounds: int) -> dict[str, list[int]]:
    """Nanoseconds of each hand-off."""
    samples: dict[str, list[int]] = {name: [] for name in table}
    for _ in range(rounds):
        for name, row in table.items():
            with contextlib.ExitStack() as around:
                for scope in row.around:
                    around.enter_context(scope())
                # The interpreter adapts itself to what was replaced since, which takes it some hundred calls.
                bench.warming = True
                row.step()
                bench.warming = False
                row.step()
                bench.take()
                for _ in range(STEPS):
                    row.step()
            samples[name] += bench.take()
    return samples


def quantiles(nanoseconds: list[int]) -> dict[str, float]:
    """The 10th, 50th and 90th percentile in microseconds, and the count."""
    tenths = statistics.quantiles(nanoseconds, n=10, method="inclusive")
    return {"p10": tenths[0] / 1e3, "p50": tenths[4] / 1e3, "p90": tenths[8] / 1e3, "count": len(nanoseconds)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few seconds, to see that it runs")
    parser.add_argument("--rounds", type=int, default=None, help=f"of {STEPS} steps per row (default 8, quick 1)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--megabytes", type=float, default=1.0, help="weights read beside the layer's own")
    parser.add_argument("--rows", nargs="*", default=None, help="only rows whose name contains one of these")
    parser.add_argument("--out", type=Path, default=Path("out/bench_cold_switch.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(arguments.layers, arguments.megabytes)
    table = rows(bench)
    if arguments.rows:
        table = {name: row for name, row in table.items() if any(part in name for part in arguments.rows)}
        if not table:
            parser.error(f"no row's name contains any of {arguments.rows}")
    rounds = arguments.rounds or (1 if arguments.quick else 8)
    begin = time.perf_counter()
    with torch.inference_mode():
        samples = measure(bench, table, rounds)
    took = time.perf_counter() - begin
    results = {name: quantiles(values) for name, values in samples.items()}
    width = max(map(len, results))
    print(f"{'us':{width}}      p10      p50      p90    count")
    for name, each in results.items():
        print(f"{name:{width}} {each['p10']:8.1f} {each['p50']:8.1f} {each['p90']:8.1f} {each['count']:8}")
    slices = sum(map(len, samples.values())) * (STEPS + 1) / STEPS
    print(f"a slice takes {took / slices * 1e3:.1f} ms", end="")
    print(f"; C stack {statistics.median(bench.c_stack):.0f} bytes" if bench.c_stack else "")
    here = {**machine(), "quick": arguments.quick, "layers": arguments.layers, "megabytes": arguments.megabytes}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({"rows": results, "machine": here}, indent=1) + "\n")
    print(f"written to {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
