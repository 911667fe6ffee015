"""What model code calls: vLLM's names with vLLM's meaning, plus an optional `site` label on the yields.

Outside a step every function here costs one global load and one test (law 8) and does nothing. A thread that runs no
microbatch sees "outside a step" also while another thread runs one.

A *site* names a yield point in schedules, traces and error messages. Give one where the yield line is shared by many
layers (`dbo_yield("layer3.dispatch")`); without one it is the caller's "file:line".
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import get_ident
from types import CodeType
from typing import Any, TypeVar

from greenlet import getcurrent

from .greenlet_carrier import Carrier
from .step import running, traced

__all__ = [
    "dbo_current_ubatch_id",
    "dbo_enabled",
    "dbo_get_previous_event",
    "dbo_maybe_run_recv_hook",
    "dbo_register_recv_hook",
    "dbo_switch_to_comm",
    "dbo_switch_to_comm_sync",
    "dbo_switch_to_compute",
    "dbo_switch_to_compute_sync",
    "dbo_yield",
    "dbo_yield_and_switch_from_comm_to_compute",
    "dbo_yield_and_switch_from_compute_to_comm",
]

R = TypeVar("R")


def _not_tracing() -> bool:
    return False


# Replaced by torch.compiler.is_compiling when torch's side of the package is loaded; the core does not import torch.
_is_tracing: Callable[[], bool] = _not_tracing


def dbo_enabled() -> bool:
    """Whether this thread runs a microbatch. Traceable by Dynamo."""
    if _is_tracing():
        return bool(traced[0])
    return bool(running) and get_ident() in running


def dbo_current_ubatch_id() -> int:
    """Index of the microbatch that this thread runs, 0 outside a step. Traceable by Dynamo."""
    if _is_tracing():
        return int(traced[1])
    if running:
        microbatch = running.get(get_ident())
        if microbatch is not None:
            return microbatch.index
    return 0


def dbo_yield(site: str | None = None) -> None:
    """Hand the thread to the scheduler; returns when it is this microbatch's turn again, on the same stream.

    Raises:
        UnsafeYieldError: under a `torch.ops` call that is not direct.
        ForeignSwitchError: from a greenlet that is not the microbatch's own.
        StepAborted: the step failed elsewhere, or is being unwound. Let it pass.
    """
    if running:
        carrier: Any = getcurrent()
        if carrier.__class__ is Carrier:
            microbatch: Any = carrier.microbatch
            microbatch.park(site or _caller_site())
            return
        microbatch = running.get(get_ident())
        if microbatch is not None:
            microbatch.yield_(site or _caller_site())


def dbo_yield_and_switch_from_compute_to_comm(site: str | None = None) -> None:
    """Record that compute is done, yield, go on on the comm stream behind that event.

    The event is recorded before the hand-off, so the comm stream never waits for the sibling's work (law 4).
    """
    if running:
        microbatch = running.get(get_ident())
        if microbatch is not None:
            site = site or _caller_site()
            if microbatch.context is None:
                microbatch.yield_(site)
            else:
                microbatch.context.yield_and_switch_from_compute_to_comm(site)


def dbo_yield_and_switch_from_comm_to_compute(site: str | None = None) -> None:
    """Record that communication is done, yield, go on on the compute stream behind that event."""
    if running:
        microbatch = running.get(get_ident())
        if microbatch is not None:
            site = site or _caller_site()
            if microbatch.context is None:
                microbatch.yield_(site)
            else:
                microbatch.context.yield_and_switch_from_comm_to_compute(site)


def dbo_switch_to_comm() -> None:
    """Make the comm stream current, without waiting for compute."""
    if running and (context := _context()) is not None:
        context.switch_to_comm()


def dbo_switch_to_comm_sync() -> None:
    """Make the comm stream current, behind what the compute stream holds now."""
    if running and (context := _context()) is not None:
        context.switch_to_comm_sync()


def dbo_switch_to_compute() -> None:
    """Make the compute stream current, without waiting for communication."""
    if running and (context := _context()) is not None:
        context.switch_to_compute()


def dbo_switch_to_compute_sync() -> None:
    """Make the compute stream current, behind what the comm stream holds now."""
    if running and (context := _context()) is not None:
        context.switch_to_compute_sync()


def dbo_register_recv_hook(hook: Callable[[], Any]) -> None:
    """Leave the receive part of what this microbatch just sent to be run by the next one.

    It runs exactly once, before this microbatch goes on after its next yield (law 4).
    """
    if running:
        microbatch = running.get(get_ident())
        if microbatch is not None:
            microbatch.register_receive(hook)


def dbo_maybe_run_recv_hook() -> None:
    """Run the receives that the previous microbatch left for this one, if there are any.

    Raises:
        ReceiveHookError: a hook raised; it names the microbatch that registered it.
    """
    if running:
        microbatch = running.get(get_ident())
        if microbatch is not None and microbatch.inbox:
            microbatch.run_inbox()


def dbo_get_previous_event(func: Callable[..., R], *args: Any, **kwargs: Any) -> R | None:
    """Call `func` (for example DeepEP's event capture) with the compute stream current; None outside a step."""
    if running:
        microbatch = running.get(get_ident())
        if microbatch is not None:
            if microbatch.context is None:
                return func(*args, **kwargs)
            with microbatch.context.compute_scope():
                event = func(*args, **kwargs)
            microbatch.captured(event)
            return event
    return None


def _context() -> Any:
    microbatch = running.get(get_ident())
    return None if microbatch is None else microbatch.context


# Label of a yield without one, by code object and instruction. Keyed by identity because hashing a code object walks
# its constants; the value keeps the code object alive, so that an identity cannot be used twice.
_labels: dict[tuple[int, int], tuple[CodeType, str]] = {}


def _caller_site() -> str:
    frame = sys._getframe(2)
    code = frame.f_code
    key = (id(code), frame.f_lasti)
    known = _labels.get(key)
    if known is None:
        # The file's name without its folder: the same on every rank and machine (law 5).
        name = code.co_filename.replace("\\", "/").rpartition("/")[2]
        known = _labels[key] = (code, f"{name}:{frame.f_lineno}")
    return known[1]
