"""Policies: what each of them decides, against slow models; the laws under each; and policies as text."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo_greenlet import InTurn, Pct, PhaseOffset, RoundRobin, Scheduler, Scripted, SeededRandom, dbo_yield
from dbo_greenlet.errors import ConfigurationError
from dbo_greenlet.policies import policy_from_text, text_of
from dbo_greenlet.schedule import Schedule
from tests.core import policy_models
from tests.core.programs import Action, play

CARRIERS = ["greenlet", "thread"]
Model = Callable[[list[int]], list[int]]

SEEDS = st.integers(0, 2**64)


@st.composite
def policies_with_models(draw: st.DrawFn) -> tuple[Any, Model]:
    """A policy, and what it has to decide for given numbers of slices."""
    kind = draw(st.sampled_from(["round_robin", "in_turn", "phase_offset", "random", "pct"]))
    if kind == "round_robin":
        return RoundRobin(), policy_models.round_robin
    if kind == "in_turn":
        return InTurn(), policy_models.in_turn
    if kind == "phase_offset":
        offset = draw(st.integers(0, 14))
        return PhaseOffset(offset), lambda slices: policy_models.phase_offset(slices, offset)
    seed = draw(SEEDS)
    if kind == "random":
        return SeededRandom(seed), lambda slices: policy_models.seeded(slices, seed)
    depth = draw(st.integers(1, 6))
    length = draw(st.integers(max(1, depth - 1), 40))
    return Pct(seed, depth, length), lambda slices: policy_models.pct(slices, seed, depth, length)


@st.composite
def uneven_programs(draw: st.DrawFn) -> list[list[Action]]:
    """Programs in which every send has a name of its own, and something is done right after every yield."""
    kinds = st.sampled_from(["work", "yield", "yield", "receive sibling's", "send", "send"])
    programs = draw(st.lists(st.lists(kinds, max_size=12), min_size=1, max_size=4))
    out: list[list[Action]] = []
    for index, program in enumerate(programs):
        actions: list[Action] = []
        for position, kind in enumerate(program):
            actions.append((kind, f"{index}.{position}"))
            if kind == "yield":
                actions.append(("work", f"after {index}.{position}"))
        out.append(actions)
    return out


def slices_of(programs: list[list[Action]]) -> list[int]:
    return [1 + sum(kind == "yield" for kind, _ in program) for program in programs]


def yields(slices: int) -> Callable[[], None]:
    def entry() -> None:
        for k in range(slices - 1):
            dbo_yield(f"s{k}")

    return entry


def decisions(policy: Any, slices: list[int]) -> list[int]:
    return list(Scheduler(policy, strict=False).run([yields(n) for n in slices]).schedule.decisions)


# -- the laws, under each of them --------------------------------------------------------------------------------------


@pytest.mark.parametrize("carrier", CARRIERS)
def test_steps_go_as_the_slow_models_say(carrier: str) -> None:
    @settings(max_examples=300 if carrier == "greenlet" else 60)
    @given(uneven_programs(), policies_with_models())
    def check(programs: list[list[Action]], chosen: tuple[Any, Model]) -> None:
        policy, model = chosen
        log: list[Any] = []
        entries = [play(i, p, log) for i, p in enumerate(programs)]
        schedule = Scheduler(policy, carrier=carrier, strict=False).run(entries).schedule
        assert list(schedule.decisions) == model(slices_of(programs))
        expected_log, sites = policy_models.act_out(programs, schedule.decisions)
        assert log == expected_log
        assert list(schedule.sites) == sites

    check()


@pytest.mark.parametrize("carrier", CARRIERS)
def test_laws_4_and_6_hold_under_every_policy(carrier: str) -> None:
    @settings(max_examples=300 if carrier == "greenlet" else 60)
    @given(uneven_programs(), policies_with_models())
    def check(programs: list[list[Action]], chosen: tuple[Any, Model]) -> None:
        log: list[Any] = []
        entries = [play(i, p, log) for i, p in enumerate(programs)]
        schedule = Scheduler(chosen[0], carrier=carrier, strict=False).run(entries).schedule
        # Law 6.
        slices, completed = slices_of(programs), [0] * len(programs)
        for index in schedule.decisions:
            assert index in policy_models.may_run(completed, slices)
            completed[index] += 1
        assert completed == slices
        # Law 4: what was sent before a yield is received, once, before anything that comes after the yield.
        received = [event[2] for event in log if event[1] == "receive"]
        assert sorted(received) == sorted(name for p in programs for kind, name in p if kind == "send")
        for index, program in enumerate(programs):
            sent: list[str] = []
            for kind, name in program:
                if kind == "send":
                    sent.append(name)
                elif kind == "work" and name.startswith("after"):
                    at = log.index((index, "work", name))
                    assert {event[2] for event in log[:at] if event[1] == "receive"} >= set(sent)

    check()


@given(uneven_programs(), policies_with_models())
def test_what_a_policy_did_can_be_replayed_from_its_text_and_from_the_schedule(
    programs: list[list[Action]], chosen: tuple[Any, Model]
) -> None:
    def run(policy: Any) -> tuple[list[Any], Schedule]:
        log: list[Any] = []
        entries = [play(i, p, log) for i, p in enumerate(programs)]
        return log, Scheduler(policy, strict=False).run(entries).schedule

    log, schedule = run(chosen[0])
    assert run(chosen[0]) == run(policy_from_text(text_of(chosen[0]))) == run(Scripted(schedule)) == (log, schedule)


# -- each of them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "slices", "expected"),
    [
        (InTurn(), [3, 3], "000111"),
        (InTurn(), [2, 1, 3], "001222"),
        (PhaseOffset(0), [3, 3, 3], "012012012"),
        (PhaseOffset(1), [4, 4], "01010101"),
        (PhaseOffset(1), [3, 3, 3], "010210212"),
        (PhaseOffset(2), [6, 6], "001010101011"),
        (PhaseOffset(2), [4, 4, 4], "001010212122"),
        (PhaseOffset(3), [6, 6], "000101010111"),
        (PhaseOffset(6), [6, 6], "000000111111"),
        (PhaseOffset(10**18), [3, 3], "000111"),
        # An early finisher makes no hole: whoever is furthest behind goes on.
        (PhaseOffset(2), [1, 4], "01111"),
        (PhaseOffset(2), [5, 1, 3], "001002022"),
        # These two stand here as numbers, so that every version of Python must come to them.
        (SeededRandom(7), [6, 6], "000101001111"),
        (SeededRandom(11), [4, 4, 4], "001201102212"),
        (Pct(3, depth=3, length=10), [6, 6], "010000011111"),
        (Pct(5, depth=4, length=12), [4, 4, 4], "012012012012"),
    ],
    ids=repr,
)
def test_what_they_decide(policy: Any, slices: list[int], expected: str) -> None:
    assert "".join(map(str, decisions(policy, slices))) == expected


@given(st.integers(1, 5), st.integers(1, 6))
def test_an_offset_of_nothing_is_round_robin_and_one_of_everything_is_in_turn(count: int, slices: int) -> None:
    assert decisions(PhaseOffset(0), [slices] * count) == decisions(RoundRobin(), [slices] * count)
    assert decisions(PhaseOffset(slices), [slices] * count) == decisions(InTurn(), [slices] * count)


def every_schedule(slices: list[int]) -> set[tuple[int, ...]]:
    found: set[tuple[int, ...]] = set()

    def go_on(completed: list[int], taken: tuple[int, ...]) -> None:
        able = policy_models.may_run(completed, slices)
        if not able:
            found.add(taken)
        for index in able:
            go_on([n + (i == index) for i, n in enumerate(completed)], (*taken, index))

    go_on([0] * len(slices), ())
    return found


@pytest.mark.parametrize("slices", [[4, 4], [2, 2, 2], [1, 3, 2]])
def test_chance_comes_to_every_schedule_that_law_6_allows(slices: list[int]) -> None:
    allowed = every_schedule(slices)
    assert {tuple(decisions(SeededRandom(seed), slices)) for seed in range(400)} == allowed
    assert {tuple(decisions(Pct(seed, 6, 8), slices)) for seed in range(3000)} == allowed


def test_a_seed_begins_anew_in_each_step_and_a_generator_goes_on() -> None:
    for make in (SeededRandom, partial(Pct, length=18)):
        policy = make(5)
        assert len({tuple(decisions(policy, [9, 9])) for _ in range(5)}) == 1
        assert len({tuple(decisions(make(seed), [9, 9])) for seed in range(30)}) > 2
        shared = make(rng=random.Random(5))
        steps = [tuple(decisions(shared, [9, 9])) for _ in range(30)]
        assert len(set(steps)) > 2
        again = make(rng=random.Random(5))
        assert [tuple(decisions(again, [9, 9])) for _ in range(30)] == steps


@given(st.randoms(), st.lists(st.integers(1, 8), min_size=1, max_size=4))
def test_hypothesis_can_hand_in_the_generator(rng: random.Random, slices: list[int]) -> None:
    for policy in (SeededRandom(rng=rng), Pct(depth=3, length=12, rng=rng)):
        completed = [0] * len(slices)
        for index in decisions(policy, slices):
            assert index in policy_models.may_run(completed, slices)
            completed[index] += 1
        assert completed == slices


def test_without_changes_pct_knows_two_orders_of_two_microbatches() -> None:
    orders = [tuple(decisions(Pct(seed, 1), [5, 5])) for seed in range(200)]
    assert set(orders) == {(0, 1) * 5, (0,) * 5 + (1,) * 5}
    # The priorities are drawn evenly; of 200, 70 is four standard deviations off.
    assert 70 < orders.count((0, 1) * 5) < 130


class Dice:
    """In place of a generator: answers what it was given, so that every outcome can be had once."""

    def __init__(self, faces: tuple[int, ...]) -> None:
        self.faces = iter(faces)

    def randrange(self, bound: int) -> int:
        return next(self.faces)


@pytest.mark.parametrize(("first", "second"), [(2, 1), (4, 2), (7, 1), (7, 6)])
@pytest.mark.parametrize("depth", [2, 3])
def test_pct_meets_a_bug_of_that_depth_as_often_as_it_promises(depth: int, first: int, second: int) -> None:
    """The bug: microbatch 1 runs slice `second` between slices `first` and `first` + 1 of microbatch 0, which then, at
    depth 3, goes on to its end before microbatch 1 does."""
    slices = 9
    length = 2 * slices

    def meets(taken: list[int]) -> bool:
        ones = [n for n, index in enumerate(taken) if index == 1]
        between = taken[: ones[second]].count(0) == first + 1
        return between and (depth == 2 or taken[: ones[second + 1]].count(0) == slices)

    # Two priorities, and then each change: every outcome is as likely as the others.
    outcomes = list(product(range(2), range(1), *(range(length - n) for n in range(depth - 1))))
    met = sum(meets(decisions(Pct(depth=depth, length=length, rng=Dice(faces)), [slices] * 2)) for faces in outcomes)
    assert met / len(outcomes) >= 1 / (2 * length ** (depth - 1))


def test_a_step_inside_a_step_under_the_same_policy() -> None:
    for policy in (PhaseOffset(2), SeededRandom(3), Pct(4, 3, 12), InTurn()):
        alone = Scheduler(policy).run([yields(5)] * 2).schedule
        scheduler = Scheduler(policy)

        def entry(scheduler: Any = scheduler) -> Any:
            dbo_yield("s0")
            inner = scheduler.run([yields(5)] * 2).schedule
            for k in range(1, 4):
                dbo_yield(f"s{k}")
            return inner

        both = scheduler.run([entry] * 2)
        assert both.outputs == [alone, alone] and both.schedule == alone


# -- as text -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "policy", "canonical"),
    [
        ("round_robin", RoundRobin(), None),
        ("in_turn", InTurn(), None),
        ("phase_offset:2", PhaseOffset(2), None),
        ("phase_offset:02", PhaseOffset(2), "phase_offset:2"),
        ("random:7", SeededRandom(7), None),
        ("random:18446744073709551615", SeededRandom(2**64 - 1), None),
        ("pct:7", Pct(7, 2, 100), "pct:7,depth=2,length=100"),
        ("pct:7,depth=3", Pct(7, 3, 100), "pct:7,depth=3,length=100"),
        ("pct:7,length=40", Pct(7, 2, 40), "pct:7,depth=2,length=40"),
        ("pct:7,depth=3,length=40", Pct(7, 3, 40), None),
    ],
)
def test_texts_of_policies(text: str, policy: Any, canonical: str | None) -> None:
    read = policy_from_text(text)
    assert repr(read) == repr(policy) and type(read) is type(policy)
    assert text_of(read) == (canonical or text)
    assert read.name == text.split(":")[0]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "chance",
        "round_robin:1",
        "Round_Robin",
        "scripted",
        "phase_offset",
        "phase_offset:",
        "phase_offset:-1",
        "phase_offset:1.5",
        "random",
        "random:-7",
        "random:x",
        "random:1_000",
        "random:٣",
        "random:999999999999999999999",
        "pct:",
        "pct:7,length=40,depth=3",
        "pct:7,depth=3,",
        "pct:7;depth=3",
        " random:7",
        "random:7\n",
    ],
)
def test_what_is_no_policy(text: str) -> None:
    with pytest.raises(
        ConfigurationError, match="^policy is .*; use one of round_robin, in_turn, phase_offset:YIELDS, ran"
    ):
        policy_from_text(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pct:7,depth=0", "--order is 'pct:7,depth=0': a depth of 0; use a whole number, 1 or more"),
        ("pct:7,length=0", "a length of 0 decisions; use a whole number, 1 to 50000000"),
        ("pct:7,length=50000001", "a length of 50000001 decisions"),
        ("pct:7,depth=12,length=10", "a depth of 12 has 11 changes, and a length of 10 has no room for them"),
    ],
)
def test_numbers_that_a_policy_cannot_have(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        policy_from_text(text, setting="--order")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PhaseOffset(-1), "a phase offset of -1 yields; use a whole number, 0 or more"),
        (lambda: PhaseOffset(True), "a phase offset of True yields"),
        (lambda: PhaseOffset(1.5), "a phase offset of 1.5 yields"),
        (lambda: SeededRandom(-7), "a seed of -7; use a whole number, 0 or more"),
        (lambda: SeededRandom("7"), "a seed of '7'"),
        (lambda: Pct(None), "a seed of None"),
        (lambda: Pct(1, depth=2.0), "a depth of 2.0"),
    ],
)
def test_settings_that_cannot_work(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make()
    assert message in str(caught.value)


class Backwards(PhaseOffset):
    pass


@pytest.mark.parametrize(
    "policy", [SeededRandom(rng=random.Random(1)), Pct(rng=random.Random(1)), Scripted([0, 1]), Backwards(2)]
)
def test_a_policy_without_a_text(policy: Any) -> None:
    with pytest.raises(ConfigurationError, match="cannot be written as text; keep the step's schedule instead"):
        text_of(policy)


def test_policies_import_neither_torch_nor_anything_else() -> None:
    code = (
        "import sys; from dbo_greenlet import *; import dbo_greenlet.policies as p; "
        "print(Pct is p.Pct, policy_from_text is p.policy_from_text); "
        "print(Scheduler(PhaseOffset(1)).run([dbo_yield] * 2).schedule.decisions); "
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'numpy', 'hypothesis', 'pytest'}))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert done.stdout.splitlines() == ["True True", "(0, 1, 0, 1)", "[]"], done.stderr
