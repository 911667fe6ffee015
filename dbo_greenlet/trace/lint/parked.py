"""A step that is over although a microbatch never came to its end."""

from __future__ import annotations

from .checks import Check, Facts, Looked, StepView
from .findings import Hit, Missing

__all__ = ["Parked"]


class Parked(Check):
    """By the last slice of each microbatch: one that did not return, did not raise and was not unwound is parked.

    In a step that failed siblings are unwound at their yields, which leaves no slice. Then it is the rank that tells:
    one whose trace ends with the failed step, without an end record, neither failed nor went on.
    """

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._last: dict[int, tuple[StepView, list[int]]] = {}  # rank -> its latest step, who is parked in it

    def step(self, view: StepView) -> Looked:
        step = view.step
        self._last.pop(step.rank, None)
        if not view.split or not step.slices:
            return None
        ends = {each.ubatch: each for each in step.slices}
        parked = [index for index, last in sorted(ends.items()) if last.site and not last.failed]
        missing = [index for index in range(step.count) if index not in ends]
        if view.failed:
            if step.record is None and (parked or missing):
                self._last[step.rank] = view, parked + missing
            return []
        if step.record is None:
            return None  # the run died in it, or is still in it
        return [
            *(
                Hit(
                    f"the step is over, without an error, and microbatch {index} is parked at {ends[index].site!r}",
                    view.place(index, ends[index].slice, at=ends[index].end),
                    "parked",
                )
                for index in parked
            ),
            *(
                Hit(f"the step is over without an error, and microbatch {index} never began", view.place(index), "new")
                for index in missing
            ),
        ]

    def end(self) -> list[Hit | Missing]:
        out: list[Hit | Missing] = []
        for rank, (view, parked) in self._last.items():
            if rank in self.facts.ends or self.facts.torn:
                continue
            raised = next(each for each in view.step.slices if each.failed)
            those = " and ".join(map(str, parked))
            out.append(
                Hit(
                    f"microbatch {raised.ubatch} raised in slice {raised.slice}, and there the trace of rank {rank} "
                    f"ends: with microbatch {those} parked the step neither failed nor went on",
                    view.place(raised.ubatch, raised.slice, at=raised.end),
                    "rank",
                )
            )
        return out
