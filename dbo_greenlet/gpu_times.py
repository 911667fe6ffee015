"""What reading a GPU timeline gives: when each slice of a step ran, and the same as records of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .errors import DboError
from .trace.schema import GpuRecord

__all__ = ["Anchor", "GpuTimelineError", "SliceTimes", "Stretch", "as_records"]


class GpuTimelineError(DboError):
    """The times of a step were asked for that did not run, or a stream is not part of the capture."""


@dataclass(frozen=True)
class Stretch:
    """A slice's time on one stream, in microseconds from the step's first event, which is on the compute stream.

    Attributes:
        begin, end: when the stream came to the slice's first event and to its last.
        waited: how much of it, from `begin` on, it waited for the other stream; 0.0 where it did not.
    """

    begin: float
    end: float
    waited: float = 0.0


@dataclass(frozen=True)
class SliceTimes:
    """When one slice ran on the GPU.

    Attributes:
        microbatch, number, decision, begin_site, end_site: as in `slice_bracket.Slice`.
        compute: its time on the compute stream.
        comm: its time on the comm stream; None where it did not use it.
    """

    microbatch: int
    number: int
    decision: int
    begin_site: str
    end_site: str
    compute: Stretch
    comm: Stretch | None


@dataclass(frozen=True)
class Anchor:
    """Where a step lies on the host's clock.

    Attributes:
        begin_ns: the clock's nanoseconds at the step's first event.
        error: microseconds by which that may be off, to either side.
    """

    begin_ns: float
    error: float


def as_records(
    times: Sequence[SliceTimes], *, step: int, rank: int = 0, run: str = "dbo", begin: float = 0.0, error: float = 0.0
) -> list[GpuRecord]:
    """One record per slice and stream that it used, in the order of the slices.

    Args:
        times: what `StepEvents.read` gave.
        step, rank, run: the step's identity.
        begin: microseconds on the trace's axis at the step's first event.
        error: microseconds by which that may be off.
    """
    out = []
    for it in times:
        for stream, stretch in (("compute", it.compute), ("comm", it.comm)):
            if stretch is not None:
                out.append(
                    GpuRecord(
                        step=step,
                        rank=rank,
                        run=run,
                        ubatch=it.microbatch,
                        slice=it.number,
                        site=it.end_site,
                        stream=stream,
                        begin=round(begin + stretch.begin, 3),
                        end=round(begin + stretch.end, 3),
                        waited=round(stretch.waited, 3),
                        after=it.begin_site,
                        error=round(error, 1),
                    )
                )
    return out
