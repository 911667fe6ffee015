"""Steps to explore, bugs to plant in them, and slow answers to compare with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from hypothesis import strategies as st

from dbo_greenlet import dbo_current_ubatch_id, dbo_enabled, dbo_yield
from dbo_greenlet.testing.interleavings import interleavings, may_run, size_of
from dbo_greenlet.testing.layer_programs import LayerRun, LowLatency, high_throughput, low_latency
from dbo_greenlet.testing.step_run import TestBed, run_step

PROGRAMS = {"low latency": low_latency, "high throughput": high_throughput}
SLICES = {"low latency": lambda layers: 2 * layers + 1, "high throughput": lambda layers: 3 * layers + 1}


def yields(number: int, log: list[list[int]] | None = None) -> Callable[[TestBed], list]:
    """A step that yields and nothing else; `log` gets the decisions of each run."""

    def build(bed: TestBed) -> list[Callable[[], int]]:
        mine: list[int] = []
        if log is not None:
            log.append(mine)

        def entry(i: int) -> int:
            mine.append(i)
            for k in range(number):
                dbo_yield(f"y{k}")
                mine.append(i)
            return i

        return [partial(entry, i) for i in range(bed.count)]

    return build


def schedules_in(log: list[list[int]]) -> list[tuple[int, ...]]:
    """What was explored: without the reference, which runs first, and the second run of the first schedule."""
    assert log[1] == log[2]
    return [tuple(each) for each in [log[1], *log[3:]]]


def sizes(slices: tuple[int, ...]) -> dict[tuple[int, ...], tuple]:
    """The size of every schedule of such a step."""
    out = {}
    for decisions in interleavings(slices):
        completed, runnable = [0] * len(slices), []
        for index in decisions:
            runnable.append(may_run(completed, slices))
            completed[index] += 1
        out[decisions] = size_of(decisions, runnable)
    return out


def all_by_recursion(build, count: int, begin: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    """Every schedule, by trying at each decision everybody who could run there."""
    runnable: list[list[int]] = []

    class Follow:
        name = "follow"

        def start(self, step):
            def choose() -> int:
                could = step.runnable()
                runnable.append(could)
                position = len(step.decisions)
                return begin[position] if position < len(begin) else could[0]

            return choose

    decisions = run_step(build, Follow(), count=count, strict=False).schedule.decisions
    if len(decisions) == len(begin):
        return [begin]
    return [each for index in runnable[len(begin)] for each in all_by_recursion(build, count, (*begin, index))]


def slices_noted(run: LayerRun, begin: Callable[[int], None]) -> None:
    """Have `begin(i)` called at the beginning of each slice of microbatch i."""
    attention, experts, result = run.attention, run.experts, run.result

    def noted(method, i, *rest):
        begin(i)
        return method(i, *rest)

    run.attention, run.result = partial(noted, attention), partial(noted, result)
    if isinstance(run, LowLatency):
        run.experts = partial(noted, experts)
    else:
        over_to_comm = run.over_to_comm

        def over(site: str) -> None:
            over_to_comm(site)
            begin(dbo_current_ubatch_id())

        run.over_to_comm = over


def fails_in_exactly(target: tuple[int, ...]) -> Callable[[LayerRun], None]:
    """Plant an order bug: where the slices run in this order and no other, the last microbatch gives a wrong output."""

    def plant(run: LayerRun) -> None:
        order: list[int] = []
        result = run.result

        def wrong(i: int):
            value = result(i)
            return "from a stale buffer" if tuple(order) == target and dbo_enabled() else value

        run.result = wrong
        slices_noted(run, order.append)

    return plant


def out_of_phase(run: LayerRun) -> None:
    """Plant a bug: microbatch 0's experts of layer 1 break where microbatch 1 has not begun."""
    begun: set[tuple[int, int]] = set()
    experts = run.experts

    def broken(i: int, layer: int) -> None:
        begun.add((i, layer))
        if (i, layer) == (0, 1) and (1, 0) in begun:
            raise ValueError("broken")
        experts(i, layer)

    run.experts = broken


@st.composite
def a_schedule(draw, slices: tuple[int, ...]) -> tuple[int, ...]:
    completed, decisions = [0] * len(slices), []
    while could := may_run(completed, slices):
        decisions.append(draw(st.sampled_from(could)))
        completed[decisions[-1]] += 1
    return tuple(decisions)


Order = tuple[tuple[int, int], tuple[int, int]]


def an_order(slices: int) -> st.SearchStrategy[Order]:
    """(microbatch, slice) before (the other microbatch, slice)."""
    number = st.integers(0, slices - 1)
    return st.tuples(st.integers(0, 1), number, number).map(lambda it: ((it[0], it[1]), (1 - it[0], it[2])))


def holds(order: Order, decisions: tuple[int, ...]) -> bool:
    places = [-1, -1]
    for side, (microbatch, number) in enumerate(order):
        places[side] = [p for p, index in enumerate(decisions) if index == microbatch][number]
    return places[0] < places[1]


def yields_and_breaks(number: int, orders: list[Order]) -> Callable[[TestBed], list]:
    """A step of microbatches that yield, with a wrong output where all of `orders` hold."""

    def build(bed: TestBed) -> list[Callable[[], str]]:
        decisions: list[int] = []

        def entry(i: int) -> str:
            decisions.append(i)
            for k in range(number):
                dbo_yield(f"y{k}")
                decisions.append(i)
            complete = len(decisions) == 2 * (number + 1)
            # Not in the reference, which may run in such an order, too.
            broken = complete and dbo_enabled() and all(holds(each, tuple(decisions)) for each in orders)
            return "wrong" if broken else "right"

        return [partial(entry, i) for i in range(bed.count)]

    return build
