"""Random microbatch programs that enter and leave scopes of torch's thread state round yields, and what they observe.

A program is a tree of plain tuples:

    ("scope", kind, [statements])     enter the scope, run the statements, leave it
    ("yield", site)
    ("look",)                         write everything that can be observed to the log
    ("operator",)                     call a Python-implemented operator with two yields inside
    ("raise", name)

`Player` runs one. Everything it can see of the thread goes into its log, so that a program which ran interleaved with
others and the same program run by itself must give the same log, line by line.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils._device as torch_device
import torch.utils._python_dispatch as torch_dispatch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dbo_greenlet import dbo_yield
from dbo_greenlet.devices import CpuDevice

Statement = tuple[Any, ...]

number = contextvars.ContextVar("number", default=0)
X = torch.tensor([[0.1, 0.2], [0.3, 0.4]])
W = torch.tensor([[1.1, 2.2], [3.3, 4.4]], requires_grad=True)
STREAMS = CpuDevice()
SIDE_STREAM = STREAMS.new_stream("side")


@torch.library.custom_op("dbo_test_state::project", mutates_args=())
def project(x: torch.Tensor) -> torch.Tensor:
    dbo_yield("operator.a")
    torch.clear_autocast_cache()
    y = x @ W
    dbo_yield("operator.b")
    return y + 1


class Slot:
    """What `TorchThreadState` touches of a microbatch."""

    saved_state: Any = None


class Boom(Exception):
    """What ("raise", name) raises."""


class DispatchLog(TorchDispatchMode):
    def __init__(self, name: str, log: list[Any]) -> None:
        super().__init__()
        self.name, self.log = name, log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.log.append((self.name, "dispatched", str(func)))
        return func(*args, **(kwargs or {}))


class QuietDispatchLog(DispatchLog):
    """A mode that the compiler need not know of; torch keeps other flags for these."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class FunctionLog(TorchFunctionMode):
    def __init__(self, name: str, log: list[Any]) -> None:
        super().__init__()
        self.name, self.log = name, log

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.log.append((self.name, "called", getattr(func, "__name__", str(func))))
        return func(*args, **(kwargs or {}))


def snapshot() -> dict[str, Any]:
    """The thread's torch state by torch's own getters; independent of how the package reads it."""
    return {
        "include": torch._C._dispatch_tls_local_include_set().raw_repr(),
        "exclude": torch._C._dispatch_tls_local_exclude_set().raw_repr(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "forward grad": torch._C._is_fwd_grad_enabled(),
        "multithreading": torch._C._is_multithreading_enabled(),
        "view replay": torch._C._is_view_replay_enabled(),
        "autocast": [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")],
        "autocast cache": torch.is_autocast_cache_enabled(),
        "autocast nesting": torch.autocast_increment_nesting() and torch.autocast_decrement_nesting(),
        "dispatch modes": [id(torch._C._get_dispatch_stack_at(i)) for i in range(torch._C._len_torch_dispatch_stack())],
        "in a dispatch mode": [torch_dispatch.is_in_torch_dispatch_mode(infra) for infra in (True, False)],
        "function modes": [id(torch._C._get_function_stack_at(i)) for i in range(torch._C._len_torch_function_stack())],
        "function state": torch._C._get_torch_function_state(),
        "default device": (
            torch_device.CURRENT_DEVICE,
            getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None),
        ),
        "frame callback": torch._C._dynamo.eval_frame.get_eval_frame_callback(),
        "stream": STREAMS.current_stream().name,
    }


# Scopes by name; each takes the name and log of the player that enters it.
SCOPES: dict[str, Any] = {
    "no_grad": lambda name, log: torch.no_grad(),
    "enable_grad": lambda name, log: torch.enable_grad(),
    "inference": lambda name, log: torch.inference_mode(),
    "no inference": lambda name, log: torch.inference_mode(False),
    "autocast bfloat16": lambda name, log: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast float16": lambda name, log: torch.autocast("cpu", dtype=torch.float16),
    "autocast uncached": lambda name, log: torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False),
    "autocast off": lambda name, log: torch.autocast("cpu", enabled=False),
    "autocast cuda off": lambda name, log: torch.autocast("cuda", dtype=torch.bfloat16, enabled=False),
    "dispatch mode": DispatchLog,
    "quiet dispatch mode": QuietDispatchLog,
    "dispatch mode at work": lambda name, log: at_work(DispatchLog(name, log)),
    "function mode": FunctionLog,
    "function modes off": lambda name, log: torch._C.DisableTorchFunction(),
    "subclasses off": lambda name, log: torch._C.DisableTorchFunctionSubclass(),
    "below autograd": lambda name, log: torch._C._AutoDispatchBelowAutograd(),
    "stream": lambda name, log: STREAMS.stream_scope(SIDE_STREAM),
    "meta device": lambda name, log: torch.device("meta"),
    "forward grad off": lambda name, log: forward_grad_off(),
    "multithreading off": lambda name, log: torch.autograd.set_multithreading_enabled(False),
    "view replay": lambda name, log: torch.autograd._force_original_view_tracking(True),
    "number": lambda name, log: number_set(number.get() + 1),
}


@contextlib.contextmanager
def at_work(mode: DispatchLog) -> Iterator[None]:
    """As while the mode handles a call: on, and off the stack."""
    with mode, torch_dispatch._pop_mode_temporarily():
        yield


@contextlib.contextmanager
def number_set(value: int) -> Iterator[None]:
    token = number.set(value)
    try:
        yield
    finally:
        number.reset(token)


@contextlib.contextmanager
def forward_grad_off() -> Iterator[None]:
    before = torch._C._is_fwd_grad_enabled()
    torch._C._set_fwd_grad_enabled(False)
    try:
        yield
    finally:
        torch._C._set_fwd_grad_enabled(before)


class Player:
    """Runs one program; `log` is what it saw."""

    def __init__(self, name: str, program: list[Statement]) -> None:
        self.name = name
        self.program = program
        self.log: list[Any] = []
        self.open_scopes = 0

    def __call__(self) -> list[Any]:
        self._run(self.program)
        self.log.append("end")
        return self.log

    def _run(self, statements: list[Statement]) -> None:
        for statement in statements:
            kind = statement[0]
            if kind == "scope":
                self._scope(statement[1], statement[2])
            elif kind == "yield":
                dbo_yield(statement[1])
            elif kind == "look":
                self._look()
            elif kind == "operator":
                self.log.append(result_of(torch.ops.dbo_test_state.project(X)))
            else:
                raise Boom(statement[1])

    def _scope(self, kind: str, body: list[Statement]) -> None:
        self.open_scopes += 1
        try:
            with SCOPES[kind](f"{self.name}:{kind}:{self.open_scopes}", self.log):
                self._run(body)
        finally:
            self.open_scopes -= 1
        self._look()

    def _look(self) -> None:
        seen = snapshot()
        # Modes are new objects in each run; their number is what two runs have in common.
        seen["dispatch modes"] = len(seen["dispatch modes"])
        seen["function modes"] = len(seen["function modes"])
        # With torch alone, a cast that is in the cache is taken whatever the dtype or grad mode now is, so what a
        # program sees would depend on its own past. The cache has a test of its own.
        torch.clear_autocast_cache()
        y = X @ W
        made = torch.empty(1)
        self.log.append((seen, number.get(), result_of(y), made.device.type))


def result_of(y: torch.Tensor) -> tuple[Any, ...]:
    return y.dtype, y.requires_grad, y.is_inference(), y.detach().float().tolist()
