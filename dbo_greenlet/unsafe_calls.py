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

# By the identity of code objects, because hashing one walks its names and constants, and this runs for every frame.
_kept: list[CodeType] = []
# Functions that call an operator's C++ function: True whatever they call next, False unless that is a direct callee.
_callers: dict[int, bool] = {}
# Python functions that an operator's `__call__` calls without C++ in between.
_direct_callees: set[int] = set()


def note_direct_callee(code: CodeType) -> None:
    """`code` belongs to a Python function that stands in for an operator's C++ function."""
    _kept.append(code)
    _direct_callees.add(id(code))


def note_unsafe_caller(code: CodeType, always: bool = True) -> None:
    """`code` is that of a Python function that calls an operator's C++ function: `always`, or unless stood in for."""
    _kept.append(code)
    _callers[id(code)] = always


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
    if not _torch_known and not _learn_torch():
        return None
    callers, direct = _callers, _direct_callees
    inner = 0
    while frame is not None and frame is not stop_frame:
        code = id(frame.f_code)
        if code in callers and (callers[code] or inner not in direct):
            return _operator_name(frame)
        inner = code
        frame = frame.f_back
    return None


_torch_known = False


def _learn_torch() -> bool:
    """Look up the functions of `torch._ops` that matter, if the program has imported it."""
    global _torch_known
    ops = sys.modules.get("torch._ops")
    overload, packet = getattr(ops, "OpOverload", None), getattr(ops, "OpOverloadPacket", None)
    if overload is None or packet is None:
        return False
    script_object = getattr(ops, "TorchBindOpOverload", None)
    for owner, method, always in (
        (overload, "__call__", False),
        (packet, "__call__", False),
        (script_object, "__call__", False),
        (overload, "redispatch", True),
        (overload, "decompose", True),
    ):
        if (code := _code(owner, method)) is not None:
            note_unsafe_caller(code, always)
    # These dispatch in Python, where an argument is a fake script object.
    for owner, method in ((script_object, "_dispatch_in_python"), (ops, "_call_overload_packet_from_python")):
        if (code := _code(owner, method)) is not None:
            note_direct_callee(code)
    _torch_known = True
    return True


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
