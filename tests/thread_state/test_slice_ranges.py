"""A range in the profile for each slice, without being asked for: all of them, in order, and around their own work."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from dbo_greenlet import Scheduler, dbo_maybe_run_recv_hook, dbo_range, dbo_register_recv_hook, dbo_yield
from dbo_greenlet.policies import PhaseOffset
from dbo_greenlet.policy import RoundRobin
from dbo_greenlet.profiling import depth
from dbo_greenlet.schedule import Schedule
from dbo_greenlet.slice_bracket import Slice
from dbo_greenlet.slice_ranges import SliceRanges
from tests.thread_state.profiled import ALL_THREADS, CARRIERS, NAMES, OPERATORS, X, events_of, model, names_of


@pytest.mark.parametrize(("carrier", "threads"), CARRIERS, ids=["greenlet", "thread"])
@pytest.mark.parametrize("policy", [RoundRobin(), PhaseOffset(2)], ids=["round robin", "offset"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_ranges_are_the_schedule_and_hold_their_own_operators(
    count: int, policy: Any, carrier: str, threads: dict[str, Any]
) -> None:
    scheduler = Scheduler(policy, carrier=carrier)
    with profile(activities=[ProfilerActivity.CPU], **threads) as recorded, torch.inference_mode():
        schedules = [scheduler.run([model(index) for index in range(count)]).schedule for _ in range(2)]
    ranges, operators = events_of(recorded)
    assert ranges == [name for schedule in schedules for name in names_of(schedule)]
    of_model = [each for each in operators if each.name in NAMES]
    # One operator a slice: the k-th of all lies in the k-th range, and in no other.
    assert [each.inside for each in of_model] == [[name] for name in ranges]
    assert [NAMES.index(each.name) for each in of_model] == [i for s in schedules for i in s.decisions]


def test_ranges_and_operators_are_right_also_where_torch_records_python_functions() -> None:
    """Whose rows are not: torch pairs calls and returns by their order on the thread."""
    with profile(activities=[ProfilerActivity.CPU], with_stack=True) as recorded, torch.inference_mode():
        schedule = Scheduler().run([model(0), model(1)]).schedule
    ranges, operators = events_of(recorded)
    assert ranges == names_of(schedule)
    assert [each.inside for each in operators if each.name in NAMES] == [[name] for name in ranges]


def test_without_a_profiler_nothing_is_put_round_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(SliceRanges, "__init__", lambda self, inner=None: made.append(self))
    Scheduler().run([model(0), model(1)])
    assert made == []


def test_a_profiler_that_starts_in_the_middle_has_ranges_from_the_next_step_on() -> None:
    recorded = profile(activities=[ProfilerActivity.CPU])

    def starting() -> None:
        recorded.start()
        dbo_yield("a")

    Scheduler(strict=False).run([starting, model(1)])
    schedule = Scheduler().run([model(0), model(1)]).schedule
    recorded.stop()
    ranges, _ = events_of(recorded)
    assert ranges == names_of(schedule)


def test_a_profiler_may_stop_in_the_middle() -> None:
    recorded = profile(activities=[ProfilerActivity.CPU])

    def stopping() -> None:
        dbo_yield("a")
        recorded.stop()
        dbo_yield("b")

    recorded.start()
    Scheduler(strict=False).run([stopping, model(1)])
    ranges, _ = events_of(recorded)
    # The one in which it stopped has no end, and torch shows none without.
    assert ranges[:2] == ["microbatch 0, slice 0", "microbatch 1, slice 0"]
    assert not torch._C._autograd._profiler_enabled()


def test_a_step_inside_a_microbatch_lies_in_its_slice() -> None:
    def outer() -> None:
        dbo_yield("a")
        Scheduler().run([model(0, layers=1), model(1, layers=1)])
        dbo_yield("b")

    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        Scheduler(strict=False).run([outer, model(2)])
    _, operators = events_of(recorded)
    inner = [each.inside for each in operators if each.name in NAMES[:2]]
    assert inner == [
        ["microbatch 0, slice 1, after a", name]
        for name in (
            "microbatch 0, slice 0",
            "microbatch 1, slice 0",
            "microbatch 0, slice 1, after layer0.dispatch",
            "microbatch 1, slice 1, after layer0.dispatch",
            "microbatch 0, slice 2, after layer0.combine",
            "microbatch 1, slice 2, after layer0.combine",
        )
    ]
    assert all(len(each.inside) == 1 for each in operators if each.name == NAMES[2])


# -- receives ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("carrier", "threads"), CARRIERS, ids=["greenlet", "thread"])
def test_a_receive_is_its_owners_whoever_runs_it(carrier: str, threads: dict[str, Any]) -> None:
    def entry() -> None:
        dbo_register_recv_hook(lambda: torch.exp(X))
        dbo_yield("layer0.dispatch")
        dbo_maybe_run_recv_hook()

    with profile(activities=[ProfilerActivity.CPU], **threads) as recorded:
        Scheduler(carrier=carrier).run([entry, entry])
    _, operators = events_of(recorded)
    assert [each.inside for each in operators if each.name == "aten::exp"] == [
        # Microbatch 1 comes to its yield and goes on alone: nobody but itself is there for microbatch 0's.
        ["microbatch 0, slice 1, after layer0.dispatch", "microbatch 0, receive of layer0.dispatch"],
        ["microbatch 0, slice 1, after layer0.dispatch", "microbatch 1, receive of layer0.dispatch"],
    ]


def test_a_receive_that_a_sibling_runs_before_its_send() -> None:
    def entry() -> None:
        dbo_maybe_run_recv_hook()
        dbo_register_recv_hook(lambda: torch.exp(X))
        dbo_yield("layer0.dispatch")
        dbo_maybe_run_recv_hook()

    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        Scheduler().run([entry, entry])
    ranges, operators = events_of(recorded)
    assert [each.inside for each in operators if each.name == "aten::exp"] == [
        ["microbatch 1, slice 0", "microbatch 0, receive of layer0.dispatch"],
        ["microbatch 0, slice 1, after layer0.dispatch", "microbatch 1, receive of layer0.dispatch"],
    ]
    assert len(ranges) == 6


def test_a_receive_that_fails_closes_its_range() -> None:
    def broken() -> None:
        raise ArithmeticError

    def entry() -> None:
        dbo_register_recv_hook(broken)
        dbo_yield("a")

    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        with pytest.raises(Exception, match="receive"):
            Scheduler().run([entry, entry])
        torch.exp(X)
    _, operators = events_of(recorded)
    assert operators[-1].name == "aten::exp" and operators[-1].inside == []


# -- ranges of the model's own -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("carrier", "threads"), CARRIERS, ids=["greenlet", "thread"])
def test_ranges_of_the_model_lie_inside_its_slices(carrier: str, threads: dict[str, Any]) -> None:
    def entry(index: int) -> None:
        with dbo_range(f"own {index}"):
            OPERATORS[index](X)
            dbo_yield("a")
            OPERATORS[index](X)

    with dbo_range("outside"), profile(activities=[ProfilerActivity.CPU], **threads) as recorded:
        Scheduler(carrier=carrier).run([lambda i=i: entry(i) for i in range(2)])
    assert depth() == 0
    _, operators = events_of(recorded)
    assert [each.inside for each in operators if each.name in NAMES] == [
        [f"microbatch {index}, slice {number}" + (", after a" if number else ""), f"own {index}"]
        for number in range(2)
        for index in range(2)
    ]


def test_what_else_is_round_the_slices_runs_inside_their_ranges() -> None:
    class Bracket:
        def begin(self, slice: Slice) -> None:
            torch.exp(X)

        def end(self, slice: Slice) -> None:
            torch.log(X)

    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        Scheduler().run([model(0), model(1)], bracket=Bracket())
    ranges, operators = events_of(recorded)
    for name in ("aten::exp", "aten::log"):
        assert [each.inside for each in operators if each.name == name] == [[each] for each in ranges]


def test_steps_of_two_threads_have_ranges_of_their_own() -> None:
    results: dict[int, Schedule] = {}

    def steps(base: int) -> None:
        results[base] = Scheduler().run([model(base), model(1 - base)]).schedule

    with profile(activities=[ProfilerActivity.CPU], **ALL_THREADS) as recorded:
        threads = [threading.Thread(target=steps, args=(base,)) for base in range(2)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    by_thread: dict[int, list[str]] = {}
    for event in sorted(recorded.events(), key=lambda event: event.time_range.start):
        if event.is_user_annotation:
            by_thread.setdefault(event.thread, []).append(event.name)
    assert list(by_thread.values()) == [names_of(results[0]), names_of(results[1])]
