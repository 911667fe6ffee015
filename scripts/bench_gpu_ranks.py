"""The runner over real all-to-alls between two processes: is it right, and what does a step cost the host?

    python scripts/bench_gpu_ranks.py [--rows ll nccl ...] [--json FILE] [--merge FILE] [--layers 8] [--tokens 64]

Where there are two GPUs, each process has its own, unless `--gpus 1` has them share one; the rows of two GPUs say so.
Rows are transport x way of running: DeepEP low latency (ll), DeepEP high throughput (ht), NCCL with a fixed capacity
(nccl); unsplit, the microbatches one after the other ("in turn"), split and carried by greenlets or by threads, and,
where the transport can be captured, the split step as a replayed graph. `--merge` takes the rows that were not measured
now from an earlier `--json` file. The exit status is 1 where a number is above its bound (`BOUNDS`) or none at all.

**No claim about overlap follows from rows of one GPU.** Two processes on one get it in turn, for milliseconds each, so
a kernel that waits for the other process waits for a time slice, and an all-to-all takes some 3 ms whatever it carries.

"host ms" is how long `Runner.step` takes, the vote of the ranks included (one gather, timed by itself and printed below
the table); "done ms" is until the GPU has done it. All ways take turns within each round, on both ranks alike, and
before each step both ranks wait for the GPU; medians over the rounds, least and most are in the JSON. Host time is only
the host's where it is well below the time until done. With ht it never is: the host waits for counts in every dispatch,
so, on one GPU, for time slices. Elsewhere on one GPU a launch may wait for a queue that is full because the other
process has the GPU; the graph rows have few launches and show what is left.

"layer error" is the relative error (Frobenius norm) of one MoE layer, run in each way by itself, against a float64
computation with all experts on one rank. "model error" is the median over the tokens of the relative error of the whole
model against a float32 one on one rank. The row "one rank" is the same model in bfloat16 without any transport: most of
the error is the dtype's, and a few tokens whose experts flip have far larger ones. ht rounds one sum more to bfloat16
in each layer than the others. "differs" is the largest difference from the in-turn output, over all rounds.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dbo_greenlet.ranks import RankGroup

TRANSPORTS = ("ll", "ht", "nccl")
WAYS = {"unsplit": "never", "in turn": "sequential", "greenlets": "auto", "threads": "auto", "graph": "auto"}
"""How a step is run, and the runner's mode for it."""

BOUNDS = {"layer_error": 1e-2, "model_error": 0.1, "differs": 0.0}
"""What a number may be at most: bfloat16 rounds to 4e-3, and a split step has the bits of its slices in turn."""

WORLD = 2
TIME_LIMIT = 240  # seconds for the two ranks of a transport


# -- in a rank -------------------------------------------------------------------------------------------------------


def make_all_to_all(kind: str, group: RankGroup, tokens: int) -> Any:
    from bench_gpu_ranks_model import EXPERTS, HIDDEN

    if kind == "ll":
        from dbo_greenlet.all2all.deepep_ll import DeepEPLowLatency

        return DeepEPLowLatency(group, EXPERTS, HIDDEN, tokens)
    if kind == "ht":
        from dbo_greenlet.all2all.deepep_ht import DeepEPHighThroughput

        return DeepEPHighThroughput(group, EXPERTS, HIDDEN)
    from dbo_greenlet.all2all.torch_distributed import TorchDistributed

    return TorchDistributed(group, EXPERTS, tokens)


def run_rank(arguments: argparse.Namespace) -> None:
    rank, kind, tokens = arguments.rank, arguments.transport, arguments.tokens
    # Before torch is imported.
    os.environ.update(nccl_environment(rank, arguments.gpus))
    import torch
    from bench_gpu_ranks_model import (
        EXPERTS,
        decode_step,
        largest,
        layer_errors,
        make_config,
        make_model,
        median_error,
    )

    from dbo_greenlet.all2all.loopback import Loopback
    from dbo_greenlet.batching import VoteSettings
    from dbo_greenlet.devices.cuda import CudaDevice
    from dbo_greenlet.moe import KVCache
    from dbo_greenlet.ranks import RankGroup
    from dbo_greenlet.runner import Runner

    device, row_length = torch.device("cuda", rank % arguments.gpus), 32
    torch.cuda.set_device(device)
    with RankGroup.connect(rank, WORLD, arguments.port, device=device) as group, torch.inference_mode():
        all_to_all = make_all_to_all(kind, group, tokens)
        config = make_config(arguments.layers)
        model = make_model(config, all_to_all, device)
        step = decode_step(rank, tokens, row_length, device)

        ways = [way for way in WAYS if way != "graph" or all_to_all.not_capturable is None]

        def runner(which: Any, way: str, transport: Any = None) -> Runner:
            made = Runner(
                which,
                kv_cache=KVCache(config, tokens, row_length, which.dtype, device, static_shapes=True),
                settings=VoteSettings(2, 2, 2),
                group=None if transport is None else group,
                device=CudaDevice(device.index),
                carrier="thread" if way == "threads" else "greenlet",
                graph_sizes=[tokens] if way == "graph" else (),
                all2all=transport,
            )
            if way == "graph":
                made.capture_graphs()
            return made

        alone = {}
        for dtype in ("float32", "bfloat16"):
            whole = make_model(config, Loopback(EXPERTS), device, dtype)
            alone[dtype] = runner(whole, "unsplit").step(step, mode="never").output
        expected = alone["float32"]
        runners = {way: runner(model, way, all_to_all) for way in ways}
        all_to_all.expect_tokens(None)
        layer = layer_errors(model, ways, tokens, rank, device)
        host: dict[str, list[float]] = {way: [] for way in ways}
        done: dict[str, list[float]] = {way: [] for way in ways}
        differs: dict[str, list[float]] = {way: [] for way in ways}
        errors: dict[str, list[float]] = {way: [] for way in ways}
        votes: list[float] = []
        in_turn = None
        for round_number in range(arguments.warm_up + arguments.rounds):
            begin = time.perf_counter()
            group.exchange([0] * 8)
            votes.append(time.perf_counter() - begin)
            for way in ways:
                group.wait_for_device()
                group.exchange([0])
                begin = time.perf_counter()
                out = runners[way].step(step, mode=WAYS[way])
                enqueued = time.perf_counter() - begin
                group.wait_for_device()
                if round_number >= arguments.warm_up:
                    host[way].append(enqueued)
                    done[way].append(time.perf_counter() - begin)
                if out.decision.split is (way == "unsplit") or (out.execution == "replayed") is not (way == "graph"):
                    raise SystemExit(f"{way} was not run that way: {out.decision}, {out.execution}")
                if way == "in turn" and in_turn is None:
                    in_turn = out.output.clone()
                if way != "unsplit" and in_turn is not None:
                    differs[way].append(largest(out.output, in_turn))
                errors[way].append(median_error(out.output, expected))
        rows: dict[str, dict[str, Any]] = {
            "one rank": {"model_error": median_error(alone["bfloat16"], expected)},
            f"{kind}, a vote": {"host_ms": in_ms(votes[arguments.warm_up :])},
        }
        for way in ways:
            rows[f"{kind}, {way}"] = {
                "host_ms": in_ms(host[way]),
                "done_ms": in_ms(done[way]),
                "layer_error": layer.get(way),
                "model_error": worst(errors[way]),
                "differs": worst(differs[way]),
            }
        # Its graphs first: NCCL waits with the end of a communicator until those that captured it are gone.
        runners.clear()
        gc.collect()
        all_to_all.close()
    print("ROWS", json.dumps(rows), flush=True)


def nccl_environment(rank: int, gpus: int) -> dict[str, str]:
    """What NCCL has to be told: two ranks on one GPU must pass for two hosts, which then talk over sockets."""
    if gpus >= WORLD:
        return {}
    return {"NCCL_HOSTID": f"host{rank}", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}


def in_ms(seconds: list[float]) -> dict[str, float]:
    return {"median": statistics.median(seconds) * 1e3, "min": min(seconds) * 1e3, "max": max(seconds) * 1e3}


# -- in the parent ---------------------------------------------------------------------------------------------------


def measure(kind: str, arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The rows of one transport: of each number the larger one of the two ranks."""
    from dbo_greenlet.ranks import serve_store

    store = serve_store()
    shared = [f"--{name}={getattr(arguments, name)}" for name in ("layers", "tokens", "rounds", "gpus")]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--transport", kind, "--rank", str(rank), "--port", str(store.port), *shared],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(WORLD)
    ]
    told = []
    try:
        for process in processes:
            output, _ = process.communicate(timeout=TIME_LIMIT)
            lines = [line[5:] for line in output.splitlines() if line.startswith("ROWS ")]
            if process.returncode or not lines:
                raise SystemExit(f"a rank of {kind} failed with {process.returncode}:\n{output[-4000:]}")
            told.append(json.loads(lines[0]))
    finally:
        for process in processes:
            process.kill()
    return {
        named(name, arguments.gpus): {key: of_both([rank[name][key] for rank in told]) for key in row}
        for name, row in told[0].items()
    }


def named(row: str, gpus: int) -> str:
    """A row's name, which tells the rows of one GPU from those of more in a file that holds both."""
    return row if gpus == 1 else f"{row}, {gpus} GPUs"


def of_both(values: list[Any]) -> Any:
    """The larger of two ranks' numbers; of times, the slower rank's."""
    if isinstance(values[0], dict):
        return max(values, key=lambda times: times["median"])
    return worst([value for value in values if value is not None])


def worst(values: list[float]) -> float | None:
    """The largest, NaN if one is: `max` would depend on the order."""
    return next((value for value in values if math.isnan(value)), max(values)) if values else None


def wrong(rows: dict[str, dict[str, Any]]) -> list[str]:
    """The numbers above their bound, in words."""
    return [
        f"WRONG: {name}: {key} is {row[key]:.2g}, at most {most:g} is right"
        for name, row in rows.items()
        for key, most in BOUNDS.items()
        if row.get(key) is not None and not row[key] <= most
    ]


def cell(value: float | dict[str, float] | None, form: str) -> str:
    if value is None:
        return "-"
    return format(value["median"] if isinstance(value, dict) else value, form)


def as_report(rows: dict[str, dict[str, Any]], arguments: argparse.Namespace) -> dict[str, Any]:
    from bench_gpu_common import Bench, Report, Table, machine, open_device

    about = f"{arguments.layers} layers, {arguments.tokens} tokens a rank, {arguments.rounds} rounds"
    shown = {
        "host_ms": ("host ms", ".2f"),
        "done_ms": ("done ms", ".1f"),
        "layer_error": ("layer error", ".1e"),
        "model_error": ("model error", ".1e"),
        "differs": ("differs", ".2g"),
    }
    table = Table(
        f"The runner between two processes, on one GPU where no other number is named: {about}",
        ["transport, way", *(title for title, _ in shown.values())],
        [[name, *(cell(row.get(key), form) for key, (_, form) in shown.items())] for name, row in rows.items()],
    )
    said = [
        "two processes take turns on one GPU: no claim about overlap from its rows, and the host of ht waits for turns",
        *wrong(rows),
    ]
    numbers = {"rows": rows} | {name: getattr(arguments, name) for name in ("layers", "tokens", "rounds", "gpus")}
    report = asdict(Report([table], said, numbers))
    return {**report, "machine": machine(Bench(open_device(False), False))}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--merge", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="of each rank")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--gpus", type=int, choices=(1, WORLD), help="default: one for each rank if there are")
    for hidden in ("--rank", "--port"):
        parser.add_argument(hidden, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--transport", choices=TRANSPORTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        run_rank(arguments)
        return
    import torch
    from bench_gpu_common import print_report

    if (there := torch.cuda.device_count()) < (arguments.gpus or 1):
        raise SystemExit(f"needs {arguments.gpus or 1} CUDA devices, and there are {there}")
    arguments.gpus = arguments.gpus or min(there, WORLD)
    rows: dict[str, dict[str, Any]] = {}
    if arguments.merge is not None and arguments.merge.exists():
        rows = json.loads(arguments.merge.read_text())["numbers"]["rows"]
    for kind in arguments.rows:
        rows |= measure(kind, arguments)
        report = as_report(rows, arguments)
        if arguments.json is not None:
            # As they come: a transport that fails does not take the others' rows with it.
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")
        print(f"{kind} measured", file=sys.stderr, flush=True)
    print_report(report)
    if wrong(rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
