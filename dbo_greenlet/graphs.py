"""Capturing work as a CUDA graph, on the thread that runs it, so that a capture that fails leaves no trace.

A step under greenlets is one thread from its first launch to its last, so it is captured like any other code: begin,
run, end. Nothing has to be started, warmed up or parked beforehand, as microbatches on threads must be, because each of
them has cuBLAS handles of its own, which cannot be made inside a capture.

What must be seen to:

* The comm streams are forked from the capture stream first and joined to it last. A stream that a step did not use
  joins as well; one that is not joined makes the capture fail.
* The mode is "thread_local": what another thread does on its own streams, an asynchronous copy for instance, neither
  becomes part of the capture nor spoils it. (In torch's default mode, "global", any of its calls that CUDA calls unsafe
  ends the capture.)
* The garbage collector does not run inside. It could find an old graph or event there, and freeing those is a call that
  a capture does not take.
* After a capture that CUDA has given up, torch's own end of it raises half-way: the allocator still sends this thread's
  allocations to the pool, and the random generator believes in the capture. `_recover` puts both right.
"""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from .devices.cuda import CudaDevice, CudaStream
from .errors import GraphCaptureError, MicrobatchFailed

__all__ = ["CAPTURE_MODE", "Captured", "GraphPool"]

T = TypeVar("T")

CAPTURE_MODE = "thread_local"


@dataclass
class Captured(Generic[T]):
    """A captured run.

    Attributes:
        output: what the run returned. Its tensors are written anew by every replay, and by no other allocation; the
            other graphs of the same pool may write over them.
        seconds: the capture, without its warm-up run and with the instantiation of the graph.
        pool_bytes: by how much it made the pool's memory grow.
    """

    output: T
    seconds: float
    pool_bytes: int
    _graph: Any = field(repr=False)

    def replay(self) -> None:
        """Enqueue all of it on the current stream: one launch, no allocation."""
        self._graph.replay()


class GraphPool:
    """One memory pool for the graphs of one device, and the stream that they are captured on.

    Graphs that share a pool use the same memory, so they must not run at the same time. Capture the largest first: the
    others then fit into what it has.

    Attributes: `device`, `stream`.
    """

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        self.stream: CudaStream = device.new_stream("graph")
        self._handle = torch.cuda.graph_pool_handle()
        self._alive: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lost: list[Any] = []
        self._fork = device.new_event()
        self._joins: dict[CudaStream, Any] = {}

    def capture(
        self,
        run: Callable[[], T],
        *,
        streams: Sequence[CudaStream] = (),
        wait: Callable[[], None] | None = None,
    ) -> Captured[T]:
        """Run `run` twice on the pool's stream: once as it is, then once into a graph.

        The first run makes what cannot be made inside a capture (handles, workspaces, compiled kernels) and does all of
        its work; the second does none.

        Args:
            run: enqueues the work, on the current stream and on `streams`. It must read nothing back from the device.
            streams: the comm streams it uses. They may hold nothing that is still being captured elsewhere.
            wait: blocks the host until the current stream is done, after the first run; default: a plain
                synchronization, which cannot notice that a rank whose message the stream waits for is gone.

        Raises:
            GraphCaptureError: the capture failed; the cause is what `run` raised, or what CUDA said at its end. The
                process is as it was before. What the warm-up run raises comes out as it is.
        """
        before = self.device.current_stream()
        self.device.record(self._fork, before)
        self.device.wait(self.stream, self._fork)
        if not self._alive:
            # Torch frees a pool with its last graph, and then does not take its name any more.
            self._renew()
        with self.device.stream_scope(self.stream):
            try:
                run()
                (wait or self.device.synchronize)()
                size = self.num_bytes()
                graph = torch.cuda.CUDAGraph()
                with _no_garbage_collection():
                    began = time.perf_counter()
                    output = self._capture(graph, run, streams)
                    seconds = time.perf_counter() - began
            finally:
                # Also where the warm-up failed half-way: what it enqueued reads what the caller writes next.
                self.device.record(self._fork, self.stream)
                self.device.wait(before, self._fork)
        self._alive.add(graph)
        return Captured(output, seconds, self.num_bytes() - size, graph)

    def num_bytes(self) -> int:
        """Bytes of device memory that the pool holds."""
        return sum(
            segment["total_size"]
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment.get("segment_pool_id", ())) == tuple(self._handle)
        )

    def _capture(self, graph: Any, run: Callable[[], T], streams: Sequence[CudaStream]) -> T:
        try:
            graph.capture_begin(pool=self._handle, capture_error_mode=CAPTURE_MODE)
            self.device.record(self._fork, self.stream)
            for stream in streams:
                self.device.wait(stream, self._fork)
            output = run()
            self.device.set_stream(self.stream)
            self._join(streams)
        except BaseException as error:
            self._give_up(graph, streams)
            if isinstance(error, Exception):
                raise _failure(error) from error
            raise
        try:
            graph.capture_end()
        except BaseException as error:
            if torch.cuda.is_current_stream_capturing():
                # Interrupted before it did anything.
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
            self._recover(graph)
            if isinstance(error, Exception):
                raise _failure(error) from error
            raise
        return output

    def _join(self, streams: Sequence[CudaStream]) -> None:
        for stream in streams:
            event = self._joins.get(stream)
            if event is None:
                event = self._joins[stream] = self.device.new_event()
            self.device.record(event, stream)
            self.device.wait(self.stream, event)

    def _give_up(self, graph: Any, streams: Sequence[CudaStream]) -> None:
        """End a capture whose `run` raised. Whole so far, it only has to be thrown away."""
        self.device.set_stream(self.stream)
        with contextlib.suppress(RuntimeError):
            # Raises if CUDA gave the capture up, because it was asked for something that a capture cannot do. It still
            # has to be ended.
            self._join(streams)
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
        self._recover(graph)

    def _recover(self, graph: Any) -> None:
        """After a capture that failed: allocator and random generator know nothing of it any more."""
        try:
            graph.pool()
        except RuntimeError:
            # It was not ended, as far as torch knows: what the end does besides is to be done by hand.
            self._end_by_hand()
        graph.reset()
        # The allocator of pinned memory may still ask this graph whether a stream is captured into it.
        self._lost.append(graph)
        self._renew()

    def _end_by_hand(self) -> None:
        index = self.device.index
        for undo in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
            # Raises where this torch has done it, or had not begun.
            with contextlib.suppress(RuntimeError):
                undo(index, self._handle)
        # Generators leave "capturing" at the end of a capture, so here is one that ends.
        nothing = torch.cuda.CUDAGraph()
        try:
            nothing.capture_begin(capture_error_mode=CAPTURE_MODE)
            torch.zeros(1, device=self.device.name)
            nothing.capture_end()
            nothing.reset()
        except RuntimeError:
            # Then the first error is the one to tell; this one would hide it.
            self._lost.append(nothing)

    def _renew(self) -> None:
        """A new pool for what is captured from now on; graphs of the old one keep that.

        A pool whose last graph is gone cannot be used again, and what a failed capture had allocated may be lost to it.
        """
        self._handle = torch.cuda.graph_pool_handle()


def _failure(error: Exception) -> GraphCaptureError:
    where = f" in microbatch {error.index}" if isinstance(error, MicrobatchFailed) else ""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, torch.OutOfMemoryError):
        if "captur" in str(cause):
            remedy = (
                "while a step is captured nothing may be read back from the device, no shape may depend on data, and "
                "each stream that was used must be joined: take that out, or run the step eagerly"
            )
            break
        cause = cause.__cause__
    else:
        remedy = "the step runs eagerly without graphs" if cause is None else "capture fewer or smaller sizes"
    return GraphCaptureError(f"not captured into a CUDA graph; what stopped it{where}: {error}; {remedy}")


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
