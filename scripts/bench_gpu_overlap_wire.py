"""Communication of a chosen length on the current stream, for scripts/bench_gpu_overlap.py.

What DeepEP's low-latency kernels leave on the GPU while bytes fly is nothing: the network card reads and writes device
memory over PCIe, and no SM takes part. Two stand-ins:

"copy"   a copy engine copies to pinned host memory: DMA over PCIe, no SM, and as many bytes out of device memory per
         second as a 400 Gbit/s card reads (55 GB/s on an H200, 1.3 % of its memory bandwidth).
"timer"  one warp that sleeps until a time is over: no memory, but a slot on one of the SMs.

On an H200 a busy "timer" made the layers of V2-Lite (512 tokens, from a graph) 16 % slower, a busy "copy" 0.2 %, those
of V3 (64 tokens) 0.9 %: "copy" is the default.

Rejected: a stream that waits for a word in memory (`cuStreamWaitValue32`), since whoever writes the word at the right
time is again a kernel, a copy engine or the host, and the last one would measure the host; a copy within the device,
which takes memory bandwidth for each byte twice, from layers that are bound by it.

Either is one node of a captured graph. Lengths are calibrated with events before use.
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

_TIMER = """
extern "C" __global__ void wait_nanoseconds(int length) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do {
        __nanosleep(200);
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - begin < (unsigned long long)length);
}
"""


class CarryingWire:
    """For checks, not for times: what arrives is the rows in reverse, and late, so that a missing wait shows."""

    def arrival(self, rows: Tensor) -> Tensor:
        return torch.full_like(rows, float("nan"))

    def transfer(self, rows: Tensor, arrived: Tensor, share: float) -> None:
        if rows.is_cuda:
            torch.cuda._sleep(1_000_000)
        arrived.copy_(rows.flip(0))


class GpuWire:
    """A wire of a chosen length. Nothing arrives: the rows stay where they are.

    An amount is what a length is made of: bytes or nanoseconds. `lengths` holds the amounts of a microbatch's transfer
    and of the whole batch's.
    """

    name = ""
    smallest = 1
    largest = 1

    def __init__(self) -> None:
        self._curve: list[tuple[float, int]] = []
        self.lengths = (0, 0)

    def enqueue(self, amount: int) -> None:
        raise NotImplementedError

    def arrival(self, rows: Tensor) -> Tensor:
        return rows

    def transfer(self, rows: Tensor, arrived: Tensor, share: float) -> None:
        self.enqueue(self.lengths[share == 1])

    def calibrate(self, repeats: int = 5) -> None:
        """Measure the time of back-to-back transfers for amounts in steps of a factor of two."""
        self._curve = []
        amount = self.smallest
        while amount <= self.largest:
            self._curve.append((self.measure(amount, repeats), amount))
            amount *= 2
        # A longer transfer that came out shorter is noise; the inverse needs a curve that rises.
        for i in range(1, len(self._curve)):
            seconds, amount = self._curve[i]
            self._curve[i] = (max(seconds, self._curve[i - 1][0] * 1.0001), amount)

    def measure(self, amount: int, repeats: int = 5, chain: int = 6) -> float:
        """Seconds of one transfer of `amount`, in a chain of them."""

        def enqueue() -> None:
            for _ in range(chain):
                self.enqueue(amount)

        enqueue()
        return statistics.median(seconds_on_gpu(enqueue) for _ in range(repeats)) / chain

    def amount_for(self, seconds: float) -> int:
        """The amount whose transfer takes so long, between the measured points by straight lines."""
        curve = self._curve
        right = min(max(bisect.bisect_left(curve, (seconds, 0)), 1), len(curve) - 1)
        (t0, a0), (t1, a1) = curve[right - 1], curve[right]
        return max(1, round(a0 + (a1 - a0) * (seconds - t0) / (t1 - t0)))

    def lengths_for(self, seconds_of_part: float, parts: int) -> tuple[int, int]:
        """Amounts for `lengths`: of a microbatch's transfer of so many seconds, and of `parts` times as long a one."""
        return self.amount_for(seconds_of_part), self.amount_for(seconds_of_part * parts)


class CopyWire(GpuWire):
    name = "copy"
    smallest = 1 << 14
    largest = 1 << 28

    def __init__(self, device: str) -> None:
        super().__init__()
        self._source = torch.randint(0, 255, (self.largest,), dtype=torch.uint8, device=device)
        self._target = torch.empty(self.largest, dtype=torch.uint8, pin_memory=True)
        self._pieces: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def enqueue(self, amount: int) -> None:
        pieces = self._pieces.get(amount)
        if pieces is None:
            # Made once: a view costs the host as much as the copy.
            full, rest = divmod(amount, self.largest)
            sizes = [self.largest] * full + [rest] * (rest > 0)
            pieces = self._pieces[amount] = [(self._target[:size], self._source[:size]) for size in sizes]
        for target, source in pieces:
            target.copy_(source, non_blocking=True)


class TimerWire(GpuWire):
    name = "timer"
    smallest = 1 << 10
    largest = 1 << 24

    def __init__(self, device: str) -> None:
        super().__init__()
        with torch.cuda.device(device):
            self._kernel = torch.cuda._compile_kernel(_TIMER, "wait_nanoseconds")

    def enqueue(self, amount: int) -> None:
        self._kernel(grid=(1, 1, 1), block=(1, 1, 1), args=[amount])


WIRES: dict[str, Callable[[str], GpuWire]] = {"copy": CopyWire, "timer": TimerWire}


# Cycles for which the GPU sleeps before a measurement, so that the host gets ahead of it. Launching the graph of a
# split step takes the host 0.3 ms and more, which would be in a time that begins before it; 4 million cycles are 2 ms.
# An eager step gets a tenth of that: it is nothing next to 10 ms and more of launches, which it is not to hide.
LEAD_OF_GRAPHS = 4_000_000
LEAD_OF_EAGER = 400_000


class EventPair:
    """Two timing events, made once and used for every measurement."""

    def __init__(self) -> None:
        self.begin = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True)

    def seconds(
        self, enqueue: Callable[[], object], before: Callable[[], object] | None = None, lead: int = LEAD_OF_GRAPHS
    ) -> float:
        torch.cuda.synchronize()
        if before is not None:
            before()
        torch.cuda._sleep(lead)
        self.begin.record()
        enqueue()
        self.end.record()
        torch.cuda.synchronize()
        return self.begin.elapsed_time(self.end) / 1e3


_pair: list[EventPair] = []


def seconds_on_gpu(enqueue: Callable[[], object]) -> float:
    """Time on the GPU between the first and the last thing that `enqueue` puts on the current stream."""
    if not _pair:
        _pair.append(EventPair())
    return _pair[0].seconds(enqueue)
