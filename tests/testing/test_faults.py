"""Fault strings, and what each kind of fault does to the real scheduler and device."""

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
from hypothesis import given
from hypothesis import strategies as st

from dbo_greenlet import RoundRobin, Scheduler, dbo_maybe_run_recv_hook, dbo_register_recv_hook, dbo_yield
from dbo_greenlet.devices import CpuDevice
from dbo_greenlet.devices.virtual import VirtualDevice
from dbo_greenlet.errors import ConfigurationError, MicrobatchFailed, ReceiveHookError, StepAborted
from dbo_greenlet.testing.errors import FaultStringError, InjectedFault
from dbo_greenlet.testing.faults import KINDS, Fault, Faults, exhaust
from dbo_greenlet.testing.layer_programs import high_throughput
from dbo_greenlet.testing.replay_case import ReplayCase
from dbo_greenlet.testing.step_run import StepRun, TestBed, run_in_turn, run_step
from dbo_greenlet.testing.strategies import faults

CARRIERS = ["greenlet", "thread"]
EXAMPLES = [example for _, example, _ in KINDS.values()]

# -- strings -----------------------------------------------------------------------------------------------------------


def test_every_example_is_read_and_written_as_it_is() -> None:
    assert [str(Faults.parse(example)) for example in EXAMPLES] == EXAMPLES
    text = "+".join(EXAMPLES)
    read = Faults.parse(text)
    assert (str(read), [each.kind for each in read.faults]) == (text, list(KINDS))
    assert eval(repr(read)) == read and hash(read) == hash(Faults.parse(text))
    assert str(read.of_ranks) == "(<fault die@rank1:step3>, <fault stall@rank1:step3:2s>)"
    assert read.interrupts and not Faults.parse("raise@0.0").interrupts


def test_no_fault_is_the_empty_string() -> None:
    assert str(Faults()) == "" and Faults.parse(" ") == Faults() and not Faults.parse("")
    assert Faults() != "" and Faults.parse("empty@0") != Faults()


def test_fields_are_what_the_string_says() -> None:
    assert Faults.parse("late@12.7:50us").faults == (Fault("late", 12, 7, nanoseconds=50_000),)
    assert Faults.parse("signal@1.2:TERM").faults == (Fault("signal", 1, 2, signal="TERM"),)
    (fault,) = Faults.parse("stall@rank1:step3.2:1.5s").faults
    assert (fault.rank, fault.step, fault.collective, fault.seconds) == (1, 3, 2, 1.5)
    assert (fault.microbatch, fault.number, fault.microseconds) == (None, None, 1.5e6)


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("late@0.1:0.5ms", "late@0.1:500us"),
        ("late@0.1:1000us", "late@0.1:1ms"),
        ("late@0.1:0.001us", "late@0.1:1ns"),
        ("late@0.1:0us", "late@0.1:0s"),
        ("raise@01.003", "raise@1.3"),
        ("die@rank0:step1.0", "die@rank0:step1"),
        ("raise@1.3+raise@1.3+empty@0", "raise@1.3+empty@0"),
        (" raise@1.3 ", "raise@1.3"),
    ],
)
def test_one_form_of_each(written: str, canonical: str) -> None:
    assert str(Faults.parse(written)) == canonical


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("raise", "'raise' in 'raise' is of no known kind; write one of these: raise@1.3, late@0.1:50us"),
        ("explode@1.3", "'explode@1.3' .* is of no known kind"),
        ("raise@1.3+", "'' in 'raise@1.3\\+' is of no known kind"),
        ("raise@1", "it is written like raise@1.3 \\(microbatch 1 raises at its yield 3\\)"),
        ("raise@1.3:INT", "cannot be read"),
        ("raise@-1.3", "cannot be read"),
        ("raise@1.٣", "cannot be read"),
        ("late@0.1", "it is written like late@0.1:50us"),
        ("late@0.1:50", "cannot be read"),
        ("late@0.1:0.0001us", "a time is a whole number of nanoseconds"),
        ("signal@0.1:NONE", "there is no signal SIGNONE here"),
        ("signal@0.1:int", "cannot be read"),
        ("die@1.3", "it is written like die@rank1:step3"),
        ("empty@0.1", "it is written like empty@1"),
        ("raise@1.9999999999", "cannot be read"),
        ("RAISE@1.3", "no known kind"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, says: str) -> None:
    with pytest.raises(FaultStringError, match=says):
        Faults.parse(text)


@given(faults(count=4, most=5, kinds=("raise", "late", "early", "reorder", "fail", "empty", "oom", "signal")))
def test_all_faults_survive_their_string_and_a_replay_string(drawn: Faults) -> None:
    assert Faults.parse(str(drawn)) == drawn
    run = run_step(lambda bed: [lambda: dbo_yield("a")] * 2, RoundRobin())
    run.faults = str(drawn)
    assert Faults.parse(ReplayCase.decode(ReplayCase.of(run).encode()).faults) == drawn


@given(st.text(max_size=12))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        Faults.parse(text)
    except FaultStringError as error:
        assert text.strip().split("+")[0] in str(error) or repr(text)[1:-1] in str(error)


def test_a_seed_gives_the_same_faults() -> None:
    drawn = [str(Faults.random(seed, count=3, most=3)) for seed in range(300)]
    assert drawn == [str(Faults.random(seed, count=3, most=3)) for seed in range(300)]
    kinds = {fault.kind for text in drawn for fault in Faults.parse(text).faults}
    assert kinds == set(KINDS) - {"die", "stall"}
    assert {len(Faults.parse(text).faults) for text in drawn} == {1, 2, 3}
    only = {f for seed in range(50) for f in Faults.random(seed, kinds=["raise"], count=1, yields=2).faults}
    assert {str(fault) for fault in only} == {"raise@0.0", "raise@0.1"}


@pytest.mark.parametrize("wrong", [{"count": 0}, {"yields": 0}, {"most": 0}, {"kinds": ["die"]}, {"kinds": []}])
def test_faults_that_cannot_be_drawn(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        Faults.random(1, **wrong)


def test_a_fault_of_a_microbatch_that_is_not_there() -> None:
    with pytest.raises(FaultStringError, match="'raise@2.0' is for microbatch 2, and the step has 2: 0 to 1"):
        run_step(lambda bed: [lambda: None] * 2, faults=Faults.parse("raise@2.0"))


def test_faults_and_marks_need_neither_torch_nor_hypothesis_nor_pytest() -> None:
    modules = ("faults", "faulty_microbatch", "rank_faults", "sometimes", "step_programs", "step_model")
    names = ", ".join(f"dbo_greenlet.testing.{name}" for name in modules)
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, {names}; print({{'torch', 'hypothesis', 'pytest'}} & set(sys.modules))"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "set()"), done.stderr


# -- what they do ------------------------------------------------------------------------------------------------------


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
