"""The bookkeeping of the GPU timeline, on a GPU whose clock is a number. On a real one: tests/gpu."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo_greenlet import Scheduler, make_ubatch_contexts
from dbo_greenlet import yields as y
from dbo_greenlet.devices import cpu_device
from dbo_greenlet.devices.virtual import VirtualDevice, VirtualEvent, VirtualStream
from dbo_greenlet.errors import ConfigurationError, MicrobatchFailed
from dbo_greenlet.gpu_timeline import GpuTimeline, GpuTimelineError, StepEvents, Stretch
from dbo_greenlet.gpu_times import as_records
from dbo_greenlet.microbatch import UBatchContext
from dbo_greenlet.trace import HeaderRecord, TraceWriter, gpu_use, read_trace


class Counting(VirtualDevice):
    """Counts the timing events that were made."""

    timing_events = 0

    def new_timing_event(self) -> VirtualEvent:
        self.timing_events += 1
        return super().new_timing_event()


class Bench:
    """A virtual GPU, its timeline, and two streams."""

    def __init__(self, **settings: Any) -> None:
        self.gpu = Counting()
        self.timeline = GpuTimeline(self.gpu, clock=self.clock, capturing=self.gpu.capturing, **settings)
        self.compute: VirtualStream = self.gpu.default_stream
        self.comm = self.gpu.new_stream("comm")
        self.ask = 0.0  # microseconds that a look at the clock takes

    def clock(self) -> int:
        """The host's nanoseconds; its microsecond 0 is 5 ms."""
        self.gpu.host(self.ask)
        return self.gpu.clock() + 5_000_000

    def work(self, length: float, stream: VirtualStream | None = None) -> None:
        self.gpu.work("work", length, stream=stream)

    def records(self) -> int:
        return sum(each.kind == "record" for each in self.gpu.program.operations)

    def contexts(self, count: int) -> list[UBatchContext]:
        return make_ubatch_contexts(count, self.compute, self.comm, device=self.gpu)

    def run(self, *entries: Callable[[], Any], **settings: Any) -> StepEvents:
        """An eager step."""
        contexts = self.contexts(len(entries))
        events = self.timeline.eager(contexts)
        Scheduler(**settings).run(list(entries), contexts, bracket=events)
        return events

    def capture(
        self, *entries: Callable[[], Any], streams: list[VirtualStream] | None = None
    ) -> tuple[StepEvents, Callable[[], None]]:
        """The events of a captured step, and what replays it; run eagerly before, as a warm-up does.

        The program then holds the captured step only.
        """
        contexts = self.contexts(len(entries))
        events = self.timeline.captured(contexts)

        def step() -> None:
            Scheduler().run(list(entries), contexts, bracket=events)

        step()
        self.gpu.host(max(0, 10_000 - self.gpu.now))
        self.gpu.program.clear()
        return events, self.gpu.capture(step, [self.compute, self.comm] if streams is None else streams)

    def layer(self, attention: float, dispatch: float, experts: float) -> Callable[[], None]:
        """Attention, a dispatch on the comm stream, experts behind it."""

        def entry() -> None:
            self.work(attention)
            y.dbo_yield_and_switch_from_compute_to_comm("layer0.before_dispatch")
            self.work(dispatch)
            y.dbo_switch_to_compute_sync()
            self.work(experts)
            y.dbo_yield("layer0.before_combine")

        return entry


@pytest.mark.parametrize("carrier", ["greenlet", "thread"])
def test_an_eager_step_gives_the_times_that_were_built_in(carrier: str) -> None:
    bench = Bench()
    events = bench.run(bench.layer(100, 50, 30), bench.layer(80, 200, 40), carrier=carrier)
    times = events.read()
    assert [(t.microbatch, t.number, t.decision, t.begin_site, t.end_site) for t in times] == [
        (0, 0, 0, "", "layer0.before_dispatch"),
        (1, 0, 1, "", "layer0.before_dispatch"),
        (0, 1, 2, "layer0.before_dispatch", "layer0.before_combine"),
        (1, 1, 3, "layer0.before_dispatch", "layer0.before_combine"),
        (0, 2, 4, "layer0.before_combine", ""),
        (1, 2, 5, "layer0.before_combine", ""),
    ]
    assert [t.compute for t in times] == [
        Stretch(0, 100),
        Stretch(100, 180),
        Stretch(180, 210),  # the dispatch was done at 150: no wait
        Stretch(210, 420, waited=170),  # until the second dispatch is done at 380
        Stretch(420, 420),
        Stretch(420, 420),
    ]
    # Each begins when its attention is done and the comm stream is free, whenever the host enqueued it.
    assert [t.comm for t in times[:2] + times[4:]] == [None] * 4
    assert times[2].comm == Stretch(0, 150, waited=100)
    assert times[3].comm == Stretch(150, 380, waited=30)


def test_overlap_is_that_of_the_construction() -> None:
    bench = Bench()
    events = bench.run(bench.layer(100, 50, 30), bench.layer(80, 200, 40))
    use = gpu_use(as_records(events.read(), step=0))
    # Compute 0-210 and 380-420, comm 100-150 and 180-380.
    assert (use.length, use.compute, use.comm, use.both) == (420, 250, 250, 80)


LENGTHS = st.lists(st.tuples(*[st.integers(0, 40)] * 4), min_size=1, max_size=3)


@given(st.lists(LENGTHS, min_size=1, max_size=3).filter(lambda parts: len({len(p) for p in parts}) == 1), st.booleans())
def test_use_and_overlap_of_random_steps(parts: list[list[tuple[int, int, int, int]]], graph: bool) -> None:
    """Each microbatch has layers of (attention, dispatch, experts, combine); the truth is what the virtual GPU ran."""

    def model(layers: list[tuple[int, int, int, int]]) -> None:
        for layer, (attention, dispatch, experts, combine) in enumerate(layers):
            bench.work(attention)
            y.dbo_yield_and_switch_from_compute_to_comm(f"layer{layer}.before_dispatch")
            bench.work(dispatch)
            y.dbo_switch_to_compute_sync()
            bench.work(experts)
            y.dbo_yield_and_switch_from_compute_to_comm(f"layer{layer}.before_combine")
            bench.work(combine)
            y.dbo_yield_and_switch_from_comm_to_compute(f"layer{layer}.combine")

    bench = Bench()
    entries = [partial(model, layers) for layers in parts]
    if graph:
        events, replay = bench.capture(*entries)
        replay()
        events.replayed()
    else:
        events = bench.run(*entries)
    busy: dict[str, set[int]] = {"compute": set(), "comm": set()}
    for lane in bench.gpu.lanes():
        busy[lane.stream].update(range(round(lane.begin), round(lane.end)))
    use = gpu_use(as_records(events.read(), step=0))
    assert (use.compute, use.comm) == (len(busy["compute"]), len(busy["comm"]))
    assert use.both == len(busy["compute"] & busy["comm"])


def test_neighbouring_slices_share_an_event_and_steps_use_them_again() -> None:
    bench = Bench()
    for _ in range(3):
        before = bench.records()
        events = bench.run(bench.layer(1, 1, 1), bench.layer(1, 1, 1))
        # Six slices: seven on compute, and two waits there; on comm a wait and an end for each of two uses.
        assert events.count == 7 + 2 + 4
        assert bench.records() - before == events.count + 2 + 2  # the contexts' own events
    assert bench.gpu.timing_events == events.count


def test_a_model_that_does_not_switch_has_no_comm_times_unless_every_slice_is_asked_for() -> None:
    def entry() -> None:
        bench.work(10)
        y.dbo_yield("a")
        bench.work(7, bench.comm)  # behind the back of the contexts

    bench = Bench()
    events = bench.run(entry, entry)
    assert [t.comm for t in events.read()] == [None] * 4
    bench = Bench(every_slice=True)
    events = bench.run(entry, entry)
    assert [t.comm for t in events.read()] == [Stretch(0, 0), Stretch(0, 0), Stretch(0, 7), Stretch(7, 14)]
    assert events.count == 5 + 4


def test_which_slices_use_the_comm_stream() -> None:
    def entry() -> None:
        y.dbo_switch_to_comm()
        bench.work(5)
        y.dbo_yield("on comm")
        bench.work(6)
        y.dbo_yield("still there")
        y.dbo_switch_to_compute()
        bench.work(1)

    def without_a_wait() -> None:
        y.dbo_switch_to_comm()
        bench.work(7)
        y.dbo_yield_and_switch_from_comm_to_compute("back")
        bench.work(1)

    bench = Bench()
    events = bench.run(entry)
    assert [t.comm for t in events.read()] == [None, Stretch(0, 11), None]
    bench = Bench()
    events = bench.run(without_a_wait)
    assert [(t.comm, t.compute) for t in events.read()] == [(Stretch(0, 7), Stretch(0, 0)), (None, Stretch(0, 8, 7))]


def test_only_the_first_wait_of_a_slice_is_a_wait() -> None:
    """What the slice ran before a later wait would count as waiting otherwise."""

    def entry() -> None:
        bench.work(10, bench.comm)
        y.dbo_switch_to_compute_sync()
        bench.work(5)
        bench.work(20, bench.comm)
        y.dbo_switch_to_compute_sync()

    bench = Bench()
    events = bench.run(entry)
    assert events.read()[0].compute == Stretch(0, 30, waited=10)


# -- graphs ------------------------------------------------------------------------------------------------------------


def test_each_replay_has_times_of_its_own() -> None:
    bench = Bench()
    events, replay = bench.capture(bench.layer(100, 50, 30), bench.layer(80, 200, 40))
    with pytest.raises(GpuTimelineError, match=r"captured and not replayed since; launch its graph and call replayed"):
        events.read()
    replay()
    events.replayed()
    first = events.read()
    assert [t.compute.end for t in first] == [100, 180, 210, 420, 420, 420]
    where = events.anchor().begin_ns
    bench.work(1000, bench.compute)  # lies before the next replay
    replay()
    events.replayed()
    assert events.read() == first
    assert events.anchor().begin_ns - where == (420 + 1000) * 1000


def test_two_graphs_do_not_share_events() -> None:
    bench = Bench()
    small, replay_small = bench.capture(bench.layer(1, 2, 3))
    large, replay_large = bench.capture(bench.layer(100, 200, 300))
    replay_small(), small.replayed()
    replay_large(), large.replayed()
    assert [t.compute.end for t in small.read()] == [1, 6, 6]
    assert [t.compute.end for t in large.read()] == [100, 600, 600]


def test_a_comm_stream_that_is_no_part_of_the_capture() -> None:
    bench = Bench()
    with pytest.raises(GpuTimelineError, match=r"'compute' and 'comm' only one is being captured; name the comm"):
        bench.capture(bench.layer(1, 1, 1), streams=[bench.compute])


def test_what_was_never_captured_cannot_be_replayed() -> None:
    bench = Bench()
    events = bench.timeline.captured(bench.contexts(1))
    with pytest.raises(GpuTimelineError, match="were not captured into a graph"):
        events.replayed()
    with pytest.raises(GpuTimelineError, match="the step was not run; run it with these events as bracket"):
        events.read()
    with pytest.raises(GpuTimelineError, match="not run"):
        events.anchor()


def test_a_graph_that_was_not_launched_after_all() -> None:
    bench = Bench()
    contexts = bench.contexts(1)
    events = bench.timeline.captured(contexts)
    step = partial(Scheduler().run, [bench.layer(1, 1, 1)], contexts, bracket=events)
    bench.gpu.capture(step, [bench.compute, bench.comm])
    events.replayed()
    with pytest.raises(GpuTimelineError, match="was its graph launched"):
        events.read()


# -- steps that fail ---------------------------------------------------------------------------------------------------


def test_a_failed_step_keeps_what_was_measured_and_the_next_one_works() -> None:
    def fails() -> None:
        bench.work(10)
        y.dbo_yield_and_switch_from_compute_to_comm("layer0.before_dispatch")
        raise ZeroDivisionError

    bench = Bench()
    with pytest.raises(MicrobatchFailed):
        bench.run(fails, bench.layer(1, 1, 1))
    events = bench.timeline.eager(bench.contexts(2))
    assert [t.microbatch for t in events.read()][:2] == [0, 1]
    count = events.count
    bench.timeline.device.wait(bench.comm, bench.gpu.new_event())
    assert events.count == count  # outside a step nothing is recorded
    events = bench.run(bench.layer(1, 2, 3))
    assert [t.microbatch for t in events.read()] == [0, 0, 0]


def test_a_cpu_has_no_timeline() -> None:
    with pytest.raises(ConfigurationError, match="needs a CUDA device, this is cpu"):
        GpuTimeline(cpu_device())


# -- on the trace's axis -----------------------------------------------------------------------------------------------


def test_the_anchor_is_exact_to_half_a_round_trip() -> None:
    bench = Bench()
    bench.gpu.host(1000)
    events = bench.run(bench.layer(100, 50, 30))
    bench.ask = 8  # the clock is read 8 us after the call: once before the event, once behind it
    anchor = events.anchor()
    # The step begins at 1000 us of a clock that begins at 5000.
    assert abs(anchor.begin_ns / 1000 - 6000) <= anchor.error
    assert anchor.error == 4


def test_records_are_read_back_as_they_were(tmp_path: Path) -> None:
    bench = Bench()
    origin = bench.clock()
    bench.gpu.host(250)
    events, replay = bench.capture(bench.layer(100, 50, 30), bench.layer(80, 200, 40))
    replay()
    events.replayed()
    records = events.records(step=3, rank=1, run="dbo", origin_ns=origin)
    assert [(r.ubatch, r.slice, r.stream) for r in records] == [
        (0, 0, "compute"),
        (1, 0, "compute"),
        (0, 1, "compute"),
        (0, 1, "comm"),
        (1, 1, "compute"),
        (1, 1, "comm"),
        (0, 2, "compute"),
        (1, 2, "compute"),
    ]
    assert (records[5].begin, records[5].end, records[5].waited) == (10_150, 10_380, 30)
    assert (records[5].after, records[5].site) == ("layer0.before_dispatch", "layer0.before_combine")
    with TraceWriter(tmp_path / "t.jsonl") as writer:
        writer.write(HeaderRecord("0.1.0", 1, 2), *records)
    assert read_trace(tmp_path / "t.jsonl").step(3).gpu == records


def test_events_of_streams_that_are_not_used_any_more_are_dropped() -> None:
    bench = Bench()

    def events() -> StepEvents:
        return bench.timeline.eager(make_ubatch_contexts(1, bench.compute, bench.comm, device=bench.gpu))

    first = events()
    assert events() is first
    for number in range(20):
        other = bench.gpu.new_stream(f"graph {number}")
        bench.timeline.eager(make_ubatch_contexts(1, other, bench.comm, device=bench.gpu))
    assert events() is not first
