"""What a step takes over from the one before it on the same thread, and what it must not."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import weakref

import pytest
import torch
from torch.overrides import BaseTorchFunctionMode

from dbo_greenlet import Scheduler, dbo_range, dbo_yield, register_ambient_state
from dbo_greenlet.torch_state import observe


def test_a_step_that_begins_as_the_last_one_did_observes_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    from dbo_greenlet import profiling, thread_state

    # As in a process that never opened a range; other tests have.
    monkeypatch.setattr(profiling, "used", False)
    observed: list[int] = []
    observe = thread_state.observe
    monkeypatch.setattr(thread_state, "observe", lambda: observed.append(1) or observe())
    scheduler = Scheduler()
    scheduler.run([lambda: None] * 2)
    observed.clear()
    scheduler.run([lambda: None] * 2)
    assert observed == []
    with torch.no_grad():
        scheduler.run([lambda: None] * 2)
    assert observed == [1]


@pytest.mark.parametrize("change", ["autocast dtype", "grad", "ambient", "range", "modes"])
def test_what_changes_between_two_steps_is_seen_by_the_second(change: str) -> None:
    """The second step's microbatches yield in another state, and its end is the state that it began with."""
    scheduler = Scheduler()

    def entry() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            dbo_yield("a")
            dbo_yield("b")

    scheduler.run([entry, entry])
    with contextlib.ExitStack() as stack:
        ambient = [0]
        if change == "autocast dtype":
            was = torch.get_autocast_dtype("cuda")
            torch.set_autocast_dtype("cuda", torch.float64)
            stack.callback(torch.set_autocast_dtype, "cuda", was)
        elif change == "grad":
            stack.enter_context(torch.inference_mode())
        elif change == "ambient":
            handle = register_ambient_state("number", lambda: ambient[0], lambda value: ambient.__setitem__(0, value))
            stack.callback(handle.remove)
        elif change == "range":
            stack.enter_context(dbo_range("outer"))
        else:
            stack.enter_context(BaseTorchFunctionMode())
        before = observe(), torch.get_autocast_dtype("cuda")

        def changing(i: int) -> int:
            ambient[0] = i
            entry()
            return ambient[0]

        outputs = scheduler.run([lambda: changing(1), lambda: changing(2)]).outputs
        assert (observe(), torch.get_autocast_dtype("cuda")) == before
        if change == "ambient":
            assert outputs == [1, 2] and ambient == [0]
    scheduler.run([entry, entry])


def test_no_mode_outlives_its_step() -> None:
    mode = BaseTorchFunctionMode()
    alive = weakref.ref(mode)
    with mode:
        Scheduler().run([lambda: None] * 2)
    del mode
    assert alive() is None


def test_a_set_stream_that_was_replaced_before_is_not_gone_past() -> None:
    """In a process of its own: what an engine does when it is imported, before our device is."""
    code = (
        "import torch\n"
        "original = torch.cuda.set_stream\n"
        "def note(stream): original(stream)\n"
        "torch.cuda.set_stream = note\n"
        "import dbo_greenlet.devices.cuda as cuda\n"
        "assert cuda._public_set is None\n"
        "torch.cuda.set_stream = original\n"
        "import importlib; importlib.reload(cuda)\n"
        "assert cuda._public_set is original\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
