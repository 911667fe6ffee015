"""Where `dbo-greenlet record` has a program record to, and what came of it.

A folder is taken as it is. For a single file the processes write to a folder beside it, and their files are joined when
the program has ended: a trace may hold several ranks. A file that is there already is replaced then, as by every
command, and stays where nothing was recorded. Two processes of one rank cannot be told apart in one file, so then the
folder stays, and is said.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import shutil
import tempfile
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import IO

from .. import record_notes, trace_settings
from ..errors import ConfigurationError, TraceFileError
from .process_summary import ProcessFile, summarise

__all__ = ["RecordOutput", "Recorded"]

_FILES = (".jsonl", ".jsonl.gz")


@dataclass(frozen=True)
class Recorded:
    """What a program recorded.

    Attributes:
        output: the folder, or the file that holds all.
        files: one for each process, by rank and process; of a joined file their names are gone.
        notes: what processes left (`record_notes`).
        problem: why the files are not where they were to be, or None.
    """

    output: Path
    files: list[ProcessFile] = field(default_factory=list)
    notes: dict[str, list[str]] = field(default_factory=dict)
    problem: str | None = None

    @property
    def steps(self) -> int:
        """Steps of all processes."""
        return sum(each.steps for each in self.files)


class RecordOutput:
    """A context manager around the program's run.

    Args:
        output: a folder, new or without recordings; a file that ends in .jsonl or .jsonl.gz; None makes a folder in the
            working directory, named by the time.
        every, gpu, memory, megabytes: as `TraceSettings`.

    Attributes:
        environment: the program's whole environment.

    Raises:
        ConfigurationError: the folder holds a recording already, or one of the two cannot be made or written.
    """

    def __init__(self, output: Path | None, *, every: int, gpu: bool, memory: bool, megabytes: float) -> None:
        if output is None:
            output = Path(f"dbo-trace-{datetime.now():%Y%m%d-%H%M%S}")
        self.output = output
        self._single = output.name.endswith(_FILES) and not output.is_dir()
        try:
            self._folder = self._make_folder()
            self._notes = Path(tempfile.mkdtemp(prefix="dbo-greenlet-notes-"))
        except OSError as error:
            raise ConfigurationError(
                f"--output {output} cannot be written: {(error.strerror or str(error)).lower()}"
            ) from error
        self.environment = {
            **os.environ,
            # Absolute: the program may change its working directory.
            trace_settings.FOLDER: str(self._folder.absolute()),
            trace_settings.EVERY: str(every),
            trace_settings.MEGABYTES: f"{megabytes:g}",
            trace_settings.GPU: "1" if gpu else "0",
            trace_settings.MEMORY: "1" if memory else "0",
            record_notes.FOLDER: str(self._notes),
        }

    def _make_folder(self) -> Path:
        if self._single:
            parent = self.output.parent
            if not parent.is_dir():
                raise ConfigurationError(f"--output {self.output} cannot be written: its folder does not exist")
            return Path(tempfile.mkdtemp(prefix=f"{self.output.name}.", dir=parent))
        if self.output.exists() and not self.output.is_dir():
            raise ConfigurationError(
                f"--output {self.output} is a file; name a folder, or a file that ends in {' or '.join(_FILES)}"
            )
        self.output.mkdir(parents=True, exist_ok=True)
        if any(name.startswith("dbo-rank") for name in os.listdir(self.output)):
            raise ConfigurationError(
                f"--output {self.output} holds a recording already, and ranks of two runs would be taken for one; name "
                "another folder"
            )
        # Whether a file can be made in it: what would be found out by each process, and by us when it is too late.
        with tempfile.TemporaryFile(dir=self.output):
            return self.output

    def __enter__(self) -> RecordOutput:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        shutil.rmtree(self._notes, ignore_errors=True)
        # Goes only if it is empty, so that nothing recorded is lost, whatever happened.
        with contextlib.suppress(OSError):
            self._folder.rmdir()

    def collect(self) -> Recorded:
        """What there is, when the program has ended; joins the files where one was asked for.

        Raises:
            TraceFileError: the one file cannot be written; it says where the processes' files are.
        """
        files = sorted(
            (summarise(path) for path in self._folder.glob("dbo-rank*.jsonl")),
            key=lambda each: (each.rank, each.path.name),
        )
        found = Recorded(self._folder, files, record_notes.read(self._notes))
        if not self._single or not files:
            return replace(found, output=self.output)
        if len({each.rank for each in files}) < len(files):
            return replace(found, problem=f"two files are of one rank, so they stay apart in {self._folder}")
        try:
            self._join([each.path for each in files])
        except OSError as error:
            raise TraceFileError(
                f"{self.output} cannot be written: {(error.strerror or str(error)).lower()}; the recording is in "
                f"{self._folder}"
            ) from error
        return replace(found, output=self.output)

    def _join(self, paths: list[Path]) -> None:
        whole = self._folder / "joined"
        with open(whole, "wb") as plain:
            packed = gzip.GzipFile(fileobj=plain, mode="wb") if self.output.name.endswith(".gz") else None
            out: IO[bytes] = plain if packed is None else packed  # type: ignore[assignment]
            for path in paths:
                with open(path, "rb") as file:
                    for line in file:
                        # A process that died left half a line at its end, which must not stand in the middle.
                        if line.endswith(b"\n"):
                            out.write(line)
            if packed is not None:
                packed.close()
        os.replace(whole, self.output)
        for path in paths:
            path.unlink()
