"""The recorder against the real scheduler, on both carriers."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo_greenlet import Scheduler, Scripted, dbo_maybe_run_recv_hook, dbo_register_recv_hook, dbo_yield
from dbo_greenlet.devices import CpuDevice
from dbo_greenlet.errors import MicrobatchFailed
from dbo_greenlet.trace import RecvRecord, SliceRecord, StepRecorder
from dbo_greenlet.trace.schema import from_json, to_json
from dbo_greenlet.yields import (
    dbo_switch_to_compute_sync,
    dbo_yield_and_switch_from_compute_to_comm,
)
from tests.trace.recording import CARRIERS, FakeDispatch, contexts_of, recorder


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
        SliceRecord(7, 3, "x", 0, 0, "layer0.dispatch", 2, 4, layer=0),
        SliceRecord(7, 3, "x", 1, 0, "layer0.dispatch", 5, 8, layer=0),
        SliceRecord(7, 3, "x", 0, 1, "layer0.combine", 9, 12, layer=0),
        SliceRecord(7, 3, "x", 1, 1, "layer0.combine", 13, 16, layer=0),
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
        SliceRecord(0, 0, "dbo", 0, 0, "layer0.dispatch", 2, 4, layer=0),
        SliceRecord(0, 0, "dbo", 0, 1, "layer0.combine", 5, 8, layer=0),
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


class Weights:
    """What a model holds."""


def test_a_failed_slice_keeps_nothing_of_the_step_alive() -> None:
    def fails(weights: Weights) -> None:
        contexts[0].device.record(contexts[0].gpu_comm_done_event, contexts[0].comm_stream)
        raise RuntimeError("boom")

    watch, weights = recorder(), Weights()
    contexts = contexts_of(watch, CpuDevice(), 1)
    gone = weakref.ref(weights)
    entry = partial(fails, weights)
    with pytest.raises(MicrobatchFailed) as caught:
        Scheduler(instruments=[watch]).run([entry], contexts)
    del entry, weights, caught
    assert gone() is None and len(watch.records(step=0)) == 2


def test_the_next_step_starts_from_nothing() -> None:
    watch = recorder()
    scheduler = Scheduler(instruments=[watch])
    scheduler.run([model(1), model(1)])
    scheduler.run([lambda: None])
    assert watch.records(step=1) == [SliceRecord(1, 0, "dbo", 0, 0, "", 24, 25)]


@pytest.mark.parametrize(
    ("site", "layer"),
    [
        ("layer3.dispatch", 3),
        ("model.layers.12.before_combine", 12),
        ("layer4.attention", 4),
        ("model.layers.5.mlp", 5),
        ("layer_6", 6),
        ("layer7", 7),
        ("relayer7.x", None),
        ("layer7b", None),
        ("layers", None),
        ("model.py:120", None),
    ],
)
def test_the_layer_is_the_one_that_the_site_names(site: str, layer: int | None) -> None:
    watch = recorder()
    Scheduler(instruments=[watch]).run([lambda: dbo_yield(site)])
    first = watch.records(step=0)[0]
    assert isinstance(first, SliceRecord) and (first.site, first.layer) == (site, layer)


# -- bytes -------------------------------------------------------------------------------------------------------------


def sends(*dispatches: FakeDispatch) -> Callable[[], None]:
    def entry() -> None:
        for layer, dispatch in enumerate(dispatches):
            dbo_maybe_run_recv_hook()
            dbo_register_recv_hook(dispatch.finish_dispatch)
            dbo_yield(f"layer{layer}.dispatch")
            dbo_maybe_run_recv_hook()
            dispatch.combine_send()
            dbo_register_recv_hook(dispatch.finish_combine)
            dbo_yield(f"layer{layer}.combine")

    return entry


@CARRIERS
def test_each_window_has_the_bytes_of_its_own_send(carrier: str) -> None:
    watch = recorder()
    entries = [sends(FakeDispatch(100, 40), FakeDispatch(7, 3)), sends(FakeDispatch(0, 0), FakeDispatch(9, 1000))]
    Scheduler(carrier=carrier, instruments=[watch]).run(entries)
    windows = [r for r in watch.records(step=0) if isinstance(r, RecvRecord)]
    assert [(r.ubatch, r.site, r.bytes) for r in windows] == [
        (0, "layer0.dispatch", 100),
        (1, "layer0.dispatch", 0),
        (0, "layer0.combine", 40),
        (1, "layer0.combine", 0),
        (0, "layer1.dispatch", 7),
        (1, "layer1.dispatch", 9),
        (0, "layer1.combine", 3),
        (1, "layer1.combine", 1000),
    ]


class Indignant:
    @property
    def bytes_sent(self) -> int:
        raise ZeroDivisionError

    def finish_dispatch(self) -> None: ...


@pytest.mark.parametrize(
    "hook",
    [lambda: None, partial(int), FakeDispatch("many").finish_dispatch, Indignant().finish_dispatch, [].clear],
)
def test_a_receive_of_which_nobody_knows_what_was_sent(hook: Callable[[], Any]) -> None:
    def entry() -> None:
        dbo_register_recv_hook(hook)
        dbo_yield("layer0.dispatch")

    watch = recorder()
    Scheduler(instruments=[watch]).run([entry])
    assert [r.bytes for r in watch.records(step=0) if isinstance(r, RecvRecord)] == [None]


def test_the_bytes_keep_no_dispatch_alive() -> None:
    watch = recorder()
    dispatch = FakeDispatch(5, 5)
    gone = weakref.ref(dispatch)
    Scheduler(instruments=[watch]).run([sends(dispatch)])
    del dispatch
    assert gone() is None and len(watch.records(step=0)) == 5


# -- lines without records ---------------------------------------------------------------------------------------------

SITES = st.text(max_size=8) | st.sampled_from(["layer0.dispatch", 'say "so"', "\u2028", "\N{BRAIN}", ""])


@settings(deadline=None, max_examples=150)
@given(
    yields=st.lists(st.tuples(SITES, st.sampled_from(["", "hook", "bytes"]), st.booleans(), st.booleans()), max_size=8),
    streams=st.booleans(),
    count=st.integers(1, 3),
    fails=st.booleans(),
    step=st.integers(0, 2**40),
    rank=st.integers(0, 64),
    run=st.text(max_size=5),
)
def test_the_lines_are_those_of_the_records(
    yields: list[tuple[str, str, bool, bool]], streams: bool, count: int, fails: bool, step: int, rank: int, run: str
) -> None:
    """Of any step: sends or none before a yield, receives run by a sibling or by nobody, streams and events or none,
    and one that raises."""

    def entry(index: int) -> Callable[[], None]:
        def model() -> None:
            for site, sends, serves, switches in yields:
                if serves:
                    dbo_maybe_run_recv_hook()
                if sends:
                    dbo_register_recv_hook(
                        FakeDispatch(len(site)).finish_dispatch if sends == "bytes" else lambda: None
                    )
                if streams and switches:
                    dbo_yield_and_switch_from_compute_to_comm(site)
                    dbo_switch_to_compute_sync()
                else:
                    dbo_yield(site)
            if fails and index == count - 1:
                raise ValueError("boom")

        return model

    watch = StepRecorder()
    with suppress(MicrobatchFailed):
        contexts = contexts_of(watch, CpuDevice(), count) if streams else None
        Scheduler(instruments=[watch]).run([entry(index) for index in range(count)], contexts)
    lines = watch.json_lines(step=step, rank=rank, run=run)
    records = watch.records(step=step, rank=rank, run=run)
    assert lines == "".join(to_json(record) + "\n" for record in records).encode("ascii")
    assert [from_json(json.loads(line)) for line in lines.splitlines()] == records
    assert len(records) >= count * (1 + len(yields)) - (count - 1 if fails else 0)


def test_before_the_first_step_there_are_no_lines() -> None:
    assert StepRecorder().json_lines(step=0) == b""
