"""Hypothesis strategies for what a step is made of: programs, policies, schedules and faults.

What they give prints as code that runs, and shrinks towards the plain case: fewer and shorter programs, one microbatch
after the other, no fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from ..policy import Policy
from ..schedule import MAX_MICROBATCHES, Schedule
from .faults import Fault, Faults
from .step_programs import Action, Chosen

__all__ = ["actions", "choices", "faults", "faults_in", "policies", "policy_of", "programs", "schedules"]

SITES = ("a", "b", "c")
# What the differential model knows and a run in one process survives, KeyboardInterrupt aside.
HARMLESS_TO_PYTEST = ("raise", "late", "early", "reorder", "fail", "empty", "oom")


def actions() -> st.SearchStrategy[Action]:
    """One action of a program (`step_programs`) that raises nothing. Yields and dispatches come up most."""
    return st.one_of(
        st.tuples(st.just("yield"), st.sampled_from(SITES)),
        st.just(("dispatch", "")),
        st.tuples(st.just("work"), st.sampled_from(("p", "q"))),
        st.sampled_from([("combine", ""), ("receive sibling's", ""), ("allocate", ""), ("inner step", "good")]),
    )


def programs(
    *, most: int = 3, longest: int = 10, failing: bool = True, even: bool = False
) -> st.SearchStrategy[list[list[Action]]]:
    """Programs for 1 to `most` microbatches, of up to `longest` actions each.

    Args:
        failing: now and then one that raises, or returns early.
        even: the same program for each, as the microbatches of a model have it; they pass the same yield sites.
    """
    one: st.SearchStrategy[list[Action]] = st.lists(actions(), max_size=longest)
    if failing:
        last = st.sampled_from([("return", ""), ("raise", "x"), ("inner step", "bad")])
        one = st.one_of(one, one, one, st.builds(lambda before, end: [*before, end], one, last))
    if even:
        return st.tuples(one, st.integers(1, most)).map(lambda drawn: [drawn[0]] * drawn[1])
    return st.lists(one, min_size=1, max_size=most)


def choices(*, most: int = 40) -> st.SearchStrategy[list[int]]:
    """Choices for `Chosen`: every order that law 6 allows for up to four microbatches and `most` decisions."""
    return st.lists(st.integers(0, 3), max_size=most)


def policies() -> st.SearchStrategy[list[int] | str]:
    """A policy for `policy_of`: a list of choices, or the name of one of the package's policies with its numbers."""
    seed = st.integers(0, 2**32)
    return st.one_of(
        choices(),
        st.just("round_robin"),
        st.integers(0, 5).map(lambda offset: f"phase_offset:{offset}"),
        seed.map(lambda drawn: f"random:{drawn}"),
        st.tuples(seed, st.integers(1, 4)).map(lambda drawn: f"pct:{drawn[0]},depth={drawn[1]},length=40"),
    )


def policy_of(drawn: Sequence[int] | str) -> Policy:
    """The policy that `policies` drew.

    Raises:
        ConfigurationError: a name that is none.
    """
    if isinstance(drawn, str):
        from ..policies import policy_from_text

        return policy_from_text(drawn)
    return Chosen(drawn)


@st.composite
def schedules(draw: Callable[..., Any], *, most: int = 4, slices: int = 8, sites: bool = True) -> Schedule:
    """A schedule that law 6 allows, of 1 to `most` microbatches with 1 to `slices` slices each.

    With `sites`, each slice ends at a site and the last of each microbatch returns; without, as a decoded one has it.
    """
    lengths = draw(st.lists(st.integers(1, slices), min_size=1, max_size=min(most, MAX_MICROBATCHES)))
    completed = [0] * len(lengths)
    decisions: list[int] = []
    names: list[str] = []

    def may_run(index: int) -> bool:
        return completed[index] < lengths[index] and all(
            completed[i] > completed[index] or completed[i] == lengths[i] for i in range(index)
        )

    while able := [i for i in range(len(lengths)) if may_run(i)]:
        index = draw(st.sampled_from(able))
        completed[index] += 1
        decisions.append(index)
        names.append("" if completed[index] == lengths[index] else draw(st.sampled_from(SITES)))
    return Schedule(len(lengths), tuple(decisions), tuple(names) if sites else ())


def faults(
    *,
    count: int = 3,
    yields: int = 4,
    transfers: int = 3,
    most: int = 2,
    kinds: Sequence[str] = HARMLESS_TO_PYTEST,
) -> st.SearchStrategy[Faults]:
    """Up to `most` faults in microbatches below `count`, whether or not a step comes to them.

    See `Faults.random` for the numbers. With "signal" in `kinds` the run may end with KeyboardInterrupt.
    """
    places = [
        (kind, index, number)
        for kind in kinds
        for index in range(count)
        for number in ([None] if kind == "empty" else range(yields if kind in ("raise", "signal") else transfers))
    ]
    return st.lists(_fault_at(places), max_size=most).map(Faults)


def faults_in(
    programs: Sequence[Sequence[Action]], *, most: int = 2, kinds: Sequence[str] = HARMLESS_TO_PYTEST
) -> st.SearchStrategy[Faults]:
    """Up to `most` faults at places that `programs` have: those of a kind for which there is no place are not drawn."""
    places: list[tuple[str, int, int | None]] = []
    for index, program in enumerate(programs):
        happen = Counter(_STRUCK_BY.get(kind, kind) for kind, _ in program)
        for kind in kinds:
            if kind == "empty":
                places.append((kind, index, None))
            else:
                what = {"raise": "yield", "signal": "yield", "oom": "allocate"}.get(kind, "transfer")
                places += [(kind, index, number) for number in range(happen[what])]
    return st.lists(_fault_at(places), max_size=most).map(Faults) if places else st.just(Faults())


_STRUCK_BY = {"dispatch": "transfer", "combine": "transfer"}


def _fault_at(places: Sequence[tuple[str, int, int | None]]) -> st.SearchStrategy[Fault]:
    def at(place: tuple[str, int, int | None]) -> st.SearchStrategy[Fault]:
        kind, index, number = place
        if kind == "late":
            return st.integers(1, 1000).map(lambda us: Fault(kind, index, number, nanoseconds=1000 * us))
        return st.just(Fault(kind, index, number, signal="INT" if kind == "signal" else ""))

    return st.sampled_from(places).flatmap(at)
