"""One step of a trace of ours as slices, arrows and counters.

Arrows go from the slice that sent to the slice in which the receive ran, when another one did; and, where operations
were recorded and the GPU was timed, from a slice on one GPU stream to the slice on another one that waits for an event
recorded in it. There are no others: a trace holds no other edge.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

from ...errors import TraceFileError
from ..lanes import letters_of, slice_label
from ..notation import is_high_throughput, parse_site
from ..reader import StepTrace
from ..schema import GpuRecord, RecvRecord, SliceRecord, StepRecord
from .items import FlowEnd, Item, Slice
from .tracks import Tracks, total_over_time

__all__ = ["LONGEST", "step_items"]

LONGEST = 1000 * 86400e6  # microseconds: no server runs longer, and nanoseconds taken for them soon are
_FLIGHTS = ("dispatch in flight", "combine in flight", "in flight")


def step_items(step: StepTrace, shift: int, tracks: Tracks, path: str) -> Iterator[Item]:
    """What a step shows.

    Args:
        step: the step.
        shift: nanoseconds to add to its times.
        tracks: where it goes.
        path: the file, for errors.

    Raises:
        TraceFileError: something ends before it begins, or at a time that no run has.
    """
    return _Step(step, shift, tracks, path).items()


class _Step:
    def __init__(self, step: StepTrace, shift: int, tracks: Tracks, path: str) -> None:
        self.step = step
        self.shift = shift
        self.tracks = tracks
        self.path = path
        self.high_throughput = is_high_throughput(step.sites)

    def items(self) -> Iterator[Item]:
        step, placed = self.step, self.tracks.placed
        process = step.rank + 1
        ran = [self._host_slice(record) for record in step.slices]
        windows = [self._window(record) for record in step.receives]
        for received, window in zip(step.receives, windows, strict=True):
            self._connect(received, window, ran)
        stretches = [self._gpu_slice(record) for record in step.gpu]
        if step.ops and stretches:
            self._connect_streams(stretches)
        if (record := step.record) is not None and record.begin is not None and record.end is not None:
            begin, end = self._span(record.begin, record.end, "the record")
            name = f"step {step.step}" + ("" if record.split else ", not split")
            yield from placed(process, "steps", 0, [Slice(0, begin, end, name, "step", _step_details(record))])
        for index in sorted({record.ubatch for record in step.slices}):
            mine = [each for each, record in zip(ran, step.slices, strict=True) if record.ubatch == index]
            yield from placed(process, f"microbatch {index}", 1000 + index, mine)
        flights: tuple[list[Slice], ...] = ([], [], [])
        for received, window in zip(step.receives, windows, strict=True):
            flights[_flight_track(received.site)].append(window)
        for number, name in enumerate(_FLIGHTS):
            yield from placed(process, name, 2000 + number, flights[number])
        for name in sorted({record.stream for record in step.gpu}, key=lambda name: (name != "compute", name)):
            mine = [each for each, record in zip(stretches, step.gpu, strict=True) if record.stream == name]
            place = 3000 + ("compute", "comm").index(name) if name in ("compute", "comm") else 3002
            yield from placed(process, f"{name} stream", place, mine)
        yield from self._counters(process, ran, windows)

    def _counters(self, process: int, ran: Sequence[Slice], windows: Sequence[Slice]) -> Iterator[Item]:
        counted = self.tracks.counted
        spans = [(window.begin, window.end, 1) for window in windows]
        yield from counted(process, "transfers in flight", 4000, "transfers", total_over_time(spans))
        yield from counted(process, "runnable microbatches", 4001, "microbatches", _runnable(self.step, ran))
        sized = [
            (window.begin, window.end, record.bytes)
            for window, record in zip(windows, self.step.receives, strict=True)
            if record.bytes is not None
        ]
        yield from counted(process, "bytes in flight", 4002, "bytes", total_over_time(sized))

    # -- slices ------------------------------------------------------------------------------------------------------

    def _span(self, begin: float, end: float, what: str) -> tuple[int, int]:
        if -LONGEST <= begin <= end <= LONGEST:
            return round(begin * 1000) + self.shift, round(end * 1000) + self.shift
        where = f"{self.path}: {what} of step {self.step.step}, run {self.step.run}, rank {self.step.rank}"
        if end < begin:
            raise TraceFileError(f"{where} ends at {end} us, before it begins ({begin} us)")
        time = begin if abs(begin) > LONGEST else end
        raise TraceFileError(
            f"{where} has the time {time:g} us, {abs(time) / 86400e6:.0f} days from the rank's origin; "
            "are these microseconds?"
        )

    def _host_slice(self, record: SliceRecord) -> Slice:
        what = f"slice {record.slice} of microbatch {record.ubatch}"
        begin, end = self._span(record.begin, record.end, what)
        details = _identity(record)
        details["slice"] = record.slice
        details["site"] = record.site
        if record.layer is not None:
            details["layer"] = record.layer
        if record.stream is not None:
            details["stream"] = record.stream
        if record.failed:
            details["failed"] = True
        name = "failed" if record.failed else _label(record.site, self.high_throughput)
        return Slice(0, begin, end, name, "slice", details)

    def _window(self, record: RecvRecord) -> Slice:
        end = record.at
        if end is None:
            # Never complete: until the step was over, as far as the trace tells.
            ends = [s.end for s in self.step.slices] + [record.sent]
            if self.step.record is not None and self.step.record.end is not None:
                ends.append(self.step.record.end)
            end = max(ends)
        begin, until = self._span(record.sent, end, f"what microbatch {record.ubatch} sent before {record.site}")
        details = _identity(record)
        details["site"] = record.site
        details["complete"] = record.at is not None
        if record.at is not None:
            details["received by"] = "its owner" if record.by is None else f"microbatch {record.by}"
        if record.sent_decision is not None:
            details["sent in decision"] = record.sent_decision
        if record.decision is not None:
            details["received in decision"] = record.decision
        if record.bytes is not None:
            details["bytes"] = record.bytes
        return Slice(0, begin, until, f"{_flight_name(record.site)}, microbatch {record.ubatch}", "in flight", details)

    def _gpu_slice(self, record: GpuRecord) -> Slice:
        what = f"slice {record.slice} of microbatch {record.ubatch} on the {record.stream} stream"
        begin, end = self._span(record.begin, record.end, what)
        waited = min(max(round(record.waited * 1000), 0), end - begin)
        details = _identity(record)
        details |= {"slice": record.slice, "site": record.site, "after": record.after, "stream": record.stream}
        details |= {"waited (us)": record.waited, "placed within (us)": record.error}
        label = _label(record.site, self.high_throughput)
        if record.stream != "compute":
            after = parse_site(record.after)
            label = (record.after or label) if after is None else _flight_name(record.after)
        return Slice(0, begin, end, f"{label}, microbatch {record.ubatch}", "gpu", details, waited)

    # -- arrows ------------------------------------------------------------------------------------------------------

    def _connect(self, record: RecvRecord, window: Slice, ran: Sequence[Slice]) -> None:
        """Draw the arrow of a receive that ran, if both its slices are in the trace and are two."""
        sent, received = record.sent_decision, record.decision
        if sent is None or received is None or record.at is None or not 0 <= sent < received < len(ran):
            return
        slices = self.step.slices
        runner = record.ubatch if record.by is None else record.by
        if slices[sent].ubatch != record.ubatch or slices[received].ubatch != runner:
            return
        if ran[received].begin < ran[sent].end:
            return  # An arrow cannot go back in time: whatever wrote this, its slices do not follow one another.
        self._arrow(ran[sent], window.begin, ran[received], window.end, window.name, "receive")

    def _connect_streams(self, stretches: Sequence[Slice]) -> None:
        """Draw the waits of one GPU stream for another one, each pair of slices once."""
        by_place: dict[tuple[int | None, int | None, str | None], Slice] = {}
        for each, timed in zip(stretches, self.step.gpu, strict=True):
            by_place.setdefault((timed.ubatch, timed.slice, timed.stream), each)
        records = {op.number: op for op in self.step.ops if op.op == "record"}
        drawn = set()
        for op in self.step.ops:
            record = records.get(op.of) if op.op == "wait" and op.of is not None else None
            if record is None or record.stream == op.stream:
                continue
            source = by_place.get((record.ubatch, record.slice, record.stream))
            target = by_place.get((op.ubatch, op.slice, op.stream))
            if source is None or target is None or (id(source), id(target)) in drawn:
                continue
            # The wait is over when what was recorded is done. When that was is not measured, but it was before the end
            # of the slice that recorded it, which in its place is what the trace says.
            over = _within(target, target.begin + target.waited)
            if source.begin > over:
                continue  # The times of the two contradict the edge.
            if source.begin == source.end or target.begin == target.end:
                continue  # Chrome's arrows hang on times, and what has no length holds none.
            drawn.add((id(source), id(target)))
            self._arrow(source, min(source.end, over), target, over, op.name or "event", "event")

    def _arrow(self, source: Slice, at: int, target: Slice, until: int, name: str, category: str) -> None:
        flow = self.tracks.flow()
        source.departs = [*source.departs, FlowEnd(flow, name, _within(source, at), category)]
        target.arrives = [*target.arrives, FlowEnd(flow, name, _within(target, until), category)]


def _within(it: Slice, at: int) -> int:
    """The time nearest to `at` that is in the slice: its end is not."""
    return max(min(at, it.end - 1), it.begin)


def _runnable(step: StepTrace, ran: Sequence[Slice]) -> dict[int, int]:
    """Time -> microbatches that might have run there, the one that did included; 0 when the last slice is over.

    Law 6 decides: a microbatch may run its k-th slice once every earlier one has completed its own k-th, or is done.
    """
    samples: dict[int, int] = {}
    count = step.count
    done_slices = [0] * count
    done = [False] * count
    for record, each in zip(step.slices, ran, strict=True):
        runnable, least = 0, None
        for index in range(count):
            if not done[index]:
                passed = done_slices[index]
                if least is None or least > passed:
                    runnable += 1
                    least = passed
        samples[each.begin] = runnable
        if record.ubatch < count:
            done_slices[record.ubatch] += 1
            done[record.ubatch] |= record.site == "" or record.failed
    if ran:
        samples[max(each.end for each in ran)] = 0
    return samples


# -- names and details -------------------------------------------------------------------------------------------------


def _identity(record: SliceRecord | RecvRecord | GpuRecord) -> dict[str, Any]:
    return {"step": record.step, "run": record.run, "microbatch": record.ubatch}


def _step_details(record: StepRecord) -> dict[str, Any]:
    details: dict[str, Any] = {"step": record.step, "run": record.run, "tokens": record.tokens, "padded": record.padded}
    details |= {"split": record.split, "reason": record.reason, "requests": len(record.requests)}
    for name in ("schedule", "hash", "output", "execution", "policy", "error"):
        if value := getattr(record, name):
            details[name] = value
    if record.seed is not None:
        details["seed"] = record.seed
    if record.votes:
        details["votes"] = str(record.votes)
    return details


@functools.lru_cache(maxsize=4096)
def _label(site: str, high_throughput: bool) -> str:
    return slice_label(site, letters_of(high_throughput))


@functools.lru_cache(maxsize=4096)
def _flight_track(site: str) -> int:
    parsed = parse_site(site)
    if parsed is None:
        return 2
    return 0 if parsed.stage.endswith("dispatch") else 1


@functools.lru_cache(maxsize=4096)
def _flight_name(site: str) -> str:
    parsed = parse_site(site)
    if parsed is None:
        return site or "before the return"
    return f"{'D' if parsed.stage.endswith('dispatch') else 'C'}{parsed.layer}"
