"""Runs the scenarios with vLLM's own threads, each in a forked child, and prints what came of it as JSON.

A hang is not a matter of patience: a child ends itself when nothing is left that could wake anybody, that is, when the
caller waits in `join` and every thread of the step that lives is parked in vLLM's hand-over.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from types import FrameType

LIMIT = 60.0


def frames(frame: FrameType | None) -> list[str]:
    names = []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names


def parked_for_good() -> str | None:
    """Who waits where, if nobody runs: asked several times, so that a hand-over in between is not taken for it."""
    main = threading.main_thread()
    threads = [
        t
        for t in threading.enumerate()
        if str(getattr(getattr(t, "_target", None), "__module__", "")).startswith("vllm.")
    ]
    current = sys._current_frames()
    if not threads or "join" not in frames(current.get(main.ident)):
        return None
    places = []
    for thread in threads:
        names = frames(current.get(thread.ident))
        place = next((name for name in ("_cpu_yield", "__enter__") if name in names), None)
        if names[:1] != ["wait"] or place is None:
            return None
        places.append(place)
    return f"hangs: {len(threads)} thread(s) parked in {', '.join(places)}"


def watch(pipe: int) -> None:
    same, times, end = None, 0, time.monotonic() + LIMIT
    while times < 10:
        time.sleep(0.05)
        now = parked_for_good()
        same, times = now, times + 1 if now is not None and now == same else 0
        if time.monotonic() > end:
            same = "no end within the limit"
            break
    os.write(pipe, json.dumps(same).encode())
    os._exit(0)


def in_child(scenario: str) -> str:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            threading.excepthook = lambda args: None  # what a thread dies of is no output of the step
            threading.Thread(target=watch, args=(writing,), daemon=True).start()
            os.write(writing, json.dumps(SCENARIOS[scenario]()).encode())
        except BaseException:
            os.write(writing, json.dumps(traceback.format_exc()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else "died"


if __name__ == "__main__":
    import torch

    from tests.vllm_dropin.scenarios import SCENARIOS

    torch.set_num_threads(1)
    SCENARIOS["V2 aborted"]()  # what is imported and built on the first use is there in all children
    print(json.dumps({name: in_child(name) for name in SCENARIOS}))
