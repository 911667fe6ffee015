"""The recorder against the real scheduler, on both carriers."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo_greenlet import Scheduler, Scripted, dbo_maybe_run_recv_hook, dbo_register_recv_hook, dbo_yield
from dbo_greenlet._version import __version__
from dbo_greenlet.errors import MicrobatchFailed
from dbo_greenlet.trace import RecvRecord, SliceRecord, StepRecorder, make_header
from dbo_greenlet.trace.schema import from_json, to_json

CARRIERS = pytest.mark.parametrize("carrier", ["greenlet", "thread"])


def recorder() -> StepRecorder:
    """A recorder whose clock ticks one microsecond each time it is read; the first tick is the origin."""
    ticks = count(0, 1000)
    return StepRecorder(clock=lambda: next(ticks))


def moe_layer(layer: int, log: Callable[[str], None] = lambda entry: None) -> None:
    """The yields of one Mixture-of-Experts layer."""
    for stage in ("dispatch", "combine"):
        dbo_maybe_run_recv_hook()
        dbo_register_recv_hook(lambda stage=stage: log(stage))
        dbo_yield(f"layer{layer}.{stage}")


def model(layers: int) -> Callable[[], None]:
    def entry() -> None:
        for layer in range(layers):
            moe_layer(layer)

    return entry


@CARRIERS
def test_every_event_of_a_step_in_order(carrier: str) -> None:
    watch = recorder()
    Scheduler(carrier=carrier, instruments=[watch]).run([model(1), model(1)])
    # Reading the clock at every event makes the times the order of the events: 1 is the begin of the step.
    assert watch.records(step=7, rank=3, run="x") == [
        SliceRecord(7, 3, "x", 0, 0, "layer0.dispatch", 2, 4),
        SliceRecord(7, 3, "x", 1, 0, "layer0.dispatch", 5, 8),
        SliceRecord(7, 3, "x", 0, 1, "layer0.combine", 9, 12),
        SliceRecord(7, 3, "x", 1, 1, "layer0.combine", 13, 16),
        SliceRecord(7, 3, "x", 0, 2, "", 17, 19),
        SliceRecord(7, 3, "x", 1, 2, "", 20, 21),
        RecvRecord(7, 3, "x", 0, "layer0.dispatch", 3, 1, 6, 1, 0),
        RecvRecord(7, 3, "x", 1, "layer0.dispatch", 7, 0, 10, 2, 1),
        RecvRecord(7, 3, "x", 0, "layer0.combine", 11, 1, 14, 3, 2),
        RecvRecord(7, 3, "x", 1, "layer0.combine", 15, 0, 18, 4, 3),
    ]
    assert (watch.begin, watch.end, watch.error) == (1, 22, None)


@CARRIERS
def test_a_receive_that_no_sibling_ran_has_nobody_as_its_runner(carrier: str) -> None:
    watch = recorder()
    Scheduler(carrier=carrier, instruments=[watch]).run([model(1)])
    assert watch.records(step=0) == [
        SliceRecord(0, 0, "dbo", 0, 0, "layer0.dispatch", 2, 4),
        SliceRecord(0, 0, "dbo", 0, 1, "layer0.combine", 5, 8),
        SliceRecord(0, 0, "dbo", 0, 2, "", 9, 11),
        RecvRecord(0, 0, "dbo", 0, "layer0.dispatch", 3, None, 6, 1, 0),
        RecvRecord(0, 0, "dbo", 0, "layer0.combine", 7, None, 10, 2, 1),
    ]


@CARRIERS
@pytest.mark.parametrize(
    "decisions", [[0, 1, 2] * 5, [0, 0, 1, 0, 2, 1, 0, 2, 1, 0, 2, 1, 1, 2, 2], [0] * 5 + [1] * 5 + [2] * 5]
)
def test_the_slices_are_the_schedule(carrier: str, decisions: list[int]) -> None:
    watch = StepRecorder()
    result = Scheduler(Scripted(decisions), carrier=carrier, instruments=[watch]).run([model(2)] * 3)
    slices = [r for r in watch.records(step=0) if isinstance(r, SliceRecord)]
    windows = [r for r in watch.records(step=0) if isinstance(r, RecvRecord)]
    assert tuple(s.ubatch for s in slices) == result.schedule.decisions == tuple(decisions)
    assert tuple(s.site for s in slices) == result.schedule.sites
    ends = [watch.begin, *(time for s in slices for time in (s.begin, s.end)), watch.end]
    assert ends == sorted(ends)
    assert len(windows) == 3 * 4
    for window in windows:
        assert window.decision is not None and window.sent_decision is not None and window.at is not None
        sent_in, received_in = slices[window.sent_decision], slices[window.decision]
        assert (sent_in.ubatch, sent_in.site) == (window.ubatch, window.site)
        assert sent_in.begin <= window.sent <= sent_in.end
        assert received_in.begin <= window.at <= received_in.end
        assert received_in.ubatch == (window.ubatch if window.by is None else window.by)


@CARRIERS
def test_a_failed_step_shows_the_slice_that_failed_and_the_receive_that_never_ran(carrier: str) -> None:
    def fails() -> None:
        dbo_maybe_run_recv_hook()
        dbo_register_recv_hook(lambda: None)
        dbo_yield("layer0.dispatch")
        raise RuntimeError("boom")

    watch = recorder()
    with pytest.raises(MicrobatchFailed):
        Scheduler(carrier=carrier, instruments=[watch]).run([model(1), fails])
    records = watch.records(step=0)
    assert [(r.ubatch, r.slice, r.site, r.failed) for r in records if isinstance(r, SliceRecord)] == [
        (0, 0, "layer0.dispatch", False),
        (1, 0, "layer0.dispatch", False),
        (0, 1, "layer0.combine", False),
        (1, 1, "layer0.dispatch", True),
    ]
    assert [(r.ubatch, r.site, r.by, r.decision) for r in records if isinstance(r, RecvRecord)] == [
        (0, "layer0.dispatch", 1, 1),
        (1, "layer0.dispatch", 0, 2),
        (0, "layer0.combine", None, None),
    ]
    assert watch.error is not None and watch.error.startswith("MicrobatchFailed: Microbatch 1 of 2 failed in slice 1")


def test_a_failed_slice_keeps_nothing_of_the_step_alive() -> None:
    def fails() -> None:
        raise RuntimeError("boom")

    watch = recorder()
    with pytest.raises(MicrobatchFailed):
        Scheduler(instruments=[watch]).run([fails])
    assert watch._running is None


def test_the_next_step_starts_from_nothing() -> None:
    watch = recorder()
    scheduler = Scheduler(instruments=[watch])
    scheduler.run([model(1), model(1)])
    scheduler.run([lambda: None])
    assert watch.records(step=1) == [SliceRecord(1, 0, "dbo", 0, 0, "", 24, 25)]


def test_the_header_states_versions_and_only_the_environment_that_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("OMP_", "MKL_", "NCCL_", "DBO_GREENLET_", "CUDA_", "PYTHONHASHSEED")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("MY_SECRET_TOKEN", "x")
    header = make_header(rank=1, world=2, threads=3, model={"path": "m"}, settings={"N": 2}, origin_ns=5)
    assert (header.rank, header.world, header.threads, header.origin_ns) == (1, 2, 3, 5)
    assert (header.package, header.model, header.settings) == (__version__, {"path": "m"}, {"N": 2})
    assert header.env == {"OMP_NUM_THREADS": "3"}
    assert header.python == ".".join(map(str, sys.version_info[:3]))
    assert header.started.endswith("+00:00")


# -- lines without records ---------------------------------------------------------------------------------------------

SITES = st.text(max_size=8) | st.sampled_from(["layer0.dispatch", 'say "so"', "\u2028", "\N{BRAIN}", ""])


@settings(deadline=None, max_examples=150)
@given(
    yields=st.lists(st.tuples(SITES, st.booleans(), st.booleans()), max_size=8),
    count=st.integers(1, 3),
    fails=st.booleans(),
    step=st.integers(0, 2**40),
    rank=st.integers(0, 64),
    run=st.text(max_size=5),
)
def test_the_lines_are_those_of_the_records(
    yields: list[tuple[str, bool, bool]], count: int, fails: bool, step: int, rank: int, run: str
) -> None:
    """Of any step: sends or none before a yield, receives run by a sibling or by nobody, and one that raises."""

    def entry(index: int) -> Callable[[], None]:
        def model() -> None:
            for site, sends, serves in yields:
                if serves:
                    dbo_maybe_run_recv_hook()
                if sends:
                    dbo_register_recv_hook(lambda: None)
                dbo_yield(site)
            if fails and index == count - 1:
                raise ValueError("boom")

        return model

    watch = StepRecorder()
    with suppress(MicrobatchFailed):
        Scheduler(instruments=[watch]).run([entry(index) for index in range(count)])
    lines = watch.json_lines(step=step, rank=rank, run=run)
    records = watch.records(step=step, rank=rank, run=run)
    assert lines == "".join(to_json(record) + "\n" for record in records).encode("ascii")
    assert [from_json(json.loads(line)) for line in lines.splitlines()] == records
    assert len(records) >= count * (1 + len(yields)) - (count - 1 if fails else 0)


def test_before_the_first_step_there_are_no_lines() -> None:
    assert StepRecorder().json_lines(step=0) == b""
