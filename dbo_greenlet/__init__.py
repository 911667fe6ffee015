"""Dual batch overlap with greenlets: microbatches of one step, interleaved on one thread.

Names are loaded when they are first used: `import dbo_greenlet` needs nothing but greenlet's import of itself, and only
the parts that work with tensors import torch.
"""

from __future__ import annotations

import importlib
from typing import Any

from ._version import __version__

# Public name -> the module that defines it.
_HOME = {
    "GpuTimeline": "gpu_timeline",
    "InTurn": "policies.in_turn",
    "Pct": "policies.pct",
    "PhaseOffset": "policies.phase_offset",
    "RoundRobin": "policy",
    "Runner": "runner",
    "Scripted": "policy",
    "Schedule": "schedule",
    "Scheduler": "scheduler",
    "SeededRandom": "policies.seeded",
    "StepResult": "scheduler",
    "UBatchContext": "microbatch",
    "make_ubatch_contexts": "microbatch",
    "policy_from_text": "policies.names",
    "register_direct_op": "direct_ops",
    "register_ambient_state": "thread_state",
    "dbo_range": "profiling",
    "dbo_current_ubatch_id": "yields",
    "dbo_enabled": "yields",
    "dbo_get_previous_event": "yields",
    "dbo_maybe_run_recv_hook": "yields",
    "dbo_register_recv_hook": "yields",
    "dbo_switch_to_comm": "yields",
    "dbo_switch_to_comm_sync": "yields",
    "dbo_switch_to_compute": "yields",
    "dbo_switch_to_compute_sync": "yields",
    "dbo_yield": "yields",
    "dbo_yield_and_switch_from_comm_to_compute": "yields",
    "dbo_yield_and_switch_from_compute_to_comm": "yields",
}

_NEEDS_TORCH = {"direct_ops", "profiling", "runner", "thread_state"}

# `from dbo_greenlet import *` must work where greenlet is all there is.
__all__ = ["__version__", *(name for name, home in _HOME.items() if home not in _NEEDS_TORCH)]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'dbo_greenlet' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({"__version__", *_HOME})
