"""Reading other tools' profiles. The content of a file decides how it is read, never its name.

What is in it:

    torch_profiler   Chrome JSON of torch.profiler, plain or gzip (vLLM, SGLang)
    nsys             SQLite that Nsight Systems exports
    json_blocks      a large Chrome JSON, block by block
    columns          growing columns
    checks           what no stream can have done
"""

from __future__ import annotations

import os
import zlib
from dataclasses import replace
from pathlib import Path

from ...errors import TraceFileError
from ..profile import Profile, load
from .checks import check_streams
from .json_blocks import open_stream
from .nsys import read_nsys
from .torch_profiler import read_torch_profile

__all__ = ["is_own_trace", "read_profile"]

_SQLITE = b"SQLite format 3\0"
_ZIP = b"PK\x03\x04"
# Nsight Systems' own report, which only its own programs read.
_REPORTS = (".nsys-rep", ".qdrep", ".ncu-rep")


def is_own_trace(path: str | os.PathLike[str]) -> bool:
    """Whether the file begins as a trace of ours does (JSON Lines with a header record).

    Raises:
        TraceFileError: it cannot be read.
    """
    return _start(path).lstrip().startswith((b'{"t":', b'{"t" :'))


def read_profile(path: str | os.PathLike[str]) -> Profile:
    """Read a profile: torch.profiler's JSON (also .gz), Nsight Systems' SQLite, or what `profile.save` wrote.

    Raises:
        TraceFileError: none of these, or one of them with something wrong; one sentence that names the file.
    """
    file = os.fspath(path)
    if file.endswith(_REPORTS):
        raise TraceFileError(
            f"{file}: a report that only NVIDIA's tools read; export it first: nsys export --type sqlite {file}"
        )
    start = _start(path)
    if start.startswith(_ZIP):
        return load(path)
    if start.startswith(_SQLITE):
        profile = read_nsys(path)
    elif is_own_trace(path):
        raise TraceFileError(f"{file}: a trace of dbo_greenlet already; every command reads it as it is")
    else:
        profile = read_torch_profile(path)
    return replace(profile, notes=profile.notes + check_streams(profile))


def _start(path: str | os.PathLike[str]) -> bytes:
    """The first bytes, decompressed. A damaged gzip file has none: the reader that it goes to says what is wrong."""
    if Path(path).is_fifo():
        raise TraceFileError(
            f"{os.fspath(path)}: a pipe, which cannot be read more than once; write it to a file first"
        )
    try:
        with open_stream(path) as file:
            try:
                return file.read(64)
            except (EOFError, OSError, zlib.error):
                return b""
    except OSError as error:
        reasons = {FileNotFoundError: "no such file", IsADirectoryError: "this is a directory; name a file in it"}
        reason = reasons.get(type(error), (error.strerror or str(error)).lower())
        raise TraceFileError(f"{os.fspath(path)}: {reason}") from error
