"""Thread state, part by part, and the ways in which it can go wrong."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.utils._device as torch_device

from dbo_greenlet import Scheduler, dbo_yield, make_ubatch_contexts, register_direct_op
from dbo_greenlet.thread_state import TorchThreadState
from dbo_greenlet.torch_state import Baseline, observe
from tests.thread_state.leaks import LEAKS, held
from tests.thread_state.programs import SCOPES, STREAMS, DispatchLog, FunctionLog, Slot, X, snapshot

pytestmark = pytest.mark.usefixtures("thread_as_before")


def scheduler(**settings: Any) -> Scheduler:
    return Scheduler(strict=False, **settings)


@pytest.mark.parametrize("kind", [kind for kind in SCOPES if kind not in ("number", "no inference", "enable_grad")])
def test_a_scope_that_is_open_at_a_yield_belongs_to_its_microbatch(kind: str) -> None:
    """Each part of the state by itself; overlapping in the order that breaks torch's own restoring."""
    log: list[Any] = []

    def comparable() -> dict[str, Any]:
        return {name: value for name, value in snapshot().items() if name not in ("dispatch modes", "function modes")}

    def scoped(site: str) -> list[Any]:
        seen = [comparable()]
        with SCOPES[kind](site, log):
            seen.append(comparable())
            dbo_yield(site)
            seen.append(comparable())
            dbo_yield(site)
        return [*seen, comparable()]

    def bystander() -> list[Any]:
        seen = [comparable()]
        for _ in range(2):
            dbo_yield("bystander")
            seen.append(comparable())
        return seen

    outside = comparable()
    with SCOPES[kind]("x", log):
        inside = comparable()
    contexts = make_ubatch_contexts(3, device=STREAMS)
    step = scheduler().run([lambda: scoped("a"), bystander, lambda: scoped("b")], contexts)
    assert step.outputs[0] == step.outputs[2] == [outside, inside, inside, outside]
    assert step.outputs[1] == [outside] * 3
    assert snapshot() != outside or kind != "nothing"


def test_a_quiet_microbatch_saves_nothing() -> None:
    state, slot = TorchThreadState(STREAMS), Slot()
    with torch.inference_mode(), torch.autocast("cpu"), FunctionLog("f", []), DispatchLog("d", []):
        state.start()
        state.leave(slot)
        assert slot.saved_state is None
        with torch.no_grad():  # already off
            state.leave(slot)
        assert slot.saved_state is None
        state.finish()


@pytest.mark.parametrize("without", ["nothing", "thread_words", "key_sets"])
@pytest.mark.parametrize("around", ["nothing", *SCOPES])
def test_the_quick_comparison_says_what_the_slow_one_says(around: str, without: str, monkeypatch: Any) -> None:
    if without != "nothing":
        monkeypatch.setattr(f"dbo_greenlet.{without}.view", lambda: None)
    scope = SCOPES[around] if around != "nothing" else lambda name, log: torch.enable_grad()
    with scope("outer", []):
        base = Baseline(observe())
        assert base.holds()
        for kind, inner in SCOPES.items():
            with inner("inner", []):
                assert base.holds() == (observe() == base.seen), kind
            assert base.holds()
        for leak in LEAKS.values():
            leak()
            if observe() != base.seen:
                assert not base.holds()
                clean = observe()
                base.restore(clean)
            held.clear()
            base.restore(observe())
            assert base.holds()
        STREAMS.set_stream(STREAMS.default_stream)


def test_the_schedulers_own_work_is_invisible_to_modes() -> None:
    log: list[Any] = []

    def entry() -> None:
        with FunctionLog("f", log), torch.no_grad(), torch.autocast("cpu"):
            log.append("begin")
            dbo_yield("a")
            log.append("end")

    def other() -> None:
        with FunctionLog("g", []), torch.inference_mode():
            dbo_yield("b")

    scheduler().run([entry, other])
    begin, end = log.index("begin"), log.index("end")
    assert log[begin + 1 : end] == []
    with FunctionLog("outer", log):
        del log[:]
        scheduler().run([lambda: dbo_yield("a"), other])
    assert [entry for entry in log if entry[0] == "outer" and entry[2] not in ("_set_grad_enabled",)] == []


def test_the_autocast_cache_does_not_give_one_microbatch_the_casts_of_another() -> None:
    """Torch's cache gives a weight's cast whatever dtype is wanted now: the second product would not even run."""
    weight = torch.eye(2, requires_grad=True)
    x = torch.tensor([[1.5, 2.5]])

    def entry(dtype: torch.dtype, grad: bool) -> list[Any]:
        seen = []
        with torch.autocast("cpu", dtype=dtype), torch.set_grad_enabled(grad):
            for _ in range(3):
                y = x @ weight
                seen.append((y.dtype, y.requires_grad))
                dbo_yield("after product")
        return seen

    step = scheduler().run([lambda: entry(torch.bfloat16, True), lambda: entry(torch.float16, True)])
    assert step.outputs == [[(torch.bfloat16, True)] * 3, [(torch.float16, True)] * 3]
    # Inside one autocast scope round the step, the microbatches differ in grad mode only.
    with torch.autocast("cpu", dtype=torch.bfloat16):

        def shared(grad: bool) -> list[bool]:
            seen = []
            with torch.set_grad_enabled(grad):
                for _ in range(3):
                    seen.append((x @ weight).requires_grad)
                    dbo_yield("after product")
            return seen

        assert scheduler().run([lambda: shared(False), lambda: shared(True)]).outputs == [[False] * 3, [True] * 3]


def test_a_microbatch_that_goes_on_in_its_own_autocast_gets_no_casts_of_the_surrounding_one() -> None:
    weight = torch.eye(2, requires_grad=True)
    x = torch.tensor([[1.5, 2.5]])

    def product() -> list[torch.dtype]:
        seen = []
        for _ in range(3):
            dbo_yield("before product")
            seen.append((x @ weight).dtype)
        return seen

    def own() -> list[torch.dtype]:
        with torch.autocast("cpu", dtype=torch.float16):
            seen = product()
            # Torch does not do this at the end of an inner scope, with or without microbatches.
            torch.clear_autocast_cache()
        return seen

    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = scheduler().run([own, product, own]).outputs
        # The same through `restore`, which does not know what was cast meanwhile.
        base = Baseline(observe())
        scope = torch.autocast("cpu", dtype=torch.float16)
        scope.__enter__()
        torch.clear_autocast_cache()
        assert (x @ weight).dtype == torch.float16
        base.restore(observe())
        assert (x @ weight).dtype == torch.bfloat16
    assert outputs == [[torch.float16] * 3, [torch.bfloat16] * 3, [torch.float16] * 3]


@pytest.mark.parametrize("inside_operator", [False, True])
def test_a_default_device_set_inside_belongs_to_its_microbatch(inside_operator: bool) -> None:
    def entry(device: str) -> list[str]:
        seen = [torch.empty(1).device.type]
        torch.set_default_device(device)
        seen.append(str(torch_device.CURRENT_DEVICE))
        if inside_operator:
            # It handles the call of the operator, and is off the mode stack as long as that lasts.
            torch.ops.dbo_test_state.project(X)
        else:
            dbo_yield("set")
        seen.append(str(torch_device.CURRENT_DEVICE))
        seen += [torch.empty(1).device.type, torch.get_default_device().type]
        dbo_yield("used")
        torch.set_default_device(None)
        return [*seen, torch.empty(1).device.type, str(torch_device.CURRENT_DEVICE)]

    registered = register_direct_op("dbo_test_state::project")
    step = scheduler().run([lambda: entry("meta"), lambda: entry("cpu"), lambda: entry("meta")])
    registered.remove()
    meta = ["cpu", *["meta"] * 4, "cpu", "None"]
    assert step.outputs == [meta, ["cpu"] * 6 + ["None"], meta]


# -- steps inside steps, threads ---------------------------------------------------------------------------------------


def test_a_step_inside_a_microbatch_starts_from_the_microbatchs_state() -> None:
    def inner() -> tuple[bool, bool]:
        before = torch.is_inference_mode_enabled()
        with torch.inference_mode(False), torch.no_grad():
            dbo_yield("inner")
        return before, torch.is_inference_mode_enabled()

    def outer(on: bool) -> list[Any]:
        with torch.inference_mode(on):
            dbo_yield("outer")
            inside = scheduler().run([inner, inner]).outputs
            after = torch.is_inference_mode_enabled()
            dbo_yield("outer")
        return [*inside, after, torch.is_inference_mode_enabled()]

    outputs = scheduler().run([lambda: outer(True), lambda: outer(False)]).outputs
    assert outputs == [[(True, True), (True, True), True, False], [(False, False), (False, False), False, False]]


@pytest.mark.parametrize("around", [kind for kind in SCOPES if kind not in ("number", "stream")])
def test_threads_carry_microbatches_in_the_callers_state(around: str) -> None:
    log: list[Any] = []

    def entry() -> dict[str, Any]:
        dbo_yield("a")
        with torch.inference_mode():
            dbo_yield("b")
        return snapshot()

    with SCOPES[around]("outer", log):
        before = snapshot()
        contexts = make_ubatch_contexts(2, device=STREAMS)
        assert scheduler(carrier="thread").run([entry, entry], contexts).outputs == [before, before]
        assert snapshot() == before


def test_a_thread_gets_its_own_state_back_when_its_microbatch_is_done() -> None:
    seen: list[Any] = []
    state = TorchThreadState()
    with torch.inference_mode(), DispatchLog("d", []), FunctionLog("f", []):
        here = snapshot()
        state.start()

        def body() -> None:
            seen.append(snapshot())
            state.thread_begin()
            seen.append(snapshot())
            torch._C._set_grad_enabled(True)
            state.thread_end()
            seen.append(snapshot())
            state.thread_end()  # nothing more to give back

        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
        state.finish()
    fresh, on, after = seen
    # Two module globals are of the process and not of the thread; they stay with the thread that entered the mode.
    assert on == here
    assert after == {**fresh, "in a dispatch mode": [True, True]}
