"""Steps that this process records, as the tests of `trace.process_trace` make and read them."""

from __future__ import annotations

from pathlib import Path

from dbo_greenlet import dbo_yield
from dbo_greenlet.trace import StepTrace, read_trace
from dbo_greenlet.trace.process_trace import StepDetails, end_process_trace

__all__ = ["details", "model", "steps"]


def model() -> int:
    for layer in range(2):
        dbo_yield(f"layer{layer}.dispatch")
        dbo_yield(f"layer{layer}.combine")
    return 1


def steps(recorded_to: Path) -> list[StepTrace]:
    end_process_trace()
    (file,) = recorded_to.iterdir()
    return list(read_trace(file).steps.values())


def details(
    *, split: bool = True, tokens: int = 24, voted: tuple[int, int] | None = None, captured: bool = False
) -> StepDetails:
    slices = [[0, 12, 0, 1], [12, 24, 1, 2]] if split else [[0, 24, 0, 2]]
    reason = "split" if split else "idle"
    return StepDetails(3, 8, tokens, 32, split, reason, [[1, 2]], slices, voted, captured)
