"""Runs of the documented layers on the virtual device."""

from __future__ import annotations

from typing import Any

import pytest

from dbo_greenlet.devices.virtual import VirtualDevice
from dbo_greenlet.policy import Policy
from dbo_greenlet.testing.layer_programs import HighThroughput, high_throughput, low_latency
from dbo_greenlet.testing.step_run import Build, StepRun, run_step

BOTH = pytest.mark.parametrize("program", [low_latency, high_throughput])


def ran(build: Build, policy: Policy | None = None, **settings: Any) -> StepRun:
    run = run_step(build, policy, **settings)
    assert run.error is None
    return run


def device_of(run: StepRun) -> VirtualDevice:
    """A device that has run this: for its arithmetic."""
    device = VirtualDevice()
    device.program = run.program  # type: ignore[assignment]
    return device


class NoCounts(HighThroughput):
    """A host that waits cannot be captured."""

    host_blocks = False
