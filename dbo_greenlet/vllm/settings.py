"""What the environment says about the drop-in. Read by every process that loads the plugin, so it imports nothing.

DBO_GREENLET=0            leave vLLM's own implementation in place (also: off, false, no)
DBO_GREENLET=require      where microbatches cannot run as greenlets, raise instead of leaving it to vLLM
DBO_GREENLET_TRACE=DIR    record steps of each rank to JSON Lines in DIR
DBO_GREENLET_TRACE_EVERY  every how-manieth step is recorded, default 100
DBO_GREENLET_TRACE_MB     how much a rank may write in all, default 64
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import ConfigurationError

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
        problem: why nothing is recorded although a folder was named, or None. A mistake there does not keep the
            microbatches from running as greenlets.
    """

    mode: str = "on"
    trace_dir: str | None = None
    trace_every: int = 100
    trace_megabytes: float = 64.0
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
            every = int(_positive(env, "DBO_GREENLET_TRACE_EVERY", cls.trace_every, whole=True))
            megabytes = _positive(env, "DBO_GREENLET_TRACE_MB", cls.trace_megabytes)
        except ConfigurationError as error:
            return cls(mode, problem=f"no step is recorded: {error}")
        return cls(mode, env.get("DBO_GREENLET_TRACE") or None, every, megabytes)


def _mode(value: str) -> str:
    word = value.strip().lower()
    if word in _ON:
        return "on"
    if word in _OFF:
        return "off"
    if word == "require":
        return "require"
    raise ConfigurationError(f"DBO_GREENLET={value!r} means nothing; use 0 (off), 1 (on, the default) or require")


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
