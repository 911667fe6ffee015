"""What a step of the runner gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .batching import Decision, UBatchSlice
from .schedule import Schedule

__all__ = ["StepOutput", "first_rows"]


@dataclass(frozen=True)
class StepOutput:
    """What a step gave.

    Attributes:
        output: what the model returns, with as many rows as the batch that came in; None where no rank had a token.
            Of a replayed step it is valid until the next replay.
        decision: split or not, with the reason, and the votes.
        slices: the cut, one per microbatch; () where the step was not split.
        schedule: the scheduler's decisions; None where there were none to take (not split, or one after the other).
            A replayed step has those of its capture.
        execution: "eager", or "replayed" from a graph.
        timeline: where the runner has a `GpuTimeline`, and the step was split: `StepEvents` with its GPU times, which
            they hold until the next step of the same graph (or, eager, the next step).
        tokens: what this rank ran, padding included.
    """

    output: Any
    decision: Decision
    slices: tuple[UBatchSlice, ...] = ()
    schedule: Schedule | None = None
    execution: str = "eager"
    timeline: Any = None
    tokens: int = 0

    @property
    def yields(self) -> tuple[int, ...]:
        """Number of yields of each microbatch."""
        return () if self.schedule is None else self.schedule.yields


def first_rows(output: Any, rows: int) -> Any:
    """The output without the rows of the padding that the ranks agreed on: views, in the same containers."""
    if isinstance(output, Tensor):
        return output[:rows]
    if isinstance(output, dict):
        return {key: first_rows(value, rows) for key, value in output.items()}
    if isinstance(output, (tuple, list)):
        items = [first_rows(item, rows) for item in output]
        return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
    if isinstance(tensors := getattr(output, "tensors", None), dict):
        return type(output)(first_rows(tensors, rows))
    return output
