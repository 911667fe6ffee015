"""Order of events, receives and decisions: whole event lists against the slow simulation, on both carriers."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo_greenlet import RoundRobin, Scheduler, Scripted, dbo_current_ubatch_id, dbo_enabled, dbo_yield
from dbo_greenlet.errors import ConfigurationError, PolicyError, ReplayMismatch, ScheduleDivergence
from dbo_greenlet.schedule import Schedule
from tests.core.programs import Action, play, simulate

CARRIERS = ["greenlet", "thread"]

actions = st.one_of(
    st.tuples(st.just("work"), st.sampled_from("pqr")),
    st.tuples(st.just("yield"), st.sampled_from("abc")),
    st.just(("receive sibling's", "")),
    st.just(("send", "?")),
)


@st.composite
def uneven_programs(draw: st.DrawFn) -> list[list[Action]]:
    programs = draw(st.lists(st.lists(actions, max_size=12), min_size=1, max_size=4))
    # Every send has a name of its own, so that "exactly once" can be read off the log.
    return [
        [(kind, f"{i}.{k}" if kind == "send" else name) for k, (kind, name) in enumerate(p)]
        for i, p in enumerate(programs)
    ]


@pytest.mark.parametrize("carrier", CARRIERS)
def test_any_programs_run_as_simulated(carrier: str) -> None:
    @settings(max_examples=300 if carrier == "greenlet" else 60)
    @given(uneven_programs())
    def check(programs: list[list[Action]]) -> None:
        log: list[Any] = []
        result = Scheduler(carrier=carrier, strict=False).run([play(i, p, log) for i, p in enumerate(programs)])
        expected_log, decisions, sites = simulate(programs)
        assert log == expected_log
        assert list(result.schedule.decisions) == decisions
        assert list(result.schedule.sites) == sites
        assert result.outputs == [f"output {i}" for i in range(len(programs))]
        assert list(result.yields) == [sum(kind == "yield" for kind, _ in p) for p in programs]

    check()


@given(uneven_programs())
def test_every_receive_runs_exactly_once(programs: list[list[Action]]) -> None:
    log: list[Any] = []
    Scheduler(strict=False).run([play(i, p, log) for i, p in enumerate(programs)])
    sent = sorted(name for p in programs for kind, name in p if kind == "send")
    assert sorted(event[2] for event in log if event[1] == "receive") == sent


@given(uneven_programs())
def test_carriers_take_the_same_decisions(programs: list[list[Action]]) -> None:
    schedules = []
    for carrier in CARRIERS:
        schedules.append(
            Scheduler(carrier=carrier, strict=False).run([play(i, p, []) for i, p in enumerate(programs)]).schedule
        )
    assert schedules[0] == schedules[1]
    assert schedules[0].hash == schedules[1].hash


class Seeded:
    """A policy that answers at random among what the laws allow."""

    name = "seeded"

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def start(self, step: Any) -> Any:
        rng = random.Random(self.seed)
        return lambda: rng.choice(step.runnable())


@pytest.mark.parametrize("carrier", CARRIERS)
def test_laws_hold_under_any_policy(carrier: str) -> None:
    @settings(max_examples=150 if carrier == "greenlet" else 30)
    @given(uneven_programs(), st.integers(0, 2**32))
    def check(programs: list[list[Action]], seed: int) -> None:
        log: list[Any] = []
        entries = [play(i, p, log) for i, p in enumerate(programs)]
        result = Scheduler(Seeded(seed), carrier=carrier, strict=False).run(entries)
        # Law 6: when a slice starts, each earlier microbatch has completed more slices, or is done.
        completed = [0] * len(programs)
        slices = [result.schedule.decisions.count(i) for i in range(len(programs))]
        for index in result.schedule.decisions:
            for earlier in range(index):
                assert completed[earlier] > completed[index] or completed[earlier] == slices[earlier]
            completed[index] += 1
        # Law 4: between a send and the end of the owner's next yield its receive ran, exactly once.
        for i, program in enumerate(programs):
            mine = [e for e in log if (e[1] == "receive" and e[0] == i) or (e[0] == i and e[1] in ("send", "work"))]
            for kind, name in program:
                if kind == "send":
                    sent = mine.index((i, "send", name))
                    received = [k for k, e in enumerate(mine) if e[1] == "receive" and e[2] == name]
                    assert len(received) == 1 and received[0] > sent
        # A replay of the decisions gives the same step, down to the log.
        again: list[Any] = []
        replayed = Scheduler(Scripted(result.schedule), strict=False).run(
            [play(i, p, again) for i, p in enumerate(programs)]
        )
        assert again == log
        assert replayed.schedule == result.schedule

    check()


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_round_robin_goes_in_turn(carrier: str, count: int) -> None:
    def entry() -> int:
        for k in range(3):
            dbo_yield(f"s{k}")
        return dbo_current_ubatch_id()

    result = Scheduler(carrier=carrier, strict=True).run([entry] * count)
    assert result.schedule.decisions == tuple(range(count)) * 4
    assert result.schedule.sites == tuple(s for s in ("s0", "s1", "s2", "") for _ in range(count))
    assert result.outputs == list(range(count))


@pytest.mark.parametrize("carrier", CARRIERS)
def test_enabled_inside_and_nowhere_else(carrier: str) -> None:
    assert not dbo_enabled() and dbo_current_ubatch_id() == 0
    result = Scheduler(carrier=carrier).run([lambda: dbo_enabled()] * 2)
    assert result.outputs == [True, True]
    assert not dbo_enabled() and dbo_current_ubatch_id() == 0


# -- strict mode -----------------------------------------------------------------------------------------------------


def yields(*sites: str) -> Any:
    def entry() -> None:
        for site in sites:
            dbo_yield(site)

    return entry


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("ab", "ac", r"yield 1: microbatch 0 yielded at 'b', microbatch 1 yielded at 'c'"),
        ("ab", "a", r"yield 1: microbatch 0 yielded at 'b', microbatch 1 returned"),
        ("a", "ab", r"yield 1: microbatch 0 returned, microbatch 1 yielded at 'b'"),
        ("", "a", r"yield 0: microbatch 0 returned, microbatch 1 yielded at 'a'"),
    ],
)
def test_strict_mode_names_both_sides_and_the_place(carrier: str, first: str, second: str, message: str) -> None:
    with pytest.raises(ScheduleDivergence, match=message):
        Scheduler(carrier=carrier, strict=True).run([yields(*first), yields(*second)])
    assert Scheduler(carrier=carrier, strict=False).run([yields(*first), yields(*second)]).yields == (
        len(first),
        len(second),
    )


def test_strict_mode_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DBO_GREENLET_STRICT", "1")
    assert Scheduler().strict
    monkeypatch.setenv("DBO_GREENLET_STRICT", "0")
    assert not Scheduler().strict
    assert Scheduler(strict=True).strict


# -- policies --------------------------------------------------------------------------------------------------------


class Answers:
    name = "answers"

    def __init__(self, *answers: Any) -> None:
        self.answers = answers

    def start(self, step: Any) -> Any:
        remaining = iter(self.answers)
        return lambda: next(remaining)


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ((1,), r"picked microbatch 1, which would overtake.*runnable: \[0\]"),
        ((0, 1, 1), r"picked microbatch 1, which would overtake"),
        ((0, 0, 0), r"picked microbatch 0, which is done"),
        ((2,), r"answered 2"),
        ((-1,), r"answered -1"),
        (("0",), r"answered '0'"),
    ],
)
def test_a_policy_cannot_break_the_laws(carrier: str, answers: tuple[Any, ...], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        Scheduler(Answers(*answers), carrier=carrier).run([yields("a"), yields("a")])
    assert Scheduler(carrier=carrier).run([yields("a"), yields("a")]).yields == (1, 1)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_an_error_of_the_policy_itself_reaches_the_caller(carrier: str) -> None:
    with pytest.raises(StopIteration):
        Scheduler(Answers(0, 1), carrier=carrier).run([yields("a"), yields("a")])
    assert not dbo_enabled()


def test_replay_from_each_form() -> None:
    entries = [yields("a", "b"), yields("a", "b")]
    schedule = Scheduler().run(entries).schedule
    for script in (schedule, schedule.encode(), list(schedule.decisions)):
        assert Scheduler(Scripted(script)).run(entries).schedule == schedule


@pytest.mark.parametrize(
    ("script", "programs", "message"),
    [
        (Schedule(2, (0, 1, 0, 1), ("a", "a", "", "")), ("b", "b"), r"decision 0: .*'b'.*'a'"),
        (Schedule(2, (0, 1, 0, 1), ("a", "a", "", "")), ("ab", "ab"), r"decision 2: .*'b'.*returned"),
        (Schedule(2, (0, 1, 0, 1)), ("ab", "ab"), r"decision 4: the recorded step ended"),
        (Schedule(2, (0, 1, 0, 1, 0, 1)), ("a", "a"), r"decision 4: .*which cannot run|decision 4: .*complete after 4"),
        (Schedule(2, (1, 0)), ("", ""), r"decision 0: .*resumed microbatch 1, which cannot run"),
    ],
)
def test_replay_stops_at_the_first_difference(script: Schedule, programs: tuple[str, str], message: str) -> None:
    with pytest.raises(ReplayMismatch, match=message):
        Scheduler(Scripted(script)).run([yields(*p) for p in programs])


def test_replay_with_another_number_of_microbatches_is_refused() -> None:
    with pytest.raises(PolicyError, match="for 2 microbatches and this step has 3"):
        Scheduler(Scripted(Schedule(2, (0, 1)))).run([yields()] * 3)


def test_one_policy_serves_many_steps() -> None:
    policy = RoundRobin()
    scheduler = Scheduler(policy)
    assert [scheduler.run([yields("a")] * 2).schedule.hash for _ in range(3)].count(
        Scheduler(policy).run([yields("a")] * 2).schedule.hash
    ) == 3


# -- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"carrier": "fibre"}, "'fibre'.*greenlet.*thread"),
        ({"thread_state": "off"}, "'off'"),
        ({"watchdog": 0}, "watchdog=0"),
        ({"watchdog": float("nan")}, "watchdog=nan"),
    ],
)
def test_settings_that_cannot_work_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Scheduler(**arguments)


@pytest.mark.parametrize("count", [0, 37])
def test_number_of_microbatches(count: int) -> None:
    with pytest.raises(ConfigurationError, match=f"not {count}"):
        Scheduler().run([yields()] * count)


def test_one_context_for_each_microbatch() -> None:
    with pytest.raises(ConfigurationError, match="1 contexts for 2"):
        Scheduler().run([yields()] * 2, [None])


# -- sites -----------------------------------------------------------------------------------------------------------


def test_a_yield_without_a_label_is_named_by_its_line() -> None:
    def entry() -> None:
        dbo_yield()
        for _ in range(2):
            dbo_yield()

    line = entry.__code__.co_firstlineno
    sites = Scheduler().run([entry]).schedule.sites
    assert sites == (*(f"test_scheduler.py:{line + k}" for k in (1, 3, 3)), "")
