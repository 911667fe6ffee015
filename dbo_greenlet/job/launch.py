"""The parent of a job's ranks: starts them, follows them, stops them, and writes the trace.

Each rank has a pipe. What it says arrives even if it dies right after, and the end of the pipe *is* its death: the
kernel closes it whatever the process died of. So there is one place to wait, and a dead rank is known at once.

The parent writes the trace, from lines that the ranks send along with each step. The file is whole up to the last step
whichever process is killed, can be read while it grows, and its order does not depend on who was quicker. (A file for
each rank, joined at the end, leaves pieces behind when the parent is interrupted.)
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from .. import errors
from ..errors import ConfigurationError, DboError, RankFailedError
from ..trace.schema import EndRecord, StepRecord, to_json
from .messages import Failed, Finished, GraphsCaptured, Lines, Message, PassDone, Ready, Serving, StepDone
from .process import rank_main
from .spec import JobSpec
from .trace_file import TraceFile

__all__ = ["JobResult", "run_job"]

# After the first failure the others get this long to say what they saw; they know within the ranks' own limit.
LAST_WORDS_SECONDS = 6.0
STOP_SECONDS = 3.0
# What the fork server imports before it starts ranks; what cannot be imported is left to the ranks to complain about.
PRELOADED = ("dbo_greenlet.job.worker", "transformers.models.auto.modeling_auto")


@dataclass
class JobResult:
    """What the ranks reported.

    Attributes:
        spec: the job.
        steps: all steps of all ranks, run by run, by step, then by rank.
        ready: rank -> what it computes on, and whether it can have graphs.
        graphs: (run, rank) -> the graphs of the pass; nothing where it had none.
        passes: (run, rank) -> the end of the pass.
        handoffs: (run, step, rank) -> nanoseconds of each hand-off measured there.
        lines: (run, step) -> trace lines of rank 0 of the first split step of each reason, for a timetable.
        explanations: reason -> the decision of the first step with that reason, as a sentence.
        trace_problem: why the trace is not complete, None if it is or none was asked for.
    """

    spec: JobSpec
    steps: list[StepRecord] = field(default_factory=list)
    ready: dict[int, Ready] = field(default_factory=dict)
    graphs: dict[tuple[str, int], GraphsCaptured] = field(default_factory=dict)
    passes: dict[tuple[str, int], PassDone] = field(default_factory=dict)
    handoffs: dict[tuple[str, int, int], tuple[int, ...]] = field(default_factory=dict)
    lines: dict[tuple[str, int], bytes] = field(default_factory=dict)
    explanations: dict[str, str] = field(default_factory=dict)
    trace_problem: str | None = None

    def take(self, rank: int, message: Message) -> None:
        """Take over what a rank said."""
        if isinstance(message, PassDone):
            self.passes[message.run, rank] = message
        elif isinstance(message, Ready):
            self.ready[rank] = message
        elif isinstance(message, GraphsCaptured):
            self.graphs[message.run, rank] = message
        if not isinstance(message, StepDone):
            return
        record = message.record
        self.steps.append(record)
        self.explanations.setdefault(record.reason, message.explanation)
        if message.handoffs:
            self.handoffs[record.run, record.step, rank] = message.handoffs
        kept = any(run == record.run and reason == record.reason for run, _, reason in self._kept)
        if rank == 0 and record.split and not kept:
            self._kept.append((record.run, record.step, record.reason))
            self.lines[record.run, record.step] = message.lines

    _kept: list[tuple[str, int, str]] = field(default_factory=list, repr=False)


def run_job(
    spec: JobSpec,
    *,
    trace: str | os.PathLike[str] | None = None,
    follow: Callable[[int, Message], None] | None = None,
    specs: Sequence[JobSpec] | None = None,
    rank_main: Callable[[JobSpec, int, Connection, str], None] = rank_main,
) -> JobResult:
    """Run a job to its end, in one process per rank.

    The processes import the caller's main module, as `multiprocessing` has it: a script that calls this needs its
    `if __name__ == "__main__"`.

    Args:
        spec: the job.
        trace: file to write the trace to, opened when all ranks have started. What keeps it from being written does
            not stop the job: see `JobResult.trace_problem`.
        follow: called with (rank, message) for everything a rank says.
        specs: one per rank, where they are to differ.
        rank_main: what the process of a rank runs; its messages are those of `process.rank_main`.

    Raises:
        RankFailedError: a rank failed or died; it names the rank, and all others are stopped.
        CheckpointError, PromptFileError, ConfigurationError, RanksDisagreeError: found by the ranks when they started.
        ReplayMismatch: a replay met another decision than the recorded one.
        KeyboardInterrupt: Ctrl-C; the ranks are stopped and the trace is complete up to there. The same holds for
            whatever else a signal handler of the caller raises.

    The `__cause__` of an error that a rank had is `RankTraceback`.
    """
    _require_modules()
    result = JobResult(spec)
    writer = None if trace is None else TraceFile(trace)
    with tempfile.TemporaryDirectory(prefix="dbo-greenlet-") as folder:
        job = _Job(specs or [spec] * spec.settings.ranks, rank_main, Path(folder), writer)
        try:
            job.start()
            job.follow(result, follow or (lambda rank, message: None))
        except BaseException as error:
            job.stop()
            job.end_trace(f"{type(error).__name__}: {error}".rstrip(": "))
            raise
        finally:
            job.stop()
            if writer is not None:
                writer.close()
                result.trace_problem = writer.problem
    result.steps.sort(key=lambda record: [run.run for run in spec.passes].index(record.run))
    return result


@dataclass
class _Process:
    """One rank as the parent sees it. `lines` waits to be written; `last` is where the rank was when it last spoke."""

    process: BaseProcess
    connection: Connection
    output: Path
    lines: deque[bytes] = field(default_factory=deque)
    last: str = "while it started"
    ended: bool = False
    ended_well: bool = False
    last_words: bytes = b""
    failure: Failed | None = None


class _Job:
    def __init__(
        self, specs: Sequence[JobSpec], main: Callable[..., None], folder: Path, writer: TraceFile | None
    ) -> None:
        self._specs = specs
        self._main = main
        self._folder = folder
        self._writer = writer
        self._ranks: list[_Process] = []

    def start(self) -> None:
        context = _context()
        for rank, spec in enumerate(self._specs):
            ours, theirs = context.Pipe()
            output = self._folder / f"rank{rank}.txt"
            process: BaseProcess = context.Process(
                target=self._main,
                args=(spec, rank, theirs, str(output)),
                name=f"dbo_greenlet rank {rank}",
                daemon=True,
            )
            each = _Process(process, ours, output)
            self._ranks.append(each)
            process.start()
            theirs.close()

    def follow(self, result: JobResult, tell: Callable[[int, Message], None]) -> None:
        """Until every rank has ended; raises the failure that came first."""
        deadline: float | None = None
        while active := [each for each in self._ranks if not each.ended]:
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = wait([each.connection for each in active], timeout)
            if not ready:
                break
            for rank, each in enumerate(self._ranks):
                if each.connection in ready:
                    self._receive(rank, each, result, tell)
            self._write_complete()
            failed = any(each.ended and not each.ended_well for each in self._ranks)
            if failed and deadline is None:
                deadline = time.monotonic() + LAST_WORDS_SECONDS
        if deadline is not None:
            raise self._failure()
        self.end_trace(None)

    def _receive(self, rank: int, each: _Process, result: JobResult, tell: Callable[[int, Message], None]) -> None:
        try:
            message: Message = each.connection.recv()
        except (EOFError, OSError):
            each.ended = True
            return
        if isinstance(message, Serving):
            for other in self._ranks:
                if other is not each and not other.ended:
                    _send(other.connection, message.port)
        elif isinstance(message, Lines):
            each.lines.append(message.lines)
            each.last = "before its first step"
        elif isinstance(message, StepDone):
            each.lines.append(message.lines)
            each.last = f"after step {message.record.step} of run {message.record.run!r}"
        elif isinstance(message, Finished):
            each.ended = each.ended_well = True
            each.last_words = message.lines
        elif isinstance(message, Failed):
            each.ended = True
            each.failure = message
            each.last_words = message.lines
        result.take(rank, message)
        tell(rank, message)

    # -- the trace ---------------------------------------------------------------------------------------------------

    def _write_complete(self) -> None:
        """Write what all ranks have sent, in rank order: they run in lockstep and send as often as each other."""
        # There are no ranks yet where Ctrl-C came that early.
        while self._writer is not None and self._ranks and all(each.lines for each in self._ranks):
            self._writer.write_lines([each.lines.popleft() for each in self._ranks])

    def end_trace(self, error: str | None) -> None:
        """Write what is left, and each rank's end; `error` stands for what a rank could not say itself."""
        if self._writer is None:
            return
        self._write_complete()
        if not self._writer.opened:
            # Some rank never started: there is no run to tell of, and maybe an earlier one in the file.
            return
        for rank, each in enumerate(self._ranks):
            # A rank that said nothing at all has no header; an end record of its own would be all there is of it.
            last_words = each.last_words or (to_json(EndRecord(False, rank, error)) + "\n").encode("ascii")
            if each.lines or each.last != "while it started":
                self._writer.write_lines([*each.lines, last_words])
            each.lines.clear()

    # -- the end -----------------------------------------------------------------------------------------------------

    def _failure(self) -> DboError:
        """The failure to tell: a death explains everything else, then comes what a rank says of itself."""
        dead = [(rank, each) for rank, each in enumerate(self._ranks) if each.ended and not each.ended_well]
        for rank, each in dead:
            if each.failure is None:
                return RankFailedError(rank, None, f"its process {_cause_of_death(each)} {each.last}")
        told = [(rank, each.failure) for rank, each in dead if each.failure is not None]
        rank, failure = next((found for found in told if found[1].blamed == found[0]), told[0])
        error = self._error_of(rank, failure)
        error.__cause__ = RankTraceback(rank, failure.traceback)
        return error

    @staticmethod
    def _error_of(rank: int, failure: Failed) -> DboError:
        if failure.kind in _TOLD_AS_THEY_ARE:
            error: DboError = getattr(errors, failure.kind)(failure.text)
            return error
        if failure.blamed != rank:
            # All that survives is what this rank heard; its text names the other rank already.
            heard = failure.text.partition(" failed: ")[2] or failure.text
            return RankFailedError(failure.blamed, failure.microbatch, heard)
        where = " while it started"
        if failure.run:
            place = "before the first step" if failure.step < 0 else f"in step {failure.step}"
            where = f" {place} of run {failure.run!r}"
        return RankFailedError(rank, failure.microbatch, failure.text + where)

    def stop(self) -> None:
        """End every process that still runs; kill what does not go."""
        for each in self._ranks:
            if each.process.pid is not None and each.process.is_alive() and not each.ended_well:
                each.process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        for each in self._ranks:
            if each.process.pid is not None:
                each.process.join(max(0.0, deadline - time.monotonic()))
                if each.process.is_alive():
                    each.process.kill()
                    each.process.join()
            each.connection.close()


class RankTraceback(Exception):
    """Where in its own process a rank raised: the traceback that it printed, as text."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(rank, text)
        self.rank = rank
        self.text = text

    def __str__(self) -> str:
        return f"in the process of rank {self.rank}:\n{self.text.rstrip()}"


# What a rank finds when it starts is no failure of that rank: all of them find it, and the message says it all.
_TOLD_AS_THEY_ARE = (
    "CheckpointError",
    "ConfigurationError",
    "PromptFileError",
    "RanksDisagreeError",
    "ReplayMismatch",
)


def _cause_of_death(each: _Process) -> str:
    each.process.join(1.0)
    code = each.process.exitcode
    if code is not None and code < 0:
        try:
            cause = f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            cause = f"was killed by signal {-code}"
    else:
        cause = f"exited with code {code}"
    try:
        printed = each.output.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        # It died before it had a file to print to.
        printed = []
    # What libraries print on the way is no explanation; an abort prints what it is about last.
    last = next((line.strip() for line in reversed(printed) if line.strip() and "[Gloo]" not in line), "")
    return f"{cause} (its last output: {last[:200]})" if last else cause


def _context() -> ForkServerContext | SpawnContext:
    """How ranks are started.

    Through a fork server where that is safe: torch is imported once and not once a rank, which is most of what a short
    job takes. On macOS the system's libraries do not stand a fork.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    # Ctrl-C goes to every process of the terminal. The server and its ranks leave it to the parent: they inherit that
    # it is blocked. Here it waits until the server is started, and is then heard: `Process.start` waits for the
    # server's imports. The tracker is started first because that unblocks the signal.
    resource_tracker.ensure_running()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        with _silent_errors():
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    return context


@contextlib.contextmanager
def _silent_errors() -> Iterator[None]:
    """What is started meanwhile prints its errors nowhere.

    The server would tell the user that its parent was interrupted, with a traceback, and pass on what torch has to say
    while it is imported. What goes wrong in a rank comes over its pipe.
    """
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _require_modules() -> None:
    """Say what is missing here: a rank could only say that it failed."""
    missing = [name for name in ("torch", "numpy", "safetensors", "tokenizers") if find_spec(name) is None]
    if missing:
        raise ConfigurationError(f"{', '.join(missing)} cannot be imported; install dbo-greenlet[run]")


def _send(connection: Connection, value: object) -> None:
    # A rank that has died cannot be told; that is found out where its pipe is read.
    with contextlib.suppress(OSError):
        connection.send(value)
