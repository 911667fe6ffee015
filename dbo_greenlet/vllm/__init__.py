"""The drop-in for vLLM: its own microbatches, run as greenlets instead of threads.

Nothing has to be called: vLLM loads the plugin (`plugin.register`) of an installed package by itself. `step_counts()`
says, in a worker's process, what happened so far.
"""

from __future__ import annotations

from typing import Any

__all__ = ["step_counts"]


def step_counts() -> dict[str, Any]:
    """Counts of this process: {"executed": {how: steps}, "split": {reason: decisions}, "unsplit": {reason: decisions}}.

    `executed` has "eager", "captured" (into a CUDA graph), "replayed" (from one) and "failed". The reasons are those of
    `batching.vote.Reason`.
    """
    from .counters import counters

    return counters.snapshot()
