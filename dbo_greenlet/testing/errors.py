"""What the test kit raises.

`Finding` is a verdict on the code under test: a test fails with it. Everything else is a mistake in what was asked of
the kit, and exits with 2.
"""

from __future__ import annotations

from ..errors import ConfigurationError, DboError, ScheduleDecodeError, ScheduleDivergence

__all__ = [
    "ExplorationFailed",
    "FaultStringError",
    "Finding",
    "GoldenFileError",
    "GoldenMismatch",
    "HazardError",
    "InjectedFault",
    "NondeterminismError",
    "ReplayStringError",
    "ScenarioNeverReached",
    "SpaceTooLargeError",
]


class Finding(DboError):
    """The code under test did something that it should not."""


class HazardError(Finding):
    """The recorded stream program has hazards; attribute `hazards` lists them."""

    def __init__(self, message: str, hazards: tuple[object, ...] = ()) -> None:
        self.hazards = hazards
        super().__init__(message)

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.args[0], self.hazards))


class ExplorationFailed(Finding):
    """An explored schedule failed; `replay` is the string that runs the shortest failing one again."""

    def __init__(self, message: str, replay: str = "") -> None:
        self.replay = replay
        super().__init__(message)

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.args[0], self.replay))


class NondeterminismError(Finding):
    """Two runs of the same step under the same policy differ; the message names the first difference."""


class GoldenMismatch(Finding, ScheduleDivergence):
    """A step ran in another order than its golden file says; the message is the difference."""


class ScenarioNeverReached(Finding):
    """A `sometimes(...)` mark was never true in the whole run; the message names the marks."""


class InjectedFault(RuntimeError):
    """What a fault raises in the microbatch, in place of what the real part would raise. No `DboError`: the code under
    test must treat it like any other error."""


class ReplayStringError(ScheduleDecodeError):
    """A replay string is of another version or another model, truncated or mistyped."""


class FaultStringError(DboError):
    """A fault string that cannot be read; the message names the part and what is possible there."""


class GoldenFileError(DboError):
    """A golden file that is missing, of another version, or was edited by hand."""


class SpaceTooLargeError(ConfigurationError):
    """An exhaustive exploration would run more schedules than allowed; the message has their number and a bound."""
