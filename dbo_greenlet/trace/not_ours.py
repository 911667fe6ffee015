"""Why a file that is no trace of ours is none, for a command that takes nothing else."""

from __future__ import annotations

import os
import zlib

from ..errors import TraceFileError
from .files import is_trace
from .reader import open_trace, reason_unread

__all__ = ["refuse_profile"]

_SQLITE, _ZIP = b"SQLite format 3\0", b"PK\x03\x04"
_EVENTS = b'"traceEvents"'
_BLOCK_BYTES = 1024 * 1024


def refuse_profile(path: str | os.PathLike[str], needs: str) -> None:
    """Refuse a profile, and a compressed file that is not whole, whose first line would be all that a reader judges.

    Of anything else, a trace of ours among it, the reader of traces says what is wrong with it. Nothing here needs the
    extra `trace`.

    Args:
        path: the file.
        needs: what the command needs, a clause.

    Raises:
        TraceFileError: a profile, a damaged file, or none that can be opened; names the file.
    """
    name = os.fspath(path)
    if not os.path.isfile(name) or is_trace(name):
        return
    try:
        what = _profile(name)
    except (EOFError, zlib.error, OSError) as error:
        raise TraceFileError(f"{name}: {reason_unread(error)}") from error
    if what:
        raise TraceFileError(f"{name}: {what}; {needs}")


def _profile(path: str) -> str:
    """What profile it is, "" for none. Reads on to the end, where a compressed file is seen to be whole."""
    start, end, found = b"", b"", False
    with open_trace(path) as file:
        while block := file.read(_BLOCK_BYTES):
            start = start or block[:64].lstrip()
            found = found or _EVENTS in end + block
            end = block[-len(_EVENTS) :]
    if start.startswith(_SQLITE):
        return "an SQLite file, as Nsight Systems exports profiles"
    if start.startswith(_ZIP):
        return "a ZIP archive, as dbo-greenlet import writes profiles"
    return "a profile of torch.profiler" if found and start.startswith(b"{") else ""
