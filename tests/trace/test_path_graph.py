"""The longest path of a graph and its what-ifs: against plain recursion, and against truths that were made up first."""

from __future__ import annotations

import random
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo_greenlet.trace.critical_path.graph import AT_MOST, IDLE, ONE_OF, Edge, PathGraph

STAGES = ["attention", "dispatch", "experts", ""]
# A point as drawn: its edges (how many points back, lag, stage), and how much later than they ask it was recorded.
POINT = st.tuples(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9), st.sampled_from(STAGES)), min_size=1, max_size=3),
    st.sampled_from([0, 0, 0, 5]),
)
POINTS = st.lists(POINT, min_size=1, max_size=9)
FACTORS = st.fixed_dictionaries({name: st.sampled_from([0.0, 0.25, 1.0]) for name in [*STAGES[:3], IDLE]})


def edges_of(number: int, drawn: list[tuple[int, int, str]]) -> list[Edge]:
    return [Edge(max(number - back, 0), float(lag), "link", stage) for back, lag, stage in drawn]


@given(POINTS, FACTORS)
def test_every_what_if_is_what_recursion_says(points: list[Any], factors: dict[str, float]) -> None:
    """Times that the edges do not explain are idle time of the edge that came closest."""
    graph = PathGraph(100.0)
    recorded = [100.0]
    binding = [0]
    for number, (drawn, late) in enumerate(points, 1):
        edges = edges_of(number, drawn)
        asked = [recorded[edge.source] + (edge.lag or 0.0) for edge in edges]
        recorded.append(max(asked) + late)
        binding.append(asked.index(max(asked)))
        assert graph.point(recorded[-1], edges) == number

    @cache
    def time(point: int, shorter: bool) -> float:
        if point == 0:
            return 100.0
        drawn, late = points[point - 1]
        latest = -1.0
        for place, edge in enumerate(edges_of(point, drawn)):
            idle = float(late) if place == binding[point] else 0.0
            lag = edge.lag or 0.0
            if shorter:
                lag, idle = lag * (1 - factors.get(edge.stage, 0.0)), idle * (1 - factors[IDLE])
            latest = max(latest, time(edge.source, shorter) + lag + idle)
        return latest

    end = len(points)
    assert list(graph.at) == recorded == [time(point, False) for point in range(end + 1)]
    earliest, latest = graph.shortened([{}, factors], end)
    assert earliest.tolist() == latest.tolist() == [recorded[-1], pytest.approx(time(end, True))]
    path = graph.path(end)
    assert sum(piece.length for piece in path) == pytest.approx(recorded[-1] - 100)
    assert all(one.end == other.begin for one, other in pairwise(path))
    # Nothing gets shorter by more than the path has of it: without its stages the path is still a path.
    gone = sum(piece.length * factors.get(piece.stage, 0.0) for piece in path)
    assert recorded[-1] - earliest[1] <= gone + 1e-9


UNCERTAIN = st.lists(
    st.tuples(
        st.lists(
            st.tuples(st.integers(1, 4), st.integers(0, 9), st.sampled_from(STAGES[:3]), st.sampled_from([0, 1, 1, 2])),
            min_size=2,
            max_size=4,
        ),
        st.sampled_from(["", "dispatch"]),
    ),
    min_size=1,
    max_size=8,
)


@given(UNCERTAIN, FACTORS, st.randoms(use_true_random=False))
def test_the_truth_lies_between_earliest_and_latest(
    points: list[Any], factors: dict[str, float], chance: random.Random
) -> None:
    """A truth is made up first: what of the uncertain was there, how long it was, whose time it was."""
    graph = PathGraph()
    truth: list[list[tuple[int, float, float]]] = [[]]  # of each point (source, lag, lag when shortened)
    recorded = [0.0]
    for number, (drawn, also) in enumerate(points, 1):
        edges = [
            Edge(
                max(number - back, 0),
                float(lag),
                "link",
                stage,
                role=role,
                also=(also,) * bool(also and role == ONE_OF),
            )
            for back, lag, stage, role in drawn
        ]
        asked = [recorded[edge.source] + (edge.lag or 0.0) for edge in edges if edge.role != AT_MOST]
        at = max([*asked, recorded[number - 1]])
        # What is there without a doubt; what may be there, as long as it alone did not set the time; and of those of
        # which one set the time, one that did and others that took what they took.
        open_choice = [edge for edge in edges if edge.role == ONE_OF]
        chosen = chance.choice(open_choice) if open_choice else None
        real: list[tuple[int, float, float]] = []
        for edge in edges:
            left = edge.lag or 0.0
            if edge is chosen:
                left = at - recorded[edge.source]
            elif edge.role == AT_MOST and (chance.random() < 0.5 or recorded[edge.source] + left > at):
                continue
            other = chance.choice([0.0, left, left / 4]) if edge.also else 0.0
            short = (left - other) * (1 - factors[edge.stage]) + other * (1 - factors["dispatch"])
            real.append((edge.source, left, short))
        told = [edge._replace(lag=None) if edge.role == ONE_OF else edge for edge in edges]
        told = [edge for edge in told if edge.role != AT_MOST or recorded[edge.source] + (edge.lag or 0.0) <= at]
        before = Edge(number - 1, 0.0, "order")
        real.append((number - 1, 0.0, 0.0))
        truth.append(real)
        recorded.append(at)
        graph.point(at, [*told, *(Edge(edge.source, 0.0, "least") for edge in open_choice), before])
    solved = [0.0]
    for real in truth[1:]:
        solved.append(max(solved[source] + lag for source, _, lag in real))
    earliest, latest = graph.shortened([{}, factors], len(points))
    assert list(graph.at) == recorded
    assert earliest[0] == latest[0] == recorded[-1]
    assert earliest[1] - 1e-9 <= solved[-1] <= latest[1] + 1e-9


def test_by_hand() -> None:
    """Two streams that meet: 30 us of attention and then 5 of experts, beside 32 of dispatch."""
    graph = PathGraph(1000.0)
    attention = graph.point(1030.0, [Edge(0, None, "work", "attention", "A", "compute")])
    dispatch = graph.point(1032.0, [Edge(0, None, "work", "dispatch", "D", "comm")])
    waited = graph.point(1032.0, [Edge(attention, 0.0, "stream order"), Edge(dispatch, 0.0, "event")])
    done = graph.point(1037.0, [Edge(waited, None, "work", "experts", "M", "compute")])
    assert [(p.begin, p.length, p.stage, p.what, p.lane, p.by) for p in graph.path(done)] == [
        (1000.0, 32.0, "dispatch", "D", "comm", ()),
        (1032.0, 5.0, "experts", "M", "compute", ("event",)),
    ]
    shorter = [
        {"dispatch": 0.5},
        {"dispatch": 1.0},
        {"attention": 1.0},
        {"experts": 0.2},
        {"attention": 1, "dispatch": 1},
    ]
    assert graph.shortened(shorter, done)[0].tolist() == [1035.0, 1035.0, 1037.0, 1036.0, 1005.0]


def test_alternatives_by_hand() -> None:
    """A stretch of 40 us with a receive in it: its own work, or a flight of 55 us that began before it."""
    graph = PathGraph()
    sent = graph.point(10.0, [Edge(0, None, "work", "attention", "A0")])
    works = graph.point(25.0, [Edge(sent, None, "work", "attention", "A1")])
    own = Edge(works, None, "work", "experts", "M0", "compute", ONE_OF)
    flight = Edge(sent, None, "receive", "dispatch", "D0", "in flight", ONE_OF)
    done = graph.point(65.0, [own, flight, Edge(works, 0.0, "work")])
    last = graph.path(done)[-1]
    assert (last.what, last.uncertain, last.instead) == ("M0", True, ("D0",))
    earliest, latest = graph.shortened([{"experts": 0.5}, {"dispatch": 0.5}, {"experts": 1, "dispatch": 1}], done)
    assert earliest.tolist() == [45.0, 37.5, 25.0] and latest.tolist() == [65.0, 65.0, 25.0]


def test_recorded_times_that_contradict_each_other() -> None:
    """An edge whose source is later is left out; within the tolerance the later point moves."""
    graph = PathGraph(tolerance=2.0)
    one = graph.point(10.0, [Edge(0, None, "work", "experts")])
    moved = graph.point(9.0, [Edge(one, 0.0, "event")])
    early = graph.point(5.0, [Edge(one, 0.0, "event"), Edge(0, 1.0, "stream order")])
    alone = graph.point(4.0, [Edge(one, 0.0, "event")])
    assert [graph.at[point] for point in (moved, early, alone)] == [10.0, 5.0, 4.0]
    assert graph.contradictions == 2
    assert [(piece.kind, piece.stage, piece.length) for piece in graph.path(early)] == [("stream order", IDLE, 5.0)]
    assert [(piece.kind, piece.stage, piece.length) for piece in graph.path(alone)] == [("start", IDLE, 4.0)]


def test_what_only_may_have_been_there_explains_no_time() -> None:
    """The edge that is certain contradicts the recorded time, or there is none."""
    graph = PathGraph()
    late = graph.point(100.0, [Edge(0, None, "work", "experts")])
    perhaps = Edge(0, 10.0, "launch", "launch", role=AT_MOST)
    left = graph.point(50.0, [Edge(late, 0.0, "event"), perhaps])
    alone = graph.point(60.0, [perhaps])
    assert [(piece.kind, piece.stage, piece.length) for piece in graph.path(left)] == [("start", IDLE, 50.0)]
    assert [(piece.kind, piece.stage, piece.length) for piece in graph.path(alone)] == [("start", IDLE, 60.0)]
    earliest, latest = graph.shortened([{IDLE: 1.0}], alone)
    assert (earliest.tolist(), latest.tolist()) == ([0.0], [10.0])


def test_idle_time_behind_work_is_a_piece_of_its_own() -> None:
    graph = PathGraph()
    end = graph.point(10.0, [Edge(0, 6.0, "launch", "launch", "K", "stream 7")])
    assert [(piece.begin, piece.end, piece.stage) for piece in graph.path(end)] == [
        (0.0, 6.0, "launch"),
        (6.0, 10.0, IDLE),
    ]
    assert graph.shortened([{"launch": 0.5}, {IDLE: 0.5}], end)[0].tolist() == [7.0, 8.0]


def test_many_scenarios_are_solved_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = PathGraph()
    end = graph.point(8.0, [Edge(0, None, "work", "experts")])
    scenarios = [{"experts": number / 16} for number in range(17)]
    whole = graph.shortened(scenarios, end)[0].tolist()
    monkeypatch.setattr("dbo_greenlet.trace.critical_path.graph._SOLVE_BYTES", 80)
    assert graph.shortened(scenarios, end)[0].tolist() == whole == [8 - number / 2 for number in range(17)]
