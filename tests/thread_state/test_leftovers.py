"""What a microbatch leaves behind is taken off, however it ends and whatever the step runs in."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from dbo_greenlet import Scheduler, dbo_yield, make_ubatch_contexts
from dbo_greenlet.errors import MicrobatchFailed
from dbo_greenlet.thread_state import TorchThreadState
from dbo_greenlet.torch_state import Baseline, observe
from tests.thread_state.leaks import LEAKS, held
from tests.thread_state.programs import SCOPES, STREAMS, DispatchLog, FunctionLog, Slot, snapshot

pytestmark = pytest.mark.usefixtures("thread_as_before")


@pytest.mark.parametrize("around", ["nothing", "inference", "dispatch mode", "function mode", "autocast bfloat16"])
@pytest.mark.parametrize("leak", LEAKS)
@pytest.mark.parametrize("how", ["returns", "raises", "is unwound"])
def test_whatever_a_microbatch_leaves_on_is_taken_off(leak: str, how: str, around: str) -> None:
    def leaking() -> None:
        LEAKS[leak]()
        dbo_yield("leaking")
        if how == "raises":
            raise ArithmeticError

    def other() -> dict[str, Any]:
        dbo_yield("other")
        if how == "is unwound":
            raise ArithmeticError
        return snapshot()

    entries: list[Any] = [leaking, other] if how != "is unwound" else [other, leaking]
    contexts = make_ubatch_contexts(2, device=STREAMS)
    scope = SCOPES[around]("outer", []) if around != "nothing" else torch.enable_grad()
    with scope:
        before = snapshot()
        if how == "returns":
            assert Scheduler(strict=False).run(entries, contexts).outputs[1] == before
        else:
            with pytest.raises(MicrobatchFailed):
                Scheduler(strict=False).run(entries, contexts)
        assert snapshot() == before
        # Torch's guards restore what they found when they are destroyed, and these found another state than ours.
        clean = Baseline(observe())
        held.clear()
        clean.restore(observe())
        assert snapshot() == before


def test_the_state_of_a_microbatch_that_never_came_back_is_dropped() -> None:
    before = snapshot()
    state, slot = TorchThreadState(), Slot()
    state.start()
    guard = torch._C._InferenceMode(True)
    state.leave(slot)
    assert slot.saved_state is not None
    assert snapshot() == before
    state.finish()
    assert snapshot() == before
    saved, slot.saved_state = slot.saved_state, None
    del saved
    gc.collect()
    assert snapshot() == before, "nothing that was kept restores when it is collected"
    clean = Baseline(observe())
    del guard
    clean.restore(observe())


def test_an_interrupt_in_the_middle_of_a_switch_is_repaired_by_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever call into torch it lands in, while a state is taken off or put on."""
    from dbo_greenlet import torch_state

    names = [
        name
        for name, value in vars(torch_state).items()
        if callable(value) and (name.startswith(("_set_", "_push_", "_pop_")) or name.endswith("Guard"))
    ]
    before = snapshot()

    def attempt(name: str, nth: int) -> bool:
        original = getattr(torch_state, name)
        calls = 0

        def interrupted(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == nth:
                raise KeyboardInterrupt
            return original(*arguments)

        def entry() -> None:
            with torch.inference_mode(), DispatchLog("d", []), FunctionLog("f", []), torch.autocast("cpu"):
                dbo_yield("a")
                dbo_yield("b")

        state, slot = TorchThreadState(STREAMS), Slot()
        state.start()
        monkeypatch.setattr(torch_state, name, interrupted)
        scopes = [torch.inference_mode(), DispatchLog("d", []), FunctionLog("f", []), torch.autocast("cpu")]
        try:
            for scope in scopes:
                scope.__enter__()
            state.leave(slot)
            for _ in range(2):
                state.resume(slot, lambda _: None, None)
            happened = False
        except KeyboardInterrupt:
            happened = True
        finally:
            monkeypatch.setattr(torch_state, name, original)
        state.finish()
        assert snapshot() == before, (name, nth)
        clean = Baseline(observe())
        del scopes
        clean.restore(observe())
        return happened

    interrupted_calls = 0
    for name in names:
        nth = 1
        while attempt(name, nth):
            interrupted_calls += 1
            nth += 1
    assert interrupted_calls > 20
