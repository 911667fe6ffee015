"""Interrupts wherever they may land, greenlets that outlive their microbatch, and what a step leaves behind then."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from greenlet import getcurrent, greenlet

from dbo_greenlet import (
    Scheduler,
    dbo_enabled,
    dbo_maybe_run_recv_hook,
    dbo_register_recv_hook,
    dbo_yield,
    make_ubatch_contexts,
)
from dbo_greenlet.devices import CpuDevice
from dbo_greenlet.errors import (
    ForeignSwitchError,
    MicrobatchFailed,
    PolicyError,
    ReceiveHookError,
    ScheduleDivergence,
    StepAborted,
)
from dbo_greenlet.step import TRANSITIONS, State, running, traced

CARRIERS = ["greenlet", "thread"]


def entry() -> str:
    dbo_yield("a")
    dbo_yield("b")
    return "done"


def nothing_is_left(scheduler: Scheduler) -> None:
    assert not dbo_enabled()
    assert running == {}
    assert traced == [False, 0]
    assert scheduler.run([entry, entry]).outputs == ["done", "done"]


@pytest.mark.parametrize("event", ["before_slice", "after_slice"])
@pytest.mark.parametrize("when", range(5))
def test_an_interrupt_in_the_hub(event: str, when: int) -> None:
    class Interrupting:
        calls = 0

    def method(self: Interrupting, microbatch: Any) -> None:
        self.calls += 1
        if self.calls == when + 1:
            raise KeyboardInterrupt

    setattr(Interrupting, event, method)
    scheduler = Scheduler(instruments=[Interrupting()])
    with pytest.raises(KeyboardInterrupt):
        scheduler.run([entry, entry])
    scheduler.instruments.clear()
    nothing_is_left(scheduler)


def test_interrupts_at_any_moment() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    script = Path(__file__).with_name("script_interrupts.py")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_carrier_that_died_is_not_used_again() -> None:
    scheduler = Scheduler()
    scheduler.run([entry, entry])
    for carrier in scheduler._pool.idle:
        carrier.throw()
    assert all(carrier.dead for carrier in scheduler._pool.idle)
    nothing_is_left(scheduler)


def test_greenlets_that_outlive_their_microbatch() -> None:
    kept: list[Any] = []

    def starts_one() -> None:
        me = getcurrent()
        other = greenlet(lambda: (me.switch("begun"), 42)[1])
        other.switch()
        kept.append(other)

    scheduler = Scheduler()
    scheduler.run([starts_one, starts_one])
    for other in kept:
        assert other.switch() == 42  # its parent is an idle carrier, which hands the result on
    nothing_is_left(scheduler)


def test_a_step_in_a_greenlet_whose_parent_is_an_idle_carrier() -> None:
    scheduler = Scheduler()
    kept: list[Any] = []

    def starts_one() -> None:
        me = getcurrent()

        def later() -> Any:
            me.switch()
            return scheduler.run([entry, entry]).outputs

        other = greenlet(later)
        other.switch()
        kept.append(other)

    scheduler.run([starts_one])
    assert kept[0].switch() == ["done", "done"]
    nothing_is_left(scheduler)


def test_traced_answers_after_overlapping_steps_in_two_threads() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def waits() -> None:
        inside.set()
        go_on.wait(timeout=30)

    other = threading.Thread(target=lambda: Scheduler().run([waits]))

    # The first step begins before the other one and ends within it.
    def first() -> None:
        other.start()
        inside.wait(timeout=30)

    Scheduler().run([first])
    assert traced[0] is True
    go_on.set()
    other.join()
    assert traced == [False, 0]


# -- the thread carrier does as the greenlet one --------------------------------------------------------------------


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_fault_of_the_policy_runs_nothing_more(carrier: str) -> None:
    log: list[str] = []

    class Broken:
        name = "broken"

        def start(self, step: Any) -> Any:
            def choose() -> int:
                if len(step.decisions) == 2:
                    raise PolicyError("policy fault")
                return int(step.runnable()[0]) if len(step.decisions) != 1 else 1

            return choose

    def careful() -> None:
        try:
            dbo_yield("a")
            log.append("went on")
        finally:
            with pytest.raises(StepAborted):
                dbo_yield("cleanup")

    with pytest.raises(PolicyError, match="policy fault"):
        Scheduler(Broken(), carrier=carrier).run([careful, careful])
    assert log == []


@pytest.mark.parametrize("carrier", CARRIERS)
def test_receives_are_dropped_in_a_failing_step(carrier: str) -> None:
    ran: list[str] = []

    def failing() -> None:
        dbo_register_recv_hook(lambda: ran.append("late"))
        dbo_yield("a")
        dbo_register_recv_hook(lambda: ran.append("too late"))
        raise ValueError("x")

    def sibling() -> None:
        dbo_maybe_run_recv_hook()
        try:
            dbo_yield("a")
        finally:
            dbo_maybe_run_recv_hook()

    with pytest.raises(MicrobatchFailed):
        Scheduler(carrier=carrier).run([failing, sibling])
    assert ran == ["late"]


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_microbatch_starts_on_its_compute_stream(carrier: str) -> None:
    device = CpuDevice()
    mine = device.new_stream("mine")
    contexts = make_ubatch_contexts(2, compute_stream=mine, device=device)
    outputs = Scheduler(carrier=carrier).run([device.current_stream] * 2, contexts).outputs
    assert outputs == [mine, mine]
    assert device.current_stream() is device.default_stream


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_receive_hook_must_not_yield(carrier: str) -> None:
    def owner() -> None:
        dbo_register_recv_hook(lambda: dbo_yield("inside the hook"))
        dbo_yield("a")
        pytest.fail("went on with half a receive")

    def sibling() -> None:
        dbo_maybe_run_recv_hook()

    with pytest.raises(ReceiveHookError, match="microbatch 0 registered before ''"):
        Scheduler(carrier=carrier, strict=False).run([owner, sibling])


def test_what_an_inner_step_found_is_charged_to_the_outer_microbatch() -> None:
    def outer() -> None:
        Scheduler(strict=True).run([entry, lambda: dbo_yield("elsewhere")])

    with pytest.raises(MicrobatchFailed, match=r"Microbatch 1 of 2 failed") as caught:
        Scheduler(strict=False).run([entry, outer])
    assert isinstance(caught.value.__cause__, ScheduleDivergence)


def test_a_context_outside_a_step_says_so() -> None:
    with pytest.raises(ForeignSwitchError, match="context of microbatch 1"):
        make_ubatch_contexts(2)[1].yield_("here")


# -- states ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("victim", [None, 0, 1, 2])
def test_states_follow_the_table(carrier: str, victim: int | None) -> None:
    allowed = {(before, after) for (before, _), after in TRANSITIONS.items()}
    history: list[list[State]] = [[State.WAITING] for _ in range(3)]

    class Watcher:
        def look(self, step: Any) -> None:
            for states, microbatch in zip(history, step.microbatches, strict=True):
                if microbatch.state is not states[-1]:
                    states.append(microbatch.state)

        def before_slice(self, microbatch: Any) -> None:
            self.look(microbatch.step)

        def after_slice(self, microbatch: Any) -> None:
            pass

        def after_step(self, step: Any, error: BaseException | None) -> None:
            self.look(step)

    def body(i: int) -> Any:
        def run() -> None:
            watcher.look(running[threading.get_ident()].step)
            dbo_yield("a")
            if i == victim:
                raise ValueError("x")
            dbo_yield("b")

        return run

    watcher = Watcher()
    scheduler = Scheduler(carrier=carrier, instruments=[watcher])
    try:
        scheduler.run([body(i) for i in range(3)])
    except MicrobatchFailed:
        assert victim is not None
    for states in history:
        assert all(pair in allowed for pair in pairwise(states)), states
    ends = [State.RETURNED] * 3 if victim is None else [State.ABORTED] * 3
    if victim is not None:
        ends[victim] = State.FAILED
    assert [states[-1] for states in history] == ends
