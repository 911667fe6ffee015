"""A stand-in for CUDA's streams, events and graphs on the CPU that writes down every call, in order.

vLLM's own code runs on top of it unchanged: `torch.cuda.StreamContext`, `torch.cuda.graph`, vLLM's patched
`set_stream` and its `current_stream` are the real ones. What is replaced is what would reach the driver.

Kernels run at once, so there is nothing to wait for; the stand-in checks the ordering instead. Each stream has a vector
clock: work advances it, `Event.record` copies it, `wait_event` merges it. A capture takes in its own stream and every
stream that waits for an event of a captured one, as CUDA does; work on a stream outside of it, and a stream that was
taken in and never joined again, are errors.

A graph holds *programs*: what was launched while it was captured and can be run again (whole microbatches and the
concatenation of their outputs; `torch.cat` is replaced during a capture to be such a launch). `replay()` runs them in
launch order and copies what comes out into the tensors of the capture, so a replay with other inputs gives other
outputs. What a replay does not redo is the interleaving below a microbatch: the log shows that one.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch


class Call(NamedTuple):
    """One call: what, by which microbatch ("-": none), on which current stream, with what."""

    what: str
    who: str
    stream: str
    detail: tuple = ()


class Recorder:
    """The log, and what the stand-ins share: names, the current stream of each thread, the graph being captured."""

    def __init__(self) -> None:
        self.log: list[Call] = []
        self.muted = False
        self.graph: FakeGraph | None = None
        self._numbers: dict[str, itertools.count] = {}
        self._threads = threading.local()
        self.default_stream = FakeStream(recorder=self, name="default")
        #: hooks that look at the state at each logged call: called with the call
        self.observers: list[Callable[[Call], None]] = []

    def number(self, kind: str) -> str:
        return f"{kind}{next(self._numbers.setdefault(kind, itertools.count()))}"

    def current(self) -> FakeStream:
        return getattr(self._threads, "stream", self.default_stream)

    def set_current(self, stream: FakeStream) -> None:
        self._threads.stream = stream
        self.write("set_stream", stream.name)

    def write(self, what: str, *detail: Any) -> None:
        if self.muted:
            return
        call = Call(what, who_runs(), self.current().name, detail)
        self.log.append(call)
        for observer in self.observers:
            observer(call)

    def work(self, what: str, *detail: Any) -> None:
        """A kernel launch on the current stream."""
        if self.muted:
            return
        self.current().launch(what)
        self.write(what, *detail)

    @contextmanager
    def mute(self) -> Iterator[None]:
        before, self.muted = self.muted, True
        try:
            yield
        finally:
            self.muted = before


def who_runs() -> str:
    """The number of the microbatch whose forward context vLLM has in place; "-" where there is none."""
    from vllm import forward_context

    context = forward_context._forward_context
    metadata = None if context is None else context.attn_metadata
    return str(metadata["ubatch"]) if isinstance(metadata, dict) and "ubatch" in metadata else "-"


RECORDER: Recorder | None = None


def recorder() -> Recorder:
    if RECORDER is None:
        raise RuntimeError("no stand-in is installed: use `with fake_cuda.installed() as recorder`")
    return RECORDER


class FakeStream:
    """`torch.cuda.Stream`: a named timeline with a vector clock."""

    def __init__(self, device: Any = None, priority: int = 0, *, recorder: Recorder | None = None, name: str = ""):
        self.recorder = recorder or RECORDER
        self.name = name or self.recorder.number("stream")
        self.device = torch.device("cpu")
        self.device_index = 0
        self.clock: dict[str, int] = {}
        self.graph: FakeGraph | None = None
        self.stream_id = self.cuda_stream = id(self)
        if not name:
            self.recorder.write("stream.new", self.name)

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def launch(self, what: str) -> None:
        graph = self.recorder.graph
        if graph is not None and self.graph is not graph:
            raise RuntimeError(f"{what} was launched on {self.name}, which is not part of the capture of {graph.name}")
        self.clock[self.name] = self.clock.get(self.name, 0) + 1

    def wait_event(self, event: FakeEvent) -> None:
        for name, tick in event.clock.items():
            self.clock[name] = max(tick, self.clock.get(name, 0))
        if event.graph is not None and event.graph is self.recorder.graph:
            event.graph.take_in(self)
        self.recorder.write("event.wait", self.name, event.name)

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = event or FakeEvent()
        event.record(self)
        return event

    def wait_stream(self, stream: FakeStream) -> None:
        self.recorder.write("stream.wait_stream", self.name, stream.name)
        with self.recorder.mute():
            self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        self.recorder.write("stream.synchronize", self.name)


class FakeEvent:
    """`torch.Event` and `torch.cuda.Event`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.recorder = recorder()
        self.name = self.recorder.number("event") if not self.recorder.muted else "unnamed"
        self.clock: dict[str, int] = {}
        self.graph: FakeGraph | None = None
        self.recorder.write("event.new", self.name)

    def record(self, stream: FakeStream | None = None) -> None:
        stream = stream or self.recorder.current()
        self.clock = dict(stream.clock)
        self.graph = stream.graph
        self.recorder.write("event.record", self.name, stream.name)

    def wait(self, stream: FakeStream | None = None) -> None:
        (stream or self.recorder.current()).wait_event(self)

    def synchronize(self) -> None:
        self.recorder.write("event.synchronize", self.name)

    def query(self) -> bool:
        return True


class FakeGraph:
    """`torch.cuda.CUDAGraph`; see the module's words on what a replay runs."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.recorder = recorder()
        self.name = self.recorder.number("graph")
        self.programs: list[Callable[[], None]] = []
        self.taken_in: list[FakeStream] = []
        self.recorder.write("graph.new", self.name)

    def take_in(self, stream: FakeStream) -> None:
        if stream.graph is not self:
            stream.graph = self
            self.taken_in.append(stream)

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **kwargs: Any) -> None:
        if self.recorder.graph is not None:
            raise RuntimeError(f"{self.name} begins inside the capture of {self.recorder.graph.name}")
        stream = self.recorder.current()
        if stream is self.recorder.default_stream:
            raise RuntimeError("the default stream cannot be captured")
        self.recorder.write("graph.begin", self.name, stream.name, f"pool {pool}", capture_error_mode)
        self.recorder.graph = self
        self.take_in(stream)

    def capture_end(self) -> None:
        origin, *forked = self.taken_in
        self.recorder.graph = None
        for stream in self.taken_in:
            stream.graph = None
        self.recorder.write("graph.end", self.name)
        for stream in forked:
            if origin.clock.get(stream.name, 0) < stream.clock.get(stream.name, 0):
                raise RuntimeError(f"{stream.name} was forked by the capture of {self.name} and not joined")

    def replay(self) -> None:
        self.recorder.work("graph.replay", self.name)
        with self.recorder.mute():
            for program in self.programs:
                program()

    def pool(self) -> str:
        return f"pool of {self.name}"


def _cat_of_capture(original: Callable) -> Callable:
    def cat(tensors: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = original(tensors, *args, **kwargs)
        log = RECORDER
        if log is not None and log.graph is not None and not log.muted:
            tensors = list(tensors)
            log.work("cat", len(tensors))
            log.graph.programs.append(lambda: out.copy_(original(tensors, *args, **kwargs)))
        return out

    return cat


class _CudaOnlyForStreams:
    """vLLM's platform, which says "CUDA" to `current_stream` alone: its CPU answer is a placeholder without a queue."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def is_cuda(self) -> bool:
        return sys._getframe(1).f_code.co_name == "current_stream" or self._real.is_cuda()


class StepThreads:
    """Puts vLLM's threads on the log, and makes their start repeatable: `start` returns when the thread is parked."""

    def __init__(self, log: Recorder) -> None:
        self.log = log
        self.started: list[threading.Thread] = []
        self._parked: dict[int, threading.Event] = {}
        self._start, self._wait = threading.Thread.start, threading.Barrier.wait

    def patches(self) -> list[Any]:
        def of_vllm(thread: threading.Thread) -> bool:
            return str(getattr(getattr(thread, "_target", None), "__module__", "")).startswith("vllm.")

        def start(thread: threading.Thread) -> None:
            if not of_vllm(thread):
                return self._start(thread)
            self.started.append(thread)
            parked = threading.Event()
            self.log.write("thread.start")
            run = thread.run

            def parked_run() -> None:
                self._parked[threading.get_ident()] = parked
                try:
                    run()
                finally:
                    self._parked.pop(threading.get_ident(), None)
                    parked.set()

            thread.run = parked_run
            self._start(thread)
            parked.wait(10)
            return None

        def wait(barrier: threading.Barrier, timeout: float | None = None) -> int:
            parked = self._parked.get(threading.get_ident())
            if parked is not None:
                parked.set()
            return self._wait(barrier, timeout)

        return [
            patch.object(threading.Thread, "start", start),
            patch.object(threading.Barrier, "wait", wait),
        ]


@contextmanager
def installed() -> Iterator[Recorder]:
    """Put the stand-ins in place; the thread's current stream is one named "compute"."""
    global RECORDER
    import vllm.platforms
    from vllm.utils import torch_utils
    from vllm.v1.worker import gpu_ubatch_wrapper
    from vllm.v1.worker.gpu import ubatch_utils

    from dbo_greenlet.vllm import host_microbatch

    log = RECORDER = Recorder()
    platform = vllm.platforms.current_platform

    class SmControl:
        def __enter__(self) -> None:
            log.write("sm.reserve")

        def __exit__(self, *exc: Any) -> None:
            log.write("sm.give_back")

    def sm_control(parallel_config: Any) -> SmControl:
        return SmControl()

    # The drop-in looks into vLLM's note of each thread's stream, and found it when it was imported.
    streams_of_threads = threading.local()
    with ExitStack() as stack:
        for target, name, value in [
            (torch.cuda, "Stream", FakeStream),
            (torch.cuda, "Event", FakeEvent),
            (torch, "Event", FakeEvent),
            (torch.cuda, "CUDAGraph", FakeGraph),
            (torch.cuda, "current_stream", lambda device=None: log.current()),
            (torch.cuda, "_get_device_index", lambda *args, **kwargs: 0),
            (torch.cuda, "is_current_stream_capturing", lambda: log.current().graph is not None),
            (torch.cuda, "current_blas_handle", lambda: log.write("blas_handle")),
            (torch.cuda, "synchronize", lambda device=None: log.write("synchronize")),
            (torch.cuda, "empty_cache", lambda: log.write("empty_cache")),
            (torch.accelerator, "set_device_index", lambda device: log.write("set_device_index")),
            (torch, "cat", _cat_of_capture(torch.cat)),
            (torch_utils, "prev_set_stream", log.set_current),
            (torch_utils, "_current_stream_tls", streams_of_threads),
            (host_microbatch, "_stream_note", streams_of_threads),
            (gpu_ubatch_wrapper, "create_sm_control_context", sm_control),
            (ubatch_utils, "create_sm_control_context", sm_control),
            (vllm.platforms, "_current_platform", _CudaOnlyForStreams(platform)),
            (type(platform), "_global_graph_pool", "global"),
        ]:
            stack.enter_context(patch.object(target, name, value))
        if not hasattr(torch._C, "_host_emptyCache"):
            stack.enter_context(patch.object(torch._C, "_host_emptyCache", lambda: None, create=True))
        log.step_threads = StepThreads(log)
        for one in log.step_threads.patches():
            stack.enter_context(one)
        torch.cuda.set_stream(FakeStream(name="compute", recorder=log))
        log.log.clear()
        try:
            yield log
        finally:
            RECORDER = None
