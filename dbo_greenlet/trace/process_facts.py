"""What a process can find out about itself, for its trace."""

from __future__ import annotations

import os
import sys

__all__ = ["found_rank_and_world", "uncaught"]


def found_rank_and_world() -> tuple[int, int]:
    """What torch.distributed says where it is initialised, else the environment (torchrun), else 0 of 1."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    try:
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        return 0, 1
    return (rank, world) if 0 <= rank < world else (0, 1)


def uncaught() -> str | None:
    """The error that ends the program, which the interpreter keeps once it has printed it.

    In a prompt or a notebook it is one that somebody saw and went on from.
    """
    error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
    return None if error is None else f"{type(error).__name__}: {error}"
