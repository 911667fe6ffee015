"""Registered operators are direct in a microbatch and only there."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from dbo_greenlet import Scheduler, dbo_yield
from dbo_greenlet.errors import MicrobatchFailed, UnsafeYieldError
from tests.direct_ops.operators import IMPLEMENTATIONS, INPUTS, add_one, mix, model, packet, seen

NAMES = list(IMPLEMENTATIONS)
pytestmark = pytest.mark.usefixtures("thread_as_before")


@pytest.mark.parametrize("carrier", ["greenlet", "thread"])
@pytest.mark.parametrize("name", NAMES)
def test_yields_inside_interleave_and_give_the_same_bits(direct: Any, name: str, carrier: str) -> None:
    direct(name)
    with torch.inference_mode():
        expected = [model(x, name) for x in INPUTS]
        assert all(seen), "outside a step the operator goes through the dispatcher"
        seen.clear()
        result = Scheduler(carrier=carrier).run([lambda x=x: model(x, name) for x in INPUTS])
    assert seen == [None] * 9, "inside a step it does not"
    assert result.schedule.decisions == (0, 1, 2) * 7  # six yields and the return
    assert all(torch.equal(got, wanted) for got, wanted in zip(result.outputs, expected, strict=True))


def test_without_registration_the_yield_is_refused_and_the_next_step_works(direct: Any) -> None:
    with torch.inference_mode():
        with pytest.raises(UnsafeYieldError, match=r"register_direct_op\('dbo_test::raw'\)") as caught:
            Scheduler().run([lambda x=x: model(x, "dbo_test::raw") for x in INPUTS])
        assert caught.value.op == "dbo_test::raw"
        direct("dbo_test::raw")
        assert len(Scheduler().run([lambda x=x: model(x, "dbo_test::raw") for x in INPUTS]).outputs) == 3


def test_the_gate_is_in_during_steps_only(direct: Any) -> None:
    op = packet("dbo_test::custom")
    originals = op._op, op.default._op
    direct("dbo_test::custom")
    assert (op._op, op.default._op) == originals

    def entry() -> bool:
        dbo_yield("a")
        Scheduler(strict=False).run([lambda: dbo_yield("inner")])
        return op._op is not originals[0] and op.default._op is not originals[1]

    assert Scheduler().run([entry, entry]).outputs == [True, True]
    assert (op._op, op.default._op) == originals

    def failing() -> None:
        dbo_yield("a")
        raise ArithmeticError

    with pytest.raises(MicrobatchFailed):
        Scheduler().run([entry, failing])
    assert (op._op, op.default._op) == originals


def test_an_operator_hashes_the_same_in_a_step(direct: Any) -> None:
    op = packet("dbo_test::custom")
    direct("dbo_test::custom")
    table = {op: "packet", op.default: "overload"}

    def entry() -> tuple[str, str, int, int]:
        return table[op], table[op.default], hash(op), hash(op.default)

    assert Scheduler().run([entry]).outputs == [("packet", "overload", hash(op), hash(op.default))]


def test_registering_and_removing_while_a_step_runs(direct: Any) -> None:
    op = packet("dbo_test::raw")
    original = op._op

    def entry() -> list[bool]:
        states = [op._op is original]
        registered = direct("dbo_test::raw")
        again = direct("dbo_test::raw")
        states.append(op._op is original)
        registered.remove()  # has been replaced: nothing to take back
        states.append(op._op is original)
        again.remove()
        again.remove()
        states.append(op._op is original)
        return states

    direct("dbo_test::custom")  # without any operator the step begins without looking
    assert Scheduler().run([entry]).outputs == [[True, False, False, True]]
    assert op._op is original


def test_an_overload_that_is_added_while_a_step_runs_is_there_afterwards(direct: Any) -> None:
    torch.library.define("dbo_test::growing", "(Tensor x) -> Tensor")
    torch.library.impl("dbo_test::growing", "CompositeExplicitAutograd", add_one)
    direct("dbo_test::growing", add_one)

    def entry() -> None:
        # Torch gives the packet a new function then, which the gate must not take away again.
        torch.library.define("dbo_test::growing.by", "(Tensor x, int n) -> Tensor")
        torch.library.impl("dbo_test::growing.by", "CompositeExplicitAutograd", lambda x, n: x + n)

    Scheduler().run([entry])
    assert torch.equal(torch.ops.dbo_test.growing(INPUTS[0], 5), INPUTS[0] + 5)
    assert torch.equal(torch.ops.dbo_test.growing(INPUTS[0]), INPUTS[0] + 1)


def test_another_thread_goes_through_the_dispatcher_while_a_step_runs(direct: Any) -> None:
    direct("dbo_test::raw")
    outputs = []

    def entry() -> None:
        dbo_yield("a")
        thread = threading.Thread(target=lambda: outputs.append(torch.ops.dbo_test.raw(INPUTS[1], 1)))
        thread.start()
        thread.join()
        dbo_yield("b")

    Scheduler().run([entry])
    assert seen == ["dbo_test::raw"]
    assert torch.equal(outputs[0], mix(INPUTS[1], 1))


def test_steps_in_two_threads_share_the_gate(direct: Any) -> None:
    direct("dbo_test::custom")
    original = packet("dbo_test::custom")._op
    both = threading.Barrier(2)
    outputs: list[Any] = []

    def step() -> None:
        def entry() -> torch.Tensor:
            both.wait(60)
            y = model(INPUTS[0], "dbo_test::custom")
            both.wait(60)
            return y

        outputs.append(Scheduler().run([entry]).outputs[0])

    threads = [threading.Thread(target=step) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [None] * 6
    assert torch.equal(*outputs)
    assert packet("dbo_test::custom")._op is original
