"""That a profile has no communication, so that nobody takes a report about it for one of a run that communicates."""

from __future__ import annotations

from collections.abc import Sequence

from .attribution import Attribution, attribute
from .kernels import KernelTable
from .launches import Launches, find_launches
from .profile import GRAPH, Profile

__all__ = ["WITH_A_TABLE", "no_communication", "no_communication_note", "some_names"]

WITH_A_TABLE = "; name yours in a TOML file (--kernels FILE)"


def no_communication(found: Attribution) -> str:
    """A clause that says so; `found` has none."""
    text = "no communication in it: none of its kernels is known as one"
    if found.doubtful:
        text += f", though the name of {some_names(found.doubtful)} looks like it"
    return text


def no_communication_note(
    profile: Profile, found: Attribution | None = None, launches: Launches | None = None, *, advice: str = ""
) -> list[str]:
    """A sentence where a profile has no communication; none where it has some, or graphs that may hide it.

    Args:
        profile: what was read.
        found, launches: what is known of it already; default: found out here, by the built-in table.
        advice: what the reader can do, behind the clause: `WITH_A_TABLE` of a command that takes one.
    """
    launches = find_launches(profile) if launches is None else launches
    found = attribute(profile, launches, KernelTable()) if found is None else found
    unseen = launches.hidden_replays or (profile.activities.kind == GRAPH).any()
    if found.communication.any() or unseen:
        return []
    return [f"There is {no_communication(found)}{advice}."]


def some_names(names: Sequence[str]) -> str:
    """The first, cut to what fits into a sentence, and how many more there are."""
    short = [name if len(name) <= 60 else name[:57] + "..." for name in names]
    return short[0] if len(short) == 1 else f"{short[0]} (and {len(short) - 1} more)"
