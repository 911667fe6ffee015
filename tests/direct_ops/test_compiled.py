"""Compiled models whose operators yield: the same bits as one microbatch after the other, and nothing compiled anew."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from dbo_greenlet import Scheduler, dbo_current_ubatch_id, dbo_enabled, dbo_yield, register_direct_op
from tests.direct_ops.operators import INPUTS, mix, model, seen
from tests.thread_state.programs import snapshot


@pytest.fixture(autouse=True)
def _direct() -> Iterator[None]:
    registered = [register_direct_op("dbo_test::custom"), register_direct_op("dbo_test::raw", mix)]
    torch.compiler.reset()
    seen.clear()
    before = snapshot()
    yield
    assert snapshot() == before
    for op in registered:
        op.remove()
    torch.compiler.reset()


class Counting:
    """A backend that runs graphs as they are and keeps them."""

    def __init__(self) -> None:
        self.graphs: list[str] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.graphs.append(graph.code)
        return graph.forward


def check(backend: Any, name: str, first: str, steps: int = 2) -> None:
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.inference_mode():
        expected = [model(x, name) for x in INPUTS]
        if first == "outside":
            compiled(INPUTS[0], name)
        for _ in range(steps):
            seen.clear()
            step = Scheduler().run([lambda x=x: compiled(x, name) for x in INPUTS])
            assert step.yields == (6, 6, 6)
            assert seen == [None] * 9
            assert step.schedule.decisions == (0, 1, 2) * 7
            got = step.outputs
            # Compiled and eager may round differently; interleaved and by itself may not.
            alone = [compiled(x, name) for x in INPUTS]
            assert all(torch.equal(a, b) for a, b in zip(got, alone, strict=True))
            assert all(torch.allclose(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("first", ["outside", "inside"])
@pytest.mark.parametrize("name", ["dbo_test::custom", "dbo_test::raw"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_operators_yield(backend: str, name: str, first: str) -> None:
    check(backend, name, first)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++")
@pytest.mark.parametrize(("name", "first"), [("dbo_test::custom", "inside"), ("dbo_test::raw", "outside")])
def test_inductor_operators_yield(name: str, first: str) -> None:
    check("inductor", name, first)


@pytest.mark.parametrize("name", ["dbo_test::custom", "dbo_test::raw"])
def test_entering_a_step_compiles_nothing_anew(name: str) -> None:
    backend = Counting()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.inference_mode():
        compiled(INPUTS[0], name)
        assert len(backend.graphs) == 1
        for _ in range(3):
            Scheduler().run([lambda x=x: compiled(x, name) for x in INPUTS])
            compiled(INPUTS[1], name)
    assert len(backend.graphs) == 1
    assert backend.graphs[0].count("dbo_test") == 3, "the operator is opaque to the compiler"


def test_code_that_asks_whether_it_runs_in_a_step_is_compiled_once_for_each_answer() -> None:
    def asks(x: torch.Tensor) -> torch.Tensor:
        x = torch.ops.dbo_test.raw(x, 1)
        return x + 10 * (1 + dbo_current_ubatch_id()) if dbo_enabled() else x

    backend = Counting()
    compiled = torch.compile(asks, backend=backend, fullgraph=True, dynamic=False)
    with torch.inference_mode():
        outside = compiled(INPUTS[0])
        compiled_by_then = []
        for _ in range(4):
            step = Scheduler().run([lambda x=x: compiled(x) for x in INPUTS])
            assert torch.equal(compiled(INPUTS[0]), outside)
            compiled_by_then.append(len(backend.graphs))
            for i, (x, got) in enumerate(zip(INPUTS, step.outputs, strict=True)):
                assert torch.equal(got, torch.ops.dbo_test.raw(x, 1) + 10 * (1 + i))
    assert compiled_by_then == compiled_by_then[:1] * 4
    assert compiled_by_then[0] <= 1 + len(INPUTS)


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_with_grad_mode_on_compiled_code_turns_it_off_for_itself_only(backend: str) -> None:
    """Compiled inference code runs with grad mode off, and a sibling that is not compiled must not notice."""
    compiled = torch.compile(model, backend=backend, fullgraph=True)

    def eager(x: torch.Tensor) -> list[bool]:
        answers = []
        for _ in range(6):
            answers.append(torch.is_grad_enabled())
            dbo_yield("eager")
        return answers

    compiled(INPUTS[0], "dbo_test::raw")
    step: Any = Scheduler(strict=False).run(
        [
            lambda: compiled(INPUTS[0], "dbo_test::raw"),
            lambda: eager(INPUTS[1]),
            lambda: model(INPUTS[2], "dbo_test::raw"),
        ]
    )
    assert step.outputs[1] == [True] * 6
    assert torch.equal(step.outputs[0], compiled(INPUTS[0], "dbo_test::raw"))


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_a_yield_between_two_graphs_does_not_compile_the_siblings_code() -> None:
    """There, Dynamo's callback is on for the thread: every function called then would be compiled."""
    backend = Counting()
    callback = torch._C._dynamo.eval_frame.get_eval_frame_callback
    on = []

    @torch._dynamo.disable
    def between() -> None:
        dbo_yield("between")

    @torch.compile(backend=backend)
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        between()
        y = y.cos()
        torch._dynamo.graph_break()
        return pause(y) + 1

    def pause(y: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        on.append(callback() is not None)
        dbo_yield("paused")
        return y.exp()

    def helper(x: torch.Tensor) -> torch.Tensor:
        return x.tanh()

    def sibling(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            assert callback() is None
            x = helper(x)
            dbo_yield("sibling")
        return x

    with torch.inference_mode():
        for _ in range(3):
            step = Scheduler(strict=False).run([lambda: broken(INPUTS[0]), lambda: sibling(INPUTS[1])])
            assert torch.equal(step.outputs[0], INPUTS[0].sin().cos().exp() + 1)
            assert torch.equal(step.outputs[1], INPUTS[1].tanh().tanh().tanh())
            assert callback() is None
    assert any("sin" in code for code in backend.graphs)
    assert not any("tanh" in code for code in backend.graphs)
    assert any(on), "otherwise this test shows nothing"


def test_another_threads_compiler_does_not_matter() -> None:
    """That something compiles is told by a flag of the whole process; whether it is this thread is not."""
    inside, go = threading.Event(), threading.Event()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        inside.set()
        go.wait(60)
        return graph.forward

    other = threading.Thread(target=lambda: torch.compile(lambda x: x * 2, backend=backend)(torch.ones(2)))
    with torch.inference_mode():
        alone = [model(x, "dbo_test::raw") for x in INPUTS]
        other.start()
        try:
            assert inside.wait(60)
            assert torch.compiler.is_compiling()
            seen.clear()
            step = Scheduler().run([lambda x=x: model(x, "dbo_test::raw") for x in INPUTS])
        finally:
            go.set()
            other.join(60)
    assert seen == [None] * 9
    assert all(torch.equal(a, b) for a, b in zip(step.outputs, alone, strict=True))
