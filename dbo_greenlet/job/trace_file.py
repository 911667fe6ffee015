"""The trace file of a job: not touched before there is something to write to it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ..trace.writer import TraceWriter

__all__ = ["TraceFile"]


class TraceFile:
    """A `TraceWriter` that is opened by the first lines.

    A job that does not start (a mistyped model, ranks that disagree) has no lines, and leaves the trace of an earlier
    run as it was.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._writer: TraceWriter | None = None
        self._empty = True

    @property
    def opened(self) -> bool:
        """Whether there were lines to write."""
        return self._writer is not None

    @property
    def problem(self) -> str | None:
        """None, or one sentence saying why the trace is not complete, or that nothing was written."""
        problem = None if self._writer is None else self._writer.problem
        known = f"The trace {os.fspath(self._path)} is not complete: "
        if problem is not None and self._empty and problem.startswith(known):
            return f"The trace {os.fspath(self._path)} was not written: {problem.removeprefix(known)}"
        return problem

    def write_lines(self, lines: Sequence[bytes]) -> None:
        """Append lines that are records already, each with its newline. Does nothing once there is a `problem`."""
        if self._writer is None:
            self._writer = TraceWriter(self._path)
        self._writer.write_lines(lines)
        if self._writer.problem is None:
            self._empty = False

    def close(self) -> None:
        """Close the file, if it was opened."""
        if self._writer is not None:
            self._writer.close()
