"""Microbatches without tokens of their own, or with more requests than tokens."""

from __future__ import annotations

from ...errors import TraceFileError
from .checks import Check, Looked, StepView
from .findings import Hit

__all__ = ["EmptyMicrobatches"]


class EmptyMicrobatches(Check):
    """By the split of the step. A rank that has nothing to do at all takes part with padding, and is none."""

    def step(self, view: StepView) -> Looked:
        record = view.step.record
        if record is None or not record.split or not record.slices or not record.tokens:
            return None
        hits = []
        for index, part in enumerate(record.slices):
            if len(part) != 4:
                raise TraceFileError(
                    f"step {record.step}, run {record.run!r}, rank {record.rank}: the slice of microbatch {index} is "
                    f"{part}, expected [first token, end token, first request, end request]"
                )
            begin, end, first, last = part
            own = max(0, min(end, record.tokens) - begin)
            # Padded steps have padding requests, of which each owns a padding token.
            requests = (min(last, len(record.requests)) if record.requests else last - (end - begin - own)) - first
            if not own:
                padding = f"its {end - begin} are padding: the batch ends at {record.tokens}" if end > begin else "none"
                what = f"microbatch {index} of {len(record.slices)} has no tokens ({padding})"
                hits.append(Hit(what, view.place(index, 0), "empty"))
            elif requests > own:
                what = f"microbatch {index} has {requests} requests and only {own} tokens"
                hits.append(Hit(what, view.place(index, 0), "requests"))
        return hits
