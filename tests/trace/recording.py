"""What the tests of the recorder share: its clock, contexts that it watches, a dispatch of which it sees the bytes."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from dbo_greenlet.microbatch import UBatchContext, make_ubatch_contexts
from dbo_greenlet.trace import StepRecorder

CARRIERS = pytest.mark.parametrize("carrier", ["greenlet", "thread"])


def recorder() -> StepRecorder:
    """A recorder whose clock ticks one microsecond each time it is read; the first tick is the origin."""
    ticks = count(0, 1000)
    return StepRecorder(clock=lambda: next(ticks))


def contexts_of(watch: StepRecorder, device: Any, count: int = 2) -> list[UBatchContext]:
    return make_ubatch_contexts(count, device=watch.device(device))


class FakeDispatch:
    """What a recorder sees of a dispatch: the bytes that it has sent so far, and its two receive parts."""

    def __init__(self, dispatched: Any, combined: Any = 0) -> None:
        self.bytes_sent = dispatched
        self.combined = combined

    def combine_send(self) -> None:
        self.bytes_sent += self.combined

    def finish_dispatch(self) -> None: ...

    def finish_combine(self) -> None: ...
