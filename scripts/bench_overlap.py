"""Time and memory of `dbo-greenlet overlap`, `import`, `export` and `diff` on large files, each in its own process.

    python scripts/bench_overlap.py [--quick] [--large] [--out FILE.json]

The files are generated: a decode loop of 60 layers in two microbatches, as torch.profiler writes it (operators, calls,
flows and kernels, one step after the other), as Nsight Systems exports it, and as our own trace. --large adds 1 GB of
JSON and 10 million of our own slices, which need 5 GB of disk. Time is by the wall and of the processor, with the start
of Python; memory is the largest resident set. `empty` is the same command on a small file: what it costs to start.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LAYERS = 60
NAMES = (
    "void flash::compute_attn_ws<Flash_fwd_kernel_traits<192, 128, 128, 12, 2, false, 1>>(flash::Params)",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_nn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel",
    "void deep_ep::internode::dispatch<false, 8, true, 8>(int4*, float*, long*, float*)",
    "void deep_gemm::sm90_fp8_m_grouped_gemm_contiguous_impl<7168, 4096>(__nv_bfloat16*)",
    "void deep_ep::internode::combine<false, 8, __nv_bfloat16, 8>(int4*, float*, bool const*)",
)
STREAMS = (7, 7, 21, 7, 21)
STAGES = ("attention", "attention", "dispatch", "experts", "combine")
KERNEL_ARGS = {
    "queued": 0,
    "device": 0,
    "context": 1,
    "registers per thread": 168,
    "shared memory": 213248,
    "blocks per SM": 1.0,
    "warps per SM": 12.0,
    "grid": [132, 1, 1],
    "block": [384, 1, 1],
    "est. achieved occupancy %": 19,
    "graph node id": 0,
}


def kineto_events() -> Iterator[str]:
    """Events without an end, one JSON object each, in the proportions of a profile of vLLM."""
    number, clock = 0, 1000.0
    host = {"pid": 4000, "tid": 4000}

    def event(category: str, name: str, where: dict[str, int], begin: float, length: float, args: Any) -> str:
        what = {"ph": "X", "cat": category, "name": name, **where, "ts": begin, "dur": length, "args": args}
        return json.dumps(what, indent=1)

    def flow(end: str, where: dict[str, int], begin: float) -> str:
        return json.dumps({"ph": end, "id": number, **where, "ts": begin, "cat": "ac2g", "name": "ac2g"}, indent=1)

    while True:
        for layer in range(LAYERS):
            for piece in range(2 * len(NAMES)):
                ubatch, kind = divmod(piece, len(NAMES))
                number += 1
                clock += 20.0
                gpu = {"pid": 0, "tid": STREAMS[kind]}
                ids = {"External id": number}
                shapes = {**ids, "Ev Idx": number, "Input Dims": [[64, 7168], [7168, 1536]]}
                yield event("user_annotation", f"ubatch {ubatch} layer {layer} {STAGES[kind]}", host, clock, 15.5, ids)
                yield event("cpu_op", "aten::mm", host, clock + 1, 9.25, shapes)
                yield event("cpu_op", "aten::empty", host, clock + 2, 1.25, shapes)
                launch = {**ids, "cbid": 211, "correlation": number}
                yield event("cuda_runtime", "cudaLaunchKernel", host, clock + 4, 3.5, launch)
                yield flow("s", host, clock + 4)
                yield flow("f", gpu, clock + 30)
                ran = {**ids, **KERNEL_ARGS, "stream": STREAMS[kind], "correlation": number}
                yield event("kernel", NAMES[kind], gpu, clock + 30, 18.75, ran)


def write_json(path: Path, size: int) -> None:
    """A profile of about `size` bytes."""
    with open(path, "w", encoding="ascii", buffering=1 << 20) as file:
        file.write('{"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}],\n')
        file.write('"distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 2},\n')
        file.write('"baseTimeNanoseconds": 1700000000000000000, "traceEvents": [\n')
        written, between = 0, ""
        for event in kineto_events():
            file.write(between + event)
            written += len(event) + 2
            between = ",\n"
            if written >= size:
                break
        file.write('\n], "traceName": "generated"}\n')


def write_nsys(path: Path, kernels: int) -> None:
    database = sqlite3.connect(path)
    database.executescript(
        "CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);"
        "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, end INT, deviceId INT, contextId INT, streamId INT, "
        "correlationId INT, globalPid INT, demangledName INT, shortName INT, graphNodeId INT);"
        "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT, end INT, eventClass INT, globalTid INT, "
        "correlationId INT, nameId INT, returnValue INT);"
    )
    database.executemany("INSERT INTO StringIds VALUES (?, ?)", list(enumerate(NAMES)))
    database.execute("INSERT INTO StringIds VALUES (100, 'cudaLaunchKernel_v7000')")
    process = 4000 << 24
    database.executemany(
        "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, 0, 1, ?, ?, ?, ?, ?, NULL)",
        ((n * 20000 + 30000, n * 20000 + 48750, STREAMS[n % 5], n + 1, process, n % 5, n % 5) for n in range(kernels)),
    )
    database.executemany(
        "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, 0, ?, ?, 100, 0)",
        ((n * 20000 + 4000, n * 20000 + 7500, process + 9, n + 1) for n in range(kernels)),
    )
    database.commit()
    database.close()


def write_own(path: Path, slices: int) -> None:
    """Steps of two microbatches of 60 layers with hooks: a window for each slice but the last of a microbatch."""
    with open(path, "w", encoding="ascii", buffering=1 << 20) as file:
        file.write('{"t":"header","package":"0","rank":0,"world":1,"schema":1}\n')
        written, step, clock = 0, 0, 0.0
        while written < slices:
            same = f'"step":{step},"rank":0,"run":"dbo","ubatch":'
            for number in range(2 * LAYERS + 1):
                stage = "dispatch" if number % 2 == 0 else "combine"
                site = f"layer{number // 2}.{stage}" if number < 2 * LAYERS else ""
                for ubatch in range(2):
                    clock += 40.0
                    file.write(
                        f'{{"t":"slice",{same}{ubatch},"slice":{number},"site":"{site}","begin":{clock},'
                        f'"end":{clock + 37.125},"stream":null,"failed":false}}\n'
                    )
                    if site:
                        file.write(
                            f'{{"t":"recv",{same}{ubatch},"site":"{site}","sent":{clock + 35.0},"by":{1 - ubatch},'
                            f'"at":{clock + 60.5},"decision":{2 * number},"sent_decision":{2 * number}}}\n'
                        )
                    written += 1
            step += 1


def export(path: Path, kind: str, out: Path) -> tuple[object, ...]:
    return "export", path, "--format", kind, "-o", out


def measured(*words: object) -> tuple[float, float, float]:
    """Seconds by the wall and of processor time, and megabytes, of one command."""
    begin = time.perf_counter()
    child = subprocess.Popen([sys.executable, "-m", "dbo_greenlet.cli", *map(str, words)], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - begin
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode not in (0, 1):  # 1: what hosts' clocks say of our own traces is a bound
        raise SystemExit(child.returncode)
    unit = 1 if sys.platform == "darwin" else 1024
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * unit / 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small files, to see that it runs")
    parser.add_argument("--large", action="store_true", help="also 1 GB of JSON and 10 million slices")
    parser.add_argument("--out", type=Path, default=Path("out/bench_overlap.json"))
    arguments = parser.parse_args()
    scale = 0.05 if arguments.quick else 1.0
    rows: list[dict[str, Any]] = []

    def row(name: str, *words: object, size: int) -> None:
        seconds, processor, megabytes = measured(*words)
        rows.append(
            {"name": name, "file_mb": size / 1e6, "seconds": seconds, "cpu_seconds": processor, "memory_mb": megabytes}
        )
        print(f"{name:44} {size / 1e6:9.1f} {seconds:9.2f} {processor:9.2f} {megabytes:9.0f}", flush=True)

    print(f"{'':44} {'file MB':>9} {'seconds':>9} {'CPU s':>9} {'memory MB':>9}")
    with tempfile.TemporaryDirectory() as folder:
        empty, plain = Path(folder, "empty.json"), Path(folder, "plain.json")
        write_json(empty, 1_000_000)
        row("empty", "overlap", empty, size=empty.stat().st_size)
        write_json(plain, int(100e6 * scale))
        row("torch.profiler", "overlap", plain, size=plain.stat().st_size)
        zipped = Path(folder, "plain.json.gz")
        with open(plain, "rb") as source, gzip.open(zipped, "wb", compresslevel=5) as target:
            shutil.copyfileobj(source, target)
        row("torch.profiler, gzip", "overlap", zipped, size=zipped.stat().st_size)
        imported = Path(folder, "plain.npz")
        row("torch.profiler, import", "import", plain, "-o", imported, size=plain.stat().st_size)
        row("torch.profiler, imported", "overlap", imported, size=imported.stat().st_size)
        out = Path(folder, "out")
        for kind in ("chrome", "perfetto"):
            row(f"torch.profiler, export {kind}", *export(plain, kind, out), size=plain.stat().st_size)
        row("torch.profiler, diff with itself", "diff", plain, plain, size=2 * plain.stat().st_size)
        nsys = Path(folder, "nsys.sqlite")
        write_nsys(nsys, int(1_000_000 * scale))
        row(f"Nsight Systems, {int(1000 * scale)} thousand kernels", "overlap", nsys, size=nsys.stat().st_size)
        own = Path(folder, "own.jsonl")
        write_own(own, int(1_000_000 * scale))
        count = f"ours, {int(1000 * scale)} thousand slices"
        row(count, "overlap", own, size=own.stat().st_size)
        for kind in ("chrome", "perfetto"):
            row(f"{count}, export {kind}", *export(own, kind, out), size=own.stat().st_size)
        row(f"{count}, diff with itself", "diff", own, own, size=2 * own.stat().st_size)
        if arguments.large:
            for path in (plain, nsys, own, out):
                path.unlink()
            large = Path(folder, "large.json")
            write_json(large, 1_000_000_000)
            row("torch.profiler, 1 GB", "overlap", large, size=large.stat().st_size)
            large.unlink()
            write_own(own, 10_000_000)
            row("ours, 10 million slices", "overlap", own, size=own.stat().st_size)
    here = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "date": time.strftime("%Y-%m-%d"),
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({"machine": here, "rows": rows}, indent=1) + "\n")
    print(f"written to {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
