"""The loop for slices in ring order ends at the first slice that leaves another thread state, and no sooner."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from dbo_greenlet import Scheduler, dbo_yield, greenlet_carrier
from dbo_greenlet.errors import MicrobatchFailed
from dbo_greenlet.thread_state import TorchThreadState

STATES: dict[str, Callable[[], Any]] = {
    "every component": TorchThreadState,
    "brief": lambda: TorchThreadState(host=True),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("changes", [None, 0, 3])
@pytest.mark.parametrize("fails", [False, True])
def test_state_that_changes_in_the_middle_stays_with_its_microbatch(
    state: str, changes: int | None, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[int] = []
    original = greenlet_carrier._take_turns

    def noted(step: Any, *others: Any) -> Any:
        slice_of_the_end = original(step, *others)
        recorded.append(len(step.decisions))
        return slice_of_the_end

    monkeypatch.setattr(greenlet_carrier, "_take_turns", noted)
    seen: list[list[bool]] = [[], []]

    def entry(index: int) -> Callable[[], None]:
        def run() -> None:
            with ExitStack() as scopes:
                for number in range(6):
                    if index == 1 and number == changes:
                        scopes.enter_context(torch.no_grad())
                    dbo_yield(f"site {number}")
                    seen[index].append(torch.is_grad_enabled())
                if fails and index == 1:
                    raise ValueError("planned")

        return run

    scheduler = Scheduler(strict=False, thread_state=STATES[state])
    with torch.enable_grad():
        if fails:
            with pytest.raises(MicrobatchFailed, match="in slice 6 after the yield at 'site 5'"):
                scheduler.run([entry(0), entry(1)])
        else:
            scheduler.run([entry(0), entry(1)])
        assert torch.is_grad_enabled()
    assert seen[0] == [True] * 6
    assert seen[1] == [changes is None or number < changes for number in range(6)]
    # Two microbatches: number `changes` of the second is slice 2 * changes + 1 of the step.
    assert recorded == [12 if changes is None else 2 * changes + 1]
