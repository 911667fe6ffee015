from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.thread_state.programs import STREAMS, snapshot


@pytest.fixture
def thread_as_before() -> Iterator[None]:
    """The test must leave the thread's torch state as it found it."""
    before = snapshot()
    yield
    assert snapshot() == before
    assert STREAMS.current_stream() is STREAMS.default_stream
