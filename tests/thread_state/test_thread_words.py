"""Flags that are read from memory: they say what torch's getters say, in every thread, or nothing is read."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from dbo_greenlet import key_sets, thread_words
from dbo_greenlet.torch_observe import brief_check, observe
from tests.thread_state.programs import SCOPES, snapshot

# Positions of an observation that the brief check does not cover: what autocast would do if it were on, and the flags
# of a dispatch mode that is at work.
NOT_COVERED = {4, 13, 14, 15}

needs_a_view = pytest.mark.skipif(
    thread_words.view() is None or key_sets.view() is None,
    reason="torch's thread state cannot be read here",
)


def covered(seen: tuple[Any, ...]) -> list[Any]:
    return [value for position, value in enumerate(seen) if position not in NOT_COVERED]


@needs_a_view
@pytest.mark.parametrize("around", ["nothing", "inference", "no_grad"])
def test_the_brief_check_sees_every_change_of_what_it_covers(around: str) -> None:
    scope = SCOPES[around] if around != "nothing" else lambda name, log: torch.enable_grad()
    with scope("outer", []):
        base = observe()
        holds = brief_check(base)
        assert holds is not None and holds()
        noticed = 0
        for kind, inner in SCOPES.items():
            with inner("inner", []):
                if covered(observe()) != covered(base):
                    assert not holds(), kind
                    noticed += 1
                else:
                    assert holds(), kind
            assert holds(), kind
        assert noticed > 10


@needs_a_view
def test_looking_changes_nothing_and_every_thread_has_its_own() -> None:
    before = snapshot()
    found: list[Any] = []

    def look() -> None:
        own = snapshot()
        with torch.no_grad():
            words = thread_words.view()
        assert snapshot() == own
        found.append(words)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert snapshot() == before
    here = thread_words.view()
    assert found[0] is not None and here is not None
    with torch.inference_mode():
        assert here.autograd[0] & here.mask != found[0].autograd[0] & found[0].mask


def look_anew(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(thread_words, "_here", thread_words._PerThread())
    return thread_words.view()


@needs_a_view
def test_a_flag_that_cannot_be_found_in_memory_means_no_view(monkeypatch: pytest.MonkeyPatch) -> None:
    state = [True]
    elsewhere = (lambda: state[0], lambda value: state.__setitem__(0, value))
    monkeypatch.setattr(thread_words, "_FLAGS", (*thread_words._FLAGS, elsewhere))
    assert look_anew(monkeypatch) is None


@pytest.mark.parametrize("name", ["_AUTOGRAD", "_FUNCTIONS"])
def test_a_library_without_the_symbol_means_no_view(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_words, name, "_ZN3c1013NoSuchSymbolEv")
    assert look_anew(monkeypatch) is None


def test_another_machine_means_no_view(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_words.platform, "machine", lambda: "aarch64")
    assert look_anew(monkeypatch) is None
    assert brief_check(observe()) is None
