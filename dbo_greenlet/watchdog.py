"""Says of a step that makes no progress who is parked where, what is still to be received, and whose fault it is not.

One daemon thread per watched step looks at the step's record; it exists only while a watchdog is set, and ends with the
step. It never interferes: a stuck collective or kernel is not for us to kill.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from types import FrameType

from .step import Microbatch, State, Step, running

__all__ = ["Watched", "describe", "watch"]

logger = logging.getLogger("dbo_greenlet.watchdog")

_CARRIER_FILES = ("greenlet_carrier.py", "thread_carrier.py")


class Watched:
    """One watched step; `stop` ends the watching thread and joins it. `reports` holds what was logged."""

    def __init__(self, step: Step, seconds: float) -> None:
        self.step = step
        self.seconds = seconds
        self.reports: list[str] = []
        self._caller = threading.get_ident()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="dbo_greenlet watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        seen = -1
        reported = -1
        while not self._over.wait(self.seconds):
            progress = len(self.step.decisions)
            if progress == seen and progress != reported:
                reported = progress  # once per place at which it is stuck, not once per period
                report = describe(self.step, self._caller, self.seconds)
                self.reports.append(report)
                logger.error("%s", report)
            seen = progress


def watch(step: Step, seconds: float) -> Watched:
    """Watch `step` until `stop` is called on the result; `seconds` without a slice ending is called stuck."""
    return Watched(step, seconds)


def describe(step: Step, thread: int, seconds: float) -> str:
    """The report: one line on whether the scheduler is to blame, one per microbatch, and the running Python stack.

    Args:
        step: the step that does not move.
        thread: identity of the OS thread that called `Scheduler.run`.
        seconds: for how long it has not moved.
    """
    frames = sys._current_frames()
    current, frame = _who_runs(step, frames, thread)
    lines = [f"no progress for {seconds:g} s in a step of {step.count} microbatches after {len(step.decisions)} slices"]
    if current is None:
        lines.append("no microbatch runs: the step is stuck in the scheduler, its policy or an instrument")
    else:
        lines.append(
            f"microbatch {current.index} runs and does not come back: it is not parked in the scheduler; "
            "look at the last line of the stack below (a collective, a lock, a kernel launch)"
        )
    for microbatch in step.microbatches:
        lines.append("  " + _line(microbatch, current))
    if frame is not None:
        lines.append("stack of the thread that runs the step, innermost call last:")
        lines.extend(line.rstrip() for line in traceback.format_stack(frame))
    return "\n".join(lines)


def _who_runs(step: Step, frames: dict[int, FrameType], caller: int) -> tuple[Microbatch | None, FrameType | None]:
    """The microbatch whose own code is on a CPU now, with the frame it is in; (None, hub's frame) if it is the hub."""
    for thread, microbatch in tuple(running.items()):
        # A step inside a microbatch has microbatches of its own in the table: outward to the one of this step.
        ours: Microbatch | None = microbatch
        while ours is not None and ours.step is not step:
            ours = ours.step.outer if ours.step is not None else None
        if ours is not None and not ours.done and _in_model_code(frames.get(thread)):
            return ours, frames[thread]
    return None, frames.get(caller)


def _in_model_code(frame: FrameType | None) -> bool:
    # Outward from the innermost frame, the first one of ours tells. A microbatch's stack ends in the function that
    # calls its entry; a hub that decides, or a thread that sleeps until it is woken, is in some other function of ours.
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith(_CARRIER_FILES):
            return code.co_name in ("body", "_run_entry")
        frame = frame.f_back
    return True


def _line(microbatch: Microbatch, current: Microbatch | None) -> str:
    where = f"after {microbatch.site!r}" if microbatch.site else "before its first yield"
    receives = f", {len(microbatch.outstanding)} receive(s) open" if microbatch.outstanding else ""
    if microbatch.done:
        state = State.RETURNED.value if microbatch.error is None else State.FAILED.value
        return f"microbatch {microbatch.index}: {state} after {microbatch.slice_number} slices"
    if microbatch is current:
        return f"microbatch {microbatch.index}: running slice {microbatch.slice_number}, {where}{receives}"
    if not microbatch.started:
        return f"microbatch {microbatch.index}: not started"
    return (
        f"microbatch {microbatch.index}: parked at {microbatch.site!r} after {microbatch.slice_number} slices{receives}"
    )
