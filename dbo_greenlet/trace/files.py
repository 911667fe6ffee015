"""What a command takes for a trace: a file, plain or gzip, a folder of them, or several of either.

    files = TraceFiles(["traces/"])                # a server's folder, or what `dbo-greenlet record` wrote
    files = TraceFiles(["rank0.jsonl.gz", "rank1.jsonl.gz"])
    for step in files:                             # the steps of all ranks, those of one number together
        ...
    trace = files.read()                           # or all of it at once, as `read_trace` gives it

A folder stands for the traces in it. Where the files are named as a server names them (`rolling`), there is one for
each rank: that of the process which wrote last, its current part. Whatever is left out is said in `notes`. In any other
folder every file is taken that ends as a trace or a profile does.

Several files are one run, so a rank may be in one of them only; two parts that one process wrote count as one.

Nothing here needs more than the standard library. Whether a file is a trace of ours is told by its first bytes, and a
profile is only named (`expand`): what reads it is in `importers`.
"""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..errors import TraceFileError
from .reader import StepTrace, Trace, read_trace
from .rolling import newest_trace
from .schema import EndRecord, HeaderRecord, PromptRecord
from .step_stream import StepStream

__all__ = ["TraceFiles", "expand", "is_trace", "two_of_one_rank"]

# As traces and profiles end; a folder also holds logs and pictures.
_ENDINGS = (".jsonl", ".json", ".sqlite", ".npz")
_GZIP = b"\x1f\x8b"
_OF_A_SERVER = re.compile(r"dbo-rank(\d+)-\d+(-\d+)?(\.older)?\.jsonl")

AnyPath = str | os.PathLike[str]


def is_trace(path: AnyPath) -> bool:
    """Whether the file begins as a trace of ours does (JSON Lines with a header record), compressed or not.

    Raises:
        TraceFileError: it cannot be opened.
    """
    try:
        with open(path, "rb") as file:
            start = file.read(64)
    except OSError as error:
        reasons = {FileNotFoundError: "no such file", IsADirectoryError: "this is a directory; name a file in it"}
        reason = reasons.get(type(error), (error.strerror or str(error)).lower())
        raise TraceFileError(f"{os.fspath(path)}: {reason}") from error
    if start.startswith(_GZIP):
        try:
            with gzip.open(path) as unpacked:
                start = unpacked.read(64)
        except (EOFError, OSError, zlib.error):
            # A damaged file is of no kind; whoever reads it says what is wrong with it.
            return False
    return start.lstrip().startswith((b'{"t":', b'{"t" :'))


def expand(arguments: Sequence[AnyPath], *, rank: int | None = None) -> tuple[list[Path], list[str]]:
    """The files that arguments name, folders replaced by what is in them, and what to say about it.

    Args:
        arguments: files and folders, one or more.
        rank: of a folder of a server only this rank's file.

    Returns:
        The files, in order of the arguments, and in a folder by rank or by name; and sentences about what was left out.

    Raises:
        TraceFileError: a folder cannot be read, or holds no trace and no profile (of this rank).
    """
    paths: list[Path] = []
    notes: list[str] = []
    for argument in arguments:
        folder = Path(argument)
        if not folder.is_dir():
            paths.append(folder)
            continue
        names = _names_in(folder)
        of_server = [match for name in names if (match := _OF_A_SERVER.fullmatch(name))]
        if not of_server:
            paths += _files_in(folder, names)
            continue
        ranks = sorted({int(match[1]) for match in of_server})
        some = ranks if rank is None else [rank]
        paths += [newest_trace(folder, each) for each in some]
        left_out = sum(int(match[1]) in some for match in of_server) - len(some)
        if left_out:
            notes.append(
                f"{folder}: of each rank the file that was written last; {left_out} other{'s' if left_out > 1 else ''} "
                f"(older parts, other processes) {'are' if left_out > 1 else 'is'} left out, name them to read them."
            )
    return paths, notes


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise TraceFileError(f"{folder}: {(error.strerror or str(error)).lower()}") from error


def _files_in(folder: Path, names: Sequence[str]) -> list[Path]:
    files = [folder / name for name in names if name.removesuffix(".gz").endswith(_ENDINGS)]
    files = [path for path in files if path.is_file()]
    if not files:
        raise TraceFileError(
            f"{folder}: a folder without traces or profiles (files that end in {', '.join(_ENDINGS)}, also .gz)"
        )
    return files


class TraceFiles:
    """Traces of ours that are of one run. Iterates over their steps as `StepStream` does, and has what that has.

    Args:
        arguments: what the command line names; see the module.
        rank: of a folder of a server only this rank's file. Files that are named are taken whole.
        quick: as of `StepStream`.

    Attributes:
        paths: the files.
        notes: what was left out of folders, as sentences.
        path: the file, or what to call the files together.
        headers, ends, prompts, steps, torn: as in `StepStream`; all headers stand when the first step is handed out.
        torn_paths: the files whose last line was cut off.

    Raises:
        TraceFileError: no argument; a folder without traces; a file that is not there or is no trace of ours.

    Iterating raises:
        TraceFileError: as `StepStream`; and two files hold the same rank.
    """

    def __init__(self, arguments: Sequence[AnyPath] | AnyPath, *, rank: int | None = None, quick: bool = False) -> None:
        some = [arguments] if isinstance(arguments, (str, os.PathLike)) else list(arguments)
        if not some:
            raise TraceFileError("no trace was named")
        self.paths, self.notes = expand(some, rank=rank)
        for path in self.paths:
            # What is no trace in a folder of traces, or beside them. A single file is judged by its reader.
            if len(self.paths) > 1 and not is_trace(path):
                raise TraceFileError(f"{path}: not a trace of ours; name it without traces of ours beside it")
        self.path = os.fspath(self.paths[0]) if len(self.paths) == 1 else ", ".join(os.fspath(each) for each in some)
        self.steps = 0
        self._streams = [StepStream(path, quick=quick) for path in self.paths]

    @property
    def headers(self) -> dict[int, HeaderRecord]:
        """By rank."""
        return {rank: header for stream in reversed(self._streams) for rank, header in stream.headers.items()}

    @property
    def ends(self) -> dict[int, EndRecord]:
        """By rank."""
        return {rank: end for stream in self._streams for rank, end in stream.ends.items()}

    @property
    def prompts(self) -> list[PromptRecord]:
        """File by file."""
        return [prompt for stream in self._streams for prompt in stream.prompts]

    @property
    def torn_paths(self) -> list[Path]:
        return [path for path, stream in zip(self.paths, self._streams, strict=True) if stream.torn]

    @property
    def torn(self) -> bool:
        """Whether the last line of any file was cut off."""
        return any(stream.torn for stream in self._streams)

    def __iter__(self) -> Iterator[StepTrace]:
        """The steps: run by run, by number, then by rank; what one file holds in its own order."""
        waiting: list[tuple[StepTrace, Iterator[StepTrace]]] = []
        for stream in self._streams:
            steps = iter(stream)
            if (first := next(steps, None)) is not None:
                waiting.append((first, steps))
        self._refuse_two_of_one_rank(
            {path: stream.headers for path, stream in zip(self.paths, self._streams, strict=True)}
        )
        runs: dict[str, int] = {}
        latest: dict[tuple[str, int], int] = {}
        while waiting:
            for step, _ in waiting:
                runs.setdefault(step.run, len(runs))
            place = min(range(len(waiting)), key=lambda each: _order(waiting[each][0], runs))
            step, steps = waiting[place]
            self.steps += 1
            self._refuse_twice(step, latest)
            yield step
            if (following := next(steps, None)) is None:
                del waiting[place]
            else:
                waiting[place] = (following, steps)

    def read(self) -> Trace:
        """All of it in memory, as one trace."""
        if len(self.paths) == 1:
            return read_trace(self.paths[0])
        traces = [read_trace(path) for path in self.paths]
        self._refuse_two_of_one_rank({path: each.headers for path, each in zip(self.paths, traces, strict=True)})
        whole = Trace(self.path)
        runs: dict[str, int] = {}
        for each in traces:
            whole.headers = each.headers | whole.headers
            whole.ends |= each.ends
            whole.prompts += each.prompts
            whole.torn = whole.torn or each.torn
            whole.unknown_kinds |= each.unknown_kinds
            for run in each.runs:
                runs.setdefault(run, len(runs))
        steps = [step for each in traces for step in each.steps.values()]
        latest: dict[tuple[str, int], int] = {}
        for step in sorted(steps, key=lambda each: _order(each, runs)):
            self._refuse_twice(step, latest)
            whole.steps[step.run, step.step, step.rank] = step
        return whole

    def _refuse_twice(self, step: StepTrace, latest: dict[tuple[str, int], int]) -> None:
        """Two files of one process have other steps each, unless one is a copy of the other."""
        if step.step <= latest.get((step.run, step.rank), -1) and len(self.paths) > 1:
            raise TraceFileError(
                f"{self.path}: two of these files hold step {step.step} of run {step.run}, rank {step.rank}; "
                "is one a copy of the other?"
            )
        latest[step.run, step.rank] = step.step

    @staticmethod
    def _refuse_two_of_one_rank(headers: dict[Path, dict[int, HeaderRecord]]) -> None:
        owners: dict[int, tuple[Path, HeaderRecord]] = {}
        for path, by_rank in headers.items():
            for rank, header in by_rank.items():
                other, first = owners.setdefault(rank, (path, header))
                # Parts of one process have one origin: the nanosecond at which its recorder was made.
                if other != path and not (first.origin_ns and first.origin_ns == header.origin_ns):
                    raise TraceFileError(two_of_one_rank(other, path, rank))


def two_of_one_rank(first: AnyPath, second: AnyPath, rank: int) -> str:
    """Why two files are not of one run."""
    return (
        f"{os.fspath(first)} and {os.fspath(second)} both hold rank {rank}, so they are of two runs or two processes; "
        "name one of them"
    )


def _order(step: StepTrace, runs: dict[str, int]) -> tuple[int, int, int]:
    return runs[step.run], step.step, step.rank
