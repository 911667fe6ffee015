"""The runner between two GPUs at a real layer's size: split and unsplit, and how much communication is hidden.

    python scripts/bench_gpu_two_ranks.py --folder out/two_ranks [--cases ll-64 ...] [--rounds 12] [--layers 8]
    python scripts/bench_gpu_two_ranks.py --folder out/two_ranks --table

A case is a transport (DeepEP low latency, DeepEP high throughput, NCCL) with a number of tokens on each rank: 64 are a
decode step of 64 requests, 4,096 a prefill of eight prompts. The layers have DeepSeek-V2-Lite's shape: 64 experts of
which a token takes 6, two GPUs with 32 each. Each case is run unsplit and split, eager and, where that can be captured,
as a graph, and once carried by threads; the ways take turns, and "done ms" is from the call until both the step and the
GPU are through, the slower rank's median. Beside the ratio of split to unsplit stands what `estimate` makes of the
unsplit step alone.

Then each way runs a few steps under torch.profiler, and the split ones again with this package's recorder and GPU
timeline. `overlap` reads both files of each rank. By kernels, communication is what communication kernels take, and of
DeepEP's low latency thus only the sending and the receiving; in flight it is from the send to the end of the receive.
Our trace knows the GPU's times of whole slices, so it only says how much is hidden at most. All times are of a step. A
profiler slows an eager host down, and a rank's kernels wait for the other's, so these are not those of "done ms".

What comes out: FOLDER/two_ranks.json, the traces of rank 0, and a table. `--cpu` is a dry run: two processes over gloo,
few and small layers, no profile of a GPU. Exit status 1 where a case failed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

WORLD = 2
KEYS = 16  # that a token of a decode step attends to
LIMIT_S = 200  # for the two ranks of a case
CASES = ("ll-64", "ht-64", "ht-4096", "nccl-64", "nccl-4096")
DRY_CASES = ("torch-64", "torch-256")
NAMES = {"ll": "DeepEP LL", "ht": "DeepEP HT", "nccl": "NCCL", "torch": "gloo"}
ALL_TO_ALL = {"ll": "deepep_ll", "ht": "deepep_ht", "nccl": "stream"}  # as `estimate` calls them


def measure(case: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the two ranks of a case; what they found, or why they failed."""
    from dbo_greenlet.ranks import serve_store

    store = serve_store()
    rank_script = str(Path(__file__).with_name("bench_gpu_two_ranks_rank.py"))
    paths = [str(Path(__file__).parents[1]), str(Path(__file__).parent), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    processes = []
    for rank in range(WORLD):
        job = {
            "case": case,
            "rank": rank,
            "world": WORLD,
            "port": store.port,
            "cpu": arguments.cpu,
            "layers": arguments.layers,
            "rounds": arguments.rounds,
            "profiled": arguments.profiled,
            "folder": str(arguments.folder),
        }
        log = (arguments.folder / f"{case}-rank{rank}.log").open("w")
        command = [sys.executable, rank_script, json.dumps(job)]
        processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    try:
        codes = [process.wait(timeout=arguments.limit) for process in processes]
    except subprocess.TimeoutExpired:
        codes = [process.poll() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    ranks = []
    for rank in range(WORLD):
        result = arguments.folder / f"{case}-rank{rank}.json"
        ranks.append(json.loads(result.read_text()) if result.exists() else {"ways": {}})
    if any(codes):
        last = (arguments.folder / f"{case}-rank{next(i for i, code in enumerate(codes) if code)}.log").read_text()
        return {"status": f"exit {codes}", "said": last[-1500:], "ranks": ranks, "overlap": {}}
    return {"status": "done", "ranks": ranks, "overlap": {}}


def analyse(ranks: list[dict[str, Any]]) -> dict[str, list[dict[str, Any] | None]]:
    """`overlap`'s reports by file kind and way, one for each rank; a file that it cannot read gives the reason."""
    from dbo_greenlet.errors import DboError
    from dbo_greenlet.trace.importers import read_profile
    from dbo_greenlet.trace.kernels import KernelTable
    from dbo_greenlet.trace.overlap.profile import profile_overlap
    from dbo_greenlet.trace.overlap.text import overlap_json
    from dbo_greenlet.trace.overlap.trace import trace_overlap
    from dbo_greenlet.trace.step_columns import read_columns

    found: dict[str, list[dict[str, Any] | None]] = {}
    for rank in ranks:
        for way, files in rank["ways"].items():
            for kind in ("profile", "trace"):
                if kind not in files:
                    continue
                try:
                    if kind == "profile":
                        report = profile_overlap(read_profile(files[kind]), KernelTable(None))
                    else:
                        report = trace_overlap(read_columns(files[kind]))
                    summary: dict[str, Any] = overlap_json(report)
                except (DboError, ImportError) as error:
                    summary = {"error": f"{type(error).__name__}: {error}"}
                found.setdefault(f"{kind}, {way}", []).append(summary)
    return found


def pack(ranks: list[dict[str, Any]]) -> None:
    """Keep rank 0's files, packed; the other rank's are as large and show the same."""
    for number, rank in enumerate(ranks):
        for files in rank["ways"].values():
            for kind in ("profile", "trace"):
                path = Path(files[kind]) if kind in files else None
                if path is None or not path.exists():
                    continue
                if number == 0 and path.suffix != ".gz":
                    with path.open("rb") as plain, gzip.open(f"{path}.gz", "wb", 9) as packed:
                        shutil.copyfileobj(plain, packed)
                    path.unlink()
                elif number:
                    path.unlink()


def predict(case: str, found: dict[str, Any], layers: int) -> dict[str, dict[str, Any]]:
    """What `estimate` says of each split way, of which it is told the unsplit step; nothing of a dry run."""
    transport, tokens = case.rsplit("-", 1)
    if transport not in ALL_TO_ALL or found["status"] != "done":
        return {}
    work = (
        ["--decode", "--context", str(KEYS)] if int(tokens) <= 64 else ["--prefill", "--context", str(int(tokens) // 8)]
    )
    common = [sys.executable, "-m", "dbo_greenlet.cli", "estimate", "--json", "--model", "deepseek-v2-lite"]
    common += ["--layers", str(layers), "--ranks", str(WORLD), "--link", "nvlink", "--all2all", ALL_TO_ALL[transport]]
    common += ["--engine", "runner", "--tokens", tokens, *work, "--microbatches", "2", "--policy", "round_robin"]
    paths = [str(Path(__file__).parents[1]), *sys.path]
    predicted = {}
    for way in found["ranks"][0]["ways"]:
        if way.startswith("unsplit"):
            continue
        base, execution = unsplit(way), way.rsplit(", ", 1)[1]
        measured = ["--unsplit", f"{tokens}={slower(found['ranks'], base, 'done_ms')[0]}", "--execution", execution]
        if execution == "eager":
            measured += ["--host-ms", str(slower(found["ranks"], base, "host_ms")[0])]
        measured += ["--carrier", "threads"] if "threads" in way else []
        said = subprocess.run(
            [*common, *measured],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
        )
        try:
            answer = json.loads(said.stdout)["estimates"][0]
        except ValueError:
            predicted[way] = {"error": said.stderr[-300:]}
            continue
        option = answer["options"][0]
        predicted[way] = {
            "ratio": 1 / option["gain"],
            "step_ms": option["step"] / 1e3,
            "verdict": answer["verdict"],
            "reason": answer["reason"],
        }
    return predicted


def unsplit(way: str) -> str:
    """The way that a way's ratio is to."""
    return f"unsplit, {way.rsplit(', ', 1)[1]}"


def table(results: dict[str, Any]) -> list[str]:
    """Markdown: a line for each case and way."""
    lines = [
        "| case | way | done ms (least) | host ms | ratio to unsplit | `estimate` | profile: kernels ms, hidden "
        "| profile: in flight ms, hidden | own trace: in flight ms, hidden at most |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    steps = results.get("profiled", 1)
    for case, found in results["cases"].items():
        transport, tokens = case.rsplit("-", 1)
        name = f"{NAMES[transport]}, {tokens} tokens"
        if found["status"] != "done":
            lines.append(f"| {name} | {found['status']} | | | | | | | |")
            continue
        done = {way: slower(found["ranks"], way, "done_ms") for way in found["ranks"][0]["ways"]}
        for way, (middle, least) in done.items():
            host = slower(found["ranks"], way, "host_ms")[0]
            profile = found["overlap"].get(f"profile, {way}", [])
            own = found["overlap"].get(f"trace, {way}", [])
            ratio = found.get("estimates", {}).get(way, {}).get("ratio")
            cells = [f"{middle:.2f} ({least:.2f})", f"{host:.2f}", f"{middle / done[unsplit(way)][0]:.2f}"]
            cells += ["-" if ratio is None else f"{ratio:.2f}", hidden(profile, "kernels", steps)]
            cells += [hidden(each, "in_flight", steps) for each in (profile, own)]
            lines.append(f"| {name} | {way} | {' | '.join(cells)} |")
    return lines


def slower(ranks: list[dict[str, Any]], way: str, key: str) -> tuple[float, float]:
    """Median and least of the slower rank, by its median."""
    both = [rank["ways"][way][key] for rank in ranks]
    middle, values = max((statistics.median(values), values) for values in both)
    return middle, min(values)


def hidden(reports: list[dict[str, Any] | None], view: str, steps: int) -> str:
    """Milliseconds of communication in a step, the mean of the ranks, and the share that compute hides."""
    views = [report[view] for report in reports if report is not None and report.get(view) is not None]
    communication = sum(each["communication"] for each in views)
    if not communication:
        return "-"
    both = sum(each["both"] for each in views)
    return f"{communication / len(views) / steps / 1000:.2f}, {both / communication:.0%}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("out/two_ranks"))
    parser.add_argument("--cases", nargs="+", choices=(*CASES, *DRY_CASES))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--profiled", type=int, default=2, help="steps under the profiler and in a trace (default 2)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for a case")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--table", action="store_true", help="only print what the folder holds")
    arguments = parser.parse_args()
    arguments.folder = arguments.folder.resolve()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    path = arguments.folder / "two_ranks.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"cases": {}}
    if not arguments.table:
        results |= {name: getattr(arguments, name) for name in ("layers", "rounds", "profiled")}
        # Files are read beside the next cases: a host with GPUs has cores to spare.
        with ProcessPoolExecutor(4, get_context("spawn")) as readers:
            reading = {}
            for case in arguments.cases or (DRY_CASES if arguments.cpu else CASES):
                began = time.monotonic()
                found = measure(case, arguments)
                results["cases"][case] = found
                reading[case] = readers.submit(analyse, found["ranks"])
                path.write_text(json.dumps(results))
                print(f"{case}: {found['status']}, {time.monotonic() - began:.0f} s", flush=True)
                if "said" in found:
                    print(found["said"], flush=True)
            for case, reader in reading.items():
                found = results["cases"][case]
                found["overlap"] = reader.result()
                pack(found["ranks"])
                path.write_text(json.dumps(results))
    lacking = {
        case: found
        for case, found in results["cases"].items()
        # Where the benchmark ran there may have been no command line.
        if any("error" in said for said in found.get("estimates", {"": {"error": ""}}).values())
    }
    if lacking:
        with ThreadPoolExecutor(os.cpu_count()) as each:
            for found, said in zip(
                lacking.values(), each.map(lambda item: predict(*item, results["layers"]), lacking.items()), strict=True
            ):
                found["estimates"] = said
        path.write_text(json.dumps(results))
    print("\n".join(table(results)))
    return 0 if all(found["status"] == "done" for found in results["cases"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
