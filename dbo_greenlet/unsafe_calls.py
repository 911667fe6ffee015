"""Is there a C++ frame between a yield and the microbatch's entry? (Law 2)

Every `torch.ops` call goes through a pybind11 function, and pybind11 keeps a thread-local stack of the calls that are
under way, which must end last in, first out. Two microbatches parked under such calls on one thread end them in
another order, and pybind11 then aborts the process. This module finds them from the Python frames of a
parked microbatch: the methods of `torch._ops` that call into C++ are known, and where the next inner frame is not the
direct gate of `direct_ops`, the C++ function is in between.

What cannot be seen: a C++ function of another extension, or another bound function of torch, that calls back into
Python. It leaves no Python frame of its own.

Nothing here imports torch; a program without torch has no such frames.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Any

__all__ = ["find_unsafe_call", "note_direct_callee", "note_unsafe_caller"]

# Code objects of Python functions that are called from an operator's `__call__` without C++ between.
_direct_callees: set[CodeType] = set()
# Code objects of functions that call into C++, whatever the next inner frame is.
_always_unsafe: set[CodeType] = set()
# Code objects of methods that call into C++ unless the next inner frame is a direct callee.
_operator_calls: set[CodeType] = set()


def note_direct_callee(code: CodeType) -> None:
    """`code` belongs to a Python function that stands in for an operator's C++ function."""
    _direct_callees.add(code)


def note_unsafe_caller(code: CodeType) -> None:
    """`code` belongs to a Python function that calls an operator's C++ function."""
    _always_unsafe.add(code)


def find_unsafe_call(frame: FrameType | None, stop_frame: FrameType | None = None) -> str | None:
    """The innermost operator call through C++ among `frame` and its callers.

    Args:
        frame: where the yield is: a parked greenlet's `gr_frame`, or a running frame.
        stop_frame: do not look at this frame and those outside of it; None looks to the end, which is the
            microbatch's entry for a parked greenlet.

    Returns:
        The operator's qualified name, for example "vllm::moe_forward" ("aten::add.Tensor" for a named overload), or
        None where there is no such call. About 0.1 us a frame.
    """
    if not _operator_calls and not _learn_torch():
        return None
    operator_calls, always, direct = _operator_calls, _always_unsafe, _direct_callees
    inner: CodeType | None = None
    while frame is not None and frame is not stop_frame:
        code = frame.f_code
        if (code in operator_calls and inner not in direct) or code in always:
            return _operator_name(frame)
        inner = code
        frame = frame.f_back
    return None


def _learn_torch() -> bool:
    """Fill the sets from `torch._ops`, if the program has imported it."""
    ops = sys.modules.get("torch._ops")
    if ops is None:
        return False
    for owner, method in (
        ("OpOverload", "__call__"),
        ("TorchBindOpOverload", "__call__"),
        ("OpOverloadPacket", "__call__"),
    ):
        if (code := _code(getattr(ops, owner, None), method)) is not None:
            _operator_calls.add(code)
    for owner, method in (("OpOverload", "redispatch"), ("OpOverload", "decompose")):
        if (code := _code(getattr(ops, owner, None), method)) is not None:
            _always_unsafe.add(code)
    # These dispatch in Python when an argument is a fake script object.
    for owner, method in (("TorchBindOpOverload", "_dispatch_in_python"), (None, "_call_overload_packet_from_python")):
        if (code := _code(ops if owner is None else getattr(ops, owner, None), method)) is not None:
            _direct_callees.add(code)
    return bool(_operator_calls)


def _code(owner: Any, name: str) -> CodeType | None:
    return getattr(getattr(owner, name, None), "__code__", None)


def _operator_name(frame: FrameType) -> str:
    """What the operator object in the frame calls itself."""
    operator = frame.f_locals.get("self")
    for attribute in ("qualified_name", "_qualified_op_name", "_name"):
        name = getattr(operator, attribute, None)
        if isinstance(name, str):
            return name
    return repr(operator)
