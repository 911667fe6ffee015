"""Law 5 across ranks: every rank of a step takes the same decisions, and where one does not, who and where first.

What is compared after each step is the schedule's hash: one small all-gather. Only where the hashes differ do the ranks
exchange what they did, in three more. Every rank sees the same hashes, so all of them do, and all raise the same error.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from .errors import BrokenGroupError, RankFailedError, ScheduleDivergence
from .schedule import Schedule

if TYPE_CHECKING:
    from .rank_failures import RankLink

__all__ = ["compare_with_ranks", "first_difference"]


def first_difference(a: Schedule, b: Schedule, *, names: tuple[str, str] = ("one", "the other")) -> str:
    """Where two schedules part first, with both sides, as a clause; "" where they are the same.

    Sites are compared where both have them: a schedule that was decoded from its short string has none.

    Args:
        names: what the sides are called.
    """
    if a.count != b.count:
        return f"{names[0]} has {a.count} microbatches and {names[1]} has {b.count}"
    ends = zip_longest(_slices(a, b), _slices(b, a))
    for position, (mine, theirs) in enumerate(ends):
        if mine != theirs:
            return f"decision {position}: {names[0]} {_words(mine)}, {names[1]} {_words(theirs)}"
    return ""


def compare_with_ranks(group: RankLink, schedule: Schedule) -> None:
    """Check that every rank of `group` ran the step by the same schedule; every rank calls it.

    Raises:
        ScheduleDivergence: on every rank alike, naming the rank that differs from most (of two, either may be at
            fault) and its first differing decision: microbatch and site, on both sides.
        What `exchange` raises.
    """
    # 60 of the hash's 64 bits: a row holds signed numbers.
    hashes = _exchange(group, [int(schedule.hash, 16) >> 4])
    marks = [mark for (mark,) in hashes]
    if len(set(marks)) == 1:
        return
    told = _exchange_schedules(group, schedule)
    # A rank that raises ends what the others wait in, and none may before all have what they need for the same error.
    # This exchange is complete only where every rank has begun it; what ends it early is a rank that was through.
    with suppress(RankFailedError, BrokenGroupError):
        _exchange(group, [0])
    raise ScheduleDivergence(_explain(marks, told))


def _explain(marks: Sequence[int], schedules: Sequence[Schedule]) -> str:
    """`marks` says which ranks agree, `schedules` what each of them did."""
    # Among equally many the lowest rank counts as right: some rank has to, and all must choose the same one.
    right = max(marks, key=Counter(marks).__getitem__)
    agreeing = [rank for rank, mark in enumerate(marks) if mark == right]
    others = [rank for rank, mark in enumerate(marks) if mark != right]
    first = others[0]
    most = _ranks(agreeing)
    difference = first_difference(schedules[first], schedules[agreeing[0]], names=(f"rank {first}", most))
    if not difference:
        difference = "their decisions are the same and their hashes are not, as between two versions of dbo_greenlet"
    if len(marks) == 2:
        text = "rank 0 and rank 1 ran this step in different orders"
    else:
        text = f"{_ranks(others)} ran this step in another order than {most}"
    return f"{text}; {difference}. Policy, seed and model must be the same on every rank"


def _exchange_schedules(group: RankLink, schedule: Schedule) -> list[Schedule]:
    told = json.dumps([schedule.count, schedule.decisions, schedule.sites]).encode()
    lengths = [length for (length,) in _exchange(group, [len(told)])]
    out = []
    for row, length in zip(_exchange(group, list(told.ljust(max(lengths)))), lengths, strict=True):
        count, decisions, sites = json.loads(bytes(row[:length]))
        out.append(Schedule(count, tuple(decisions), tuple(sites)))
    return out


def _exchange(group: RankLink, row: list[int]) -> list[list[int]]:
    # Only here: `first_difference` is also for programs without torch.
    import torch

    rows: list[list[int]] = group.exchange(torch.tensor(row, dtype=torch.int64)).tolist()
    return rows


def _slices(schedule: Schedule, other: Schedule) -> list[tuple[int, str | None]]:
    """(microbatch, site at which its slice ended) in order; no sites where one of the two has none."""
    sites: Sequence[Any] = schedule.sites
    if len(schedule.sites) != len(schedule.decisions) or len(other.sites) != len(other.decisions):
        sites = [None] * len(schedule.decisions)
    return list(zip(schedule.decisions, sites, strict=True))


def _words(step: tuple[int, str | None] | None) -> str:
    if step is None:
        return "had ended"
    index, site = step
    if site is None:
        return f"ran microbatch {index}"
    return f"ran microbatch {index} " + (f"up to {site!r}" if site else "to its end")


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
