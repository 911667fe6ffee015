"""Real steps under torch.profiler: which ranges it saw, and which operators lie in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dbo_greenlet import dbo_yield
from dbo_greenlet.schedule import Schedule

X = torch.ones(4)
# An operator for each microbatch, so that a trace says whose it is.
OPERATORS = [torch.sin, torch.cos, torch.tanh]
NAMES = ["aten::sin", "aten::cos", "aten::tanh"]
# Threads that torch's profiler did not start in are seen only where it watches all.
ALL_THREADS = {"experimental_config": torch._C._profiler._ExperimentalConfig(profile_all_threads=True)}
CARRIERS = [("greenlet", {}), ("thread", ALL_THREADS)]


def model(index: int, layers: int = 2) -> Callable[[], None]:
    def entry() -> None:
        for layer in range(layers):
            OPERATORS[index](X)
            dbo_yield(f"layer{layer}.dispatch")
            OPERATORS[index](X)
            dbo_yield(f"layer{layer}.combine")
        OPERATORS[index](X)

    return entry


def names_of(schedule: Schedule) -> list[str]:
    """The ranges that a schedule stands for, in order."""
    site, number = [""] * schedule.count, [0] * schedule.count
    names = []
    for index, end in zip(schedule.decisions, schedule.sites, strict=True):
        names.append(f"microbatch {index}, slice {number[index]}" + (f", after {site[index]}" if site[index] else ""))
        site[index], number[index] = end, number[index] + 1
    return names


class Event:
    """One event of a profile, and the ranges round it, outermost first: by their times alone."""

    def __init__(self, event: Any, ranges: Sequence[Any]) -> None:
        self.name = event.name
        begin, end = event.time_range.start, event.time_range.end
        self.inside = [
            each.name
            for each in ranges
            if each is not event and each.time_range.start <= begin and end <= each.time_range.end
        ]


def events_of(recorded: Any) -> tuple[list[str], list[Event]]:
    """The ranges in order of time, and the operators with the ranges round them."""
    events = sorted(recorded.events(), key=lambda event: event.time_range.start)
    ranges = [event for event in events if event.is_user_annotation]
    assert_nested(ranges)
    return [each.name for each in ranges], [Event(each, ranges) for each in events if not each.is_user_annotation]


def assert_nested(ranges: Sequence[Any]) -> None:
    """Of each thread: last opened, first closed."""
    for thread in {each.thread for each in ranges}:
        ends: list[float] = []
        for each in (each for each in ranges if each.thread == thread):
            while ends and ends[-1] <= each.time_range.start:
                ends.pop()
            assert not ends or each.time_range.end <= ends[-1]
            ends.append(each.time_range.end)
