"""What a viewer is shown of a trace, in no viewer's format: tracks, slices, flows and counters.

One process per rank. Its tracks, from top to bottom:

    steps                      from the step's begin to its end on the host
    microbatch 0, 1, ...       its slices on the host
    dispatch, combine in flight    from a send to the moment its receive was complete ("in flight" for other sites)
    compute, comm stream       the slices on the GPU, where they were timed, with their waits for the other stream
    transfers in flight        a counter: sends whose receive is not complete
    runnable microbatches      a counter: those from which the policy had its choice when a slice began

On a track no two slices overlap. Where they would (two dispatches in flight, runs that recorded the same time twice),
the track gets another one below it, "dispatch in flight (2)". Arrows go from the slice that sent to the slice in which
the receive ran, when another one did, and nowhere else: a trace holds no other edge.

Times are whole nanoseconds. Ranks lie on one axis by `HeaderRecord.origin_ns`, the host's monotonic clock, which ranks
on one host share; its zero is the earliest origin of the ranks whose headers come before the first step.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from ..errors import TraceFileError
from ..schedule import MAX_MICROBATCHES
from .export_items import FIRST_TRACK, CounterSample, CounterTrack, FlowEnd, Item, Process, Slice, SliceTrack
from .lanes import slice_label, slice_letters
from .notation import parse_site
from .reader import StepTrace
from .schema import GpuRecord, RecvRecord, SliceRecord, StepRecord
from .step_stream import StepStream

__all__ = ["ExportModel"]

_LONGEST = 1000 * 86400e6  # microseconds: no server runs longer, and nanoseconds taken for them soon are
_TRANSFERS = "transfers in flight"
_RUNNABLE = "runnable microbatches"


@dataclass
class _Pending:
    """A slice that has no track yet."""

    begin: int
    end: int
    name: str
    category: str
    details: dict[str, Any]
    waited: int = 0
    departs: list[FlowEnd] = field(default_factory=list)
    arrives: list[FlowEnd] = field(default_factory=list)


@dataclass
class _Lane:
    track: int
    end: int  # of its last slice


class ExportModel:
    """Iterates, once, over what a trace of ours shows, one step at a time.

    A process and a track come before what is on them, the slices of a track in order of time, and the samples of a
    counter in the order of the steps.

    Args:
        path: the trace.
        run: only steps of this run.
        rank: only steps of this rank.
        steps: only steps with these numbers.

    Attributes, counted while it is iterated over:
        stream: the trace's `StepStream`, with its headers.
        shown: number of steps, slices (waits are part of their slice), flows and counter samples.
        offsets: rank -> microseconds by which its times were moved onto the common axis.

    Iterating raises:
        TraceFileError: as `StepStream`; something ends before it begins; there is nothing to show.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        run: str | None = None,
        rank: int | None = None,
        steps: Collection[int] | None = None,
    ) -> None:
        self.stream = StepStream(path)
        self.shown = {"steps": 0, "slices": 0, "flows": 0, "counter samples": 0}
        self.offsets: dict[int, float] = {}
        self._wanted = (run, rank, steps)
        self._zero: int | None = None
        self._ids = count(FIRST_TRACK)
        self._flow_ids = count(1)
        self._lanes: dict[tuple[int, str], list[_Lane]] = {}
        self._counters: dict[tuple[int, str], int] = {}

    def __iter__(self) -> Iterator[Item]:
        run, rank, numbers = self._wanted
        for step in self.stream:
            if run in (None, step.run) and rank in (None, step.rank) and (numbers is None or step.step in numbers):
                self.shown["steps"] += 1
                self._check(step)
                if step.rank not in self.offsets:
                    yield self._begin_rank(step.rank)
                yield from self._step(step)
        if not self.shown["steps"]:
            held = f"none of its {self.stream.steps} steps is asked for" if self.stream.steps else "it has no steps yet"
            raise TraceFileError(f"{self.stream.path}: nothing to export: {held}")

    # -- time ----------------------------------------------------------------------------------------------------------

    def _begin_rank(self, rank: int) -> Process:
        headers = self.stream.headers
        if self._zero is None:
            shown = [h.origin_ns for h in headers.values() if self._wanted[1] in (None, h.rank)]
            self._zero = min(shown, default=0)
        header = headers.get(rank)
        self.offsets[rank] = 0.0 if header is None else (header.origin_ns - self._zero) / 1000
        if abs(self.offsets[rank]) > _LONGEST:
            raise TraceFileError(
                f"{self.stream.path}: the clock of rank {rank} is {abs(self.offsets[rank]) / 86400e6:.0f} days from "
                "that of another rank: they are of several hosts and have no axis in common; export them one by one "
                "with --rank"
            )
        labels = []
        if header is not None:
            labels = [f"dbo_greenlet {header.package}"] + ([f"torch {header.torch}"] if header.torch else [])
        return Process(rank + 1, rank, f"rank {rank}", tuple(labels))

    def _span(self, step: StepTrace, begin: float, end: float, what: str) -> tuple[int, int]:
        if end < begin:
            raise TraceFileError(
                f"{self.stream.path}: {what} of step {step.step}, run {step.run}, rank {step.rank} ends at {end} us, "
                f"before it begins ({begin} us)"
            )
        for time in (begin, end):
            if abs(time) > _LONGEST:
                raise TraceFileError(
                    f"{self.stream.path}: {what} of step {step.step}, run {step.run}, rank {step.rank} has the time "
                    f"{time:g} us, {abs(time) / 86400e6:.0f} days from the rank's origin; are these microseconds?"
                )
        return self._time(step, begin), self._time(step, end)

    def _check(self, step: StepTrace) -> None:
        """Numbers that no run has would make tracks without end."""
        what = f"{self.stream.path}: step {step.step} of run {step.run}"
        if not 0 <= step.rank < FIRST_TRACK - 1:
            raise TraceFileError(f"{what} is of rank {step.rank}, expected 0 to {FIRST_TRACK - 2}")
        records: list[SliceRecord | RecvRecord | GpuRecord] = [*step.slices, *step.receives, *step.gpu]
        for record in records:
            if not 0 <= record.ubatch < MAX_MICROBATCHES:
                raise TraceFileError(
                    f"{what}, rank {step.rank} names microbatch {record.ubatch}, expected 0 to {MAX_MICROBATCHES - 1}"
                )

    def _time(self, step: StepTrace, microseconds: float) -> int:
        header = self.stream.headers.get(step.rank)
        shift = 0 if header is None or self._zero is None else header.origin_ns - self._zero
        return round(microseconds * 1000) + shift

    # -- one step ------------------------------------------------------------------------------------------------------

    def _step(self, step: StepTrace) -> Iterator[Item]:
        letters = slice_letters(step.sites)
        ran = [self._host_slice(step, record, letters) for record in step.slices]
        windows = [self._window(step, record) for record in step.receives]
        for received, window in zip(step.receives, windows, strict=True):
            self._connect(step, received, window, ran)
        if (record := step.record) is not None and record.begin is not None and record.end is not None:
            begin, end = self._span(step, record.begin, record.end, "the record")
            name = f"step {step.step}" + ("" if record.split else ", not split")
            yield from self._placed(step.rank, "steps", 0, [_Pending(begin, end, name, "step", _step_details(record))])
        for index in sorted({record.ubatch for record in step.slices}):
            mine = [each for each, record in zip(ran, step.slices, strict=True) if record.ubatch == index]
            yield from self._placed(step.rank, f"microbatch {index}", 1000 + index, mine)
        for place, name in enumerate(("dispatch in flight", "combine in flight", "in flight"), 2000):
            mine = [w for w, r in zip(windows, step.receives, strict=True) if _flight_track(r) == name]
            yield from self._placed(step.rank, name, place, mine)
        streams = sorted({record.stream for record in step.gpu}, key=lambda name: (name != "compute", name))
        for stream in streams:
            mine = [self._gpu_slice(step, record, letters) for record in step.gpu if record.stream == stream]
            place = 3000 + ("compute", "comm").index(stream) if stream in ("compute", "comm") else 3002
            yield from self._placed(step.rank, f"{stream} stream", place, mine)
        yield from self._counted(step.rank, _TRANSFERS, 4000, "transfers", _in_flight(windows))
        yield from self._counted(step.rank, _RUNNABLE, 4001, "microbatches", _runnable(step, ran))

    def _host_slice(self, step: StepTrace, record: SliceRecord, letters: Any) -> _Pending:
        what = f"slice {record.slice} of microbatch {record.ubatch}"
        begin, end = self._span(step, record.begin, record.end, what)
        details = _identity(record) | {"slice": record.slice, "site": record.site}
        if record.failed:
            details["failed"] = True
        if record.stream is not None:
            details["stream"] = record.stream
        name = "failed" if record.failed else slice_label(record.site, letters)
        return _Pending(begin, end, name, "slice", details)

    def _window(self, step: StepTrace, record: RecvRecord) -> _Pending:
        end = record.at
        if end is None:
            # Never complete: until the step was over, as far as the trace tells.
            ends = [s.end for s in step.slices] + [record.sent]
            if step.record is not None and step.record.end is not None:
                ends.append(step.record.end)
            end = max(ends)
        what = f"what microbatch {record.ubatch} sent before {record.site}"
        begin, until = self._span(step, record.sent, end, what)
        details = _identity(record) | {"site": record.site, "complete": record.at is not None}
        if record.at is not None:
            details["received by"] = "its owner" if record.by is None else f"microbatch {record.by}"
        return _Pending(begin, until, _flight_name(record), "in flight", details)

    def _gpu_slice(self, step: StepTrace, record: GpuRecord, letters: Any) -> _Pending:
        what = f"slice {record.slice} of microbatch {record.ubatch} on the {record.stream} stream"
        begin, end = self._span(step, record.begin, record.end, what)
        waited = min(max(round(record.waited * 1000), 0), end - begin)
        details = _identity(record) | {"slice": record.slice, "site": record.site, "after": record.after}
        details |= {"waited (us)": record.waited, "placed within (us)": record.error}
        label = slice_label(record.site, letters)
        if record.stream != "compute":
            after = parse_site(record.after)
            label = (record.after or label) if after is None else f"{_carried(after.stage)}{after.layer}"
        return _Pending(begin, end, f"{label}, microbatch {record.ubatch}", "gpu", details, waited)

    def _connect(self, step: StepTrace, record: RecvRecord, window: _Pending, ran: Sequence[_Pending]) -> None:
        """Draw the arrow of a receive that ran, if both its slices are in the trace and are two."""
        sent, received = record.sent_decision, record.decision
        if sent is None or received is None or record.at is None or not 0 <= sent < received < len(ran):
            return
        runner = record.ubatch if record.by is None else record.by
        if (step.slices[sent].ubatch, step.slices[received].ubatch) != (record.ubatch, runner):
            return
        if ran[received].begin < ran[sent].end:
            return  # An arrow cannot go back in time: whatever wrote this, its slices do not follow one another.
        flow = next(self._flow_ids)
        for each, ends, at in ((ran[sent], "departs", window.begin), (ran[received], "arrives", window.end)):
            getattr(each, ends).append(FlowEnd(flow, window.name, max(min(at, each.end - 1), each.begin)))
        self.shown["flows"] += 1

    # -- tracks --------------------------------------------------------------------------------------------------------

    def _placed(self, rank: int, name: str, place: int, pending: Iterable[_Pending]) -> Iterator[Item]:
        """Each slice on the first of the track's lanes that is free when it begins."""
        lanes = self._lanes.setdefault((rank, name), [])
        for each in sorted(pending, key=lambda each: (each.begin, each.end)):
            lane = next((lane for lane in lanes if lane.end <= each.begin), None)
            if lane is None:
                lane = _Lane(next(self._ids), each.begin)
                lanes.append(lane)
                full_name = name if len(lanes) == 1 else f"{name} ({len(lanes)})"
                yield SliceTrack(lane.track, rank + 1, full_name, place * 1000 + min(len(lanes), 1000) - 1)
            lane.end = each.end
            self.shown["slices"] += 1
            yield Slice(
                track=lane.track,
                begin=each.begin,
                end=each.end,
                name=each.name,
                category=each.category,
                details=each.details,
                waited=each.waited,
                departs=tuple(each.departs),
                arrives=tuple(each.arrives),
            )

    def _counted(self, rank: int, name: str, place: int, unit: str, samples: dict[int, int]) -> Iterator[Item]:
        if samples and (rank, name) not in self._counters:
            self._counters[rank, name] = next(self._ids)
            yield CounterTrack(self._counters[rank, name], rank + 1, name, place * 1000, unit)
        for at, value in sorted(samples.items()):
            self.shown["counter samples"] += 1
            yield CounterSample(self._counters[rank, name], at, value)


def _in_flight(windows: Sequence[_Pending]) -> dict[int, int]:
    """Time -> transfers in flight from there on."""
    change: dict[int, int] = {}
    for window in windows:
        change[window.begin] = change.get(window.begin, 0) + 1
        change[window.end] = change.get(window.end, 0) - 1
    total = 0
    samples = {}
    for at in sorted(change):
        total += change[at]
        samples[at] = total
    return samples


def _runnable(step: StepTrace, ran: Sequence[_Pending]) -> dict[int, int]:
    """Time -> microbatches that might have run there, the one that did included; 0 when the last slice is over.

    Law 6 decides: a microbatch may run its k-th slice once every earlier one has completed its own k-th, or is done.
    """
    samples: dict[int, int] = {}
    done_slices = [0] * step.count
    done = [False] * step.count
    for record, each in zip(step.slices, ran, strict=True):
        runnable, least = 0, None
        for index in range(step.count):
            if not done[index]:
                runnable += least is None or least > done_slices[index]
                least = done_slices[index] if least is None else min(least, done_slices[index])
        samples[each.begin] = runnable
        if record.ubatch < step.count:
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
    for name in ("schedule", "hash", "output", "execution", "error"):
        if value := getattr(record, name):
            details[name] = value
    return details


def _carried(stage: str) -> str:
    return "D" if stage.endswith("dispatch") else "C"


def _flight_track(record: RecvRecord) -> str:
    site = parse_site(record.site)
    if site is None:
        return "in flight"
    return "dispatch in flight" if _carried(site.stage) == "D" else "combine in flight"


def _flight_name(record: RecvRecord) -> str:
    site = parse_site(record.site)
    label = record.site or "before the return" if site is None else f"{_carried(site.stage)}{site.layer}"
    return f"{label}, microbatch {record.ubatch}"
