"""Scenarios that a test suite must reach sometimes: `sometimes("one microbatch was empty", tokens == 0)`.

An assertion says what must hold always; it is silent about a suite that never came near the case it was written for. A
mark says what must have happened at least once, anywhere in the whole run, and the run fails if it did not. Marks may
stand in tests and in the code under test: they never stop it, whatever their condition is or raises.

    from dbo_greenlet.testing.sometimes import declare, sometimes

    declare("one microbatch was empty", "both transfers were in flight")      # in a test module or conftest.py

    sometimes("one microbatch was empty", tokens == 0)
    sometimes("both transfers were in flight", lambda: in_flight() == 2)      # called only while a suite watches

Nothing is noted until the first `declare` or `watch`: until then a mark costs one dict lookup and one test. It never
takes a lock. From then on a mark that is met without being declared counts as declared.

**Processes.** What one process of a run reaches, all have reached: each appends what it declares and reaches to one
file, whose name is in the environment (DBO_GREENLET_SOMETIMES), so ranks, subprocesses and the workers of pytest-xdist
are counted as long as they run on this machine and inherit the environment. The process that called `watch` made the
file, asks it with `unreached`, and removes it with `stop`. A process without that variable counts for itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

__all__ = ["declare", "reached", "report", "sometimes", "stop", "unreached", "watch"]

VARIABLE = "DBO_GREENLET_SOMETIMES"


class _Mark:
    """One scenario in this process."""

    __slots__ = ("met", "name", "reached", "trouble")

    def __init__(self, name: str) -> None:
        self.name = name
        self.reached = False
        self.met = 0  # how often its line ran
        self.trouble = ""  # what the condition raised last

    def note(self, condition: Any) -> None:
        self.met += 1
        if self.reached:
            return
        try:
            true = bool(condition() if callable(condition) else condition)
        except Exception as error:
            # A mark must not stop the code that it stands in, and the condition is anybody's.
            self.trouble = f"{type(error).__name__}: {error}"
            return
        if true:
            self.reached = True
            _tell(self.name, "reached")
        elif self.met == 1:
            _tell(self.name, "met")


_marks: dict[str, _Mark] = {}
_watching = False
_made_here: str | None = None  # the file of this run, where this process made it


def sometimes(name: str, condition: bool | Callable[[], Any] | Any = True) -> None:
    """Note that the scenario `name` is reached if `condition` holds. Never raises.

    Args:
        name: of the scenario, the same wherever it may be reached.
        condition: a truth value, or a callable that gives one: it is called only while a suite watches, and only as
            long as the scenario was not reached in this process.
    """
    mark = _marks.get(name)
    if mark is not None:
        mark.note(condition)
    elif _watching:
        _mark(name).note(condition)


def declare(*names: str) -> None:
    """This run must reach each of these scenarios. Declaring one again changes nothing."""
    global _watching
    _watching = True
    for name in names:
        _mark(name)


def watch() -> None:
    """Note from now on, in this process and in all that it starts, in a new file. Called once by the suite's process.

    A process that finds the variable in its environment watches from its import on, and so need not call this.
    """
    global _watching, _made_here
    _watching = True
    if os.environ.get(VARIABLE):
        return
    handle, _made_here = tempfile.mkstemp(prefix="dbo_greenlet_sometimes_", suffix=".jsonl")
    os.close(handle)
    os.environ[VARIABLE] = _made_here
    for mark in _marks.values():
        _tell(mark.name, "declared")
        if mark.reached:
            _tell(mark.name, "reached")


def stop() -> None:
    """Forget everything, watch no longer, and remove the file that `watch` made."""
    global _watching, _made_here
    _watching = False
    _marks.clear()
    if _made_here is not None:
        if os.environ.get(VARIABLE) == _made_here:
            del os.environ[VARIABLE]
        with contextlib.suppress(OSError):
            os.unlink(_made_here)
        _made_here = None


def reached() -> list[str]:
    """Names of the scenarios that were reached, here or in another process of the run, sorted."""
    return sorted(name for name, notes in _all_notes().items() if "reached" in notes)


def unreached() -> list[str]:
    """Names of the scenarios that were declared or met, and never reached, sorted."""
    return sorted(name for name, notes in _all_notes().items() if "reached" not in notes)


def report() -> str:
    """One line for each scenario: reached, its condition never true, or its line never run. "" where there is none."""
    lines = []
    for name, notes in sorted(_all_notes().items()):
        mark = _marks.get(name)
        if "reached" in notes:
            said = "reached"
        elif mark is not None and mark.trouble:
            said = f"NEVER reached: its condition raised {mark.trouble}"
        elif "met" in notes:
            said = "NEVER reached: its line ran, and the condition was never true"
        else:
            said = "NEVER reached: its line never ran"
        lines.append(f"sometimes {name!r}: {said}")
    return "\n".join(lines)


def _mark(name: str) -> _Mark:
    mark = _marks.get(name)
    if mark is None:
        mark = _marks[name] = _Mark(name)
        _tell(name, "declared")
    return mark


def _all_notes() -> dict[str, set[str]]:
    """name -> which of "declared", "met", "reached", over all processes of the run."""
    found: dict[str, set[str]] = {}
    for mark in list(_marks.values()):
        notes = found.setdefault(mark.name, {"declared"})
        if mark.met:
            notes.add("met")
        if mark.reached:
            notes.add("reached")
    path = os.environ.get(VARIABLE)
    if path:
        # A line that a process was killed in the middle of is no note.
        with contextlib.suppress(OSError), open(path, encoding="utf-8") as file:
            for line in file:
                with contextlib.suppress(ValueError):
                    name, note = json.loads(line)
                    found.setdefault(name, set()).add(note)
    return found


def _tell(name: str, note: str) -> None:
    """Append one line to the run's file: at once and whole, so that processes do not cut each other's lines."""
    path = os.environ.get(VARIABLE)
    if not path:
        return
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(descriptor, (json.dumps([name, note]) + "\n").encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        # Never in the way of the code that is marked; but a suite that cannot count must not look complete either.
        print(f"dbo_greenlet: cannot note that {name!r} was {note} in {path}: {error}", file=sys.stderr)


if os.environ.get(VARIABLE):
    _watching = True
