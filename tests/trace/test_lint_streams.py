"""The lint's rules about streams and events: each with a step that triggers it and one that nearly does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import get_ident
from typing import Any

import pytest

from dbo_greenlet.policies import InTurn
from dbo_greenlet.step import running
from dbo_greenlet.testing.layer_programs import HighThroughput, LowLatency, high_throughput, low_latency
from dbo_greenlet.testing.step_run import TestBed
from dbo_greenlet.trace.records import OpRecord
from dbo_greenlet.yields import (
    dbo_get_previous_event,
    dbo_switch_to_comm,
    dbo_switch_to_comm_sync,
    dbo_switch_to_compute,
    dbo_switch_to_compute_sync,
    dbo_yield,
)
from tests.testing.planted_bugs import RecordsAfterTheSwitch
from tests.trace.lint_runs import found, header, look, missing, recorded, write


def high(kind: type[HighThroughput] = HighThroughput, layers: int = 2) -> Any:
    return high_throughput(layers, numerics=False, kind=kind)


def low(kind: type[LowLatency] = LowLatency, layers: int = 2) -> Any:
    return low_latency(layers, numerics=False, kind=kind)


def no_join() -> None:
    """Nobody joins the streams behind the step."""


class Unjoined:
    """A build whose step is not joined by who runs it."""

    def __init__(self, build: Any) -> None:
        self.build = build

    def __call__(self, bed: Any) -> Any:
        step = self.build(bed)
        step.after = no_join
        return step


@pytest.mark.parametrize("build", [high(), low()], ids=["high throughput", "low latency"])
@pytest.mark.parametrize("memory", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_nothing_is_found_in_the_documented_layers(tmp_path: Path, build: Any, memory: bool, count: int) -> None:
    trace = write(tmp_path / "t.jsonl", header(device="cuda"), recorded(build, count=count, memory=memory))
    assert found(look(trace)) == []


# -- event-after-yield -------------------------------------------------------------------------------------------------


class RecordsBehindOwnWork(HighThroughput):
    """Nearly a late event: it is recorded after the switch, but behind work of the slice's own."""

    def over_to_comm(self, site: str) -> None:
        if not site.endswith("before_dispatch"):
            return super().over_to_comm(site)
        dbo_yield(site)
        self.device.work("more of A1", 10.0)
        self.device.work("and more", 10.0)
        dbo_switch_to_comm_sync()
        return None


def test_an_event_recorded_after_the_yield(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl", header(), recorded(high(RecordsAfterTheSwitch)))
    report = look(trace, only=["event-after-yield"])
    assert found(report) == [("event-after-yield", 4, 0, 0, 0, 1, "layer0.before_combine")]
    (finding,) = report.findings
    assert finding.what == (
        "#4 record 'record' on compute, microbatch 0 (slice 1, after 'layer0.before_dispatch') stands behind #3 work "
        "'A1' on compute, microbatch 1 (slice 0, before its first yield), so comm waits (#5) for the sibling's work "
        "too; what microbatch 0 itself put on compute ends with #1 ('A1'), before the switch"
    )
    assert (finding.layers, finding.microbatches, finding.place.operation) == ({0, 1}, {0, 1}, 4)
    assert finding.remedy.startswith("put in what is missing: the record of event 1 before the yield, right behind #1")
    assert missing(report) == {}


class CapturesAfterTheSwitch(HighThroughput):
    """As DeepEP's users have it: the library captures an event, and its stream waits for that one. Behind the yield."""

    def over_to_comm(self, site: str) -> None:
        early = None if self.captures_late else dbo_get_previous_event(self.capture)
        super().over_to_comm(site)
        event = dbo_get_previous_event(self.capture) if early is None else early
        self.device.wait(self.device.current_stream(), event)

    captures_late = True

    def capture(self) -> Any:
        # By the device itself, behind the back of the contexts.
        event = self.device.new_event()
        self.device.record(event, self.device.current_stream())
        self.device.host(8.0)
        return event


class CapturesBeforeTheSwitch(CapturesAfterTheSwitch):
    captures_late = False


@pytest.mark.parametrize("memory", [True, False])
def test_an_event_that_a_library_captures_after_the_yield(tmp_path: Path, memory: bool) -> None:
    trace = write(tmp_path / "t.jsonl", header(), recorded(high(CapturesAfterTheSwitch), memory=memory))
    report = look(trace, only=["event-after-yield"])
    assert found(report) == [
        ("event-after-yield", 4, 0, 0, 0, 1, "layer0.before_combine"),
        ("event-after-yield", 4, 0, 0, 0, 2, "layer0.combine"),
    ]
    if not memory:
        assert report.findings[0].what == (
            "#3 records an event on compute 10.0 us after the slice began, so early that it may well mark nothing of "
            "this slice; the library then waits for what microbatch 1 enqueued since the yield"
        )
    right = write(tmp_path / "r.jsonl", header(), recorded(high(CapturesBeforeTheSwitch), memory=memory))
    assert found(look(right, only=["event-after-yield"])) == []


class CapturesBehindOwnWork(CapturesAfterTheSwitch):
    """Correct: the slice waits on comm, goes back, launches work of its own, and captures behind that."""

    def over_to_comm(self, site: str) -> None:
        HighThroughput.over_to_comm(self, site)
        dbo_switch_to_compute()
        self.device.work("own", 10.0)
        event = dbo_get_previous_event(self.capture)
        dbo_switch_to_comm()
        self.device.wait(self.device.current_stream(), event)


@pytest.mark.parametrize("memory", [True, False])
def test_an_event_that_a_library_captures_behind_own_work(tmp_path: Path, memory: bool) -> None:
    trace = write(tmp_path / "t.jsonl", header(), recorded(high(CapturesBehindOwnWork), memory=memory))
    assert found(look(trace, only=["event-after-yield"])) == []


def ambient_device() -> Any:
    """The device of the microbatch's context, which tells the recorder of events."""
    microbatch = running[get_ident()]
    assert microbatch.context is not None
    return microbatch.context.device


class WaitsForItself(HighThroughput):
    """An event is recorded after the switch, and nobody but its own stream waits for it."""

    def experts(self, i: int, layer: int) -> None:
        device: Any = ambient_device()
        event, compute = device.new_event(), device.default_stream
        for each in range(2):
            device.record(event, compute)
            device.wait(compute, event)
            dbo_yield(f"layer{layer}.experts{each}")
        super().experts(i, layer)


@pytest.mark.parametrize("memory", [True, False])
def test_an_event_that_only_its_own_stream_waits_for(tmp_path: Path, memory: bool) -> None:
    trace = write(tmp_path / "t.jsonl", header(), recorded(high(WaitsForItself), memory=memory))
    assert found(look(trace, only=["event-after-yield"])) == []


def test_an_event_recorded_behind_own_work(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl", header(), recorded(high(RecordsBehindOwnWork)))
    assert found(look(trace, only=["event-after-yield"])) == []


def test_an_event_recorded_after_the_yield_by_the_events_alone(tmp_path: Path) -> None:
    """What was enqueued is not in the trace; that nothing can have been launched in a microsecond is."""
    trace = write(tmp_path / "t.jsonl", header(), recorded(high(RecordsAfterTheSwitch), memory=False))
    report = look(trace, only=["event-after-yield"])
    assert found(report) == [("event-after-yield", 4, 0, 0, 0, 1, "layer0.before_combine")]
    assert report.findings[0].what == (
        "#0 records an event on compute 1.0 us after the slice began, too early for work of its own, so comm (#1) "
        "waits for what microbatch 1 enqueued since the yield"
    )
    assert missing(report) == {
        "event-after-yield": "needs op records of what was enqueued (`dbo-greenlet record --memory`); without, only "
        "events were looked at that are recorded within 5 us of their slice's begin"
    }
    assert report.not_checked[0].checked == 1


def test_an_event_recorded_behind_own_work_by_the_events_alone(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl", header(), recorded(high(RecordsBehindOwnWork), memory=False))
    assert found(look(trace, only=["event-after-yield"])) == []


def test_a_late_event_is_none_where_no_sibling_ran(tmp_path: Path) -> None:
    """One after the other there is nobody else's work for it to stand behind."""
    for memory in (True, False):
        trace = write(tmp_path / "t.jsonl", header(), recorded(high(RecordsAfterTheSwitch), InTurn(), memory=memory))
        assert found(look(trace, only=["event-after-yield"])) == []


# -- comm-on-compute ---------------------------------------------------------------------------------------------------


class StaysOnCompute(HighThroughput):
    """It yields, and nothing goes to the comm stream."""

    host_blocks = False

    def over_to_comm(self, site: str) -> None:
        dbo_yield(site)

    def back_to_compute(self) -> None:
        pass

    def moe(self, i: int, layer: int) -> None:
        plan, costs, device = self.plan, self.costs, self.device
        self.over_to_comm(f"layer{layer}.before_dispatch")
        device.work("D", costs.dispatch, accesses=plan.d[i])
        self.experts(i, layer)
        self.over_to_comm(f"layer{layer}.before_combine")
        device.work("C", costs.combine, accesses=plan.c[i])
        self.shared(i, layer)
        dbo_yield(f"layer{layer}.combine")


class ReceivesAtOnce(LowLatency):
    """A dispatch that is received in the slice that sent it, before the yield."""

    def leave(self, sent: Any, accesses: Any, site: str) -> None:
        if sent.name != "D":
            return super().leave(sent, accesses, site)
        self.receive(sent, accesses)
        dbo_yield(site)
        return None


def test_communication_on_the_compute_stream(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl", header(), recorded(high(StaysOnCompute)))
    report = look(trace, only=["comm-on-compute"])
    assert found(report) == [
        ("comm-on-compute", 4, 0, 0, 0, 1, "layer0.before_combine"),
        ("comm-on-compute", 4, 0, 0, 0, 2, "layer0.combine"),
    ]
    assert [each.what for each in report.findings] == [
        "#4 'D' is communication and runs on compute, where the other microbatch computes",
        "#8 'C' is communication and runs on compute, where the other microbatch computes",
    ]


def test_communication_on_the_compute_stream_by_the_events_alone(tmp_path: Path) -> None:
    """Sites of communication on a stream of its own, and events (of the join) on nothing but the compute stream."""
    records = recorded(high(StaysOnCompute), memory=False)
    kept = [each for each in records if not isinstance(each, OpRecord) or each.stream == "compute"]
    assert any(isinstance(each, OpRecord) for each in kept)
    report = look(write(tmp_path / "t.jsonl", header(), kept), only=["comm-on-compute"])
    assert found(report) == [("comm-on-compute", 1, 0, 0, 0, 0, "layer0.before_dispatch")]


def test_communication_behind_the_microbatches_is_in_nobodys_way(tmp_path: Path) -> None:
    """A gather of the outputs, when both have returned."""

    class Gathers(Unjoined):
        def __call__(self, bed: Any) -> Any:
            step = self.build(bed)
            step.after = lambda: bed.device.work("all_gather", 10.0)
            return step

    trace = write(tmp_path / "t.jsonl", header(), recorded(Gathers(high())))
    assert found(look(trace)) == []


def test_communication_that_is_waited_for_at_once(tmp_path: Path) -> None:
    report = look(write(tmp_path / "t.jsonl", header(), recorded(low(ReceivesAtOnce))), only=["comm-on-compute"])
    assert found(report) == [("comm-on-compute", 4, 0, 0, 0, 0, "layer0.dispatch")]
    assert report.findings[0].what == (
        "#2 sends 'D' and compute waits for it at #3, in the same slice: the other microbatch has no turn while it "
        "flies"
    )


def test_hooks_without_operations_do_not_tell_the_stream(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl", header(), recorded(low(), memory=False))
    report = look(trace, only=["comm-on-compute"])
    assert found(report) == [] and report.checked == []
    assert missing(report)["comm-on-compute"].startswith("needs op records")


# -- unjoined-stream ---------------------------------------------------------------------------------------------------


class LeavesTheCombine(HighThroughput):
    """The last combine of the last microbatch is left on the comm stream."""

    def over_to_compute(self, site: str) -> None:
        if site == f"layer{self.layers - 1}.combine":
            dbo_yield(site)
            dbo_switch_to_compute()
        else:
            super().over_to_compute(site)


@pytest.mark.parametrize("memory", [True, False])
def test_a_stream_that_is_not_joined(tmp_path: Path, memory: bool) -> None:
    trace = write(tmp_path / "t.jsonl", header(), recorded(Unjoined(high(LeavesTheCombine)), memory=memory))
    report = look(trace, only=["unjoined-stream"])
    assert found(report) == [("unjoined-stream", 1, 0, 0, 1, 5, "layer1.combine")]
    assert report.findings[0].rule.severity == "error"


@pytest.mark.parametrize("memory", [True, False])
def test_a_stream_that_is_joined_at_the_last_moment(tmp_path: Path, memory: bool) -> None:
    """The same, and the runner joins the streams; and the documented layer, whose microbatches do it themselves."""
    for build in (high(LeavesTheCombine), Unjoined(high())):
        trace = write(tmp_path / "t.jsonl", header(), recorded(build, memory=memory))
        report = look(trace, only=["unjoined-stream"])
        assert found(report) == [] and len(report.checked) == 1


# -- cpu-block-before-peer-work ----------------------------------------------------------------------------------------


class BlocksBeforeTheYield(HighThroughput):
    """The dispatch, with its wait of the host, is issued before the sibling has its turn."""

    def over_to_comm(self, site: str) -> None:
        if not site.endswith("before_dispatch"):
            return super().over_to_comm(site)
        dbo_switch_to_comm_sync()
        return None

    def back_to_compute(self) -> None:
        dbo_switch_to_compute_sync()
        dbo_yield("dispatched")


def test_the_host_waits_before_the_sibling_has_its_turn(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl", header(device="cuda"), recorded(high(BlocksBeforeTheYield)))
    report = look(trace, only=["cpu-block-before-peer-work"])
    assert found(report) == [("cpu-block-before-peer-work", 4, 0, 0, 0, 0, "dispatched")]
    assert report.findings[0].what == (
        "the host waits at #5 (wait) for comm, and behind microbatch 0's own work nothing of microbatch 1 is queued on "
        "compute"
    )


def test_the_host_waits_while_the_sibling_computes(tmp_path: Path) -> None:
    """The documented layer waits as often; there the sibling had its turn. And a last microbatch has no siblings."""
    trace = write(tmp_path / "t.jsonl", header(device="cuda"), recorded(high()))
    report = look(trace, only=["cpu-block-before-peer-work"])
    assert found(report) == [] and len(report.checked) == 1


def test_a_sibling_that_runs_the_dispatch_computes_meanwhile(tmp_path: Path) -> None:
    """The host waits in the slice of microbatch 1, for the counts of microbatch 0: what 1 has queued is computed."""

    def build(bed: TestBed) -> list[Callable[[], None]]:
        device = bed.device

        def entry(index: int) -> None:
            device.work("A", 20.0)
            if index:
                with device.program.on_behalf_of(0):
                    device.work("D", 30.0, stream=device.new_stream("deepep"))
                    device.program.add("host_wait", "deepep", "the host reads counts")
            dbo_yield("layer0.dispatch")
            device.work("MLP", 20.0)

        return [lambda: entry(0), lambda: entry(1)]

    trace = write(tmp_path / "t.jsonl", header(device="cuda"), recorded(build))
    report = look(trace, only=["cpu-block-before-peer-work"])
    assert found(report) == [] and len(report.checked) == 1


def test_whoever_is_alone_may_wait(tmp_path: Path) -> None:
    """One after the other the first one waits while the second has not begun; the second has nobody to wait for."""
    trace = write(tmp_path / "t.jsonl", header(device="cuda"), recorded(high(), InTurn()))
    report = look(trace, only=["cpu-block-before-peer-work"])
    assert found(report) == [("cpu-block-before-peer-work", 2, 0, 0, 0, 1, "layer0.before_combine")]
    assert report.findings[0].microbatches == {0}


def test_on_a_cpu_no_wait_of_the_host_counts(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl", header(device="cpu"), recorded(high(BlocksBeforeTheYield)))
    assert found(look(trace, only=["cpu-block-before-peer-work"])) == []
