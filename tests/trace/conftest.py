from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from dbo_greenlet.cli.show import show
from dbo_greenlet.trace import Trace, process_trace, read_trace
from tests.trace.browser import Browser, start
from tests.trace.pages import write_trace

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


@pytest.fixture
def recorded_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that this process records every step to, until the test ends."""
    monkeypatch.setenv("DBO_GREENLET_TRACE", str(tmp_path / "traces"))
    monkeypatch.setenv("DBO_GREENLET_TRACE_EVERY", "1")
    monkeypatch.setattr(process_trace, "_process_trace", None)
    yield tmp_path / "traces"
    process_trace.end_process_trace()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A real browser, for all tests of a module: starting one takes a second."""
    found = start()
    yield found
    found.driver.quit()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trace(tmp_path_factory.mktemp("page") / "t.jsonl")


@pytest.fixture(scope="module")
def trace(recorded: Path) -> Trace:
    return read_trace(recorded)


@pytest.fixture(scope="module")
def page(recorded: Path) -> Path:
    out = recorded.with_suffix(".html")
    assert show([recorded], html=out) == 0
    return out


@pytest.fixture
def opened(browser: Browser, page: Path) -> Iterator[Browser]:
    """The page as it opens; and it must not have complained by the end of the test."""
    browser.open(page)
    yield browser
    assert browser.complaints() == []
    assert [url for url in browser.requests() if not url.startswith(("file:", "data:"))] == []
