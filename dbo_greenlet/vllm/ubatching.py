"""vLLM's microbatch context, carried by a greenlet instead of a thread.

vLLM's `UBatchContext` holds a microbatch's streams, events and forward context, and its methods do all of the stream
and event work of a yield; they stay as they are. What changes is the one line in the middle of them: `_cpu_yield`,
which signals a sibling's thread and waits, becomes a switch to the hub.

What is replaced, and why it is done in place:

* `UBatchContext._cpu_yield`: the hand-over. For a context that is entered by a thread of its own, as out-of-tree
  runners do it, the original runs.
* `UBatchContext.recv_hook`: what vLLM keeps as one slot, overwritten by the next registration and lost when its owner
  left, is a view of the scheduler's receives while a greenlet step runs: each is run exactly once (law 4).
* the *code* of the `dbo_*` functions. A dozen modules hold these function objects by `from ... import`; a new code
  object reaches all of them whenever they were imported, also third parties. (Rebinding the names in every module that
  is loaded by now was rejected: it misses whoever kept the function elsewhere.) The new code keeps vLLM's rules and
  differs in two points: a thread that runs no microbatch sees "disabled" instead of a KeyError, and a receive may be
  registered when the next microbatch has already left.
* the name `current_stream` in `vllm.v1.worker.ubatching`, which each yield calls two or three times.

`_THREAD_ID_TO_CONTEXT`, `_CURRENT_CONTEXTS` and `forward_context._forward_context` are right whenever code of a
microbatch runs, because others read them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import get_ident
from types import CodeType
from typing import Any

import torch
from greenlet import getcurrent
from vllm import forward_context
from vllm.utils import torch_utils
from vllm.v1.worker import ubatching
from vllm.v1.worker.ubatching import _CURRENT_CONTEXTS, _THREAD_ID_TO_CONTEXT, UBatchContext

from ..errors import ForeignSwitchError
from ..greenlet_carrier import _GO, Carrier, GreenletMicrobatch
from ..step import running, traced
from .sites import site_of

__all__ = [
    "HostContext",
    "HostMicrobatch",
    "current_stream",
    "leave_slot",
    "own_microbatch",
    "registered",
    "replace",
    "restore",
]

_stream_note = getattr(torch_utils, "_current_stream_tls", None)


def current_stream() -> Any:
    """What vLLM's `current_stream` returns, without asking for the platform first: that takes it some 2 us a call.

    vLLM notes each thread's stream when it is set. Only a thread that has none yet needs the platform's answer.
    """
    stream = getattr(_stream_note, "value", None)
    return torch_utils.current_stream() if stream is None else stream


class HostContext:
    """What the scheduler and this package's own `dbo_*` functions need of a microbatch, on top of vLLM's context."""

    __slots__ = ("host", "site", "thread")

    def __init__(self, host: UBatchContext, thread: int) -> None:
        self.host = host
        self.thread = thread
        self.site: str | None = None

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
        self.site = site
        self.host.yield_and_switch_from_compute_to_comm()

    def yield_and_switch_from_comm_to_compute(self, site: str) -> None:
        self.site = site
        self.host.yield_and_switch_from_comm_to_compute()


class HostMicrobatch(GreenletMicrobatch):
    """A greenlet that carries one of vLLM's microbatches."""

    __slots__ = ("passed",)

    def __init__(self, index: int, entry: Callable[[], Any], context: Any) -> None:
        super().__init__(index, entry, context)
        self.passed: dict[str, int] = {}  # how often each kind of site was passed: the layer's number

    def park(self, site: str) -> None:
        """A yield through this package's own `dbo_yield`: also the stream is put back."""
        stream = current_stream()
        self.hand_over(site)
        if current_stream() is not stream:
            torch.cuda.set_stream(stream)
        if self.outstanding:
            self.run_outstanding()

    def hand_over(self, site: str) -> None:
        context = self.context
        # What is current may be another one than the context's own: a model may have put one of its own on.
        current = forward_context._forward_context
        try:
            super().hand_over(site)
        finally:
            # Also when the step is being unwound: blocks that clean up read these.
            _THREAD_ID_TO_CONTEXT[context.thread] = self.index
            forward_context._forward_context = current


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


# -- what replaces vLLM's ---------------------------------------------------------------------------------------------

_HOST_GLOBALS = ubatching.__dict__
_original_cpu_yield = UBatchContext.__dict__["_cpu_yield"]
_original_current_stream = _HOST_GLOBALS["current_stream"]


def _cpu_yield(self: UBatchContext) -> None:
    carrier: Any = getcurrent()
    microbatch: Any = carrier.microbatch if carrier.__class__ is Carrier else running.get(get_ident())
    if microbatch.__class__ is not HostMicrobatch:
        if carrier.__class__ is Carrier:
            raise ForeignSwitchError(
                f"microbatch {self.id} of vLLM's step reached a yield inside another step that its model runs; "
                "a step inside a step may not call vLLM's MoE layers"
            )
        _original_cpu_yield(self)
        return
    context = microbatch.context
    site = context.site
    if site is None:
        site = site_of(microbatch.passed, sys._getframe(1))
    else:
        context.site = None
    if microbatch.greenlet is not carrier:
        microbatch.yield_(site)  # from somebody else's greenlet: it says so
    # `HostMicrobatch.hand_over` once more, in one function: see the hub's loop for why. vLLM's methods choose the
    # stream when this returns.
    microbatch.site = site
    microbatch.parked = True
    current = forward_context._forward_context
    try:
        go = microbatch.to_hub(microbatch)
    finally:
        _THREAD_ID_TO_CONTEXT[context.thread] = self.id
        forward_context._forward_context = current
    microbatch.parked = False
    if go is not _GO:
        microbatch.refuse_resumption()
    if microbatch.outstanding:
        # A receive that no sibling ran has to find the owner's stream.
        self.update_stream(self.current_stream)
        microbatch.run_outstanding()


def _get_recv_hook(self: UBatchContext) -> Callable[[], Any] | None:
    own = own_microbatch(self)
    if own is None:
        return self.__dict__.get("recv_hook")  # type: ignore[no-any-return]
    return own.run_inbox if own.inbox else None


def _set_recv_hook(self: UBatchContext, hook: Callable[[], Any] | None) -> None:
    own = own_microbatch(self)
    if own is None:
        self.__dict__["recv_hook"] = hook
    elif hook is not None:
        # Whoever writes into a sibling's slot has just sent. (Clearing the slot is what follows a run: it is gone.)
        running[get_ident()].register_receive(hook)


def _register_recv_hook(recv_hook: Callable[[], Any], number: int) -> None:
    """Where `dbo_register_recv_hook` leads; `number` is vLLM's number of microbatches."""
    microbatch = running.get(get_ident())
    if isinstance(microbatch, HostMicrobatch):
        microbatch.register_receive(recv_hook)
        return
    following = ubatching._CURRENT_CONTEXTS[(_THREAD_ID_TO_CONTEXT[get_ident()] + 1) % number]
    if following is not None:
        following.recv_hook = recv_hook
    else:
        # A thread's peer has left the step: nobody but the caller is there to complete the receive.
        recv_hook()


def _captured(event: Any) -> None:
    if isinstance(microbatch := running.get(get_ident()), HostMicrobatch):
        microbatch.captured(event)


# The functions below lend their code: it runs with the globals of vLLM's module, so it may use only names that are
# there too (which `replace` sees to for those that start with _dbo_greenlet).
_dbo_greenlet_traced = traced
_dbo_greenlet_note = _stream_note
_dbo_greenlet_register = _register_recv_hook
_dbo_greenlet_captured = _captured
_LENT = {name: value for name, value in globals().items() if name.startswith("_dbo_greenlet")}
_NUM_UBATCHES = 2


def _dbo_enabled() -> bool:
    if not _THREAD_ID_TO_CONTEXT:
        return False
    # A compiler cannot follow the look-up by thread, and it compiles for the microbatch that it runs in.
    return torch.compiler.is_compiling() or threading.get_ident() in _THREAD_ID_TO_CONTEXT


def _dbo_current_ubatch_id() -> int:
    if not _THREAD_ID_TO_CONTEXT:
        return 0
    if _dbo_greenlet_traced[0] and torch.compiler.is_compiling():
        return int(_dbo_greenlet_traced[1])
    return _THREAD_ID_TO_CONTEXT.get(threading.get_ident(), 0)


def _dbo_current_ubatch_token_offset() -> int:
    if not _THREAD_ID_TO_CONTEXT:
        return 0
    index = _THREAD_ID_TO_CONTEXT.get(threading.get_ident())
    context: Any = None if index is None else _CURRENT_CONTEXTS[index]
    return 0 if context is None else context.token_offset


def _dbo_register_recv_hook(recv_hook: Any) -> None:
    if _THREAD_ID_TO_CONTEXT and threading.get_ident() in _THREAD_ID_TO_CONTEXT:
        _dbo_greenlet_register(recv_hook, _NUM_UBATCHES)


def _dbo_get_previous_event(func: Any, *args: Any, **kwargs: Any) -> Any:
    if _THREAD_ID_TO_CONTEXT:
        index = _THREAD_ID_TO_CONTEXT.get(threading.get_ident())
        context = None if index is None else _CURRENT_CONTEXTS[index]
        if context is not None:
            with torch.cuda.stream(context.compute_stream):
                event = func(*args, **kwargs)
            _dbo_greenlet_captured(event)
            return event
    return None


def _method_of_current_context() -> Callable[..., None]:
    func: Any = None

    def call(*args: Any, **kwargs: Any) -> None:
        if _THREAD_ID_TO_CONTEXT:
            index = _THREAD_ID_TO_CONTEXT.get(threading.get_ident())
            context = None if index is None else _CURRENT_CONTEXTS[index]
            if context is not None:
                func(context, *args, **kwargs)

    return call


def _plain_yield() -> Callable[..., None]:
    func: Any = None

    def call() -> None:
        if _THREAD_ID_TO_CONTEXT:
            index = _THREAD_ID_TO_CONTEXT.get(threading.get_ident())
            context = None if index is None else _CURRENT_CONTEXTS[index]
            if context is not None:
                stream = getattr(_dbo_greenlet_note, "value", None)
                if stream is None:
                    func(context)
                    return
                # `UBatchContext.yield_` without its four calls: each is one more piece of code that is cold by now.
                context.current_stream = stream
                context._cpu_yield()
                if _dbo_greenlet_note.value is not stream:  # type: ignore[union-attr]
                    context.update_stream(stream)

    return call


CODE: dict[str, CodeType] = {
    "dbo_enabled": _dbo_enabled.__code__,
    "dbo_current_ubatch_id": _dbo_current_ubatch_id.__code__,
    "dbo_register_recv_hook": _dbo_register_recv_hook.__code__,
    "dbo_get_previous_event": _dbo_get_previous_event.__code__,
    "dbo_yield": _plain_yield().__code__,  # type: ignore[attr-defined]
    **dict.fromkeys(
        (
            "dbo_maybe_run_recv_hook",
            "dbo_yield_and_switch_from_compute_to_comm",
            "dbo_yield_and_switch_from_comm_to_compute",
            "dbo_switch_to_comm",
            "dbo_switch_to_compute",
            "dbo_switch_to_comm_sync",
            "dbo_switch_to_compute_sync",
        ),
        _method_of_current_context().__code__,  # type: ignore[attr-defined]
    ),
}
if hasattr(ubatching, "dbo_current_ubatch_token_offset"):  # since vLLM 0.33
    CODE["dbo_current_ubatch_token_offset"] = _dbo_current_ubatch_token_offset.__code__
_originals: dict[str, CodeType] = {}


def replace() -> None:
    """Put the replacements in. Twice is harmless."""
    if _originals:
        return
    _HOST_GLOBALS.update(_LENT)
    for name, code in CODE.items():
        function = _HOST_GLOBALS[name]
        original = function.__code__
        function.__code__ = code  # ValueError where the function closes over something else than it did
        _originals[name] = original
    _HOST_GLOBALS["current_stream"] = current_stream
    UBatchContext._cpu_yield = _cpu_yield  # type: ignore[method-assign]
    UBatchContext.recv_hook = property(_get_recv_hook, _set_recv_hook)  # type: ignore[assignment]


def restore() -> None:
    """Put vLLM's own back."""
    for name, code in _originals.items():
        _HOST_GLOBALS[name].__code__ = code
    _originals.clear()
    for name in _LENT:
        _HOST_GLOBALS.pop(name, None)
    _HOST_GLOBALS["current_stream"] = _original_current_stream
    UBatchContext._cpu_yield = _original_cpu_yield  # type: ignore[method-assign]
    if isinstance(UBatchContext.__dict__.get("recv_hook"), property):
        del UBatchContext.recv_hook
