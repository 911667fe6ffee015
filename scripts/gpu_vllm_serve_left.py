"""What a process is doing that should have ended: its Python stacks, what the kernel says of it, how busy GPUs are."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

STACKS_FILE = "GPU_VLLM_STACKS_FILE"
ASKED = signal.SIGUSR2  # neither vLLM nor torch uses it
TOLD = ("State", "PPid", "Threads", "SigPnd", "ShdPnd", "SigBlk", "SigCgt")
GPU = ["nvidia-smi", "--query-gpu=index,utilization.gpu", "--format=csv,noheader"]


def tell_when_asked() -> None:
    """Have this process, and those it forks, append the stacks of all threads to `STACKS_FILE` on `ASKED`.

    The handler is C and needs neither the interpreter lock nor the main thread, which may be in a call that waits.
    """
    file = os.environ.get(STACKS_FILE)
    if file:
        # Stays open for as long as the process lives, as faulthandler asks.
        faulthandler.register(ASKED, Path(file).open("a"), all_threads=True)  # noqa: SIM115


def look(process: int, stacks: Path) -> dict[str, Any]:
    """What can be seen of a process of this user; parts that it does not let be seen are left out.

    Returns:
        `status` (lines of /proc/PID/status), `wchan`, `main` (the main thread: name, state, where it sleeps),
        `threads` (how many of each of these), `stacks` (Python, all threads) and `gpus` (how busy).
    """
    folder = Path("/proc") / str(process)
    seen: dict[str, Any] = {}
    with contextlib.suppress(OSError):
        lines = [line.split(":", 1) for line in (folder / "status").read_text().splitlines()]
        seen["status"] = {name: value.strip() for name, value in lines if name in TOLD}
        seen["wchan"] = (folder / "wchan").read_text()
        seen["main"] = _thread(folder / "task" / str(process))
        seen["threads"] = dict(Counter(map(_thread, (folder / "task").iterdir())).most_common())
    # A process that does not catch the signal would end by it.
    if int(seen.get("status", {}).get("SigCgt", "0"), 16) >> (ASKED - 1) & 1:
        before = stacks.stat().st_size if stacks.exists() else 0
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, ASKED)
            time.sleep(1.0)
        if stacks.exists():
            seen["stacks"] = stacks.read_text(errors="replace")[before:].splitlines()
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        told = subprocess.run(GPU, capture_output=True, text=True, timeout=5, check=True)
        seen["gpus"] = told.stdout.splitlines()
    return seen


def _thread(folder: Path) -> str:
    """Name, state and where it sleeps ("0" where it does not) of one thread, as /proc has them."""
    with contextlib.suppress(OSError):
        name = (folder / "comm").read_text().strip()
        state = (folder / "stat").read_text().rpartition(") ")[2][:1]
        return f"{name} {state} {(folder / 'wchan').read_text()}"
    return "gone"
