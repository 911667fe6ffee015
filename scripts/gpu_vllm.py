"""Real vLLM, data and expert parallel, with DeepEP and DBO on one or two GPUs: with and without this package.

    python3 scripts/vllm_bundle.py unpack build/vllm
    python3 scripts/gpu_vllm.py --site build/vllm --json out/gpu_vllm.json ll-eager-8 ll-graph-8
    python scripts/gpu_vllm.py --json out/gpu_vllm.json --merge FROM_ANOTHER_SITTING.json
    python scripts/gpu_vllm.py --json out/gpu_vllm.json --table
    python scripts/gpu_vllm.py --list

Where there are two GPUs, each of the two ranks has its own, unless `--gpus 1` has them share one. A sitting fills the
rows it is given and leaves the others of the file as they are; what was found on one GPU stands beside what was found
on two. A session that fails or outlasts its limit is recorded as that, its processes are ended, and the next one runs.
Needs GPUs with compute capability 9.0 and what scripts/vllm_bundle.py says; nothing of this is imported by the package
or its tests.

Exit status 0 when every session did what its row says, 1 when one did not, 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_vllm_rank
from gpu_vllm_engine import uses_drop_in, write_model
from gpu_vllm_rows import MODES, RANKS, ROWS, Row, Session, model_config, requests_of
from gpu_vllm_table import tables

# Alike in all processes. Read when modules are imported, so set before the parent of the ranks starts.
EVERYWHERE = {
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # Engine core and worker in the process of the rank; vLLM's first runner, which is the one with DBO in 0.26.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    # Kernels that would need a compiler or a download.
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # No multicast over NVLink: no run needs it, and where other programs have a host's GPUs too, it is often off.
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}
GRACE_S = 4  # for the other rank, once one has failed
LEAST_S = 25  # a session that has less than this is not started
LOG_LINES = 25


class Sitting:
    """Runs sessions, one after the other or several at a time, and keeps the merged results on disk."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.deadline = time.monotonic() + arguments.minutes * 60  # the imports are part of it
        self.json = arguments.json
        self.checkpoint = arguments.checkpoint
        self.logs = arguments.logs
        self.scratch = Path()  # of each run
        self.logs.mkdir(parents=True, exist_ok=True)
        self.context, found = _parent_of_ranks(arguments.site)
        self.gpus = gpus_to_use(arguments.gpus, found)
        print(f"{found} GPUs seen, {self.gpus} used", flush=True)
        self.port = 29600
        self.together = arguments.together

    def run(self, rows: list[Row], only: list[str] | None) -> bool:
        """Run the rows' sessions; True if each did what its row says. `only` picks sessions by their first mode.

        In the order of the rows. A timed session runs alone; of others that follow each other, several run side by
        side: most of their time is the start of engines.
        """
        # Models, results and vLLM's caches. A rank that was killed may still be writing there.
        with tempfile.TemporaryDirectory(prefix="gpu_vllm_", ignore_cleanup_errors=True) as scratch:
            self.scratch = Path(scratch)
            return self._run(rows, only)

    def _run(self, rows: list[Row], only: list[str] | None) -> bool:
        results = load(self.json)
        good = True
        for timed, group in itertools.groupby(rows, key=lambda row: row.timed):
            sessions = [(row, session) for row in group for session in row.sessions if not only or session[0] in only]
            for row, outcome in self._outcomes(sessions, 1 if timed else self.together):
                entry = results["rows"].setdefault(row.name, {"sessions": {}})
                entry["row"] = row.describe()
                put(entry["sessions"], outcome)
                good &= outcome["status"] == "done"
                save(self.json, results)
        return good

    def _outcomes(self, sessions: list[tuple[Row, Session]], at_once: int) -> Iterator[tuple[Row, dict[str, Any]]]:
        waiting, running = list(sessions), []
        while waiting or running:
            while waiting and len(running) < at_once:
                row, session = waiting.pop(0)
                if self.deadline - time.monotonic() < LEAST_S:
                    print(f"{row.name} [{', '.join(session)}]: no time left in this sitting", flush=True)
                    continue
                running.append((row, self._start(row, session)))
            time.sleep(0.2)
            for row, pair in list(running):
                pair.look_after()
                if pair.running():
                    continue
                running.remove((row, pair))
                outcome = pair.outcome()
                modes = ", ".join(outcome["modes"])
                print(f"{row.name} [{modes}]: {outcome['status']}, {outcome['wall_s']} s", flush=True)
                if outcome["status"] != "done":
                    print(pair.last_words(), flush=True)
                yield row, outcome

    def _start(self, row: Row, session: Session) -> Pair:
        self.port += 7
        seconds = min(row.seconds, self.deadline - time.monotonic())
        if row.kind == "accuracy":
            model = self.checkpoint
        else:
            folder = self.scratch / f"{row.family}-{row.layers}"
            model = write_model(folder, model_config(row.family, row.layers))
        job = {
            "row": row.name,
            "kind": row.kind,
            "modes": list(session),
            "model": str(model),
            "attention": row.attention,
            "all2all": row.all2all,
            "execution": row.execution,
            "options": dict(row.options),
            "seconds": seconds,
            "port": self.port,
            "gpus": self.gpus,
            "scratch": str(self.scratch),
        }
        stem = f"{row.name}-{session[0]}-{len(session)}".replace(" ", "_").replace(",", "")
        return Pair(self.context, job, self.scratch / stem, self.logs / stem)


class Pair:
    """The two rank processes of one session."""

    def __init__(self, context: Any, job: dict[str, Any], results: Path, logs: Path) -> None:
        self.job = job
        self.results = [results.with_name(f"{results.name}-{rank}.json") for rank in (0, 1)]
        self.logs = [logs.with_name(f"{logs.name}-{rank}.log") for rank in (0, 1)]
        self.begin = time.monotonic()
        self.ended: float | None = None
        self.failed_at: float | None = None
        self.over_limit = False
        self.ranks = []
        for rank in (0, 1):
            arguments = (rank, job, str(self.results[rank]), str(self.logs[rank]))
            process = context.Process(target=gpu_vllm_rank.main, args=arguments)
            process.start()
            self.ranks.append(process)

    def running(self) -> bool:
        return self.ended is None

    def look_after(self) -> None:
        """End what outlasted its limit, or whose other rank has failed."""
        if self.ended is not None:
            return
        codes = [process.exitcode for process in self.ranks]
        now = time.monotonic()
        if None not in codes:
            self.ended = now
            return
        if self.failed_at is None and any(code not in (None, 0) for code in codes):
            self.failed_at = now
        self.over_limit = now - self.begin > self.job["seconds"]
        # In the fault rows each rank has patience of its own with the other one.
        alone = self.failed_at is not None and now - self.failed_at > GRACE_S and self.job["kind"] != "fault"
        if self.over_limit or alone:
            for process in self.ranks:
                if process.exitcode is None:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.kill()
                    process.join()

    def outcome(self) -> dict[str, Any]:
        codes = [process.exitcode for process in self.ranks]
        if self.over_limit:
            status = "ended at its limit"
        elif self.job["kind"] == "fault":
            status = "done" if all(code in (0, 3, -signal.SIGKILL) for code in codes) else "failed"
        else:
            status = "done" if codes == [0, 0] else "failed"
        ranks = [json.loads(path.read_text()) if path.exists() else {} for path in self.results]
        if self.job["kind"] == "fault" and status == "done":
            for number in self.job["options"]["ranks"]:
                if (problem := fault_problem(self.job, ranks[number])) is not None:
                    status = "failed"
                    ranks[number]["error"] = [f"not what the row says: {problem}"]
        return {
            "modes": self.job["modes"],
            "status": status,
            "exit": codes,
            "wall_s": round((self.ended or time.monotonic()) - self.begin, 1),
            "gpus": self.job["gpus"],
            "requests": requests_of(self.job["options"]),
            "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
            "ranks": ranks,
        }

    def last_words(self) -> str:
        text = []
        for rank, path in enumerate(self.logs):
            lines = path.read_text(errors="replace").splitlines() if path.exists() else ["(no log)"]
            text += [f"rank {rank} | {line[:240]}" for line in lines[-LOG_LINES:]]
        return "\n".join(text)


def fault_problem(job: dict[str, Any], rank: dict[str, Any]) -> str | None:
    """How what became of a faulty rank is not what its row says, or None.

    The fault has to show, and with the drop-in the caller of the engine has to read the error that started it.
    """
    outcome = rank.get("outcome", "none")
    if outcome == "none":
        return "the fault did not show"
    if outcome == "killed":
        return None
    if not uses_drop_in(job):
        return None
    if outcome != "error":
        return f"the outcome is {outcome!r} with the drop-in"
    if not any(job["options"]["original"] in text for text in rank["user_reads"]):
        return f"{job['options']['original']!r} is not in what the caller reads: {rank['user_reads'][0]}"
    return None


def gpus_to_use(asked: int | None, found: int) -> int:
    """One of its own for each rank where there are enough; what was asked for otherwise, which has to be there."""
    if (asked or 1) > found:
        raise SystemExit(f"--gpus {asked or 1}, and there are {found}")
    return asked or min(found, RANKS)


def _parent_of_ranks(site: Path) -> tuple[Any, int]:
    """A process that has imported vLLM once and from which every rank is forked: half a minute saved for each pair.

    It has not touched CUDA, and no plug-in has been loaded in it. Also returned is how many GPUs there are.
    """
    torch = importlib.util.find_spec("torch")
    if torch is None or not (site / "site" / "vllm").is_dir():
        raise SystemExit(f"needs torch in this Python and an unpacked bundle in {site} (scripts/vllm_bundle.py unpack)")
    scripts = Path(__file__).resolve().parent
    path = [str(scripts), str(site / "site"), str(site / "plugin")]
    sys.path[:0] = path
    # DeepEP's low-latency kernels need NVSHMEM's library, which a wheel beside torch brings.
    libraries = Path(torch.origin).parent.parent / "nvidia" / "nvshmem" / "lib"
    os.environ.update(EVERYWHERE)
    os.environ.update(
        PYTHONPATH=os.pathsep.join(path),
        LD_LIBRARY_PATH=f"{libraries}{os.pathsep}{os.environ.get('LD_LIBRARY_PATH', '')}",
        GPU_VLLM_PRELOAD="1",
    )
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gpu_vllm_rank"])
    begin = time.monotonic()
    # The first process waits for the imports, which are no part of a session's time.
    answer = context.SimpleQueue()
    first = context.Process(target=gpu_vllm_rank.count_gpus, args=(answer,))
    first.start()
    first.join()
    if first.exitcode != 0:
        raise SystemExit(f"the parent of the ranks could not be started (exit status {first.exitcode})")
    print(f"vLLM imported in {time.monotonic() - begin:.0f} s", flush=True)
    return context, answer.get()


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {"rows": {}}


def save(path: Path, results: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(results))
    partial.replace(path)


def merge(into: dict[str, Any], other: dict[str, Any]) -> None:
    """Take over the other's sessions."""
    for name, entry in other["rows"].items():
        mine = into["rows"].setdefault(name, {"sessions": {}})
        mine["row"] = entry["row"]
        for session in entry["sessions"].values():
            put(mine["sessions"], session)


def put(sessions: dict[str, Any], new: dict[str, Any]) -> None:
    """Take a session in, in the place of older ones of the same modes; one that was done gives way only to another.

    A session on another number of GPUs, or with requests that the new one has not, stays beside it.
    """
    rivals = [
        key
        for key, session in sessions.items()
        if set(session["modes"]) & set(new["modes"])
        and session["gpus"] == new["gpus"]
        and set(requests_of(session)) <= set(requests_of(new))
    ]
    if new["status"] != "done" and any(sessions[key]["status"] == "done" for key in rivals):
        return
    for key in rivals:
        del sessions[key]
    sessions[key_of(new)] = new


def key_of(session: dict[str, Any]) -> str:
    """What a session is filed under: the modes alone where both ranks had one GPU and 64 requests each."""
    key = " + ".join(session["modes"])
    requests = requests_of(session)
    if session["gpus"] != 1:
        key += f" on {session['gpus']} GPUs"
    return key if requests == requests_of({}) else f"{key}, {' '.join(map(str, requests))} requests"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help="rows to run (see --list)")
    parser.add_argument("--json", type=Path, default=Path("out/gpu_vllm.json"), help="the merged results")
    parser.add_argument("--site", type=Path, default=Path("build/vllm"), help="what vllm_bundle.py unpacked")
    parser.add_argument("--checkpoint", type=Path, help="folder of a trained checkpoint, for the accuracy rows")
    parser.add_argument("--logs", type=Path, default=Path("out/gpu_vllm_logs"))
    parser.add_argument("--gpus", type=int, choices=(1, RANKS), help="default: one for each rank if there are")
    parser.add_argument("--requests", type=int, nargs="+", metavar="N", help="in flight on a rank, not the row's own")
    parser.add_argument("--rounds", type=int, metavar="N", help="turns of each mode, not the row's own")
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, metavar="MODE", help="one session of these, not the row's own"
    )
    parser.add_argument("--only", nargs="*", metavar="MODE", help="sessions whose first mode is one of these")
    parser.add_argument("--together", type=int, default=3, help="sessions side by side where time does not matter")
    parser.add_argument("--minutes", type=float, default=60, help="limit for the whole sitting (default 60)")
    parser.add_argument("--merge", type=Path, nargs="*", default=[], metavar="FILE", help="take over results")
    parser.add_argument("--table", action="store_true", help="print the tables of what has been run")
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    arguments = parser.parse_args()
    if arguments.list:
        for row in ROWS.values():
            sessions = "; ".join(" + ".join(session) for session in row.sessions)
            print(f"{row.name:20} {row.kind:9} {row.execution:8} {sessions}")
    if unknown := [name for name in arguments.rows if name not in ROWS]:
        parser.error(f"no such row: {', '.join(unknown)} (--list prints them)")
    rows = [ROWS[name] for name in arguments.rows]
    own = {name: value for name in ("requests", "rounds") if (value := getattr(arguments, name))}
    rows = [replace(row, options=row.options | own) for row in rows]
    if arguments.modes:
        rows = [replace(row, sessions=(tuple(arguments.modes),)) for row in rows]
    if any(row.kind == "accuracy" for row in rows) and not arguments.checkpoint:
        parser.error("the accuracy rows need --checkpoint (scripts/train_checkpoint.py --preset vllm makes one)")
    if arguments.merge:
        results = load(arguments.json)
        for path in arguments.merge:
            merge(results, json.loads(path.read_text()))
        save(arguments.json, results)
    good = Sitting(arguments).run(rows, arguments.only) if rows else True
    if arguments.table:
        print("\n\n".join(tables(load(arguments.json))))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
