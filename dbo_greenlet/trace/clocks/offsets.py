"""The clocks of ranks on one axis.

    axis = common_axis(TraceFiles(["traces/"]))
    axis.place(1, 1234.5)      # microseconds of rank 1's trace -> of the reference rank's
    print(axis.text())         # how it was done, for the user

Three things are known of the clocks. The header of a trace says where on its host's monotonic clock its times begin,
which is exact between ranks of one host and says nothing between hosts. The votes bound the difference of any two
clocks from both sides (`bounds`). And clocks of two hosts drift: no two quartzes run alike, and what keeps them
together changes their speed.

So ranks whose headers are of one host are put on one clock, where the votes allow it (`hosts`), and what is looked for
is how the hosts' clocks differ. It is tried in this order, and said which one holds: one shift for each, where one
satisfies all votes; straight shifts that change over time (`drift`); shifts that change as they like (`wander`), as
long as no clock would have to run faster or slower than any clock does. Where nothing holds, the times are left as the
headers have them and `problem` says so: then these are not the files of one run.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import TraceFileError
from ..files import TraceFiles, two_of_one_rank
from .bounds import Bounds, Collective, Contradiction, bounds_of
from .drift import LEAST_IN_A_WINDOW, drifting_clocks
from .hosts import Hosts, hosts_of
from .rank_clock import RankClock
from .room import straight_doubts
from .wander import wandering_clocks

__all__ = ["CommonAxis", "RankClock", "Votes", "axis_of", "common_axis", "read_votes"]

# Comparisons of pairs of ranks: more collectives than this allows are thinned out evenly.
MOST_COMPARISONS = 4_000_000


@dataclass(frozen=True)
class CommonAxis:
    """Ranks on the clock of one of them.

    Attributes:
        reference: the rank whose times stay as they are.
        clocks: by rank.
        how: where the shifts come from, a sentence.
        collectives: how many went into it.
        problem: None, or a sentence saying why the ranks cannot be put on one axis.
        names: what to call a rank; "rank 3" where nothing stands here.
    """

    reference: int
    clocks: dict[int, RankClock]
    how: str
    collectives: int = 0
    problem: str | None = None
    names: Mapping[int, str] = field(default_factory=dict)

    def shift(self, rank: int, at: float = 0.0) -> float:
        """Microseconds to add to a time of this rank; 0 for a rank that is not known."""
        clock = self.clocks.get(rank)
        return 0.0 if clock is None else clock.shift(at)

    def name(self, rank: int) -> str:
        """What to call it."""
        return self.names.get(rank, f"rank {rank}")

    def place(self, rank: int, at: float) -> float:
        """A time of this rank on the reference's clock, microseconds."""
        return at + self.shift(rank, at)

    def text(self) -> str:
        """How the ranks were put on one axis: one line, and one more for each rank whose shift is not exact.

        "Give or take" is `RankClock.within`, which says there under which conditions it holds.
        """
        lines = [self.how]
        for rank, clock in sorted(self.clocks.items()):
            if rank != self.reference and clock.within:
                line = f"{self.name(rank)}: {clock.shift(0.0):+.3f} us, give or take {clock.within:.3f} us"
                if len(clock.knots) > 1:
                    line += f", changing by {clock.drift:+.3f} us a second"
                lines.append(line)
        if self.problem is not None:
            lines.append(self.problem)
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """The axis as JSON values, microseconds."""
        return {
            "reference": self.reference,
            "how": self.how,
            "collectives": self.collectives,
            "problem": self.problem,
            "ranks": {
                self.names.get(rank, str(rank)): {
                    "shift": clock.shift(0.0),
                    "within": clock.within,
                    "drift_us_per_s": clock.drift,
                    "knots": [list(knot) for knot in clock.knots],
                }
                for rank, clock in sorted(self.clocks.items())
            },
        }


def common_axis(files: TraceFiles | Sequence[str | os.PathLike[str]] | str | os.PathLike[str]) -> CommonAxis:
    """The axis of traces of ours: from the votes of their steps and the origins in their headers.

    Reads the files once, quickly: what is not a header or a step record is not parsed, and what cannot be parsed is
    passed over, because the reader that comes next says what is wrong with it.

    Raises:
        TraceFileError: as `read_votes`.
    """
    return read_votes(files).axis()


@dataclass(frozen=True)
class Votes:
    """What traces of ours say about their clocks.

    Attributes:
        origins: rank -> nanoseconds on the clock of its host at which its times begin.
        collectives: the votes of two ranks or more.
        names: what to call each of them.
    """

    origins: dict[int, int]
    collectives: list[Collective]
    names: list[str]

    def axis(self) -> CommonAxis:
        """The axis that they give."""
        return axis_of(self.collectives, ranks=self.origins, origins=self.origins, what="vote", called=self.names)


def read_votes(files: TraceFiles | Sequence[str | os.PathLike[str]] | str | os.PathLike[str]) -> Votes:
    """Look for votes and origins in traces of ours.

    Raises:
        TraceFileError: as `TraceFiles`, also that two files are of one rank and so of two runs.
    """
    traces = files if isinstance(files, TraceFiles) else TraceFiles(files)
    origins: dict[int, int] = {}
    owners: dict[int, Path] = {}
    votes: dict[tuple[Any, Any], dict[int, tuple[float, float]]] = {}
    for path in traces.paths:
        for kind, record in _headers_and_steps(path):
            rank, begin, end = (record.get(name) for name in ("rank", "vote_begin", "vote_end"))
            if not isinstance(rank, int):
                continue
            if kind == "header":
                origin = record.get("origin_ns")
                number = origin if isinstance(origin, int) else 0
                if origins.setdefault(rank, number) != number or (not number and rank in owners):
                    raise TraceFileError(two_of_one_rank(owners[rank], path, rank))
                owners[rank] = path
            elif isinstance(begin, (int, float)) and isinstance(end, (int, float)):
                votes.setdefault((str(record.get("run")), str(record.get("step"))), {})[rank] = (begin, end)
    shared = {key: each for key, each in votes.items() if len(each) > 1}
    return Votes(origins, list(shared.values()), [f"the vote of step {step} of run {run}" for run, step in shared])


def axis_of(
    collectives: Sequence[Collective],
    *,
    ranks: Iterable[int],
    origins: Mapping[int, int] | None = None,
    exact: bool = True,
    what: str = "collective",
    names: Mapping[int, str] | None = None,
    called: Sequence[str] | None = None,
) -> CommonAxis:
    """The axis that collectives give.

    Args:
        collectives: each with two ranks or more, times in microseconds on each rank's own clock.
        ranks: all there are, one or more.
        origins: rank -> nanoseconds, on the clock of its host, at which its times begin; 0 is not known.
        exact: whether origins of one host are of one and the same clock. A wall clock is not: each process reads it in
            its own way.
        what: a collective in one word, for the sentences.
        names: what to call the ranks; "rank 3" where nothing stands here.
        called: what to call each of the collectives; default: `what` and its number.

    Returns:
        The axis of the lowest rank that took part in a collective; where there are none, of the lowest rank.
    """
    named = dict(names or {})
    bound = {rank for each in collectives for rank in each}
    everybody = sorted(bound | set(ranks))
    reference = min(bound, default=min(everybody, default=0))
    start = _shifts_of_origins(everybody, reference, origins or {})
    clocks = {rank: RankClock(((0.0, start.get(rank, 0.0)),), None) for rank in everybody}
    clocks[reference] = RankClock(((0.0, 0.0),), 0.0)
    if len(everybody) < 2:
        return CommonAxis(reference, clocks, "One rank, one clock.", names=named)
    if not collectives:
        how = f"Nothing says how the clocks of the ranks differ: there is no {what}, and no header tells."
        if start:
            how = f"The ranks lie on one axis by the {_clock(exact)}; there is no {what} to check it by" + (
                ", and of ranks on several hosts it says nothing." if exact else "."
            )
        return CommonAxis(reference, clocks, how, names=named)
    order = _thinned(sorted(range(len(collectives)), key=lambda each: _first(collectives[each])), len(everybody))
    some = [collectives[number] for number in order]
    counted = f"{len(some)} {what}{'s' if len(some) != 1 else ''}"
    hosts = hosts_of(some, start if exact else {})
    found = bounds_of(hosts.collectives)
    if isinstance(found, Bounds):
        steady, kept = _steady(found, hosts.collectives, reference, {} if exact else start)
        clocks |= _of_ranks(steady, hosts)
        how = _how(clocks, reference, counted, bool(start), exact, kept, named)
    elif (moving := _moving(hosts.collectives, reference)) is not None:
        how = f"The ranks lie on one axis by {counted}, {_WHY}; {moving[1]}"
        clocks |= _of_ranks(moving[0], hosts)
        same = [rank for rank, lead in hosts.lead.items() if lead == reference != rank]
        how += f"; {_list(same, named)} on the same host as {_list([reference], named)}." if same else "."
        how += _not_bound(clocks, named)
    else:
        how = "The times of the ranks are left as their own clocks have them."
        which = [order[place] for place in found.collectives]
        problem = _no_offset(found, what, [called[n] if called else f"{what} {n}" for n in which], named)
        return CommonAxis(reference, clocks, how, len(some), problem, named)
    return CommonAxis(reference, clocks, how, len(some), names=named)


def _steady(
    found: Bounds, collectives: Sequence[Collective], reference: int, start: Mapping[int, float]
) -> tuple[dict[int, RankClock], bool]:
    """Constant shifts, and whether those of the headers could be kept.

    That they fit does not say that the clocks run alike: what they may drift beside each other is in the doubt.
    """
    middles = found.middle(reference)
    shifts = {rank: shift for rank, (shift, _) in middles.items()}
    kept = bool(start) and found.allow(start)
    if kept:
        shifts = {rank: start[rank] for rank in shifts}
    constant = {rank: RankClock(((0.0, shift),), None).shift for rank, shift in shifts.items()}
    doubts = straight_doubts(collectives, reference, constant)
    if doubts is None:  # the bounds leave less than no room, within what times are rounded by
        doubts = {rank: within + abs(shifts[rank] - shift) for rank, (shift, within) in middles.items()}
    return {rank: RankClock(((0.0, shift),), doubts[rank]) for rank, shift in shifts.items()}, kept


def _moving(collectives: Sequence[Collective], reference: int) -> tuple[dict[int, RankClock], str] | None:
    if (clocks := drifting_clocks(collectives, reference)) is not None:
        return clocks, "their clocks run at different speeds"
    if (clocks := wandering_clocks(collectives, reference)) is not None:
        return clocks, "the speeds of their clocks differ, and change too much or too fast to be told"
    return None


def _of_ranks(clocks: Mapping[int, RankClock], hosts: Hosts) -> dict[int, RankClock]:
    return {rank: clocks[lead].moved(hosts.offset[rank]) for rank, lead in sorted(hosts.lead.items()) if lead in clocks}


_WHY = "which no rank leaves before all have entered"


def _clock(exact: bool) -> str:
    return "clock of their host" if exact else "wall clocks that they have"


def _how(
    clocks: Mapping[int, RankClock],
    reference: int,
    counted: str,
    known: bool,
    exact: bool,
    kept: bool,
    names: Mapping[int, str],
) -> str:
    others = [rank for rank in clocks if rank != reference and clocks[rank].within is not None]
    same = [rank for rank in others if clocks[rank].within == 0.0]
    if kept or (known and exact and len(same) == len(others)):
        how = f"The ranks lie on one axis by the {_clock(exact)}, and {counted} agree."
    else:
        how = f"The ranks lie on one axis by {counted}, {_WHY}"
        if known and exact and same:
            how += f"; {_list(same, names)} on the same host as {_list([reference], names)}"
        elif known:
            how += "; the clocks in their headers are not of one host" if exact else "; their wall clocks differ"
        how += "."
    return how + _not_bound(clocks, names)


def _not_bound(clocks: Mapping[int, RankClock], names: Mapping[int, str]) -> str:
    lost = [rank for rank in clocks if clocks[rank].within is None]
    return f" Where {_list(lost, names)} belongs nothing says." if lost else ""


def _shifts_of_origins(everybody: Sequence[int], reference: int, origins: Mapping[int, int]) -> dict[int, float]:
    if not all(origins.get(rank) for rank in everybody):
        return {}
    return {rank: (origins[rank] - origins[reference]) / 1000 for rank in everybody}


def _first(collective: Collective) -> tuple[float, float]:
    return collective[min(collective)]


def _thinned(numbers: Sequence[int], ranks: int) -> Sequence[int]:
    most = max(MOST_COMPARISONS // (ranks * ranks), 2 * LEAST_IN_A_WINDOW)
    if len(numbers) <= most:
        return numbers
    return [numbers[len(numbers) * k // most] for k in range(most)]


def _no_offset(found: Contradiction, what: str, called: Sequence[str], names: Mapping[int, str]) -> str:
    which = f"{', '.join(called[:-1])} and {called[-1]}"
    return (
        f"No offset of the clocks of {_list(found.ranks, names)} fits all {what}s: the bounds by {which} miss each "
        f"other by {found.apart:.3f} us, and no drift explains it. Are these files of one run?"
    )


def _list(ranks: Sequence[int], names: Mapping[int, str]) -> str:
    if any(rank in names for rank in ranks):
        return " and ".join(names.get(rank, f"rank {rank}") for rank in ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _headers_and_steps(path: str | os.PathLike[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    starts = {b'{"t":"header"': "header", b'{"t":"step"': "step", b'{"t": "header"': "header", b'{"t": "step"': "step"}
    prefixes = tuple(starts)
    if not os.path.isfile(path):
        return  # nothing, which the reader says; or a pipe, which can be read only once
    try:
        with open(path, "rb") as plain:
            packed = plain.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else open(path, "rb") as file:
            for line in file:
                if line.startswith(prefixes):
                    kind = next(kind for start, kind in starts.items() if line.startswith(start))
                    try:
                        record = json.loads(line)
                    except (ValueError, RecursionError):
                        continue
                    if isinstance(record, dict):
                        yield kind, record
    except (EOFError, OSError, zlib.error):
        return  # a damaged archive: the strict reader says so
