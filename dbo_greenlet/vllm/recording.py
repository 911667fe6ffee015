"""Traces of a running server: every n-th step of this process, in a bounded space, at a bounded cost.

    DBO_GREENLET_TRACE=DIR vllm serve ... --enable-dbo
    dbo-greenlet show DIR

What is bounded is the work per step (`due` is a count and a comparison; the recorder only takes part in the steps that
are recorded, and their lines are made and written after the step) and the space (`trace.rolling`). Split steps,
replays of split steps and steps that were not split are counted apart, each kind from its own first one, so that a
server that hardly ever splits still shows the steps that it did split. A split step that fails is always written: whole
if it was being recorded, otherwise as its step record with the error.

Times are the host's: of a split step around the scheduler, of an eager unsplit one around the call of the model. On a
GPU a step is over when the device is, which only the device knows, and asking it would make the server wait; so where
the host is ahead of its GPU the times are too short. A replay returns at once, and has none.

Nothing here raises: a server must not die of its own log. What keeps the trace from being written is logged, once, and
the rest of the run goes unrecorded.

This module imports neither torch nor vLLM.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from multiprocessing.util import Finalize
from threading import Lock
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, TypeVar

from ..policy import RoundRobin
from ..schedule import Schedule
from ..trace.recorder import StepRecorder
from ..trace.rolling import MIN_LIMIT, RollingTrace
from ..trace.run_header import make_header
from ..trace.schema import EndRecord, HeaderRecord, StepRecord, to_json

if TYPE_CHECKING:
    from .decisions import StepDecision
__all__ = ["ServerTrace"]

logger = logging.getLogger("vllm.plugins.dbo_greenlet")  # below vLLM's own logger: its handlers and level apply

RUN = "dbo"  # what carries the split steps, and of whose server the others are
MAX_ERROR = 1_000  # characters: the message of an error may hold a whole tensor

F = TypeVar("F", bound=Callable[..., Any])


def _never_raises(method: F) -> F:
    """A method whose failure ends the recording instead of the step; it then returns None."""

    @wraps(method)
    def guarded(self: ServerTrace, *arguments: Any, **keywords: Any) -> Any:
        try:
            return method(self, *arguments, **keywords)
        except Exception as error:
            self._give_up(f"The trace of this server ends here: {_error_text(error)}")
            logger.debug("where it came from", exc_info=True)
            return None

    return guarded  # type: ignore[return-value]


class ServerTrace:
    """Records the steps of one process of a server. Never raises.

    Args:
        folder: where the files go, see `trace.rolling` for their names; created where it is missing.
        every: every how-manieth step is recorded, 1 or more.
        megabytes: upper bound of what this rank keeps in the folder, in 10^6 bytes, 0.1 or more.
        rank, world: this process's rank and their number.
        settings: what goes into the header: "model" (its name), versions, runner, policy, thresholds, ... Values that
            JSON does not know are written as text.

    Attributes:
        recorder: the instrument of the scheduler that runs the steps for which `due` says True, and of no other.
        path: the file that grows now; None where nothing is recorded.
        problem: None, or one sentence saying why nothing (more) is recorded. It was logged.
        awaits_model: whether the step that runs now is an unsplit one that is to be recorded, and its model was not
            called yet.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        every: int,
        megabytes: float,
        rank: int,
        world: int,
        settings: Mapping[str, Any],
    ) -> None:
        self.recorder = StepRecorder()
        self.problem: str | None = None
        self.awaits_model = False
        self._unsplit_record: StepRecord | None = None  # of the step that awaits its model
        self._every = every
        self._rank = rank
        self._process = os.getpid()
        self._lock = Lock()  # the process may end while a thread of it still runs a step
        self._trace: RollingTrace | None = None
        self._steps = 0  # of all kinds: numbers the records
        self._split = self._replayed = self._unsplit = 0
        self._number = -1  # of the split step that runs
        self._open = False  # whether `due` was asked and the step's end was not told yet
        self._recorded = False  # whether `due` said True for it
        self._begin_before = 0.0  # the recorder's step before that one
        self._error: str | None = None  # of the latest step
        self._start(folder, megabytes, world, settings)

    @property
    def path(self) -> str | None:
        trace = self._trace
        return None if trace is None else os.fspath(trace.path)

    # -- what the steps say --------------------------------------------------------------------------------------------

    def due(self) -> bool:
        """Whether this split step is to run with `recorder`: the first one, and every n-th after it.

        Called once for each split step, before it runs.
        """
        number, self._split = self._split, self._split + 1
        self._number = self._count()
        self._open = True
        self._recorded = self._trace is not None and number % self._every == 0
        self._begin_before = self.recorder.begin
        return self._recorded

    @_never_raises
    def split_step(
        self,
        *,
        kind: str,
        slices: Iterable[Any],
        tokens: int,
        padded: int,
        schedule: Schedule | None,
        error: BaseException | None = None,
    ) -> None:
        """Write the split step that just ended, if it was recorded or failed; nothing otherwise.

        Args:
            kind: how it ran: "eager" or "captured".
            slices: one per microbatch: vLLM's slices (`token_slice`, `request_slice`), or four numbers each, first
                token, end token, first request, end request.
            tokens, padded: of the batch, without and with padding. Where vLLM's decision is about a batch of that
                padded size, its number of tokens goes first: a runner's slices know the padded one only.
            schedule: what the scheduler returned; None where it failed.
            error: what the step raised, None where it succeeded.
        """
        if not self._open:
            self.due()  # nobody asked, so it was not recorded; but two steps must not have one number
            self._recorded = False
        self._open = False
        if error is not None:
            self._error = _error_text(error)
        if self._trace is None or not (self._recorded or error is not None):
            return
        recorder = self.recorder
        # The recorder still holds an earlier step where this one failed before its first slice.
        watched = self._recorded and recorder.begin != self._begin_before
        decision = _last_decision()
        if decision is not None and not decision.split:
            decision = None  # of another step
        if decision is not None and decision.padded == padded:
            tokens = decision.tokens
        record = self._record(self._number, decision, tokens=tokens, padded=padded, split=True, execution=kind)
        record = dataclasses.replace(
            record,
            slices=[_numbers(each) for each in slices],
            begin=recorder.begin if watched else None,
            end=recorder.end if watched else None,
            error=self._error,
        )
        if schedule is not None:
            record = dataclasses.replace(
                record, schedule=schedule.encode(), hash=schedule.hash, yields=list(schedule.yields)
            )
        data = _line(record)
        if watched:
            slice_lines = recorder.json_lines(step=self._number, rank=self._rank, run=RUN)
            # A step that is larger than a part would break the bound; its record still says that it was, and the order.
            if self._trace.fits(len(data) + len(slice_lines)):
                data += slice_lines
        self._write(data)

    @_never_raises
    def replayed_step(self) -> None:
        """Count a split step that was replayed from its graph, and write the first and every n-th of them.

        Its tokens and the reason are those of vLLM's latest decision. `due` is not asked for it: no slice runs.
        """
        number, self._replayed = self._replayed, self._replayed + 1
        step = self._count()
        if self._trace is None or number % self._every:
            return
        decision = _last_decision()
        tokens, padded = (0, 0) if decision is None else (decision.tokens, decision.padded)
        self._write(_line(self._record(step, decision, tokens=tokens, padded=padded, split=True, execution="replayed")))

    @_never_raises
    def unsplit_step(self, decision: StepDecision) -> None:
        """Count a step that was not split; the first and every n-th of them is to be written, with the reason.

        The decision comes before the step runs. It is written when its model has run (`model_call`, `model_graph`), or
        without times when the next step begins and nobody has told.
        """
        number, self._unsplit = self._unsplit, self._unsplit + 1
        step = self._count()
        if self._trace is None or number % self._every:
            return
        tokens, padded = decision.tokens, decision.padded
        record = self._record(step, decision, tokens=tokens, padded=padded, split=False)
        if decision.requests is not None:
            record = dataclasses.replace(record, slices=[[0, int(tokens), 0, int(decision.requests)]])
        self._unsplit_record, self.awaits_model = record, True

    @contextmanager
    def model_call(self) -> Iterator[None]:
        """Around the call of the model in an unsplit step that `awaits_model`: it is written, with times or its error.

        What the model raises is raised. Only the first call of a step counts.
        """
        begin = perf_counter_ns()
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._model_called(begin, perf_counter_ns(), error)
            error = None  # or it would hold itself, and the model's frames, by its traceback

    @_never_raises
    def model_graph(self, *, captured: bool) -> None:
        """The unsplit step that `awaits_model` runs as a whole graph, now captured or replayed, and has no times."""
        self._write_unsplit(execution="captured" if captured else "replayed")

    @_never_raises
    def _model_called(self, begin: int, end: int, error: BaseException | None) -> None:
        if error is not None and self._unsplit_record is not None:
            self._error = _error_text(error)
        origin = self.recorder.origin_ns
        self._write_unsplit(
            execution="eager", begin=(begin - origin) / 1000, end=(end - origin) / 1000, error=self._error
        )

    @_never_raises  # by itself, because `due` asks for it as well
    def _write_unsplit(self, **known: Any) -> None:
        """Write the unsplit step that waits to be, if one does, with what is known of it by now."""
        record, self._unsplit_record = self._unsplit_record, None
        self.awaits_model = False
        if record is not None:
            self._write(_line(dataclasses.replace(record, **known)))

    @_never_raises
    def close(self) -> None:
        """Write the end record and close the file. Also done when the process ends in order."""
        if self._trace is None or os.getpid() != self._process:
            return
        self._write_unsplit()
        self._write(_line(EndRecord(self._error is None, self._rank, self._error)))
        with self._lock:
            trace, self._trace = self._trace, None
        if trace is not None:
            trace.close()
        self._finalizer.cancel()

    def _count(self) -> int:
        """The number of a step that begins. The one before it is over."""
        self._write_unsplit()
        number, self._steps = self._steps, self._steps + 1
        self._error = None
        return number

    def _record(
        self,
        step: int,
        decision: StepDecision | None,
        *,
        tokens: int,
        padded: int,
        split: bool,
        execution: str = "",
    ) -> StepRecord:
        reason = "" if decision is None else str(decision.reason)
        votes = [] if decision is None else [int(each) for each in decision.tokens_of_ranks or ()]
        voted = None if decision is None else decision.voted
        origin = self.recorder.origin_ns
        return StepRecord(
            step,
            self._rank,
            RUN,
            int(tokens),
            int(padded),
            split,
            reason,
            votes=votes,
            execution=execution,
            policy=RoundRobin.name if split else "",  # `HostScheduler`'s
            vote_begin=None if voted is None else (voted[0] - origin) / 1000,
            vote_end=None if voted is None else (voted[1] - origin) / 1000,
        )

    # -- inside --------------------------------------------------------------------------------------------------------

    def _start(self, folder: str | os.PathLike[str], megabytes: float, world: int, settings: Mapping[str, Any]) -> None:
        try:
            if not (isinstance(self._every, int) and self._every >= 1):
                raise ValueError(f"every={self._every!r} is not a whole number of 1 or more")
            if not MIN_LIMIT / 1e6 <= megabytes < float("inf"):
                raise ValueError(f"megabytes={megabytes!r} is not a number of {MIN_LIMIT / 1e6} or more")
            header = make_header(
                rank=self._rank, world=world, origin_ns=self.recorder.origin_ns, **_model_and_settings(settings)
            )
            make_line = partial(_header_line, header, every=self._every, megabytes=megabytes, process=self._process)
            self._trace = RollingTrace(folder, rank=self._rank, limit=int(megabytes * 1e6), header=make_line)
        except Exception as error:
            reason = (error.strerror or str(error)).lower() if isinstance(error, OSError) else _text(error)
            self._give_up(f"The trace in {os.fspath(folder)} is not written: {reason}; the server runs without it.")
            return
        # Not `atexit`: a process that multiprocessing forked passes it over, and vLLM may start its workers so.
        self._finalizer = Finalize(None, self.close, exitpriority=10)
        if self._trace.problem is not None:
            self._give_up(self._trace.problem)
        else:
            logger.info("recording every %d-th step to %s", self._every, self.path)

    def _write(self, data: bytes) -> None:
        with self._lock:
            # A forked child has the same file, and a position in it of its own: only its parent writes.
            if self._trace is None or os.getpid() != self._process:
                return
            self._trace.write(data)
            problem = self._trace.problem
        if problem is not None:
            self._give_up(problem)

    def _give_up(self, problem: str) -> None:
        if self.problem is None:
            self.problem = problem
            logger.warning("%s", problem)
        self._recorded = False
        trace, self._trace = self._trace, None
        if trace is not None:
            trace.close()


def _header_line(header: HeaderRecord, part: int, *, every: int, megabytes: float, process: int) -> bytes:
    trace = {"every": every, "megabytes": megabytes, "part": part, "process": process}
    return _line(dataclasses.replace(header, settings={**header.settings, "trace": trace}))


def _line(record: Any) -> bytes:
    return to_json(record).encode("ascii") + b"\n"


def _model_and_settings(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    plain = {str(name): _plain(value) for name, value in settings.items()}
    return {"model": {"path": plain["model"]} if "model" in plain else {}, "settings": plain}


def _plain(value: Any) -> Any:
    """The value as JSON has it; as text where JSON has no such thing (an object, NaN)."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        return str(value)


def _last_decision() -> StepDecision | None:
    # Not imported: it brings torch, and where nobody imported it nobody observes vLLM's votes.
    observer = sys.modules.get(f"{__package__}.decisions")
    return None if observer is None else observer.last()


def _numbers(piece: Any) -> list[int]:
    if hasattr(piece, "token_slice"):
        tokens, requests = piece.token_slice, piece.request_slice
        return [int(tokens.start), int(tokens.stop), int(requests.start), int(requests.stop)]
    return [int(number) for number in piece]


def _text(error: BaseException) -> str:
    """The error's own text. Made by whoever wrote the error, so it may fail as well."""
    try:
        return str(error)
    except Exception:
        return "(its text cannot be had)"


def _error_text(error: BaseException) -> str:
    text = f"{type(error).__name__}: {_text(error)}"
    return text if len(text) <= MAX_ERROR else text[:MAX_ERROR] + " ..."
