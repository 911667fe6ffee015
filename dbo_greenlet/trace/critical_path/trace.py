"""The critical paths of a trace of ours: every step of a run, and one of them in full."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...errors import TraceFileError
from ..clocks.offsets import common_axis
from ..files import AnyPath, TraceFiles
from ..reader import StepTrace
from ..schema import HeaderRecord
from .notes import not_known, notes_of
from .ranks import StepFlights, late_ranks, step_flights
from .report import PERCENT, PathReport, StepPath, added_up, measure_path, typical
from .steps import StepGraph, graph_of_step, has_path

__all__ = ["trace_path"]

# More steps than this are thinned out: a step of 480 slices takes 30 ms.
MOST_STEPS = 1000


def trace_path(
    files: Sequence[AnyPath] | AnyPath,
    *,
    run: str | None = None,
    rank: int | None = None,
    step: int | None = None,
    every: int | None = None,
    percent: Sequence[float] = PERCENT,
) -> PathReport:
    """Find the paths of the steps of a run.

    The files are read twice, so that no more than a step of them is held: the second time up to the step that is shown.

    Args:
        files: the trace: a file, a folder, or the files of several ranks (`TraceFiles`).
        run: which run; default: the first that has a step with slices.
        rank: whose steps; default: every rank's.
        step: only this one; default: all, and the one of median length is shown.
        every: measure each so-manieth step, from the first on; default: all, and of more than 1,000 as few as leaves at
            least 500.
        percent: by how much to shorten, from 0 to 100.

    Raises:
        TraceFileError: as `TraceFiles`; there is no such run, rank or step, or none with anything but its length.
    """
    stream = TraceFiles(files, rank=rank, quick=True)
    measured = _Measured(every, percent)
    seen: set[tuple[str, int, int]] = set()
    left_out = 0
    for each in stream:
        seen.add((each.run, each.rank, each.step))
        if (run is not None and each.run != run) or rank not in (None, each.rank) or step not in (None, each.step):
            continue
        if not has_path(each):
            left_out += run in (None, each.run) and _ran_split(each)
            continue
        run = each.run
        if measured.wants(each.rank):
            measured.add(each, _graph(each, stream.headers), _computes(stream.headers, each.rank))
    found = measured.paths
    if not found:
        raise TraceFileError(_nothing(stream.path, seen, run, rank, step))
    chosen = found[typical(found)]
    shown, lanes = _in_full(files, chosen, percent)
    ranks = sorted({each.rank for each in found})
    count = f"{len(found)} steps" if len(found) > 1 else f"step {found[0].step}"
    others = sorted({name for name, _, _ in seen if name != run})
    notes = [*stream.notes, *measured.notes()]
    if late := measured.late_ranks(files):
        notes.append(late)
    if left_out:
        notes.append(f"Left out, as they failed, were captured or have no times of the GPU: {left_out} of the steps.")
    if others:
        notes.append(f"Other runs in the file: {', '.join(others)} (--run).")
    if stream.torn:
        notes.append("The last line is torn and was left out: the run is writing it right now, or died there.")
    total = added_up(found)
    if total.contradictions:
        notes.append(
            f"{total.contradictions} connections were left out: by the recorded times the later end comes first, as "
            "the clocks of host and GPU do not fit together better."
        )
    return PathReport(
        path=stream.path,
        source="dbo_greenlet",
        what=f"run {run}, {count} of rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}",
        steps=found,
        total=total,
        shown=shown,
        lanes=lanes,
        notes=notes,
    )


def _graph(step: StepTrace, headers: dict[int, HeaderRecord]) -> StepGraph:
    settings: dict[str, Any] = _header(headers, step.rank).settings
    blocks = settings.get("all2all") == "deepep_ht"
    return graph_of_step(step, computes=_computes(headers, step.rank), host_blocks=blocks)


def _header(headers: dict[int, HeaderRecord], rank: int) -> HeaderRecord:
    return headers.get(rank) or next(iter(headers.values()))


def _computes(headers: dict[int, HeaderRecord], rank: int) -> bool:
    """Whether the host computes by itself: by the job's settings, otherwise by the torch that it had."""
    header = _header(headers, rank)
    if (device := header.settings.get("device")) is not None:
        return bool(device == "cpu")
    return not header.torch or header.torch.endswith("+cpu")


def _ran_split(step: StepTrace) -> bool:
    return bool(step.slices or step.gpu) or (step.record is not None and step.record.split)


def _in_full(
    files: Sequence[AnyPath] | AnyPath, wanted: StepPath, percent: Sequence[float]
) -> tuple[StepPath, dict[str, list[tuple[float, float]]]]:
    """The step once more, with its pieces and with what else ran in it."""
    stream = TraceFiles(files, rank=wanted.rank, quick=True)
    key = (wanted.run, wanted.step, wanted.rank)
    for each in stream:
        if (each.run, each.step, each.rank) == key and has_path(each):
            graph = _graph(each, stream.headers)
            run, step, rank = key
            shown = measure_path(graph.graph, graph.end, run=run, step=step, rank=rank, percent=percent, pieces=True)
            return shown, _lanes(each, graph.timed)
    raise TraceFileError(f"{stream.path}: step {wanted.step} of run {wanted.run} is gone; something else writes to it")


def _lanes(step: StepTrace, timed: bool) -> dict[str, list[tuple[float, float]]]:
    lanes: dict[str, list[tuple[float, float]]] = {}
    for host in step.slices:
        lanes.setdefault("host" if timed else f"host {host.ubatch}", []).append((host.begin, host.end))
    for stream in ("compute", "comm"):
        for stretch in sorted((each for each in step.gpu if each.stream == stream), key=lambda each: each.ubatch):
            name = f"{stream} {stretch.ubatch}"
            lanes.setdefault(name, []).append((stretch.begin + stretch.waited, stretch.end))
    if not timed:
        windows = [(window.sent, window.at) for window in step.receives if window.at is not None]
        if windows:
            lanes["in flight"] = sorted(windows)
    return lanes


class _Measured:
    """The paths of the steps that are measured, and what their graphs cannot know."""

    def __init__(self, every: int | None, percent: Sequence[float]) -> None:
        self._thins = every is None
        self._every = every or 1
        self._percent = percent
        self._seen: Counter[int] = Counter()  # by rank
        # (how-manieth of its rank, path, what is not known of it, flights)
        self._kept: list[tuple[int, StepPath, dict[str, int], StepFlights]] = []

    @property
    def paths(self) -> list[StepPath]:
        return [path for _, path, _, _ in self._kept]

    def late_ranks(self, files: Sequence[AnyPath] | AnyPath) -> str | None:
        """What is said of ranks that were late for the others' receives; None for one rank, or without such flights."""
        flights = [entry for _, _, _, entry in self._kept]
        if len({entry.rank for entry in flights}) < 2 or not any(entry.flights for entry in flights):
            return None
        axis = common_axis(files)
        if axis.problem is not None:
            return f"Whether flights waited for a late rank is not known: {axis.problem}"
        found = late_ranks(flights, axis)
        if not found.flights:
            return None
        return (
            f"Of the {found.flights:.1f} us of flights on the paths {found.late:.1f} us "
            f"({100 * found.late / found.flights:.0f} %) had passed when the last rank's sending slice ended: a rank "
            "that was late, and not the wire."
        )

    def wants(self, rank: int) -> bool:
        """Whether the next step of a rank is one to measure."""
        self._seen[rank] += 1
        return (self._seen[rank] - 1) % self._every == 0

    def add(self, step: StepTrace, graph: StepGraph, computes: bool) -> None:
        key = {"step": step.step, "rank": step.rank}
        path = measure_path(graph.graph, graph.end, run=step.run, **key, percent=self._percent, pieces=True)
        flights = step_flights(step, path)
        path = replace(path, pieces=[])
        self._kept.append((self._seen[step.rank] - 1, path, not_known(graph, computes), flights))
        if self._thins and len(self._kept) > MOST_STEPS:
            self._every *= 2
            self._kept = [entry for entry in self._kept if entry[0] % self._every == 0]

    def notes(self) -> list[str]:
        counts: Counter[str] = Counter()
        for _, _, unknown, _ in self._kept:
            counts.update(unknown)
        if self._every == 1:
            return notes_of(counts)
        some = f"{len(self._kept)} of {sum(self._seen.values())} steps"
        return [f"Measured: {some}, of each rank one in {self._every} (--every 1: all of them).", *notes_of(counts)]


def _nothing(path: str, seen: set[tuple[str, int, int]], run: str | None, rank: int | None, step: int | None) -> str:
    if not seen:
        return f"{path}: the trace has no steps (yet)"
    asked = [f"step {step}"] if step is not None else ["steps"]
    asked += [f"of run {run}"] if run is not None else []
    asked += [f"on rank {rank}"] if rank is not None else []
    wanted = [key for key in seen if run in (None, key[0]) and rank in (None, key[1]) and step in (None, key[2])]
    if wanted:
        count = f"{len(wanted)} steps" if len(wanted) > 1 else "step"
        return (
            f"{path}: of its {count} none has slices or times of the GPU to find a path in; steps that were not split "
            "have neither"
        )
    runs, ranks = sorted({key[0] for key in seen}), sorted({key[1] for key in seen})
    held = f"the runs {', '.join(runs)} of the ranks {', '.join(map(str, ranks))}"
    return f"{path} has no {' '.join(asked)}; it holds {held}"
