"""Names of vLLM's yields: what the tree of passed yields says is what a look at each yield's caller says."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM, whose yields are named (make test-vllm)")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.worker import ubatching

from dbo_greenlet import dbo_yield
from dbo_greenlet.errors import ForeignSwitchError, MicrobatchFailed, UnsafeYieldError
from dbo_greenlet.schedule import Schedule
from dbo_greenlet.vllm import sites
from dbo_greenlet.vllm.host_microbatch import registered
from dbo_greenlet.vllm.step import HostScheduler
from tests.vllm_dropin.drive import drop_in, harness
from tests.vllm_dropin.fake_cuda import FakeStream

pytestmark = pytest.mark.vllm

# As vLLM's files with yields are named, and one that is not known; each function yields once.
SOURCES = {
    "modular_kernel.py": "def _prepare(yield_): yield_()\ndef _finalize(yield_): yield_()\n",
    "deepep_ht.py": "".join(f"def {name}(yield_): yield_()\n" for name in ("_do_dispatch", "_finalize", "_receiver")),
    "somebody.py": "def _prepare(yield_): yield_()\n\n\ndef twice(yield_):\n    yield_()\n    yield_()\n",
}
KINDS = {
    ("modular_kernel.py", "_prepare"): "dispatch",
    ("modular_kernel.py", "_finalize"): "combine",
    ("deepep_ht.py", "_do_dispatch"): "before_dispatch",
    ("deepep_ht.py", "_finalize"): "before_combine",
    ("deepep_ht.py", "_receiver"): "combine",
}
LINES = {("somebody.py", "_prepare"): [1], ("somebody.py", "twice"): [5, 6]}


def _functions() -> dict[tuple[str, str], Callable[..., None]]:
    found = {}
    for file, source in SOURCES.items():
        names: dict[str, Any] = {}
        exec(compile(source, f"/somewhere/vllm/{file}", "exec"), names)
        found |= {(file, name): each for name, each in names.items() if isinstance(each, FunctionType)}
    return found


FUNCTIONS = _functions()
STREAM_YIELDS = ("dbo_yield_and_switch_from_compute_to_comm", "dbo_yield_and_switch_from_comm_to_compute")


def named(program: list[tuple[str, str]]) -> list[str]:
    """The names, counted out by hand."""
    passed: Counter[str] = Counter()
    names = []
    for which in program:
        if which in LINES:
            names += [f"{which[0]}:{line}" for line in LINES[which]]
            continue
        kind = KINDS[which]
        names.append(f"layer{passed[kind]}.{kind}")
        passed[kind] += 1
    return names


def run(programs: list[list[tuple[str, str]]], streams: bool = False) -> Schedule:
    """A step of the drop-in whose microbatches call these functions."""
    contexts = ubatching.make_ubatch_contexts(2, FakeStream(), FakeStream(), [None, None], threading.Barrier(3))

    def entry(program: list[tuple[str, str]]) -> Callable[[], None]:
        def body() -> None:
            number = 0

            def yield_to_the_other_stream() -> None:
                nonlocal number
                number += 1
                getattr(ubatching, STREAM_YIELDS[(number + 1) % 2])()

            for which in program:
                FUNCTIONS[which](yield_to_the_other_stream if streams else ubatching.dbo_yield)

        return body

    return step_of(contexts, [entry(each) for each in programs])


def step_of(contexts: list[Any], bodies: Sequence[Callable[[], None]]) -> Schedule:
    scheduler = HostScheduler()
    scheduler.strict = False  # which the tests turn on, and servers do not
    with registered(contexts) as hosts:
        return scheduler.run(bodies, hosts).schedule


def sites_of(schedule: Schedule, index: int) -> list[str]:
    """Of one microbatch, without its return."""
    return [site for who, site in zip(schedule.decisions, schedule.sites, strict=True) if who == index][:-1]


programs = st.lists(st.sampled_from(sorted(FUNCTIONS)), max_size=6)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(programs, programs), min_size=1, max_size=4))
def test_every_yield_of_any_step_has_its_name(steps: list[tuple[list[Any], list[Any]]]) -> None:
    # Several steps, because each leaves the tree expecting what it passed.
    with drop_in(), harness():
        for step in steps:
            schedule = run(list(step))
            assert [sites_of(schedule, index) for index in range(2)] == [named(program) for program in step]


@pytest.mark.parametrize("most", [0, 3])
def test_names_are_right_where_the_tree_may_not_grow(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sites, "START", start := sites.Passed(sites._UNKNOWN, None, -1, 1))
    monkeypatch.setattr("dbo_greenlet.vllm.host_microbatch.START", start)
    monkeypatch.setattr(sites, "_kept", 0)
    monkeypatch.setattr(sites, "_MOST_KEPT", most)
    program = sorted(FUNCTIONS)
    with drop_in(), harness():
        for _ in range(3):
            assert sites_of(run([program, program]), 1) == named(program)
    kept, depth = start, 0
    while kept._following:
        (kept,) = kept._following.values()
        depth += 1
    assert depth == most


def test_a_second_step_finds_every_yield_where_it_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    program = [("modular_kernel.py", "_prepare"), ("modular_kernel.py", "_finalize")] * 3
    with drop_in(), harness():
        run([program, program])
        monkeypatch.setattr("dbo_greenlet.vllm.ubatching.passed_next", None)  # who calls it now fails
        assert sites_of(run([program, program]), 0) == named(program)
        with pytest.raises(MicrobatchFailed):
            run([program[1:], program[1:]])


def test_yields_that_are_wrapped_later_keep_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    program = [("modular_kernel.py", "_prepare"), ("somebody.py", "twice"), ("modular_kernel.py", "_finalize")]
    with drop_in(), harness():
        before = run([program, program])
        carried = ubatching.UBatchContext._cpu_yield

        def wrapped(context: Any) -> None:
            carried(context)

        # With the globals of vLLM's module, as one of its own functions.
        in_vllm = FunctionType(wrapped.__code__, ubatching.__dict__, "_cpu_yield", None, wrapped.__closure__)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ubatching.UBatchContext, "_cpu_yield", in_vllm)
            assert run([program, program]) == run([program, program]) == before
        assert run([program, program]) == before


def test_yields_to_the_other_stream_are_named_after_their_callers_too() -> None:
    with drop_in(), harness():
        # What calls them here is one line of this file.
        names = sites_of(run([[("modular_kernel.py", "_prepare")] * 4] * 2, streams=True), 0)
        assert len(names) == 4 and len(set(names)) == 1 and names[0].startswith("test_sites.py:")


def _step(*bodies: Callable[[], None]) -> Schedule:
    contexts = ubatching.make_ubatch_contexts(2, FakeStream(), FakeStream(), [None, None], threading.Barrier(3))
    return step_of(contexts, bodies)


def test_a_yield_that_was_found_safe_is_refused_under_an_operator() -> None:
    library = torch.library.Library("dbo_test_sites", "DEF")
    library.define("yields(Tensor x) -> Tensor")

    def yields(x: torch.Tensor) -> torch.Tensor:
        FUNCTIONS["modular_kernel.py", "_prepare"](ubatching.dbo_yield)
        return x.clone()

    library.impl("yields", yields, "CompositeExplicitAutograd")
    x = torch.ones(1)
    with drop_in(), harness():
        for _ in range(2):
            _step(lambda: yields(x), lambda: yields(x))
        for _ in range(2):
            with pytest.raises(UnsafeYieldError, match="microbatch 0 yielded at 'layer0.dispatch' under the operator"):
                _step(*[lambda: torch.ops.dbo_test_sites.yields(x)] * 2)
        _step(lambda: yields(x), lambda: yields(x))


def test_a_call_that_once_was_a_yield_and_now_leads_to_one() -> None:
    prepare = FUNCTIONS["modular_kernel.py", "_prepare"]

    def of_the_model() -> None:
        ubatching.dbo_yield()

    def names(yields: Callable[[], None]) -> list[str]:
        return sites_of(_step(*[lambda: prepare(yields)] * 2), 0)

    with drop_in(), harness():
        own = [f"test_sites.py:{of_the_model.__code__.co_firstlineno + 1}"]
        for _ in range(2):
            assert names(getattr(ubatching, STREAM_YIELDS[0])) == ["layer0.dispatch"]
            assert names(of_the_model) == own


def test_yields_that_are_no_longer_wrapped_deeply() -> None:
    """Nobody looks for the caller where it was then: the stack is not as high now."""

    def wrapper(inner: Callable[[Any], None]) -> FunctionType:
        def wrapped(context: Any) -> None:
            inner(context)

        return FunctionType(wrapped.__code__, ubatching.__dict__, "_cpu_yield", None, wrapped.__closure__)

    with drop_in(), harness():
        before = _step(ubatching.dbo_yield, ubatching.dbo_yield)
        with pytest.MonkeyPatch.context() as patch:
            for _ in range(8):
                patch.setattr(ubatching.UBatchContext, "_cpu_yield", wrapper(ubatching.UBatchContext._cpu_yield))
            assert _step(ubatching.dbo_yield, ubatching.dbo_yield) == before
        assert _step(ubatching.dbo_yield, ubatching.dbo_yield) == before


def test_yields_of_both_kinds_in_one_step() -> None:
    prepare = FUNCTIONS["modular_kernel.py", "_prepare"]

    def body() -> None:
        prepare(ubatching.dbo_yield)
        dbo_yield("said")
        prepare(ubatching.dbo_yield)

    with drop_in(), harness():
        for _ in range(2):
            assert sites_of(_step(body, body), 1) == ["layer0.dispatch", "said", "layer1.dispatch"]


def test_a_yield_on_a_greenlet_of_the_models_own_is_refused_by_name() -> None:
    from greenlet import greenlet

    prepare = FUNCTIONS["modular_kernel.py", "_prepare"]

    def body() -> None:
        prepare(ubatching.dbo_yield)
        greenlet(prepare).switch(ubatching.dbo_yield)

    with drop_in(), harness():
        for _ in range(2):
            with pytest.raises(MicrobatchFailed) as caught:
                _step(body, body)
            assert isinstance(caught.value.__cause__, ForeignSwitchError)
            assert "the yield at 'layer1.dispatch'" in str(caught.value.__cause__)
