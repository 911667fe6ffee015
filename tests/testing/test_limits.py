"""What the kit cannot see, shown: each test here passes because something wrong, or something right, goes unnoticed.

`dbo_greenlet/testing/LIMITS.md` says it in words and names these tests; the last one holds the two together.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import dbo_greenlet
from dbo_greenlet import InTurn, RoundRobin, dbo_yield
from dbo_greenlet.devices.virtual import VirtualDevice
from dbo_greenlet.rank_schedules import first_difference
from dbo_greenlet.testing import (
    ExplorationFailed,
    Golden,
    NondeterminismError,
    StepUnderTest,
    check_deterministic,
    explore,
    find_hazards,
    low_latency,
    run_in_turn,
    run_step,
)
from dbo_greenlet.testing.checksum import checksum
from dbo_greenlet.testing.layer_programs import LowLatency
from tests.testing.hand_programs import Hand
from tests.testing.planted_bugs import PLANTED, ReadsTooEarly

PAGE = Path(dbo_greenlet.__file__).parent / "testing" / "LIMITS.md"


def kinds(program: Any) -> list[str]:
    return [hazard.kind for hazard in find_hazards(program)]


# -- below an operation ------------------------------------------------------------------------------------------------


def test_a_race_inside_one_operation_is_no_hazard() -> None:
    """One kernel whose blocks add to the same bytes without atomics: to the kit it is a read and a write."""
    device = VirtualDevice()
    histogram = device.new_buffer("histogram")
    device.work("histogram without atomics", 10.0, reads=[histogram], writes=[histogram])
    assert find_hazards(device.program) == []
    # As two kernels on two streams it would be one.
    device.work("other half", 10.0, reads=[histogram], writes=[histogram], stream=device.new_stream("side"))
    assert "race" in kinds(device.program)


def test_an_access_that_nobody_declared_is_not_there() -> None:
    """A planted bug that is found as it stands is not found where the experts do not say what they read."""

    def forgets_to_say(run: LowLatency) -> None:
        run.plan.mlp = [tuple(access for access in each if access.write) for each in run.plan.mlp]

    assert kinds(run_step(PLANTED["receive-before-use"]).program) == ["receive-before-use"] * 2
    silent = low_latency(1, numerics=False, kind=ReadsTooEarly, mutate=forgets_to_say)
    assert find_hazards(run_step(silent).program) == []


def test_an_order_that_nobody_noted_is_taken_for_none() -> None:
    """The other way round: a wait by an event that the device was not asked for. It is a false alarm."""
    from dbo_greenlet.devices.cpu import CpuDevice
    from dbo_greenlet.stream_program import RecordingDevice, whole

    def program(noted: bool) -> Any:
        inner = CpuDevice()
        device = RecordingDevice(inner)
        comm, event = device.new_stream("comm"), device.new_event()
        device.work("writes", whole(writes=["rows"]))
        with_events = device if noted else inner
        with_events.record(event, inner.current_stream())
        with_events.wait(comm, event)
        with inner.stream_scope(comm):
            device.work("reads", whole(["rows"]))
        device.record(event, comm)
        device.wait(inner.current_stream(), event)
        return device.program

    assert kinds(program(noted=True)) == []
    assert kinds(program(noted=False)) == ["race"]


def test_memory_that_is_touched_without_an_operator_is_not_seen() -> None:
    torch = pytest.importorskip("torch")
    from dbo_greenlet.testing.torch_accesses import recorded_step

    def program(by_operator: bool) -> Any:
        with recorded_step() as recording:
            device = recording.device
            rows = torch.zeros(4)
            comm, event = device.new_stream("comm"), device.new_event()
            with device.stream_scope(comm):
                if by_operator:
                    rows.fill_(1.0)
                else:
                    rows.numpy()[:] = 1.0  # or ctypes, a Triton kernel, another library's launch
            rows * 2
            device.record(event, comm)
            device.wait(device.current_stream(), event)
        return recording.program

    assert "race" in kinds(program(by_operator=True))
    assert kinds(program(by_operator=False)) == []


def test_memory_that_is_freed_and_given_out_again_is_not_seen() -> None:
    """Without `record_stream` torch may give memory that another stream still reads to the next tensor. While a step is
    recorded its storages are kept alive, so there this does not even happen."""
    torch = pytest.importorskip("torch")
    from dbo_greenlet.testing.torch_accesses import recorded_step

    with recorded_step() as recording:
        device = recording.device
        comm, event = device.new_stream("comm"), device.new_event()
        sent = torch.ones(1000)
        address = sent.data_ptr()
        device.record(event, device.current_stream())
        device.wait(comm, event)
        with device.stream_scope(comm):
            on_its_way = sent * 2
        del sent  # nobody told the allocator that comm reads it
        following = torch.zeros(1000)
        assert following.data_ptr() != address
        device.record(event, comm)
        device.wait(device.current_stream(), event)
    assert find_hazards(recording.program) == [] and on_its_way.sum() == 2000


def test_a_librarys_own_memory_is_not_known() -> None:
    """A library that has two receive buffers in turn, and three transfers in flight: the third one comes into the
    memory of the first. What is noted are the tensors that it gave out, one for each transfer."""

    def program(buffers: list[str]) -> Any:
        hand = Hand()
        transfers = [hand.turn(index).send("compute", "D") for index in range(3)]
        for index, transfer in enumerate(transfers):
            hand.turn(index)
            hand.receive("compute", transfer, [buffers[index]])
            hand.work("compute", "MLP", [buffers[index]])
        return hand.program

    assert find_hazards(program(["rows of 0", "rows of 1", "rows of 2"])) == []
    assert "race" in kinds(program(["buffer 0", "buffer 1", "buffer 0"]))


def test_the_order_of_receives_is_free() -> None:
    """Three microbatches whose receives run in another order than their sends: right over DeepEP, and over a transport
    that delivers in order it may hang. The kit asks that each runs once and before its rows are used."""
    hand = Hand()
    transfers = [hand.turn(index).send("compute", "D") for index in range(3)]
    for index in (2, 0, 1):
        hand.turn(index)
        hand.receive("compute", transfers[index], [f"rows of {index}"])
        hand.work("compute", "MLP", [f"rows of {index}"])
    assert find_hazards(hand.program) == []


# -- time and hardware -------------------------------------------------------------------------------------------------


def test_streams_of_the_virtual_device_do_not_slow_each_other_down() -> None:
    """On a GPU two kernels that each fill it take as long as one after the other."""
    device = VirtualDevice()
    side = device.new_stream("side")
    device.work("fills the GPU", 100.0)
    device.work("fills the GPU, too", 100.0, stream=side)
    assert device.finished_at == 100.0


def test_what_the_hardware_makes_of_free_streams_is_not_predicted() -> None:
    """The times that one is given decide nothing: two programs with other costs have one verdict and one order."""
    programs = []
    for first, second in ((100.0, 1.0), (1.0, 100.0)):
        device = VirtualDevice()
        side, event = device.new_stream("side"), device.new_event()
        device.work("a", first, writes=["a"])
        device.work("b", second, writes=["b"], stream=side)
        device.record(event, side)
        device.wait(device.default_stream, event)
        programs.append([(each.kind, each.stream, each.name) for each in device.program.operations])
        assert find_hazards(device.program) == []
    assert programs[0] == programs[1]


def test_an_event_that_two_microbatches_share_is_not_told() -> None:
    """Microbatch 0's dispatch waits for what 1 put on the compute stream meanwhile: the event is 1's by then."""

    def build(bed: Any, shared: bool) -> StepUnderTest:
        device, contexts = bed.device, bed.contexts()
        events = [device.new_event()] * 2 if shared else [device.new_event(), device.new_event()]

        def entry(i: int) -> None:
            context = contexts[i]
            device.work("attention", 60.0, writes=[f"hidden {i}"])
            device.record(events[i], context.compute_stream)
            dbo_yield("a")
            device.wait(context.comm_stream, events[i])
            device.work("dispatch", 50.0, reads=[f"hidden {i}"], stream=context.comm_stream)

        return StepUnderTest([partial(entry, i) for i in range(2)], contexts)

    begins = []
    for shared in (False, True):
        program = run_step(partial(build, shared=shared)).program
        assert program is not None and find_hazards(program) == []
        begins.append(next(each.begin for each in program.operations if each.name == "dispatch"))
    assert begins == [60.0, 120.0]


def test_another_process_is_not_in_the_program() -> None:
    """Two ranks that send in opposite orders: each is right by itself, and together they hang or mix up messages. What
    finds it is the comparison of schedules between ranks."""
    runs = [run_step(low_latency(1), policy) for policy in (RoundRobin(), InTurn())]
    for run in runs:
        assert run.succeeded and find_hazards(run.program) == []
    assert "decision 1" in first_difference(runs[0].schedule, runs[1].schedule)


# -- Python and C++ ----------------------------------------------------------------------------------------------------


def test_a_frame_of_another_extension_is_not_seen() -> None:
    """torch's file writer is C++ and calls `write` back. A yield there is not refused, and with two microbatches the
    process dies of SIGABRT (tests/direct_ops/fail_bound_function.py)."""
    torch = pytest.importorskip("torch")
    from dbo_greenlet.unsafe_calls import find_unsafe_call

    seen = []

    class File(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            seen.append(find_unsafe_call(sys._getframe()))
            return memoryview(data).nbytes

    writer = torch._C.PyTorchFileWriter(File())
    writer.write_record("a", b"1234", 4)
    writer.write_end_of_file()
    assert seen and set(seen) == {None}


def test_threads_inside_a_slice_are_not_scheduled() -> None:
    """The steps of an exploration are slices. Two threads that a slice starts interleave as the system pleases."""

    def build(bed: Any) -> list[Any]:
        def entry() -> int:
            counted: list[int] = []
            threads = [threading.Thread(target=counted.append, args=(number,)) for number in range(2)]
            for each in threads:
                each.start()
            for each in threads:
                each.join()
            return len(counted)

        return [entry, entry]

    assert explore(build, report=None).space == 1


# -- schedules ---------------------------------------------------------------------------------------------------------


def test_a_hazard_of_another_schedule_is_not_in_this_one() -> None:
    build = PLANTED["workspace-reused"]
    assert find_hazards(run_step(build, InTurn()).program) == []
    assert kinds(run_step(build, RoundRobin()).program) == ["workspace-reused"]


def wrong_in(wanted: tuple[int, ...], bed: Any) -> list[Any]:
    """Two microbatches with three slices each, whose outputs are wrong in the schedules that begin with `wanted`."""
    decisions: list[int] = []

    def entry(i: int) -> int:
        for site in ("a", "b"):
            decisions.append(i)
            dbo_yield(site)
        decisions.append(i)
        return int(tuple(decisions[: len(wanted)]) == wanted)

    return [partial(entry, i) for i in range(2)]


def test_a_bug_beyond_the_bound_on_preemptions_is_not_found() -> None:
    build = partial(wrong_in, (0, 1, 0, 1))  # two switches away from one that could go on
    assert explore(build, preemptions=1, report=None).schedules > 1
    with pytest.raises(ExplorationFailed):
        explore(build, preemptions=2, report=None)


def test_a_bug_that_chance_passes_by_is_not_found() -> None:
    build = partial(wrong_in, (0, 0, 1, 0, 1))
    assert explore(build, how="random", schedules=2, seed=1, report=None).distinct <= 2
    with pytest.raises(ExplorationFailed):
        explore(build, report=None)


def test_a_chance_that_did_not_show_is_not_found() -> None:
    runs: list[int] = []

    def build(bed: Any) -> list[Any]:
        runs.append(1)
        number = len(runs)
        return [lambda: 0, lambda: int(number % 3 == 0)]

    check_deterministic(build, runs=2)
    with pytest.raises(NondeterminismError):
        check_deterministic(build, runs=2)


def test_the_order_of_a_set_of_strings_is_the_same_twice_in_one_process() -> None:
    """Two runs agree, and two processes with other hash seeds do not."""
    script = """
from dbo_greenlet import RoundRobin, dbo_yield
from dbo_greenlet.testing import check_deterministic, run_step

def forward():
    for expert in {"gate", "up", "down", "shared", "norm"}:
        dbo_yield(expert)

def build(bed):
    return [forward, forward]

check_deterministic(build)
print(run_step(build).schedule.hash)
"""
    hashes = set()
    for seed in ("1", "2", "3"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(PAGE.parents[2])}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, timeout=60
        )
        hashes.add(done.stdout)
    assert len(hashes) > 1


# -- verdicts ----------------------------------------------------------------------------------------------------------


def test_on_a_cpu_equal_bits_say_nothing_about_streams() -> None:
    """Operators run where they are called, so what a GPU would get wrong has the right numbers here: only the hazard
    tells."""
    torch = pytest.importorskip("torch")
    from dbo_greenlet.devices.cpu import CpuDevice
    from dbo_greenlet.stream_program import RecordingDevice
    from dbo_greenlet.testing.torch_accesses import TorchAccesses
    from dbo_greenlet.yields import dbo_switch_to_comm, dbo_switch_to_compute

    device = RecordingDevice(CpuDevice())

    def build(bed: Any) -> list[Any]:
        def entry(i: int) -> Any:
            x = torch.full((4,), float(i))
            dbo_switch_to_comm()
            sent = x + 1  # behind no event
            dbo_switch_to_compute()
            return sent * 2

        return [partial(entry, i) for i in range(2)]

    with TorchAccesses(device):
        run = run_step(build, make_device=lambda: device)
    assert run.checksum == checksum(run_in_turn(build))
    assert set(kinds(run.program)) == {"race"}


def test_a_golden_schedule_is_about_the_order_and_nothing_else(tmp_path: Path) -> None:
    """Another buffer, other numbers, a hazard: the same golden schedule."""
    golden = Golden(tmp_path / "golden.txt")
    golden.update(run_step(low_latency(1)).schedule)
    wrong = run_step(PLANTED["race with a transfer in flight"])
    golden.compare(wrong.schedule)
    assert find_hazards(wrong.program)


# -- the page ----------------------------------------------------------------------------------------------------------


def test_the_page_names_every_test_and_no_other() -> None:
    named = re.findall(r"`(test_\w+)`", PAGE.read_text(encoding="utf-8"))
    here = [name for name in globals() if name.startswith("test_") and not name.startswith("test_the_page_")]
    assert sorted(named) == sorted(here)
    assert len(set(named)) == len(named)
