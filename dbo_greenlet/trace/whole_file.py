"""A trace that keeps everything up to a bound, and then ends: what is recorded of a program that ends itself.

The other kind of bound (`rolling`) keeps the latest, of servers, and removes what processes before have left behind;
of a program whose processes come and go that would be a loss.
"""

from __future__ import annotations

import os
from pathlib import Path

from .writer import TraceWriter

__all__ = ["WholeFile"]

_TAKEN = 1000  # names that are tried for one process number


class WholeFile:
    """A new file of this process, named as `rolling` names one.

    Args:
        folder: created where it is missing.
        rank: for the name.
        limit: bytes.

    Attributes:
        path: the file.
        problem: None, or one sentence saying why nothing more is written.

    Raises:
        OSError: the folder or the file cannot be made. Later trouble is a `problem` and never raised.
    """

    def __init__(self, folder: str, rank: int, limit: int) -> None:
        self.problem: str | None = None
        self._room = limit
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.path = _free_name(Path(folder).absolute(), rank)
        self._writer = TraceWriter(self.path)

    def write(self, data: bytes) -> None:
        if len(data) > self._room and self.problem is None:
            self.problem = f"The trace {self.path} ends here: it is as large as it may be (--megabytes)."
        if self.problem is None:
            self._room -= len(data)
            self._writer.write_lines([data])
            self.problem = self._writer.problem

    def close(self) -> None:
        self._writer.close()


def _free_name(folder: Path, rank: int) -> Path:
    """A name that no other process has: numbers of processes come again."""
    base = f"dbo-rank{rank}-{os.getpid()}"
    for number in range(1, _TAKEN):
        path = folder / f"{base}{'' if number == 1 else f'-{number}'}.jsonl"
        if not path.exists():
            return path
    raise FileExistsError(f"{base}.jsonl and {_TAKEN} more names of this process are taken in {folder}")
