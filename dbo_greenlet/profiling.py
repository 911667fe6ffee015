"""Profiler ranges that survive yields.

A profiler keeps its open ranges per OS thread and nests them by time. A range that is open in one microbatch while a
sibling runs on the same thread swallows the sibling's operators. So a `dbo_range` is closed where its microbatch yields
and opened again, under the same name, where it goes on: a trace shows one range per slice, and every operator lies in a
range of its own microbatch.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

import torch
from torch.autograd import profiler

__all__ = ["dbo_range"]


class _Open(threading.local):
    def __init__(self) -> None:
        self.ranges: list[dbo_range] = []


_open = _Open()

# Whether a dbo_range was ever entered in this process: the scheduler looks at nothing else until then.
used = False


class dbo_range:
    """A named range round a part of the model: `with dbo_range("layer 3 experts"): ...`.

    Shows up in `torch.profiler` as `record_function` does, and as an NVTX range where CUDA is in use. It may contain
    yields. Costs about a microsecond where no profiler runs. In compiled code it does nothing, since an operator there
    belongs to no line of the model. One object may be entered once at a time.

    Args:
        name: what the trace shows.
    """

    __slots__ = ("_nvtx", "_record", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._record: Any = None
        self._nvtx = False

    def __enter__(self) -> dbo_range:
        if torch.compiler.is_compiling():
            return self
        global used
        used = True
        self._begin()
        _open.ranges.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if torch.compiler.is_compiling():
            return
        ranges = _open.ranges
        if self in ranges:
            ranges.remove(self)
        self._end()

    def _begin(self) -> None:
        if profiler._is_profiler_enabled:
            self._record = profiler.record_function(self.name)
            self._record.__enter__()
        if torch.cuda.is_initialized():
            torch.cuda.nvtx.range_push(self.name)
            self._nvtx = True

    def _end(self) -> None:
        if self._nvtx:
            self._nvtx = False
            torch.cuda.nvtx.range_pop()
        record, self._record = self._record, None
        if record is not None:
            record.__exit__(None, None, None)

    def __repr__(self) -> str:
        return f"dbo_range({self.name!r})"


def depth() -> int:
    """Number of ranges open on this thread."""
    return len(_open.ranges) if used else 0


def close_above(base: int) -> list[dbo_range]:
    """Close the ranges that were opened since the thread had `base` of them; the innermost first."""
    if not used:
        return []
    ranges = _open.ranges
    closed = ranges[base:]
    del ranges[base:]
    for each in reversed(closed):
        each._end()
    return closed


def reopen(ranges: list[dbo_range]) -> None:
    """Open them again, the outermost first."""
    for each in ranges:
        each._begin()
        _open.ranges.append(each)
