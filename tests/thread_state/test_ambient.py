"""Ambient state of the user's own: registered, kept apart per microbatch, given back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dbo_greenlet import Scheduler, dbo_yield, register_ambient_state
from dbo_greenlet.errors import ConfigurationError, MicrobatchFailed
from dbo_greenlet.thread_state import TorchThreadState

context: Any = None
restored: list[Any] = []


def save() -> Any:
    return context


def restore(value: Any) -> None:
    global context
    context = value
    restored.append(value)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    global context
    context = "hub"
    restored.clear()
    yield
    assert context == "hub"


@pytest.fixture
def registered() -> Iterator[Any]:
    handle = register_ambient_state("test context", save, restore)
    yield handle
    handle.remove()


def forward(name: str) -> list[Any]:
    """Sets its context for its whole run, as a serving engine does for its microbatches."""
    global context
    outer, context = context, name
    seen = []
    try:
        for _ in range(3):
            dbo_yield("layer")
            seen.append(context)
    finally:
        context = outer
    return seen


def test_each_microbatch_has_its_own(registered: Any) -> None:
    step = Scheduler().run([lambda: forward("a"), lambda: forward("b"), lambda: forward("c")])
    assert step.outputs == [["a"] * 3, ["b"] * 3, ["c"] * 3]


def test_not_registered_it_is_shared(registered: Any) -> None:
    registered.remove()
    step = Scheduler().run([lambda: forward("a"), lambda: forward("b")])
    assert step.outputs[0] != ["a"] * 3
    restore("hub")  # the interleaved endings left "a"


def test_it_is_given_back_after_a_failure_and_when_left_behind(registered: Any) -> None:
    def leaving() -> None:
        restore("left behind")
        dbo_yield("a")

    def failing() -> None:
        dbo_yield("a")
        assert context == "hub"
        raise ArithmeticError

    with pytest.raises(MicrobatchFailed, match="ArithmeticError"):
        Scheduler(strict=False).run([leaving, failing, lambda: forward("c")])
    assert context == "hub"
    Scheduler(strict=False).run([lambda: restore("left behind"), lambda: dbo_yield("a")])


def test_equal_values_are_one_state_and_nothing_is_restored(registered: Any) -> None:
    def entry() -> None:
        global context
        mine, context = context, ["an", "equal", "list"]
        dbo_yield("a")
        context = mine

    global context
    context = ["an", "equal", "list"]
    Scheduler().run([entry, entry])
    assert restored == []
    context = "hub"


def test_a_step_keeps_the_registrations_it_began_with(registered: Any) -> None:
    def entry(name: str) -> list[Any]:
        registered.remove()
        registered.remove()
        return forward(name)

    assert Scheduler().run([lambda: entry("a"), lambda: entry("b")]).outputs == [["a"] * 3, ["b"] * 3]


def test_pairs_may_be_given_to_one_step_alone() -> None:
    scheduler = Scheduler(thread_state=lambda: TorchThreadState(ambient=((save, restore),)))
    assert scheduler.run([lambda: forward("a"), lambda: forward("b")]).outputs == [["a"] * 3, ["b"] * 3]


def test_pairs_nest() -> None:
    """Taken off in order of registration, put on in the opposite one."""
    values = {"outer": 0, "inner": 0}
    order: list[str] = []

    def pair(name: str) -> Any:
        def put(value: int) -> None:
            values[name] = value
            order.append(f"{name} {value}")

        return (lambda: values[name], put)

    def entry() -> None:
        values["outer"], values["inner"] = 1, 2
        dbo_yield("a")
        order.append("back")
        values["outer"] = values["inner"] = 0

    Scheduler(thread_state=lambda: TorchThreadState(ambient=(pair("outer"), pair("inner")))).run([entry])
    assert order == ["outer 0", "inner 0", "inner 2", "outer 1", "back"]


def test_what_cannot_be_registered(registered: Any) -> None:
    with pytest.raises(ConfigurationError, match="registered already"):
        register_ambient_state("test context", save, restore)
    with pytest.raises(ConfigurationError, match="must be callables"):
        register_ambient_state("another", save, None)  # type: ignore[arg-type]
    registered.remove()
    second = register_ambient_state("test context", save, restore)
    registered.remove()  # the first one's handle does not remove the second
    assert Scheduler().run([lambda: forward("a"), lambda: forward("b")]).outputs == [["a"] * 3, ["b"] * 3]
    second.remove()
