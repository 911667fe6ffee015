"""What a profile of unsplit steps says of the stages of a layer. Needs the extra `trace`.

Everything is per layer, by counting dispatches, so it does not matter how many steps the profile holds, or whether it
begins in the middle of one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..errors import TraceFileError
from ..trace.attribution import Attribution, attribute
from ..trace.kernels import KernelTable
from ..trace.launches import Launches, find_launches
from ..trace.profile import GRAPH, Profile
from .measured import UnsplitStep

__all__ = ["all2all_of_profile", "unsplit_of_profile"]

Bools = npt.NDArray[np.bool_]

_QUICK = 0.1
# What a kernel's name has in it -> the all-to-all; the first that fits.
_ALL2ALLS = {"internode_ll": "deepep_ll", "deep_ep": "deepep_ht", "nccl": "stream"}
_STAGES = ("attention", "experts", "shared")


def unsplit_of_profile(
    profile: Profile, tokens: int, table: KernelTable | None = None, layers: int | None = None
) -> tuple[UnsplitStep, list[str]]:
    """The measurement, and notes on how it was made.

    Args:
        profile: of unsplit steps.
        tokens: of a rank in each of these steps; a profile does not say.
        table: names of kernels.
        layers: with experts, of the model; with them it is known how many steps the profile holds, and, if these are
            two or more, how long one takes.

    Raises:
        TraceFileError: it holds microbatches, whole graphs, or no dispatch by which to count layers; names the file.
    """
    table = KernelTable() if table is None else table
    launches = find_launches(profile)
    found = attribute(profile, launches, table)
    _refuse(profile, found)
    us = profile.activities.end - profile.activities.begin
    names = {name: number for number, name in enumerate(found.stages)}

    def of(stage: str, which: Bools) -> Bools:
        here: Bools = which & (found.stage == names.get(stage, -1))
        return here

    layout = _layout(profile, table)
    dispatches, combines = (of(stage, found.communication & ~layout) for stage in ("dispatch", "combine"))
    notes = []
    if not dispatches.any() and not combines.any():
        dispatches, combines = _in_turn(profile, found.communication & ~layout)
        notes.append("Its messages have no stage by their names; they are taken for dispatch and combine in turn.")
    halves = _launches_a_message(dispatches, combines)
    passed = int(dispatches.sum()) / halves
    if not passed:
        raise TraceFileError(f"{profile.path}: no dispatch in it by which to count layers; name yours (--kernels FILE)")
    stages = {
        "dispatch": _message(us, dispatches, halves),
        "combine": _message(us, combines, halves),
        "compute": float(us[found.compute].sum()) / passed,
    }
    named = {stage: float(us[of(stage, found.compute)].sum()) / passed for stage in _STAGES}
    notes.append(_layers(passed, layers))
    if sum(named.values()) > 0.9 * stages["compute"] and all(named[stage] for stage in ("attention", "experts")):
        stages |= {stage: value for stage, value in named.items() if value}
    else:
        notes.append("Most compute has no stage by its name, so all stages are corrected by one factor.")
    host = _host_of_a_layer(profile, launches, dispatches, halves)
    if host is not None:
        notes.append(
            f"The host takes {host:.0f} us to launch a layer while it is profiled, which slows it down; better give a "
            f"step that was timed without a profiler, too (--unsplit {tokens}=MS)."
        )
    step = _step(profile, dispatches, passed, layers)
    return UnsplitStep(tokens, step, layer_host=host, stages=stages), notes


def _layers(passed: float, layers: int | None) -> str:
    """How much was profiled. Passes through a layer are of several steps, and of several ranks."""
    said = f"{passed:g} passes through a layer in the profile, by its dispatches"
    if layers is None:
        return f"{said}."
    if passed % layers:
        return f"{said}, which is no whole number of steps of {layers} layers with experts; is it of that model?"
    return f"{said}: {passed / layers:g} of {layers} layers with experts."


def _step(profile: Profile, dispatches: Bools, passed: float, layers: int | None) -> float | None:
    """From the first kernel to the last one, by the number of steps; None where that is not known, or 1.

    Of one step nothing says what lies before its first kernel; of several, the gaps between them do.
    """
    ranks = np.unique(profile.activities.rank[dispatches])
    if not layers or passed % (layers * len(ranks)) or passed < 2 * layers * len(ranks):
        return None
    windows = []
    for rank in ranks:
        mine = profile.activities.rank == rank
        windows.append(float(profile.activities.end[mine].max() - profile.activities.begin[mine].min()))
    return float(np.median(windows)) / (passed / (layers * len(ranks)))


def all2all_of_profile(profile: Profile) -> str | None:
    """What carried its messages, by the names of its kernels; None where they say nothing."""
    names = [profile.names[int(number)] for number in np.unique(profile.activities.name)]
    for part, kind in _ALL2ALLS.items():
        if any(part in name.lower() for name in names):
            return kind
    return None


def _refuse(profile: Profile, found: Attribution) -> None:
    if (profile.activities.kind == GRAPH).any():
        raise TraceFileError(
            f"{profile.path}: graph replays are recorded in one piece, so their stages are not known; record with "
            "nsys profile --cuda-graph-trace=node"
        )
    microbatches = np.unique(found.microbatch[found.microbatch >= 0])
    if len(microbatches) > 1:
        raise TraceFileError(
            f"{profile.path}: its steps are split into {len(microbatches)} microbatches; an estimate starts from "
            "unsplit steps"
        )


def _layout(profile: Profile, table: KernelTable) -> Bools:
    """What only prepares a message."""
    layout = np.array([table.classify(name).operation == "layout" for name in profile.names], dtype=bool)
    return layout[profile.activities.name]


def _in_turn(profile: Profile, messages: Bools) -> tuple[Bools, Bools]:
    """Every other message of a GPU, and the rest."""
    group = profile.groups()[1]
    dispatches = np.zeros(len(messages), dtype=bool)
    for number in np.unique(group[messages]):
        dispatches[np.flatnonzero(messages & (group == number))[::2]] = True
    return dispatches, messages & ~dispatches


def _message(us: npt.NDArray[np.float64], which: Bools, halves: int) -> float:
    """What one message takes where nobody has to be waited for.

    A kernel that receives stands as long as the other ranks are late, which is no property of the wire and does not
    double when a step is split; so the quickest tenth speaks for all.
    """
    lengths = us[which]
    if not len(lengths):
        return 0.0
    if halves == 1:
        return float(np.quantile(lengths, _QUICK))
    even = len(lengths) - len(lengths) % 2
    return float(np.quantile(lengths[:even:2] + lengths[1:even:2], _QUICK))


def _launches_a_message(dispatches: Bools, combines: Bools) -> int:
    """2 where a send and a receive are launched apart, as low latency does, and stand beside each other; else 1."""
    is_dispatch = dispatches[dispatches | combines]
    followed = int((is_dispatch[1:] & is_dispatch[:-1]).sum())
    return 2 if 2 * followed >= int(is_dispatch.sum()) > 1 else 1


def _host_of_a_layer(profile: Profile, launches: Launches, dispatches: Bools, halves: int) -> float | None:
    """Between the launches of one layer's dispatch and the next one's: the median over layers and ranks."""
    launched = np.flatnonzero(dispatches & (launches.call >= 0) & ~launches.in_graph)
    apart: list[float] = []
    for rank in np.unique(profile.activities.rank[launched]):
        mine = launched[profile.activities.rank[launched] == rank]
        begins = np.sort(profile.calls.begin[launches.call[mine]])[::halves]
        apart += np.diff(begins).tolist()
    return float(np.median(apart)) if apart else None
