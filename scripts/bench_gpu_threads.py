"""A split step on threads as it is classically captured into a CUDA graph, to compare `dbo_greenlet.graphs` with.

A thread for each microbatch is started before the capture, makes its cuBLAS handle (which a capture does not allow) and
waits at a barrier; the main thread begins the capture, lets the first thread go, and the threads hand over to each
other with one lock a yield; the main thread joins them and ends the capture.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from bench_gpu_model import SerialLane
from bench_gpu_step import Steps
from torch import Tensor

__all__ = ["Baton", "LockLane", "ThreadedCapture", "ThreadedStep"]


class LockLane(SerialLane):
    """Hands the baton to the next thread at each yield."""

    baton: Any = None
    number = 0

    def to_comm(self, site: str) -> None:
        context, device = self.context, self.device
        device.record(context.gpu_compute_done_event, context.compute_stream)
        self.baton.hand_over(self.number)
        device.set_stream(context.comm_stream)
        device.wait(context.comm_stream, context.gpu_compute_done_event)

    def to_compute(self, site: str) -> None:
        context, device = self.context, self.device
        device.record(context.gpu_comm_done_event, context.comm_stream)
        self.baton.hand_over(self.number)
        device.set_stream(context.compute_stream)
        device.wait(context.compute_stream, context.gpu_comm_done_event)


class Baton:
    """One lock a thread, and who is still running."""

    def __init__(self, count: int) -> None:
        self.locks = [threading.Lock() for _ in range(count)]
        for lock in self.locks:
            lock.acquire()
        self.alive = [True] * count

    def next_after(self, number: int) -> int:
        count = len(self.locks)
        return next((k % count for k in range(number + 1, number + count + 1) if self.alive[k % count]), number)

    def hand_over(self, number: int) -> None:
        other = self.next_after(number)
        if other != number:
            self.locks[other].release()
            self.locks[number].acquire()

    def finish(self, number: int) -> None:
        self.alive[number] = False
        lock = self.locks[self.next_after(number)]
        # Open already where a thread failed before it was its turn.
        if any(self.alive) and lock.locked():
            lock.release()


class ThreadedStep:
    """A split step on threads that are started early."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.lanes = steps.lanes_of(LockLane)
        for number, lane in enumerate(self.lanes):
            lane.number = number

    def run(self, begin: Callable[[], None] = lambda: None, end: Callable[[], None] = lambda: None) -> list[Tensor]:
        """One step; `begin` and `end` are called on this thread, with the other threads waiting or gone."""
        baton, steps = Baton(len(self.lanes)), self.steps
        barrier = threading.Barrier(len(self.lanes) + 1)
        outputs: list[Any] = [None] * len(self.lanes)
        errors: list[BaseException] = []
        stream = steps.contexts[0].compute_stream

        def body(number: int) -> None:
            try:
                if not steps.bench.on_cpu:
                    torch.cuda.set_device(steps.bench.device.index)  # type: ignore[attr-defined]
                steps.bench.device.set_stream(stream)
                if not steps.bench.on_cpu:
                    torch.cuda.current_blas_handle()
                barrier.wait()
                baton.locks[number].acquire()
                with torch.inference_mode():
                    outputs[number] = steps.model(steps.parts[number], self.lanes[number])
            except BaseException as error:
                # Whatever it is: the main thread raises it, and the other threads must not wait for this one.
                errors.append(error)
            finally:
                baton.finish(number)

        for lane in self.lanes:
            lane.baton = baton
        threads = [threading.Thread(target=body, args=(number,), daemon=True) for number in range(len(self.lanes))]
        for thread in threads:
            thread.start()
        barrier.wait()
        begin()
        baton.locks[0].release()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        end()
        return outputs


class ThreadedCapture:
    """Counterpart of `GraphPool` for `ThreadedStep`."""

    def __init__(self, steps: Steps, stream: Any, mode: str = "global") -> None:
        self.steps, self.stream, self.mode = steps, stream, mode
        self.handle = torch.cuda.graph_pool_handle()
        self.step = ThreadedStep(steps)
        self.fork, self.join = torch.cuda.Event(), torch.cuda.Event()

    def capture(self) -> tuple[Any, list[Tensor], float]:
        """Graph, outputs, seconds from the start of the threads to the end of the capture."""
        device, comm = self.steps.bench.device, self.steps.contexts[0].comm_stream
        graph = torch.cuda.CUDAGraph()

        def begin() -> None:
            graph.capture_begin(pool=self.handle, capture_error_mode=self.mode)
            device.record(self.fork, self.stream)
            device.wait(comm, self.fork)

        def end() -> None:
            device.record(self.join, comm)
            device.wait(self.stream, self.join)
            graph.capture_end()

        with device.stream_scope(self.stream):
            self.step.run()
            device.synchronize()
            collecting = gc.isenabled()
            gc.disable()
            try:
                began = time.perf_counter()
                outputs = self.step.run(begin, end)
                seconds = time.perf_counter() - began
            finally:
                if collecting:
                    gc.enable()
        return graph, outputs, seconds
