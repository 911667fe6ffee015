"""What a client of `vllm serve` gets, and when, once a rank of it has been ruined in the middle of decoding."""

from __future__ import annotations

import os
import signal
import threading
import time
import urllib.error
from pathlib import Path
from typing import Any

from gpu_vllm_serve_client import complete
from gpu_vllm_serve_left import STACKS_FILE, look
from gpu_vllm_serve_plugin import FAULT_FILE
from gpu_vllm_serve_process import Server, ServerFailed

KILLED = {"kill": "Worker", "kill-engine": "EngineCore"}
PATIENCE_S = 30  # for everything to end
LEFT_S = 5  # after the server's exit, a process that is still there is looked at
UNENDED_S = 15  # after the fault, where the server itself does not end


def ruin(server: Server, fault: str, model: str) -> dict[str, Any]:
    """Ruin rank 1 while both ranks decode; returns times in seconds since then.

    `client_gets` is None where the client got all its tokens or nothing; `gone_s` has None for a process that was
    still there after `patience_s`; `left` has, by name, what one was doing that was there LEFT_S after the exit.

    Raises:
        ServerFailed: the server had no such process or did not answer before.
    """
    ranks = server.ranks()
    if not ranks:
        raise ServerFailed(f"{server.name}: neither workers nor engine cores among its processes")
    victim = victim_of(fault, ranks)
    body = {
        "model": model,
        "prompt": [[3 + index % 90, 4, 5] for index in range(128)],
        "temperature": 0,
        "ignore_eos": True,
    }
    try:
        complete(server.url, {**body, "max_tokens": 8}, 60)
    except OSError as error:
        raise ServerFailed(f"{server.name}: no answer before the fault: {error}") from error
    stacks = Path(server.variables[STACKS_FILE])
    told: dict[str, Any] = {"client_gets": None, "client_s": None}
    began = [time.monotonic()]

    def ask() -> None:
        try:
            complete(server.url, {**body, "max_tokens": 400}, 3 + PATIENCE_S)
        except urllib.error.HTTPError as error:
            told["client_gets"] = f"HTTP {error.code}: {error.read().decode(errors='replace')[:300]}"
        except Exception as error:  # whatever it is, it is what a client gets
            told["client_gets"] = f"{type(error).__name__}: {error}"
        told["client_s"] = round(time.monotonic() - began[0], 2)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    time.sleep(1.0)
    before = server.counters()
    began[0] = time.monotonic()
    if fault in KILLED:
        os.kill(ranks[victim], signal.SIGKILL)
    else:
        Path(server.variables[FAULT_FILE]).touch()
    gone: dict[str, float | None] = dict.fromkeys(ranks)
    exited = None
    left: dict[str, Any] = {}
    looked = False
    while time.monotonic() - began[0] < PATIENCE_S:
        there, now = server.ranks(), round(time.monotonic() - began[0], 2)
        for name in gone:
            if gone[name] is None and name not in there:
                gone[name] = now
        if exited is None and server.process.poll() is not None:
            exited = now
        if not looked and now > (UNENDED_S if exited is None else exited + LEFT_S):
            looked = True
            left = {name: {"at_s": now} | look(there[name], stacks) for name in gone if name in there}
        if exited is not None and None not in gone.values() and not asking.is_alive():
            break
        time.sleep(0.05)
    return told | {
        "victim": victim,
        "gone_s": gone,
        "patience_s": PATIENCE_S,
        "left": left,
        "server_exit_s": exited,
        "server_exit": server.process.poll(),
        "counters_before": before,
        "said": server.said(),
    }


def victim_of(fault: str, ranks: dict[str, int]) -> str:
    """Whom of the last rank a fault hits: the worker, which has the GPU, unless the fault is the engine core's.

    A rank without a worker does its work in the engine core.
    """
    kind = KILLED.get(fault, "Worker")
    return max([name for name in ranks if name.startswith(kind)] or ranks)
