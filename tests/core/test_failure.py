"""Law 7: a failing microbatch fails the step, siblings are unwound, and the next step works."""

from __future__ import annotations

import contextvars
import pickle
import threading
from typing import Any

import pytest

from dbo_greenlet import Scheduler, dbo_enabled, dbo_maybe_run_recv_hook, dbo_register_recv_hook, dbo_yield
from dbo_greenlet.errors import (
    MicrobatchFailed,
    RankFailedError,
    ReceiveHookError,
    StepAborted,
)

CARRIERS = ["greenlet", "thread"]
YIELDS = 4


def entry(index: int, log: list[Any], fail_at: int | None = None, error: BaseException | None = None) -> Any:
    def run() -> int:
        try:
            for k in range(YIELDS + 1):
                if k == fail_at and error is not None:
                    raise error
                dbo_register_recv_hook(lambda k=k: log.append(("receive", index, k)))
                if k < YIELDS:
                    dbo_yield(f"s{k}")
            return index
        except StepAborted:
            log.append(("aborted", index))
            raise
        finally:
            log.append(("finally", index))

    return run


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_yield_of_every_microbatch(carrier: str, count: int) -> None:
    scheduler = Scheduler(carrier=carrier, strict=True)
    threads = threading.active_count()
    for victim in range(count):
        for k in range(YIELDS + 1):
            log: list[Any] = []
            error = ValueError(f"at {k}")
            with pytest.raises(MicrobatchFailed) as caught:
                scheduler.run([entry(i, log, k if i == victim else None, error) for i in range(count)])
            assert caught.value.__cause__ is error
            assert (caught.value.index, caught.value.count, caught.value.slice_number) == (victim, count, k)
            assert caught.value.site == (f"s{k - 1}" if k else "")
            assert caught.value.secondary == []
            # Those that had not started yet never run; those that had are unwound; those that had returned are left.
            started = {i for i in range(count) if i <= victim or k > 0}
            returned = {i for i in range(victim) if k == YIELDS}
            assert {e[1] for e in log if e[0] == "finally"} == started
            assert {e[1] for e in log if e[0] == "aborted"} == started - returned - {victim}
            after_failure = log[log.index(("finally", victim)) + 1 :]
            assert not [e for e in after_failure if e[0] == "receive"], "a receive ran after the step had failed"
            assert not dbo_enabled()
            assert scheduler.run([entry(i, [], None) for i in range(count)]).outputs == list(range(count))
    assert threading.active_count() == threads


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("signal", [KeyboardInterrupt, SystemExit])
def test_a_request_to_stop_passes_through(carrier: str, signal: type[BaseException]) -> None:
    log: list[Any] = []
    with pytest.raises(signal):
        Scheduler(carrier=carrier).run([entry(0, log), entry(1, log, 2, signal("now"))])
    assert ("aborted", 0) in log
    assert not dbo_enabled()
    assert Scheduler(carrier=carrier).run([entry(0, []), entry(1, [])]).outputs == [0, 1]


@pytest.mark.parametrize("carrier", CARRIERS)
def test_what_siblings_raise_while_unwound_is_kept(carrier: str) -> None:
    def sour() -> None:
        try:
            dbo_yield("a")
        finally:
            raise OSError("cleaning up")

    def failing() -> None:
        dbo_yield("a")
        raise ValueError("first")

    with pytest.raises(MicrobatchFailed) as caught:
        Scheduler(carrier=carrier).run([sour, failing, sour])
    # Microbatch 0 meets "a" again before 1 fails, so it has its own error first; put the failing one first instead.
    with pytest.raises(MicrobatchFailed, match=r"first; while being unwound, microbatch 1 raised OSError") as caught:
        Scheduler(carrier=carrier).run([failing, sour, sour])
    assert [(i, type(e)) for i, e in caught.value.secondary] == [(1, OSError), (2, OSError)]


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_stop_while_unwinding_wins(carrier: str) -> None:
    def stubborn() -> None:
        try:
            dbo_yield("a")
        finally:
            raise KeyboardInterrupt

    def failing() -> None:
        dbo_yield("a")
        raise ValueError("first")

    with pytest.raises(KeyboardInterrupt) as caught:
        Scheduler(carrier=carrier).run([failing, stubborn])
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_yield_while_unwinding_raises_again(carrier: str) -> None:
    seen: list[str] = []

    def tenacious() -> None:
        for k in range(3):
            try:
                dbo_yield(f"try {k}")
            except StepAborted:
                seen.append(f"aborted {k}")

    def failing() -> None:
        dbo_yield("try 0")
        raise ValueError("first")

    with pytest.raises(MicrobatchFailed, match="first"):
        Scheduler(carrier=carrier).run([failing, tenacious])
    assert seen == ["aborted 0", "aborted 1", "aborted 2"]


def test_except_exception_does_not_swallow_the_unwinding() -> None:
    reached = []

    def careless() -> None:
        try:
            dbo_yield("a")
        except Exception:
            reached.append(True)

    def failing() -> None:
        dbo_yield("a")
        raise ValueError("first")

    with pytest.raises(MicrobatchFailed):
        Scheduler().run([failing, careless])
    assert reached == []


# -- receives --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_receive_that_a_sibling_runs_names_its_owner(carrier: str) -> None:
    def broken() -> None:
        raise OSError("connection lost")

    def owner() -> None:
        dbo_register_recv_hook(broken)
        dbo_yield("layer0.dispatch")

    def sibling() -> None:
        dbo_maybe_run_recv_hook()

    with pytest.raises(ReceiveHookError, match=r"microbatch 0 registered.*microbatch 1 ran it") as caught:
        Scheduler(carrier=carrier).run([owner, sibling])
    assert (caught.value.owner, caught.value.ran_by) == (0, 1)
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_receive_that_nobody_ran_fails_in_its_owner(carrier: str) -> None:
    def broken() -> None:
        raise OSError("connection lost")

    def owner() -> None:
        dbo_register_recv_hook(broken)
        dbo_yield("layer0.dispatch")

    with pytest.raises(ReceiveHookError, match="the hub ran it") as caught:
        Scheduler(carrier=carrier).run([owner])
    assert (caught.value.owner, caught.value.ran_by) == (0, None)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_receive_for_a_sibling_that_finished_early_is_not_lost(carrier: str) -> None:
    ran: list[str] = []

    def early() -> str:
        return "early"

    def late() -> str:
        dbo_yield("a")
        dbo_register_recv_hook(lambda: ran.append("late's"))
        dbo_yield("b")
        assert ran == ["late's"]
        return "late"

    for entries in ([late, early], [early, late], [late, early, early]):
        ran.clear()
        assert "late" in Scheduler(carrier=carrier, strict=False).run(entries).outputs
        assert ran == ["late's"]


# -- values and context ----------------------------------------------------------------------------------------------


def test_errors_survive_a_queue_between_processes() -> None:
    for error in (
        MicrobatchFailed(1, 2, 3, "layer0.dispatch"),
        ReceiveHookError(0, None, "x"),
        RankFailedError(1, 0, "died"),
    ):
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error) and str(copy) == str(error)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_each_microbatch_has_a_copy_of_the_callers_context(carrier: str) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="default")
    variable.set("caller")

    def run(index: int) -> Any:
        def body() -> list[str]:
            seen = [variable.get()]
            variable.set(f"set by {index}")
            dbo_yield("a")
            seen.append(variable.get())
            return seen

        return body

    result = Scheduler(carrier=carrier).run([run(0), run(1)])
    assert result.outputs == [["caller", "set by 0"], ["caller", "set by 1"]]
    assert variable.get() == "caller"


def test_an_error_without_a_message_is_told_by_the_line_that_raised() -> None:
    """A bare assert deep in a library has nothing else to say, and its text is all that a remote caller reads."""

    def depth_is_enough(depth: int) -> None:
        if depth < 1025:
            raise AssertionError  # the queue is too short

    def entry() -> None:
        depth_is_enough(1024)

    with pytest.raises(MicrobatchFailed) as caught:
        Scheduler().run([entry, lambda: None])
    text = str(caught.value)
    assert text.startswith("Microbatch 0 of 2 failed in slice 0 before its first yield: AssertionError at test_failure")
    assert text.endswith(": raise AssertionError  # the queue is too short")
