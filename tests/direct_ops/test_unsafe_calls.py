"""Which frames make a yield unsafe (law 2), and that those which do not are safe indeed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from greenlet import getcurrent, greenlet
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dbo_greenlet import Scheduler, register_direct_op
from dbo_greenlet.errors import UnsafeYieldError
from dbo_greenlet.unsafe_calls import find_unsafe_call
from tests.direct_ops.operators import custom, mix
from tests.thread_state.programs import snapshot

HERE = Path(__file__).parent
X = torch.arange(6.0).reshape(2, 3)


def run_script(name: str, *arguments: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, PYTHONPATH=str(HERE.parents[1]))
    command = [sys.executable, *options, str(HERE / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)


# -- which frames -----------------------------------------------------------------------------------------------------


def found_under(call: Any) -> list[str | None]:
    """What `find_unsafe_call` says of a greenlet that yields to us under `call(yield_to_us)`."""
    hub = getcurrent()
    runner = greenlet(lambda: call(hub.switch))
    runner.switch()
    answers = []
    while not runner.dead:
        answers.append(find_unsafe_call(runner.gr_frame))
        runner.switch()
    return answers


current: list[Any] = []


def _calls_back(x: torch.Tensor) -> torch.Tensor:
    current[-1]()
    return x.clone()


torch.library.define("dbo_test::calls_back", "(Tensor x) -> Tensor")
torch.library.define("dbo_test::calls_back.other", "(Tensor x, int n) -> Tensor")
torch.library.impl("dbo_test::calls_back", "CompositeExplicitAutograd", _calls_back)
torch.library.impl("dbo_test::calls_back.other", "CompositeExplicitAutograd", lambda x, n: _calls_back(x))
torch.library.define("dbo_test::decomposes", "(Tensor x) -> Tensor")
torch.library.impl("dbo_test::decomposes", "CompositeImplicitAutograd", _calls_back)


@torch.library.custom_op("dbo_test::calls_back_custom", mutates_args=())
def calls_back_custom(x: torch.Tensor) -> torch.Tensor:
    return _calls_back(x)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: torch.ops.dbo_test.calls_back(X), "dbo_test::calls_back"),
        (lambda: torch.ops.dbo_test.calls_back.default(X), "dbo_test::calls_back"),
        (lambda: torch.ops.dbo_test.calls_back.other(X, 1), "dbo_test::calls_back.other"),
        (lambda: calls_back_custom(X), "dbo_test::calls_back_custom"),
        (lambda: torch.ops.dbo_test.decomposes.default.decompose(X), "dbo_test::decomposes"),
        (lambda: torch.nn.Identity()(torch.ops.dbo_test.calls_back(X)), "dbo_test::calls_back"),
        (lambda: _calls_back(X), None),
        (lambda: sorted([X], key=_calls_back), None),
    ],
)
def test_an_operator_between_the_yield_and_the_entry_is_named(call: Any, name: str | None) -> None:
    def under(switch: Any) -> None:
        current.append(switch)
        try:
            call()
        finally:
            current.pop()

    assert found_under(under) == [name]


def test_the_innermost_operator_is_named_and_outside_of_the_stop_frame_nothing_is() -> None:
    seen: list[str | None] = []

    def look() -> None:
        frame = sys._getframe()
        seen.append(find_unsafe_call(frame))
        seen.append(find_unsafe_call(frame, stop_frame=frame.f_back))

    current.append(lambda: (current.append(look), calls_back_custom(X), current.pop()))
    try:
        torch.ops.dbo_test.calls_back(X)
    finally:
        current.pop()
    assert seen == ["dbo_test::calls_back_custom", None]
    assert find_unsafe_call(None) is None


def test_looking_does_not_import_torch() -> None:
    code = (
        "import sys; from dbo_greenlet.unsafe_calls import find_unsafe_call as find; "
        "sys.exit(find(sys._getframe()) is not None or 'torch' in sys.modules)"
    )
    environment = dict(os.environ, PYTHONPATH=str(HERE.parents[1]))
    assert subprocess.run([sys.executable, "-c", code], timeout=120, env=environment, check=False).returncode == 0


# -- what is safe: two microbatches in turn, twice each ---------------------------------------------------------------


class Yielding(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return mix(x, 1)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class YieldingFunctionMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return mix(result, 1) if func is torch.add else result


class YieldingDispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return mix(result, 1) if func is torch.ops.aten.add.Tensor else result


class Subclass(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return mix(result, 1) if func is torch.add else result


def in_module(x: torch.Tensor) -> torch.Tensor:
    layer = torch.nn.Identity()
    layer.register_forward_pre_hook(lambda module, inputs: mix(inputs[0], 2))
    layer.register_forward_hook(lambda module, inputs, output: mix(output, 3))
    return torch.nn.Sequential(layer, torch.nn.Identity())(x)


def in_autograd_function(x: torch.Tensor) -> torch.Tensor:
    return Yielding.apply(x)


def in_function_mode(x: torch.Tensor) -> torch.Tensor:
    with YieldingFunctionMode():
        return torch.add(x, 1)


def in_dispatch_mode(x: torch.Tensor) -> torch.Tensor:
    with YieldingDispatchMode():
        return torch.add(x, 1)


def in_subclass(x: torch.Tensor) -> torch.Tensor:
    return torch.add(x.as_subclass(Subclass), 1).as_subclass(torch.Tensor)


def in_tree_map(x: torch.Tensor) -> torch.Tensor:
    return torch.utils._pytree.tree_map(lambda leaf: mix(leaf, 1), {"a": [x]})["a"][0]


@pytest.mark.parametrize(
    "model", [in_module, in_autograd_function, in_function_mode, in_dispatch_mode, in_subclass, in_tree_map]
)
@pytest.mark.parametrize("grad", [torch.no_grad, torch.enable_grad])
def test_calls_that_may_contain_yields(model: Any, grad: Any) -> None:
    before = snapshot()
    with grad():
        expected = [model(X), model(X + 1), model(X + 2)]
        step = Scheduler(strict=True).run([lambda: model(X), lambda: model(X + 1), lambda: model(X + 2)])
    assert len(set(step.yields)) == 1
    assert step.yields[0] >= 2
    for got, wanted in zip(step.outputs, expected, strict=True):
        assert torch.equal(got, wanted)
        assert got.requires_grad == wanted.requires_grad
    assert snapshot() == before


# -- the cheap check between steps of the same kind -------------------------------------------------------------------


def test_one_yield_line_reached_by_a_plain_call_first_and_through_an_operator_later() -> None:
    """Not in strict mode, so that the answer for a path is remembered: it must not be taken for another path's."""
    scheduler = Scheduler(strict=False)
    for _ in range(3):
        assert scheduler.run([lambda: mix(X, 1), lambda: mix(X, 2)]).yields == (2, 2)
        with pytest.raises(UnsafeYieldError) as caught:
            scheduler.run([lambda: custom(X, 1), lambda: custom(X, 2)])
        assert caught.value.op == "dbo_test::custom"
        registered = register_direct_op("dbo_test::custom")
        assert scheduler.run([lambda: custom(X, 1), lambda: custom(X, 2)]).yields == (2, 2)
        registered.remove()


def test_a_step_that_keeps_no_thread_state_looks_all_the_same() -> None:
    """What it found is remembered for every later step, whatever that one keeps."""
    for thread_state in (None, "auto", None):
        with pytest.raises(UnsafeYieldError):
            Scheduler(strict=False, thread_state=thread_state).run([lambda: custom(X, 3), lambda: custom(X, 4)])


def test_a_step_inside_a_step_looks_all_the_same() -> None:
    inner = Scheduler(strict=False)

    def outer() -> None:
        inner.run([lambda: mix(X, 1), lambda: mix(X, 2)])
        for _ in range(2):
            with pytest.raises(UnsafeYieldError):
                inner.run([lambda: custom(X, 1), lambda: custom(X, 2)])

    inner.run([lambda: mix(X, 1), lambda: mix(X, 2)])  # its idle carriers were started less deep in the stack
    Scheduler(strict=False).run([lambda: [outer() for _ in map(str, range(2))]])


def stack_bytes(call: Any) -> set[int]:
    """Bytes of C stack between entry and yield, over many calls."""
    hub = getcurrent()
    sizes = set()
    for _ in range(50):
        current.append(hub.switch)
        runner = greenlet(call)
        runner.switch()
        sizes.add(runner._stack_saved)
        runner.switch()
        current.pop()
        assert runner.dead
    return sizes


def test_the_bytes_of_c_stack_tell_an_operator_from_a_plain_call() -> None:
    with torch.inference_mode():
        plain = stack_bytes(lambda: _calls_back(X))
        module = torch.nn.Identity()
        module.register_forward_hook(lambda module, inputs, output: _calls_back(output))
        nested = stack_bytes(lambda: module(X))
        operator = stack_bytes(lambda: torch.ops.dbo_test.calls_back(X))
        in_module = torch.nn.Identity()
        in_module.register_forward_hook(lambda module, inputs, output: torch.ops.dbo_test.calls_back(output))
        nested_operator = stack_bytes(lambda: in_module(X))
    sizes = [plain, nested, operator, nested_operator]
    # A path may have a few sizes (the interpreter specialises calls); no two paths share one.
    assert all(1 <= len(each) <= 3 for each in sizes)
    assert len(set.union(*sizes)) == sum(len(each) for each in sizes)
    assert min(operator) > max(plain) + 2000


# -- in processes of their own ----------------------------------------------------------------------------------------


def test_without_the_check_the_process_aborts() -> None:
    done = run_script("fail_parked_operators.py")
    assert done.returncode == -signal.SIGABRT
    assert "loader_life_support" in done.stderr
    assert "survived" not in done.stdout


def test_a_bound_function_that_calls_back_is_not_seen() -> None:
    once = run_script("fail_bound_function.py", "--once")
    assert once.returncode == 0, once.stderr
    assert "survived" in once.stdout
    done = run_script("fail_bound_function.py")
    assert done.returncode == -signal.SIGABRT
    assert "loader_life_support" in done.stderr


def test_a_refused_yield_unwinds_without_an_abort_with_and_without_optimization() -> None:
    plain, optimized = run_script("script_unsafe_yield.py"), run_script("script_unsafe_yield.py", options=("-O",))
    assert plain.returncode == 0, plain.stderr
    assert plain.stdout == optimized.stdout
    assert plain.stdout.splitlines() == [
        line
        for strict in (True, False)
        for count in (1, 2, 3)
        for line in (
            f"strict={strict} count={count}: dbo_test_unsafe::mix refused, "
            f"unwound {sorted(['operator', *(f'plain {i}' for i in range(count - 1))])}",
            "  then (0, 1, 0, 1, 0, 1)",
        )
    ] + ["swallowed, refused all the same: dbo_test_unsafe::mix", "direct: (0, 1, 0, 1)"]
    assert plain.stderr.splitlines()[-1:] == ["not optimized"]
    assert optimized.stderr.splitlines()[-1:] == ["optimized"]
