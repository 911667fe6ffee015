"""What operations do to memory, in a program that does not know that it is recorded (`trace.process_trace`).

    DBO_GREENLET_TRACE=traces/ DBO_GREENLET_TRACE_MEMORY=1 python program.py
    dbo-greenlet record --memory -o traces/ -- python program.py       # the same

`MemoryRecorder` is given the model's all-to-all and the contexts' device by whoever sets up a run. Here nobody does, so
both are found while a step runs: the device by the step's contexts, and communication in two ways.

* An all-to-all of this package over torch.distributed or DeepEP, whose buffers count, is noted call by call. It is
  found when its send part is called in a step that is recorded, and left alone when that is over; so its class is made
  to ask, once, and only in a process that records memory. (To wrap what a `Runner` is given was rejected: a model has
  the all-to-all itself, and a program may have no runner.)
* Of every other one its recv hooks are known, which the scheduler sees: a send where a hook is registered, and a
  receive where it has run. What they copy are operators.

Where the contexts have no streams, operations are on the stream that is current. Events are those of the contexts'
device: what a program orders by events of its own (`torch.cuda.Event`) looks unordered. Of a program without a runner
nobody knows what it does behind the step, so whether it joined the streams is left open (`trace.lint.checks`).
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from functools import wraps
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch

from .memory_recorder import MemoryRecorder
from .step import running
from .testing.recorded_all2all import RecordedAllToAll

if TYPE_CHECKING:
    from .step import Microbatch, Step
    from .stream_program import StreamProgram, Transfer

__all__ = ["ProcessMemory"]

# Whose calls say more than their recv hooks do.
_TRANSPORTS = {
    "dbo_greenlet.all2all.torch_distributed": "TorchDistributed",
    "dbo_greenlet.all2all.deepep_ll": "DeepEPLowLatency",
    "dbo_greenlet.all2all.deepep_ht": "DeepEPHighThroughput",
}
_asking: set[str] = set()  # modules of those that were made to ask
_steps: dict[int, ProcessMemory] = {}  # identity of a step that runs -> who notes it


class ProcessMemory(MemoryRecorder):
    """A `MemoryRecorder` that finds the communication of its steps itself.

    Args:
        device: that of the step's contexts; None where they have none.
    """

    def __init__(self, device: Any = None) -> None:
        if device is None and torch.cuda.is_initialized():
            from .devices.cuda import CudaDevice

            device = CudaDevice()
        super().__init__(device)
        self._step = 0  # its identity
        self._noted: dict[int, RecordedAllToAll] = {}  # identity of an all-to-all -> what notes it
        self._in_flight: dict[int, deque[Transfer | None]] = {}  # microbatch -> one for each of its hooks, oldest first

    def note(self, all_to_all: Any) -> None:
        """Note what it does from now on, until the step's records are made."""
        if id(all_to_all) not in self._noted:
            self._noted[id(all_to_all)] = RecordedAllToAll(all_to_all, self.device)

    # -- what the scheduler calls --------------------------------------------------------------------------------------

    def before_step(self, step: Step) -> None:
        _make_transports_ask()
        self._in_flight = {}
        self._step = id(step)
        _steps[self._step] = self
        super().before_step(step)

    def after_step(self, step: Step, error: BaseException | None) -> None:
        _steps.pop(self._step, None)
        super().after_step(step, error)

    def recv_registered(self, microbatch: Microbatch) -> None:
        hook: Any = microbatch.outstanding[-1].hook
        transfer = None
        if type(getattr(hook, "__self__", None)).__module__ not in _TRANSPORTS:
            transfer = self.device.send(_name_of(hook)).transfer
        self._in_flight.setdefault(microbatch.index, deque()).append(transfer)

    def recv_ran(self, owner: Microbatch, by: int | None) -> None:
        waiting = self._in_flight.get(owner.index)
        transfer = waiting.popleft() if waiting else None
        if transfer is not None:
            self.device.receive(transfer)

    # -- what the trace asks for ---------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Note nothing more until the next step, and leave the all-to-alls alone. Twice is harmless."""
        self._end()

    def _end(self) -> StreamProgram:
        for each in self._noted.values():
            each.detach()
        self._noted = {}
        return super()._end()


def _name_of(hook: Any) -> str:
    """What a hook receives: by the names of `all2all.Dispatch` where it is one of its parts."""
    name = getattr(hook, "__name__", "")
    return name.removeprefix("finish_") if name.startswith("finish_") else name or type(hook).__name__


def _make_transports_ask() -> None:
    """Those whose modules are loaded: no other one can be at work in the step that begins."""
    for module, name in _TRANSPORTS.items():
        if module in sys.modules and module not in _asking:
            _asking.add(module)
            kind = getattr(sys.modules[module], name)
            kind.dispatch_send = _asking_first(kind.dispatch_send)


def _asking_first(dispatch_send: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(dispatch_send)
    def asking(self: Any, *arguments: Any, **named: Any) -> Any:
        microbatch = running.get(get_ident())
        noting = None if microbatch is None else _steps.get(id(microbatch.step))
        if noting is not None:
            noting.note(self)
        return dispatch_send(self, *arguments, **named)

    return asking
