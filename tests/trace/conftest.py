from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from tests.trace.browser import Browser, start

Moe = tuple[tuple[int, ...], tuple[str, ...]]


@pytest.fixture
def moe_schedule() -> Callable[[Sequence[int], Sequence[int]], Moe]:
    """Decisions and the layers with experts -> (decisions, sites): each yields at its dispatch and at its combine."""

    def build(decisions: Sequence[int], layers: Sequence[int]) -> Moe:
        stations = [f"layer{layer}.{stage}" for layer in layers for stage in ("dispatch", "combine")] + [""]
        reached = dict.fromkeys(decisions, 0)
        sites = []
        for index in decisions:
            sites.append(stations[reached[index]])
            reached[index] += 1
        return tuple(decisions), tuple(sites)

    return build


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A real browser, for all tests of a module: starting one takes a second."""
    found = start()
    yield found
    found.driver.quit()
