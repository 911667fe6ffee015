"""The lint's rules about microbatches left behind and ranks that part: what triggers them, and what nearly does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from greenlet import greenlet

from dbo_greenlet.policies import InTurn, SeededRandom
from dbo_greenlet.testing.layer_programs import high_throughput, low_latency
from dbo_greenlet.testing.step_run import TestBed
from dbo_greenlet.trace import StepRecorder
from dbo_greenlet.trace.records import EndRecord, StepRecord
from dbo_greenlet.yields import (
    dbo_yield,
)
from tests.trace.lint_runs import STEP, found, header, look, missing, recorded, write

LOW = low_latency(2, numerics=False)


# -- peer-parked-on-error ----------------------------------------------------------------------------------------------


def runs_until_the_first_returns(entries: list[Callable[[], str]]) -> list[Any]:
    """Records of a carrier with a bug: the exit of one microbatch ends the step, whoever is still parked.

    An entry gives the site that it yields at to `greenlet.parent.switch`.
    """
    recorder = StepRecorder()
    device = SimpleNamespace()
    microbatches: list[Any] = [
        SimpleNamespace(index=i, slice_number=0, site="", stream="compute", context=None) for i in range(len(entries))
    ]
    carriers = [greenlet(entry) for entry in entries]
    recorder.before_step(SimpleNamespace(microbatches=microbatches, device=device))  # type: ignore[arg-type]
    done = False
    while not done:
        for microbatch, carrier in zip(microbatches, carriers, strict=True):
            recorder.before_slice(microbatch)
            microbatch.site = carrier.switch() or ""
            microbatch.slice_number += 1
            recorder.after_slice(microbatch)
            if done := carrier.dead:
                break
    recorder.after_step(SimpleNamespace(microbatches=microbatches), None)  # type: ignore[arg-type]
    for carrier in carriers:
        if not carrier.dead:
            carrier.throw()
    return recorder.records(step=0)


def yields(*sites: str) -> Callable[[], str]:
    def entry() -> str:
        parent = greenlet.getcurrent().parent
        assert parent is not None
        for site in sites:
            parent.switch(site)
        return ""

    return entry


def test_a_microbatch_that_the_exit_of_the_other_leaves_parked(tmp_path: Path) -> None:
    records = runs_until_the_first_returns([yields("layer0.dispatch"), yields("layer0.dispatch", "layer0.combine")])
    report = look(write(tmp_path / "t.jsonl", header(), records, STEP), only=["peer-parked-on-error"])
    assert found(report) == [("peer-parked-on-error", 1, 0, 0, 1, 0, "layer0.dispatch")]
    assert report.findings[0].what == (
        "the step is over, without an error, and microbatch 1 is parked at 'layer0.dispatch'"
    )


def test_a_microbatch_that_never_began(tmp_path: Path) -> None:
    records = runs_until_the_first_returns([yields(), yields("layer0.dispatch")])
    report = look(write(tmp_path / "t.jsonl", header(), records, STEP), only=["peer-parked-on-error"])
    assert found(report) == [("peer-parked-on-error", 1, 0, 0, 1, None, None)]


def test_microbatches_that_yield_unequally_often_are_not_parked(tmp_path: Path) -> None:
    def build(bed: TestBed) -> list[Callable[[], None]]:
        return [lambda: dbo_yield("a"), lambda: [dbo_yield(site) for site in "abc"] and None]

    trace = write(tmp_path / "t.jsonl", header(), recorded(build))
    assert found(look(trace, only=["peer-parked-on-error"])) == []


def fails(bed: TestBed) -> list[Callable[[], None]]:
    def entry(index: int) -> None:
        dbo_yield("layer0.dispatch")
        if index == 0:
            raise ValueError("out of luck")
        dbo_yield("layer0.combine")

    return [lambda: entry(0), lambda: entry(1)]


def test_a_rank_whose_trace_ends_with_the_failed_step(tmp_path: Path) -> None:
    """Neither a step record nor an end record: whoever was parked still is."""
    records = [each for each in recorded(fails) if not isinstance(each, StepRecord)]
    report = look(write(tmp_path / "t.jsonl", header(), recorded(LOW), with_step(records, 1)))
    assert found(report) == [("peer-parked-on-error", 1, 1, 0, 0, 1, "layer0.dispatch")]
    assert report.findings[0].what == (
        "microbatch 0 raised in slice 1, and there the trace of rank 0 ends: with microbatch 1 parked the step neither "
        "failed nor went on"
    )


def with_step(records: list[Any], number: int) -> list[Any]:
    return [replace(each, step=number) for each in records]


def test_a_rank_that_fails_and_says_so(tmp_path: Path) -> None:
    """With an end record, or with a step record that has the error, or with a step behind it: all were unwound."""
    records = recorded(fails)
    bare = [each for each in records if not isinstance(each, StepRecord)]
    for more in (
        [header(), bare, EndRecord(False, 0, "MicrobatchFailed: ...")],
        [header(), records],
        [header(), bare, with_step(recorded(LOW), 1)],
    ):
        assert found(look(write(tmp_path / "t.jsonl", *more))) == []


# -- order-mismatch ----------------------------------------------------------------------------------------------------


def two_ranks(path: Path, **of_second: Any) -> list[Path]:
    policy = of_second.pop("policy", None)
    first = write(path / "0.jsonl", header(world=2), recorded(LOW, votes=[[1, 16], [1, 16]]))
    votes = of_second.pop("votes", [[1, 16], [1, 16]])
    second = recorded(LOW, policy, rank=1, votes=votes, **of_second)
    return [first, write(path / "1.jsonl", header(world=2, rank=1), second)]


def test_ranks_that_send_in_different_orders(tmp_path: Path) -> None:
    report = look(*two_ranks(tmp_path, policy=InTurn()))
    assert found(report) == [
        ("order-mismatch", 1, 0, 1, 0, None, "layer0.combine"),
        ("no-overlap", 1, 0, 1, None, None, None),
    ]
    assert report.findings[0].what == (
        "communication 1 of the step is that of microbatch 1 before 'layer0.dispatch' on rank 0 and that of microbatch "
        "0 before 'layer0.combine' on rank 1"
    )


def test_ranks_that_send_in_one_order(tmp_path: Path) -> None:
    report = look(*two_ranks(tmp_path), only=["order-mismatch"])
    assert found(report) == [] and len(report.checked) == 1 and missing(report) == {}


def test_ranks_of_which_one_does_not_split(tmp_path: Path) -> None:
    first, _ = two_ranks(tmp_path)
    unsplit = StepRecord(0, 1, "dbo", 16, 16, False, "unsplit", votes=[[1, 16], [1, 16]])
    second = write(tmp_path / "1.jsonl", header(world=2, rank=1), unsplit)
    report = look(first, second, only=["order-mismatch"])
    assert found(report) == [("order-mismatch", 1, 0, 1, 0, None, "layer0.dispatch")]
    assert report.findings[0].what == (
        "communication 0 of the step is that of microbatch 0 before 'layer0.dispatch' on rank 0 and none at all on "
        "rank 1"
    )


def test_steps_whose_votes_differ_are_not_the_same_step(tmp_path: Path) -> None:
    report = look(*two_ranks(tmp_path, policy=InTurn(), votes=[[1, 9], [1, 9]]), only=["order-mismatch"])
    assert found(report) == []
    assert missing(report)["order-mismatch"].startswith("needs one step on all ranks")


def test_one_rank_alone_says_nothing_about_the_other(tmp_path: Path) -> None:
    report = look(two_ranks(tmp_path)[0], only=["order-mismatch"])
    assert found(report) == [] and report.checked == []
    assert missing(report)["order-mismatch"] == "needs the same step of another rank, of the 2 that ran"


def test_orders_of_communication_on_a_stream_of_its_own(tmp_path: Path) -> None:
    """No windows there: the sites tell. In one file, as `dbo-greenlet run` writes it."""
    high = high_throughput(1, numerics=False)
    for policy, expected in ((None, 0), (SeededRandom(3), 1)):
        records = [recorded(high), recorded(high, policy, rank=1)]
        trace = write(tmp_path / "t.jsonl", header(world=2), header(world=2, rank=1), *records)
        assert len(found(look(trace, only=["order-mismatch"]))) == expected


def test_a_step_that_fails_on_one_rank_is_not_compared(tmp_path: Path) -> None:
    trace = write(
        tmp_path / "t.jsonl", header(world=2), header(world=2, rank=1), recorded(LOW), recorded(fails, rank=1)
    )
    assert found(look(trace, only=["order-mismatch"])) == []
