"""What the environment says about the drop-in. Read by every process that loads the plugin, so it imports nothing.

DBO_GREENLET=0            leave vLLM's own implementation in place (also: off, false, no)
DBO_GREENLET=require      where microbatches cannot run as greenlets, raise instead of leaving it to vLLM

And DBO_GREENLET_TRACE, _EVERY and _MB, see `trace_settings`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import ConfigurationError
from ..trace_settings import TraceSettings

__all__ = ["Settings"]

_OFF = ("0", "off", "false", "no")
_ON = ("", "1", "on", "true", "yes")


@dataclass(frozen=True)
class Settings:
    """The drop-in's settings.

    Attributes:
        mode: "on", "off" or "require".
        trace_dir: the folder for traces, None records nothing.
        trace_every: every how-manieth step is recorded.
        trace_megabytes: upper bound of a rank's traces together, in 10^6 bytes.
        trace_memory: whether what operations do to memory was asked for, which is not recorded here.
        problem: why nothing is recorded although a folder was named, or None. A mistake there does not keep the
            microbatches from running as greenlets.
    """

    mode: str = "on"
    trace_dir: str | None = None
    trace_every: int = TraceSettings.every
    trace_megabytes: float = TraceSettings.megabytes
    trace_memory: bool = False
    problem: str | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """The settings of this process.

        Raises:
            ConfigurationError: DBO_GREENLET has a value that means nothing; the message says what it may be.
        """
        env = os.environ if environment is None else environment
        mode = _mode(env.get("DBO_GREENLET", ""))
        try:
            trace = TraceSettings.from_environment(env)
        except ConfigurationError as error:
            return cls(mode, problem=f"no step is recorded: {error}")
        return cls(mode, trace.folder, trace.every, trace.megabytes, trace.memory)


def _mode(value: str) -> str:
    word = value.strip().lower()
    if word in _ON:
        return "on"
    if word in _OFF:
        return "off"
    if word == "require":
        return "require"
    raise ConfigurationError(f"DBO_GREENLET={value!r} means nothing; use 0 (off), 1 (on, the default) or require")
