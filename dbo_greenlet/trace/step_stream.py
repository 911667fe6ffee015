"""The steps of a trace one after the other, however long it is.

    stream = StepStream("trace.jsonl")
    for step in stream:
        ...

A step is handed out when its rank goes on to another one, so that no more than one step of each rank is held. What a
run writes is in that order; `read_trace` takes the records in any.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from ..errors import TraceFileError
from .quick_records import QuickReader
from .reader import StepTrace, TraceReader
from .schema import EndRecord, HeaderRecord, PromptRecord

__all__ = ["StepStream"]

_OF_THE_RUN = {HeaderRecord.kind, PromptRecord.kind, EndRecord.kind}


class StepStream:
    """Iterates, once, over the steps of one trace; steps of several ranks and runs in the order of the file.

    Args:
        path: the trace. It may still be growing: what is there is read.
        quick: read it as `quick_records` does: ten times faster, records that have the attributes of the dataclasses
            and are none.

    Attributes, filled while it is read; those of the first step stand when it is handed out:
        path: the file.
        headers, ends: by rank.
        prompts: in file order.
        steps: how many steps were handed out.
        torn: whether the last line was cut off, and dropped.

    Iterating raises:
        TraceFileError: as `TraceReader`; a step, a header or an end that comes a second time; a step of lower number
            than one before it (of the same run and rank): the file is two traces one after the other.
    """

    def __init__(self, path: str | os.PathLike[str], *, quick: bool = False) -> None:
        self.path = os.fspath(path)
        self.headers: dict[int, HeaderRecord] = {}
        self.ends: dict[int, EndRecord] = {}
        self.prompts: list[PromptRecord] = []
        self.steps = 0
        self.torn = False
        self._reader = (QuickReader if quick else TraceReader)(path)
        self._latest: dict[tuple[str, int], int] = {}  # (run, rank) -> the highest step that began

    def __iter__(self) -> Iterator[StepTrace]:
        open_steps: dict[int, StepTrace] = {}  # by rank: a rank runs one step at a time
        record: Any
        for record in self._reader:
            kind = record.kind
            if kind in _OF_THE_RUN:
                self._of_the_run(record)
                continue
            step = open_steps.get(record.rank)
            if step is None or step.step != record.step or step.run != record.run:
                if step is not None:
                    self.steps += 1
                    yield step
                    del open_steps[record.rank]
                self._begins(record.run, record.rank, record.step)
                # Behind the steps that began earlier and are still open.
                step = open_steps[record.rank] = StepTrace(record.run, record.step, record.rank)
            if kind == "slice":
                step.slices.append(record)
            elif kind == "recv":
                step.receives.append(record)
            elif kind == "gpu":
                step.gpu.append(record)
            elif kind == "op":
                step.ops.append(record)
            else:
                what = f"record of step {record.step}, run {record.run!r}, rank {record.rank}"
                self._once(step.record is not None, what)
                step.record = record
        self.torn = self._reader.torn
        for step in open_steps.values():
            self.steps += 1
            yield step

    def _of_the_run(self, record: Any) -> None:
        if record.kind == HeaderRecord.kind:
            self._once(record.rank in self.headers, f"header of rank {record.rank}")
            self.headers[record.rank] = record
        elif record.kind == EndRecord.kind:
            self._once(record.rank in self.ends, f"end record of rank {record.rank}")
            self.ends[record.rank] = record
        else:
            self.prompts.append(record)

    def _begins(self, run: str, rank: int, step: int) -> None:
        before = self._latest.get((run, rank))
        if before is not None and step <= before:
            raise TraceFileError(
                f"{self.path}, line {self._reader.line}: step {step} of run {run}, rank {rank} behind its step "
                f"{before}; are these two traces in one file?"
            )
        self._latest[run, rank] = step

    def _once(self, known: bool, what: str) -> None:
        if known:
            raise TraceFileError(
                f"{self.path}, line {self._reader.line}: a second {what}; are these two traces in one file?"
            )
