"""Ranges of slices where something goes wrong: none stays open, and none is a reason for a step to fail."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from dbo_greenlet import Scheduler, dbo_range, dbo_yield
from dbo_greenlet import slice_ranges as module
from dbo_greenlet.errors import MicrobatchFailed, PolicyError
from dbo_greenlet.profiling import depth
from dbo_greenlet.slice_bracket import Slice
from tests.thread_state.profiled import CARRIERS, NAMES, X, events_of, model, names_of


def closed_by(run: Callable[[], None], **profiled: Any) -> list[str]:
    """The ranges of `run`, which must leave none open."""
    with profile(activities=[ProfilerActivity.CPU], **profiled) as recorded:
        run()
        torch.exp(X)
    ranges, operators = events_of(recorded)
    assert [each.inside for each in operators if each.name == "aten::exp"] == [[]]
    return ranges


@pytest.mark.parametrize(("carrier", "threads"), CARRIERS, ids=["greenlet", "thread"])
def test_a_failing_step_leaves_no_range_open(carrier: str, threads: dict[str, Any]) -> None:
    unwound = []

    def failing() -> None:
        with dbo_range("own"):
            dbo_yield("a")
            raise ArithmeticError

    def parked() -> None:
        with dbo_range("parked"):
            try:
                dbo_yield("a")
                dbo_yield("b")
            finally:
                torch.log(X)
                unwound.append(depth())

    def run() -> None:
        with pytest.raises(MicrobatchFailed, match="Microbatch 0 of 2 failed in slice 1 after the yield at 'a'"):
            Scheduler(carrier=carrier).run([failing, parked])

    ranges = closed_by(run, **threads)
    assert [name for name in ranges if "slice" in name] == [
        "microbatch 0, slice 0",
        "microbatch 1, slice 0",
        "microbatch 0, slice 1, after a",
    ]
    assert len(unwound) == 1 and depth() == 0


@pytest.mark.parametrize(("carrier", "threads"), CARRIERS, ids=["greenlet", "thread"])
@pytest.mark.parametrize("where", ["begin", "end"])
def test_a_bracket_that_raises_fails_the_step_and_leaves_no_range_open(
    where: str, carrier: str, threads: dict[str, Any]
) -> None:
    class Bracket:
        def begin(self, slice: Slice) -> None:
            self.look("begin", slice)

        def end(self, slice: Slice) -> None:
            self.look("end", slice)

        def look(self, now: str, slice: Slice) -> None:
            if (now, slice.decision) == (where, 2):
                raise ArithmeticError("of the bracket")

    def run() -> None:
        with pytest.raises(ArithmeticError, match="of the bracket"):
            Scheduler(carrier=carrier).run([model(0), model(1)], bracket=Bracket())

    assert len(closed_by(run, **threads)) == 3


def test_a_policy_that_fails_leaves_no_range_open() -> None:
    class Wrong:
        name = "wrong"

        def start(self, step: Any) -> Callable[[], int]:
            return lambda: 0 if not step.decisions else 7

    def run() -> None:
        with pytest.raises(PolicyError):
            Scheduler(Wrong()).run([model(0), model(1)])

    assert closed_by(run) == ["microbatch 0, slice 0"]


@pytest.fixture
def by_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where torch has nothing but record_function, which goes by an operator."""
    monkeypatch.setattr(module, "_enter", module._enter_record_function)
    monkeypatch.setattr(module, "_exit", module._exit_record_function)


def test_with_record_function_the_ranges_are_the_same(by_operator: None) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as recorded, torch.inference_mode():
        schedule = Scheduler().run([model(0), model(1)]).schedule
    ranges, operators = events_of(recorded)
    assert ranges == names_of(schedule)
    assert [each.inside for each in operators if each.name in NAMES] == [[name] for name in ranges]


def test_modes_of_the_caller_see_no_operator_of_ours() -> None:
    seen = []

    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with profile(activities=[ProfilerActivity.CPU]), Watching():
        Scheduler().run([model(0, layers=1), model(1, layers=1)])
    assert seen == ["aten.sin.default", "aten.cos.default"] * 3


@pytest.mark.parametrize("carrier", ["greenlet", "thread"])
def test_ranges_that_cannot_be_written_do_not_fail_the_step(
    carrier: str, by_operator: None, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing(torch.utils._python_dispatch.TorchDispatchMode):
        """A mode of the caller's that has never heard of the profiler's operators."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "profiler":
                raise NotImplementedError(func)
            return func(*args, **(kwargs or {}))

    with (
        profile(activities=[ProfilerActivity.CPU]),
        Refusing(),
        caplog.at_level(logging.ERROR, logger="dbo_greenlet"),
    ):
        result = Scheduler(carrier=carrier).run([model(0), model(1)])
    assert result.yields == (4, 4)
    assert [record.message for record in caplog.records] == ["this step has no ranges in the profile from here on"]
