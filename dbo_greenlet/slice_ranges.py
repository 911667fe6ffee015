"""Ranges in a profile for every slice of a step: whose work each operator and each kernel is.

Where a profiler is on as a step begins, the scheduler puts a `SliceRanges` round its slices, unasked, and
torch.profiler's trace has on the thread of the step

    microbatch 0, slice 0
        microbatch 1, receive of layer0.dispatch         a receive hook that microbatch 0 ran for its sibling
    microbatch 0, slice 1, after layer0.dispatch

with everything that the slice ran nested inside, also the `dbo_range`s that are open in it. The names follow from the
schedule alone, so they are the same on every rank; `trace.profile_slices` reads them again.

* A profiler that starts while a step runs sees ranges from the next step on.
* torch.profiler watches the thread that started it. The threads of `carrier="thread"` show up where it watches all
  (`_ExperimentalConfig(profile_all_threads=True)`).
* Under `torch.autograd.profiler.emit_nvtx()` these ranges are NVTX ranges, for Nsight Systems.
* A captured step has ranges, a replay has none: it runs no slice.
* With `with_stack=True`, torch's rows of Python functions are wrong from the first yield on: torch pairs calls and
  returns by their order on the thread. Operators and ranges are not touched by that.

With a profiler on, a slice takes 7 us longer, most of it torch's for the range; without one, a step asks one question,
0.15 us (one core of an AMD EPYC, torch 2.13).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.profiler import record_function

from . import profiling
from .profiling import dbo_range

if TYPE_CHECKING:
    from .slice_bracket import Slice, SliceBracket
    from .step import Microbatch, Step

__all__ = ["SliceRanges"]

logger = logging.getLogger("dbo_greenlet")


def _enter_record_function(name: str) -> Any:
    record = record_function(name)
    record.__enter__()
    return record


def _exit_record_function(record: Any) -> None:
    record.__exit__(None, None, None)


# Torch's own ranges round process groups are written so, too: the same entry in the trace as record_function's, for a
# third of its time, and without an operator that the caller's modes would see.
_enter = getattr(torch.autograd, "_record_function_with_args_enter", _enter_record_function)
_exit = getattr(torch.autograd, "_record_function_with_args_exit", _exit_record_function)


class SliceRanges:
    """A `SliceBracket` that opens a range at the begin of each slice and closes it at the end; an instrument for the
    receives in between, and for the end of the step. One object serves one step.

    Ranges of a thread close in the order opposite to that in which they opened: a `dbo_range` that is open at a yield
    is closed before the range of its slice is, and opens again inside that of the next one. (The scheduler does so by
    itself only where it compares open ranges at each yield, which it does not in vLLM, nor with a thread for each
    microbatch.)

    A profiler watches, and cannot fail the step: if a range cannot be written, that is logged, and the rest of the step
    has none.

    Args:
        inner: what else is put round the slices; it runs inside the range, and what it raises is raised.
    """

    # As an instrument it takes care of that itself.
    never_raises = True

    def __init__(self, inner: SliceBracket | None = None) -> None:
        self._inner = inner
        self._works = True
        self._open: list[Any] = []  # the outermost first
        self._base = 0  # how many dbo_ranges are open round the slice
        self._parked: dict[int, list[dbo_range]] = {}  # by microbatch: what was open when it yielded

    # -- the bracket -------------------------------------------------------------------------------------------------

    def begin(self, slice: Slice) -> None:
        index = slice.microbatch
        after = f", after {slice.begin_site}" if slice.begin_site else ""
        self._enter(f"microbatch {index}, slice {slice.number}{after}")
        self._base = profiling.depth()
        if parked := self._parked.pop(index, None):
            profiling.reopen(parked)
        if self._inner is not None:
            try:
                self._inner.begin(slice)
            except BaseException:
                # The slice does not run, so nobody calls `end`.
                self._close()
                raise

    def end(self, slice: Slice) -> None:
        try:
            if self._inner is not None:
                self._inner.end(slice)
        finally:
            if parked := profiling.close_above(self._base):
                self._parked[slice.microbatch] = parked
            self._close()

    # -- the instrument ----------------------------------------------------------------------------------------------

    def recv_registered(self, microbatch: Microbatch) -> None:
        """Put a range round the hook. Whoever runs it, what it launches is its owner's."""
        receive = microbatch.outstanding[-1]
        if (hook := receive.hook) is not None:
            receive.hook = self._round(microbatch, hook)

    def after_step(self, step: Step, error: BaseException | None) -> None:
        """Close what an interrupt has left open."""
        self._close()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _round(self, owner: Microbatch, hook: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            # By now the owner is parked at the yield behind its send. That site names the message.
            base = len(self._open)
            self._enter(f"microbatch {owner.index}, receive" + (f" of {owner.site}" if owner.site else ""))
            try:
                return hook()
            finally:
                # Nothing is left to close where the hook yielded, which fails the step.
                self._close(base)

        return run

    def _enter(self, name: str) -> None:
        if self._works:
            try:
                self._open.append(_enter(name))
            except Exception:
                # Whatever it is (a mode that refuses record_function's operator): the step goes on without ranges.
                self._give_up()

    def _close(self, base: int = 0) -> None:
        while len(self._open) > base:
            try:
                _exit(self._open.pop())
            except Exception:
                # As in `_enter`. The others are closed all the same.
                self._give_up()

    def _give_up(self) -> None:
        if self._works:
            logger.exception("this step has no ranges in the profile from here on")
        self._works = False
