"""What of scripts/bench_gpu_timeline.py needs no GPU: its step, its check and its rows."""

from __future__ import annotations

import dataclasses

import bench_gpu_timeline as script
import pytest
import torch
from bench_gpu_common import Bench, spread

from dbo_greenlet.devices import cpu_device
from dbo_greenlet.devices.virtual import VirtualDevice
from dbo_greenlet.gpu_timeline import GpuTimeline, Stretch
from dbo_greenlet.gpu_times import SliceTimes


@pytest.fixture
def rig() -> script.Rig:
    """The script's work on a GPU whose clock is a number."""
    rig = object.__new__(script.Rig)
    rig.device = VirtualDevice()
    rig.comm = rig.device.new_stream("comm")
    rig.inputs = [torch.ones(2, 2), torch.full((2, 2), 3.0)]
    rig.sleep = lambda microseconds: rig.device.work("sleep", microseconds)
    return rig


def times_of(rig: script.Rig, model: str, **settings: bool) -> tuple[list[SliceTimes], int]:
    gpu = rig.device
    timeline = GpuTimeline(gpu, clock=gpu.clock, capturing=gpu.capturing, **settings)
    run, events = rig.step(getattr(rig, model), gpu.default_stream, timeline, graph=False)
    run()
    return events.read(), events.count


def test_the_long_step_is_what_it_is_compared_with(rig: script.Rig) -> None:
    times, _ = times_of(rig, "long")
    compared = script.compare(times)
    assert all(got == built for got, built in compared.values())
    assert set(compared) == {*script.LONG, "comm in use", "comm under compute"}
    assert script.wrong(compared) == []


def test_the_numbers_of_events_that_the_notes_name(rig: script.Rig) -> None:
    times, count = times_of(rig, "small")
    assert (len(times), count) == (482, 1203)
    begins_of_their_own = len(times) - 1 + sum(t.comm is not None for t in times)
    assert count + begins_of_their_own == 1924
    assert times_of(rig, "small", every_slice=True)[1] == 1445
    assert times_of(rig, "plain")[1] == 243


def test_wrong_times_are_found(rig: script.Rig) -> None:
    times, _ = times_of(rig, "long")
    with pytest.raises(SystemExit, match="out of order on the compute stream"):
        script.compare([*times[4:], *times[:4]])
    shorter = [
        dataclasses.replace(t, comm=t.comm and Stretch(t.comm.begin, t.comm.end - 6, t.comm.waited)) for t in times
    ]
    said = script.wrong(script.compare(shorter))
    assert [each.partition(":")[0] for each in said] == ["dispatch", "combine", "comm in use", "comm under compute"]
    assert script.wrong({"x": (float("nan"), 1.0)}) == ["x: nan, not 1.0 us"]


def test_a_row_has_what_each_event_costs() -> None:
    off, on = {"gpu": spread([10.0, 12.0, 11.0])}, {"gpu": spread([31.0, 30.0, 32.0])}
    assert script.row("off", 0, off, off, ["gpu"]) == ["off", "0", "11.0 (10.0 to 12.0)", ""]
    assert script.row("on", 10, on, off, ["gpu"]) == ["on", "10", "31.0 (30.0 to 32.0)", "2.00"]


def test_a_machine_without_a_gpu_measures_nothing_and_says_so() -> None:
    report = script.measure(Bench(cpu_device(), quick=True))
    assert report.tables == [] and report.said == ["only a GPU has timing events: nothing was measured"]
