"""The lint's rules about receives and memory: each with a step that triggers it and one that nearly does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dbo_greenlet.policies import InTurn
from dbo_greenlet.stream_program import Access
from dbo_greenlet.testing.layer_programs import HighThroughput, LowLatency, high_throughput, low_latency
from dbo_greenlet.testing.step_run import TestBed
from dbo_greenlet.trace.op_records import Freed
from dbo_greenlet.trace.records import OpRecord, RecvRecord
from dbo_greenlet.yields import (
    dbo_register_recv_hook,
    dbo_switch_to_compute,
    dbo_switch_to_compute_sync,
    dbo_yield,
    dbo_yield_and_switch_from_compute_to_comm,
)
from tests.testing.planted_bugs import (
    ForgetsToWait,
    NeverReceives,
    ReadsTooEarly,
    ReceivesTwice,
    SharesRows,
    YieldsInsideAttention,
)
from tests.trace.lint_runs import found, header, look, missing, recorded, write


def low(kind: type[LowLatency] = LowLatency) -> Any:
    return low_latency(1, numerics=False, kind=kind)


def high(kind: type[HighThroughput] = HighThroughput) -> Any:
    return high_throughput(1, numerics=False, kind=kind)


def looked(path: Path, build: Any, *only: str, **options: Any) -> Any:
    return look(write(path / "t.jsonl", header(), recorded(build, **options)), only=only)


# -- hooks -------------------------------------------------------------------------------------------------------------


class ReceivesByItself(LowLatency):
    """Nearly a receive that never runs, and nearly one that runs twice: no hook, and the call behind the yield."""

    def leave(self, sent: Any, accesses: Any, site: str) -> None:
        if sent.name == "D":
            dbo_yield(site)
            self.receive(sent, accesses)
        else:
            super().leave(sent, accesses, site)


def test_a_receive_that_never_runs(tmp_path: Path) -> None:
    report = looked(tmp_path, low(NeverReceives), "hook-not-run")
    assert found(report) == [("hook-not-run", 2, 0, 0, 0, 0, "layer0.dispatch")]
    assert report.findings[0].what == (
        "the transfer of #2 send 'D' on compute, microbatch 0 (slice 0, before its first yield) is never received"
    )


def test_a_receive_that_runs_by_itself(tmp_path: Path) -> None:
    for rule in ("hook-not-run", "hook-twice", "hook-after-use"):
        report = looked(tmp_path, low(ReceivesByItself), rule)
        assert found(report) == [] and len(report.checked) == 1 and missing(report) == {}


def test_a_window_that_stays_open(tmp_path: Path) -> None:
    """Without operations the windows tell, but not of sends that no hook was registered for."""
    records = recorded(low(), memory=False)
    last = max(n for n, each in enumerate(records) if isinstance(each, RecvRecord))
    records[last] = replace(records[last], at=None, by=None, decision=None)
    report = look(write(tmp_path / "t.jsonl", header(), records), only=["hook-not-run"])
    assert found(report) == [("hook-not-run", 1, 0, 0, 1, None, "layer0.combine")]
    assert report.findings[0].what == (
        "what microbatch 1 sent before 'layer0.combine' was never received, and the step is over"
    )
    assert missing(report) == {
        "hook-not-run": "needs op records with sends and receives, which only `dbo-greenlet record --memory` has"
    }


def test_a_failed_step_may_drop_its_receives(tmp_path: Path) -> None:
    def fails(bed: TestBed) -> list[Callable[[], None]]:
        def entry(index: int) -> None:
            sent = bed.device.send("D", 10.0)
            dbo_register_recv_hook(lambda: bed.device.receive(sent))
            dbo_yield("layer0.dispatch")
            raise ValueError("out of luck")

        return [lambda: entry(0), lambda: entry(1)]

    records = recorded(fails)
    assert any(isinstance(each, RecvRecord) and each.at is None for each in records)
    report = look(write(tmp_path / "t.jsonl", header(), records))
    assert found(report) == []


def test_a_receive_that_runs_twice(tmp_path: Path) -> None:
    report = looked(tmp_path, low(ReceivesTwice), "hook-twice")
    assert found(report) == [("hook-twice", 2, 0, 0, 0, 2, "")]
    assert report.findings[0].rule.severity == "error"
    assert "transfer 'C' of microbatch 0 is received by" in report.findings[0].what


def test_a_receive_that_runs_after_the_first_use(tmp_path: Path) -> None:
    report = looked(tmp_path, low(ReadsTooEarly), "hook-after-use")
    assert found(report) == [("hook-after-use", 2, 0, 0, 0, 1, "layer0.combine")]
    assert "reads rows of microbatch 0" in report.findings[0].what
    assert found(looked(tmp_path, low(), "hook-after-use")) == []


def test_receives_that_do_not_say_of_what(tmp_path: Path) -> None:
    """Then they are of the sends of their microbatch, in order."""
    records = [
        replace(each, of=None) if isinstance(each, OpRecord) and each.op == "receive" else each
        for each in recorded(low_latency(2, numerics=False))
    ]
    report = look(write(tmp_path / "t.jsonl", header(), records))
    assert found(report) == [] and {"hook-twice", "hook-not-run"} <= {rule.id for rule in report.checked}


def test_hooks_by_the_events_alone_are_not_checked(tmp_path: Path) -> None:
    report = looked(tmp_path, low(ReceivesTwice), "hook-twice", "hook-after-use", memory=False)
    assert found(report) == [] and report.checked == []
    assert missing(report) == {
        "hook-twice": "needs op records with sends and receives, which only `dbo-greenlet record --memory` has",
        "hook-after-use": "needs op records of what operations read and write, which only `dbo-greenlet record "
        "--memory` has",
    }


# -- races and workspaces ----------------------------------------------------------------------------------------------


def test_a_dispatch_that_nobody_waits_for(tmp_path: Path) -> None:
    report = looked(tmp_path, high(ForgetsToWait), "race")
    assert found(report) == [("race", 2, 0, 0, 0, 1, "layer0.before_combine")]
    assert "nothing puts one behind the other" in report.findings[0].what
    assert "compute waiting" in report.findings[0].remedy
    assert found(looked(tmp_path, high(), "race")) == []


def test_rows_that_both_microbatches_receive_into(tmp_path: Path) -> None:
    """One after the other it would be right."""
    assert found(looked(tmp_path, low(SharesRows), "race")) == [("race", 1, 0, 0, 0, 1, "layer0.combine")]
    assert found(looked(tmp_path, low(SharesRows), "race", policy=InTurn())) == []


def test_a_workspace_that_the_sibling_writes_over(tmp_path: Path) -> None:
    report = looked(tmp_path, low(YieldsInsideAttention), "workspace-reused")
    assert found(report) == [("workspace-reused", 1, 0, 0, 0, 1, "layer0.dispatch")]
    # Written anew by each before it reads, in one slice: that is what a workspace is for.
    assert found(looked(tmp_path, low(), "workspace-reused")) == []


def test_a_scattered_write_replaces_nothing(tmp_path: Path) -> None:
    """Both microbatches write some of a KV cache, and each reads all of it."""

    def build(bed: TestBed) -> list[Callable[[], None]]:
        cache = bed.device.new_buffer("KV cache")
        some = Access(cache, True, partial=True)

        def entry() -> None:
            bed.device.work("write", 1.0, accesses=(some,))
            dbo_yield("layer0.attention")
            bed.device.work("read", 1.0, accesses=(Access(cache, False),))

        return [entry, entry]

    records = recorded(build)
    assert any(isinstance(each, OpRecord) and each.memory == [["write", "KV cache", 0, None, True]] for each in records)
    assert found(look(write(tmp_path / "t.jsonl", header(), records))) == []
    whole = [
        replace(each, memory=[entry[:4] for entry in each.memory]) if isinstance(each, OpRecord) else each
        for each in records
    ]
    assert [each[0] for each in found(look(write(tmp_path / "t.jsonl", header(), whole)))] == ["workspace-reused"]


# -- cross-stream-free -------------------------------------------------------------------------------------------------


def frees(
    bed: TestBed, freed: list[Freed], *, hold: bool = False, join_first: bool = False, maker: str | None = "compute"
) -> list[Callable[[], None]]:
    """Hidden rows are sent on the comm stream and let go while it may still read them, then compute goes on."""

    def entry(index: int) -> None:
        device = bed.device
        hidden = device.new_buffer(f"hidden of {index}")
        device.work("A", 20.0, writes=[hidden])
        dbo_yield_and_switch_from_compute_to_comm("layer0.before_dispatch")
        device.work("D", 60.0, reads=[hidden])
        if hold:
            device.program.add("hold", "comm", "record_stream", (Access(hidden, False),))
        if join_first:
            dbo_switch_to_compute_sync()
        else:
            dbo_switch_to_compute()
        freed.append(Freed(len(device.program.operations), Access(hidden, True), maker, index, 1, None))
        device.work("S", 20.0)
        dbo_switch_to_compute_sync()
        device.work("MLP", 20.0)

    return [lambda: entry(0), lambda: entry(1)]


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, [("cross-stream-free", 2, 0, 0, 0, 1, "")]),
        ({"hold": True}, []),
        ({"join_first": True}, []),
        # The comm stream made it, so the comm stream may have it again, behind its own read.
        ({"maker": "comm"}, []),
    ],
)
def test_memory_that_is_freed_while_another_stream_uses_it(
    tmp_path: Path, options: dict[str, Any], expected: list[Any]
) -> None:
    freed: list[Freed] = []
    report = looked(tmp_path, lambda bed: frees(bed, freed, **options), "cross-stream-free", freed=freed)
    assert len(freed) == 2
    assert found(report) == expected
    assert len(report.checked) == 1 and missing(report) == {}


def test_operations_of_which_some_were_left_out(tmp_path: Path) -> None:
    """Then numbers have gaps; what a wait waits for is still told by its number."""
    freed: list[Freed] = []
    records = [
        replace(each, number=10 * each.number, of=None if each.of is None else 10 * each.of)
        if isinstance(each, OpRecord)
        else each
        for each in recorded(lambda bed: frees(bed, freed), freed=freed)
    ]
    report = look(write(tmp_path / "t.jsonl", header(), records))
    assert found(report) == [("cross-stream-free", 2, 0, 0, 0, 1, "")]
    assert report.findings[0].place.operation == 60


def test_what_is_said_of_memory_that_is_freed_too_early(tmp_path: Path) -> None:
    freed: list[Freed] = []
    report = looked(tmp_path, lambda bed: frees(bed, freed), "cross-stream-free", freed=freed)
    assert report.findings[0].what == (
        "hidden of 0 is used on comm (#5 'D') and given back to compute at #6, and #7 'S' on compute may get it while "
        "comm is still at it"
    )


def test_frees_that_say_too_little(tmp_path: Path) -> None:
    freed: list[Freed] = []
    report = looked(tmp_path, lambda bed: frees(bed, freed, maker=None), "cross-stream-free", freed=freed)
    assert found(report) == []
    assert missing(report)["cross-stream-free"].startswith("needs frees with the stream that the memory was made on")
    assert missing(looked(tmp_path, high(), "cross-stream-free")) == {
        "cross-stream-free": "needs op records with frees: when memory went back to the allocator was not recorded"
    }


def test_an_address_that_is_given_out_again_is_other_memory(tmp_path: Path) -> None:
    """The use on the comm stream was of what lay there before, and was held for it."""
    freed: list[Freed] = []

    def build(bed: TestBed) -> list[Callable[[], None]]:
        device = bed.device
        place = device.new_buffer("one place")

        def entry(index: int) -> None:
            device.work("A", 20.0, writes=[place])
            dbo_yield_and_switch_from_compute_to_comm("layer0.before_dispatch")
            device.work("D", 60.0, reads=[place])
            device.program.add("hold", "comm", "record_stream", (Access(place, False),))
            dbo_switch_to_compute()
            freed.append(Freed(len(device.program.operations), Access(place, True), "compute", index, 1, None))
            device.work("S", 20.0, writes=[place])
            freed.append(Freed(len(device.program.operations), Access(place, True), "compute", index, 1, None))
            device.work("MLP", 20.0)

        return [lambda: entry(0), lambda: entry(1)]

    report = looked(tmp_path, build, "cross-stream-free", freed=freed)
    assert len(freed) == 4 and found(report) == []


@pytest.mark.parametrize("freed_between, expected", [(True, []), (False, ["race"])])
def test_what_is_freed_and_given_out_again_is_no_race(tmp_path: Path, freed_between: bool, expected: list[str]) -> None:
    """Two tensors that lie at one address one after the other are kept apart by the allocator; one tensor is not."""
    freed: list[Freed] = []

    def build(bed: TestBed) -> list[Callable[[], None]]:
        device = bed.device

        def entry(index: int) -> None:
            place = device.new_buffer(f"place of {index}")
            device.work("A", 20.0, writes=[place])
            dbo_yield_and_switch_from_compute_to_comm("layer0.before_dispatch")
            device.work("D", 60.0, reads=[place])
            device.program.add("hold", "comm", "record_stream", (Access(place, False),))
            dbo_switch_to_compute()
            if freed_between:
                freed.append(Freed(len(device.program.operations), Access(place, True), "compute", index, 1, None))
            device.work("S", 20.0, writes=[place])
            dbo_switch_to_compute_sync()

        return [lambda: entry(0), lambda: entry(1)]

    report = looked(tmp_path, build, "race", "cross-stream-free", freed=freed)
    assert [each[0] for each in found(report)] == expected
