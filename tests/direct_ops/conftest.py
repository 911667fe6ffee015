from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dbo_greenlet import register_direct_op
from tests.direct_ops.operators import IMPLEMENTATIONS, seen
from tests.thread_state.programs import snapshot


@pytest.fixture
def thread_as_before() -> Iterator[None]:
    """Nothing has been seen yet; and the test must leave the thread's torch state as it found it."""
    seen.clear()
    before = snapshot()
    yield
    assert snapshot() == before


@pytest.fixture
def direct() -> Iterator[Callable[..., Any]]:
    """direct(name, implementation): registers an operator until the test ends."""
    registered = []

    def register(name: str, implementation: Any = None) -> Any:
        op = register_direct_op(name, implementation or IMPLEMENTATIONS.get(name))
        registered.append(op)
        return op

    yield register
    for op in registered:
        op.remove()
