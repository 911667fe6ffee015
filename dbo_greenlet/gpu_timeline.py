"""When each slice of a step ran on the GPU, by timing events round it: in eager steps and in graph replays alike.

    timeline = GpuTimeline(device)
    contexts = make_ubatch_contexts(2, compute, comm, device=device)

    events = timeline.eager(contexts)                             # eager: one set of events for every step
    scheduler.run(entries, contexts, bracket=events)
    for each in events.read(): print(each.microbatch, each.compute.begin, each.compute.end)

    events = timeline.captured(contexts)                          # a graph: a set of its own, as long as the graph
    graph = pool.capture(lambda: scheduler.run(entries, contexts, bracket=events), streams=[comm])
    graph.replay(); events.replayed()                             # at every replay
    writer.write(*events.records(step=7, origin_ns=recorder.origin_ns))

**Events.** On the compute stream one at the first slice's begin and one at each slice's end. The end of a slice is the
begin of the next: between the two the scheduler enqueues nothing, so in a replay they are neighbours in the graph, and
in an eager step what lies between is the scheduler's own two microseconds of host time. On the comm stream one is
recorded at the end of each slice that uses it, and the slice begins, there, where the one before it ended. A slice uses
it that makes it wait, records an event there, or begins and ends on it, as the `dbo_*` calls do; what goes there
otherwise is counted to the next slice that does. A model that puts work there by other means needs `every_slice=True`,
which records at each boundary.

**Waits.** A stream that a slice makes wait for the other stands still at first. An event behind the slice's first wait
tells how long (`Stretch.waited`). Only what the contexts do is seen, whose device becomes one that tells of it. What an
all-to-all waits for by itself counts as the slice's work.

**Exactness.** CUDA promises ticks of half a microsecond; those of an H200 are 32 ns. An event is an entry of its stream
and takes GPU time itself: in a graph on an H200 2.3 us between two kernels, which are part of the slice that it ends,
and next to nothing on a comm stream beside a busy compute stream. In an eager step that the host cannot keep fed, the
gaps between kernels are part of the slice, too. So they are in a replay of short kernels: CUDA launches a graph with
events piece by piece, which takes the host 1.4 to 3 us for each. An eager step's host times, per yield and as a whole,
hold 3 to 4 us for each event. What it all costs measures `scripts/bench_gpu_timeline.py`; the timeline is off where
nobody asks for it, and then costs nothing. The step's place on the host's clock is less exact than its inside: see
`StepEvents.anchor`.

A kernel that stores the GPU's clock was rejected, though it takes 0.7 us of the GPU and nothing of the host: it needs
room on an SM, and beside a kernel of the other stream that fills them all it would tell when that one had finished.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from .errors import ConfigurationError
from .gpu_times import Anchor, GpuTimelineError, SliceTimes, Stretch, as_records

if TYPE_CHECKING:
    from .microbatch import UBatchContext
    from .slice_bracket import Slice
    from .trace.schema import GpuRecord

__all__ = ["Anchor", "GpuTimeline", "GpuTimelineError", "SliceTimes", "StepEvents", "Stretch"]

ANCHOR_TRIES = 5
KEPT = 4  # pairs of streams whose events are kept for further eager steps
_NONE = -1  # in place of an event's index


class GpuTimeline:
    """Makes the events of steps.

    Args:
        device: a `CudaDevice`.
        every_slice: record on the comm stream at every slice boundary; see the module.
        clock: the host's nanoseconds, the same clock as the trace's.
        capturing: whether the current stream is being captured; default: what torch says.

    Attributes:
        device: the same device, telling of events and waits: what the contexts of timed steps get.

    Raises:
        ConfigurationError: the device has no timing events.
    """

    def __init__(
        self,
        device: Any,
        *,
        every_slice: bool = False,
        clock: Callable[[], int] = perf_counter_ns,
        capturing: Callable[[], bool] | None = None,
    ) -> None:
        if getattr(device, "new_timing_event", None) is None:
            raise ConfigurationError(
                f"a GPU timeline needs a CUDA device, this is {device.name}; leave it out, or use --device cuda"
            )
        if capturing is None:
            import torch

            capturing = torch.cuda.is_current_stream_capturing
        self.device = self._watched(device)
        self.every_slice = every_slice
        self.clock = clock
        self.capturing: Callable[[], bool] = capturing
        # Where the device tells somebody of events, it need not tell of these.
        self._plain = getattr(device, "plain", device)
        self._eager: list[StepEvents] = []
        self._running: StepEvents | None = None  # whose slice runs now
        self._anchor: tuple[Any, Any] | None = None  # an event, and a stream of its own for it

    def eager(self, contexts: Sequence[UBatchContext]) -> StepEvents:
        """The bracket for eager steps with these contexts: the same one for the same streams, to use its events again.

        What one step measured is thus read before the next begins.
        """
        compute, comm = self._listen(contexts)
        for each in self._eager:
            if each.compute is compute and each.comm is comm:
                return each
        self._eager = [*self._eager[1 - KEPT :], StepEvents(self, self._plain, compute, comm)]
        return self._eager[-1]

    def captured(self, contexts: Sequence[UBatchContext]) -> StepEvents:
        """A bracket with events of its own, for one captured step. The graph records them as long as it lives."""
        return StepEvents(self, self._plain, *self._listen(contexts))

    def _listen(self, contexts: Sequence[UBatchContext]) -> tuple[Any, Any]:
        """Their compute and their comm stream; what they do on these is told from now on."""
        for each in contexts:
            each.device = self.device
        return contexts[0].compute_stream, contexts[0].comm_stream

    def _watched(self, device: Any) -> Any:
        """A twin that shares everything with `device` and tells the running slice of events and waits."""
        twin = copy.copy(device)
        record, wait = device.record, device.wait

        def record_and_tell(event: Any, stream: Any) -> None:
            record(event, stream)
            if (events := self._running) is not None:
                events.recorded(stream)

        def wait_and_tell(stream: Any, event: Any) -> None:
            wait(stream, event)
            if (events := self._running) is not None:
                events.waited(stream)

        twin.record, twin.wait = record_and_tell, wait_and_tell
        return twin

    def _round_trip(self) -> tuple[int, int, Any]:
        """(host time before, host time after, event): the GPU passed the event between the two."""
        if self._anchor is None:
            self._anchor = (self._plain.new_timing_event(), self._plain.new_stream("timeline"))
        event, stream = self._anchor
        before = self.clock()
        self._plain.record(event, stream)
        event.synchronize()
        return before, self.clock(), event


class _Marks:
    """Which events belong to a slice: indices into its step's events."""

    __slots__ = (
        "began_on_comm",
        "comm_begin",
        "comm_end",
        "comm_waited",
        "compute_begin",
        "compute_end",
        "compute_waited",
        "slice",
    )

    def __init__(self, slice: Slice, compute_begin: int) -> None:
        self.slice = slice
        self.began_on_comm = False
        self.compute_begin = compute_begin
        self.compute_waited = self.compute_end = self.comm_begin = self.comm_waited = self.comm_end = _NONE


class StepEvents:
    """The timing events of one step: a `SliceBracket` that records them, and their times afterwards.

    Made by `GpuTimeline.eager` and `GpuTimeline.captured`. Each run of the step records the same events again, so the
    times are those of the latest run and must be read before the next.
    """

    def __init__(self, timeline: GpuTimeline, device: Any, compute: Any, comm: Any) -> None:
        self.compute = compute
        self.comm = comm
        self._timeline = timeline
        self._device = device
        self._record = device.record
        self._key = device.stream_key
        self._comm_key = _key_of(device, comm)
        self._events: list[Any] = []
        self._used = 0
        self._last: dict[bool, int] = {}  # whether on the comm stream -> the event recorded last there
        self._marks: list[_Marks] = []
        self._running: _Marks | None = None
        self._in_graph = False
        self._ran = False
        self._at: list[float] | None = None  # the times of the latest run, once somebody asked

    @property
    def count(self) -> int:
        """Number of events that a run of the step records."""
        return self._used

    # -- what the scheduler calls ------------------------------------------------------------------------------------

    def begin(self, slice: Slice) -> None:
        """See `SliceBracket`.

        Raises:
            GpuTimelineError: of the two streams one is being captured and the other is not.
        """
        if not slice.decision:
            self._start()
        earlier = self._marks[-1] if self._marks else None
        marks = _Marks(slice, self._mark(self.compute) if earlier is None else earlier.compute_end)
        self._marks.append(marks)
        self._running = marks
        self._timeline._running = self
        marks.began_on_comm = self._key() == self._comm_key
        if self._timeline.every_slice:
            self._use_comm(marks)

    def end(self, slice: Slice) -> None:
        """See `SliceBracket`."""
        marks, self._running = self._running, None
        self._timeline._running = None
        if marks is None:
            return
        marks.compute_end = self._mark(self.compute)
        if marks.began_on_comm and self._key() == self._comm_key:
            self._use_comm(marks)
        if marks.comm_begin != _NONE:
            marks.comm_end = self._mark(self.comm)

    # -- what `GpuTimeline.device` calls -------------------------------------------------------------------------------

    def recorded(self, stream: Any) -> None:
        """The running slice has recorded an event on `stream`."""
        if stream is self.comm and (marks := self._running) is not None:
            self._use_comm(marks)

    def waited(self, stream: Any) -> None:
        """The running slice has made `stream` wait for another; only its first wait on each stream counts."""
        marks = self._running
        if marks is None:
            return
        if stream is self.compute:
            if marks.compute_waited == _NONE:
                marks.compute_waited = self._mark(stream)
        elif stream is self.comm:
            self._use_comm(marks)
            if marks.comm_waited == _NONE:
                marks.comm_waited = self._mark(stream)

    def _use_comm(self, marks: _Marks) -> None:
        if marks.comm_begin == _NONE:
            # Nothing was put there since the last slice that used it, or in this step.
            marks.comm_begin = self._last.get(True, 0)

    # -- recording -----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._used = 0
        self._last = {}
        self._marks = []
        device, capturing = self._device, self._timeline.capturing
        with device.stream_scope(self.compute):
            self._in_graph = capturing()
        with device.stream_scope(self.comm):
            if capturing() is not self._in_graph:
                raise GpuTimelineError(
                    f"of the streams {self.compute.name!r} and {self.comm.name!r} only one is being captured; "
                    "name the comm stream to GraphPool.capture(..., streams=[comm])"
                )
        # A capture runs nothing. What these events hold from a run before it is not the graph's.
        self._ran = not self._in_graph
        self._at = None

    def _mark(self, stream: Any) -> int:
        index = self._used
        if index == len(self._events):
            self._events.append(self._device.new_timing_event())
        self._record(self._events[index], stream)
        self._used = index + 1
        self._last[stream is self.comm] = index
        return index

    # -- reading -------------------------------------------------------------------------------------------------------

    def replayed(self) -> None:
        """The graph that captured this step was just launched: its times are the next to be read.

        Raises:
            GpuTimelineError: this step is in no graph.
        """
        if not self._in_graph:
            raise GpuTimelineError(
                "these events were not captured into a graph; pass them as the bracket of the step that is captured"
            )
        self._ran = True
        self._at = None

    def read(self) -> list[SliceTimes]:
        """The slices of the latest run in the order in which they ran; blocks the host until the GPU has run them.

        A slice that a failing step did not end is left out.

        Raises:
            GpuTimelineError: the step was not run since it was made or captured.
        """
        at = self._times()
        out = []
        for marks in self._marks:
            if marks.compute_end == _NONE:
                continue
            compute = _stretch(at, marks.compute_begin, marks.compute_waited, marks.compute_end)
            comm = None
            if marks.comm_end != _NONE:
                comm = _stretch(at, marks.comm_begin, marks.comm_waited, marks.comm_end)
            it = marks.slice
            out.append(
                SliceTimes(it.microbatch, it.number, it.decision, it.begin_site, it.end_site or "", compute, comm)
            )
        return out

    def anchor(self) -> Anchor:
        """Where the step's first event lies on the host's clock; to be asked for soon after the step.

        The host records an event on an idle stream and waits for it: the GPU passed it between the two looks at the
        clock, the middle of which is taken, of the shortest of a few tries. The error is half that time, 4 us on an
        H200. The two clocks part by 10 us a second there, so an anchor is taken anew at each reading.

        Raises:
            GpuTimelineError: as `read`.
        """
        self._times()  # the step is complete
        first = self._events[0]
        shortest: tuple[int, float] | None = None
        for _ in range(ANCHOR_TRIES):
            before, after, event = self._timeline._round_trip()
            if shortest is None or after - before < shortest[0]:
                since = first.elapsed_time(event) * 1e6
                shortest = (after - before, (before + after) / 2 - since)
        if shortest is None:  # only for the type checker: there is at least one try
            return Anchor(0.0, 0.0)
        return Anchor(shortest[1], shortest[0] / 2000)

    def records(self, *, step: int, rank: int = 0, run: str = "dbo", origin_ns: int) -> list[GpuRecord]:
        """The latest run as records of a trace, on its axis: one per slice and stream that it used.

        For a step of 482 slices this takes 5 ms of the host, and their lines in the file as much again.

        Args:
            step, rank, run: the step's identity.
            origin_ns: the clock at the trace's microsecond 0 (`StepRecorder.origin_ns`).

        Raises:
            GpuTimelineError: as `read`.
        """
        times = self.read()
        anchor = self.anchor()
        begin = (anchor.begin_ns - origin_ns) / 1000
        return as_records(times, step=step, rank=rank, run=run, begin=begin, error=anchor.error)

    def _times(self) -> list[float]:
        """Microseconds of each event since the first."""
        if self._at is not None:
            return self._at
        if not self._ran or not self._used:
            what = "captured and not replayed since" if self._in_graph else "not run"
            hint = "launch its graph and call replayed()" if self._in_graph else "run it with these events as bracket"
            raise GpuTimelineError(f"there are no GPU times: the step was {what}; {hint}")
        events = self._events[: self._used]
        for index in self._last.values():
            events[index].synchronize()  # and with it whatever was recorded on its stream before
        first = events[0]
        try:
            self._at = [0.0] + [first.elapsed_time(event) * 1000 for event in events[1:]]
        except (RuntimeError, ValueError) as error:  # which of them depends on the torch
            raise GpuTimelineError(f"the GPU has no times of this step, was its graph launched? {error}") from error
        return self._at


def _stretch(at: list[float], begin: int, waited: int, end: int) -> Stretch:
    works = at[end if waited == _NONE else waited]
    # The comm stream may be done with work that waited for nothing before the compute stream comes to the step.
    came = min(at[begin], works)
    return Stretch(came, at[end], 0.0 if waited == _NONE else works - came)


def _key_of(device: Any, stream: Any) -> Any:
    with device.stream_scope(stream):
        return device.stream_key()
