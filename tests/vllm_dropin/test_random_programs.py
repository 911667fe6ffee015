"""Random programs of vLLM's `dbo_*` calls in place of a model: the drop-in's log is that of the threads.

Every microbatch runs the same program, as those of a step do. A program keeps to what vLLM's classes do: it yields to
the other stream only from the right one, and looks for its sibling's receive before it sends or yields.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("vllm", reason="needs vLLM, which is the other side (make test-vllm)")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.worker import ubatching

from dbo_greenlet.vllm import host_microbatch, step
from tests.vllm_dropin.differences import compare
from tests.vllm_dropin.drive import Case, Drive, drop_in, harness
from tests.vllm_dropin.fake_cuda import Call, Recorder, who_runs

pytestmark = pytest.mark.vllm

ANYWHERE = ("work", "event", "yield", "send")
ON_COMPUTE = ("switch_to_comm", "switch_to_comm_sync", "yield_and_switch_from_compute_to_comm")
ON_COMM = ("switch_to_compute", "switch_to_compute_sync", "yield_and_switch_from_comm_to_compute")


@st.composite
def programs(draw: st.DrawFn) -> list[str]:
    statements: list[str] = []
    on_compute = True
    for _ in range(draw(st.integers(1, 14))):
        statement = draw(st.sampled_from(ANYWHERE + (ON_COMPUTE if on_compute else ON_COMM)))
        if statement in ON_COMPUTE + ON_COMM:
            on_compute = not on_compute
        statements.append(statement)
    return statements if on_compute else [*statements, "switch_to_compute_sync"]


class Player:
    """Runs one program as the "model" of a runner."""

    def __init__(self, statements: list[str], log: Recorder) -> None:
        self.statements, self.log = statements, log
        self.received: list[str] = []

    def __call__(self, positions: torch.Tensor, **other: Any) -> torch.Tensor:
        for number, statement in enumerate(self.statements):
            if statement == "work":
                self.log.work(f"work {number}", ubatching.dbo_current_ubatch_id())
            elif statement == "event":
                ubatching.dbo_get_previous_event(self.log.work, f"event {number}")
            else:
                if "yield" in statement or statement == "send":
                    ubatching.dbo_maybe_run_recv_hook()
                if statement == "send":
                    self.send(number)
                getattr(ubatching, "dbo_" + ("yield" if statement == "send" else statement))()
                if statement == "send" and f"{number} of {who_runs()}" not in self.received:
                    self.log.write("resumed without its receive", number)
        return positions.float()

    def send(self, number: int) -> None:
        name = f"{number} of {who_runs()}"

        def receive() -> None:
            self.received.append(name)
            self.log.work(f"receive {name}")

        ubatching.dbo_register_recv_hook(receive)


def played(runner: str, statements: list[str], noted: bool = True) -> tuple[list[Call], list[str], torch.Tensor]:
    with harness() as log, nullcontext() if noted else patch.object(host_microbatch, "_stream_note", None):
        player = Player(statements, log)
        drive = Drive(Case(runner, "HT"), log, runnable=player)
        return log.log, player.received, drive.step()


@settings(max_examples=40)
@given(programs(), st.sampled_from(["V1", "V2"]), st.booleans(), st.booleans())
def test_random_programs_leave_the_same_log(statements: list[str], runner: str, strict: bool, noted: bool) -> None:
    threads, received, out = played(runner, statements)
    # Strict as everywhere in these tests, and not as in a server, where the hub has a shorter loop. And with and
    # without vLLM's note of each thread's stream: where there is none, a yield is vLLM's own.
    with drop_in(), patch.object(step._plain, "strict", strict):
        greenlets, received_too, same = played(runner, statements, noted)
    assert torch.equal(out, same)
    found = compare(threads, greenlets)
    assert {name for change, name in found if change != "fewer"} <= {"set_stream on resuming"}
    # Each receive exactly once, in the same order, and before its owner goes on.
    assert received_too == received
    assert len(received) == len(set(received)) == 2 * statements.count("send")
    assert not any(call.what.startswith("resumed") for call in greenlets)
