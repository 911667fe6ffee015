"""The overlap report of a profile (torch.profiler, Nsight Systems)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...errors import TraceFileError
from .. import intervals
from ..attribution import Attribution, attribute
from ..idle import idle_time, launch_delay
from ..kernels import STAGES, KernelTable
from ..launches import Launches, find_launches
from ..no_communication import WITH_A_TABLE, no_communication, some_names
from ..profile import GRAPH, KERNEL, Profile
from ..profile_steps import steps_of
from .report import OverlapReport, Unreliable, View, Work, apart, measure, rows_by

__all__ = ["profile_overlap"]

Bools = npt.NDArray[np.bool_]

_KERNELS = "communication is where a communication kernel or a peer copy runs, compute where any other kernel runs"
_IN_FLIGHT = (
    "a low-latency send and the next launch of the same kernel on that GPU make one flight, from the begin of the "
    "first to the end of the second (as receive hooks launch them; whether there are hooks a profile cannot tell); "
    "other communication kernels are in flight while they run"
)


# A profile that begins or ends during a replay lacks that one; more than this share of them is another matter.
_UNSEEN_SHARE = 0.01
# Of the window, above which it is said what the profiler itself does to it.
_LATE_SHARE = 0.2


def profile_overlap(
    profile: Profile, table: KernelTable | None = None, *, needs_communication: bool = True
) -> OverlapReport:
    """Measure a profile.

    Raises:
        TraceFileError: it has no communication, by the table, where that is needed; names the file.
    """
    table = KernelTable() if table is None else table
    activities = profile.activities
    launches = find_launches(profile)
    found = attribute(profile, launches, table)
    unreliable = _graphs_unseen(profile, launches)
    if needs_communication and not found.communication.any() and not unreliable:
        raise TraceFileError(f"{profile.path}: {no_communication(found)}{WITH_A_TABLE}")
    groups, group = profile.groups()
    shift, window = apart(group, activities.begin, activities.end)
    # A process with several GPUs has a rank on each, which nothing names; then the rows are by GPU.
    rank = activities.rank if len(groups) == len({rank for rank, _ in groups}) else group
    work = Work(activities.begin, activities.end, found.stage, found.layer, found.microbatch, rank).shifted(shift)
    communication, compute = work.select(found.communication), work.select(found.compute)
    kernels = _view(_KERNELS, communication, compute, window, found.stages)
    in_flight = None
    if found.background.any():
        in_flight = _view(_IN_FLIGHT, _flights(work, found, group), compute, window, found.stages)
        unreliable += _background(found, in_flight)
    notes = list(profile.notes)
    computing = np.flatnonzero(found.compute)
    computing = computing[np.argsort(work.begin[computing], kind="stable")]
    launched = np.full(len(activities), np.nan)
    known = launches.call >= 0
    launched[known] = profile.calls.end[launches.call[known]]
    idle = idle_time(
        window, compute.spans, communication.spans, work.begin[computing], (launched + shift)[computing],
        launches.waits[computing], launches.in_graph[computing],
    )  # fmt: skip
    alone = known & ~launches.in_graph & (activities.kind == KERNEL)
    delay = launch_delay(profile.calls.begin[launches.call[alone]], activities.begin[alone])
    unreliable += _launches_unseen(profile, found, launches, delay.early if delay else 0)
    notes += _notes(profile, found, launches)
    notes += _steps_and_host(profile, idle.host / intervals.length(window) if len(profile.calls) else 0.0)
    return OverlapReport(
        path=profile.path,
        source=profile.source,
        gpus=profile.gpus,
        kernels=kernels,
        in_flight=in_flight,
        idle=idle,
        launch_delay=delay,
        libraries=found.libraries,
        unreliable=unreliable,
        notes=notes,
    )


def _view(how: str, communication: Work, compute: Work, window: intervals.Spans, stages: list[str]) -> View:
    order = {stage: place for place, stage in enumerate(STAGES)}
    by_stage = rows_by("stage", communication, compute, names=stages, unnamed="other")
    by_rank = rows_by("rank", communication, compute)
    return View(
        how=how,
        measure=measure(communication.spans, compute.spans, window, len(communication)),
        by_stage=sorted(by_stage, key=lambda row: (order.get(str(row.key), len(order)), row.key == "other")),
        by_layer=rows_by("layer", communication, compute),
        by_microbatch=rows_by("microbatch", communication, compute),
        by_rank=by_rank if len(by_rank) > 1 else [],
    )


def _flights(work: Work, found: Attribution, group: npt.NDArray[np.int64]) -> Work:
    """Communication in flight: low-latency launches in pairs, and every other communication kernel as it ran."""
    background = np.flatnonzero(found.communication & found.background)
    background = background[np.argsort(work.begin[background], kind="stable")]
    pairs: list[tuple[int, int]] = []
    at = 0
    while at < len(background):
        first = background[at]
        second = background[at + 1] if at + 1 < len(background) else first
        if work.stage[second] != work.stage[first] or group[second] != group[first]:
            second = first
        pairs.append((int(first), int(second)))
        at += 1 if second == first else 2
    first, second = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    flights = work.select(first)
    flights = Work(flights.begin, work.end[second], flights.stage, flights.layer, flights.microbatch, flights.rank)
    others = work.select(found.communication & ~found.background)
    return Work(
        *(np.concatenate((getattr(flights, name), getattr(others, name))) for name in Work.__dataclass_fields__)
    )


def _graphs_unseen(profile: Profile, launches: Launches) -> list[Unreliable]:
    out = []
    if pieces := int((profile.activities.kind == GRAPH).sum()):
        out.append(
            f"{pieces} graph replays are recorded in one piece, so what ran in them is not known; record with "
            "nsys profile --cuda-graph-trace=node"
        )
    elif launches.hidden_replays > _UNSEEN_SHARE * launches.replays:
        out.append(
            f"{launches.hidden_replays} of {launches.replays} graph replays have no kernels in the profile, so what "
            "ran in them is not known; profile eager steps, or with a driver and profiler that record graph nodes"
        )
    return [Unreliable("kernels", text) for text in out]


def _background(found: Attribution, in_flight: View) -> list[Unreliable]:
    count = int((found.communication & found.background).sum())
    out = [
        Unreliable(
            "kernels",
            f"{count} kernels are of a low-latency all-to-all, where nothing runs on the GPU while bytes fly: by "
            "kernels communication is only the sending and the receiving, and what hides the flight does not count",
        )
    ]
    flights = in_flight.measure.events - (int(found.communication.sum()) - count)
    if 2 * flights != count:
        out.append(
            Unreliable(
                "in_flight",
                f"the {count} low-latency launches do not come in pairs of a send and a receive, as receive hooks "
                "launch them; without hooks flights cannot be told from a profile, only from a trace of ours",
            )
        )
    return out


def _launches_unseen(profile: Profile, found: Attribution, launches: Launches, early: int) -> list[Unreliable]:
    kernels = int(found.compute.sum())
    unseen = int((found.compute & (launches.call < 0)).sum())
    out: list[Unreliable] = []
    if not len(profile.calls):
        why = "the profile does not show the host's launches, so why the GPU was idle is not known"
        out.append(Unreliable("idle", why))
    elif unseen > 0.05 * kernels:
        out.append(Unreliable("idle", f"the launches of {unseen} of {kernels} compute kernels are not in the profile"))
    if early > 0.01 * len(profile.activities):
        text = f"{early} events begin before their launch: the clocks of host and GPU differ"
        out += [Unreliable(view, text) for view in ("idle", "launch_delay")]
    return out


def _notes(profile: Profile, found: Attribution, launches: Launches) -> list[str]:
    notes = [f"Not in the profile: {what}." for what in profile.missing]
    if found.doubtful:
        notes.append(
            f"Counted as compute, though the name looks like communication: {some_names(found.doubtful)}; "
            "a TOML file (--kernels) can say otherwise."
        )
    if fused := int(found.fused.sum()):
        notes.append(f"{fused} kernels compute and communicate in one; they count as compute, and hide themselves.")
    if in_graph := int(launches.in_graph.sum()):
        notes.append(
            f"{in_graph} events ran in graph replays, whose launches tell no layer or microbatch, and whose waits are "
            "the graph's own."
        )
    if 0 < launches.hidden_replays <= _UNSEEN_SHARE * launches.replays:
        notes.append(f"{launches.hidden_replays} of {launches.replays} graph replays have no kernels in the profile.")
    if not found.compute.any():
        notes.append("No compute kernel is in the profile.")
    return notes


def _steps_and_host(profile: Profile, host_late: float) -> list[str]:
    notes = []
    if (steps := max((len(steps_of(profile, int(rank))) for rank in np.unique(profile.ranges.rank)), default=0)) > 1:
        notes.append(f"The profile is of {steps} steps, by its ranges; every time is of all of them together.")
    if host_late > _LATE_SHARE:
        notes.append(
            f"For {100 * host_late:.0f} % of the time no compute ran because the host was late; a profiler makes each "
            "call of the host slower, so without one it is less."
        )
    return notes
