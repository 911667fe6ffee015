"""Law 3 as a property: interleaved or by itself, a microbatch sees the same, and the thread is left as it was."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo_greenlet import RoundRobin, Scheduler, make_ubatch_contexts, register_direct_op
from dbo_greenlet.errors import MicrobatchFailed
from dbo_greenlet.torch_state import Baseline, observe
from tests.thread_state.programs import SCOPES, STREAMS, Boom, DispatchLog, FunctionLog, Player, Statement, snapshot

# DBO_GREENLET_EXAMPLES=5000 for a long search.
EXAMPLES = int(os.environ.get("DBO_GREENLET_EXAMPLES", "120"))


class Shuffled:
    """Any microbatch that may run, drawn from a seed."""

    name = "shuffled"

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def start(self, step: Any) -> Callable[[], int]:
        draw = random.Random(self.seed)
        return lambda: draw.choice(step.runnable())


leaves: st.SearchStrategy[Statement] = st.one_of(
    st.just(("look",)), st.sampled_from([("yield", "a"), ("yield", "b"), ("yield", "c")]), st.just(("operator",))
)
statements = st.recursive(
    leaves,
    lambda inner: st.tuples(st.just("scope"), st.sampled_from(sorted(SCOPES)), st.lists(inner, min_size=1, max_size=4)),
    max_leaves=10,
)
programs = st.lists(st.lists(statements, min_size=1, max_size=5), min_size=2, max_size=4)
policies = st.one_of(st.just(RoundRobin()), st.integers(0, 9).map(Shuffled))
# What is on round the whole step.
surroundings = st.sampled_from(
    ["nothing", "no_grad", "inference", "autocast bfloat16", "dispatch mode", "function mode", "meta device"]
)


@pytest.fixture(autouse=True)
def _direct() -> Iterator[None]:
    registered = register_direct_op("dbo_test_state::project")
    yield
    registered.remove()


@contextlib.contextmanager
def surrounding(kind: str) -> Any:
    if kind == "nothing":
        yield
    elif kind == "dispatch mode":
        with DispatchLog("outer", []):
            yield
    elif kind == "function mode":
        with FunctionLog("outer", []):
            yield
    else:
        with SCOPES[kind]("outer", []):
            yield


def interleaved(players: list[Player], policy: Any) -> list[list[Any]]:
    contexts = make_ubatch_contexts(len(players), device=STREAMS)
    return Scheduler(policy, strict=False).run(players, contexts).outputs


def test_interleaving_changes_nothing_a_microbatch_can_see() -> None:
    @settings(max_examples=EXAMPLES)
    @given(programs, policies, surroundings)
    def check(trees: list[list[Statement]], policy: Any, around: str) -> None:
        untouched = snapshot()
        with surrounding(around):
            before = snapshot()
            alone = [Player(f"m{i}", tree)() for i, tree in enumerate(trees)]
            together = interleaved([Player(f"m{i}", tree) for i, tree in enumerate(trees)], policy)
            assert snapshot() == before
        assert together == alone
        assert snapshot() == untouched

    check()


def with_failure(tree: list[Statement], position: int) -> list[Statement]:
    """`tree` with a raise in place of its statement number `position` (modulo their number, in order of execution)."""
    count = 0

    def size(statements: list[Statement]) -> int:
        return sum(1 + (size(s[2]) if s[0] == "scope" else 0) for s in statements)

    wanted = position % size(tree)

    def rebuild(statements: list[Statement]) -> list[Statement]:
        nonlocal count
        built = []
        for statement in statements:
            here = count == wanted
            count += 1
            if statement[0] == "scope":
                statement = ("scope", statement[1], rebuild(statement[2]))
            built.append(("raise", "on purpose") if here else statement)
        return built

    return rebuild(tree)


def test_a_failure_anywhere_leaves_the_thread_as_it_was() -> None:
    @settings(max_examples=EXAMPLES)
    @given(programs, policies, surroundings, st.integers(0, 3), st.integers(0, 200))
    def check(trees: list[list[Statement]], policy: Any, around: str, victim: int, position: int) -> None:
        victim %= len(trees)
        trees = [with_failure(tree, position) if i == victim else tree for i, tree in enumerate(trees)]
        untouched = snapshot()
        with surrounding(around):
            before = snapshot()
            players = [Player(f"m{i}", tree) for i, tree in enumerate(trees)]
            with contextlib.suppress(MicrobatchFailed):
                interleaved(players, policy)
                raise AssertionError("the failing microbatch did not fail the step")
            assert snapshot() == before
            # Every scope that a microbatch had entered was left, by the failure or by the unwinding.
            assert [player.open_scopes for player in players] == [0] * len(players)
            # What the failing microbatch saw on its way there is what it sees by itself.
            alone = Player(f"m{victim}", trees[victim])
            with contextlib.suppress(Boom):
                alone()
            assert players[victim].log == alone.log
            # And the thread still works.
            assert Player("after", [("look",)])()[0][0]["grad"] == torch.is_grad_enabled()
        assert snapshot() == untouched

    check()


def test_the_comparison_can_fail() -> None:
    """Without the mechanism, the smallest program of the kind is caught: the check above looks at something."""
    tree: list[Statement] = [("scope", "inference", [("yield", "a"), ("look",)]), ("look",)]
    alone = Player("m0", tree)()
    before = snapshot()
    clean = Baseline(observe())
    players = [Player("m0", tree), Player("m1", tree)]
    try:
        Scheduler(thread_state=None, strict=False).run(players)
        left, seen = snapshot(), players[1].log
    finally:
        clean.restore(observe())
    assert left != before
    assert seen != alone
    assert snapshot() == before
