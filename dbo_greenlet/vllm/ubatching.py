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

import threading
from collections.abc import Callable
from sys import _getframe
from threading import get_ident
from types import CodeType
from typing import Any

import torch
from greenlet import getcurrent
from vllm import forward_context
from vllm.v1.worker import ubatching
from vllm.v1.worker.ubatching import _CURRENT_CONTEXTS, _THREAD_ID_TO_CONTEXT, UBatchContext

from ..errors import ForeignSwitchError
from ..greenlet_carrier import _GO, Carrier
from ..step import running, traced
from .host_microbatch import HostMicrobatch, current_stream, own_microbatch
from .sites import passed_next

__all__ = ["replace", "restore"]

_HOST_GLOBALS = ubatching.__dict__
_original_cpu_yield = UBatchContext.__dict__["_cpu_yield"]
_original_current_stream = _HOST_GLOBALS["current_stream"]


def _current_stream_in_a_step() -> Any:
    """`current_stream` for vLLM's contexts, which mostly ask in the middle of a step."""
    try:
        return getcurrent().microbatch.streams["value"]
    except (AttributeError, TypeError):
        return current_stream()


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
    if microbatch.greenlet is not carrier:
        # From somebody else's greenlet: it says so.
        microbatch.yield_(microbatch.said or passed_next(microbatch.passed, _getframe(1)).site)
    if microbatch.said is None:
        likely = microbatch.passed.likely
        depth = likely.depth
        frame = _getframe(depth)
        if (
            frame.f_code is not likely.code
            or frame.f_lasti != likely.instruction
            # The same call may have led to a function of the model's this time, which yields.
            or (depth > 2 and _getframe(depth - 1).f_globals is not _HOST_GLOBALS)
        ):
            likely = passed_next(microbatch.passed, _getframe(1))
        microbatch.passed = likely
        microbatch.safe_stack = likely.safe_stack
        site = likely.site
    else:
        site, microbatch.said, microbatch.safe_stack = microbatch.said, None, None
    # `HostMicrobatch.hand_over` once more, in one function: see the hub's loop for why. vLLM's methods choose the
    # stream when this returns.
    microbatch.site = site
    microbatch.parked = True
    current = forward_context._forward_context
    try:
        go = microbatch.to_hub(microbatch)
    finally:
        _THREAD_ID_TO_CONTEXT[microbatch.thread] = microbatch.index
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
_dbo_greenlet_current = getcurrent
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
            # By the greenlet first: what the model has pushed out of the caches is dear, and vLLM's tables are more of
            # it. They say when a microbatch has left, and know those on threads of their own.
            try:
                microbatch = _dbo_greenlet_current().microbatch
                context = microbatch.host if microbatch.streams is not None else None
            except AttributeError:
                context = None  # no greenlet of ours, or of another step that the model runs
            if context is None:
                index = _THREAD_ID_TO_CONTEXT.get(threading.get_ident())
                context = None if index is None else _CURRENT_CONTEXTS[index]
            if context is not None:
                func(context, *args, **kwargs)

    return call


def _plain_yield() -> Callable[..., None]:
    func: Any = None

    def call() -> None:
        if _THREAD_ID_TO_CONTEXT:
            # By the greenlet, and not by vLLM's tables as everywhere else: what the model has pushed out of the caches
            # is dear, and the switch needs the greenlet anyway.
            try:
                microbatch = _dbo_greenlet_current().microbatch
                streams, context = microbatch.streams, microbatch.host
            except AttributeError:
                streams = None  # no greenlet of ours, or of another step that the model runs
            if streams is not None:
                # `UBatchContext.yield_` without its four calls: each is one more piece of code that is cold by now.
                stream = context.current_stream = streams["value"]
                context._cpu_yield()
                if streams["value"] is not stream:
                    context.update_stream(stream)
                return
            index = _THREAD_ID_TO_CONTEXT.get(threading.get_ident())
            context = None if index is None else _CURRENT_CONTEXTS[index]
            if context is not None:
                func(context)

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
    _HOST_GLOBALS["current_stream"] = _current_stream_in_a_step
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
