"""A layer of two transfers per microbatch, and a step of it with faults."""

from __future__ import annotations

from typing import Any

from dbo_greenlet import dbo_register_recv_hook, dbo_yield
from dbo_greenlet.testing.faults import Faults
from dbo_greenlet.testing.step_run import StepRun, TestBed, run_step


def layer(bed: TestBed, log: list[Any]) -> list[Any]:
    """A dispatch and a combine of 100 us each, then work, in each microbatch."""
    device = bed.device

    def microbatch(i: int) -> Any:
        def send(name: str) -> None:
            transfer = device.send(f"{name}_{i}", 100.0)

            def receive() -> None:
                device.receive(transfer)
                log.append(("receive", f"{name}_{i}"))

            dbo_register_recv_hook(receive)

        def entry() -> int:
            try:
                send("D")
                dbo_yield("dispatch")
                device.work("experts", 10.0)
                send("C")
                dbo_yield("combine")
                return i
            except BaseException as error:
                log.append((type(error).__name__, i))
                raise

        return entry

    return [microbatch(i) for i in range(bed.count)]


def run_layer(text: str, carrier: str = "greenlet", log: list[Any] | None = None) -> tuple[StepRun, Faults]:
    drawn = Faults.parse(text)
    run = run_step(lambda bed: layer(bed, [] if log is None else log), faults=drawn, carrier=carrier)
    assert run.left_behind == []
    return run, drawn


def arrivals(run: StepRun) -> dict[str, float]:
    assert run.program is not None
    return {each.name: each.arrives for each in run.program.transfers}  # type: ignore[misc]
