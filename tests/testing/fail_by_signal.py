"""A step that sends itself SIGTERM at a yield, which nobody handles."""

from __future__ import annotations

import signal

from dbo_greenlet import dbo_yield
from dbo_greenlet.testing.faults import Faults
from dbo_greenlet.testing.step_run import run_step


def entry() -> None:
    print("slice 0", flush=True)
    dbo_yield("a")
    print("slice 1", flush=True)


signal.signal(signal.SIGTERM, signal.SIG_DFL)
run_step(lambda bed: [entry], count=1, faults=Faults.parse("signal@0.0:TERM"))
