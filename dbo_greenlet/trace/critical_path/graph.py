"""What had to come before what, as a graph that reproduces the recorded times, and its longest path.

Points are moments: a slice or a kernel begins, or ends. An edge from one point to another says that the second came no
earlier than so many microseconds (`lag`) behind the first. A point's time is the latest that its edges demand:

    time(p) = max over its edges of time(source) + lag

`PathGraph.point` takes the recorded time along with the edges, and what they leave unexplained is charged to the edge
that came closest, as idle time: with nothing shortened, the graph gives back exactly what was recorded. Shorten a stage
and solve it again, and everything that was hidden behind that stage until now turns up. That is why the gain is not the
stage's share of the path.

Not every edge is known as well as another. An edge is

    CERTAIN    there, with this lag
    ONE_OF     of a point's edges of this role one set its time, and nobody knows which; each lag is the most that it
               can have been (a stretch of GPU time with a receive in it: its own work, or the flight)
    AT_MOST    perhaps there: it did not set the time, but it may when something else gets shorter

so that what comes out is a range. Its two ends are

    earliest   max(CERTAIN, min(ONE_OF))
    latest     max(CERTAIN, ONE_OF, AT_MOST)

which are equal where everything is certain. Both hold whatever is true of the uncertain edges, because a longest path
never gets longer when a lag does not.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["AT_MOST", "CERTAIN", "IDLE", "ONE_OF", "Edge", "PathGraph", "Piece"]

CERTAIN, ONE_OF, AT_MOST = range(3)
IDLE = "idle"

# Two ways to add up the same times differ by rounding.
_SAME_US = 1e-6
# Memory for the times of the points while what-ifs are solved, several at once.
_SOLVE_BYTES = 128 * 1024 * 1024

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Edge(NamedTuple):
    """What a point waits for.

    Attributes:
        source: an earlier point.
        lag: microseconds; None: all that lies between the two points.
        kind: what connects them: "work", "stream order", "event", "launch", "hand-over", "receive", "host" ...
        stage: whose time the lag is, and so what shortens it; "" for a lag that nothing shortens.
        what, lane: what ran, and where, for people.
        role: CERTAIN, ONE_OF or AT_MOST.
        also: other stages whose time some of the lag may be, where that is not known.
    """

    source: int
    lag: float | None
    kind: str
    stage: str = ""
    what: str = ""
    lane: str = ""
    role: int = CERTAIN
    also: tuple[str, ...] = ()


class Piece(NamedTuple):
    """A stretch of the path. Microseconds on the graph's axis.

    Attributes:
        begin, end: its time.
        stage, what, lane: as of the edge.
        kind: the kind of the edge.
        by: kinds of the edges without a length through which it was reached from the piece before it.
        uncertain: it may have been something else: `instead` says what.
    """

    begin: float
    end: float
    stage: str
    what: str
    lane: str
    kind: str
    by: tuple[str, ...] = ()
    uncertain: bool = False
    instead: tuple[str, ...] = ()

    @property
    def length(self) -> float:
        return self.end - self.begin


def _role(edge: Edge) -> int:
    return edge.role


class _Names(dict[str, int]):
    def __missing__(self, name: str) -> int:
        number = self[name] = len(self)
        return number


class PathGraph:
    """The graph of one step. Point 0 is its begin; every other point is added behind those that it waits for.

    Args:
        begin: microseconds of point 0.
        tolerance: by how much recorded times may contradict an edge before it is left out: the clocks' error. Within
            it the later point moves.

    Attributes:
        at: time of each point.
        contradictions: number of edges that were left out.
    """

    def __init__(self, begin: float = 0.0, *, tolerance: float = 0.0) -> None:
        self.at = array("d", [begin])
        self.contradictions = 0
        self._tolerance = tolerance
        # The edges of point p are _first[p] to _first[p + 1], the first _certain[p] of them CERTAIN, then ONE_OF.
        self._first, self._certain = array("q", [0, 0]), array("q", [0])
        self._source = array("q")
        self._role = array("b")
        # An edge's lag is the time of one stage (or of several, in parts that are not known), and idle time behind it.
        self._lag, self._idle = array("d"), array("d")
        # Whose that is, what it is called and where it was: index into _labels.
        self._label = array("q")
        self._labels: dict[tuple[str, tuple[str, ...], str, str, str], int] = {}
        self._stages = _Names({"": 0, IDLE: 1})
        self._uncertain = False

    def __len__(self) -> int:
        return len(self.at)

    @property
    def stages(self) -> list[str]:
        """The stages of its edges, in order of appearance."""
        return [name for name in self._stages if name]

    def point(self, at: float | None, edges: Sequence[Edge]) -> int:
        """Add a point.

        Args:
            at: its recorded time; None: what the edges demand.
            edges: what it waits for. Where several set its time, the path takes the first of them. Where nothing but
                AT_MOST is left of them, it waits for the begin.

        Returns:
            Its number.
        """
        times = self.at
        number = len(times)
        kept = edges
        if at is not None:
            for edge in edges:
                over = times[edge.source] - at
                if over > 0.0:
                    if over > self._tolerance:
                        kept = [each for each in edges if times[each.source] - at <= self._tolerance]
                        self.contradictions += len(edges) - len(kept)
                        at = max([at, *(times[each.source] for each in kept)])
                        break
                    at = max(at, times[edge.source])
        if all(edge.role == AT_MOST for edge in kept):
            # What only may have been there does not explain when it came.
            kept = [Edge(0, 0.0, "start"), *kept]
        if at is None:
            at = max(times[edge.source] + (edge.lag or 0.0) for edge in kept)
        times.append(at)
        binding, latest, open_choice = -1, -np.inf, False
        first = len(self._source)
        # In the order of their roles, so that whoever solves it need not look.
        if len(kept) > 1 and any(edge.role for edge in kept):
            kept = sorted(kept, key=_role)
        certain = 0
        for place, edge in enumerate(kept):
            room = at - times[edge.source]
            lag = room if edge.lag is None or edge.lag > room else edge.lag
            self._add(edge, lag)
            if edge.role == CERTAIN:
                certain += 1
                if (reached := times[edge.source] + lag) > latest + _SAME_US:
                    binding, latest = place, reached
            elif edge.role == ONE_OF:
                open_choice = True
        self._certain.append(certain)
        self._first.append(len(self._source))
        if not open_choice and at > latest + _SAME_US:
            self._idle[first + binding] = at - latest
        return number

    def _add(self, edge: Edge, lag: float) -> None:
        self._source.append(edge.source)
        self._role.append(edge.role)
        self._lag.append(lag)
        self._idle.append(0.0)
        key = (edge.stage, edge.also, edge.kind, edge.what, edge.lane)
        label = self._labels.get(key)
        if label is None:
            label = self._labels[key] = len(self._labels)
            for stage in (edge.stage, *edge.also):
                self._stages[stage]  # numbers a new one
        self._label.append(label)
        if edge.role != CERTAIN or edge.also:
            self._uncertain = True

    # -- the path ----------------------------------------------------------------------------------------------------

    def path(self, end: int) -> list[Piece]:
        """The pieces of the path that ends at point `end`, in order of time: one behind the other, without gaps."""
        labels = list(self._labels)
        out: list[Piece] = []
        point, links = end, []
        while point:
            edge = self._binding(point)
            source = self._source[edge]
            stage, _, kind, what, lane = labels[self._label[edge]]
            stage = stage or IDLE
            begin, until = self.at[source], self.at[point]
            if until - begin <= _SAME_US:
                links.append(kind)
            else:
                if out and links:
                    out[-1] = out[-1]._replace(by=tuple(reversed(links)))
                links = []
                others = self._instead(point, edge, labels)
                if (idle := self._idle[edge]) > _SAME_US and stage != IDLE:
                    out.append(Piece(until - idle, until, IDLE, what, lane, kind))
                    until -= idle
                if until - begin > _SAME_US:
                    out.append(Piece(begin, until, stage, what, lane, kind, (), bool(others), others))
            point = source
        if out and links:
            out[-1] = out[-1]._replace(by=tuple(reversed(links)))
        out.reverse()
        return out

    def _binding(self, point: int) -> int:
        first, behind = self._first[point], self._first[point + 1]
        if behind - first == 1:
            return first
        at, certain = self.at[point], first + self._certain[point]
        best, reached = -1, -np.inf
        # Those of which one set the time come before what would have let it be earlier.
        for edge in (*range(certain, behind), *range(first, certain)):
            if self._role[edge] == AT_MOST:
                continue
            demanded = self.at[self._source[edge]] + self._lag[edge] + self._idle[edge]
            if demanded > reached + _SAME_US:
                best, reached = edge, demanded
            if reached >= at - _SAME_US:
                break
        return best

    def _instead(self, point: int, chosen: int, labels: Sequence[tuple[Any, ...]]) -> tuple[str, ...]:
        """What else may have set the point's time, where an edge of the role ONE_OF is taken to have."""
        if self._role[chosen] != ONE_OF:
            return ()
        out = []
        for edge in range(self._first[point], self._first[point + 1]):
            if edge != chosen and self._role[edge] == ONE_OF:
                stage, _, kind, what, _ = labels[self._label[edge]]
                out.append(what or stage or kind)
        own = labels[self._label[chosen]][3]
        return tuple(dict.fromkeys(what for what in out if what != own))

    # -- what if -----------------------------------------------------------------------------------------------------

    def shortened(self, scenarios: Sequence[Mapping[str, float]], end: int) -> tuple[Floats, Floats]:
        """When point `end` would have been reached, had stages been shorter.

        Args:
            scenarios: each by how much of its time a stage is shortened, from 0.0 to 1.0, by its name.

        Returns:
            earliest [s], latest [s]: microseconds on the graph's axis.
        """
        factors = np.zeros((len(scenarios), len(self._stages)))
        for row, scenario in enumerate(scenarios):
            for stage, share in scenario.items():
                if stage in self._stages:
                    factors[row, self._stages[stage]] = share
        points, edges = end + 1, self._first[end + 1]
        at_once = max(1, _SOLVE_BYTES // (32 * (points + edges)))
        solved = []
        for start in range(0, len(scenarios), at_once):
            part = factors[start : start + at_once]
            if self._uncertain:
                both = np.concatenate((self._lags(part, edges, np.max), self._lags(part, edges, np.min)), axis=1)
                solved.append(self._solve(both, points, len(part)).reshape(2, -1))
            else:
                solved.append(self._solve(self._lags(part, edges, np.min), points, 0).reshape(1, -1))
        found = np.concatenate(solved, axis=1)
        return found[0], found[-1]

    def _lags(self, factors: Floats, edges: int, of_several: Callable[..., Floats]) -> Floats:
        """[edges, scenarios], with stages shorter; `of_several` decides whose a lag of several stages is."""
        owners: dict[tuple[str, ...], int] = {}
        of_label = np.array([owners.setdefault((key[0], *key[1]), len(owners)) for key in self._labels])
        shares = np.array([of_several(factors[:, [self._stages[name] for name in each]], axis=1) for each in owners])
        left: Floats = 1.0 - shares[of_label[np.frombuffer(self._label, np.int64)[:edges]]]
        left *= np.frombuffer(self._lag)[:edges, None]
        left += np.frombuffer(self._idle)[:edges, None] * (1.0 - factors[:, self._stages[IDLE]])
        return left

    def _solve(self, lags: Floats, points: int, earliest: int) -> Floats:
        """The time of the last point: the earliest in the first `earliest` columns, the latest in the others."""
        times = np.empty((points, lags.shape[1]))
        times[0] = self.at[0]
        first, sources, certain = self._first.tolist(), self._source.tolist(), self._certain.tolist()
        source_of = np.frombuffer(self._source, np.int64)
        last_one_of = self._last_one_of().tolist() if earliest else certain
        add, highest, lowest, maximum = np.add, np.maximum.reduce, np.minimum.reduce, np.maximum
        for point in range(1, points):
            begin, stop = first[point], first[point + 1]
            time = times[point]
            if stop - begin == 1:
                add(times[sources[begin]], lags[begin], out=time)
                continue
            demanded = times[source_of[begin:stop]]
            demanded += lags[begin:stop]
            sure = certain[point]
            if not earliest or sure == stop - begin:
                highest(demanded, axis=0, out=time)
                continue
            highest(demanded[:, earliest:], axis=0, out=time[earliest:])
            early, one_of = demanded[:, :earliest], last_one_of[point]
            if one_of == sure:
                highest(early[:sure], axis=0, out=time[:earliest])
            else:
                lowest(early[sure:one_of], axis=0, out=time[:earliest])
                if sure:
                    maximum(time[:earliest], highest(early[:sure], axis=0), out=time[:earliest])
        result: Floats = times[points - 1]
        return result

    def _last_one_of(self) -> Ints:
        """Of each point how many of its edges are CERTAIN or ONE_OF."""
        counts = np.concatenate(([0], np.cumsum(np.frombuffer(self._role, np.int8) != AT_MOST)))
        first = np.frombuffer(self._first, np.int64)
        return np.asarray(counts[first[1:]] - counts[first[:-1]])
