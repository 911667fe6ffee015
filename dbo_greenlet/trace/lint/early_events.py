"""Events that are recorded after a switch: the stream that waits for one waits for the sibling's work, too.

vLLM's DeepEP high-throughput path captured its event behind the yield: correct, without overlap, and found by looking
at a picture. Where the trace says what was enqueued, the search for hazards finds it for certain: the sibling's work
stands between the event and what the microbatch itself enqueued last. Where it has the events alone, what is left is
the time: an event that is recorded so early in its slice that nothing can have been launched before it marks nothing of
this slice, and the slices of siblings that ran since the microbatch's last one are before it.

An event that `dbo_get_previous_event` captures takes longer, and its wait is inside a library. There the slice has to
begin on another stream as well: where the first that it does is to make the comm stream wait, it has no work of its own
on the compute stream yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .checks import Check, Looked, StepView
from .findings import Hit, Missing
from .hazard_checks import NO_OPS, hits_of, without_numbers

if TYPE_CHECKING:
    from ..schema import OpRecord

__all__ = ["CAPTURED_US", "TOO_SHORT_US", "EarlyEvents"]

# What torch takes to launch a kernel, at least; from the begin of a slice to its first line it is 1 to 4 us.
TOO_SHORT_US = 5.0
# From the begin of a slice to the event that a library captures in its first line, and of that the part behind the wait
# that the slice began with: launching a kernel takes longer than the call that captures.
CAPTURED_US = 30.0
BEHIND_WAIT_US = 12.0
CAPTURED = "previous_event"
ONLY_EVENTS = (
    "needs op records of what was enqueued (`dbo-greenlet record --memory`); without, only events were looked at that "
    f"are recorded within {TOO_SHORT_US:g} us of their slice's begin"
)


class EarlyEvents(Check):
    """By hazards where the trace has work, by time where it has events only."""

    def step(self, view: StepView) -> Looked:
        if not view.split:
            return None
        if not view.ops:
            return Missing(NO_OPS)
        if view.has_work:
            return [] if view.failed else hits_of(view, "event-after-switch")
        return [*_by_time(view), Missing(ONLY_EVENTS)]


def _by_time(view: StepView) -> Iterator[Hit]:
    begins = {(each.ubatch, each.slice): each.begin for each in view.step.slices}
    order = {(each.ubatch, each.slice): place for place, each in enumerate(view.step.slices)}
    waited = {each.of: each for each in reversed(view.ops) if each.op == "wait" and each.of is not None}
    first: dict[tuple[int, int], OpRecord] = {}  # of each slice
    for op in view.ops:
        if op.ubatch is None or op.slice is None:
            continue
        key = (op.ubatch, op.slice)
        begin = begins.get(key)
        began = first.setdefault(key, op)
        if op.op != "record" or op.at is None or begin is None:
            continue
        waiting = _who_waits(op, op.at - begin, began, waited.get(op.number))
        before, here = order.get((op.ubatch, op.slice - 1)), order[key]
        siblings = [] if before is None else view.step.slices[before + 1 : here]
        if waiting and siblings:
            yield _hit(view, op, waiting, op.at - begin, sorted({each.ubatch for each in siblings}))


def _who_waits(op: OpRecord, after: float, began: OpRecord, wait: OpRecord | None) -> str:
    """Who waits for an event that marks nothing of its slice, `after` us into it; "" where nobody does, or it may."""
    if wait is not None:
        theirs = wait.stream == op.stream or wait.ubatch != op.ubatch
        return "" if theirs or after > TOO_SHORT_US else f"{wait.stream} (#{wait.number})"
    if op.name != CAPTURED or op.at is None or began.at is None or after > CAPTURED_US:
        return ""
    elsewhere = began.op == "wait" and began.stream != op.stream
    return "the library" if elsewhere and op.at - began.at <= BEHIND_WAIT_US else ""


def _hit(view: StepView, op: OpRecord, waiting: str, after: float, siblings: list[int]) -> Hit:
    whose = " and ".join(map(str, siblings))
    what = f"#{op.number} records an event on {op.stream} {after:.1f} us after the slice began, "
    if op.name == CAPTURED:
        what += f"so early that it may well mark nothing of this slice; {waiting} then "
    else:
        what += f"too early for work of its own, so {waiting} "
    what += f"waits for what microbatch {whose} enqueued since the yield"
    place = view.place(op.ubatch, op.slice, operation=op.number, at=op.at)
    return Hit(what, place, (op.stream, op.name, without_numbers(place.site)))
