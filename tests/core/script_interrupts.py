"""A timer interrupts steps at any moment; each step must end right or with KeyboardInterrupt, and leave nothing."""

from __future__ import annotations

import random
import signal
import sys

from dbo_greenlet import Scheduler, dbo_enabled, dbo_register_recv_hook, dbo_yield
from dbo_greenlet.step import running, traced


def entry() -> str:
    try:
        for k in range(6):
            dbo_register_recv_hook(lambda: None)
            dbo_yield(f"s{k}")
    finally:
        cleaned.append(1)
    return "done"


def interrupt(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt


cleaned: list[int] = []
signal.signal(signal.SIGALRM, interrupt)
rng = random.Random(7)
scheduler = Scheduler(strict=True)
interrupted = 0
for attempt in range(3000):
    try:
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 150e-6))
        outputs = scheduler.run([entry, entry, entry]).outputs
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert outputs == ["done"] * 3
    except KeyboardInterrupt:
        interrupted += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    problems = []
    if dbo_enabled() or running or traced != [False, 0]:
        problems.append(f"left in a step: {running}, {traced}")
    if scheduler.run([entry, entry]).outputs != ["done", "done"]:
        problems.append("the next step gave something else")
    if problems:
        print(f"attempt {attempt}: {problems}")
        sys.exit(1)
print(f"{interrupted} of 3000 steps were interrupted")
sys.exit(0 if interrupted > 300 else 1)
