"""A step in a parent and one in its forked child, which leaves without finalizers: both are written."""

from __future__ import annotations

import os
import sys

from dbo_greenlet.devices import cpu_device
from dbo_greenlet.microbatch import make_ubatch_contexts
from dbo_greenlet.scheduler import Scheduler
from dbo_greenlet.trace.process_trace import StepDetails

DETAILS = StepDetails(0, 1, 64, 64, True, "split", [], [[0, 32, 0, 32], [32, 64, 32, 64]], None)

scheduler = Scheduler()
device = cpu_device()
contexts = make_ubatch_contexts(2, device=device)


def step() -> None:
    recording = scheduler.recording
    if recording is None:
        sys.exit("nothing records this")
    with recording.describe(DETAILS):
        scheduler.run([lambda: 1] * 2, contexts)


step()
child = os.fork()
if child == 0:
    step()
    files = len(os.listdir(os.environ["DBO_GREENLET_TRACE"]))
    print(f"child: own device {contexts[0].device is device}, files {files}")
    sys.stdout.flush()
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
