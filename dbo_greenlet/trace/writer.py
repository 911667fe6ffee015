"""Writing a trace while the run goes on.

A trace never stops a run. Whatever keeps it from being written (a full device, a folder that is gone, a record that
JSON cannot say) is remembered as one sentence in `TraceWriter.problem`, for the command to print at its end, and
nothing more is written. The other choice, to raise, was rejected: hours of work must not die of their own log.

Each call of `write` goes to the file at once and whole, so the file can be read while it grows and one that a dead
process left behind lacks at most the end of its last line.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from io import FileIO
from types import TracebackType

from .schema import Record, to_json

__all__ = ["TraceWriter"]


class TraceWriter:
    """Writes records to a file; a context manager.

    Args:
        path: the file, created or overwritten. Its folder must exist.

    Attributes:
        path: the file.
        problem: None, or one sentence saying why the trace is not complete. Never raised: see the module.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.problem: str | None = None
        self._file: FileIO | None = None
        self._whole = 0  # bytes up to which the file holds whole lines
        try:
            # Unbuffered: a failed write is then known here and now, and not when a buffer is flushed at exit.
            self._file = open(self.path, "wb", buffering=0)  # noqa: SIM115 - it is open as long as the run
        except OSError as error:
            self._give_up(_reason(error))

    def write(self, *records: Record) -> None:
        """Append the records, one line each, in one piece. Does nothing once there is a `problem`."""
        if self._file is None:
            return
        try:
            data = "".join(to_json(record) + "\n" for record in records).encode("ascii")
        except (TypeError, ValueError) as error:
            self._give_up(f"a record cannot be written as JSON ({error})")
            return
        self._append(data)

    def write_lines(self, lines: Iterable[bytes]) -> None:
        """Append lines that are records already, each with its newline: what ranks sent to the process that writes."""
        if self._file is not None:
            self._append(b"".join(lines))

    def close(self) -> None:
        """Close the file. Notes it as a `problem` if the path no longer leads to what was written."""
        if self._file is None:
            return
        try:
            written = os.fstat(self._file.fileno())
            self._file.close()
            self._file = None
            found = os.stat(self.path)
        except OSError as error:
            self._give_up(_reason(error))
            return
        if (found.st_dev, found.st_ino) != (written.st_dev, written.st_ino):
            self._give_up("another file took its place")

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, data: bytes) -> None:
        file = self._file
        if file is None:
            return
        done = 0
        try:
            while done < len(data):
                done += file.write(data[done:] if done else data) or 0
            self._whole += len(data)
        except BaseException as error:
            # Also a KeyboardInterrupt: what follows it (the end record) must not stand behind half a line.
            self._cut_torn_line(file)
            if not isinstance(error, OSError):
                raise
            self._give_up(_reason(error))

    def _cut_torn_line(self, file: FileIO) -> None:
        # A device or a pipe cannot be cut. A reader tolerates one torn line at the end.
        with contextlib.suppress(OSError):
            file.truncate(self._whole)
            file.seek(self._whole)

    def _give_up(self, reason: str) -> None:
        self.problem = f"The trace {self.path} is not complete: {reason}; the run went on without it."
        file, self._file = self._file, None
        if file is not None:
            # The problem is stated already, and the first one is the one that explains the others.
            with contextlib.suppress(OSError):
                file.close()


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
