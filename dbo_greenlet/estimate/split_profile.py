"""How long the split steps of a profile take, to see the error of an estimate. Needs the extra `trace`.

A profile does not say where a step begins, but its layers repeat: from a dispatch to the same one of the next step is
one step, wherever the profile begins. So it needs two steps one after the other; what was not split between them ends
the row. The steps lie in a profile as the profiler left them, which slows their host down.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import numpy as np
import numpy.typing as npt

from ..errors import TraceFileError
from ..trace.attribution import Attribution, attribute
from ..trace.kernels import KernelTable
from ..trace.launches import find_launches
from ..trace.profile import GRAPH, Profile
from .from_profile import all2all_of_profile
from .from_trace import SplitStep

__all__ = ["split_of_profile"]

Bools = npt.NDArray[np.bool_]

_POLICY = "round_robin"


def split_of_profile(
    profile: Profile, tokens: int, layers: int, carrier: str, table: KernelTable | None = None
) -> tuple[SplitStep, list[str]]:
    """The median over steps and ranks, and notes on how it was found.

    Args:
        profile: of split steps, whose microbatches its ranges name.
        tokens: of a rank in each of these steps; a profile does not say.
        layers: with experts, of the model.
        carrier: what carried the microbatches; a profile does not say.
        table: names of kernels.

    Raises:
        TraceFileError: it holds whole graphs, no microbatches, another number of layers, or too little to tell a step's
            length; names the file.
    """
    table = KernelTable() if table is None else table
    if (profile.activities.kind == GRAPH).any():
        raise TraceFileError(
            f"{profile.path}: graph replays are recorded in one piece, so their steps are not known; record with nsys "
            "profile --cuda-graph-trace=node"
        )
    found = attribute(profile, find_launches(profile), table)
    microbatches = np.unique(found.microbatch[found.microbatch >= 0])
    if len(microbatches) < 2:
        raise TraceFileError(
            f"{profile.path}: its kernels are not told apart by microbatches, so it holds no split step as far as it "
            "says; --split takes a profile whose ranges name them (or a trace of ours)"
        )
    # A low-latency message is launched twice: its send, and what its hook receives by.
    launches = 2 if all2all_of_profile(profile) == "deepep_ll" else 1
    a_step = launches * len(microbatches) * layers
    rows = list(_rows(profile, found, table))
    known = {int(found.layer[each]) for row in rows for each in row} - {-1}
    if known and len(known) != layers:
        raise TraceFileError(
            f"{profile.path}: the dispatches of its split steps are in {len(known)} layers, the model has {layers} "
            "with experts; estimate with --model and --layers as it was profiled, or record whole steps"
        )
    begins = profile.activities.begin
    lengths = [length for row in rows for length in _lengths([float(begins[each]) for each in row], a_step)]
    if not lengths:
        raise TraceFileError(
            f"{profile.path}: no two split steps of {layers} layers with experts one after the other, so how long one "
            "takes is not known; record more steps, or is it of another model?"
        )
    step = SplitStep(tokens, len(microbatches), _POLICY, carrier, float(np.median(lengths)), len(lengths))
    return step, [
        f"The split steps are of a profile: from a dispatch to the same one of the next step, taken for {_POLICY} and "
        f"{carrier} (--carrier), and with what the profiler adds to the host's time."
    ]


def _rows(profile: Profile, found: Attribution, table: KernelTable) -> Iterator[list[int]]:
    """The dispatches of each rank in order of their begins, as far as no unsplit one stands between them."""
    names = {name: number for number, name in enumerate(found.stages)}
    layout = np.array([table.classify(name).operation == "layout" for name in profile.names], dtype=bool)
    activities = profile.activities
    dispatches: Bools = found.communication & ~layout[activities.name] & (found.stage == names.get("dispatch", -1))
    for rank in np.unique(activities.rank[dispatches]):
        mine = np.flatnonzero(dispatches & (activities.rank == rank))
        mine = mine[np.argsort(activities.begin[mine], kind="stable")]
        for split, row in groupby(mine.tolist(), key=lambda each: bool(found.microbatch[each] >= 0)):
            if split:
                yield list(row)


def _lengths(begins: list[float], a_step: int) -> list[float]:
    """From one to the one a step later, without counting a step twice."""
    return [begins[at] - begins[at - a_step] for at in range(a_step, len(begins), a_step)]
