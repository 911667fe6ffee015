"""Writing an export to a file: all of it or nothing."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Protocol

from ...errors import ConfigurationError, TraceFileError
from .items import Item

__all__ = ["Model", "export_trace"]


class Model(Protocol):
    """What can be exported: items, iterated over once, and what to say about them.

    Attributes:
        path: what to call the files together.
        paths: the files that are read.
        shown: how many there were of each thing, whole when it was iterated over.
        offsets: rank -> microseconds by which its times were moved onto the common axis, likewise.
        notes: what else to know, as sentences, likewise.
    """

    path: str
    shown: dict[str, int]
    offsets: dict[int, float]

    @property
    def paths(self) -> list[str]: ...

    @property
    def notes(self) -> list[str]: ...

    def axis_text(self) -> list[str]:
        """How ranks were put on one axis, as lines; none for one rank."""
        ...

    def __iter__(self) -> Iterator[Item]: ...


def export_trace(
    model: Model, output: str | os.PathLike[str], write: Callable[[Iterable[Item], IO[bytes]], None]
) -> None:
    """Write what the model shows.

    A damaged trace is found while it is read, so the output takes its name when it is whole; what stood there before
    stays until then.

    Args:
        model: not yet iterated over.
        output: the file, created or overwritten.
        write: `write_chrome` or `write_perfetto`.

    Raises:
        TraceFileError: the trace cannot be read or shown, or the output not be written; it names the file.
        ConfigurationError: the output is the trace.
    """
    path = Path(output)
    for read in model.paths:
        if path.exists() and os.path.exists(read) and path.samefile(read):
            raise ConfigurationError(f"--output {path} is the trace itself; name another file")
    items = _Items(model)
    try:
        with _opened(path) as file:
            write(items, file)
    except TraceFileError as error:
        if items.failed:
            raise
        raise TraceFileError(f"{model.path}: {error}") from None
    except OSError as error:
        raise TraceFileError(f"{path} cannot be written: {_reason(error)}") from error


class _Items:
    """The model's items, and whether iterating over it failed: then its error names the file already."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.failed = False

    def __iter__(self) -> Iterator[Item]:
        try:
            yield from self._model
        except TraceFileError:
            self.failed = True
            raise


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    if path.exists() and not path.is_file():
        # A pipe or a device keeps its place.
        with path.open("wb") as file:
            yield file
        return
    # Next to the output: a rename works within one file system only.
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb", buffering=1024 * 1024) as file:
            yield file
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, path)
    except BaseException:
        # Also on Ctrl-C; whatever it was is raised again.
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _reason(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "its folder does not exist"
    if isinstance(error, IsADirectoryError):
        return "it is a folder"
    return (error.strerror or str(error)).lower()
