"""Whatever goes wrong: the step ends as the model says, siblings are unwound, nothing is left, the next step works.

Faults x policies x programs x carriers by Hypothesis, against `step_model`; the same on a torch model, where the thread
state counts too; and that a failing run comes again from its string.
"""

from __future__ import annotations

import gc
import sys
import weakref
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo_greenlet import RoundRobin, Scheduler, dbo_register_recv_hook, dbo_yield, make_ubatch_contexts
from dbo_greenlet.devices import CpuDevice
from dbo_greenlet.devices.virtual import VirtualDevice
from dbo_greenlet.errors import MicrobatchFailed
from dbo_greenlet.testing.errors import Finding, InjectedFault
from dbo_greenlet.testing.explore import explore
from dbo_greenlet.testing.faults import Faults
from dbo_greenlet.testing.layer_programs import low_latency
from dbo_greenlet.testing.replay_case import ReplayCase
from dbo_greenlet.testing.sometimes import declare, sometimes
from dbo_greenlet.testing.step_programs import Action, Parts, check_programs
from dbo_greenlet.testing.step_run import TestBed, run_in_turn, run_step
from dbo_greenlet.testing.strategies import HARMLESS_TO_PYTEST, faults, faults_in, policies, policy_of, programs

CARRIERS = ["greenlet", "thread"]
FAILING = {"raise", "fail", "oom"}
KINDS = (*HARMLESS_TO_PYTEST, "signal")

declare(*(f"fault struck: {kind}" for kind in KINDS))


class HookWire:
    """What is sent has arrived; the receive is only a hook. For a device that times nothing."""

    def dispatch(self, microbatch: int, payload: Any) -> Parts:
        arrived: list[Any] = []
        return Parts(lambda: arrived.append(payload), lambda: arrived[0])

    def combine(self, microbatch: int, payload: Any, dispatched: Parts) -> Parts:
        return self.dispatch(microbatch, payload)


OVER_HOOKS: dict[str, Any] = {"make_wire": lambda bed: HookWire(), "make_device": CpuDevice}


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("wire", ["transfers of a device", "hooks"])
def test_any_programs_with_any_faults_under_any_policy(carrier: str, wire: str) -> None:
    where = OVER_HOOKS if wire == "hooks" else {}

    @settings(max_examples=150 if carrier == "greenlet" else 40)
    @given(programs(), policies(), st.data())
    def check(drawn: list[list[Action]], policy: Any, data: st.DataObject) -> None:
        wrong = data.draw(faults_in(drawn, kinds=KINDS if carrier == "greenlet" else HARMLESS_TO_PYTEST))
        run = check_programs(drawn, policy_of(policy), faults=wrong, carrier=carrier, **where)
        sometimes("a step with faults went well", run.succeeded and bool(wrong.struck))

    check()


EVERY_KIND = [
    "raise@1.0",
    "late@0.0:5us",
    "early@1.0",
    "reorder@0.0",
    "fail@1.0",
    "empty@1",
    "oom@1.0",
    "signal@1.0:INT",
]


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("text", EVERY_KIND)
def test_every_kind_strikes_programs_of_every_size(carrier: str, text: str) -> None:
    """What Hypothesis may miss in a short run: each kind strikes for certain."""
    program = [("allocate", ""), ("dispatch", ""), ("dispatch", ""), ("yield", "a"), ("combine", ""), ("yield", "b")]
    for count in (2, 3):
        for where in ({}, OVER_HOOKS):
            wrong = Faults.parse(text)
            check_programs([program] * count, faults=wrong, carrier=carrier, **where)
            assert wrong.missed == []


def test_the_model_is_compared_with_something() -> None:
    """A check that cannot fail would be none: a wrong entry, a wrong order and a lost receive are found."""
    program = [("work", "p"), ("dispatch", ""), ("yield", "a"), ("work", "q")]

    class Losing(HookWire):
        def dispatch(self, microbatch: int, payload: Any) -> Parts:
            return Parts(lambda: None, list)

    with pytest.raises(
        Finding, match=r"the step did not run as the model says: event 7 is \(0, 'read', 'dispatch', \[\]\)"
    ):
        check_programs([program] * 2, make_wire=lambda bed: Losing(), make_device=CpuDevice)

    class Moody:
        name = "moody"

        def __init__(self) -> None:
            self.steps = 0

        def start(self, step: Any) -> Any:
            self.steps += 1
            last = self.steps % 2
            return lambda: step.runnable()[-last]

    with pytest.raises(Finding, match="the model says"):
        check_programs([program] * 2, Moody())


@given(faults(count=2, yields=5, transfers=4, most=2), policies())
@settings(max_examples=60)
def test_layers_come_out_right_or_fail_and_do_so_again(wrong: Faults, policy: Any) -> None:
    """The documented low-latency layers: times change no bit, and the replay string brings a failure back."""
    build = low_latency(2)
    run = run_step(build, policy_of(policy), faults=wrong)
    assert run.left_behind == []
    if run.succeeded:
        assert not {fault.kind for fault in wrong.struck} & FAILING
        assert run.outputs == run_in_turn(low_latency(2))
    else:
        assert wrong.struck[-1].kind in FAILING
    case = ReplayCase.decode(ReplayCase.of(run).encode())
    again = run_step(build, case.policy(), faults=Faults.parse(case.faults))
    assert (again.schedule, str(again.error), again.checksum) == (run.schedule, str(run.error), run.checksum)


def test_an_exploration_with_faults_that_only_cost_time_finds_nothing_in_right_layers() -> None:
    """In every order: bit-equal, no hazard, nothing left."""
    wrong = Faults.parse("late@0.1:50us+early@1.0+late@1.1:1ms")
    explored = explore(low_latency(1), faults=wrong)
    assert explored.schedules == explored.space == 5
    assert wrong.missed == []


# -- nothing is left ---------------------------------------------------------------------------------------------------


class Large:
    """Stands for a tensor that a microbatch holds."""


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("text", ["", *EVERY_KIND])
def test_nothing_keeps_a_microbatchs_objects(carrier: str, text: str) -> None:
    """Not even until the garbage collector comes, and not the scheduler that runs the next step."""
    refs: list[weakref.ref[Any]] = []
    device = VirtualDevice()

    def receive(transfer: Any, large: Large) -> None:
        device.receive(transfer)

    def entry() -> None:
        large = Large()
        refs.append(weakref.ref(large))
        device.new_buffer("scratch")
        for _ in range(2):
            dbo_register_recv_hook(partial(receive, device.send("D", 5.0), large))
        dbo_yield("a")
        dbo_yield("b")

    def went_well() -> bool:
        try:
            scheduler.run([entry] * 2, make_ubatch_contexts(2, device=device))
        except (Exception, KeyboardInterrupt):
            return False
        return True

    scheduler, wrong = Scheduler(carrier=carrier), Faults.parse(text)
    gc.collect()
    gc.disable()
    try:
        with wrong.in_step_of(scheduler, device=device):
            assert went_well() is (text.partition("@")[0] in ("", "late", "early", "reorder", "empty"))
        assert refs and [each() for each in refs] == [None] * len(refs)
    finally:
        gc.enable()


def test_faults_that_are_none_cost_the_device_nothing() -> None:
    beds: list[TestBed] = []

    def build(bed: TestBed) -> list[Any]:
        beds.append(bed)
        return [lambda: dbo_yield("a")] * 2

    run_step(build, faults=Faults())
    assert beds[0].device.transfer_time is None
    assert not {"receive", "work", "new_buffer"} & set(vars(beds[0].device))


# -- on torch ----------------------------------------------------------------------------------------------------------


def thread_state() -> tuple[Any, ...]:
    torch = sys.modules["torch"]
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
    )


@pytest.mark.parametrize("carrier", CARRIERS)
def test_the_threads_torch_state_is_what_it_was(carrier: str) -> None:
    torch = pytest.importorskip("torch")
    found: list[Any] = []

    def build(bed: TestBed) -> list[Any]:
        def entry(i: int) -> Any:
            def run() -> Any:
                scopes = (torch.inference_mode, torch.no_grad, lambda: torch.autocast("cpu", dtype=torch.bfloat16))
                with scopes[i]():
                    mine = thread_state()
                    bed.device.new_buffer("scratch")
                    for k in range(3):
                        try:
                            dbo_yield(f"s{k}")
                        finally:
                            found.append(thread_state() == mine)
                    return i

            return run

        return [entry(i) for i in range(3)]

    before = thread_state()
    for text in ["", *EVERY_KIND, "raise@2.2", "signal@0.2:INT"]:
        for policy in ("round_robin", "in_turn", "random:3"):
            found.clear()
            run_step(build, policy_of(policy), count=3, faults=Faults.parse(text), carrier=carrier)
            assert thread_state() == before
            assert all(found), text


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("text", ["raise@0.0", "raise@1.2", "fail@0.1", "fail@1.3", "late@0.1:1ms", "early@1.2"])
def test_our_model_over_the_loopback(carrier: str, text: str) -> None:
    torch = pytest.importorskip("torch")
    from dbo_greenlet.batching import VoteSettings
    from dbo_greenlet.errors import ReceiveHookError
    from dbo_greenlet.runner import Runner
    from tests.runner.tiny import tiny_cache, tiny_model, tiny_step

    step = tiny_step([(0, 0, 11), (1, 0, 6)])
    runner = Runner(tiny_model(), kv_cache=tiny_cache(), settings=VoteSettings(2, 2, 4), carrier=carrier)
    reference = runner.step(step, mode="sequential").output
    wrong = Faults.parse(text)
    if text.startswith(("raise", "fail")):
        with pytest.raises((MicrobatchFailed, ReceiveHookError)) as caught, wrong.in_step_of(runner.scheduler):
            runner.step(step)
        assert isinstance(caught.value.__cause__, InjectedFault)
        assert str(caught.value.__cause__).startswith(text)
    else:
        with wrong.in_step_of(runner.scheduler):
            assert torch.equal(runner.step(step).output, reference)
    assert wrong.missed == []
    assert torch.equal(runner.step(step).output, reference)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_an_empty_microbatch_and_an_exhausted_allocator_in_a_torch_layer(carrier: str) -> None:
    """A dispatch of no tokens is one like any other; an allocation that torch refuses fails its microbatch."""
    torch = pytest.importorskip("torch")
    from dbo_greenlet.all2all.loopback import Loopback

    transport = Loopback(2)

    def build(bed: TestBed) -> list[Any]:
        def entry(i: int) -> Any:
            def run() -> Any:
                tokens = bed.faults.tokens(i, 3) if bed.faults else 3
                if bed.faults:
                    bed.faults.allocating(i)
                hidden = torch.arange(tokens * 2, dtype=torch.float32).view(tokens, 2) + i
                ids = torch.arange(tokens).view(-1, 1) % 2
                sent = transport.dispatch_send(hidden, ids, torch.ones(tokens, 1))
                dbo_register_recv_hook(sent.finish_dispatch)
                dbo_yield("dispatch")
                sent.combine_send(sent.tokens().hidden * 2)
                dbo_register_recv_hook(sent.finish_combine)
                dbo_yield("combine")
                return sent.combined()

            return run

        return [entry(i) for i in range(2)]

    empty = run_step(build, RoundRobin(), make_device=CpuDevice, faults=Faults.parse("empty@1"), carrier=carrier)
    assert empty.outputs is not None
    assert [tuple(out.shape) for out in empty.outputs] == [(3, 2), (0, 2)]
    assert torch.equal(empty.outputs[0], 2 * torch.arange(6, dtype=torch.float32).view(3, 2))
    failed = run_step(build, make_device=CpuDevice, faults=Faults.parse("oom@1.0"), carrier=carrier)
    assert isinstance(failed.error, MicrobatchFailed) and failed.error.index == 1
    assert isinstance(failed.error.__cause__, RuntimeError) and "allocate" in str(failed.error.__cause__)
    assert run_step(build, make_device=CpuDevice, carrier=carrier).succeeded


def test_a_step_inside_a_microbatch_is_not_struck() -> None:
    def inner() -> str:
        dbo_yield("inner")
        return "inner"

    def outer() -> list[str]:
        outputs: list[str] = Scheduler().run([inner, inner]).outputs
        dbo_yield("outer")
        return outputs

    wrong = Faults.parse("raise@1.0")
    run = run_step(lambda bed: [outer, outer], faults=wrong)
    assert isinstance(run.error, MicrobatchFailed) and run.error.index == 1
    assert "at 'outer'" in str(run.error.__cause__)
