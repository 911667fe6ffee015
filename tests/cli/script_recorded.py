"""A program with schedulers, of no torch but where it says so: what it does is its first argument."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

from dbo_greenlet import dbo_yield
from dbo_greenlet.scheduler import Scheduler


def model() -> int:
    for layer in range(2):
        dbo_yield(f"layer{layer}.dispatch")
        dbo_yield(f"layer{layer}.combine")
    return 1


def failing() -> None:
    dbo_yield("layer0.dispatch")
    raise ValueError("the model broke")


def steps(scheduler: Scheduler, count: int) -> None:
    for _ in range(count):
        scheduler.run([model, model])


def count_signals(number: int) -> None:
    """Say when it is ready, and at the end how often the signal came."""
    came = []
    signal.signal(number, lambda number, frame: came.append(number))
    print("ready", flush=True)
    deadline = time.monotonic() + 60
    while not came and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)  # for a second one
    print(f"came {len(came)}", flush=True)
    sys.exit(5)


what, arguments = sys.argv[1], sys.argv[2:]
if what == "none":
    sys.exit(int(arguments[0]))
if what == "children":
    # As torchrun starts ranks.
    ranks = [{**os.environ, "RANK": rank, "WORLD_SIZE": "2"} for rank in arguments]
    running = [subprocess.Popen([sys.executable, __file__, "steps", "3", "0"], env=env) for env in ranks]
    sys.exit(max(each.wait() for each in running))
if what == "server":
    # As vLLM loads the drop-in in each of its processes.
    from dbo_greenlet.vllm.plugin import register

    sys.exit(register())
scheduler = Scheduler()
if what == "steps":
    print("from the program")
    steps(scheduler, int(arguments[0]))
    sys.exit(int(arguments[1]))
elif what == "die":
    steps(scheduler, 3)
    os.kill(os.getpid(), signal.SIGKILL)
elif what == "fail":
    steps(scheduler, 1)
    scheduler.run([model, failing])
elif what == "interrupt":
    steps(scheduler, 1)
    print("ready", flush=True)
    time.sleep(60)
elif what == "count":
    steps(scheduler, 1)
    count_signals(getattr(signal, arguments[0]))
elif what == "nested":

    def outer() -> None:
        dbo_yield("layer0.dispatch")
        steps(scheduler, 1)

    scheduler.run([outer, outer])
    steps(scheduler, 1)
elif what == "threads":
    threads = [threading.Thread(target=steps, args=(scheduler, 20)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
elif what == "fork":
    steps(scheduler, 1)
    if os.fork() == 0:
        steps(scheduler, 2)
        sys.exit(0)
    os.wait()
elif what == "torch":
    import torch

    given = torch.ones(4, 8)

    def doubling() -> None:
        doubled = given * 2
        dbo_yield("layer0.dispatch")
        doubled.sum()

    for _ in range(3):
        scheduler.run([doubling, doubling])
elif what == "left":
    from dbo_greenlet import record_notes

    record_notes.leave("left", "CUDA graphs\nof another kind")
elif what != "idle":
    sys.exit(f"{what} is nothing that this program does")
