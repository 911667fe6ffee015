"""After each step nothing is left: greenlets, hooks, threads, outputs, memory."""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
from greenlet import getcurrent, greenlet

from dbo_greenlet import Scheduler, dbo_register_recv_hook, dbo_yield, make_ubatch_contexts
from dbo_greenlet.errors import MicrobatchFailed
from dbo_greenlet.step import running

CARRIERS = ["greenlet", "thread"]


class Thing:
    """Something a weak reference can watch."""


@pytest.fixture(autouse=True)
def without_the_garbage_collector() -> Any:
    """Everything must go by reference counts: a step makes no cycle for the collector to find later."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_a_step_is_left(carrier: str, fails: bool) -> None:
    watched: list[weakref.ref[Any]] = []
    threads = threading.active_count()

    def entry(index: int) -> Any:
        def run() -> Any:
            if carrier == "greenlet":
                watched.append(weakref.ref(getcurrent()))
            local, output = Thing(), Thing()

            class Hook:
                def __call__(self) -> None:
                    pass

            hook = Hook()
            watched.extend([weakref.ref(local), weakref.ref(output), weakref.ref(hook)])
            dbo_register_recv_hook(hook)
            del hook
            dbo_yield("a")
            if fails and index == 1:
                raise ValueError("x")
            dbo_yield("b")
            return output

        watched.append(weakref.ref(run))
        return run

    contexts = make_ubatch_contexts(2)

    scheduler = Scheduler(carrier=carrier, strict=True)
    if fails:
        try:
            scheduler.run([entry(0), entry(1)], contexts)
            pytest.fail("the step did not fail")
        except MicrobatchFailed:
            pass
    else:
        scheduler.run([entry(0), entry(1)], contexts)
    carriers = [w() for w in watched if isinstance(w(), greenlet)]
    # The greenlets wait for the next step and hold nothing of this one; they go with the scheduler.
    assert len(carriers) == (2 if carrier == "greenlet" else 0)
    alive = [w() for w in watched if w() is not None and not isinstance(w(), greenlet)]
    assert alive == []
    del scheduler, carriers
    alive = [w() for w in watched if w() is not None]
    assert alive == []
    assert running == {}
    assert threading.active_count() == threads


def test_memory_is_flat_over_ten_thousand_steps() -> None:
    # In a process of its own: what other tests left for the allocator would drown 5 MiB.
    script = Path(__file__).with_name("script_memory.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss > 0
