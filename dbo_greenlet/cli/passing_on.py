"""Running a program in front of which nobody should notice us: its exit code and its signals are its own."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from types import FrameType

from ..errors import ConfigurationError

__all__ = ["run_passing_on"]

_SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
)


def run_passing_on(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command to its end.

    SIGINT, SIGTERM and their like that reach this process go to the command, which decides what they mean. Ctrl-C in a
    terminal reaches both by itself, because both are in its foreground group, and is not sent a second time.

    Args:
        command: program and arguments; the program is looked up in PATH.
        environment: all of its environment.

    Returns:
        Its exit code; 128 and the signal's number where a signal killed it, as shells have it.

    Raises:
        ConfigurationError: it cannot be started.
    """
    process: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        if process is None:
            early.append(number)
        elif number not in _OF_A_TERMINAL or not _in_foreground():
            process.send_signal(number)  # of a process that has ended, Popen knows

    before = {number: signal.signal(number, pass_on) for number in _SIGNALS if _ours(number)}
    try:
        try:
            process = subprocess.Popen(list(command), env=dict(environment))
        except OSError as error:
            raise ConfigurationError(_cannot_start(command[0], error)) from error
        for number in early:
            process.send_signal(number)
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 - code if code < 0 else code


# What the terminal sends to its whole foreground group.
_OF_A_TERMINAL = (signal.SIGINT, getattr(signal, "SIGQUIT", signal.SIGINT))


def _ours(number: int) -> bool:
    # What the caller ignores (nohup) is ignored by the command, too, which inherits that.
    return signal.getsignal(number) is not signal.SIG_IGN


def _in_foreground() -> bool:
    """Whether this process is in the foreground group of its terminal, and so is the command."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False  # no terminal
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _cannot_start(program: str, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{program}: no such command"
    hint = f"; for a Python script: python {program}" if program.endswith(".py") else ""
    return f"{program} cannot be run: {(error.strerror or str(error)).lower()}{hint}"
