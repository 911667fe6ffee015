"""Growing the columns of a profile, one event at a time, at eight bytes a value."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

from ..profile import Activities, AnyColumns, Calls, Ranges, Waits

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

    def columns(self, origin: float, **further: Any) -> Any:
        times = np.frombuffer(self.times, dtype=np.float64).reshape(-1, 2)
        values = np.frombuffer(self.integers, dtype=np.int64).reshape(-1, len(self._names))
        begin = times[:, 0] - origin
        made = self._columns(
            begin=begin,
            end=begin + times[:, 1],
            **{name: np.ascontiguousarray(values[:, index]) for index, name in enumerate(self._names)},
            **further,
        )
        return made.sorted()


class ProfileBuilder:
    """Takes events in any order and makes sorted columns of them.

    `activities`, `calls`, `ranges` and `waits` have flat arrays to extend: `times` with a begin and a duration in
    microseconds, `integers` with the values of the other columns, in the order of `ACTIVITY`, `CALL`, `RANGE` and
    `WAIT`.

    Attributes:
        recorded, recorded_at: correlation id and begin of each call that recorded an event.
    """

    ACTIVITY = ("name", "kind", "rank", "device", "stream", "correlation", "graph_node", "size")
    CALL = ("name", "rank", "thread", "correlation")
    RANGE = ("name", "rank", "thread")
    WAIT = ("rank", "device", "stream", "on_stream", "correlation", "record_correlation")

    def __init__(self) -> None:
        self.names = Names()
        self.activities = _Rows(Activities, self.ACTIVITY)
        self.calls = _Rows(Calls, self.CALL)
        self.ranges = _Rows(Ranges, self.RANGE)
        self.waits = _Rows(Waits, self.WAIT)
        self.recorded = array("q")
        self.recorded_at = array("d")

    @property
    def origin(self) -> float:
        """The earliest begin."""
        begins = [np.frombuffer(rows.times)[::2] for rows in (self.activities, self.calls, self.ranges) if rows.times]
        return float(min(begin.min() for begin in begins)) if begins else 0.0

    def tables(self, origin: float) -> dict[str, Any]:
        """The tables, with times since `origin`, sorted by begin."""
        waited_for = self.waits.integers[len(self.WAIT) - 1 :: len(self.WAIT)]
        known = dict(zip(self.recorded, self.recorded_at, strict=True)) if waited_for else {}
        recorded = [known.get(each, np.nan) for each in waited_for]
        return {
            "names": list(self.names),
            "activities": self.activities.columns(origin),
            "calls": self.calls.columns(origin),
            "ranges": self.ranges.columns(origin),
            "waits": self.waits.columns(origin, recorded=np.array(recorded, dtype=np.float64) - origin),
        }
