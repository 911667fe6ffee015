"""A direct call does what the dispatcher would do: modes, subclasses, fake tensors, gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._guards import CompileContext, compile_context
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from dbo_greenlet import Scheduler, dbo_yield
from dbo_greenlet.errors import MicrobatchFailed, UnsafeYieldError
from tests.direct_ops.operators import INPUTS, add_one, packet, seen
from tests.thread_state.programs import DispatchLog, FunctionLog

pytestmark = pytest.mark.usefixtures("thread_as_before")


def logged(mode: type, entry: Callable[[], Any]) -> list[Any]:
    log: list[Any] = []
    with mode("mode", log):
        entry()
    return log


@pytest.mark.parametrize("mode", [FunctionLog, DispatchLog])
@pytest.mark.parametrize("name", ["dbo_test::custom", "dbo_test::raw"])
def test_modes_see_the_operator_and_it_still_yields(direct: Any, name: str, mode: type) -> None:
    direct(name)
    with torch.no_grad():

        def call() -> None:
            packet(name)(INPUTS[0], 2)
            packet(name).default(INPUTS[0], 2)

        expected = logged(mode, call)
        assert sum(name.partition("::")[2] in entry[2] for entry in expected) >= 2
        seen.clear()
        result = Scheduler().run([lambda: logged(mode, call)] * 2)
    assert result.outputs == [expected] * 2
    assert seen == [None] * 4
    assert result.yields == (4, 4)


@pytest.mark.parametrize("kind", ["CompositeImplicitAutograd", "CompositeExplicitAutograd"])
@pytest.mark.parametrize("grad", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("modes_off", [False, True])
def test_a_mode_sees_as_much_of_an_operator_as_by_the_dispatcher(
    direct: Any, kind: str, grad: Any, modes_off: bool
) -> None:
    """Without yields: a composite operator under a mode is not direct."""
    name = f"dbo_test::add_one_{kind}"
    if not hasattr(torch.ops.dbo_test, name.partition("::")[2]):
        torch.library.define(name, "(Tensor x) -> Tensor")
        torch.library.impl(name, kind, add_one)
    direct(name, add_one)

    def entry() -> list[Any]:
        log: list[Any] = []
        exclude = torch._C.DispatchKeySet(torch._C.DispatchKey.Python)
        off = torch._C._ExcludeDispatchKeyGuard(exclude) if modes_off else contextlib.nullcontext()
        with grad(), DispatchLog("mode", log), off:
            packet(name)(INPUTS[0])
        return log

    assert Scheduler().run([entry]).outputs == [entry()]


def test_while_this_thread_compiles_calls_go_through_the_dispatcher(
    direct: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct("dbo_test::with_backward")
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    with compile_context(CompileContext(None)):
        Scheduler().run([lambda: torch.ops.dbo_test.with_backward(INPUTS[0])])
    assert seen == ["dbo_test::with_backward"]


def test_a_default_device_is_what_it_is_without_the_gate(direct: Any) -> None:
    torch.library.define("dbo_test::make", "(int n) -> Tensor")

    def make(n: int) -> torch.Tensor:
        dbo_yield("make")
        # The operator is shown to the default device's mode, which is therefore off inside.
        return torch.ones(n)

    torch.library.impl("dbo_test::make", "BackendSelect", make)
    direct("dbo_test::make", make)

    def entry(device: str) -> str:
        with torch.device(device):
            inside = torch.ops.dbo_test.make(3).device.type
            return f"{inside}, then {torch.ones(3).device.type}"

    expected = [entry("meta"), entry("cpu")]
    assert expected == ["cpu, then meta", "cpu, then cpu"]
    assert Scheduler().run([lambda: entry("meta"), lambda: entry("cpu")]).outputs == expected


def test_a_mode_that_refuses_is_an_error_as_by_the_dispatcher(direct: Any) -> None:
    class Refusing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return NotImplemented

    def entry() -> None:
        with torch.no_grad(), Refusing():
            torch.ops.dbo_test.with_backward(INPUTS[0])

    direct("dbo_test::with_backward")
    with pytest.raises(TypeError) as alone:
        entry()
    with pytest.raises(MicrobatchFailed) as step:
        Scheduler().run([entry])
    assert isinstance(step.value.__cause__, TypeError)
    assert str(step.value.__cause__).partition(" at 0x")[0] == str(alone.value).partition(" at 0x")[0]


@pytest.mark.parametrize("keyword", [False, True])
def test_a_tensor_subclass_sees_the_operator(direct: Any, keyword: bool) -> None:
    calls: list[str] = []

    class Watching(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(str(func))
            return super().__torch_function__(func, types, args, kwargs or {})

    direct("dbo_test::raw")
    x = INPUTS[0].as_subclass(Watching)

    def entry() -> tuple[str, Any]:
        y = torch.ops.dbo_test.raw(x=x, layer=1) if keyword else torch.ops.dbo_test.raw(x, 1)
        return type(y).__name__, y.as_subclass(torch.Tensor)

    with torch.no_grad():
        expected = entry()
        by_hand, calls[:] = list(calls), []
        step = Scheduler().run([entry])
    assert by_hand[0] == "dbo_test.raw"
    assert calls == by_hand
    assert step.outputs[0][0] == expected[0] == "Watching"
    assert torch.equal(step.outputs[0][1], expected[1])
    assert step.yields == (2,)


def test_fake_tensors_get_the_fake_implementation(direct: Any) -> None:
    direct("dbo_test::raw")

    def entry() -> list[int]:
        with FakeTensorMode() as mode:
            return list(torch.ops.dbo_test.raw(mode.from_tensor(INPUTS[0]), 1).shape)

    assert Scheduler().run([entry]).outputs == [[3, 4]]
    assert seen == []


@pytest.mark.parametrize("keyword", [False, True])
def test_an_argument_that_requires_grad_needs_the_operators_own_formula(direct: Any, keyword: bool) -> None:
    direct("dbo_test::with_backward")

    def entry() -> torch.Tensor:
        x = torch.ones(2, requires_grad=True)
        y = torch.ops.dbo_test.with_backward(x=x) if keyword else torch.ops.dbo_test.with_backward(x)
        y.sum().backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(Scheduler().run([entry]).outputs[0], torch.full((2,), 100.0))
    assert seen == ["dbo_test::with_backward"]


def test_a_yield_under_that_formula_is_refused(direct: Any) -> None:
    direct("dbo_test::custom")
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(UnsafeYieldError, match="dbo_test::custom"):
        Scheduler().run([lambda: torch.ops.dbo_test.custom(x, 1)])


@pytest.mark.parametrize("opaque", [True, False])
def test_with_grad_mode_on_the_result_is_the_dispatchers(direct: Any, opaque: bool) -> None:
    """The weight that requires grad is no argument; a custom_op hides it, a plain library operator does not."""
    weight = torch.ones(2, requires_grad=True)
    name = f"dbo_test::weigh_{'opaque' if opaque else 'open'}"

    def weigh(xs: list[torch.Tensor]) -> torch.Tensor:
        dbo_yield("weigh")
        return xs[0] * weight

    if opaque:
        torch.library.custom_op(name, weigh, mutates_args=(), schema="(Tensor[] xs) -> Tensor")
    else:
        torch.library.define(name, "(Tensor[] xs) -> Tensor")
        torch.library.impl(name, "CompositeExplicitAutograd", weigh)
    op = packet(name)
    direct(name, weigh)
    x = torch.ones(2)
    assert torch.is_grad_enabled()
    alone = op([x])
    step = Scheduler().run([lambda: op([x])] * 2)
    assert [y.requires_grad for y in step.outputs] == [alone.requires_grad] * 2 == [not opaque] * 2
    assert step.yields == (1, 1)
    with pytest.raises(UnsafeYieldError):
        Scheduler().run([lambda: op([x, weight])])


def test_a_composite_operator_has_the_gradient_of_its_parts(direct: Any) -> None:
    direct("dbo_test::composite")

    def entry() -> torch.Tensor:
        x = torch.ones(2, requires_grad=True)
        torch.ops.dbo_test.composite(x, 1).sum().backward()
        assert x.grad is not None
        return x.grad

    expected = entry()
    seen.clear()
    step = Scheduler().run([entry, entry])
    assert all(torch.equal(y, expected) for y in step.outputs)
    assert seen == [None, None]
    assert step.yields == (2, 2)


def test_a_mutated_argument_is_mutated(direct: Any) -> None:
    direct("dbo_test::add_in_place")
    tensors = [torch.zeros(3), torch.ones(3)]
    with torch.no_grad():
        versions = [t._version for t in tensors]
        step = Scheduler().run([lambda t=t: torch.ops.dbo_test.add_in_place(t, 0.5) for t in tensors])
    assert step.yields == (2, 2)
    assert [t.tolist() for t in tensors] == [[0.5] * 3, [1.5] * 3]
    assert all(t._version > v for t, v in zip(tensors, versions, strict=True))
