"""vLLM's microbatch as the scheduler runs it: its context, its greenlet, and vLLM's tables round a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import get_ident
from typing import Any

import torch
from vllm import forward_context
from vllm.utils import torch_utils
from vllm.v1.worker import ubatching
from vllm.v1.worker.ubatching import _THREAD_ID_TO_CONTEXT, UBatchContext

from ..greenlet_carrier import GreenletMicrobatch
from ..step import running
from .sites import START

__all__ = ["HostContext", "HostMicrobatch", "current_stream", "leave", "own_microbatch", "registered"]

_stream_note = getattr(torch_utils, "_current_stream_tls", None)


def streams_of_thread() -> dict[str, Any] | None:
    """Where vLLM notes the calling thread's stream, under "value"; None where it has noted none.

    A look into it takes a tenth of one at the thread-local it belongs to.
    """
    noted: dict[str, Any] = getattr(_stream_note, "__dict__", {})
    return noted if noted.get("value") is not None else None


def current_stream() -> Any:
    """What vLLM's `current_stream` returns, without asking for the platform first: that takes it some 2 us a call.

    vLLM notes each thread's stream when it is set. Only a thread that has none yet needs the platform's answer.
    """
    stream = getattr(_stream_note, "value", None)
    return torch_utils.current_stream() if stream is None else stream


class HostContext:
    """What the scheduler and this package's own `dbo_*` functions need of a microbatch, on top of vLLM's context."""

    __slots__ = ("host", "thread")

    def __init__(self, host: UBatchContext, thread: int) -> None:
        self.host = host
        self.thread = thread

    def enter(self) -> None:
        """What `UBatchContext.__enter__` does once it is its thread's turn."""
        host = self.host
        _THREAD_ID_TO_CONTEXT[self.thread] = host.id
        host._restore_context()
        host.update_stream(host.compute_stream)

    def compute_scope(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.host.compute_stream)

    def switch_to_comm(self) -> None:
        self.host.switch_to_comm()

    def switch_to_comm_sync(self) -> None:
        self.host.switch_to_comm_sync()

    def switch_to_compute(self) -> None:
        self.host.switch_to_compute()

    def switch_to_compute_sync(self) -> None:
        self.host.switch_to_compute_sync()

    def yield_and_switch_from_compute_to_comm(self, site: str) -> None:
        running[self.thread].said = site  # type: ignore[attr-defined]  # a HostMicrobatch: its context is this
        self.host.yield_and_switch_from_compute_to_comm()

    def yield_and_switch_from_comm_to_compute(self, site: str) -> None:
        running[self.thread].said = site  # type: ignore[attr-defined]
        self.host.yield_and_switch_from_comm_to_compute()


class HostMicrobatch(GreenletMicrobatch):
    """A greenlet that carries one of vLLM's microbatches."""

    __slots__ = ("host", "passed", "said", "streams", "thread")

    def __init__(self, index: int, entry: Callable[[], Any], context: Any) -> None:
        super().__init__(index, entry, context)
        self.host: Any = context.host
        self.passed = START
        self.said: str | None = None  # the site, where the caller of the next yield said it
        # Where vLLM notes this thread's stream, under "value". None: there is nothing, or vLLM's table does not know
        # the microbatch any more.
        self.streams: dict[str, Any] | None = streams_of_thread()
        self.thread: int = context.thread

    def park(self, site: str) -> None:
        """A yield through this package's own `dbo_yield`: also the stream is put back."""
        stream = current_stream()
        self.hand_over(site)
        if current_stream() is not stream:
            torch.cuda.set_stream(stream)
        if self.outstanding:
            self.run_outstanding()

    def hand_over(self, site: str) -> None:
        # What is current may be another one than the context's own: a model may have put one of its own on.
        current = forward_context._forward_context
        self.safe_stack = None
        try:
            super().hand_over(site)
        finally:
            # Also when the step is being unwound: blocks that clean up read these.
            _THREAD_ID_TO_CONTEXT[self.thread] = self.index
            forward_context._forward_context = current

    def found_safe(self, stack: int) -> None:
        if self.safe_stack is not None:  # a yield that is in the tree
            self.passed.safe_stack = stack

    def release(self) -> None:
        super().release()
        self.host = self.streams = None


_CARRIED = "_dbo_greenlet_carried"  # in the __dict__ of a context that a greenlet carries


@contextmanager
def registered(contexts: list[UBatchContext]) -> Iterator[list[HostContext]]:
    """All of a step's contexts are known to vLLM's tables before the first microbatch runs, and none afterwards."""
    thread = get_ident()
    outer = _THREAD_ID_TO_CONTEXT.get(thread)
    slots = ubatching._CURRENT_CONTEXTS
    before = list(slots)
    for context in contexts:
        slots[context.id] = context
        context.__dict__[_CARRIED] = True
    try:
        yield [HostContext(context, thread) for context in contexts]
    finally:
        if outer is None:
            _THREAD_ID_TO_CONTEXT.pop(thread, None)
            for context in contexts:
                leave_slot(context)
                # What a parked runner with threads of its own has there is still alive; what an overlapping step of
                # another thread had there may be over.
                other = before[context.id]
                if other is not None and _CARRIED not in other.__dict__:
                    slots[context.id] = other
        else:  # a step inside a microbatch
            _THREAD_ID_TO_CONTEXT[thread] = outer
            slots[:] = before


def leave(context: UBatchContext) -> None:
    """The model has returned for `context`: a yield from now on is none, as in vLLM."""
    own = own_microbatch(context)
    if own is not None:
        own.streams = None
    leave_slot(context)


def leave_slot(context: UBatchContext) -> None:
    """vLLM's table no longer knows `context`; another one that has taken its place stays."""
    slots = ubatching._CURRENT_CONTEXTS
    if slots[context.id] is context:
        slots[context.id] = None


def own_microbatch(context: UBatchContext) -> HostMicrobatch | None:
    """The microbatch of the step that this thread runs which `context` belongs to, None if it is of no such step."""
    microbatch = running.get(get_ident())
    if not isinstance(microbatch, HostMicrobatch) or microbatch.step is None:
        return None
    siblings: list[Any] = microbatch.step.microbatches
    own = siblings[context.id] if context.id < len(siblings) else None
    return own if own is not None and own.context is not None and own.context.host is context else None
