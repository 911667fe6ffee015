from __future__ import annotations

import logging
from typing import Any

import pytest

from dbo_greenlet import Scheduler, dbo_maybe_run_recv_hook, dbo_register_recv_hook, dbo_yield
from dbo_greenlet.errors import MicrobatchFailed
from dbo_greenlet.greenlet_carrier import CarrierPool
from dbo_greenlet.microbatch import make_ubatch_contexts
from dbo_greenlet.scheduler import StepHooks
from dbo_greenlet.yields import dbo_get_previous_event

CARRIERS = ["greenlet", "thread"]


class Everything:
    def __init__(self) -> None:
        self.log: list[Any] = []

    def before_step(self, step: Any) -> None:
        self.log.append(("before_step", step.count, step.policy_name))

    def after_step(self, step: Any, error: BaseException | None) -> None:
        self.log.append(("after_step", list(step.decisions), list(step.sites), type(error).__name__))

    def before_slice(self, microbatch: Any) -> None:
        self.log.append(("before_slice", microbatch.index, microbatch.slice_number, microbatch.site))

    def after_slice(self, microbatch: Any) -> None:
        self.log.append(("after_slice", microbatch.index, microbatch.slice_number, microbatch.site))

    def recv_registered(self, microbatch: Any) -> None:
        self.log.append(("recv_registered", microbatch.index))

    def recv_ran(self, owner: Any, by: int | None) -> None:
        self.log.append(("recv_ran", owner.index, by))

    def event_captured(self, microbatch: Any, event: Any) -> None:
        self.log.append(("event_captured", microbatch.index, event))


def first() -> None:
    dbo_register_recv_hook(lambda: None)
    dbo_yield("a")


def second() -> None:
    dbo_maybe_run_recv_hook()
    dbo_register_recv_hook(lambda: None)
    dbo_yield("a")


@pytest.mark.parametrize("carrier", CARRIERS)
def test_the_whole_event_list(carrier: str) -> None:
    instrument = Everything()
    Scheduler(carrier=carrier, instruments=[instrument]).run([first, second])
    assert instrument.log == [
        ("before_step", 2, "round_robin"),
        ("before_slice", 0, 0, ""),
        ("recv_registered", 0),
        ("after_slice", 0, 1, "a"),
        ("before_slice", 1, 0, ""),
        ("recv_ran", 0, 1),
        ("recv_registered", 1),
        ("after_slice", 1, 1, "a"),
        ("before_slice", 0, 1, "a"),
        ("recv_ran", 1, 0),
        ("after_slice", 0, 2, ""),
        ("before_slice", 1, 1, "a"),
        ("after_slice", 1, 2, ""),
        ("after_step", [0, 1, 0, 1], ["a", "a", "", ""], "NoneType"),
    ]


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("with_streams", [False, True])
def test_an_event_that_a_library_captures_is_told(carrier: str, with_streams: bool) -> None:
    contexts = make_ubatch_contexts(1) if with_streams else None
    told: list[Any] = []

    class Listening:
        def event_captured(self, microbatch: Any, event: Any) -> None:
            told.append((microbatch.index, microbatch.slice_number, event))

    def entry() -> None:
        dbo_yield("a")
        assert dbo_get_previous_event(lambda name: name, "an event") == "an event"

    Scheduler(carrier=carrier, instruments=[Listening()]).run([entry], contexts)
    assert told == ([(0, 1, "an event")] if with_streams else [])
    assert dbo_get_previous_event(lambda: "an event") is None


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_failed_step_is_reported_too(carrier: str) -> None:
    instrument = Everything()

    def failing() -> None:
        raise ValueError("x")

    with pytest.raises(MicrobatchFailed):
        Scheduler(carrier=carrier, instruments=[instrument]).run([first, failing])
    assert instrument.log[-1] == ("after_step", [0], ["a"], "MicrobatchFailed")


@pytest.mark.parametrize("event", ["before_step", "after_step", "before_slice", "after_slice", "recv_ran"])
def test_one_that_raises_is_removed_and_logged(event: str, caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    class Broken:
        pass

    def raising(self: Any, *arguments: Any) -> None:
        calls.append(event)
        raise RuntimeError("instrument is broken")

    setattr(Broken, event, raising)
    good = Everything()
    with caplog.at_level(logging.ERROR, logger="dbo_greenlet"):
        Scheduler(instruments=[Broken(), good]).run([first, second])
    assert calls == [event]
    assert len(good.log) == 14
    assert [r.getMessage().split(" raised")[0].startswith("instrument <") for r in caplog.records] == [True]


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("alone", [True, False])
def test_one_that_never_raises_is_called_all_the_same(carrier: str, alone: bool) -> None:
    class Sure(Everything):
        never_raises = True

    sure, other, plain = Sure(), Everything(), Everything()
    Scheduler(carrier=carrier, instruments=[sure] if alone else [other, sure]).run([first, second])
    Scheduler(carrier=carrier, instruments=[plain]).run([first, second])
    assert sure.log == plain.log and other.log == ([] if alone else plain.log)


def test_one_that_never_raises_is_not_guarded_for_the_sake_of_others() -> None:
    """The guard is a call more in each slice; it is needed where somebody listens who may raise, and not elsewhere."""

    class Sure(Everything):
        never_raises = True

    class AfterTheStep:
        def after_step(self, step: Any, error: BaseException | None) -> None:
            pass

    sure = Sure()
    hooks = StepHooks([sure, AfterTheStep()], CarrierPool())
    assert hooks.before_slice == sure.before_slice and hooks.after_slice == sure.after_slice
    assert StepHooks([Everything(), AfterTheStep()], CarrierPool()).before_slice != sure.before_slice
    assert hooks.teller("after_step") is not None


def test_one_that_listens_to_nothing_is_fine() -> None:
    assert Scheduler(instruments=[object()]).run([first, second]).yields == (1, 1)
