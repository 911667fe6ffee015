"""Intervals against the obvious slow version: sets of whole microseconds."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dbo_greenlet.trace import intervals

Pairs = list[tuple[int, int]]
# Short and small, so that touching, equal, nested and empty ones all come up; backward ones are empty, too.
pairs = st.lists(st.tuples(st.integers(0, 25), st.integers(0, 25)), max_size=8)


def moments(of: Pairs) -> set[int]:
    return {moment for begin, end in of for moment in range(begin, end)}


def spans(of: Pairs) -> intervals.Spans:
    return intervals.union([begin for begin, _ in of], [end for _, end in of])


def check(found: intervals.Spans, expected: set[int]) -> None:
    assert found.dtype == np.float64 and found.shape[1:] == (2,)
    assert (found[:, 1] > found[:, 0]).all()
    assert (found[1:, 0] > found[:-1, 1]).all(), "sorted, and never touching"
    assert moments([(int(begin), int(end)) for begin, end in found]) == expected
    assert intervals.length(found) == len(expected)


@given(pairs)
def test_union(some: Pairs) -> None:
    check(spans(some), moments(some))


@given(pairs, pairs)
def test_intersection_and_difference(left: Pairs, right: Pairs) -> None:
    check(intervals.intersection(spans(left), spans(right)), moments(left) & moments(right))
    check(intervals.difference(spans(left), spans(right)), moments(left) - moments(right))
    assert intervals.cover(spans(left))(spans(right)) == len(moments(left) & moments(right))


@given(pairs)
def test_inside(some: Pairs) -> None:
    times = np.arange(-1, 27, dtype=np.float64)
    assert set(times[intervals.inside(spans(some), times)]) == moments(some)


@given(pairs, pairs)
def test_lengths_add_up(left: Pairs, right: Pairs) -> None:
    both = intervals.intersection(spans(left), spans(right))
    only = intervals.difference(spans(left), spans(right))
    assert intervals.length(both) + intervals.length(only) == intervals.length(spans(left))


def test_a_span() -> None:
    assert intervals.span(1.5, 2.0).tolist() == [[1.5, 2.0]]
    assert intervals.span(2.0, 2.0).shape == (0, 2)


def test_fractions_are_kept() -> None:
    found = intervals.intersection(spans([(0, 10)]), intervals.union([0.25, 9.5], [0.5, 12.0]))
    assert found.tolist() == [[0.25, 0.5], [9.5, 10.0]]
