"""The overlap report of a trace of ours: in-flight windows, and the GPU's streams where they were timed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ...errors import TraceFileError
from .. import intervals
from ..idle import Idle, idle_time
from ..kernels import STAGES
from ..notation import is_high_throughput, parse_site
from ..step_columns import StepColumns, Table
from .report import OverlapReport, Unreliable, View, Work, apart, measure, rows_by
from .sums import sum_of_idle, sum_of_views

__all__ = ["trace_overlap"]

# Columns of this length stay in the processor's cache: a fifth less time than with twenty times as many.
ROWS_AT_ONCE = 100_000

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]

_STAGES = ["", *STAGES]
_KERNELS = (
    "communication is where the communication stream is in use, compute where the compute stream is (timing events "
    "around each slice, waits at its begin left out)"
)
_BY_GPU = (
    "communication is from the end of the slice that sends to the end of the slice that receives (where no sibling ran "
    "the receive, to its begin), compute where the compute stream is in use"
)
# A share of compute, above which what cannot be seen in it is too much.
_UNSEEN_SHARE = 0.05
_BY_HOST = "communication is from a send to the end of its receive, compute where a slice runs, both on the host"


def trace_overlap(trace: StepColumns, *, run: str | None = None, rank: int | None = None) -> OverlapReport:
    """Measure a trace.

    Args:
        run: which run of those in the file; default: the first with anything in flight.
        rank: whose steps; default: every rank's.

    Raises:
        TraceFileError: it has no such run or rank, or nothing in it says when communication was under way.
    """
    runs = list(dict.fromkeys(name for name, _, _ in trace.groups))
    chosen = _run_with_communication(trace, runs) if run is None else run
    wanted = np.array([name == chosen and rank in (None, owner) for name, _, owner in trace.groups])
    if not wanted.any():
        ranks = sorted({owner for _, _, owner in trace.groups})
        raise TraceFileError(
            f"{trace.path} has no steps of run {chosen}{'' if rank is None else f' on rank {rank}'}; "
            f"it holds the runs {', '.join(runs)} of the ranks {', '.join(map(str, ranks))}"
        )
    slices, receives, gpu = (_chosen(table, wanted) for table in (trace.slices, trace.receives, trace.gpu))
    if not len(receives) and not gpu.comm.any():
        raise TraceFileError(
            f"{trace.path}: no communication in run {chosen}: no receive was registered and no time of the "
            "communication stream taken, so when bytes were in flight is not known"
        )
    owners = np.array([owner for _, _, owner in trace.groups], dtype=np.int32)
    high = is_high_throughput(trace.sites)
    unreliable: list[Unreliable] = []
    notes = [f"Run {chosen}, {int(wanted.sum())} steps." + _other_runs(runs, chosen)]
    parts = [_measure(trace, part, owners, high, timed=_has_compute(gpu)) for part in _parts(slices, receives, gpu)]
    kernels, idle, in_flight = None, None, None
    if len(gpu):
        kernels = sum_of_views(_KERNELS, [part.kernels for part in parts if part.kernels is not None])
        idle = sum_of_idle([part.idle for part in parts if part.idle is not None])
        if not gpu.comm.any():
            unreliable.append(
                Unreliable(
                    "kernels",
                    "nothing ran on the communication stream: receives by hooks keep it empty while bytes fly, so "
                    "only the windows in flight can tell",
                )
            )
        if unseen := sum(part.unseen for part in parts):
            share = unseen / kernels.measure.compute
            text = (
                f"{unseen / 1000:.3f} ms of compute ({100 * share:.0f} %) are of slices that the host was still "
                "launching, so the stream may have been waiting for it inside them: compute and what it hides are at "
                "most this much"
            )
            if share > _UNSEEN_SHARE:
                unreliable += [Unreliable("kernels", text, at_most=True), Unreliable("idle", text)]
            else:
                notes.append(f"{text}.")
        notes.append(f"The GPU's times lie within {float(gpu.error.max()):.0f} us of their place on the host's axis.")
    if flights := [part.in_flight for part in parts if part.in_flight is not None]:
        in_flight = sum_of_views(_BY_GPU if _has_compute(gpu) else _BY_HOST, flights)
        slices_of = "the GPU's times are of whole slices" if len(gpu) else "a slice on the host stands for compute"
        text = f"{slices_of}, so the wait inside a receive counts as compute: at most this much is hidden"
        unreliable.append(Unreliable("in_flight", text, at_most=True))
    if len(gpu) and (untimed := len(np.setdiff1d(receives.group, gpu.group))):
        notes.append(f"Windows of {untimed} steps are left out, because the GPU's times of these were not taken.")
    if in_flight is None:
        notes.append("No receive was registered with a hook, so there are no windows in flight.")
    if trace.open_receives:
        notes.append(f"{trace.open_receives} receives never were complete and are left out.")
    if trace.torn:
        notes.append("The last line is torn and was left out: the run is writing it right now, or died there.")
    return OverlapReport(
        path=trace.path,
        source="dbo_greenlet",
        gpus=[],
        kernels=kernels,
        in_flight=in_flight,
        idle=idle,
        unreliable=unreliable,
        notes=notes,
    )


def _run_with_communication(trace: StepColumns, runs: list[str]) -> str:
    for table in (trace.receives, trace.gpu.select(trace.gpu.comm)):
        if len(table):
            return trace.groups[int(table.group[0])][0]
    return runs[0]


def _other_runs(runs: list[str], chosen: str) -> str:
    others = [name for name in runs if name != chosen]
    return f" Others in the file: {', '.join(others)}." if others else ""


@dataclass(frozen=True)
class _Site:
    """What the slice that ends at a site computes, and what is in flight behind it, as indices into `_STAGES`."""

    compute: int
    flight: int
    layer: int


def _meaning(site: str, high_throughput: bool) -> _Site:
    parsed = parse_site(site)
    if parsed is None:
        return _Site(0, 0, -1)
    carried = "dispatch" if parsed.stage.endswith("dispatch") else "combine"
    computed = {"dispatch": "attention", "before_dispatch": "attention", "before_combine": "experts"}
    stage = computed.get(parsed.stage, "shared" if high_throughput else "experts")
    return _Site(_STAGES.index(stage), _STAGES.index(carried), parsed.layer)


def _work(trace: StepColumns, table: Table, owners: Ints, high: bool, *, flight: bool, by: Ints) -> Work:
    """Rows of a table as work: `by` is the column of sites that says what they are."""
    meanings = [_meaning(site, high) for site in trace.sites]
    stage = np.array([m.flight if flight else m.compute for m in meanings], dtype=np.int32)
    layer = np.array([m.layer for m in meanings], dtype=np.int32)
    begin = table.begin + table.waited
    return Work(begin, table.end, stage[by], layer[by], table.ubatch, owners[table.group])


def _view(how: str, communication: Work, compute: Work, window: intervals.Spans) -> View:
    return View(
        how=how,
        measure=measure(communication.spans, compute.spans, window, len(communication)),
        by_stage=rows_by("stage", communication, compute, names=_STAGES, unnamed="other"),
        by_layer=rows_by("layer", communication, compute),
        by_microbatch=rows_by("microbatch", communication, compute),
        by_rank=rows_by("rank", communication, compute),
    )


@dataclass(frozen=True)
class _Part:
    """Some steps of a trace: their rows."""

    slices: Table
    receives: Table
    gpu: Table


@dataclass(frozen=True)
class _Measured:
    """What was measured of a part; None where it has none of that. `unseen` is `_Stretches.launched_meanwhile`."""

    kernels: View | None
    idle: Idle | None
    unseen: float
    in_flight: View | None


def _chosen(table: Table, wanted: npt.NDArray[np.bool_]) -> Table:
    # Of a trace with one run, nothing need be copied.
    return table if wanted.all() else table.select(wanted[table.group])


def _parts(slices: Table, receives: Table, gpu: Table) -> Iterator[_Part]:
    """All rows of some steps at a time, of so many steps as have about `ROWS_AT_ONCE` rows."""
    rows = len(slices) + len(receives) + len(gpu)
    groups = 1 + max((int(table.group.max()) for table in (slices, receives, gpu) if len(table)), default=0)
    pieces = min(groups, max(1, round(rows / ROWS_AT_ONCE)))
    cuts = [groups * number // pieces for number in range(pieces + 1)]
    if pieces == 1:
        yield _Part(slices, receives, gpu)
        return
    tables = [_by_group(table) for table in (slices, receives, gpu)]
    for low, high in pairwise(cuts):
        yield _Part(*(table.select(slice(*np.searchsorted(table.group, (low, high)))) for table in tables))


def _by_group(table: Table) -> Table:
    # As a run of one rank writes it, it is in order; ranks that wrote into one file by turns are not.
    if (table.group[1:] >= table.group[:-1]).all():
        return table
    return table.select(np.argsort(table.group, kind="stable"))


def _has_compute(gpu: Table) -> bool:
    return len(gpu) > 0 and not bool(gpu.comm.all())


def _measure(trace: StepColumns, part: _Part, owners: Ints, high: bool, *, timed: bool) -> _Measured:
    kernels, idle, unseen = None, None, 0.0
    if len(part.gpu):
        used = _Stretches(trace, part.gpu, owners, high)
        kernels, idle, unseen = (
            used.view(),
            used.idle(part.slices, trace.replayed),
            used.launched_meanwhile(part.slices),
        )
    in_flight = _windows(trace, part, owners, high, timed) if len(part.receives) else None
    return _Measured(kernels, idle, unseen, in_flight)


class _Stretches:
    """The GPU records: both streams, on one time line."""

    def __init__(self, trace: StepColumns, gpu: Table, owners: Ints, high: bool) -> None:
        _, group = np.unique(gpu.group, return_inverse=True)
        self.gpu = gpu
        self.shift, self.window = apart(group, gpu.begin, gpu.end)
        comm = gpu.comm
        self.communication = _work(trace, gpu.select(comm), owners, high, flight=True, by=gpu.after[comm]).shifted(
            self.shift[comm]
        )
        self.compute = _work(trace, gpu.select(~comm), owners, high, flight=False, by=gpu.site[~comm]).shifted(
            self.shift[~comm]
        )

    def view(self) -> View:
        return _view(_KERNELS, self.communication, self.compute, self.window)

    def idle(self, slices: Table, replayed: set[int]) -> Idle:
        """Gaps of the compute stream. A stretch's work cannot have been launched before its slice began on the host."""
        table = self.gpu.select(~self.gpu.comm)
        began = _on_host(table, slices, slices.begin)
        order = np.argsort(self.compute.begin, kind="stable")
        in_graph = np.isin(table.group, list(replayed))
        # A replay has no slices on the host, and the host is not what it waits for.
        began = np.where(in_graph, -np.inf, began + self.shift[~self.gpu.comm])
        return idle_time(
            self.window, self.compute.spans, self.communication.spans, self.compute.begin[order], began[order],
            (table.waited > 0)[order], np.zeros(len(order), dtype=bool),
        )  # fmt: skip

    def launched_meanwhile(self, slices: Table) -> float:
        """Microseconds of compute in which the host still ran the slice, and so may not have launched all of it."""
        table = self.gpu.select(~self.gpu.comm)
        until = np.nan_to_num(_on_host(table, slices, slices.end), nan=-np.inf)
        return float(np.maximum(np.minimum(table.end, until) - table.begin - table.waited, 0.0).sum())


def _on_host(stretches: Table, slices: Table, times: Floats) -> Floats:
    """What `times` has for the slice of each stretch on the host; NaN where the trace does not have the slice."""
    found = _place(stretches, slices)
    out = np.full(len(stretches), np.nan)
    out[found >= 0] = times[found[found >= 0]]
    return out


def _place(wanted: Table, among: Table) -> npt.NDArray[np.int64]:
    """The row of the same step, microbatch and slice for each; -1 where there is none."""
    # Fewer than a thousand microbatches, and two million slices of one.
    keys, own = (
        (table.group.astype(np.int64) << 31) + (table.ubatch.astype(np.int64) << 21) + table.slice
        for table in (among, wanted)
    )
    if not len(keys):
        return np.full(len(own), -1, dtype=np.int64)
    order = np.argsort(keys, kind="stable")
    found = order[np.minimum(np.searchsorted(keys[order], own), len(order) - 1)]
    return np.where(keys[found] == own, found, -1)


def _on_gpu(receives: Table, slices: Table, stretches: Table) -> Table:
    """The windows on the GPU's time axis, as far as its times show them.

    A window's own times are those of the host, which runs ahead of the GPU. A send is the last thing of its slice and a
    sibling's receive the last but one, up to the shared expert. A receive of one's own comes first in the slice, and
    the wait inside it is not seen.
    """
    order = np.argsort(slices.group, kind="stable")
    first = np.searchsorted(slices.group[order], receives.group)
    behind = np.searchsorted(slices.group[order], receives.group, side="right")

    def stretch(decision: Ints) -> npt.NDArray[np.int64]:
        at = first + decision
        known = (decision >= 0) & (at < behind)
        out = np.full(len(receives), -1, dtype=np.int64)
        out[known] = _place(slices.select(order[at[known]]), stretches)
        return out

    sent, ran = stretch(receives.sent_in), stretch(receives.ran_in)
    known = (sent >= 0) & (ran >= 0)
    sent, ran, kept = sent[known], ran[known], receives.select(known)
    end = np.where(kept.alone, stretches.begin[ran] + stretches.waited[ran], stretches.end[ran])
    return replace(kept, begin=stretches.end[sent], end=end)


def _windows(trace: StepColumns, part: _Part, owners: Ints, high: bool, timed: bool) -> View:
    """Windows in flight, over the GPU's compute where it was timed, over the host's slices elsewhere."""
    receives, slices = part.receives, part.slices
    compute = part.gpu.select(~part.gpu.comm) if timed else slices
    # Steps with windows only: a step that was not split has nothing in flight, and its compute hides nothing.
    compute = compute.select(np.isin(compute.group, receives.group))
    if timed:
        receives = _on_gpu(receives, slices, compute)
    _, group = np.unique(np.concatenate((receives.group, compute.group)), return_inverse=True)
    begin, end = (np.concatenate((getattr(receives, name), getattr(compute, name))) for name in ("begin", "end"))
    shift, window = apart(group, begin, end)
    count = len(receives)
    flights = _work(trace, receives, owners, high, flight=True, by=receives.site).shifted(shift[:count])
    computed = _work(trace, compute, owners, high, flight=False, by=compute.site).shifted(shift[count:])
    return _view(_BY_GPU if timed else _BY_HOST, flights, computed, window)
