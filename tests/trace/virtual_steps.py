"""Steps of the documented layers on a virtual device: run, run again with shorter stages, and recorded as a trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dbo_greenlet import Scheduler
from dbo_greenlet.devices.virtual import VirtualDevice
from dbo_greenlet.gpu_timeline import GpuTimeline
from dbo_greenlet.policy import Policy
from dbo_greenlet.testing.layer_programs import Costs, HighThroughput, LowLatency, high_throughput, low_latency
from dbo_greenlet.testing.step_run import StepUnderTest, TestBed
from dbo_greenlet.trace import RecvRecord, SliceRecord, StepRecord, StepRecorder, StepTrace

# Whose time each cost is; in the slices of low latency the shared expert cannot be told from the experts.
STAGES = {
    "attention": ("a0", "a1"),
    "dispatch": ("dispatch", "counts"),
    "experts": ("mlp",),
    "combine": ("combine",),
    "shared": ("shared",),
    "other": ("out",),
}
TOLD_BY_SLICES = STAGES | {"experts": ("mlp", "shared"), "shared": ()}


def shorter(costs: Costs, factors: Mapping[str, float], stages: Mapping[str, tuple[str, ...]] = STAGES) -> Costs:
    """The costs with stages shortened by these shares of their time."""
    changed = {
        name: getattr(costs, name) * (1 - factors.get(stage, 0.0)) for stage, names in stages.items() for name in names
    }
    return replace(costs, **changed)


class VirtualStep:
    """One step on a virtual device, from microsecond 0 until the host knows that the device is done.

    Attributes: `device`, `length` (microseconds), `trace` (the step as its recorder and its timeline see it).
    """

    def __init__(
        self,
        pattern: str,
        layers: int,
        costs: Costs,
        policy: Policy,
        *,
        count: int = 2,
        launch: float = 0.0,
        timed: bool = False,
        host_waits: bool = True,
        operations: bool = False,
        kind: Any = None,
    ) -> None:
        make, usual = PATTERNS[pattern]
        build = make(
            layers, costs=costs, numerics=False, mutate=None if host_waits else _never_wait, kind=kind or usual
        )
        device = self.device = VirtualDevice(launch=launch)
        bed = TestBed(device, count)
        step: Any = build(bed)
        assert isinstance(step, StepUnderTest)
        contexts = bed.contexts()
        recorder = StepRecorder(clock=device.clock)
        watched = recorder.device(device) if operations else device
        for each in contexts:
            each.device = watched
        bracket = None
        if timed:
            bracket = GpuTimeline(watched, clock=device.clock, capturing=device.capturing).eager(contexts)
        result = Scheduler(policy, instruments=[recorder]).run(step.entries, contexts, bracket=bracket)
        done = device.new_event()
        device.record(done, contexts[0].comm_stream)
        device.wait(contexts[0].compute_stream, done)
        device.synchronize()
        self.length = device.now
        self.trace = StepTrace("dbo", 0, 0)
        for record in recorder.records(step=0):
            if isinstance(record, SliceRecord):
                self.trace.slices.append(record)
            elif isinstance(record, RecvRecord):
                self.trace.receives.append(record)
            elif operations:
                self.trace.ops.append(record)
        if bracket is not None:
            self.trace.gpu.extend(bracket.records(step=0, origin_ns=recorder.origin_ns))
        schedule = result.schedule
        self.trace.record = StepRecord(
            0, 0, "dbo", 8, 8, True, "", slices=[[0, 1, 0, 1]] * count, schedule=schedule.encode(), begin=0.0,
            end=self.length,
        )  # fmt: skip


class OnTheHost(LowLatency):
    """The host computes, a wire of its own for each microbatch carries, and a receive holds the host up."""

    def attention(self, i: int, layer: int) -> None:
        self.device.host(self.costs.a0 + self.costs.a1)

    def experts(self, i: int, layer: int) -> None:
        self.device.host(self.costs.mlp)

    def shared(self, i: int, layer: int) -> None:
        self.device.host(self.costs.shared)

    def result(self, i: int) -> None:
        self.device.host(self.costs.out)

    def receive(self, sent: Any, accesses: Any) -> None:
        wire = self.device.new_stream("wire")
        self.device.receive(sent, stream=wire)
        self.device.wait_for_host(wire)


def _never_wait(run: Any) -> None:
    run.host_blocks = False


# Kept last: it names what is above it.
PATTERNS: dict[str, tuple[Any, Any]] = {
    "LL": (low_latency, LowLatency),
    "HT": (high_throughput, HighThroughput),
    "CPU": (low_latency, OnTheHost),
}
