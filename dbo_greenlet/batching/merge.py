"""The step's output out of its microbatches' outputs: every tensor in them concatenated along its token dimension.

A model returns hidden states, or those with auxiliary hidden states beside them, or a dict of tensors for the next
pipeline rank; so the containers are walked and rebuilt, and only the tensors are joined. The microbatches ran the same
code on different tokens: whatever differs between their outputs apart from the token count is a fault of the model
code, and is said to be one. `torch.cat` alone would promote a differing dtype without a word, and `zip` would drop an
output that only one microbatch has.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from dbo_greenlet.batching.slices import BatchError, UBatchSlice

__all__ = ["merge_outputs"]

Output = TypeVar("Output")


def merge_outputs(outputs: Sequence[Output], slices: Sequence[UBatchSlice] | None = None) -> Output:
    """Join the outputs of the microbatches, in order, into what the unsplit step would return.

    Args:
        outputs: one per microbatch: a tensor [P_i, ...], or None, a tuple (also a named one), list or dict of such, or
            an object with a dict attribute `tensors` and a constructor that takes it (vLLM's IntermediateTensors),
            nested as deep as you like.
        slices: the slices the microbatches ran on; given, every tensor must have its microbatch's tokens as rows.

    Returns:
        The same structure with tensors [sum of P_i, ...]. A single output comes back as it is, without a copy.

    Raises:
        BatchError: no outputs, or outputs that differ in anything but the number of rows; the message names the part of
            the output and the microbatch that differs from microbatch 0.
    """
    if not outputs:
        raise BatchError("there are no microbatch outputs to merge")
    if slices is not None and len(slices) != len(outputs):
        raise BatchError(f"{len(outputs)} outputs for {len(slices)} microbatches")
    rows = None if slices is None else [s.num_tokens for s in slices]
    merged: Output = _merge(list(outputs), rows, "output")
    return merged


def _merge(parts: list[Any], rows: list[int] | None, path: str) -> Any:
    first = parts[0]
    if isinstance(first, Tensor):
        return _merge_tensors(parts, rows, path)
    _require_same([type(part) for part in parts], path, "is a", lambda kind: kind.__name__)
    if first is None:
        return None
    if isinstance(first, (tuple, list)):
        _require_same([len(part) for part in parts], path, "has length")
        items = [_merge([part[i] for part in parts], rows, f"{path}[{i}]") for i in range(len(first))]
        if hasattr(first, "_fields"):  # a named tuple takes its fields one by one
            return type(first)(*items)
        return type(first)(items)
    if isinstance(first, dict):
        # A shallow copy keeps what a subclass holds beside its items (a default factory, an order).
        result = copy.copy(first)
        result.update(_merge_dicts(parts, rows, path))
        return result
    tensors = getattr(first, "tensors", None)
    if isinstance(tensors, dict):
        return type(first)(_merge_dicts([part.tensors for part in parts], rows, f"{path}.tensors"))
    raise BatchError(
        f"{path} is a {type(first).__name__}, which cannot be merged; return tensors, or tuples, lists or dicts of them"
    )


def _merge_dicts(parts: list[dict[Any, Any]], rows: list[int] | None, path: str) -> dict[Any, Any]:
    _require_same([set(part) for part in parts], path, "has keys", lambda keys: str(sorted(map(str, keys))))
    return {key: _merge([part[key] for part in parts], rows, f"{path}[{key!r}]") for key in parts[0]}


def _merge_tensors(parts: list[Any], rows: list[int] | None, path: str) -> Tensor:
    _require_same([isinstance(part, Tensor) for part in parts], path, "is a tensor:")
    _require_same([part.dtype for part in parts], path, "has dtype")
    _require_same([part.device for part in parts], path, "is on device")
    for index, part in enumerate(parts):
        if part.ndim == 0:
            raise BatchError(f"{path} of microbatch {index} is a scalar tensor; its first dimension must be tokens")
        if rows is not None and part.shape[0] != rows[index]:
            raise BatchError(
                f"{path} of microbatch {index} has {part.shape[0]} rows, but the microbatch ran on {rows[index]} tokens"
            )
    _require_same([tuple(part.shape[1:]) for part in parts], path, "has, behind the tokens, shape")
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=0)


def _require_same(values: list[Any], path: str, verb: str, show: Any = str) -> None:
    for index, value in enumerate(values):
        if value != values[0]:
            raise BatchError(
                f"the microbatches' outputs do not fit together: {path} of microbatch {index} {verb} {show(value)}, "
                f"that of microbatch 0 {verb} {show(values[0])}"
            )
