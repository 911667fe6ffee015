"""The steps of a trace that somebody asks to see, without holding the others.

A server's trace is large, and what is asked for is a step of it: reading stops where that is found.
"""

from __future__ import annotations

from collections.abc import Iterable

from .reader import StepTrace, Trace

__all__ = ["choose_steps"]


def choose_steps(
    stream: Iterable[StepTrace],
    path: str,
    *,
    steps: range | None = None,
    run: str | None = None,
    rank: int | None = None,
    last: bool = False,
) -> list[StepTrace]:
    """The steps to show, in the order of their numbers.

    Args:
        stream: the steps of a trace (`StepStream`, `TraceFiles`); read no further than it has to be.
        path: what to call the trace in an error.
        steps: their numbers; of each the first that was recorded. None: the first step that was split, or the first
            one where none was.
        run, rank: only of these.
        last: without `steps`, the last instead of the first; of several ranks' the lowest.

    Raises:
        TraceFileError: there is no such step; the message says which there are.
        whatever iterating over `stream` raises.
    """
    index = Trace(path)  # every step that came by, empty unless it is shown
    numbers: dict[int, StepTrace] = {}
    best: StepTrace | None = None
    for step in stream:
        index.steps[step.run, step.step, step.rank] = StepTrace(step.run, step.step, step.rank)
        if run not in (None, step.run) or rank not in (None, step.rank):
            continue
        if steps is not None:
            if step.step in steps and step.step not in numbers:
                numbers[step.step] = step
                if len(numbers) == len(steps):
                    break
        elif best is None or _is_better(step, best, last):
            best = step
            if not last and _was_split(step):
                break
    if steps is not None:
        if numbers:
            return [numbers[number] for number in sorted(numbers)]
        # Raises: it is none of those that came by, and the message tells what there is.
        return [index.step(steps[0], run=run, rank=rank)]
    return [index.step(0, run=run, rank=rank) if best is None else best]


def _was_split(step: StepTrace) -> bool:
    return bool(step.slices or step.gpu)


def _is_better(step: StepTrace, best: StepTrace, last: bool) -> bool:
    if _was_split(step) != _was_split(best):
        return _was_split(step)
    return last and ((step.run, step.step) != (best.run, best.step) or step.rank < best.rank)
