"""Profiles made by hand: torch.profiler's JSON and Nsight Systems' SQLite, by their documented forms."""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DISPATCH = "void deep_ep::internode::dispatch<false, 8>(int4*, float*)"
COMBINE = "void deep_ep::internode::combine<false, 8, __nv_bfloat16>(int4*)"
LOW_LATENCY_DISPATCH = "void deep_ep::internode_ll::dispatch<true, false, 7168>(void*)"
LOW_LATENCY_COMBINE = "void deep_ep::internode_ll::combine<7168, 9>(void*)"
GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_nn_n_tilesize128x128x64_cublas"
FLASH = "void flash::compute_attn_ws<Flash_fwd_kernel_traits<192, 128>>(flash::Params)"


class ChromeProfile:
    """Events as Kineto writes them. Times are microseconds on the axis that `base` puts somewhere into the century."""

    def __init__(self, *, rank: int | None = 0, base: int | None = 1_700_000_000_000_000_000) -> None:
        self.events: list[dict[str, Any]] = []
        self.head: dict[str, Any] = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}]}
        if rank is not None:
            self.head["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": 2}
        if base is not None:
            self.head["baseTimeNanoseconds"] = base
        self._correlation = 0

    def add(self, category: str, name: str, begin: float, duration: float, pid: Any, tid: Any, **args: Any) -> None:
        what = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid}
        self.events.append({**what, "ts": begin, "dur": duration, "args": args})

    def kernel(
        self,
        name: str,
        begin: float,
        end: float,
        *,
        stream: int = 7,
        device: int = 0,
        launch: float | None = None,
        thread: int = 100,
        node: int = 0,
        category: str = "kernel",
        **args: Any,
    ) -> None:
        """A kernel; with `launch` also the call, a microsecond long, that launched it."""
        if launch is not None:
            self.call("cudaLaunchKernel", launch, launch + 1, thread=thread)
        self.add(
            category, name, begin, end - begin, device, stream,
            device=device, stream=stream, correlation=self._correlation if launch is not None else 0,
            **{"graph node id": node}, **args,
        )  # fmt: skip

    def call(self, name: str, begin: float, end: float, *, thread: int = 100) -> int:
        self._correlation += 1
        self.add("cuda_runtime", name, begin, end - begin, 4000, thread, correlation=self._correlation, cbid=211)
        return self._correlation

    def range(self, name: str, begin: float, end: float, *, thread: int = 100) -> None:
        self.add("user_annotation", name, begin, end - begin, 4000, thread)

    def text(self) -> str:
        return json.dumps({**self.head, "traceEvents": self.events, "traceName": "made by hand"}, indent=1)

    def write(self, path: Path) -> Path:
        data = self.text().encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        return path


_SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE TARGET_INFO_GPU (vmId INTEGER, id INTEGER, name TEXT);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL,
    greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
    demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, mangledName INTEGER, graphNodeId INTEGER,
    gridX INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL,
    streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, bytes INTEGER NOT NULL,
    copyKind INTEGER NOT NULL, srcDeviceId INTEGER, dstDeviceId INTEGER, graphNodeId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL,
    streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, value INTEGER NOT NULL,
    bytes INTEGER NOT NULL, graphNodeId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL,
    streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, graphId INTEGER NOT NULL,
    graphExecId INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (
    start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER,
    correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL);
CREATE TABLE NVTX_EVENTS (
    start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, text TEXT, globalTid INTEGER,
    endGlobalTid INTEGER, textId INTEGER, domainId INTEGER);
"""


class NsysProfile:
    """Rows of the tables that Nsight Systems documents. Times are microseconds here, nanoseconds in the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.database = sqlite3.connect(path)
        self.database.executescript(_SCHEMA)
        self._strings: dict[str, int] = {}
        self._correlation = 0
        self.database.execute("INSERT INTO TARGET_INFO_GPU VALUES (0, 0, 'NVIDIA H200')")

    def string(self, text: str) -> int:
        if text not in self._strings:
            self._strings[text] = len(self._strings) + 1
            self.insert("StringIds", (self._strings[text], text))
        return self._strings[text]

    def insert(self, table: str, row: Sequence[Any]) -> None:
        self.database.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)

    def kernel(
        self, name: str, begin: float, end: float, *, stream: int = 7, device: int = 0, launch: float | None = None,
        process: int = 50, node: int | None = None,
    ) -> None:  # fmt: skip
        if launch is not None:
            self.call("cudaLaunchKernel_v7000", launch, launch + 1, process=process)
        correlation = self._correlation if launch is not None else None
        names = (self.string(name), self.string(name.partition("<")[0]), None)
        self.insert(
            "CUPTI_ACTIVITY_KIND_KERNEL",
            (_ns(begin), _ns(end), device, 1, None, stream, correlation, process << 24, *names, node, 1),
        )

    def call(self, name: str, begin: float, end: float, *, process: int = 50, thread: int = 9) -> None:
        self._correlation += 1
        row = (_ns(begin), _ns(end), 0, (process << 24) + thread, self._correlation, self.string(name), 0)
        self.insert("CUPTI_ACTIVITY_KIND_RUNTIME", row)

    def copy(self, kind: int, begin: float, end: float, *, source: int = 0, target: int = 0, stream: int = 7) -> None:
        row = (_ns(begin), _ns(end), 0, 1, stream, None, 50 << 24, 4096, kind, source, target, None)
        self.insert("CUPTI_ACTIVITY_KIND_MEMCPY", row)

    def graph(self, begin: float, end: float) -> None:
        self.insert("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", (_ns(begin), _ns(end), 0, 1, 7, None, 50 << 24, 3, 4))

    def range(self, name: str, begin: float, end: float, *, registered: bool = False) -> None:
        text, number = (None, self.string(name)) if registered else (name, None)
        self.insert("NVTX_EVENTS", (_ns(begin), _ns(end), 59, None, text, (50 << 24) + 9, None, number, 0))

    def done(self) -> Path:
        self.database.commit()
        self.database.close()
        return self.path


def _ns(microseconds: float) -> int:
    return 1_700_000_000_000_000_000 + round(microseconds * 1000)
