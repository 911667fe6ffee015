"""The GPU timeline against programs of known length, eager and captured. Run where there is a GPU: pytest -m gpu"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run: python -m pytest -m gpu"),
]

LENGTHS = {"attention": (300.0, 200.0), "dispatch": (150.0, 600.0), "experts": (100.0, 250.0)}  # per microbatch


class Rig:
    """A device with two streams, a timeline, and work that takes stated microseconds."""

    def __init__(self) -> None:
        from dbo_greenlet.devices.cuda import CudaDevice
        from dbo_greenlet.gpu_timeline import GpuTimeline

        self.device = CudaDevice()
        self.timeline = GpuTimeline(self.device)
        self.comm = self.device.new_stream("comm")
        self.cycles = self._cycles_per_microsecond()

    def _cycles_per_microsecond(self) -> float:
        found = []
        for _ in range(7):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            torch.cuda._sleep(2_000_000)
            end.record()
            end.synchronize()
            found.append(2_000_000 / (begin.elapsed_time(end) * 1000))
        return statistics.median(found)

    def sleep(self, microseconds: float) -> None:
        torch.cuda._sleep(round(microseconds * self.cycles))

    def run(self, *entries: Callable[[], Any]) -> Any:
        """An eager step, and its events. The host is ahead of the GPU: no time between two launches is in a slice."""
        from dbo_greenlet import Scheduler, make_ubatch_contexts

        contexts = make_ubatch_contexts(len(entries), self.device.current_stream(), self.comm, device=self.device)
        events = self.timeline.eager(contexts)
        self.sleep(3000)
        Scheduler().run(list(entries), contexts, bracket=events)
        return events

    def capture(self, pool: Any, *entries: Callable[[], Any], streams: list[Any] | None = None) -> tuple[Any, Any]:
        """The events of a captured step, and the graph."""
        from dbo_greenlet import Scheduler, make_ubatch_contexts

        contexts = make_ubatch_contexts(len(entries), pool.stream, self.comm, device=self.device)
        events = self.timeline.captured(contexts)
        return events, pool.capture(
            lambda: Scheduler().run(list(entries), contexts, bracket=events),
            streams=[self.comm] if streams is None else streams,
        )

    def layer(self, index: int) -> Callable[[], None]:
        """Attention, a dispatch on the comm stream, experts behind it."""
        from dbo_greenlet import yields as y

        def entry() -> None:
            self.sleep(LENGTHS["attention"][index])
            y.dbo_yield_and_switch_from_compute_to_comm("layer0.before_dispatch")
            self.sleep(LENGTHS["dispatch"][index])
            y.dbo_switch_to_compute_sync()
            self.sleep(LENGTHS["experts"][index])
            y.dbo_yield("layer0.before_combine")

        return entry


@pytest.fixture
def rig() -> Rig:
    return Rig()


def near(expected: float) -> Any:
    """Within 5 % and 2 us."""
    return pytest.approx(expected, rel=0, abs=0.05 * expected + 2)


def check_times(times: list[Any]) -> None:
    """As in the table of tests/core/test_gpu_timeline.py, with these lengths."""
    a0, a1 = LENGTHS["attention"]
    d0, d1 = LENGTHS["dispatch"]
    e0, e1 = LENGTHS["experts"]
    first, second, third, fourth = (t.compute for t in times[:4])
    assert first.end - first.begin == near(a0) and second.end - second.begin == near(a1)
    assert third.end - third.begin - third.waited == near(e0) and third.waited == near(0)
    assert fourth.end - fourth.begin - fourth.waited == near(e1)
    one, two = times[2].comm, times[3].comm
    assert one.begin + one.waited == near(a0)
    assert one.end - one.begin - one.waited == near(d0)
    assert two.begin + two.waited == near(a0 + a1)
    assert two.end - two.begin - two.waited == near(d1)
    assert fourth.begin + fourth.waited == near(a0 + a1 + d1)
    for stream in ("compute", "comm"):
        stretches = [s for t in times if (s := getattr(t, stream)) is not None]
        for earlier, later in itertools.pairwise(stretches):
            assert earlier.begin <= earlier.begin + earlier.waited <= earlier.end <= later.begin
    from dbo_greenlet.gpu_times import as_records
    from dbo_greenlet.trace import gpu_use

    use = gpu_use(as_records(times, step=0))
    assert use.comm == near(d0 + d1)
    assert use.both == near(d0 + e0)  # the first dispatch under attention, the second one under the first experts
    assert use.compute == near(a0 + a1 + e0 + e1)


def test_an_eager_step(rig: Rig) -> None:
    rig.run(rig.layer(0), rig.layer(1))  # the first takes the host longer than the GPU
    for _ in range(3):
        check_times(rig.run(rig.layer(0), rig.layer(1)).read())


def test_each_replay_of_a_graph(rig: Rig) -> None:
    from dbo_greenlet.gpu_timeline import GpuTimelineError
    from dbo_greenlet.graphs import GraphPool

    events, graph = rig.capture(GraphPool(rig.device), rig.layer(0), rig.layer(1))
    with pytest.raises(GpuTimelineError, match="captured and not replayed"):
        events.read()
    for _ in range(4):
        graph.replay()
        events.replayed()
        check_times(events.read())


def test_two_graphs_and_eager_steps_keep_their_times_apart(rig: Rig) -> None:
    from dbo_greenlet.graphs import GraphPool

    pool = GraphPool(rig.device)
    made = [(length, *rig.capture(pool, lambda length=length: rig.sleep(length))) for length in (300.0, 900.0)]
    for _ in range(2):
        rig.sleep(3000)  # as in the eager steps: the host launches a graph with events piece by piece
        for _, events, graph in made:
            graph.replay()
            events.replayed()
        eager = rig.run(lambda: rig.sleep(700))
        for length, events, _ in made:
            assert events.read()[0].compute.end == near(length)
        assert eager.read()[0].compute.end == near(700)


def test_a_comm_stream_that_the_capture_does_not_know(rig: Rig) -> None:
    from dbo_greenlet.errors import GraphCaptureError
    from dbo_greenlet.gpu_timeline import GpuTimelineError
    from dbo_greenlet.graphs import GraphPool

    with pytest.raises(GraphCaptureError) as caught:
        rig.capture(GraphPool(rig.device), lambda: rig.sleep(10), streams=[])
    assert isinstance(caught.value.__cause__, GpuTimelineError)
    check_times(rig.run(rig.layer(0), rig.layer(1)).read())


def test_the_place_on_the_hosts_clock(rig: Rig) -> None:
    from dbo_greenlet import Scheduler, make_ubatch_contexts

    contexts = make_ubatch_contexts(1, rig.device.current_stream(), rig.comm, device=rig.device)
    events = rig.timeline.eager(contexts)
    for _ in range(3):
        rig.device.synchronize()
        before = perf_counter_ns()
        Scheduler().run([lambda: rig.sleep(2000)], contexts, bracket=events)
        enqueued = perf_counter_ns()
        rig.device.synchronize()
        after = perf_counter_ns()
        anchor = events.anchor()
        end = anchor.begin_ns + 1000 * events.read()[-1].compute.end
        slack = 1000 * anchor.error + 1000
        # The GPU begins while the host enqueues, and ends before the host has noticed that it did.
        assert before - slack <= anchor.begin_ns <= enqueued + slack
        assert enqueued < end <= after + slack
