"""The test kit for overlap: replay, golden schedules, exploration, hazards, faults (see the README).

Names are loaded when they are first used. Neither torch nor hypothesis nor pytest comes with them, except for those of
`strategies` and `state_machine` (hypothesis) and `torch_accesses` (torch), which are imported from there.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

# Public name -> the module that defines it; one that begins with a dot is the package's own.
_HOME = {
    "Costs": "layer_programs",
    "Exploration": "explore",
    "ExplorationFailed": "errors",
    "Fault": "faults",
    "FaultStringError": "errors",
    "Faults": "faults",
    "FaultyRanks": "rank_faults",
    "Finding": "errors",
    "Golden": "golden",
    "GoldenFileError": "errors",
    "GoldenMismatch": "errors",
    "Hazard": "hazards",
    "HazardError": "errors",
    "InjectedFault": "errors",
    "NondeterminismError": "errors",
    "Reference": "verdicts",
    "ReplayCase": "replay_case",
    "ReplayStringError": "errors",
    "ScenarioNeverReached": "errors",
    "SpaceTooLargeError": "errors",
    "StepRun": "step_run",
    "StepUnderTest": "step_run",
    "TestBed": "step_run",
    "VirtualDevice": ".devices.virtual",
    "check_deterministic": "determinism",
    "checksum": "checksum",
    "count_interleavings": "interleavings",
    "declare": "sometimes",
    "explore": "explore",
    "find_hazards": "hazards",
    "high_throughput": "layer_programs",
    "interleavings": "interleavings",
    "low_latency": "layer_programs",
    "run_in_turn": "step_run",
    "run_step": "step_run",
    "sometimes": "sometimes",
}

__all__ = list(_HOME)


class _Kit(ModuleType):
    """This package: some of its functions have the name of their module, and the name is the function's.

    Importing a module sets it as an attribute of its package, and would hide the function of that name.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _HOME or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Kit


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'dbo_greenlet.testing' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_HOME)
