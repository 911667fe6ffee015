"""What each kind of fault does to the real scheduler and device."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dbo_greenlet import Scheduler, dbo_maybe_run_recv_hook, dbo_register_recv_hook, dbo_yield
from dbo_greenlet.devices import CpuDevice
from dbo_greenlet.devices.virtual import VirtualDevice
from dbo_greenlet.errors import MicrobatchFailed, ReceiveHookError, StepAborted
from dbo_greenlet.testing.errors import InjectedFault
from dbo_greenlet.testing.faults import Faults, exhaust
from dbo_greenlet.testing.layer_programs import high_throughput
from dbo_greenlet.testing.step_run import StepRun, TestBed, run_in_turn, run_step
from tests.testing.faulty_layer import arrivals, layer, run_layer

CARRIERS = ["greenlet", "thread"]


@pytest.mark.parametrize("carrier", CARRIERS)
def test_raise(carrier: str) -> None:
    log: list[Any] = []
    run, drawn = run_layer("raise@1.1", carrier, log)
    error = run.error
    assert isinstance(error, MicrobatchFailed)
    assert (error.index, error.slice_number, error.site) == (1, 1, "dispatch")
    assert isinstance(error.__cause__, InjectedFault)
    assert str(error.__cause__) == "raise@1.1: in place of yield 1 of microbatch 1, at 'combine'"
    assert log[-2:] == [("InjectedFault", 1), ("StepAborted", 0)]
    assert (drawn.struck, drawn.missed) == (list(drawn.faults), [])
    assert run.schedule.decisions == (0, 1, 0)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_fault_that_is_never_reached_changes_nothing(carrier: str) -> None:
    plain, _ = run_layer("", carrier)
    run, drawn = run_layer("raise@1.2+fail@0.2+oom@0.0+late@1.5:1s", carrier)
    assert run.succeeded and drawn.struck == [] and len(drawn.missed) == 4
    assert (run.schedule, run.outputs, arrivals(run)) == (plain.schedule, plain.outputs, arrivals(plain))


@pytest.mark.parametrize("carrier", CARRIERS)
def test_late_early_and_reordered_transfers(carrier: str) -> None:
    plain = arrivals(run_layer("", carrier)[0])
    assert plain == {"D_0": 100.0, "D_1": 100.0, "C_0": 210.0, "C_1": 220.0}
    late, drawn = run_layer("late@0.0:50us", carrier)
    # What follows on the stream is late with it; nothing else is.
    assert arrivals(late) == {"D_0": 150.0, "D_1": 100.0, "C_0": 260.0, "C_1": 270.0}
    early, _ = run_layer("early@0.1+early@1.1", carrier)
    assert arrivals(early) == {"D_0": 100.0, "D_1": 100.0, "C_0": 110.0, "C_1": 120.0}
    reordered, _ = run_layer("reorder@0.0", carrier)
    assert arrivals(reordered)["D_0"] == 101.0 and arrivals(reordered)["D_1"] == 100.0
    for run in (late, early, reordered):
        # Law 5: times change no schedule, and no output.
        assert (run.schedule, run.outputs) == (run_layer("", carrier)[0].schedule, [0, 1])
    assert drawn.missed == []


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("by_sibling", [True, False])
def test_a_receive_that_fails(carrier: str, by_sibling: bool) -> None:
    log: list[Any] = []

    def build(bed: TestBed) -> list[Any]:
        first, second = layer(bed, log)
        return [first, lambda: (dbo_maybe_run_recv_hook() if by_sibling else None, second())]

    run = run_step(build, faults=Faults.parse("fail@0.0"), carrier=carrier)
    assert isinstance(run.error, ReceiveHookError)
    assert (run.error.owner, run.error.ran_by) == (0, 1 if by_sibling else None)
    assert str(run.error.__cause__) == "fail@0.0: transfer 0 of microbatch 0 did not complete"
    assert not any(what == "receive" for what, _ in log)
    assert run.program is not None and not run.program.transfers[0].received


def test_a_receive_without_a_hook_fails_where_it_is_called() -> None:
    def build(bed: TestBed) -> list[Any]:
        def entry() -> None:
            transfer = bed.device.send("D", 10.0)
            dbo_yield("dispatch")
            bed.device.receive(transfer)

        return [entry] * 2

    run = run_step(build, faults=Faults.parse("fail@1.0"))
    assert isinstance(run.error, MicrobatchFailed) and run.error.index == 1
    assert isinstance(run.error.__cause__, InjectedFault)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_work_on_a_comm_stream_is_a_transfer(carrier: str) -> None:
    """DeepEP high throughput: the counts, the dispatch and the combine of a layer are its transfers 0, 1 and 2."""

    def outcome(text: str) -> tuple[StepRun, float]:
        devices: list[VirtualDevice] = []
        wrong = Faults.parse(text)
        run = run_step(
            high_throughput(1),
            make_device=lambda: devices.append(VirtualDevice()) or devices[0],  # type: ignore[func-returns-value]
            faults=wrong,
            carrier=carrier,
        )
        assert run.left_behind == [] and wrong.missed == []
        return run, devices[0].busy("comm")

    plain, busy = outcome("")
    late, busy_late = outcome("late@0.1:500us")
    early, busy_early = outcome("early@1.1+early@1.2")
    assert (busy, busy_late, busy_early) == (240.0, 740.0, 120.0)
    assert late.checksum == early.checksum == plain.checksum
    assert late.schedule == early.schedule == plain.schedule
    failed, _ = outcome("fail@1.2")
    assert isinstance(failed.error, MicrobatchFailed) and failed.error.index == 1
    assert str(failed.error.__cause__) == "fail@1.2: transfer 2 of microbatch 1 did not complete"


@pytest.mark.parametrize("carrier", CARRIERS)
def test_an_empty_microbatch(carrier: str) -> None:
    def build(bed: TestBed) -> list[Any]:
        def entry(i: int) -> Any:
            def run() -> int:
                tokens: int = bed.faults.tokens(i, 7) if bed.faults else 7
                dbo_yield("dispatch")
                return tokens

            return run

        return [entry(i) for i in range(3)]

    drawn = Faults.parse("empty@1")
    assert run_step(build, count=3, faults=drawn, carrier=carrier).outputs == [7, 0, 7]
    assert run_in_turn(build, count=3, faults=drawn) == [7, 0, 7]
    assert run_step(build, count=3, faults=Faults(), carrier=carrier).outputs == [7, 7, 7]


@pytest.mark.parametrize("carrier", CARRIERS)
def test_an_exhausted_allocator(carrier: str) -> None:
    log: list[Any] = []

    def build(bed: TestBed) -> list[Any]:
        bed.device.new_buffer("outside the microbatches")

        def entry() -> None:
            for k in range(3):
                try:
                    bed.device.new_buffer(f"activations {k}")
                    dbo_yield(f"layer{k}")
                except StepAborted:
                    with pytest.raises(MemoryError):  # it is still exhausted for whoever cleans up
                        bed.device.new_buffer("while unwinding")
                    log.append("no memory to clean up with")
                    raise

        return [entry] * 2

    drawn = Faults.parse("oom@0.1")
    for _ in range(2):
        run = run_step(build, faults=drawn, carrier=carrier)
        error = run.error
        assert isinstance(error, MicrobatchFailed) and (error.index, error.slice_number) == (0, 1)
        assert isinstance(error.__cause__, MemoryError)
        assert str(error.__cause__.__cause__) == "oom@0.1: the allocator is exhausted"
        assert log.pop() == "no memory to clean up with" and not log
    assert run_step(build, carrier=carrier).succeeded


def test_the_allocator_says_itself_that_it_is_exhausted() -> None:
    with pytest.raises(MemoryError):
        exhaust(object())
    torch = pytest.importorskip("torch")
    with pytest.raises(RuntimeError, match="allocate"):
        exhaust(CpuDevice())
    assert torch.empty(4).numel() == 4


def test_hooks_are_late_early_and_overtaken_where_no_device_times_them() -> None:
    device, log = CpuDevice(), []

    def build(bed: TestBed) -> list[Any]:
        def entry() -> None:
            for name in "ab":
                dbo_register_recv_hook(lambda name=name: log.append(name))
                log.append(f"sent {name}")
            dbo_yield("dispatch")

        return [entry]

    def logged(text: str) -> list[str]:
        log.clear()
        drawn = Faults.parse(text)
        assert run_step(build, count=1, faults=drawn, make_device=lambda: device).succeeded
        assert drawn.missed == []
        return list(log)

    assert logged("") == ["sent a", "sent b", "a", "b"]
    assert logged("early@0.0") == ["a", "sent a", "sent b", "b"]
    assert logged("reorder@0.0") == ["sent a", "sent b", "b", "a"]
    began = time.monotonic()
    assert logged("late@0.1:30ms") == ["sent a", "sent b", "a", "b"]
    assert time.monotonic() - began >= 0.03


# -- signals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("carrier", CARRIERS)
def test_an_interrupt_at_a_yield(carrier: str) -> None:
    log: list[Any] = []
    run, drawn = run_layer("signal@0.1:INT", carrier, log)
    assert isinstance(run.error, KeyboardInterrupt)
    assert drawn.missed == [] and run.schedule.decisions == (0, 1)
    # On a thread of its own the microbatch is unwound like its sibling: Python interrupts the main thread alone.
    assert log[-2:] == [("KeyboardInterrupt" if carrier == "greenlet" else "StepAborted", 0), ("StepAborted", 1)]


@pytest.mark.parametrize("carrier", CARRIERS)
def test_another_signal_reaches_its_handler_at_the_yield(carrier: str) -> None:
    log: list[Any] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: log.append("handled"))

    def build(bed: TestBed) -> list[Any]:
        def entry() -> None:
            log.append("slice 0")
            dbo_yield("a")
            log.append("slice 1")

        return [entry]

    try:
        assert run_step(build, count=1, faults=Faults.parse("signal@0.0:USR1"), carrier=carrier).succeeded
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert log == ["slice 0", "handled", "slice 1"]


def test_a_signal_sent_by_a_step_on_another_thread_goes_to_the_main_one() -> None:
    handled = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda *_: handled.set())
    found: list[Any] = []
    try:
        other = threading.Thread(target=lambda: found.append(run_layer("signal@0.1:USR1")))
        other.start()
        other.join()
        assert handled.wait(5)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert found[0][0].succeeded


def test_a_deadly_signal_kills() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    script = Path(__file__).with_name("fail_by_signal.py")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    assert (done.returncode, done.stdout.split()) == (-signal.SIGTERM, ["slice", "0"]), done.stderr


# -- elsewhere than in run_step ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_scheduler_is_struck_once_and_is_what_it_was_afterwards(carrier: str) -> None:
    scheduler = Scheduler(carrier=carrier, strict=False)
    kind = scheduler.microbatch_type

    def entry() -> str:
        dbo_yield("a")
        return "done"

    drawn = Faults.parse("raise@2.0")
    with pytest.raises(MicrobatchFailed) as caught, drawn.in_step_of(scheduler, count=3):
        scheduler.run([entry] * 3)
    assert caught.value.index == 2 and drawn.missed == []
    assert scheduler.microbatch_type is kind
    assert scheduler.run([entry] * 3).outputs == ["done"] * 3
