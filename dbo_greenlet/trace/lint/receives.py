"""Receives that never ran, in a step that succeeded."""

from __future__ import annotations

from .checks import Check, Looked, StepView
from .findings import Hit, Missing
from .hazard_checks import NO_SENDS, hits_of

__all__ = ["HooksRun"]


class HooksRun(Check):
    """By the windows that the trace has, and by the sends and receives among its operations."""

    def step(self, view: StepView) -> Looked:
        if not view.split or view.failed or not (view.step.receives or view.has_work):
            return None
        if view.step.record is None:
            return None  # the run died in it, or is still in it
        hits: list[Hit | Missing] = [
            Hit(
                f"what microbatch {each.ubatch} sent before {each.site!r} was never received, and the step is over",
                view.place(each.ubatch, site=each.site, at=each.sent),
                "window",
            )
            for each in view.step.receives
            if each.at is None
        ]
        if view.has_work:
            return hits or [*hits_of(view, "hook-never")]
        return [*hits, Missing(NO_SENDS)]
