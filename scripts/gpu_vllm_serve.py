"""Real servers: `vllm serve` with data and expert parallelism, DeepEP and DBO on two GPUs, and `vllm bench serve`.

    python3 scripts/vllm_bundle.py unpack build/vllm
    python3 scripts/gpu_vllm_serve.py --site build/vllm --json out/gpu_vllm_serve.json ll-eager ll-graph raise
    python scripts/gpu_vllm_serve.py --json out/gpu_vllm_serve.json --merge FROM_ANOTHER_SITTING.json --table
    python scripts/gpu_vllm_serve.py --cpu --json out/dry.json dry    # vLLM for the CPU, one rank, nothing is split

The servers of a row (without DBO; with vLLM's threads, which is DBO_GREENLET=0; with this package and no variable set)
are started as a user starts them, side by side on the same GPUs, and stay up: an idle one waits and takes nothing from
the one that is measured. The same load goes to each in turn, the order reversed every other round; the first round
compiles kernels and is thrown away. Kept are what `vllm bench serve` reports, greedy answers to the same prompts, the
package's counters on /metrics before and after, and the line in the log that says whether it engaged.

Servers are ruined in the middle of decoding, in rows of faults or, where a row of loads says so, once it is through:
rank 1 is killed, or a layer raises on it in its second microbatch. Kept are what the client gets and after how many
seconds, when each process is gone, the server's exit status and the lines of its log that say why.

A server's processes are forked (VLLM_WORKER_MULTIPROC_METHOD), because a start spends most of its time on the imports
of one process after the other; where that fails, or with `--spawn`, they are spawned as by default.

Where there is one GPU, or with `--gpus 1`, both ranks of each server share it and the row is filed as "... on one GPU":
what ends, and how, can be read there, and times cannot, because the ranks take turns.

Weights are drawn, so tokens mean nothing and times do. Exit status 0 when every server did what its row says, else 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gpu_vllm_serve_faults as faults
from gpu_vllm import EVERYWHERE, gpus_to_use, load, save
from gpu_vllm_engine import write_model
from gpu_vllm_rows import RANKS, model_config
from gpu_vllm_serve_plugin import ONE_GPU, announce
from gpu_vllm_serve_process import Client, Server, ServerFailed, wait_until_up
from gpu_vllm_serve_rows import ROWS, ServeRow
from gpu_vllm_serve_table import tables

START_S = {"fork": 90, "spawn": 200}  # for a server to answer, at most
BENCH_S = 90  # for one run of the client
FAULTS_S = 45  # for what is ruined in the end
METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


class Sitting:
    """Runs rows one after the other and keeps the merged results on disk."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.deadline = time.monotonic() + arguments.minutes * 60
        self.json = arguments.json
        self.logs = arguments.logs
        self.logs.mkdir(parents=True, exist_ok=True)
        self.rounds = arguments.rounds
        self.cpu = arguments.cpu
        self.environment = environment(arguments.site, arguments.cpu)
        self.gpus = 0 if arguments.cpu else gpus_to_use(arguments.gpus, count_gpus())
        if self.gpus == 1:
            self.environment |= {ONE_GPU: "1", "NCCL_IB_DISABLE": "1"}
        # vLLM for the CPU only spawns.
        self.methods = ["spawn"] if arguments.spawn or arguments.cpu else ["fork", "spawn"]
        self.port = 8200
        self.scratch = Path()

    def run(self, rows: list[ServeRow]) -> bool:
        good = True
        # Models and vLLM's caches. A process that was killed may still be writing there.
        with tempfile.TemporaryDirectory(prefix="gpu_vllm_serve_", ignore_cleanup_errors=True) as scratch:
            self.scratch = Path(scratch)
            announce(self.scratch)
            self.environment["PYTHONPATH"] += os.pathsep + scratch
            self.environment.setdefault("VLLM_CACHE_ROOT", str(self.scratch / "cache"))
            for row in rows:
                if self.left() < 60:
                    print(f"{row.name}: no time left in this sitting", flush=True)
                    good = False
                    continue
                begin = time.monotonic()
                entry = self._run(row)
                self._keep(row, entry)
                good &= entry["status"] == "done"
                print(f"{row.name}: {entry['status']}, {time.monotonic() - begin:.0f} s", flush=True)
        return good

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def _keep(self, row: ServeRow, entry: dict[str, Any]) -> None:
        entry |= {
            "row": row.describe(),
            "gpus": self.gpus,
            "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
            "commit": os.environ.get("DBO_GREENLET_COMMIT", ""),
        }
        results = load(self.json)
        results["rows"][filed_under(row, self.gpus)] = entry
        save(self.json, results)

    def _run(self, row: ServeRow) -> dict[str, Any]:
        model = write_tokenized(self.scratch / row.name, row)
        entry: dict[str, Any] = {"status": "failed", "modes": {}, "faults": {}}
        servers: dict[str, Server] = {}
        client = Client(self.environment, self.logs / f"{row.name}-client.log") if row.loads else None
        try:
            entry["started"] = self._start(row, model, servers)
            entry["started_s"] = {name: round(server.started_s, 1) for name, server in servers.items()}
            print(f"{row.name}: up {entry['started_s']}; {self.left():.0f} s left", flush=True)
            if client is not None:
                self._take_turns(row, str(model), servers, client, entry)
                client.end()
            self._ruin(row, str(model), servers, entry)
            entry["status"] = "done" if not (problem := row.problem(entry, self.cpu)) else problem
        except ServerFailed as failure:
            entry["status"] = f"failed: {failure}"
            for server in servers.values():
                print(server.last_words(), flush=True)
        finally:
            entry["said"] = {name: server.said() for name, server in servers.items()}
            for server in servers.values():
                server.end(politely=self.left() > 10 and not entry["faults"])
            if client is not None:
                client.end()
        return entry

    def _start(self, row: ServeRow, model: Path, servers: dict[str, Server]) -> str:
        """Start all servers of the row, and wait for them; returns how their processes were started."""
        while True:
            method = self.methods[0]
            for name, mode, fault in row.servers():
                self.port += 1
                variables = row.variables(mode, fault, self.scratch / f"fault-{self.port}")
                servers[name] = Server(
                    name,
                    row.command(model, mode, self.port),
                    self.environment | {METHOD: method} | variables,
                    self.port,
                    self.logs / f"{row.name}-{name}-{method}.log".replace(" ", "_").replace(",", ""),
                )
                time.sleep(1.0)  # apart: each looks for free ports
            try:
                wait_until_up(servers.values(), min(START_S[method], self.left() - 5))
            except ServerFailed as failure:
                if len(self.methods) == 1:
                    raise
                self.methods.pop(0)
                print(f"{row.name}: {failure}; once more, by {self.methods[0]}", flush=True)
                for server in servers.values():
                    print(server.last_words(), flush=True)
                    server.end(politely=False)
            else:
                return method

    def _ruin(self, row: ServeRow, model: str, servers: dict[str, Server], entry: dict[str, Any]) -> None:
        """Ruin what the row says, all of it at once: none knows of another."""
        with ThreadPoolExecutor(8) as threads:
            under_way = [
                (mode, fault, threads.submit(faults.ruin, servers[name], fault, model))
                for name, mode, fault in row.ruins()
            ]
        for mode, fault, found in under_way:
            if found.exception() is None:
                entry["faults"][f"{fault}, {mode}"] = {"mode": mode, "fault": fault} | found.result()
        for _, _, found in under_way:
            found.result()

    def _take_turns(
        self, row: ServeRow, model: str, servers: dict[str, Server], client: Client, entry: dict[str, Any]
    ) -> None:
        modes = entry["modes"]
        for mode in servers:
            modes[mode] = {"bench": {}, "answers": [], "counters_after": {}}
        for number in range(3):  # the first time compiles kernels
            for mode, server in servers.items():
                question = {"url": server.url, "model": model, "timeout": BENCH_S, **row.greedy()}
                given = client.ask({"greedy": question}, BENCH_S)
                if "error" in given:
                    raise ServerFailed(f"{mode}: {given['error']}")
                if number:
                    modes[mode]["answers"].append(given["answers"])
        for mode, server in servers.items():
            modes[mode]["counters_before"] = server.counters()
        for load_name, arguments in row.loads.items():
            longest = 0.0
            for number in range(self.rounds + 1):
                # What is left has to hold one more round of all modes, and what comes after it.
                after = FAULTS_S * bool(row.faults) + longest * (load_name != list(row.loads)[-1])
                if number > 1 and self.left() < 10 + longest + after:
                    print(f"{row.name}, {load_name}: {number - 1} rounds, no time for more", flush=True)
                    break
                begin = time.monotonic()
                for mode in list(servers)[:: 1 if number % 2 else -1]:
                    found = client.ask({"bench": row.bench(servers[mode].url, model, arguments, number)}, BENCH_S)
                    if number and "error" not in found:
                        modes[mode]["bench"].setdefault(load_name, []).append(row.kept(found))
                    elif "error" in found:
                        raise ServerFailed(f"{mode}, {load_name}: {found['error']}")
                longest = max(longest, time.monotonic() - begin)
            for mode, server in servers.items():
                modes[mode]["counters_after"][load_name] = server.counters()
            self._keep(row, entry)


def filed_under(row: ServeRow, gpus: int) -> str:
    """The name of a row's results: those of ranks that shared a GPU do not replace those of ranks with one each."""
    return f"{row.name} on one GPU" if gpus == 1 else row.name


def count_gpus() -> int:
    """How many GPUs the driver lists."""
    return subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout.count("GPU ")


def environment(site: Path, cpu: bool) -> dict[str, str]:
    """What all servers and the client share."""
    scripts = str(Path(__file__).resolve().parent)
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    shared = {name: value for name, value in EVERYWHERE.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    if cpu:
        return (
            os.environ
            | shared
            | {
                "PYTHONPATH": os.pathsep.join([scripts, *inherited]),
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "OMP_NUM_THREADS": "1",
            }
        )
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None or not (site / "site" / "vllm").is_dir():
        raise SystemExit(f"needs torch in this Python and an unpacked bundle in {site} (scripts/vllm_bundle.py unpack)")
    # DeepEP's low-latency kernels need NVSHMEM's library, which a wheel beside torch brings.
    libraries = Path(torch.origin).parent.parent / "nvidia" / "nvshmem" / "lib"
    return (
        os.environ
        | shared
        | {
            "PYTHONPATH": os.pathsep.join([scripts, str(site / "site"), str(site / "plugin")]),
            "LD_LIBRARY_PATH": f"{libraries}{os.pathsep}{os.environ.get('LD_LIBRARY_PATH', '')}",
        }
    )


def write_tokenized(folder: Path, row: ServeRow) -> Path:
    """The row's configuration, and a tokenizer of as many words as it has tokens: "w7" is 7, and back."""
    config = row.config or model_config(row.family, row.layers)
    write_model(folder, config)
    # A special token is found inside words too, so its name is no beginning of one.
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    special = list(names.values())
    words = {word: number for number, word in enumerate(special)}
    words |= {f"w{number}": number for number in range(len(special), config["vocab_size"])}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}))
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", nargs="*", choices=[[], *ROWS], metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--json", type=Path, default=Path("out/gpu_vllm_serve.json"), help="the merged results")
    parser.add_argument("--site", type=Path, default=Path("build/vllm"), help="what vllm_bundle.py unpacked")
    parser.add_argument("--logs", type=Path, default=Path("out/gpu_vllm_serve_logs"))
    parser.add_argument("--minutes", type=float, default=30, help="limit for the whole sitting (default 30)")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds of each load (default 3)")
    parser.add_argument("--gpus", type=int, choices=(1, RANKS), help="default: one for each rank if there are")
    parser.add_argument("--spawn", action="store_true", help="start a server's processes as vLLM does by itself")
    parser.add_argument("--merge", type=Path, nargs="*", default=[], metavar="FILE", help="take over results")
    parser.add_argument("--table", action="store_true", help="print the tables of what has been run")
    parser.add_argument("--cpu", action="store_true", help="no GPU: vLLM for the CPU as it is installed here")
    arguments = parser.parse_args()
    # Whoever ends this script ends its servers, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if arguments.merge:
        results = load(arguments.json)
        for path in arguments.merge:
            results["rows"] |= json.loads(path.read_text())["rows"]
        save(arguments.json, results)
    good = Sitting(arguments).run([ROWS[name] for name in arguments.rows]) if arguments.rows else True
    if arguments.table:
        print("\n\n".join(tables(load(arguments.json))))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
