"""Growing the columns of a profile, one event at a time, at eight bytes a value."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

from ..profile import Activities, AnyColumns, Calls, Ranges

__all__ = ["Names", "ProfileBuilder"]


class Names(dict[str, int]):
    """Name -> its number, in order of appearance; asking for a new one numbers it."""

    def __missing__(self, name: str) -> int:
        number = self[name] = len(self)
        return number


class _Rows:
    """Rows of (begin, duration, integers) in two flat arrays: an append each, however many columns there are."""

    def __init__(self, columns: type[AnyColumns], integers: tuple[str, ...]) -> None:
        self.times = array("d")
        self.integers = array("q")
        self._columns = columns
        self._names = integers

    def columns(self, origin: float) -> Any:
        times = np.frombuffer(self.times, dtype=np.float64).reshape(-1, 2)
        values = np.frombuffer(self.integers, dtype=np.int64).reshape(-1, len(self._names))
        begin = times[:, 0] - origin
        made = self._columns(
            begin=begin,
            end=begin + times[:, 1],
            **{name: np.ascontiguousarray(values[:, index]) for index, name in enumerate(self._names)},
        )
        return made.sorted()


class ProfileBuilder:
    """Takes events in any order and makes sorted columns of them.

    `activities`, `calls` and `ranges` have flat arrays to extend: `times` with a begin and a duration in microseconds,
    `integers` with the values of the other columns, in the order of `ACTIVITY`, `CALL` and `RANGE`.
    """

    ACTIVITY = ("name", "kind", "rank", "device", "stream", "correlation", "graph_node", "size")
    CALL = ("name", "rank", "thread", "correlation")
    RANGE = ("name", "rank", "thread")

    def __init__(self) -> None:
        self.names = Names()
        self.activities = _Rows(Activities, self.ACTIVITY)
        self.calls = _Rows(Calls, self.CALL)
        self.ranges = _Rows(Ranges, self.RANGE)

    @property
    def origin(self) -> float:
        """The earliest begin."""
        begins = [np.frombuffer(rows.times)[::2] for rows in (self.activities, self.calls, self.ranges) if rows.times]
        return float(min(begin.min() for begin in begins)) if begins else 0.0

    def tables(self, origin: float) -> dict[str, Any]:
        """The three tables, with times since `origin`, sorted by begin."""
        return {
            "names": list(self.names),
            "activities": self.activities.columns(origin),
            "calls": self.calls.columns(origin),
            "ranges": self.ranges.columns(origin),
        }
