"""What the path graphs of our own steps cannot know, as sentences."""

from __future__ import annotations

from collections.abc import Mapping

from .steps import StepGraph

__all__ = ["not_known", "notes_of"]

_ON_GPU = (
    "Stretches of the GPU with a receive in them: {count}. How much of each is its own work and how much the wait for "
    "what is in flight, the trace does not say, so gains are ranges. On the path is the work, or the flight where the "
    "stretch took more than twice as long as the step's shortest of its stage."
)
_ON_HOST = (
    "Receives on the host: {count}. How much of each is waiting and how much the slice's work the trace does not say, "
    "so gains are ranges. On the path is the work, or the flight where the begin of the receive was recorded "
    "(`dbo-greenlet record --memory`)."
)
_LATE_RANKS = "A flight lasts until its receive is complete; a wait for a rank that is late is part of it."
_REPLAYED = (
    "Steps that were replayed from their graphs: {count}. Gaps between the kernels of a slice are part of it{receives}."
)
_OTHERS = {
    "launching": "Stretches that began while the host was still launching them: {count}. The stream may have stood "
    "still inside, so gains are ranges. A profile shows the kernels.",
    "host_waits": "Slices in which the host may have waited for the GPU, as it does for the counts of a "
    "high-throughput dispatch: {count}. On the path it is launching.",
    "unseen_waits": "Waits of a stream that nothing in the trace explains: {count}. They are idle time.",
    "waits_unknown": "Steps whose waits that took no time are not known, as no operations were recorded: {count}. What "
    "they would hold up is missing: gains are at most these.",
    "launched": "Steps without times of the GPU, in which the host only launches: {count}. This is the host's path, "
    "and what the GPU did meanwhile is not known.",
}


def not_known(graph: StepGraph, computes: bool) -> dict[str, int]:
    """The counts of one step, to be added up; `computes` as for its graph."""
    return {
        "receives_on_gpu": graph.receives if graph.timed else 0,
        "receives_on_host": 0 if graph.timed else graph.receives,
        "launching": graph.launching,
        "host_waits": graph.host_waits,
        "replayed": int(graph.replayed),
        "unseen_waits": graph.unseen_waits,
        "waits_unknown": int(graph.timed and not graph.waits_known and "comm" in graph.streams),
        "launched": int(not graph.timed and not computes),
    }


def notes_of(counts: Mapping[str, int]) -> list[str]:
    """A sentence or two for everything that is not known."""
    out = []
    on_gpu, on_host = counts["receives_on_gpu"], counts["receives_on_host"]
    out += [_ON_GPU.format(count=on_gpu)] if on_gpu else []
    out += [_ON_HOST.format(count=on_host)] if on_host else []
    out += [_LATE_RANKS] if on_gpu or on_host else []
    if replayed := counts["replayed"]:
        receives = "; receives are put where the ring's rule has them" if on_gpu else ""
        out.append(_REPLAYED.format(count=replayed, receives=receives))
    return out + [text.format(count=counts[key]) for key, text in _OTHERS.items() if counts[key]]
