"""The rules for GPU profiles, under the ids that they have for traces of ours. Needs numpy (the extra `trace`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from .. import intervals
from ..kernels import KernelTable
from ..no_communication import WITH_A_TABLE, no_communication_note
from ..overlap.profile import profile_overlap
from ..profile import KERNEL, Profile
from .checks import Rule
from .engine import Findings
from .findings import Hit, Missing, Report
from .messages import BY_USER, NO_CUTOFF, bytes_text
from .overlap_share import LEAST_HIDDEN
from .profile_events import events_after_yields
from .profile_view import UNWANTED, ProfileView
from .rules import RULES

__all__ = ["PROFILE_RULES", "lint_profile"]

Bools = npt.NDArray[np.bool_]


def lint_profile(
    profile: Profile,
    table: KernelTable | None = None,
    *,
    rules: Sequence[Rule] = RULES,
    cutoff: int | None = None,
    notes: Iterable[str] = (),
) -> Report:
    """Look at a profile.

    Args:
        table: what names mean; default the one built in.
        rules: which rules; those that do not look at profiles say why.
        cutoff: bytes below which a message counts as small; None: what is known of the transport.
        notes: what else to say.
    """
    view = ProfileView(profile, KernelTable() if table is None else table, cutoff)
    found = Findings(rules)
    for rule in rules:
        look = PROFILE_RULES.get(rule.id)
        found.looked(rule, Missing(rule.on_profiles) if look is None else look(view))
    silent = no_communication_note(profile, view.found, view.launches, advice=WITH_A_TABLE)
    ranks = sorted(int(rank) for rank in np.unique(profile.activities.rank))
    about = f"{len(profile.activities)} GPU events; rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return found.report(profile.path, profile.source, about, [*notes, *profile.notes, *silent])


# -- the rules ---------------------------------------------------------------------------------------------------------


def _comm_on_compute(view: ProfileView) -> list[Hit] | Missing:
    """Dispatches and combines on the stream that computes most. Low-latency halves belong there: they only start."""
    activities, found = view.profile.activities, view.found
    if not view.microbatches:
        return Missing(UNWANTED)
    carried = np.array([stage in ("dispatch", "combine") for stage in found.stages])[found.stage]
    suspects = found.communication & ~found.background & carried & (activities.kind == KERNEL)
    hits = []
    for activity in np.flatnonzero(suspects & _on_main_stream(view)):
        at = int(activity)
        stream, name = int(activities.stream[at]), view.name(at)
        what = f"{name} runs on stream {stream}, which computes: the other microbatch's work there waits behind it"
        hits.append(Hit(what, view.place(at), name))
    return hits


def _on_main_stream(view: ProfileView) -> Bools:
    """Of each activity, whether its stream is the one of its GPU that computes longest."""
    activities, compute = view.profile.activities, view.found.compute
    groups, group = view.profile.groups()
    main = np.zeros(len(activities), dtype=bool)
    for number in range(len(groups)):
        mine = group == number
        streams = np.unique(activities.stream[mine & compute])
        if not len(streams):
            continue
        took = [
            intervals.length(intervals.union(activities.begin[those], activities.end[those]))
            for those in (mine & compute & (activities.stream == stream) for stream in streams)
        ]
        main |= mine & (activities.stream == streams[int(np.argmax(took))])
    return main


def _no_overlap(view: ProfileView) -> list[Hit] | Missing:
    found = view.found
    if not view.microbatches:
        return Missing(UNWANTED)
    if not found.communication.any():
        return Missing("no communication in the profile")
    report = profile_overlap(view.profile, view.table)
    # Where bytes fly in the background kernels cannot tell, and where the flights are doubtful nothing can.
    seen, name = (report.kernels, "kernels") if report.in_flight is None else (report.in_flight, "in_flight")
    doubts = [each.why for each in report.unreliable if each.view == name]
    if doubts or seen is None:
        return Missing(f"what is hidden is not known: {doubts[0] if doubts else 'nothing to measure by'}")
    measure = seen.measure
    if measure.hidden is None or measure.hidden >= LEAST_HIDDEN:
        return []
    what = f"of {measure.communication / 1000:.3f} ms of communication compute hides {100 * measure.hidden:.1f} %"
    return [Hit(what, view.place(int(np.flatnonzero(found.communication)[0])))]


def _small_messages(view: ProfileView) -> list[Hit] | Missing:
    """By the sizes that NCCL's kernels have in a profile; a microbatch's share of the unsplit message is one of N.

    NCCL's own cutoff is per rank, and among how many a message was shared a profile does not say.
    """
    activities, found = view.profile.activities, view.found
    sized = np.flatnonzero(found.communication & (found.microbatch >= 0) & (activities.size > 0))
    count = len(np.unique(found.microbatch[found.microbatch >= 0]))
    if not len(sized) or count < 2:
        return Missing("needs communication of microbatches that ranges name, with the size of its messages")
    cutoff = view.cutoff
    if cutoff is None:
        return Missing(NO_CUTOFF.format("in a profile"))
    hits = []
    for activity in map(int, sized):
        size = int(activities.size[activity])
        if size < cutoff <= count * size:
            what = (
                f"{view.name(activity)} carries {bytes_text(size)}; below {bytes_text(cutoff)} {BY_USER}, and unsplit "
                f"it would be {bytes_text(count * size)}"
            )
            hits.append(Hit(what, view.place(activity), view.name(activity)))
    return hits


PROFILE_RULES: dict[str, Callable[[ProfileView], list[Hit] | Missing]] = {
    "event-after-yield": events_after_yields,
    "comm-on-compute": _comm_on_compute,
    "small-message": _small_messages,
    "no-overlap": _no_overlap,
}
