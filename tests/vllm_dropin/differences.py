"""What the drop-in may do otherwise than vLLM's threads: a table, and a comparison that allows nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.vllm_dropin.drive import Case
from tests.vllm_dropin.fake_cuda import Call

# How often a row applies is counted in steps of a case, by how they run:
#   eager     a step of `run_case` in eager mode
#   warm-up   V2 runs a step on the capture stream before it captures
#   capture   the step that is captured
STEPS = {
    ("V1", "eager"): {"eager": 2, "warm-up": 0, "capture": 0},
    ("V2", "eager"): {"eager": 2, "warm-up": 0, "capture": 0},
    ("V1", "capture"): {"eager": 0, "warm-up": 0, "capture": 1},
    ("V2", "capture"): {"eager": 0, "warm-up": 1, "capture": 1},
}


@dataclass(frozen=True)
class Difference:
    """`call`: what; `per`: how often a step of each kind; `change`: "fewer", "more" or "changed"; `why`."""

    name: str
    call: str
    change: str
    per: dict[str, int]
    why: str
    runner: str = "any"
    backend: str = "any"
    per_layer: int = 0

    def count(self, case: Case) -> int:
        if self.runner not in ("any", case.runner) or self.backend not in ("any", case.backend):
            return 0
        steps = STEPS[case.runner, case.mode]
        return sum(steps[kind] * (times + self.per_layer * case.layers) for kind, times in self.per.items())


EVERY = {"eager": 0, "warm-up": 0, "capture": 0}  # times a layer

TABLE = [
    Difference("no threads", "thread.start", "fewer", {"eager": 2, "warm-up": 2, "capture": 2},
               "one thread runs the hub and the microbatches"),
    Difference("device", "set_device_index", "fewer", {"eager": 2, "warm-up": 2, "capture": 2},
               "a new thread has to choose the device; the worker's own thread has it", runner="V2"),
    Difference("device", "set_device_index", "fewer", {"capture": 2},
               "as above; V1 chooses it for captures only", runner="V1"),
    Difference("handles", "blas_handle", "fewer", {"warm-up": 2, "capture": 2},
               "one cuBLAS handle a stream, where each thread needs its own"),
    Difference("stream of a new thread", "stream.new", "fewer", {"eager": 2},
               "vLLM's current_stream() makes a stream in a thread that has none"),
    Difference("stream of a new thread", "stream.wait_stream", "fewer", {"eager": 2}, "as above"),
    Difference("stream of a new thread", "set_stream to a new stream", "fewer", {"eager": 2}, "as above"),
    Difference("already current", "set_stream", "fewer", {"eager": 2, "warm-up": 1, "capture": 2},
               "at its start each thread sets the compute stream; here it is current, unless the step runs on another"),
    Difference("already current", "set_stream", "fewer", EVERY,
               "after a switch the stream may be the one that the sibling left", backend="HT", per_layer=2),
    Difference("given back", "set_stream", "more", {"warm-up": 1},
               "the step ran on the thread of the caller, whose stream is put back; threads have one each"),
    Difference("capture mode", "graph.begin", "changed", {"capture": 1},
               'thread_local instead of "global": another thread\'s CUDA call does not break the capture'),
]  # fmt: skip


def expected(case: Case) -> Counter[tuple[str, str]]:
    """(change, call) -> how often it has to be found."""
    counts: Counter[tuple[str, str]] = Counter()
    for row in TABLE:
        counts[row.change, row.call] += row.count(case)
    return +counts


def compare(threads: list[Call], greenlets: list[Call]) -> Counter[tuple[str, str]]:
    """Walk both logs and count what differs; anything that is of no kind of the table is an error.

    Whether the *number* is right is for `expected` to say.
    """
    found: Counter[tuple[str, str]] = Counter()
    left, right = list(_with_handles_in_one(threads)), list(_with_handles_in_one(greenlets))
    handles = [{call.detail for call in side if call.what == "blas_handle"} for side in (left, right)]
    if handles[0] != handles[1]:
        raise AssertionError(f"cuBLAS handles of the threads: {handles[0]}, of the greenlets: {handles[1]}")
    i = j = 0
    while i < len(left) or j < len(right):
        mine, ours = left[i] if i < len(left) else None, right[j] if j < len(right) else None
        current = right[j - 1].stream if j else ""
        if ours is not None and _takes_own_stream(ours, left[:i], right[:j]):
            found["more", "set_stream on resuming"] += 1
            j += 1
        elif mine == ours:
            i, j = i + 1, j + 1
        elif mine is not None and (kind := _may_be_missing(mine, left, i, current)):
            found["fewer", kind] += 1
            i += 1
        elif ours is not None and _gives_stream_back(ours, right, j):
            found["more", "set_stream"] += 1
            j += 1
        elif mine is not None and ours is not None and _captures_thread_local(mine, ours):
            found["changed", "graph.begin"] += 1
            i, j = i + 1, j + 1
        else:
            raise AssertionError(
                f"after {i} calls of the threads and {j} of the greenlets:\n  threads: {mine}\n  greenlets: {ours}\n"
                + "\n".join(f"    both before: {call}" for call in right[max(0, j - 5) : j])
            )
    return found


def _may_be_missing(call: Call, log: list[Call], at: int, current: str) -> str | None:
    if call.what in ("thread.start", "set_device_index", "blas_handle", "stream.new", "stream.wait_stream"):
        return call.what
    if call.what == "set_stream":
        # `current_stream()` in a new thread: make, wait, set.
        if at >= 2 and log[at - 2].what == "stream.new" and log[at - 2].detail == call.detail:
            return "set_stream to a new stream"
        if call.detail == (current,):
            return "set_stream"
    return None


def _gives_stream_back(call: Call, log: list[Call], at: int) -> bool:
    return call.what == "set_stream" and at + 1 < len(log) and log[at + 1].what == "sm.give_back"


def _takes_own_stream(call: Call, threads: list[Call], greenlets: list[Call]) -> bool:
    # A microbatch that yielded on another stream than the one that its sibling left. None of vLLM's classes does: no
    # row of the table has it.
    if call.what != "set_stream" or not greenlets or greenlets[-1].who in ("-", call.who):
        return False
    own = next((before.stream for before in reversed(threads) if before.who == call.who), None)
    return own == call.stream != greenlets[-1].stream


def _captures_thread_local(threads: Call, greenlets: Call) -> bool:
    *before, mode = threads.detail or (None,)
    changed = threads._replace(detail=(*before, "thread_local"))
    return threads.what == "graph.begin" and mode == "global" and greenlets == changed


def _with_handles_in_one(log: list[Call]) -> Iterator[Call]:
    """`set_stream(s)`, `blas_handle`, `set_stream(before)` as one call "blas_handle" with s."""
    rest: list[Any] = list(log)
    at = 0
    while at < len(rest):
        three = rest[at : at + 3]
        if [call.what for call in three] == ["set_stream", "blas_handle", "set_stream"]:
            # The stream afterwards is the thread's: "default" in a new one.
            yield Call("blas_handle", "-", "", three[0].detail)
            at += 3
        else:
            yield rest[at]
            at += 1
