"""Chrome JSON of torch.profiler (Kineto), plain or gzip; also what vLLM and SGLang write, which is the same.

Times there are microseconds. Recent versions count them from `baseTimeNanoseconds`, since a double cannot hold
nanoseconds of this century; older ones wrote whole microseconds.
"""

from __future__ import annotations

import os
import re
from array import array
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from ...errors import TraceFileError
from ..profile import COPY, KERNEL, SET, Profile
from .columns import ProfileBuilder
from .json_blocks import Args, Event, JsonBlocks

__all__ = ["read_torch_profile"]

_ACTIVITIES = {
    "kernel": KERNEL, "gpu_memcpy": COPY, "gpu_memset": SET,
    "Kernel": KERNEL, "Memcpy": COPY, "Memset": SET,
}  # fmt: skip
_CALLS = {"cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver", "Runtime"}
_RANGES = {"user_annotation", "nvtx"}
_WAITS = {"cuda_sync"}
# Bytes of an element, by the names that torch's profiler has for types.
_BYTES = dict.fromkeys(("Byte", "Char", "Bool", "Float8_e4m3fn", "Float8_e5m2"), 1)
_BYTES |= {"Half": 2, "BFloat16": 2, "Short": 2, "Float": 4, "Int": 4, "Double": 8, "Long": 8}
# Of the calls, those that put work on a stream, make it wait, or wait for it; torch asks events 2,000 times a step.
_WORK = re.compile(r"Launch|Memcpy|Memset|WaitEvent|Synchronize")
# Categories and process names of profilers that write the same format for other machines.
_OTHER_CATEGORIES = {
    "xpu_runtime": "an Intel GPU",
    "mtia_ccp_events": "an MTIA",
    "privateuse1_runtime": "another device",
}
_OTHER_PROCESSES = (
    ("Ascend", "an Ascend NPU"), ("CANN", "an Ascend NPU"), ("HCCL", "an Ascend NPU"), ("/device:TPU", "a TPU"),
    ("/device:GPU", "TensorFlow or JAX"), ("/host:CPU", "TensorFlow or JAX"), ("VizTracer", "VizTracer"),
)  # fmt: skip
_LIMIT = 1 << 63
# What is shorter has not run; a profile of nothing but such kernels has its times in another unit.
_SHORTEST_KERNEL_US = 0.1
_RANK_IN_NAME = re.compile(r"(?<![a-z])rank[-_]?(\d+)")


def read_torch_profile(path: str | os.PathLike[str]) -> Profile:
    """Read one profile, in memory that does not grow with the file but by its columns (about 100 bytes an event kept).

    Raises:
        TraceFileError: cannot be read, no JSON, cut off, no profile of an NVIDIA or AMD GPU, several processes in one,
            times that are no microseconds.
    """
    blocks = JsonBlocks(path)
    reader = _Reader()
    total = 0
    for events in blocks:
        total += len(events)
        reader.read(events)
    file = os.fspath(path)
    document = blocks.document
    reader.refuse(file, total, document.baseTimeNanoseconds)
    rank = document.distributedInfo.rank if document.distributedInfo is not None else None
    if rank is None and (match := _RANK_IN_NAME.search(Path(file).name)):
        rank = int(match[1])
    origin = reader.builder.origin
    tables = reader.builder.tables(origin)
    if rank is not None:
        for table in ("activities", "calls", "ranges", "waits"):
            tables[table].rank[:] = rank
    missing = []
    if not len(tables["calls"]):
        missing.append("no calls of the host (launches), as the profiler's CPU activities were off")
    notes = []
    if left_out := reader.odd + blocks.left_out:
        them = "event that torch.profiler cannot have written was"
        if left_out > 1:
            them = "events that torch.profiler cannot have written were"
        notes.append(f"{left_out} {them} left out.")
    base = 0 if document.baseTimeNanoseconds is None else document.baseTimeNanoseconds
    return Profile(
        path=file,
        source="torch.profiler",
        origin=origin + base / 1000,
        unit="us",
        ranks=rank is not None,
        gpus=list(dict.fromkeys(device.name for device in document.deviceProperties or [])),
        missing=missing,
        notes=notes,
        **tables,
    )


class _Reader:
    """Sorts events into columns, and remembers what tells a profile of another kind."""

    def __init__(self) -> None:
        self.builder = ProfileBuilder()
        self.categories: Counter[str] = Counter()
        self.processes: set[str] = set()
        self.places: set[tuple[int, int]] = set()  # (device, process) of what ran on a GPU
        self.odd = 0
        self.backward = 0
        # Of copies that say their bytes and their bandwidth: how long they took by that, and by their duration.
        self.seconds_by_bandwidth = 0.0
        self.seconds_by_duration = 0.0
        self._handlers: dict[str, Callable[[Event, str], None]] = {}
        for categories, handler in (
            (_ACTIVITIES, self._activity),
            (_CALLS, self._call),
            (_RANGES, self._range),
            (_WAITS, self._wait),
        ):
            self._handlers |= dict.fromkeys(categories, handler)
        self._work: dict[str, bool | None] = {}

    def read(self, events: list[Event]) -> None:
        handlers = self._handlers
        for event in events:
            category = event.cat
            if event.ph == "X":
                if (handler := handlers.get(category or "")) is not None:
                    try:
                        handler(event, category or "")
                    except (TypeError, ValueError, OverflowError):
                        self.odd += 1
                elif category in _OTHER_CATEGORIES:
                    self.categories[category] += 1
            elif event.ph == "M" and event.name == "process_name" and event.args is not None:
                self.processes.add(str(event.args.name))

    def _activity(self, event: Event, category: str) -> None:
        args = event.args or Args()
        device = _integer(event.pid if args.device is None else args.device)
        kind, size = _ACTIVITIES[category], _integer(args.size, -1)
        if args.elements is not None:
            # Of a collective of NCCL: what this rank gave to it.
            width = _BYTES.get(str(args.dtype).rpartition("::")[2])
            size = size if width is None else _integer(args.elements) * width
        row = (
            self.builder.names[event.name or ""], kind, 0, device,
            _integer(event.tid if args.stream is None else args.stream),
            _integer(args.correlation, -1), _graph_node(args), size,
        )  # fmt: skip
        duration = self._times(event, self.builder.activities.times)
        self.builder.activities.integers.extend(row)
        if isinstance(event.pid, int):
            self.places.add((device, event.pid))
        if kind == COPY and size > 0 and isinstance(args.bandwidth, (int, float)) and args.bandwidth > 0:
            self.seconds_by_bandwidth += size / args.bandwidth * 1e-9
            self.seconds_by_duration += duration * 1e-6

    def _call(self, event: Event, category: str) -> None:
        name = event.name or ""
        if name not in self._work:
            # None: a record of an event, of which a wait wants to know when it was.
            self._work[name] = None if "EventRecord" in name else _WORK.search(name) is not None
        work = self._work[name]
        args = event.args or Args()
        if work is None:
            self.builder.recorded.append(_integer(args.correlation, -1))
            self.builder.recorded_at.append(float(event.ts))  # type: ignore[arg-type]
        if not work:
            return
        row = (self.builder.names[name], 0, _integer(event.tid), _integer(args.correlation, -1))
        self._times(event, self.builder.calls.times)
        self.builder.calls.integers.extend(row)

    def _range(self, event: Event, category: str) -> None:
        row = (self.builder.names[event.name or ""], 0, _integer(event.tid))
        self._times(event, self.builder.ranges.times)
        self.builder.ranges.integers.extend(row)

    def _wait(self, event: Event, category: str) -> None:
        args = event.args or Args()
        if event.name != "Stream Wait Event" or args.wait_on_stream is None:
            return
        row = (
            0, _integer(event.pid if args.device is None else args.device),
            _integer(event.tid if args.stream is None else args.stream), _integer(args.wait_on_stream),
            _integer(args.correlation, -1), _integer(args.record_correlation, -1),
        )  # fmt: skip
        self._times(event, self.builder.waits.times)
        self.builder.waits.integers.extend(row)

    def _times(self, event: Event, into: array[float]) -> float:
        # Called when the rest of the row is known to be in order: the two arrays grow together or not at all.
        begin = float(event.ts)  # type: ignore[arg-type]
        duration = float(event.dur or 0)
        if duration < 0:
            self.backward += 1
        into.extend((begin, duration))
        return duration

    def refuse(self, file: str, total: int, based: int | None) -> None:
        """What can be wrong with a readable file; each as one sentence."""
        if total == 0:
            raise TraceFileError(f"{file}: the profile holds no events")
        activities = len(self.builder.activities.times) // 2
        other = self._other_vendor()
        if other and (not activities or self.categories):
            raise TraceFileError(f"{file}: a profile of {other}; only those of NVIDIA and AMD GPUs are read")
        if not activities:
            host = self.builder.ranges.times or self.builder.calls.times
            has = "only what the host did" if host else "nothing that torch.profiler writes"
            raise TraceFileError(
                f"{file}: none of its {total} events ran on a GPU, it holds {has}; "
                "profile with ProfilerActivity.CUDA, on a machine with a GPU"
            )
        if self.backward:
            raise TraceFileError(f"{file}: {self.backward} of its events end before they begin")
        processes = Counter(device for device, _ in self.places)
        if processes and (most := processes.most_common(1)[0])[1] > 1:
            raise TraceFileError(
                f"{file}: {most[1]} processes have a GPU {most[0]} in it, so several profiles were merged into one; "
                "give each rank's file by itself"
            )
        self._refuse_unit(file, based)

    def _refuse_unit(self, file: str, based: int | None) -> None:
        origin = self.builder.origin
        unit = ""
        for name, low in (("milliseconds", 1e12), ("nanoseconds", 1e18)):
            # Wall-clock times between 2017 and 2040. Seconds are not looked for: microseconds since boot reach as
            # much, and durations tell.
            if based is None and 1.5 * low <= origin < 2.2 * low:
                unit = name
        if self.seconds_by_bandwidth and self.seconds_by_duration:
            ratio = self.seconds_by_duration / self.seconds_by_bandwidth
            # Whole microseconds round short copies down to nothing, so only orders of magnitude count.
            if ratio > 200:
                unit = "nanoseconds"
            elif ratio < 5e-5 and self.seconds_by_bandwidth > 1e-3:
                unit = "seconds"
            elif ratio < 0.005 and self.seconds_by_bandwidth > 1e-3:
                unit = "milliseconds"
        took = [duration for duration in self.builder.activities.times[1::2] if duration > 0]
        if not unit and took and max(took) < _SHORTEST_KERNEL_US:
            # Of the shortest one, as long kernels of one unit are as long as short ones of the next.
            unit = "seconds" if min(took) < _SHORTEST_KERNEL_US / 1000 else "milliseconds"
        if unit:
            raise TraceFileError(
                f"{file}: its times are {unit}, where a profile has microseconds; convert them (ts and dur) first"
            )

    def _other_vendor(self) -> str:
        for category in self.categories:
            return _OTHER_CATEGORIES[category]
        for word, vendor in _OTHER_PROCESSES:
            if any(name.startswith(word) for name in self.processes):
                return vendor
        return ""


def _integer(value: int | float | str | None, default: int | None = None) -> int:
    """A value of JSON as a number of 64 bits.

    Raises:
        TypeError, ValueError, OverflowError: it is none, and there is no default or it is not missing.
    """
    if value is None and default is not None:
        return default
    number = int(value)  # type: ignore[arg-type]
    if not -_LIMIT <= number < _LIMIT:
        raise OverflowError(f"{number} does not fit into 64 bits")
    return number


def _graph_node(args: Args) -> int:
    # torch.profiler writes node 0 for what no graph launched.
    return _integer(args.graph_node) if args.graph_node else -1
