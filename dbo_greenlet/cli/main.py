"""The command line as a whole: subcommands, exit codes, and errors as one sentence.

Exit codes: 0 all is well; 1 the command ran and found something (tokens differ, a replay that was not met, a trace
that is not complete); 2 it could not run (bad input, a failed rank); 130 Ctrl-C. With DBO_GREENLET_TRACEBACK=1 an error
comes with its traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from ..errors import DboError, SchedulerInternalError

__all__ = ["EXIT_ERROR", "EXIT_FINDING", "EXIT_INTERRUPTED", "EXIT_OK", "main"]

EXIT_OK = 0
EXIT_FINDING = 1
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line with `arguments` (default: those of the process) and exit."""
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
    try:
        # Not the command's own main(): it answers Ctrl-C and a closed pipe before anybody else can.
        command = get_command(app)
        with command.make_context("dbo-greenlet", words) as context:
            code = command.invoke(context)
        sys.stdout.flush()
    except BaseException as error:
        # Everything: whatever it is, the user gets one sentence and a stable exit code.
        code = _exit_code(error)
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
    if isinstance(error, BrokenPipeError):
        # The reader of our output has seen enough (| head); the interpreter would complain about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    if message is not None:
        context = getattr(error, "ctx", None)
        path = "dbo-greenlet" if context is None else context.command_path
        _say(f"{message().rstrip('.')} (see {path} --help)")
    elif isinstance(error, (DboError, SchedulerInternalError)):
        _say(str(error))
    elif isinstance(error, ModuleNotFoundError):
        _say(f"{error.name} is not installed; install dbo-greenlet[run]")
    else:
        _say(f"unexpected {type(error).__name__}: {error}; DBO_GREENLET_TRACEBACK=1 shows where it came from")
    return EXIT_ERROR


def _say(text: str) -> None:
    # One line, whatever the message of a library looked like.
    print("dbo-greenlet: " + " ".join(text.split()), file=sys.stderr)
