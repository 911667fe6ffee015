"""The documented layers enqueue in the documented order, and what their pieces touch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo_greenlet import RoundRobin
from dbo_greenlet.devices.virtual import VirtualDevice
from dbo_greenlet.policies import PhaseOffset, SeededRandom
from dbo_greenlet.policy import Policy
from dbo_greenlet.stream_program import StreamProgram
from dbo_greenlet.testing.layer_programs import high_throughput, low_latency
from dbo_greenlet.testing.step_run import Build, StepRun
from dbo_greenlet.trace.notation import order
from tests.testing.layer_runs import BOTH, device_of, ran

# As the design has it, steady state under round robin.
ROUND_ROBIN = (
    "D_0 send, A0_1, A1_1, D_0 recv, D_1 send, MLP_0, D_1 recv, C_0 send, S_0, MLP_1, C_0 recv, C_1 send, S_1, "
    "A0_0, A1_0, C_1 recv"
)
LITERALLY = (
    "D_1 send, A0_0, A1_0, D_1 recv, D_0 send, MLP_1, D_0 recv, C_1 send, S_1, MLP_0, C_1 recv, C_0 send, S_0, "
    "A0_1, A1_1, C_0 recv"
)


def enqueued(program: StreamProgram) -> list[str]:
    """The pieces in the order in which the primary stream holds them, in the words of the notation."""
    words = []
    for each in program.operations:
        if each.stream != program.primary or each.microbatch is None:
            continue
        if each.kind == "work":
            words.append(f"{each.name}_{each.microbatch}")
        elif each.transfer is not None:
            words.append(f"{each.name}_{each.transfer.owner} {'send' if each.kind == 'send' else 'recv'}")
        elif each.kind in ("record", "wait"):
            # Dispatches and combines alternate; each has one record here and one wait.
            done = sum(w.endswith(f"_{each.microbatch} {DONE[each.kind]}") for w in words)
            words.append(f"{'DC'[done % 2]}_{each.microbatch} {DONE[each.kind]}")
    return words


DONE = {"record": "send", "wait": "recv"}


@pytest.mark.parametrize(("policy", "expected"), [(RoundRobin(), ROUND_ROBIN), (PhaseOffset(2), LITERALLY)])
def test_the_order_that_vllm_documents(policy: Policy, expected: str) -> None:
    run = ran(low_latency(4), policy)
    text = ", ".join(enqueued(run.program))
    assert text.count(expected) == 3  # the first and the last layer are not steady
    assert ", ".join([expected] * 3) in text


COMP = "|-A0_0-A1_0-||-MLP_1-||-S_1-MLP_0-||-S_0-A0_1-A1_1-|"
COMM = "|----D_1----||--D_0--||----C_1----||-----C_0------|"


def test_what_runs_while_each_transfer_is_in_flight_is_the_documented_timetable() -> None:
    cells = zip(COMM.strip("|").split("||"), COMP.strip("|").split("||"), strict=True)
    expected = [(comm.strip("-"), comp.strip("-").split("-")) for comm, comp in cells]
    device = device_of(ran(low_latency(4), PhaseOffset(2)))
    compute = [lane for lane in device.lanes() if lane.stream == "compute"]
    found = []
    for window in device.windows():
        beside = [lane for lane in compute if window.begin <= lane.begin and lane.end <= window.received]
        assert sum(lane.end - lane.begin for lane in beside) <= window.received - window.begin
        found.append(
            (f"{window.transfer.name}_{window.transfer.owner}", [f"{lane.name}_{lane.microbatch}" for lane in beside])
        )
    # Before: D_0 and C_0 of microbatch 0's first layer. Behind: the last layer of microbatch 1.
    assert found[2:-2] == expected * 3
    assert found[:2] == [("D_0", []), expected[3]]
    assert found[-2:] == [("D_1", ["out_0"]), ("C_1", ["S_1"])]


@BOTH
@given(layers=st.integers(1, 3), count=st.integers(1, 4), seed=st.integers(0, 10**6), shared=st.booleans())
def test_the_order_is_that_of_the_notation(
    program: Callable[..., Build], layers: int, count: int, seed: int, shared: bool
) -> None:
    run = ran(program(layers, shared_expert=shared), SeededRandom(seed), count=count)
    items = order(run.schedule.decisions, run.schedule.sites, shared_expert=shared)
    assert enqueued(run.program) == [str(item).rstrip("*") for item in items]


def accessed(run: StepRun, microbatch: int, after: str) -> list[str]:
    """What the pieces of the slices behind that site touch."""
    return [
        f"{each.name} {each.kind}: {', '.join(map(str, each.accesses))}"
        for each in run.program.operations
        if each.microbatch == microbatch and each.site == after and each.accesses
    ]


def test_what_the_pieces_touch() -> None:
    run = ran(low_latency(2))
    assert accessed(run, 1, "layer0.combine") == [
        "A0 work: reads hidden of microbatch 1, reads combined of microbatch 1, reads shared of microbatch 1, "
        "writes hidden of microbatch 1, writes workspace, writes KV cache of layer 1[1:2]",
        "A1 work: reads hidden of microbatch 1, reads workspace, reads KV cache of layer 1[0:2], "
        "writes hidden of microbatch 1",
        "D receive: writes rows of microbatch 0",
        "D send: reads hidden of microbatch 1",
    ]
    assert accessed(run, 1, "layer1.dispatch") == [
        "MLP work: reads rows of microbatch 1, writes expert outputs of microbatch 1",
        "C receive: writes combined of microbatch 0",
        "C send: reads expert outputs of microbatch 1",
        "S work: reads hidden of microbatch 1, writes shared of microbatch 1",
    ]
    assert accessed(run, 0, "layer1.combine") == [
        "out work: reads hidden of microbatch 0, reads combined of microbatch 0, reads shared of microbatch 0, "
        "writes result of microbatch 0",
        "C receive: writes combined of microbatch 1",
    ]
    run = ran(high_throughput(1))
    assert accessed(run, 0, "")[0] == (
        "A0 work: reads hidden of microbatch 0, writes hidden of microbatch 0, writes workspace, "
        "writes KV cache of layer 0[0:1]"
    )
    assert accessed(run, 0, "layer0.before_dispatch") == [
        "counts work: reads hidden of microbatch 0",
        "D work: reads hidden of microbatch 0, writes rows of microbatch 0",
        "MLP work: reads rows of microbatch 0, writes expert outputs of microbatch 0",
    ]
    assert accessed(run, 0, "layer0.before_combine") == [
        "C work: reads expert outputs of microbatch 0, writes combined of microbatch 0",
        "S work: reads hidden of microbatch 0, writes shared of microbatch 0",
    ]


def test_which_stream_is_current_at_the_yields() -> None:
    class Streams:
        def after_slice(self, microbatch: Any) -> None:
            seen.append((microbatch.site, devices[0].current_stream().name))

    seen: list[tuple[str, str]] = []
    devices = [VirtualDevice()]
    ran(high_throughput(1), count=1, make_device=lambda: devices[0], instruments=[Streams()])
    assert seen == [
        ("layer0.before_dispatch", "compute"),
        ("layer0.before_combine", "compute"),
        ("layer0.combine", "comm"),
        ("", "compute"),
    ]
