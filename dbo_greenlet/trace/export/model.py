"""What a viewer is shown of traces of ours, in no viewer's format: tracks, slices, flows and counters.

One process per rank. Its tracks, from top to bottom:

    steps                      from the step's begin to its end on the host
    microbatch 0, 1, ...       its slices on the host
    dispatch, combine in flight    from a send to the moment its receive was complete ("in flight" for other sites)
    compute, comm stream       the slices on the GPU, where they were timed, with their waits for the other stream
    transfers in flight        a counter: sends whose receive is not complete
    runnable microbatches      a counter: those from which the policy had its choice when a slice began
    bytes in flight            a counter: what these sends sent to other ranks, where the trace says it

On a track no two slices overlap. Where they would (two dispatches in flight, runs that recorded the same time twice),
the track gets another one below it, "dispatch in flight (2)". The arrows are those of `step`.

Times are whole nanoseconds, on one axis for all ranks (`clocks.offsets`). Its zero is the earliest of the ranks' own.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence

from ...errors import TraceFileError
from ...schedule import MAX_MICROBATCHES
from ..clocks.offsets import CommonAxis, axis_of, common_axis
from ..files import TraceFiles
from ..reader import StepTrace
from .items import FIRST_TRACK, Item, Process
from .step import LONGEST, step_items
from .tracks import Tracks

__all__ = ["ExportModel"]


class ExportModel:
    """Iterates, once, over what traces of ours show, one step at a time.

    A process and a track come before what is on them, the slices of a track in order of time, and the samples of a
    counter in the order of the steps.

    Args:
        arguments: files and folders, of one run.
        run: only steps of this run.
        rank: only steps of this rank.
        steps: only steps with these numbers.

    Attributes, whole when it was iterated over:
        files: the `TraceFiles`, with their headers.
        path: what to call the files.
        shown: number of steps, slices (waits are part of their slice), flows and counter samples.
        offsets: rank -> microseconds by which its times were moved onto the common axis.

    Iterating raises:
        TraceFileError: as `TraceFiles`; something ends before it begins; there is nothing to show.
    """

    def __init__(
        self,
        arguments: Sequence[str | os.PathLike[str]] | str | os.PathLike[str],
        *,
        run: str | None = None,
        rank: int | None = None,
        steps: Collection[int] | None = None,
    ) -> None:
        self.files = TraceFiles(arguments, rank=rank, quick=True)
        self.path = self.files.path
        self.shown = {"steps": 0, "slices": 0, "flows": 0, "counter samples": 0}
        self.offsets: dict[int, float] = {}
        self._wanted = (run, rank, steps)
        self._axis = axis_of([], ranks=())
        self._zero = 0.0
        self._tracks = Tracks()
        self.shown |= self._tracks.shown
        self._tracks.shown = self.shown

    @property
    def paths(self) -> list[str]:
        """The files that are read."""
        return [os.fspath(path) for path in self.files.paths]

    @property
    def notes(self) -> list[str]:
        """What was left out, as sentences."""
        torn = [f"The last line of {path} is torn and was left out: {_TORN}." for path in self.files.torn_paths]
        return self.files.notes + torn

    def axis_text(self) -> list[str]:
        """How ranks were put on one axis, as lines; none for one rank."""
        return self._axis.text().splitlines() if len(self.offsets) > 1 else []

    def __iter__(self) -> Iterator[Item]:
        run, rank, numbers = self._wanted
        for step in self.files:
            if run in (None, step.run) and rank in (None, step.rank) and (numbers is None or step.step in numbers):
                self.shown["steps"] += 1
                self._check(step)
                if step.rank not in self.offsets:
                    yield self._begin_rank(step.rank)
                yield from step_items(step, self._shift(step), self._tracks, self.path)
        if not self.shown["steps"]:
            held = f"none of its {self.files.steps} steps is asked for" if self.files.steps else "it has no steps yet"
            raise TraceFileError(f"{self.path}: nothing to export: {held}")

    # -- time ----------------------------------------------------------------------------------------------------------

    def _begin_rank(self, rank: int) -> Process:
        headers = self.files.headers
        if not self.offsets:
            self._axis = self._common_axis()
            ranks = [each for each in headers.keys() | self._axis.clocks if self._wanted[1] in (None, each)]
            self._zero = min((self._axis.shift(each) for each in ranks), default=0.0)
        elif rank in headers and rank not in self._axis.clocks:
            self._append_to_axis(min(self.offsets))
        self.offsets[rank] = self._axis.shift(rank) - (self._zero if rank in headers else 0.0)
        if abs(self.offsets[rank]) > LONGEST:
            raise TraceFileError(
                f"{self.path}: the clock of rank {rank} is {abs(self.offsets[rank]) / 86400e6:.0f} days from "
                "that of another rank: they are of several hosts and have no axis in common; export them one by one "
                "with --rank"
            )
        labels = []
        if (header := headers.get(rank)) is not None:
            labels = [f"dbo_greenlet {header.package}"] + ([f"torch {header.torch}"] if header.torch else [])
        return Process(rank + 1, rank, f"rank {rank}", tuple(labels))

    def _common_axis(self) -> CommonAxis:
        headers = self.files.headers
        if self._wanted[1] is not None:
            return axis_of([], ranks=[self._wanted[1]])
        # Where one file holds all ranks, the headers of the others may be further down in it.
        several = len(headers) > 1 or any(header.world > 1 for header in headers.values())
        if several and all(path.is_file() for path in self.files.paths):
            return common_axis(self.files)
        return self._axis_of_origins()

    def _axis_of_origins(self) -> CommonAxis:
        """Of one rank, or of a pipe, which cannot be read a second time for its votes."""
        headers = self.files.headers
        return axis_of([], ranks=headers, origins={rank: h.origin_ns for rank, h in headers.items()})

    def _append_to_axis(self, known: int) -> None:
        """A rank whose header stands behind the steps of others; what lies on the axis already stays, as `known`."""
        before = self._axis.shift(known)
        self._axis = self._axis_of_origins()
        self._zero += self._axis.shift(known) - before

    def _shift(self, step: StepTrace) -> int:
        """Nanoseconds to add to the times of a step, within which no clock drifts by one of them."""
        if step.rank not in self.files.headers:
            return 0
        begin = step.record.begin if step.record is not None and step.record.begin is not None else None
        if begin is None:
            begin = min([each.begin for each in step.slices[:1]] + [each.begin for each in step.gpu[:1]], default=0.0)
        return round((self._axis.shift(step.rank, begin) - self._zero) * 1000)

    def _check(self, step: StepTrace) -> None:
        """Numbers that no run has would make tracks without end."""
        what = f"{self.path}: step {step.step} of run {step.run}"
        if not 0 <= step.rank < FIRST_TRACK - 1:
            raise TraceFileError(f"{what} is of rank {step.rank}, expected 0 to {FIRST_TRACK - 2}")
        for records in (step.slices, step.receives, step.gpu):
            for record in records:
                if not 0 <= record.ubatch < MAX_MICROBATCHES:
                    raise TraceFileError(
                        f"{what}, rank {step.rank} names microbatch {record.ubatch}, "
                        f"expected 0 to {MAX_MICROBATCHES - 1}"
                    )


_TORN = "the run is writing it right now, or died there"
