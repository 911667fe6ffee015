"""One checksum over whatever a microbatch returns, equal only where the bits are."""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["checksum"]


def checksum(value: Any) -> str:
    """Sixteen hex characters (BLAKE2b) over `value`.

    Tensors count with dtype, shape and bytes, numpy arrays too; lists, tuples, mappings (in their order), sets (in no
    order) and dataclasses by their parts; everything else by its type and `repr`, so an object whose `repr` shows its
    address has another checksum in every run.
    """
    digest = hashlib.blake2b(digest_size=8)
    _add(digest, value)
    return digest.hexdigest()


# What most parts are; nothing below takes them for anything else.
_PLAIN = frozenset((type(None), bool, int, float, str, bytes))


def _add(digest: Any, value: Any) -> None:
    if type(value) in _PLAIN:
        digest.update(f"{type(value).__qualname__} {value!r};".encode())
        return
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        flat = value.detach().to("cpu").contiguous()
        digest.update(f"tensor {flat.dtype} {tuple(flat.shape)};".encode())
        # As bytes: numpy has no bfloat16.
        digest.update(flat.reshape(-1).view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    elif isinstance(value, (list, tuple)):
        digest.update(f"{type(value).__name__} {len(value)};".encode())
        for each in value:
            _add(digest, each)
    elif isinstance(value, (set, frozenset)):
        # Two equal sets may list their elements in different orders.
        digest.update(f"{type(value).__name__} {len(value)} {sorted(map(checksum, value))};".encode())
    elif isinstance(value, Mapping):
        digest.update(f"mapping {len(value)};".encode())
        for key, each in value.items():
            _add(digest, key)
            _add(digest, each)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        digest.update(f"{type(value).__qualname__};".encode())
        for part in dataclasses.fields(value):
            digest.update(f"{part.name}=".encode())
            _add(digest, getattr(value, part.name))
    elif type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        digest.update(f"array {value.dtype} {value.shape};".encode())
        if value.dtype.hasobject:
            _add(digest, value.tolist())  # its bytes are addresses
        else:
            digest.update(value.tobytes())
    else:
        digest.update(f"{type(value).__qualname__} {value!r};".encode())
