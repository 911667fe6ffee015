"""What is measured inside a rank of real vLLM, alike for every carrier of microbatches.

Everything here wraps vLLM's own methods from outside, after plug-ins have been loaded, and changes no result.
"""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
import subprocess
import threading
import time
import traceback
import types
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any


def quantiles(values: list[float], digits: int = 3) -> dict[str, float] | None:
    """The 10th, 50th and 90th percentile, and the count."""
    if len(values) < 2:
        return None
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return {"p10": round(tenths[0], digits), "p50": round(tenths[4], digits), "p90": round(tenths[8], digits)} | {
        "count": len(values)
    }


class Probe:
    """Counts and times of one process; `take()` returns what was added since it was last called.

    A hand-off is the time from just before the switch in `UBatchContext._cpu_yield` until the other microbatch runs
    again behind its own: the last to stop writes the time down, the next to come back reads it, unless it is the same
    one (its sibling ended in between).
    """

    def __init__(self) -> None:
        self.yields = 0
        self.replays = 0
        self.threads_started = 0
        self.most_threads = 0
        self.hand_offs_ns: list[int] = []
        self.forward_ns: list[int] = []
        self.captures_s: list[float] = []
        self.capture_model_s: float | None = None
        self.graph_mb: dict[str, float] | None = None
        self.in_model = False
        self._stopped: tuple[int, int] = (-1, 0)
        self._carrier_yield: Any = None

    def take(self) -> dict[str, Any]:
        taken = {
            "yields": self.yields,
            "replays": self.replays,
            "threads_started": self.threads_started,
            "most_threads": self.most_threads,
            "hand_offs_us": [ns / 1e3 for ns in self.hand_offs_ns],
            "forward_ms": [ns / 1e6 for ns in self.forward_ns],
        }
        self.yields = self.replays = self.threads_started = self.most_threads = 0
        self.hand_offs_ns, self.forward_ns = [], []
        return taken

    # -- the hand-over, which the carriers replace and which is therefore wrapped anew for each mode

    def watch_yields(self) -> None:
        from vllm.v1.worker import ubatching

        self._carrier_yield = carrier_yield = ubatching.UBatchContext._cpu_yield
        now, list_folder = time.perf_counter_ns, os.listdir

        def _cpu_yield(context: Any) -> None:
            self.yields += 1
            if self.yields == 1:
                self.most_threads = len(list_folder("/proc/self/task"))
            self._stopped = (context.id, now())
            carrier_yield(context)
            back = now()
            who, when = self._stopped
            if who != context.id:
                self.hand_offs_ns.append(back - when)

        # With the globals of vLLM's module: the drop-in names a yield after the first caller outside of it, and must
        # not find this function there.
        ubatching.UBatchContext._cpu_yield = types.FunctionType(
            _cpu_yield.__code__, ubatching.__dict__, "_cpu_yield", None, _cpu_yield.__closure__
        )

    def leave_yields(self) -> None:
        from vllm.v1.worker.ubatching import UBatchContext

        UBatchContext._cpu_yield = self._carrier_yield

    # -- what stays wrapped

    def watch_model(self, captures: bool) -> None:
        """Time the runner's call of the model and the captures; count threads that are started inside the call.

        The methods of microbatches are wrapped once the model is loaded: until then the drop-in looks whether they are
        vLLM's own.
        """
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        forward, capture_model = GPUModelRunner._model_forward, GPUModelRunner.capture_model
        load_model = GPUModelRunner.load_model
        start = threading.Thread.start

        def _model_forward(runner: Any, *args: Any, **kwargs: Any) -> Any:
            self.in_model = True
            begin = time.perf_counter_ns()
            try:
                return forward(runner, *args, **kwargs)
            finally:
                self.forward_ns.append(time.perf_counter_ns() - begin)
                self.in_model = False

        def watched_load_model(runner: Any, *args: Any, **kwargs: Any) -> None:
            load_model(runner, *args, **kwargs)
            self.watch_yields()
            if captures:
                self.watch_captures()

        def timed_capture_model(runner: Any) -> int:
            before = gpu_memory_mb()
            begin = time.perf_counter()
            by_vllm = capture_model(runner)
            self.capture_model_s = time.perf_counter() - begin
            after = gpu_memory_mb()
            # vLLM's own figure is what became less on the whole GPU, which may be the other rank's doing.
            self.graph_mb = {"vllm": by_vllm / 2**20} | {name: after[name] - before[name] for name in after}
            return by_vllm

        def counted_start(thread: threading.Thread) -> None:
            if self.in_model:
                self.threads_started += 1
            start(thread)

        GPUModelRunner._model_forward = _model_forward
        GPUModelRunner.capture_model = timed_capture_model
        GPUModelRunner.load_model = watched_load_model
        threading.Thread.start = counted_start  # type: ignore[method-assign]

    def watch_captures(self) -> None:
        """Time the capture of each microbatched graph. The wrapper's class looks the method up at every call."""
        from vllm.v1.worker.gpu_ubatch_wrapper import UBatchWrapper

        capture = UBatchWrapper._capture_ubatches

        def _capture_ubatches(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return capture(wrapper, *args, **kwargs)
            finally:
                self.captures_s.append(time.perf_counter() - begin)

        UBatchWrapper._capture_ubatches = _capture_ubatches

    def watch_replays(self, wrapper: Any) -> int:
        """Count the replays of the wrapper's microbatched graphs; return how many graphs there are."""
        graphs = getattr(wrapper, "cudagraphs", {})
        for entry in graphs.values():
            entry.cudagraph = _CountedGraph(entry.cudagraph, self)
        return len(graphs)


class _CountedGraph:
    def __init__(self, graph: Any, probe: Probe) -> None:
        self._graph = graph
        self._probe = probe

    def replay(self) -> None:
        self._probe.replays += 1
        self._graph.replay()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._graph, name)


def gpu_memory_mb() -> dict[str, float]:
    """What torch's allocator holds, its graphs' pools included, and what the driver books for this process in all."""
    import torch
    from vllm.third_party import pynvml

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    held = {"allocator": torch.cuda.memory_reserved() / 2**20}
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        device = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(device):
            if process.pid == os.getpid() and process.usedGpuMemory is not None:
                held["driver"] = process.usedGpuMemory / 2**20
    return held


def process_facts() -> dict[str, float]:
    """Memory in MB and threads of this process, as the kernel counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    status = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}
    return {
        "resident_mb": round(int(status["VmRSS"][0]) / 1024, 1),
        "private_mb": round(int(status["RssAnon"][0]) / 1024, 1),
        "most_resident_mb": round(int(status["VmHWM"][0]) / 1024, 1),
        "threads": int(status["Threads"][0]),
        "python_threads": threading.active_count(),
    }


def machine_facts() -> dict[str, Any]:
    """The machine and the versions that belong beside every number."""
    import torch

    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("vllm", "tokenspeed-deepep", "triton", "transformers", "greenlet", "dbo-greenlet"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "gpu": torch.cuda.get_device_name(),
        "gpus_visible": torch.cuda.device_count(),
        "driver": driver.stdout.split()[0] if driver.stdout else "unknown",
        "cores": os.cpu_count(),
        "versions": versions,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from, outermost first."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        yield current
        seen.add(id(current))
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def in_words(error: BaseException, length: int = 600) -> list[str]:
    """What a reader of the traceback sees of each error. An assertion without a text is known by its line."""
    return [_one_in_words(one)[:length] for one in causes(error)]


def _one_in_words(error: BaseException) -> str:
    text = str(error)
    frames = traceback.extract_tb(error.__traceback__)
    if not text and frames:
        last = frames[-1]
        text = f"{'/'.join(Path(last.filename).parts[-2:])}:{last.lineno} {last.line}"
    return f"{type(error).__name__}: {text}"
