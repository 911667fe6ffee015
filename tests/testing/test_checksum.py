"""Checksums of outputs: equal where the values are, whatever the objects are."""

from __future__ import annotations

import numpy as np

from dbo_greenlet.testing.checksum import checksum


def test_equal_sets_are_equal_in_whatever_order_they_list_their_elements() -> None:
    one, other = {0, 8}, {8, 0}
    assert one == other and repr(one) != repr(other)
    assert checksum(one) == checksum(other)
    assert checksum([frozenset(one)]) == checksum([frozenset(other)])


def test_sets_differ_by_their_elements_and_their_kind() -> None:
    different = [{1, 2}, {1, 3}, {"1", 2}, frozenset((1, 2)), {1}, set(), [1, 2]]
    assert len({checksum(each) for each in different}) == len(different)


def test_an_array_of_objects_counts_by_them_and_not_by_their_addresses() -> None:
    def array(end: int) -> np.ndarray:
        return np.array([10**20 + end, "x" * 40], dtype=object)

    assert checksum(array(0)) == checksum(array(0)) != checksum(array(1))
