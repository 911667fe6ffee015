"""What goes wrong in a step, and what comes of it; each scenario says in words what its caller saw.

The same functions run with the drop-in (in the test's process) and with vLLM's threads (in children of
`script_upstream_failures.py`, because there they hang).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm import forward_context
from vllm.v1.worker import ubatching

from tests.vllm_dropin.drive import Case, Drive, harness
from tests.vllm_dropin.fake_cuda import FakeStream, Recorder, who_runs
from tests.vllm_dropin.model import tensors_of


class BrokenExpertError(RuntimeError):
    """What the model raises."""


def seen(call: Callable[[], Any]) -> str:
    """What a caller sees: "8 rows", or the error with its cause."""
    try:
        return f"{len(tensors_of(call())[0])} rows"
    except Exception as error:
        return f"{type(error).__name__}: {error} <- {type(error.__cause__).__name__}: {error.__cause__}"


def break_at(drive: Drive, microbatch: int, place: str, *, only_in_capture: bool = False) -> None:
    """Raise in a microbatch at a place of the model ("begin", "layer1", "end") or at a kernel launch ("experts")."""

    def hook(at: str) -> None:
        if at == place and who_runs() == str(microbatch) and (drive.log.graph is not None or not only_in_capture):
            raise BrokenExpertError(f"expert broke in {place}")

    drive.model.hook = hook
    drive.log.observers = [lambda call: hook(call.what)]


def mend(drive: Drive) -> None:
    drive.model.hook = lambda place: None
    drive.log.observers = []


def raising(runner: str, microbatch: int, place: str, mode: str = "eager", backend: str = "LL") -> str:
    """A microbatch raises before a layer ("begin", "layer1") or after the last one ("end")."""
    with harness() as log:
        drive = Drive(Case(runner, backend, mode, layers=2), log)
        break_at(drive, microbatch, place)
        return seen(drive.step if mode == "eager" else lambda: captured(drive))


def too_many_tokens(runner: str) -> str:
    """Microbatches of more tokens than the low-latency buffers have room for: both raise in their first dispatch."""
    with harness() as log:
        return seen(Drive(Case(runner, batch={"queries": [5] * 4}), log).step)


def captured(drive: Drive) -> Any:
    """The captured step of a drive, on a stream that can be captured."""
    with torch.cuda.stream(FakeStream(name="capture", recorder=drive.log)):
        return drive.capture()


def early_finisher(runner: str) -> str:
    """Microbatch 0 returns; microbatch 1 then registers a receive with it and returns, too."""
    with harness() as log:
        drive = Drive(Case(runner), log, runnable=late_sender(log))
        return seen(lambda: received(drive.step()))


def received(out: torch.Tensor) -> torch.Tensor:
    if out.flatten().tolist() != [0] * 4 + [1] * 4:
        raise BrokenExpertError(f"the receive did not run once: {out.flatten().tolist()}")
    return out


def late_sender(log: Recorder) -> Callable[..., torch.Tensor]:
    """A "model" in which microbatch 1 sends when microbatch 0, which would run the receive, has returned already."""

    def model(input_ids: torch.Tensor, **other: Any) -> torch.Tensor:
        ubatching.dbo_yield()
        out = torch.zeros(len(input_ids), 1)
        if who_runs() == "1":
            ubatching.dbo_register_recv_hook(lambda: (log.work("late receive"), out.add_(1)))
        return out

    return model


def aborted() -> str:
    """V2: a capturable run is begun and aborted. How many microbatches ran the model?"""
    with harness() as log:
        calls: list[int] = []
        drive = Drive(Case("V2", mode="capture"), log, runnable=lambda **inputs: calls.append(1) or inputs["input_ids"])
        before = forward_context._forward_context
        drive.runner.begin_capturable_run(drive.runnable, drive.inputs, drive.prepared(True), for_capture=True)
        drive.runner.abort_pending_run()
        reserved = [call.what for call in log.log if call.what.startswith("sm.")]
        given_back = reserved == ["sm.reserve", "sm.give_back"] and forward_context._forward_context is before
        return f"{len(calls)} microbatches ran; {'given back' if given_back else reserved}"


SCENARIOS: dict[str, Callable[[], str]] = {
    **{
        f"{runner} microbatch {microbatch} raises in {place}": lambda r=runner, m=microbatch, p=place: raising(r, m, p)
        for runner in ("V1", "V2")
        for microbatch in (0, 1)
        for place in ("begin", "layer1", "end")
    },
    **{
        f"{runner} HT microbatch {microbatch} raises in {place}": lambda r=runner, m=microbatch, p=place: raising(
            r, m, p, backend="HT"
        )
        for runner in ("V1", "V2")
        for microbatch in (0, 1)
        for place in ("layer1", "end")
    },
    **{
        f"{runner} microbatch 1 raises in {place} of a capture": lambda r=runner, p=place: raising(r, 1, p, "capture")
        for runner in ("V1", "V2")
        for place in ("layer1", "end")
    },
    "V1 too many tokens": lambda: too_many_tokens("V1"),
    "V2 too many tokens": lambda: too_many_tokens("V2"),
    "V1 early finisher": lambda: early_finisher("V1"),
    "V2 early finisher": lambda: early_finisher("V2"),
    "V2 aborted": aborted,
}
