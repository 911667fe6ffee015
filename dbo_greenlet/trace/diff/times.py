"""The times of one step by stage, as `diff` sets them side by side."""

from __future__ import annotations

from ..notation import is_high_throughput, parse_site
from ..reader import StepTrace

__all__ = ["KINDS", "Times", "times_of"]

# (kind, stage) -> microseconds. A stage is "attention", "experts", "shared", "dispatch", "combine", "out" (what a
# microbatch runs before it returns) or "other" (sites that are no dispatches and combines).
Times = dict[tuple[str, str], float]

# kind -> what it is; the order is the one in which they are shown.
KINDS = {
    "step": "whole steps, on the host",
    "slices": "slices on the host, by what they run",
    "in flight": "windows in flight, each counted whole",
    "compute stream": "slices on the GPU's compute stream, waits included",
    "comm stream": "slices on the GPU's communication stream, waits included",
}
_COMPUTED = {"dispatch": "attention", "before_dispatch": "attention", "before_combine": "experts"}


def times_of(step: StepTrace) -> Times:
    """What the trace measured of a step. Receives that never were complete are left out."""
    times: Times = {}

    def add(kind: str, stage: str, time: float) -> None:
        times[kind, stage] = times.get((kind, stage), 0.0) + time

    record = step.record
    if record is not None and record.begin is not None and record.end is not None:
        add("step", "", record.end - record.begin)
    high_throughput = is_high_throughput(step.sites)
    for each in step.slices:
        add("slices", _computed(each.site, high_throughput), each.end - each.begin)
    for window in step.receives:
        if window.at is not None:
            add("in flight", _carried(window.site), window.at - window.sent)
    for stretch in step.gpu:
        if stretch.stream == "compute":
            add("compute stream", _computed(stretch.site, high_throughput), stretch.end - stretch.begin)
        else:
            add("comm stream", _carried(stretch.after), stretch.end - stretch.begin)
    return times


def _computed(site: str, high_throughput: bool) -> str:
    if not site:
        return "out"
    if (parsed := parse_site(site)) is None:
        return "other"
    return _COMPUTED.get(parsed.stage, "shared" if high_throughput else "experts")


def _carried(site: str) -> str:
    if (parsed := parse_site(site)) is None:
        return "other"
    return "dispatch" if parsed.stage.endswith("dispatch") else "combine"
