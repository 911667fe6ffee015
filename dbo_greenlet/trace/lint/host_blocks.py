"""The host waits for the GPU while no sibling's work is queued there, so the GPU runs dry.

A high-throughput dispatch makes the host wait for its counts. That costs nothing as long as a sibling's compute was
enqueued before: the GPU works on it meanwhile. Where the dispatch comes before the sibling's turn, or in the slice of
the microbatch's own compute, nothing is left to run but what the host waits for.
"""

from __future__ import annotations

from .checks import WORK, Check, Looked, StepView
from .findings import Hit, Missing
from .hazard_checks import NO_OPS
from .programs import PRIMARY

__all__ = ["HostBlocks"]

NO_WAITS = "needs op records of what was enqueued and of the host's waits (`dbo-greenlet record --memory`)"


class HostBlocks(Check):
    """By the host's waits among the operations. On a CPU the host is what computes, and waits for nothing."""

    def step(self, view: StepView) -> Looked:
        if not view.split or view.failed:
            return None
        if self.facts.setting(view.step.rank, "device") == "cpu":
            return None
        if not view.ops:
            return Missing(NO_OPS)
        if not view.has_work:
            return Missing(NO_WAITS)
        last_slice = {each.ubatch: each.slice for each in view.step.slices}
        at: dict[int, int] = {}  # microbatch -> its slice that began last
        latest: dict[int, int] = {}  # microbatch -> its last work on the primary stream
        hits = []
        for op in view.ops:
            if op.ubatch is None:
                continue
            if op.slice is not None:
                at[op.ubatch] = op.slice
            owner = op.ubatch if op.owner is None else op.owner
            if op.op in WORK and op.stream == PRIMARY:
                latest[owner] = op.number
            if op.op != "host_wait":
                continue
            # A sibling may run the dispatch: what is to be computed meanwhile is anything but the owner's.
            running = [index for index, last in last_slice.items() if index != owner and at.get(index, -1) < last]
            own = latest.get(owner, -1)
            if running and not any(number > own for index, number in latest.items() if index != owner):
                whose = " and ".join(map(str, running))
                what = (
                    f"the host waits at #{op.number} ({op.name}) for {op.stream or 'every stream'}, and behind "
                    f"microbatch {owner}'s own work nothing of microbatch {whose} is queued on {PRIMARY}"
                )
                place = view.place(op.ubatch, op.slice, operation=op.number, at=op.at)
                hits.append(Hit(what, place, (op.name, op.stream)))
        return hits
