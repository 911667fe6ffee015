"""Autocast's state read from memory: it says what torch's getters say, in every thread, or nothing is read."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo_greenlet import autocast_words, key_sets, thread_words
from dbo_greenlet.torch_observe import observe, quick_check

needs_a_view = pytest.mark.skipif(autocast_words.view() is None, reason="torch's autocast state cannot be read here")


def told() -> tuple[Any, ...]:
    """What torch's getters tell."""
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return (
        depth,
        torch.is_autocast_cache_enabled(),
        torch.get_autocast_dtype("cpu"),
        torch.get_autocast_dtype("cuda"),
    )


def read() -> tuple[int, int]:
    words = autocast_words.view()
    assert words is not None
    return words.first[0] & words.first_mask, words.second[0] & words.second_mask


@contextlib.contextmanager
def put_back() -> Iterator[None]:
    _, cache, cpu, cuda = told()
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cache)
        torch.set_autocast_dtype("cpu", cpu)
        torch.set_autocast_dtype("cuda", cuda)


def test_there_is_a_view_where_ci_runs() -> None:
    """Linux on x86-64 with a torch from its index: where the rest of this file must not be skipped unseen."""
    if thread_words.view() is None or key_sets.view() is None:
        pytest.skip("torch's thread state cannot be read here")
    assert autocast_words.view() is not None


@needs_a_view
@given(
    scopes=st.lists(
        st.tuples(
            st.sampled_from(["cpu", "cuda"]),
            st.sampled_from([torch.bfloat16, torch.float16]),
            st.booleans(),
            st.booleans(),
        ),
        max_size=5,
    )
)
@settings(max_examples=80, deadline=None)
def test_equal_words_are_equal_states(scopes: list[tuple[str, torch.dtype, bool, bool]]) -> None:
    states: dict[tuple[int, int], tuple[Any, ...]] = {read(): told()}
    by_state: dict[tuple[Any, ...], tuple[int, int]] = {told(): read()}
    with contextlib.ExitStack() as stack:
        for kind, dtype, enabled, cached in scopes:
            # CUDA's scope warns and is off without a GPU; what it sets is set all the same.
            stack.enter_context(
                torch.autocast(kind, dtype=dtype, enabled=enabled and kind == "cpu", cache_enabled=cached)
            )
            assert states.setdefault(read(), told()) == told()
            assert by_state.setdefault(told(), read()) == read()
    assert read() == by_state[told()]


@needs_a_view
@pytest.mark.parametrize("what", ["nesting", "cache", "cpu", "cuda"])
def test_the_quick_check_sees_each_value(what: str) -> None:
    holds = quick_check(observe())
    assert holds()
    with put_back():
        if what == "nesting":
            torch.autocast_increment_nesting()
            assert not holds()
            torch.autocast_decrement_nesting()
        elif what == "cache":
            torch.set_autocast_cache_enabled(not torch.is_autocast_cache_enabled())
            assert not holds()
        else:
            torch.set_autocast_dtype(what, torch.float32)
            assert not holds()
    assert holds()


@needs_a_view
def test_looking_changes_nothing_and_every_thread_has_its_own() -> None:
    found: list[Any] = []

    def look() -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            before = told()
            words = autocast_words.view()
            assert told() == before and words is not None
            found.append((words, read()))

    mine = read()
    with torch.autocast("cpu"):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert read() != mine
    assert read() == mine
    assert found and found[0][1] != mine


@needs_a_view
@pytest.mark.parametrize("fault", ["changes nothing", "changes too much", "is not undone"])
def test_where_the_search_is_not_clear_there_is_no_view(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = autocast_words._changes()
    block = autocast_words._block()
    assert block is not None
    nothing = (lambda: None, lambda: None)
    if fault == "changes nothing":
        monkeypatch.setattr(autocast_words, "_changes", lambda: [*changes, nothing])
    elif fault == "is not undone":
        # Balanced over the two looks: up, and not down again before the second.
        up = changes[0][0]
        monkeypatch.setattr(autocast_words, "_changes", lambda: [(up, lambda: None), *changes])
    else:
        monkeypatch.setattr(autocast_words, "_MOST_BYTES", 0)
    try:
        assert autocast_words._look() is None
    finally:
        while told()[0]:
            torch.autocast_decrement_nesting()
