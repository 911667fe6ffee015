"""The file that an option says to write: one rule for all commands, looked at before they begin.

A file that is there is replaced, when there is something to put in its place. What the command reads is never
replaced. (To refuse whatever is there was rejected: the same command typed again is the usual case. What a folder
holds is another matter, since the files of two recordings would be taken for one: see `trace.record_output`.)
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

from ..errors import ConfigurationError

__all__ = ["REPLACES", "check_output", "output_file"]

REPLACES = "one that is there is replaced."
"""How the help of each such option ends."""

_REASONS = {
    errno.ENOENT: "its folder does not exist",
    errno.EISDIR: "it is a folder",
    errno.ENOTDIR: "its folder is a file",
}


def output_file(text: str) -> Path:
    """The path as typed. A `Path` forgets the slash at its end, so this is asked before there is one.

    Raises:
        ConfigurationError: it ends with a slash, and so means a folder.
    """
    if text.endswith(tuple(filter(None, (os.sep, os.altsep)))):
        raise ConfigurationError(f"{text} names a folder; name the file to write in it")
    return Path(text)


def check_output(path: Path, option: str, reads: Iterable[tuple[Path, str]] = ()) -> None:
    """Find out what would keep the file from being written, without changing it.

    Args:
        path: the file.
        option: which says so.
        reads: files that the command reads, each with what it is called; those that are not there do not matter.

    Raises:
        ConfigurationError: one of these is meant, or the file cannot be written: no folder, no permission, no room.
    """
    for read, called in reads:
        if path.exists() and read.exists() and path.samefile(read):
            raise ConfigurationError(f"{option} {path} is {called} itself; name another file")
    try:
        _try(path)
    except OSError as error:
        reason = _REASONS.get(error.errno or 0) or (error.strerror or str(error)).lower()
        raise ConfigurationError(f"{path} cannot be written: {reason}") from error


def _try(path: Path) -> None:
    if not path.exists():
        # Of a link, where it leads to.
        with tempfile.TemporaryFile(dir=Path(os.path.realpath(path)).parent) as file:
            file.write(b"\n")
        return
    kind = path.stat().st_mode
    if stat.S_ISCHR(kind):
        _try_device(path)
    elif stat.S_ISREG(kind) or stat.S_ISDIR(kind):
        os.close(os.open(path, os.O_WRONLY))
    # A pipe is left alone: to open it would wait for its reader, or end it.


def _try_device(path: Path) -> None:
    with path.open("wb", buffering=0) as device:
        # What a terminal gets is seen; of others (/dev/null, /dev/full) only a write says whether they take one.
        if not device.isatty():
            device.write(b"\n")
