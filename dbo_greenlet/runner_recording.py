"""What a runner tells the trace of its process about the step that it runs (`trace.process_trace`).

Imported where a trace is asked for, and only then: the trace is no part of the runner.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from .trace.recorded_step import StepDetails, goes_into_a_graph

if TYPE_CHECKING:
    from .batching import Decision, StepInput, UBatchSlice
    from .devices import Device
    from .rank_failures import RankLink
    from .trace.process_trace import ProcessTrace

__all__ = ["recorded"]


def recorded(
    recording: ProcessTrace,
    step: StepInput,
    slices: Sequence[UBatchSlice],
    decision: Decision | None,
    *,
    group: RankLink | None,
    device: Device,
    voted: tuple[int, int] | None,
) -> AbstractContextManager[None]:
    """What to run the step in.

    Args:
        step: as it runs, with its padding.
        slices: of its microbatches; () where it is not split.
        decision: what the vote came to; None for a step that is captured, or warms up for that.
        group, device: the runner's.
        voted: nanoseconds around the vote.
    """
    captured = decision is None and goes_into_a_graph(device)
    if decision is None and not captured:
        return recording.describe(None)
    bounds = [
        [each.token_slice.start, each.token_slice.stop, each.request_slice.start, each.request_slice.stop]
        for each in slices
    ]
    details = StepDetails(
        rank=None if group is None else group.rank,
        world=None if group is None else group.world_size,
        tokens=step.num_tokens,
        padded=step.num_padded_tokens,
        split=bool(slices),
        reason="" if decision is None else str(decision.reason),
        votes=[] if decision is None else [vote.to_row().tolist() for vote in decision.votes],
        slices=bounds or [[0, step.num_padded_tokens, 0, step.num_padded_requests]],
        voted=None if decision is None else voted,
        captured=captured,
    )
    if slices:
        return recording.describe(details)
    # A GPU is still at work when the host has enqueued the step, and waiting for it would change the run.
    return recording.unsplit(details, timed=device.name == "cpu")
