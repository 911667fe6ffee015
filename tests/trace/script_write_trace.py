"""Writes a trace with one step for each line on standard input, and says on standard output when a step is in the file.

Dies without closing anything at "die"; with "half" it leaves the beginning of one more line behind before that.
"""

from __future__ import annotations

import os
import sys

from dbo_greenlet.trace import HeaderRecord, SliceRecord, StepRecord, TraceWriter

path = sys.argv[1]
writer = TraceWriter(path)
writer.write(HeaderRecord("0.1.0", 0, 1))
for step, command in enumerate(sys.stdin):
    if command.strip() in ("die", "half"):
        if command.strip() == "half":
            with open(path, "ab") as file:
                file.write(b'{"t":"slice","step":99,"ra')
        os._exit(3)
    writer.write(
        StepRecord(step, 0, "dbo", 8, 8, True, "split"),
        SliceRecord(step, 0, "dbo", 0, 0, "layer0.dispatch", 1.0, 2.0),
    )
    print(step + 1, flush=True)
