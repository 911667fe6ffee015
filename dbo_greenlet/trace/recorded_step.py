"""One step of a process whose environment asks for a trace: it is recorded, and written when it has ended."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..policies.names import text_and_seed
from ..schedule import Schedule
from .schema import StepRecord, to_json

if TYPE_CHECKING:
    from ..process_memory import ProcessMemory
    from ..step import Step
    from .process_trace import ProcessTrace

__all__ = ["RecordedStep", "StepDetails", "described", "goes_into_a_graph"]


@dataclass(frozen=True)
class StepDetails:
    """What a runner knows of a step, and a scheduler does not. Attributes as in `StepRecord`, and:

    Attributes:
        rank, world: this rank and the number of ranks; None where the runner has no group.
        slices: of a step that is not split the one of the whole batch.
        voted: nanoseconds (`time.perf_counter_ns`) around the vote; None where there was none.
        captured: whether the step goes into a graph: such steps are counted apart.
    """

    rank: int | None
    world: int | None
    tokens: int
    padded: int
    split: bool
    reason: str
    votes: list[Any]
    slices: list[list[int]]
    voted: tuple[int, int] | None
    captured: bool = False


def described(record: StepRecord, details: StepDetails, since: Callable[[int], float]) -> StepRecord:
    """The record with these details; `since` makes microseconds of the vote's nanoseconds."""
    begin, end = (None, None) if details.voted is None else (since(details.voted[0]), since(details.voted[1]))
    return dataclasses.replace(
        record,
        tokens=details.tokens,
        padded=details.padded,
        split=details.split,
        reason=details.reason,
        votes=details.votes,
        slices=details.slices,
        vote_begin=begin,
        vote_end=end,
    )


class RecordedStep:
    """One step: what records it, and what writes it when it has ended.

    Where a runner described the step, its contexts have a twin of their device until the step is over, which tells of
    events (`StepRecorder.device`); it is over when the runner has joined the streams. A program that has only a
    scheduler may join them by any means, so of its steps no event is recorded: some of them would look like a join that
    was left out. (Where operations are noted as well, every event is: without, nothing would order them.)

    Attributes:
        instruments: the instruments of the step: a recorder, what notes the operations, and behind them this object.
        bracket: what times the slices on the GPU; None where nothing does.
    """

    def __init__(
        self,
        trace: ProcessTrace,
        number: int,
        count: int,
        details: StepDetails | None,
        contexts: Sequence[Any],
        policy: Any,
        carrier: str,
        timed: bool,
    ) -> None:
        self._recorder = trace.take_recorder()
        self.instruments: tuple[Any, ...] = (self._recorder, self)
        self.bracket: Any = None
        self._trace = trace
        self._number = number
        self._count = count
        self._details = details
        self._policy = policy
        self._run_name = "dbo" if carrier == "greenlet" else carrier
        self._devices: list[tuple[Any, Any]] = []
        self._memory: ProcessMemory | None = None
        self._plain: Any = None  # the contexts' device
        self._in_graph = False
        self._schedule: Schedule | None = None  # of a step that did not fail
        trace.guarded(lambda: self._listen(contexts, timed))

    def _listen(self, contexts: Sequence[Any], timed: bool) -> None:
        # Contexts of a host, which has no devices of ours, are left as they are.
        device = getattr(contexts[0], "device", None) if contexts else None
        if contexts and (device is None or any(getattr(each, "device", None) is not device for each in contexts)):
            return
        self._in_graph = goes_into_a_graph(device)
        if not self._in_graph:
            self._note_memory(device)
        self._devices = [(each, each.device) for each in contexts or ()]
        if device is None:
            return
        timeline = None if timed or self._in_graph else self._trace.timeline(getattr(device, "plain", device))
        if timeline is not None:
            self.bracket = timeline.eager(contexts)
        if self._memory is not None or self._details is not None:
            twin = self._recorder.device(device) if self._memory is None else self._memory.device
            for each in contexts:
                each.device = twin

    def _note_memory(self, device: Any) -> None:
        """Not of a step that goes into a graph: a capture is no place to try what others may do in it."""
        self._plain = device
        self._memory = self._trace.take_memory(device)
        if self._memory is not None:
            # It notes the events as well, and two lists of operations cannot be one.
            self._recorder.event_captured = None  # type: ignore[method-assign, assignment]
            self.instruments = (self._recorder, self._memory, self)

    def after_step(self, step: Step, error: BaseException | None) -> None:
        """The scheduler is done with it."""
        if error is None:
            self._schedule = Schedule(step.count, tuple(step.decisions), tuple(step.sites))
        if self._details is None or error is not None:
            self.over()
        else:
            self._trace.wait_for(self)

    def over(self) -> None:
        """The step is complete: write it."""
        for context, device in self._devices:
            context.device = device
        self._trace.guarded(self._write)
        if (memory := self._memory) is not None:
            # Also where nobody asked for its lines, because the trace has just come to its end.
            self._trace.guarded(memory.stop)
            del self._recorder.event_captured
            self._trace.give_back_memory(self._plain, memory)
        self._trace.give_back(self._recorder)

    def _write(self) -> None:
        trace, recorder, details, schedule = self._trace, self._recorder, self._details, self._schedule
        policy, seed = text_and_seed(self._policy)
        record = StepRecord(
            self._number, 0, self._run_name, 0, 0, self._count > 1, "",
            begin=recorder.begin, end=recorder.end, error=recorder.error, policy=policy, seed=seed,
            execution="captured" if self._in_graph else "eager",
        )  # fmt: skip
        if details is not None:
            record = described(record, details, trace.since)
        if schedule is not None:
            record = dataclasses.replace(
                record, schedule=schedule.encode(), hash=schedule.hash, yields=list(schedule.yields)
            )
        trace.write_step(record, self._lines, details)

    def _lines(self, number: int, rank: int) -> bytes:
        who: dict[str, Any] = {"step": number, "rank": rank, "run": self._run_name}
        lines = self._recorder.json_lines(**who)
        if self._memory is not None:
            lines += self._memory.json_lines(**who, origin_ns=self._trace.origin_ns)
        if self.bracket is not None and self._schedule is not None:
            timed = self.bracket.records(**who, origin_ns=self._trace.origin_ns)
            lines += b"".join(to_json(each).encode("ascii") + b"\n" for each in timed)
        return lines


def goes_into_a_graph(device: Any) -> bool:
    """Whether what is enqueued on the device (None: on the current stream) is being captured, and runs later."""
    if (capturing := getattr(device, "capturing", None)) is not None:
        return bool(capturing())
    torch = sys.modules.get("torch")
    if torch is None or not (device is None or device.name.startswith("cuda")):
        return False
    # Asked for nothing where no GPU was used yet: to ask would take hold of one.
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
