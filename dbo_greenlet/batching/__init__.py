"""A step's batch: the ranks' vote whether to split it, the cut, the microbatches' inputs, and the merged output.

    decision = decide(votes, settings)              the same on every rank, with a reason either way
    step = pad_step(step, decision.tokens_on(rank))
    slices = split_step(step, decision.num_microbatches)
    inputs = slice_all(step, slices, buffers)       views; offsets and lengths in persistent buffers
    output = merge_outputs(outputs, slices)

Nothing in here communicates: the ranks' votes are exchanged elsewhere and come in as a list.
"""

from __future__ import annotations

from dbo_greenlet.batching.inputs import (
    MicrobatchBuffers,
    StepInput,
    UBatchBuffers,
    check_step,
    idle_step,
    pad_step,
    slice_all,
    slice_step,
)
from dbo_greenlet.batching.merge import merge_outputs
from dbo_greenlet.batching.slices import BatchError, UBatchSlice, cut_points, split_step
from dbo_greenlet.batching.vote import Decision, RankVote, Reason, Veto, VoteSettings, decide

__all__ = [
    "BatchError",
    "Decision",
    "MicrobatchBuffers",
    "RankVote",
    "Reason",
    "StepInput",
    "UBatchBuffers",
    "UBatchSlice",
    "Veto",
    "VoteSettings",
    "check_step",
    "cut_points",
    "decide",
    "idle_step",
    "merge_outputs",
    "pad_step",
    "slice_all",
    "slice_step",
    "split_step",
]
