"""Steps in steps, steps in threads, and other people's threads and greenlets."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from greenlet import getcurrent, greenlet

from dbo_greenlet import (
    Scheduler,
    dbo_current_ubatch_id,
    dbo_enabled,
    dbo_get_previous_event,
    dbo_maybe_run_recv_hook,
    dbo_register_recv_hook,
    dbo_switch_to_comm,
    dbo_switch_to_comm_sync,
    dbo_switch_to_compute,
    dbo_switch_to_compute_sync,
    dbo_yield,
    dbo_yield_and_switch_from_comm_to_compute,
    dbo_yield_and_switch_from_compute_to_comm,
)
from dbo_greenlet.errors import ForeignSwitchError, MicrobatchFailed

CARRIERS = ["greenlet", "thread"]


def call_everything() -> list[Any]:
    """Every function of the yield API; the list of what they returned."""
    return [
        dbo_enabled(),
        dbo_current_ubatch_id(),
        dbo_yield(),
        dbo_yield("site"),
        dbo_yield_and_switch_from_compute_to_comm(),
        dbo_yield_and_switch_from_comm_to_compute(),
        dbo_switch_to_comm(),
        dbo_switch_to_comm_sync(),
        dbo_switch_to_compute(),
        dbo_switch_to_compute_sync(),
        dbo_register_recv_hook(lambda: pytest.fail("a hook registered outside a step ran")),
        dbo_maybe_run_recv_hook(),
        dbo_get_previous_event(lambda: pytest.fail("an event was captured outside a step")),
    ]


def test_outside_a_step_nothing_happens() -> None:
    assert call_everything() == [False, 0] + [None] * 11


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_foreign_thread_sees_no_step(carrier: str) -> None:
    seen: list[Any] = []

    def entry() -> None:
        thread = threading.Thread(target=lambda: seen.append(call_everything()))
        thread.start()
        thread.join()
        dbo_yield("a")

    Scheduler(carrier=carrier).run([entry, entry])
    assert seen == [[False, 0] + [None] * 11] * 2


def run_inner(index: int, log: list[Any], scheduler: Scheduler) -> Any:
    def inner(k: int) -> Any:
        def body() -> int:
            log.append((index, k, "begin", dbo_current_ubatch_id()))
            dbo_yield("inner")
            log.append((index, k, "end", dbo_current_ubatch_id()))
            return 10 * index + k

        return body

    def outer() -> list[int]:
        dbo_yield("outer before")
        result = scheduler.run([inner(0), inner(1)])
        assert dbo_current_ubatch_id() == index
        dbo_yield("outer after")
        return result.outputs

    return outer


@pytest.mark.parametrize("outer_carrier", CARRIERS)
@pytest.mark.parametrize("inner_carrier", CARRIERS)
def test_a_step_inside_a_step(outer_carrier: str, inner_carrier: str) -> None:
    log: list[Any] = []
    inner = Scheduler(carrier=inner_carrier, strict=True)
    result = Scheduler(carrier=outer_carrier, strict=True).run([run_inner(i, log, inner) for i in range(2)])
    assert result.outputs == [[0, 1], [10, 11]]
    assert result.schedule.sites == ("outer before",) * 2 + ("outer after",) * 2 + ("",) * 2
    assert log == [(i, k, when, k) for i in range(2) for when in ("begin", "end") for k in range(2)]


def test_a_failure_inside_a_step_inside_a_step_is_charged_twice() -> None:
    def broken() -> None:
        dbo_yield("inner")
        raise ValueError("deep")

    def outer() -> None:
        Scheduler().run([broken, broken])

    with pytest.raises(MicrobatchFailed) as caught:
        Scheduler().run([lambda: dbo_yield("a"), outer])
    assert caught.value.index == 1
    inner = caught.value.__cause__
    assert isinstance(inner, MicrobatchFailed) and inner.index == 0
    assert isinstance(inner.__cause__, ValueError)
    assert not dbo_enabled()


def test_an_inner_step_is_unwound_when_the_outer_one_fails() -> None:
    log: list[str] = []

    def inner() -> None:
        try:
            dbo_yield("inner")
        finally:
            log.append("inner unwound")

    def outer() -> None:
        def inner_yields_outside() -> None:
            inner()

        Scheduler(strict=False).run([inner_yields_outside])
        try:
            dbo_yield("outer")
        finally:
            log.append("outer unwound")

    def failing() -> None:
        dbo_yield("outer")
        raise ValueError("x")

    with pytest.raises(MicrobatchFailed):
        Scheduler().run([failing, outer])
    assert log == ["inner unwound", "outer unwound"]


@pytest.mark.parametrize("carrier", CARRIERS)
def test_two_steps_in_two_threads_at_once(carrier: str) -> None:
    scheduler = Scheduler(carrier=carrier, strict=True)
    barrier = threading.Barrier(2)
    results: dict[int, Any] = {}

    def one(name: int) -> None:
        def entry() -> list[tuple[bool, int]]:
            seen = []
            for k in range(200):
                if k == 3 and dbo_current_ubatch_id() == 0:
                    barrier.wait(timeout=30)
                seen.append((dbo_enabled(), dbo_current_ubatch_id()))
                dbo_yield(f"{name}.{k}")
            return seen

        results[name] = scheduler.run([entry] * (2 + name))

    threads = [threading.Thread(target=one, args=(name,)) for name in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for name in range(2):
        count = 2 + name
        assert results[name].outputs == [[(True, i)] * 200 for i in range(count)]
        assert results[name].schedule.decisions == tuple(range(count)) * 201


# -- other people's greenlets ----------------------------------------------------------------------------------------


def test_greenlets_of_a_library_inside_a_microbatch_are_its_own_business() -> None:
    def entry() -> list[int]:
        me = getcurrent()

        def generator() -> None:
            for k in range(3):
                me.switch(k)

        other = greenlet(generator)
        got = []
        for _ in range(3):
            got.append(other.switch())
            dbo_yield("a")
        other.switch()
        return got

    assert Scheduler(strict=True).run([entry, entry]).outputs == [[0, 1, 2]] * 2


def test_a_yield_from_somebody_elses_greenlet_is_refused() -> None:
    def entry() -> None:
        greenlet(lambda: dbo_yield("not mine")).switch()

    with pytest.raises(ForeignSwitchError, match=r"'not mine'.*not microbatch 0"):
        Scheduler().run([entry, entry])
    assert not dbo_enabled()


def test_a_switch_to_the_hub_behind_its_back_is_refused() -> None:
    hub = getcurrent()
    unwound = []

    def entry() -> None:
        try:
            hub.switch("surprise")
        finally:
            unwound.append(True)

    with pytest.raises(ForeignSwitchError, match="no microbatch of this step, while microbatch 0 ran"):
        Scheduler().run([entry, lambda: None])
    assert unwound == [True]
    assert not dbo_enabled()


def test_a_switch_into_a_parked_microbatch_is_refused() -> None:
    carriers: list[Any] = []

    def parked() -> None:
        carriers.append(getcurrent())
        dbo_yield("a")

    def meddler() -> None:
        dbo_yield("a") if False else None
        carriers[0].switch("wake up")

    with pytest.raises(ForeignSwitchError, match=r"microbatch 0, parked at 'a', was resumed by a greenlet that is not"):
        Scheduler(strict=False).run([parked, meddler])
    assert not dbo_enabled()


def test_the_same_step_runs_from_inside_a_greenlet() -> None:
    def entry() -> int:
        dbo_yield("a")
        return dbo_current_ubatch_id()

    assert greenlet(lambda: Scheduler().run([entry, entry]).outputs).switch() == [0, 1]
