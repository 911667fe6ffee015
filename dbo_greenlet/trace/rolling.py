"""A trace that never ends in a bounded space: what a server writes for as long as it runs.

    folder/dbo-rank0-4711.jsonl         the current part
    folder/dbo-rank0-4711.older.jsonl   the part before it, until the current one is full

Each part begins with a header, so each is a trace by itself; a step is never divided between two. The current part
keeps its name and the older one is renamed, so that the same path always leads to the latest steps, and a reader that
has the file open reads on in what it opened. Numbered parts were rejected: a user would have to look for the last one.

**Names.** The process's number is in the name because several processes may have the same rank (tensor-parallel
workers), and the servers' log lines carry it. Numbers come again (a container's processes have the same ones after
each restart), so a file is only ever created, never opened for writing where one exists; where the name is taken, a
number is added: dbo-rank0-4711-2.jsonl.

**The bound.** A process writes half of its limit, a quarter in each part. The other half is for what dead processes of
the same rank left behind, because the trace that one wants most is that of the server that just crashed: its two parts
always fit, whatever was there before is removed, the oldest first. So a rank never has more than the limit, across any
number of restarts; each further *live* process of the rank adds its half.

**Who is alive** says a lock on the file (flock), which the kernel drops with the process. Process numbers were
rejected: they mean nothing in another container or on another host that shares the folder. Where the file system has no
such locks nothing of others is removed.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import TraceFileError
from .writer import TraceWriter

try:
    import fcntl
except ImportError:  # no such locks on this system: see the module
    fcntl = None  # type: ignore[assignment]

__all__ = ["MIN_LIMIT", "RollingTrace", "newest_trace"]

MIN_LIMIT = 100_000  # bytes: a part then holds a header and a step of a dozen layers
KEPT_FILES = 16  # of dead processes: a server that is restarted for ever must not leave a small file each time
_MORE_DIGITS = 20  # by which the header of a later part may be longer than the first one's
_TAKEN = 1000  # names that are tried for one process number

_NAME = re.compile(r"dbo-rank(?P<rank>\d+)-(?P<process>\d+)(?:-\d+)?(?P<older>\.older)?\.jsonl")


class RollingTrace:
    """Writes lines to the current part, and begins a new one where it is full.

    Args:
        folder: created where it is missing.
        rank: for the name.
        limit: bytes, see the module; at least `MIN_LIMIT`.
        header: the header line (with its newline) of part number k, 0-based.

    Attributes:
        path: the current part.
        problem: None, or one sentence saying why nothing more is written.

    Raises:
        OSError: the folder or the first part cannot be made. Later trouble is a `problem` and never raised.
        ValueError: `limit` is below `MIN_LIMIT`, or a part could not hold its header.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, rank: int, limit: int, header: Callable[[int], bytes]
    ) -> None:
        # Absolute, because a server may change its working directory before the next part.
        self._folder = Path(folder).absolute()
        self._rank = rank
        self._header = header
        self._part_limit = limit // 4
        self._parts = 0
        self._size = 0
        self._older = -1  # descriptor whose lock says that the older part's process lives
        self.problem: str | None = None
        self._header_size = len(header(0)) + _MORE_DIGITS
        if limit < MIN_LIMIT or self._header_size > self._part_limit:
            raise ValueError(f"a limit of {limit} bytes is too small; it must be {MIN_LIMIT} and hold four headers")
        self._folder.mkdir(parents=True, exist_ok=True)
        _remove_left_behind(self._folder, rank, limit // 2)
        self.path, self._claim = self._first_claim()
        self._writer = TraceWriter(self.path)
        self._begin_part()

    def fits(self, size: int) -> bool:
        """Whether `size` bytes go into one part at all."""
        return self._header_size + size <= self._part_limit

    def write(self, data: bytes) -> None:
        """Append whole lines in one piece. Does nothing once there is a `problem`, and for what does not `fits`."""
        if self.problem is not None or not self.fits(len(data)):
            return
        try:
            if self._size + len(data) > self._part_limit:
                self._roll()
            elif os.fstat(self._claim).st_nlink == 0:
                # Somebody deleted the file. To write on would fill the disk with what nobody can read.
                self._next_part()
        except OSError as error:
            self._give_up((error.strerror or str(error)).lower())
            return
        self._append(data)

    def close(self) -> None:
        """Close the files; the process counts as dead then."""
        self._writer.close()
        self._claim, self._older = _closed(self._claim), _closed(self._older)
        self.problem = self.problem or self._writer.problem or f"The trace {self.path} is closed."

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _first_claim(self) -> tuple[Path, int]:
        base = f"dbo-rank{self._rank}-{os.getpid()}"
        for number in range(1, _TAKEN):
            path = self._folder / f"{base}{'' if number == 1 else f'-{number}'}.jsonl"
            # The older part of a process that died while it rolled has no current one beside it; it is not ours.
            if _older(path).exists():
                continue
            with contextlib.suppress(FileExistsError):
                return path, _claim(path)
        raise FileExistsError(f"{base}.jsonl and {_TAKEN} more names of this process are taken in {self._folder}")

    def _roll(self) -> None:
        """The current part becomes the older one, and what was that is gone."""
        with contextlib.suppress(FileNotFoundError):
            os.replace(self.path, _older(self.path))
        _closed(self._older)
        self._older, self._claim = self._claim, -1
        self._next_part()

    def _next_part(self) -> None:
        # Its path leads elsewhere by now, which the writer says as it is closed, and which is no problem here.
        self._writer.close()
        self._claim = _closed(self._claim)
        self._claim = _claim(self.path)
        self._writer = TraceWriter(self.path)
        self._begin_part()

    def _begin_part(self) -> None:
        self._size = 0
        data = self._header(self._parts)
        self._parts += 1
        self._append(data)

    def _append(self, data: bytes) -> None:
        self._writer.write_lines([data])
        self._size += len(data)
        if self._writer.problem is not None:
            self.problem = self._writer.problem

    def _give_up(self, reason: str) -> None:
        self._writer.close()
        self.problem = f"The trace {self.path} is not complete: {reason}; the run went on without it."


def _remove_left_behind(folder: Path, rank: int, limit: int) -> None:
    """Keep the newest files of dead processes of this rank, up to `limit` bytes together."""
    left: list[tuple[int, int, str]] = []
    for entry in os.scandir(folder):
        match = _NAME.fullmatch(entry.name)
        if match is None or int(match["rank"]) != rank or not entry.is_file(follow_symlinks=False):
            continue
        with contextlib.suppress(OSError):
            if _is_left_behind(entry.path):
                status = entry.stat(follow_symlinks=False)
                left.append((status.st_mtime_ns, status.st_size, entry.path))
    kept = 0
    for number, (_, size, path) in enumerate(sorted(left, reverse=True)):
        kept += size
        if kept > limit or number >= KEPT_FILES:
            with contextlib.suppress(OSError):
                os.unlink(path)


def _older(path: Path) -> Path:
    return path.with_name(f"{path.stem}.older.jsonl")


def _claim(path: Path) -> int:
    """Create the file, which must not exist, and lock it; the descriptor holds the lock."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        if fcntl is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        # Another process that starts took it for left behind, in the moment before the lock.
        os.close(descriptor)


def _closed(descriptor: int) -> int:
    """Close it, if it is open; gives -1, which is none."""
    if descriptor >= 0:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    return -1


def _is_left_behind(path: str) -> bool:
    if fcntl is None:
        return False
    # A lock of this very process under another descriptor counts as another's, so our own files are safe, too.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


@dataclass(frozen=True)
class _Found:
    rank: int
    older: bool
    changed: float
    path: Path


def newest_trace(folder: str | os.PathLike[str], rank: int | None = None) -> Path:
    """The current part that was written last, of `rank` or (None) of the lowest rank in the folder.

    Raises:
        TraceFileError: the folder cannot be read or holds no trace of a server (of this rank).
    """
    found: list[_Found] = []
    try:
        for entry in os.scandir(folder):
            if match := _NAME.fullmatch(entry.name):
                with contextlib.suppress(FileNotFoundError):  # a part that was replaced just now
                    changed = entry.stat().st_mtime
                    found.append(_Found(int(match["rank"]), bool(match["older"]), changed, Path(entry.path)))
    except OSError as error:
        raise TraceFileError(f"{os.fspath(folder)}: {(error.strerror or str(error)).lower()}") from error
    if not found:
        raise TraceFileError(f"{os.fspath(folder)}: a folder without traces of a server (dbo-rank0-....jsonl)")
    ranks = sorted({each.rank for each in found})
    wanted = ranks[0] if rank is None else rank
    of_rank = [each for each in found if each.rank == wanted]
    if not of_rank:
        raise TraceFileError(
            f"{os.fspath(folder)} has no trace of rank {wanted}; it holds rank{'s' if len(ranks) > 1 else ''} "
            f"{', '.join(map(str, ranks))}"
        )
    return max(of_rank, key=lambda each: (not each.older, each.changed)).path
