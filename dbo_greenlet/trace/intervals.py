"""Half-open intervals of time as numpy arrays: union, intersection, difference, length.

`Spans` is a float64 array of shape [n, 2], each row a begin and an end in the same unit (microseconds everywhere in
this package). Rows are sorted, not empty, and do not touch: two spans that meet are one. `union` makes such an array of
any intervals; everything else takes and gives them. An interval whose end is not after its begin covers nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Spans", "cover", "difference", "inside", "intersection", "length", "span", "union"]

Spans = npt.NDArray[np.float64]
Floats = npt.NDArray[np.float64]


def span(begin: float, end: float) -> Spans:
    """One interval; no row where it is empty."""
    return union(np.array([begin], dtype=np.float64), np.array([end], dtype=np.float64))


def union(begin: npt.ArrayLike, end: npt.ArrayLike) -> Spans:
    """What at least one of the intervals covers.

    Args:
        begin, end: shape [n], in any order.
    """
    begin = np.asarray(begin, dtype=np.float64)
    end = np.asarray(end, dtype=np.float64)
    kept = end > begin
    begin, end = begin[kept], end[kept]
    if (begin[1:] < begin[:-1]).any():
        order = np.argsort(begin, kind="stable")
        begin, end = begin[order], end[order]
    if not len(begin):
        return np.empty((0, 2), dtype=np.float64)
    reach = np.maximum.accumulate(end)
    first = np.concatenate(([True], begin[1:] > reach[:-1]))
    last = np.concatenate((first[1:], [True]))
    return np.column_stack((begin[first], reach[last]))


def intersection(left: Spans, right: Spans) -> Spans:
    """What both cover."""
    return _combined(left, right, np.logical_and)


def difference(left: Spans, right: Spans) -> Spans:
    """What `left` covers and `right` does not."""
    return _combined(left, right, lambda in_left, in_right: in_left & ~in_right)


def length(spans: Spans) -> float:
    """The time covered."""
    return float((spans[:, 1] - spans[:, 0]).sum())


def cover(spans: Spans) -> Callable[[Spans], float]:
    """A function that says how much of other spans lies in these: the length of their intersection.

    For measuring many small things against one large one: what depends on `spans` alone is done once.
    """
    if not len(spans):
        return lambda of: 0.0
    so_far = np.concatenate(([0.0], np.cumsum(spans[:, 1] - spans[:, 0])))

    def covered(of: Spans) -> float:
        place = np.searchsorted(spans[:, 0], of, side="right")
        # Up to a time: all spans that began, less what is left of the last of them.
        last = spans[np.maximum(place - 1, 0), 1]
        reached = so_far[place] - np.where(place > 0, np.maximum(last - of, 0.0), 0.0)
        return float((reached[:, 1] - reached[:, 0]).sum())

    return covered


def inside(spans: Spans, times: Floats) -> npt.NDArray[np.bool_]:
    """Of each time, whether it is covered; begins are, ends are not."""
    if not len(spans):
        return np.zeros(len(times), dtype=bool)
    place = np.searchsorted(spans[:, 0], times, side="right") - 1
    covered: npt.NDArray[np.bool_] = (place >= 0) & (times < spans[place, 1])
    return covered


def _combined(left: Spans, right: Spans, keep: Callable[[Any, Any], Any]) -> Spans:
    # Between two neighbouring edges nothing changes, so the begin of each such piece speaks for the whole of it.
    edges = np.unique(np.concatenate((left.ravel(), right.ravel())))
    if len(edges) < 2:
        return np.empty((0, 2), dtype=np.float64)
    kept = keep(inside(left, edges[:-1]), inside(right, edges[:-1]))
    return union(edges[:-1][kept], edges[1:][kept])
