"""10,000 steps after warm-up; fails when resident memory grew by more than 5 MiB or a thread is left."""

from __future__ import annotations

import contextlib
import sys
import threading

from dbo_greenlet import Scheduler, dbo_register_recv_hook, dbo_yield, make_ubatch_contexts
from dbo_greenlet.errors import MicrobatchFailed


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def entry() -> int:
    payload = bytearray(1000)
    for k in range(4):
        dbo_register_recv_hook(lambda payload=payload: payload.clear())
        dbo_yield(f"s{k}")
    return len(payload)


def failing() -> int:
    dbo_yield("s0")
    raise ValueError("x")


contexts = make_ubatch_contexts(2)
scheduler = Scheduler(strict=True)
threads = threading.active_count()


def steps(count: int) -> None:
    for k in range(count):
        scheduler.run([entry, entry], contexts)
        if k % 10 == 0:
            with contextlib.suppress(MicrobatchFailed):
                scheduler.run([entry, failing], contexts)


steps(1000)
before = resident_bytes()
steps(10_000)
grown = (resident_bytes() - before) / 2**20
print(f"grown by {grown:.2f} MiB, threads {threads} -> {threading.active_count()}")
sys.exit(0 if grown <= 5 and threading.active_count() == threads else 1)
