"""What the environment says about traces. Read where a scheduler is made, and by every process of a vLLM server, so it
imports nothing.

DBO_GREENLET_TRACE=DIR    record the steps of each process to JSON Lines in DIR
DBO_GREENLET_TRACE_EVERY  every how-manieth step is recorded, default 100
DBO_GREENLET_TRACE_MB     how much a rank may write in all, default 64
DBO_GREENLET_TRACE_GPU=1  also when each slice ran on the GPU, where a step has CUDA streams of its own; not in vLLM
DBO_GREENLET_TRACE_MEMORY=1  also what each operation reads, writes, frees and holds; not in vLLM

`dbo-greenlet record` sets them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import ConfigurationError

__all__ = ["FOLDER", "TraceSettings"]

FOLDER = "DBO_GREENLET_TRACE"
EVERY = "DBO_GREENLET_TRACE_EVERY"
MEGABYTES = "DBO_GREENLET_TRACE_MB"
GPU = "DBO_GREENLET_TRACE_GPU"
MEMORY = "DBO_GREENLET_TRACE_MEMORY"

_OFF = ("", "0", "off", "false", "no")


@dataclass(frozen=True)
class TraceSettings:
    """What to record.

    Attributes:
        folder: where; None records nothing.
        every: every how-manieth step is recorded.
        megabytes: upper bound of a rank's traces together, in 10^6 bytes.
        gpu: whether slices are timed on the GPU.
        memory: whether it is noted what operations do to memory.
    """

    folder: str | None = None
    every: int = 100
    megabytes: float = 64.0
    gpu: bool = False
    memory: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> TraceSettings:
        """The settings of this process.

        Raises:
            ConfigurationError: a number that is none; the message names the variable.
        """
        env = os.environ if environment is None else environment
        return cls(
            env.get(FOLDER) or None,
            int(_positive(env, EVERY, cls.every, whole=True)),
            _positive(env, MEGABYTES, cls.megabytes),
            env.get(GPU, "").strip().lower() not in _OFF,
            env.get(MEMORY, "").strip().lower() not in _OFF,
        )


def _positive(env: Mapping[str, str], name: str, default: float, *, whole: bool = False) -> float:
    text = env.get(name, "").strip()
    if not text:
        return default
    kind = "a whole number of 1 or more" if whole else "a positive number"
    try:
        value: float = int(text) if whole else float(text)
    except ValueError:
        raise ConfigurationError(f"{name}={text!r} is not {kind}") from None
    if not 0 < value < float("inf"):
        raise ConfigurationError(f"{name}={text!r} is not {kind}")
    return value
