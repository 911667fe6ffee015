"""Slices in ring order have a loop of their own: it must not be seen by anything that it is not the general one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo_greenlet import RoundRobin, Scheduler, dbo_yield, greenlet_carrier
from dbo_greenlet.errors import MicrobatchFailed, PolicyError
from dbo_greenlet.policy import Chooser
from dbo_greenlet.step import Step
from tests.core.programs import Action, play


class AskedEachTime(RoundRobin):
    """The same answers from a function that does not say that they are in turn."""

    def start(self, step: Step) -> Chooser:
        choose = super().start(step)
        return lambda: choose()


class OtherStart(RoundRobin):
    """A subclass with an order of its own: whatever it inherits, its answers count."""

    def start(self, step: Step) -> Chooser:
        super().start(step)
        return lambda: 1


class Wrapped(RoundRobin):
    """All of microbatch 0 first, by a function that has taken over every attribute of the inherited one."""

    def start(self, step: Step) -> Chooser:
        @functools.wraps(super().start(step))
        def choose() -> int:
            return step.runnable()[0]

        return choose


class HandsOn:
    """What it is asked for and does not have, it asks its inner object for."""

    def __init__(self, inner: Any, step: Step) -> None:
        self._inner = inner
        self._step = step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self) -> int:
        return self._step.runnable()[0]


class InAnObject(RoundRobin):
    """The same by an object that looks like the inherited function."""

    def start(self, step: Step) -> Chooser:
        return HandsOn(super().start(step), step)


class Times(list[int]):
    """A bracket that is empty, and therefore false, as the step begins."""

    def begin(self, this: Any) -> None:
        self.append(this.number)

    def end(self, this: Any) -> None:
        pass


actions = st.one_of(
    st.tuples(st.just("work"), st.sampled_from("pqr")),
    st.tuples(st.just("yield"), st.sampled_from("abc")),
    st.just(("receive sibling's", "")),
    st.tuples(st.just("send"), st.sampled_from("st")),
    st.tuples(st.just("raise"), st.just("planned")),
)


def outcome(policy: RoundRobin, programs: list[list[Action]]) -> tuple[Any, ...]:
    """Everything that a step leaves: the log, and its outputs and schedule or its error."""
    log: list[Any] = []
    steps: list[Step] = []

    class Noting(type(policy)):  # type: ignore[misc]  # the policy, which also shows the step
        def start(self, step: Step) -> Chooser:
            steps.append(step)
            return super().start(step)

    scheduler = Scheduler(Noting(), strict=False)
    try:
        result = scheduler.run([play(i, p, log) for i, p in enumerate(programs)])
        end: tuple[Any, ...] = (result.outputs, result.schedule)
    except MicrobatchFailed as error:
        secondary = [(index, repr(each)) for index, each in error.secondary]
        end = (str(error), error.index, repr(error.__cause__), secondary)
    step = steps[0]
    numbers = [microbatch.slice_number for microbatch in step.microbatches]
    return log, end, step.decisions, step.sites, step.last, step.live, numbers


@settings(max_examples=300)
@given(st.lists(st.lists(actions, max_size=10), min_size=1, max_size=4))
def test_any_step_leaves_the_same_by_either_loop(programs: list[list[Action]]) -> None:
    assert outcome(RoundRobin(), programs) == outcome(AskedEachTime(), programs)


def yields(count: int) -> Callable[[], None]:
    def entry() -> None:
        for number in range(count):
            dbo_yield(f"site {number}")

    return entry


@pytest.fixture
def turns_taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of slices that the short loop recorded, of each step that came through it."""
    taken: list[int] = []
    original = greenlet_carrier._take_turns

    def counted(step: Step, *others: Any) -> Any:
        before = len(step.decisions)
        try:
            return original(step, *others)
        finally:
            taken.append(len(step.decisions) - before)

    monkeypatch.setattr(greenlet_carrier, "_take_turns", counted)
    return taken


def test_the_short_loop_carries_a_step_until_the_first_microbatch_returns(turns_taken: list[int]) -> None:
    Scheduler(strict=False).run([yields(5), yields(7)])
    assert turns_taken == [10]


@pytest.mark.parametrize("why", ["policy", "strict", "instrument", "bracket"])
def test_who_has_to_be_asked_or_told_keeps_the_general_loop(why: str, turns_taken: list[int]) -> None:
    heard: list[Any] = []

    class Told:
        def after_slice(self, microbatch: Any) -> None:
            heard.append(microbatch.index)

    class Bracket:
        def begin(self, this: Any) -> None:
            heard.append(this.microbatch)

        def end(self, this: Any) -> None:
            pass

    scheduler = Scheduler(
        AskedEachTime() if why == "policy" else None,
        strict=why == "strict",
        instruments=[Told()] if why == "instrument" else (),
    )
    scheduler.run([yields(2), yields(2)], bracket=Bracket() if why == "bracket" else None)
    assert turns_taken == []
    assert heard == ([0, 1] * 3 if why in ("instrument", "bracket") else [])


def test_a_subclass_that_answers_otherwise_is_asked(turns_taken: list[int]) -> None:
    with pytest.raises(PolicyError, match="picked microbatch 1, which would overtake"):
        Scheduler(OtherStart(), strict=False).run([yields(2), yields(2)])
    assert turns_taken == []


@pytest.mark.parametrize("policy", [Wrapped, InAnObject])
def test_what_wraps_the_chooser_of_round_robin_is_asked(policy: type[RoundRobin], turns_taken: list[int]) -> None:
    schedule = Scheduler(policy(), strict=False).run([yields(2), yields(2)]).schedule
    assert schedule.decisions == (0, 0, 0, 1, 1, 1)
    assert turns_taken == []


def test_a_policy_may_answer_by_the_chooser_of_round_robin(turns_taken: list[int]) -> None:
    class Delegates:
        name = "delegates"

        def start(self, step: Step) -> Chooser:
            return RoundRobin().start(step)

    assert Scheduler(Delegates(), strict=False).run([yields(2), yields(2)]).schedule.decisions == (0, 1) * 3
    assert turns_taken == [4]


def test_a_bracket_that_is_an_empty_list_is_a_bracket() -> None:
    times = Times()
    Scheduler(strict=False).run([yields(2), yields(2)], bracket=times)
    assert times == [0, 0, 1, 1, 2, 2]
