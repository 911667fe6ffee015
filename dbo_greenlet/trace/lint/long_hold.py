"""One microbatch keeps the thread so long that the GPU has nothing left to run.

How long is long? A slice is compared with itself in other steps of the same kind, since a first slice (embedding, dense
layers) may well take ten times what the others take; and with its step, of which it must not be the larger part. The
first step of each kind is left out: it loads kernels and libraries.
"""

from __future__ import annotations

import heapq
from array import array
from statistics import median

from .checks import Check, Facts, Looked, StepView
from .findings import Hit, Missing, Place

__all__ = ["DRAINED_US", "HOLD_US", "SHARE", "TIMES", "LongHolds"]

HOLD_US = 1000.0
"""A slice that takes the host less is no long one."""
TIMES = 10.0
"""It is one at this many times the median of the same slice in other steps."""
SHARE = 0.5
"""It is one at this share of a step with four slices or more."""
DRAINED_US = 100.0
"""The GPU comes to the end of a slice at most this much behind the host: it had nothing queued."""

NO_GPU = (
    "needs GPU times of eager steps (run --gpu-timeline, record --gpu): whether the GPU's queue ran dry is not known"
)
_KEPT = 1000  # of the longest slices of a kind, that are remembered until their median is known

# (run, rank, reason of the split, microbatch, slice)
_Kind = tuple[str, int, str, int, int]


class LongHolds(Check):
    """By slices on the host and the GPU's times of the same slices."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._begun: set[tuple[str, int, str]] = set()
        self._took: dict[_Kind, array[float]] = {}
        self._longest: dict[_Kind, list[tuple[float, int, Place]]] = {}
        self._count = 0

    def step(self, view: StepView) -> Looked:
        step = view.step
        if not view.split or view.failed or not step.slices:
            return None
        ends = {(each.ubatch, each.slice): each for each in step.gpu if each.stream == "compute"}
        if not ends:
            return Missing(NO_GPU)
        reason = "" if step.record is None else step.record.reason
        if (step.run, step.rank, reason) not in self._begun:
            self._begun.add((step.run, step.rank, reason))
            return None
        whole = sum(each.end - each.begin for each in step.slices)
        hits = []
        for each in step.slices:
            took = each.end - each.begin
            kind = (step.run, step.rank, reason, each.ubatch, each.slice)
            self._took.setdefault(kind, array("d")).append(took)
            gpu = ends.get((each.ubatch, each.slice))
            if took < HOLD_US or gpu is None or gpu.end - each.end > DRAINED_US + gpu.error:
                continue
            place = view.place(each.ubatch, each.slice, at=each.begin)
            if len(step.slices) >= 4 and took >= SHARE * whole:
                hits.append(_hit(took, f"{100 * took / whole:.0f} % of all slices of the step", place))
            else:
                self._remember(kind, took, place)
        return hits

    def _remember(self, kind: _Kind, took: float, place: Place) -> None:
        self._count += 1
        longest = self._longest.setdefault(kind, [])
        heapq.heappush(longest, (took, self._count, place))
        if len(longest) > _KEPT:
            heapq.heappop(longest)

    def end(self) -> list[Hit | Missing]:
        found: list[tuple[int, Hit]] = []
        for kind, longest in self._longest.items():
            usual = max(median(self._took[kind]), 0.001)  # the tick of the clock
            found += [
                (number, _hit(took, f"{took / usual:.0f} times as long as is usual for this slice", place))
                for took, number, place in longest
                if took >= TIMES * usual
            ]
        return [hit for _, hit in sorted(found, key=lambda each: each[0])]


def _hit(took: float, compared: str, place: Place) -> Hit:
    what = (
        f"microbatch {place.microbatch} holds the thread for {took / 1000:.1f} ms in slice {place.slice}, {compared}, "
        "and by then the GPU has run all that was queued"
    )
    return Hit(what, place)
