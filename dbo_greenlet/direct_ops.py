"""Calling Python-implemented custom ops without a C++ frame, so that they may contain yields (law 2).

vLLM runs its MoE layer through `torch.ops.vllm.moe_forward`, eagerly and from compiled code, and the yields are below
that call. While a step runs, the registered operators' `_op` attribute, which `OpOverload.__call__` and
`OpOverloadPacket.__call__` look up at call time (compiled code calls these, too), is a gate: a Python object that calls
the implementation directly where the calling thread runs a microbatch and nothing is being traced, and the original C++
function otherwise. Without the second condition a compiler would see through the operator.

The gate is put in at step begin and taken out at step end, and not left in for good: outside a step nothing of this
package should be in the way. No cost there, and TorchScript, which knows an operator by the identity of that attribute,
works. It is two attribute stores an operator. Neither way compiles anything anew; Dynamo does not guard on it. The gate
hashes like the function it stands for, because the hash of an operator is the hash of its `_op`, and operators
are keys of many tables.

What a direct call does as the dispatcher would:

* function modes, and arguments with `__torch_function__`, see the operator (a default device is such a mode);
* dispatch modes see it, unless they trace: then the call is not direct. (The first run of compiled code is under such
  a mode, which looks for outputs that alias inputs.)
* with grad mode on, the implementation of an operator with an autograd kernel (`torch.library.custom_op` gives it one)
  records no graph; a call with an argument that requires grad goes through the dispatcher, since the operator's own
  formula is needed then, and a yield inside raises `UnsafeYieldError`.

What a direct call skips:

* dispatch on the arguments: a tensor subclass with `__torch_dispatch__` reaches the implementation as it is, and where
  there are kernels for several devices one has to be named;
* the check that outputs do not alias inputs, and the operator's own autocast rule (`register_autocast`);
* version counters of mutated arguments, beyond what the implementation's own in-place operators do;
* the operator's entry in a profile.
"""

from __future__ import annotations

import importlib
import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch

from . import yields
from .direct_gate import Gate
from .errors import ConfigurationError
from .unsafe_calls import find_unsafe_call

__all__ = ["DirectOp", "disengage", "engage", "find_unsafe_call", "register_direct_op"]

# Operators whose implementation torch keeps in C++ only, and where the function is to be found: "module:name", or
# several names of which an installed version has one: "module:name|older_name".
KNOWN_IMPLEMENTATIONS = {
    "vllm::moe_forward": "vllm.model_executor.layers.fused_moe.runner.moe_runner:_moe_forward",
    "vllm::moe_forward_shared": "vllm.model_executor.layers.fused_moe.runner.moe_runner:_moe_forward_shared",
    "vllm::transformers_moe_forward": (
        "vllm.model_executor.models.transformers.moe:_transformers_moe_forward|transformers_moe_forward"
    ),
}


class DirectOp:
    """A registered operator; `remove()` takes the registration back."""

    __slots__ = ("_gates", "implementation", "name")

    def __init__(self, name: str, implementation: Callable[..., Any], packet: Any, enabled: Callable[[], bool]) -> None:
        self.name = name
        self.implementation = implementation
        self._gates = [Gate(each, packet.default, implementation, enabled) for each in (packet, packet.default)]

    def put_in(self) -> None:
        for gate in self._gates:
            gate.put_in()

    def take_out(self) -> None:
        for gate in self._gates:
            gate.take_out()

    def remove(self) -> None:
        """The operator is called through the dispatcher again, from now on. Twice is harmless."""
        with _lock:
            if _registered.get(self.name) is self:
                del _registered[self.name]
                if _engaged:
                    self.take_out()

    def __repr__(self) -> str:
        return f"DirectOp({self.name!r}, {self.implementation!r})"


_lock = threading.Lock()
_registered: dict[str, DirectOp] = {}
_engaged = 0


def register_direct_op(
    name: str,
    implementation: Callable[..., Any] | None = None,
    *,
    enabled: Callable[[], bool] = yields.dbo_enabled,
) -> DirectOp:
    """Let an operator that is implemented in Python contain yields: in a step it is called without a C++ frame.

    Registering an operator again replaces its implementation. Outside steps nothing changes; see the module's text for
    what a direct call does and skips.

    Args:
        name: "namespace::name" of an operator with one overload.
        implementation: its Python function. None looks for it: torch knows it for an operator made with
            `torch.library.custom_op`, and vLLM's MoE operators are known by name. Give it for
            `torch.library.Library.impl`.
        enabled: whether the calling thread runs a microbatch; for hosts with a bookkeeping of their own.

    Raises:
        ConfigurationError: there is no such operator, it has several overloads, its implementation was not found, or
            its parameters do not match the operator's schema (a direct call fills in no defaults from the schema).
    """
    packet = _packet(name)
    if implementation is None:
        implementation = _find_implementation(name)
    _check_signature(name, packet.default._schema, implementation)
    op = DirectOp(name, implementation, packet, enabled)
    with _lock:
        previous = _registered.get(name)
        if _engaged:
            if previous is not None:
                previous.take_out()
            op.put_in()
        _registered[name] = op
    return op


def engage() -> bool:
    """A step begins: registered operators are direct until the matching `disengage`. Steps may nest and overlap.

    Returns whether there has to be one: without a registered operator there is nothing to do.
    """
    global _engaged
    if not _registered:
        return False
    with _lock:
        _engaged += 1
        if _engaged == 1:
            for op in _registered.values():
                op.put_in()
    return True


def disengage() -> None:
    """The step ended."""
    global _engaged
    with _lock:
        _engaged -= 1
        if not _engaged:
            for op in _registered.values():
                op.take_out()


def _packet(name: str) -> Any:
    namespace, separator, bare = name.partition("::")
    if not separator or not bare or "." in bare:
        raise ConfigurationError(f"operator name {name!r}: write it as 'namespace::name', without an overload")
    try:
        packet = getattr(getattr(torch.ops, namespace), bare)
    except AttributeError:
        raise ConfigurationError(
            f"there is no operator {name!r} (yet); import the module that defines it before registering it"
        ) from None
    if packet.overloads() != ["default"]:
        raise ConfigurationError(
            f"operator {name!r} has the overloads {packet.overloads()}; only a single one can be direct"
        )
    return packet


def _find_implementation(name: str) -> Callable[..., Any]:
    from torch._library.custom_ops import OPDEFS

    definition = OPDEFS.get(name)
    if definition is not None:
        kernels = [kind for kind in definition._backend_fns if kind is not None]
        if kernels:
            raise ConfigurationError(
                f"operator {name!r} has kernels of its own for {', '.join(kernels)}; "
                "pass the one to call as implementation"
            )
        return definition._init_fn
    if name in KNOWN_IMPLEMENTATIONS:
        module, _, functions = KNOWN_IMPLEMENTATIONS[name].partition(":")
        function = functions.replace("|", " or ")
        try:
            found = importlib.import_module(module)
            return next(getattr(found, each) for each in functions.split("|") if hasattr(found, each))
        except (ImportError, StopIteration) as error:
            raise ConfigurationError(
                f"operator {name!r}: its implementation is not at {module}.{function} in the installed version; "
                "pass it as implementation"
            ) from error
    raise ConfigurationError(
        f"operator {name!r}: torch does not tell its Python implementation; pass it as implementation"
    )


def _check_signature(name: str, schema: Any, implementation: Callable[..., Any]) -> None:
    """Whatever the dispatcher accepts, the implementation must accept."""
    try:
        parameters = inspect.signature(implementation).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"operator {name!r}: {implementation!r} is not a Python function") from error
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return
    found = [(p.name, p.default is not p.empty) for p in parameters]
    wanted = [(a.name, a.has_default_value()) for a in schema.arguments]
    fits = len(found) == len(wanted) and all(
        f_name == w_name and (f_default or not w_default)
        for (f_name, f_default), (w_name, w_default) in zip(found, wanted, strict=True)
    )
    if not fits:
        called = getattr(implementation, "__qualname__", repr(implementation))
        raise ConfigurationError(
            f"operator {name!r} is {schema}, but its implementation {called} takes "
            f"{inspect.signature(implementation)}; names, order and defaults must be the same"
        )
