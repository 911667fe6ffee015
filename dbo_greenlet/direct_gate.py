"""The gate: what stands in for an operator's C++ function while a step runs (why and when: `direct_ops`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._guards import CompileContext
from torch._library.utils import handle_dispatch_mode
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._python_dispatch import _pop_mode_temporarily

from .unsafe_calls import note_direct_callee, note_unsafe_caller

__all__ = ["Gate"]

_is_compiling = torch.compiler.is_compiling
_is_function_mode = torch._C._is_torch_function_mode_enabled
_is_grad_enabled = torch.is_grad_enabled
_dispatch_depth = torch._C._len_torch_dispatch_stack
_dispatch_at = torch._C._get_dispatch_stack_at
_include_set = torch._C._dispatch_tls_local_include_set
_exclude_set = torch._C._dispatch_tls_local_exclude_set
_below_autograd = torch._C._AutoDispatchBelowAutograd
_KeySetGuard = torch._C._ForceDispatchKeyGuard
_PYTHON = torch._C.DispatchKey.Python
# All keys that have their turn before the modes, but for the one that remembers the key sets for them: code that starts
# a mode of its own (a compiler with its fake tensors) is refused by torch where that key had no turn.
_BEFORE_MODES = (
    (torch._C._dispatch_keyset_full() - torch._C._dispatch_keyset_full_after(_PYTHON))
    .remove(_PYTHON)
    .remove(torch._C.DispatchKey.PythonTLSSnapshot)
)


class Gate:
    """Stands in for `_op` of one operator object: of a packet, or of its one overload.

    Args:
        operator: the packet or the overload.
        overload: the overload, which is what dispatch modes are shown.
        implementation: the Python function to call directly.
        enabled: whether the calling thread runs a microbatch.
    """

    __slots__ = ("_composite", "_enabled", "_hash", "_implementation", "_opaque", "_operator", "_overload", "original")

    def __init__(
        self, operator: Any, overload: Any, implementation: Callable[..., Any], enabled: Callable[[], bool]
    ) -> None:
        self._operator = operator
        self._overload = overload
        self._implementation = implementation
        self._enabled = enabled
        # An operator whose gradient is that of its parts.
        self._composite = _has_kernel(overload, "CompositeImplicitAutograd")
        # An operator with an autograd kernel, as torch.library.custom_op makes one, records no graph of its parts. One
        # with neither runs its parts in whatever grad mode is on, as long as no argument requires grad.
        self._opaque = not self._composite and any(_has_kernel(overload, key) for key in _AUTOGRAD_KEYS)
        self.original: Any = None
        self._hash = 0

    def put_in(self) -> None:
        # Read anew each time: torch gives a packet another function when an overload or a kernel is added.
        self.original = self._operator._op
        self._hash = hash(self.original)
        self._operator._op = self

    def take_out(self) -> None:
        if self._operator._op is self:
            self._operator._op = self.original

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if not self._enabled() or (_is_compiling() and _compiles_here()):
            return self.through_dispatcher(args, kwargs)
        if _is_function_mode() or has_torch_function(args) or (kwargs and has_torch_function(tuple(kwargs.values()))):
            # What the C++ function does first of all. The mode or subclass then calls the operator again.
            return handle_torch_function(self._operator, (*args, *kwargs.values()), *args, **kwargs)
        grad = _is_grad_enabled() and not self._composite
        if grad and (_requires_grad(args) or _requires_grad(kwargs.values())):
            return self.through_dispatcher(args, kwargs)
        if _dispatch_depth():
            return self._under_dispatch_modes(args, kwargs)
        if grad and self._opaque:
            with _below_autograd():
                return self._implementation(*args, **kwargs)
        return self._implementation(*args, **kwargs)

    def _under_dispatch_modes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Show the call to the innermost mode, as the dispatcher would; the mode then calls the operator again."""
        modes = [_dispatch_at(i) for i in range(_dispatch_depth())]
        exclude = _exclude_set()
        # Infrastructure modes are those that trace: fake tensors, proxies, functionalization.
        if self._composite or exclude.has(_PYTHON) or any(mode.is_infra_mode() for mode in modes):
            return self.through_dispatcher(args, kwargs)
        # A mode handles a call with everything off that has its turn before it: autograd, autocast, ...
        with _pop_mode_temporarily() as mode, _KeySetGuard(_include_set(), exclude | _BEFORE_MODES):
            result = handle_dispatch_mode(mode, self._overload, *args, **kwargs)
        if result is NotImplemented:
            return self.through_dispatcher(args, kwargs)
        return result

    def through_dispatcher(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call as it is without the gate. A method of its own: its frame tells it from a direct call."""
        return self.original(*args, **kwargs)

    @property
    def qualified_name(self) -> str:
        name: str = self._overload.name()
        return name

    def __hash__(self) -> int:
        return self._hash

    def __getattr__(self, name: str) -> Any:
        # A packet answers questions about dunder names with its `_op`'s.
        return getattr(self.original, name)


def _compiles_here() -> bool:
    """Whether it is this thread that compiles. `is_compiling` is told by a flag of the whole process."""
    return CompileContext.try_get() is not None or bool(getattr(torch.compiler, "_is_exporting_flag", False))


note_direct_callee(Gate.__call__.__code__)
note_unsafe_caller(Gate.through_dispatcher.__code__)


_AUTOGRAD_KEYS = ("Autograd", "AutogradCPU", "AutogradCUDA")


def _has_kernel(overload: Any, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), key)


def _requires_grad(values: Any) -> bool:
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                return True
        elif isinstance(value, (list, tuple)) and _requires_grad(value):
            return True
    return False
