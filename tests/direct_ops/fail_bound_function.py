"""The documented limit: a bound C++ function that calls back into Python leaves no Python frame to find it by.

`torch.save` to a file object is one: its writer calls the object's `write`. Yields in `write` are not refused, and with
two microbatches the process dies of SIGABRT. With --once there is one microbatch, so calls end last in, first out.
"""

from __future__ import annotations

import io
import sys

import torch

from dbo_greenlet import Scheduler, dbo_yield


class YieldingFile(io.RawIOBase):
    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        dbo_yield("write")
        return memoryview(data).nbytes


def entry() -> None:
    writer = torch._C.PyTorchFileWriter(YieldingFile())
    for name in "abc":
        writer.write_record(name, torch.ones(4).numpy().tobytes(), 16)
    writer.write_end_of_file()


step = Scheduler(strict=True).run([entry] if "--once" in sys.argv else [entry, entry])
print("survived", step.yields)
