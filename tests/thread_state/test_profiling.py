"""Profiler ranges round yields: every operator lies in a range of its own microbatch, and in no other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from dbo_greenlet import Scheduler, dbo_range, dbo_yield
from dbo_greenlet.errors import MicrobatchFailed
from dbo_greenlet.profiling import depth
from dbo_greenlet.thread_state import TorchThreadState

X = torch.ones(4)
# An operator for each microbatch, so that a trace says whose it is.
OPERATORS = {0: (torch.sin, "aten::sin"), 1: (torch.cos, "aten::cos"), 2: (torch.tanh, "aten::tanh")}


def model(index: int, scope: Any, layers: int = 3) -> None:
    operator, _ = OPERATORS[index]
    with scope(f"microbatch {index}"):
        for layer in range(layers):
            with scope(f"microbatch {index} layer {layer}"):
                operator(X)
                dbo_yield("layer")
                operator(X)
            dbo_yield("between")


def ancestors(event: Any) -> list[str]:
    names = []
    while event.cpu_parent is not None:
        event = event.cpu_parent
        names.append(event.name)
    return names


def booked(scope: Any) -> dict[str, list[list[str]]]:
    """Operator to the enclosing "microbatch" ranges of each of its calls, outermost first."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded, torch.inference_mode():
        Scheduler().run([lambda i=i: model(i, scope) for i in OPERATORS])
    calls: dict[str, list[list[str]]] = {name: [] for _, name in OPERATORS.values()}
    for event in sorted(recorded.events(), key=lambda event: event.time_range.start):
        if event.name in calls:
            # Without the ranges that the scheduler itself writes: tests/thread_state/test_slice_ranges.py.
            own = [name for name in reversed(ancestors(event)) if "slice" not in name]
            calls[event.name].append([name for name in own if name.startswith("microbatch")])
    return calls


def test_every_operator_is_booked_to_its_own_microbatch_and_layer() -> None:
    calls = booked(dbo_range)
    for index, (_, name) in OPERATORS.items():
        assert calls[name] == [
            [f"microbatch {index}", f"microbatch {index} layer {layer}"] for layer in range(3) for _ in range(2)
        ]
    assert depth() == 0


def test_with_ranges_that_stay_open_they_are_not() -> None:
    """The difference that dbo_range makes; should torch ever get this right by itself, it can go."""
    calls = booked(record_function)
    assert any(
        any(not entry.startswith(f"microbatch {index}") for entry in each)
        for index, (_, name) in OPERATORS.items()
        for each in calls[name]
    )


def test_one_range_a_slice() -> None:
    def entry() -> None:
        with dbo_range("whole"):
            for _ in range(3):
                dbo_yield("a")

    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        Scheduler().run([entry, entry])
    assert sum(event.name == "whole" for event in recorded.events()) == 8


def test_a_range_that_is_open_round_the_step_stays_open() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as recorded, dbo_range("step"):
        Scheduler().run([lambda i=i: model(i, dbo_range, layers=1) for i in OPERATORS])
        assert depth() == 1
    assert [event.name for event in recorded.events()].count("step") == 1
    operators = [event for event in recorded.events() if event.name in {name for _, name in OPERATORS.values()}]
    assert len(operators) == 6
    assert all("step" in ancestors(event) for event in operators)


@pytest.mark.parametrize("profiled", [True, False])
def test_ranges_are_closed_after_a_failure(profiled: bool) -> None:
    def failing() -> None:
        with dbo_range("failing"):
            dbo_yield("layer")
            raise ArithmeticError

    def forgetful() -> None:
        dbo_range("never left").__enter__()
        dbo_yield("layer")

    def run() -> None:
        with pytest.raises(MicrobatchFailed):
            Scheduler().run([lambda: model(0, dbo_range), failing, forgetful])
        Scheduler().run([forgetful, forgetful])

    if profiled:
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            run()
            torch.exp(X)
        (after,) = (event for event in recorded.events() if event.name == "aten::exp")
        assert ancestors(after) == []
    else:
        run()
    assert depth() == 0


def test_a_profiler_that_starts_in_the_middle_sees_the_ranges_from_the_next_slice_on() -> None:
    seen: list[Any] = []

    def entry() -> None:
        with dbo_range("long"):
            dbo_yield("a")
            torch.sin(X)
            dbo_yield("b")

    def profiling() -> None:
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            dbo_yield("a")
            dbo_yield("b")
        seen.append(recorded)

    Scheduler().run([profiling, entry])
    names = {event.name: ancestors(event) for event in seen[0].events()}
    assert names["aten::sin"] == ["long"]


def test_a_range_that_nobody_closed_is_closed_when_the_step_finishes() -> None:
    """As after an interrupt in the hub, before the microbatch that opened it had left."""
    state = TorchThreadState()
    with dbo_range("outer"):
        state.start()
        dbo_range("inner").__enter__()
        state.finish()
        assert depth() == 1
    assert depth() == 0


def test_ranges_may_end_in_another_order_than_they_began() -> None:
    first, second = dbo_range("first"), dbo_range("second")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert depth() == 1
    second.__exit__(None, None, None)
    assert depth() == 0


def test_compiled_code_may_contain_ranges() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def compiled(x: torch.Tensor) -> torch.Tensor:
        with dbo_range("compiled"):
            return x.sin() + 1

    assert torch.equal(compiled(X), X.sin() + 1)
    assert depth() == 0
