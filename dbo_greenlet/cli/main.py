"""The command line as a whole: subcommands, exit codes, and errors as one sentence.

Exit codes: 0 all is well; 1 the command ran and found something, or its answer is no (tokens differ, a replay that was
not met, a trace that is not complete, no split that pays); 2 it could not run (bad input, a failed rank); 130 Ctrl-C;
143 SIGTERM, which does what Ctrl-C does. With DBO_GREENLET_TRACEBACK=1 an error comes with its traceback, and with that
of the rank it is from.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from ..errors import DboError, SchedulerInternalError

__all__ = ["EXIT_ERROR", "EXIT_FINDING", "EXIT_INTERRUPTED", "EXIT_OK", "EXIT_TERMINATED", "main"]

EXIT_OK = 0
EXIT_FINDING = 1
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 128 + signal.SIGTERM


class Terminated(BaseException):
    """SIGTERM. Like a KeyboardInterrupt: it unwinds, so ranks are stopped, the trace is ended and folders removed."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line with `arguments` (default: those of the process) and exit."""
    _open_missing_streams()
    try:
        from typer.main import get_command

        from .app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "click"):
            raise
        _say("the command line needs typer and rich; install dbo-greenlet[cli]")
        sys.exit(EXIT_ERROR)
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    code: object = EXIT_OK
    heard = False
    try:
        heard = _hear_sigterm()
        # Not the command's own main(): it answers Ctrl-C and a closed pipe before anybody else can.
        command = get_command(app)
        with command.make_context("dbo-greenlet", words) as context:
            code = command.invoke(context)
        sys.stdout.flush()
    except BaseException as error:
        # Everything: whatever it is, the user gets one sentence and a stable exit code.
        code = _exit_code(error)
    finally:
        if heard:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.exit(code if isinstance(code, int) else EXIT_OK)


def _exit_code(error: BaseException) -> int:
    # Typer brings its own copy of click or uses the installed one, by version; so its exceptions are known by what
    # they have: how to leave, and (for a mistake on the command line) a message.
    code = error.code if isinstance(error, SystemExit) else getattr(error, "exit_code", None)
    message = getattr(error, "format_message", None)
    if isinstance(code, int) and message is None:
        return code
    if os.environ.get("DBO_GREENLET_TRACEBACK", "") not in ("", "0"):
        import traceback

        traceback.print_exception(error)
    if isinstance(error, KeyboardInterrupt):
        _say("stopped by Ctrl-C")
        return EXIT_INTERRUPTED
    if isinstance(error, Terminated):
        _say("stopped by SIGTERM")
        return EXIT_TERMINATED
    if isinstance(error, BrokenPipeError):
        # The reader of our output has seen enough (| head); the interpreter would complain about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    if message is not None:
        context = getattr(error, "ctx", None)
        path = "dbo-greenlet" if context is None else context.command_path
        # Some versions of typer pass on how pydantic begins every message of a value.
        said = message().replace(": Value error, ", ": ").rstrip(".")
        _say(f"{said} (see {path} --help)")
    elif isinstance(error, (DboError, SchedulerInternalError)):
        _say(str(error))
    elif isinstance(error, ModuleNotFoundError):
        _say(f"{error.name} is not installed; install dbo-greenlet[run]")
    else:
        _say(f"unexpected {type(error).__name__}: {error}; DBO_GREENLET_TRACEBACK=1 shows where it came from")
    return EXIT_ERROR


def _hear_sigterm() -> bool:
    """Let SIGTERM raise `Terminated`; False where that cannot be, or the caller ignores it or has a handler."""
    if threading.current_thread() is not threading.main_thread():
        return False
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return False
    signal.signal(signal.SIGTERM, _terminate)
    return True


def _terminate(number: int, frame: FrameType | None) -> None:
    # Once: a second one would interrupt the cleaning up. It is short; who cannot wait has SIGKILL.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated


def _open_missing_streams() -> None:
    """Standard streams that the caller closed (>&-) lead nowhere instead.

    Python has None for them, and their descriptors would go to the next files that are opened: to the pipe of a rank,
    which then takes it for its standard output.
    """
    for name, descriptor, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        if getattr(sys, name) is not None:
            continue
        try:
            os.fstat(descriptor)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)
            # Inheritable either way, as standard streams are.
            if nowhere == descriptor:
                os.set_inheritable(nowhere, True)
            else:
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
        setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - for the rest of the process


def _say(text: str) -> None:
    # One line, whatever the message of a library looked like.
    print("dbo-greenlet: " + " ".join(text.split()), file=sys.stderr)
