"""Two microbatches ran, and next to nothing of their communication is hidden."""

from __future__ import annotations

from dataclasses import dataclass

from ..gpu_busy import common, length, united
from .checks import Check, Facts, Looked, StepView
from .findings import Hit, Missing, Place

__all__ = ["LEAST_HIDDEN", "NoOverlap"]

LEAST_HIDDEN = 0.05
"""A run that hides less than this share of its communication does not overlap."""

ONLY_ORDER = "that another microbatch ran meanwhile is all that is known; how much that hid, only a profile says"
AT_MOST = "waits inside receives count as compute, so what is hidden is known only as a most; a profile says how much"


@dataclass
class _Run:
    place: Place
    communication: float = 0.0  # microseconds, by GPU times
    hidden: float = 0.0
    windows: int = 0  # by the order of slices
    behind_siblings: int = 0  # of these, how many a sibling's slice runs in
    untimed: bool = False  # whether windows are all that is known of some step
    at_most: bool = False  # whether `hidden` has receives in it, whose own waits count as compute


class NoOverlap(Check):
    """Of a run of one rank as a whole: by GPU times where there are any, else by who ran while bytes were in flight.

    The order of slices on the host says whether anything could be hidden, not whether it was. Times of a compute stream
    with receives in it say what was hidden at most.
    """

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._runs: dict[tuple[str, int], _Run] = {}

    def step(self, view: StepView) -> Looked:
        step = view.step
        if not view.split or view.failed or not (step.slices or step.gpu):
            return None
        windows = _windows(view)
        times = _times(view)
        if not windows and times is None:
            return None
        run = self._runs.setdefault((step.run, step.rank), _Run(view.place()))
        run.windows += len(windows)
        run.behind_siblings += sum(windows)
        if times is not None:
            communication, hidden = times
            run.communication += communication
            run.hidden += hidden
            run.at_most |= not any(each.stream == "comm" for each in step.gpu)
        else:
            run.untimed = True
        return []

    def end(self) -> list[Hit | Missing]:
        out: list[Hit | Missing] = []
        for (name, rank), run in self._runs.items():
            behind = run.behind_siblings / run.windows if run.windows else 1.0
            if behind < LEAST_HIDDEN:
                what = (
                    f"in {run.windows - run.behind_siblings} of {run.windows} windows of run {name} on rank {rank} no "
                    "sibling ran between the send and its receive"
                )
                remedy = "let another microbatch run in between: round robin does, one after the other never can"
                out.append(Hit(what, run.place, (name, "order"), remedy))
            elif run.communication and run.hidden < LEAST_HIDDEN * run.communication:
                what = (
                    f"of {run.communication / 1000:.3f} ms of communication in run {name} on rank {rank} compute hides "
                    f"{100 * run.hidden / run.communication:.1f} %"
                )
                out.append(Hit(what, run.place, (name, "times")))
            elif run.untimed or run.at_most:
                out.append(Missing(ONLY_ORDER if run.untimed else AT_MOST))
        return out


def _windows(view: StepView) -> list[bool]:
    """Of each stretch from a send to its receive, whether a sibling ran in it."""
    step = view.step
    if step.receives:
        return [
            each.by is not None
            or any(s.ubatch != each.ubatch for s in step.slices[each.sent_decision + 1 : each.decision])
            for each in step.receives
            if each.decision is not None and each.sent_decision is not None
        ]
    # Without hooks a microbatch is in flight, or about to be, from its yield until it is resumed.
    last: dict[int, int] = {}
    out = []
    for place, each in enumerate(step.slices):
        if each.ubatch in last:
            out.append(place - last[each.ubatch] > 1)
        last[each.ubatch] = place
    return out


def _times(view: StepView) -> tuple[float, float] | None:
    """(communication, the part of it that compute hides) in microseconds, by the GPU's times; None without any.

    Communication is where the comm stream works, and where nothing ever runs there, from the end of the slice that
    sends to the end of the one in which a sibling receives it (its begin, where no sibling did). Waits are not work.
    """
    step = view.step
    compute = {(each.ubatch, each.slice): each for each in step.gpu if each.stream == "compute"}
    if not compute:
        return None
    spans = [(each.begin + each.waited, each.end) for each in step.gpu if each.stream == "comm"]
    if not spans:
        for each in step.receives:
            sent, ran = (
                None if at is None or at >= len(step.slices) else step.slices[at]
                for at in (each.sent_decision, each.decision)
            )
            if sent is None or ran is None:
                continue
            begin, end = compute.get((sent.ubatch, sent.slice)), compute.get((ran.ubatch, ran.slice))
            if begin is not None and end is not None:
                spans.append((begin.end, end.begin + end.waited if each.by is None else end.end))
    if not spans:
        return None
    communication = united(spans)
    computed = united((each.begin + each.waited, each.end) for each in compute.values())
    return length(communication), length(common(communication, computed))
