"""The state machine on a transport with a bug: of two sends in one slice it delivers the first one's payload twice."""

from __future__ import annotations

from typing import Any

from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from dbo_greenlet.devices import CpuDevice
from dbo_greenlet.testing.state_machine import OverlapMachine
from dbo_greenlet.testing.step_programs import Parts
from dbo_greenlet.testing.step_run import TestBed


class OneBuffer:
    """A buffer for each microbatch, which is taken until it was read."""

    def __init__(self) -> None:
        self._taken: dict[int, Any] = {}

    def dispatch(self, microbatch: int, payload: Any) -> Parts:
        kept = self._taken.setdefault(microbatch, payload)
        return Parts(lambda: self._taken.pop(microbatch, None), lambda: kept)

    def combine(self, microbatch: int, payload: Any, dispatched: Parts) -> Parts:
        return Parts(lambda: None, lambda: payload)


class Forgetful(OverlapMachine):
    def make_wire(self, bed: TestBed) -> OneBuffer:
        return OneBuffer()

    def make_device(self) -> CpuDevice:
        return CpuDevice()


if __name__ == "__main__":
    run_state_machine_as_test(
        Forgetful,
        settings=settings(
            max_examples=500,
            stateful_step_count=20,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate, Phase.shrink],
        ),
    )
