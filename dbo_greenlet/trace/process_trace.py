"""The trace that the environment asks for: every scheduler of a process records into one file.

    DBO_GREENLET_TRACE=traces/ DBO_GREENLET_TRACE_EVERY=1 python program.py
    dbo-greenlet record -o traces/ -- python program.py            # the same, and says what it got

A scheduler looks at the environment once, where it is made; one that finds nothing there keeps nothing of this. What a
scheduler cannot know of a step (the vote, the tokens, the requests) a runner tells with `describe`, and of steps that
it runs without one with `unsplit`; of a program that has a scheduler only, these stay empty. Steps that were replayed
from a graph run no slices and are not recorded, nor is the warm-up before a capture, which is nobody's step.

Each process has a file of its own, `dbo-rank0-4711.jsonl`, begun with its first step, so that a process that makes a
scheduler and runs none leaves none. Ranks are found out, not asked for: what a runner tells, else torch.distributed
where it is initialised, else RANK and WORLD_SIZE (torchrun). In the long run a file is bounded as a server's is
(`rolling`); `dbo-greenlet record` wants all of it and gets files that end where the bound is.

A vLLM server's steps are recorded by the drop-in (`vllm.recording`) from the same variables. Nothing here raises: a
program must not die of its log. What keeps it from being written is logged, once.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.util import Finalize
from threading import Lock, get_ident, local
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Protocol

from .. import record_notes
from ..errors import ConfigurationError
from ..step import running
from ..trace_settings import TraceSettings
from .process_facts import found_rank_and_world, uncaught
from .recorded_step import RecordedStep, StepDetails, described
from .recorder import StepRecorder, make_header
from .rolling import RollingTrace
from .schema import EndRecord, StepRecord, to_json
from .whole_file import WholeFile

if TYPE_CHECKING:
    from ..process_memory import ProcessMemory

__all__ = ["ProcessTrace", "StepDetails", "end_process_trace", "process_trace"]

logger = logging.getLogger("dbo_greenlet")

_NOT_RECORDED = object()


class _File(Protocol):
    problem: str | None

    def write(self, data: bytes) -> None: ...

    def close(self) -> None: ...


class ProcessTrace:
    """Records the steps of all schedulers of this process.

    Args:
        settings: what to record; its folder is made where it is missing.
        whole: keep everything up to the bound, instead of the latest within it.

    Attributes:
        origin_ns: the clock at microsecond 0 of all steps.
        problem: None, or one sentence saying why nothing (more) is recorded. It was logged.
        path: the file; None before the first step.
    """

    def __init__(self, settings: TraceSettings, *, whole: bool = False) -> None:
        self.settings = settings
        self.problem: str | None = None
        self.path: str | None = None
        self._whole = whole
        self._process = os.getpid()
        self._recorders = [StepRecorder()]
        self.origin_ns = self._recorders[0].origin_ns
        self._lock = Lock()
        self._told = local()  # `step`: the details of the step that this thread runs next, or `_NOT_RECORDED`
        self._seen: Counter[Any] = Counter()  # kinds of steps -> how many there were
        self._steps = 0
        self._written = -1  # the highest number
        self._file: _File | None = None
        self._rank = 0
        self._rank_and_world: tuple[int, int] | None = None  # as a runner told them
        self._error: str | None = None
        self._timelines: dict[Any, Any] = {}
        self._memories: dict[Any, list[ProcessMemory]] = {}  # device -> those that no step uses now
        self._said_without_memory = False
        self._waiting: dict[int, RecordedStep] = {}  # by thread: has run, and is not over
        self._finalizer = Finalize(None, self.close, exitpriority=10)

    # -- what runners and schedulers call ------------------------------------------------------------------------------

    def rank_is(self, rank: int, world: int) -> None:
        """Tell the rank of this process before its first step."""
        mine = self._of_this_process()
        if mine is not None:
            mine._rank_and_world = rank, world

    @contextmanager
    def describe(self, details: StepDetails | None) -> Iterator[None]:
        """Tell what the step is that the scheduler runs inside, on this thread; the step is over when the block is.

        Args:
            details: None: it is nobody's step, and not to be recorded.
        """
        mine = self._of_this_process()
        if mine is None:
            yield
            return
        mine._step_over()
        mine._told.step = _NOT_RECORDED if details is None else details
        try:
            yield
        finally:
            mine._told.step = None  # where the scheduler never came to it, it is not the next one's
            mine._step_over()

    @contextmanager
    def unsplit(self, details: StepDetails, *, timed: bool) -> Iterator[None]:
        """Record the step that runs inside, unsplit and without the scheduler.

        Args:
            timed: whether the host is done with it no earlier than the device.
        """
        begin = perf_counter_ns()
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            span = (begin, perf_counter_ns()) if timed else None
            mine = self._of_this_process()
            if mine is not None:
                mine.guarded(partial(mine._write_unsplit, details, span, error))
            error = None  # or it would hold itself, and the model's frames, by its traceback

    def _write_unsplit(self, details: StepDetails, span: tuple[int, int] | None, error: BaseException | None) -> None:
        number, due = self._next("unsplit")
        if due or error is not None:
            begin, end = (None, None) if span is None else (self.since(span[0]), self.since(span[1]))
            why = None if error is None else f"{type(error).__name__}: {error}"
            record = StepRecord(number, 0, "dbo", 0, 0, False, "", begin=begin, end=end, error=why, execution="eager")
            self.write_step(described(record, details, self.since), lambda number, rank: b"", details)

    def watch(
        self, count: int, contexts: Sequence[Any] | None, policy: Any, carrier: str, *, timed: bool
    ) -> RecordedStep | None:
        """The instrument for the step that this thread begins now; None where it is not to be recorded.

        Args:
            count: number of microbatches.
            contexts, policy, carrier: of the step, as `Scheduler` has them.
            timed: whether the step has a bracket already.
        """
        mine = self._of_this_process()
        if mine is not self:
            return None if mine is None else mine.watch(count, contexts, policy, carrier, timed=timed)
        self._step_over()
        details, self._told.step = getattr(self._told, "step", None), None
        if details is _NOT_RECORDED:
            return None
        if details is not None and len(details.slices) != count:
            details = None  # of a step that something else came before
        captured = details is not None and details.captured
        number, due = self._next("captured" if captured else "split" if count > 1 else "unsplit")
        if not due or self.problem is not None:
            return None
        return RecordedStep(self, number, count, details, contexts or (), policy, carrier, timed)

    def _step_over(self) -> None:
        with self._lock:
            step = self._waiting.pop(get_ident(), None)
        if step is not None:
            step.over()

    def close(self, error: str | None = None) -> None:
        """Write the end record and close the file. Also done when the process ends in order.

        Args:
            error: what ends it, if anything did.
        """
        if os.getpid() != self._process:
            return
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for step in waiting.values():
            step.over()
        with self._lock:
            file, self._file = self._file, None
            if file is not None:
                why = error or uncaught() or self._error
                file.write(_line(EndRecord(why is None, self._rank, why)))
                file.close()
        self._finalizer.cancel()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _of_this_process(self) -> ProcessTrace | None:
        """Itself; in a forked child, which has its parent's schedulers, the child's own."""
        return self if os.getpid() == self._process else process_trace()

    def _next(self, kind: str) -> tuple[int, bool]:
        """The number of the step that begins, and whether it is recorded."""
        with self._lock:
            number, self._steps = self._steps, self._steps + 1
            seen = self._seen[kind]
            self._seen[kind] += 1
        return number, seen % self.settings.every == 0

    # -- what a recorded step asks for ---------------------------------------------------------------------------------

    def since(self, clock: int) -> float:
        """Microseconds since the origin."""
        return (clock - self.origin_ns) / 1000

    def timeline(self, device: Any) -> Any:
        """The GPU timeline of a device; None where none is asked for or the device has none."""
        if not self.settings.gpu or getattr(device, "new_timing_event", None) is None:
            return None
        if device not in self._timelines:
            from ..gpu_timeline import GpuTimeline

            # A virtual device knows itself what is captured, and needs no torch to say it.
            self._timelines[device] = GpuTimeline(device, capturing=getattr(device, "capturing", None))
        return self._timelines[device]

    def take_memory(self, device: Any) -> ProcessMemory | None:
        """What notes what the operations of the step that begins do to memory; None where nothing is to, or can.

        Args:
            device: of the step's contexts; None where they have none.
        """
        # A step inside a step is seen by the outer one's recorder.
        if not self.settings.memory or running.get(get_ident()) is not None:
            return None
        if "torch" not in sys.modules:
            self._without_memory("the program has not imported torch")
            return None
        if getattr(device, "program", None) is not None:
            self._without_memory("the program notes it itself, or its device is a virtual one")
            return None
        with self._lock:
            if self._memories.get(device):
                return self._memories[device].pop()
        from ..process_memory import ProcessMemory

        return ProcessMemory(device)

    def _without_memory(self, why: str) -> None:
        if not self._said_without_memory:
            self._said_without_memory = True
            record_notes.leave("partial", f"what operations do to memory is not recorded: {why}")

    def give_back_memory(self, device: Any, memory: ProcessMemory) -> None:
        """Its step is written."""
        with self._lock:
            self._memories.setdefault(device, []).append(memory)

    def take_recorder(self) -> StepRecorder:
        """A recorder that no step uses now: steps may run in several threads, and inside each other."""
        with self._lock:
            if self._recorders:
                return self._recorders.pop()
        recorder = StepRecorder()
        recorder.origin_ns = self.origin_ns
        return recorder

    def give_back(self, recorder: StepRecorder) -> None:
        """Its step is written."""
        with self._lock:
            self._recorders.append(recorder)

    def wait_for(self, step: RecordedStep) -> None:
        """Write the step when it is over, or at the latest when its thread begins another."""
        with self._lock:
            self._waiting[get_ident()] = step

    def write_step(self, record: StepRecord, lines: Callable[[int, int], bytes], details: StepDetails | None) -> None:
        """Write a step that has ended; `lines` makes the rest of it, for its number and rank, known only now."""
        with self._lock:
            # A step inside a step ends before it: numbers in a file ascend.
            number = max(record.step, self._written + 1)
            if number != record.step:
                self._steps = max(self._steps, number + 1)
            if self.problem is not None or os.getpid() != self._process:
                return
            if self._file is None and not self._open(details):
                return
            file = self._file
            if file is None:
                return
            record = dataclasses.replace(record, step=number, rank=self._rank)
            self._written = number
            self._error = record.error
            file.write(_line(record) + lines(number, self._rank))
            if file.problem is not None:
                self.give_up(file.problem)

    def _open(self, details: StepDetails | None) -> bool:
        rank, world = self._rank_and_world or found_rank_and_world()
        if details is not None and details.rank is not None and details.world is not None:
            rank, world = details.rank, details.world
        self._rank = rank
        header = make_header(
            rank=rank,
            world=world,
            settings={"program": os.path.basename(sys.argv[0]) if sys.argv else "", "trace": self._about(0)},
            origin_ns=self.origin_ns,
        )

        def header_line(part: int) -> bytes:
            return _line(dataclasses.replace(header, settings={**header.settings, "trace": self._about(part)}))

        folder = self.settings.folder or "."
        limit = int(self.settings.megabytes * 1e6)
        try:
            if self._whole:
                file: WholeFile | RollingTrace = WholeFile(folder, rank, limit)
                file.write(header_line(0))
            else:
                file = RollingTrace(folder, rank=rank, limit=limit, header=header_line)
        except (OSError, ValueError) as error:
            reason = (error.strerror or str(error)).lower() if isinstance(error, OSError) else str(error)
            self.give_up(f"The trace in {folder} is not written: {reason}; the program runs without it.")
            return False
        self._file, self.path = file, os.fspath(file.path)
        return True

    def _about(self, part: int) -> dict[str, Any]:
        settings = self.settings
        about = {"every": settings.every, "megabytes": settings.megabytes, "part": part, "process": self._process}
        return about | ({"memory": True} if settings.memory else {})

    def give_up(self, problem: str) -> None:
        """Record nothing more, and say why."""
        if self.problem is None:
            self.problem = problem
            logger.warning("%s", problem)
            record_notes.leave("problem", problem)

    def guarded(self, action: Callable[[], None]) -> None:
        """Do it; whatever goes wrong ends the recording, and not the step that is recorded."""
        try:
            action()
        except Exception as error:
            # Whatever it is: a program must not die of its log.
            self.give_up(f"The trace of this process ends here: {type(error).__name__}: {error}")
            logger.debug("where it came from", exc_info=True)


_process_trace: ProcessTrace | None = None
_making = Lock()


def process_trace() -> ProcessTrace | None:
    """The trace of this process, by its environment; None where that asks for none, or says something impossible."""
    global _process_trace
    with _making:
        # A forked child has its parent's, and writes one of its own.
        if _process_trace is None or _process_trace._process != os.getpid():
            try:
                settings = TraceSettings.from_environment()
            except ConfigurationError as error:
                logger.warning("no step is recorded: %s", error)
                record_notes.leave("problem", f"no step is recorded: {error}")
                settings = TraceSettings()
            if settings.folder is None:
                return None
            record_notes.leave("scheduler")
            _process_trace = ProcessTrace(settings, whole=record_notes.FOLDER in os.environ)
        return _process_trace


def end_process_trace(error: BaseException | None = None) -> None:
    """For a process that leaves by `os._exit`, which runs no finalizers: end its trace, if it has one."""
    if _process_trace is not None:
        _process_trace.close(None if error is None else f"{type(error).__name__}: {error}")


def _line(record: Any) -> bytes:
    return to_json(record).encode("ascii") + b"\n"
