"""The schedule that vLLM's documentation draws, from steps that really run: what was done, in order, and its notation.

    Comp: |-A0_0-A1_0-||-MLP_1-||-S_1-MLP_0-||-S_0-A0_1-A1_1-|
    Comm: |----D_1----||--D_0--||----C_1----||-----C_0------|

A phase offset of two yields gives it label for label, round robin with the two ids exchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo_greenlet import (
    InTurn,
    Pct,
    PhaseOffset,
    RoundRobin,
    Scheduler,
    SeededRandom,
    dbo_maybe_run_recv_hook,
    dbo_register_recv_hook,
    dbo_yield,
)
from dbo_greenlet.policy import Policy
from dbo_greenlet.schedule import Schedule
from dbo_greenlet.trace.notation import order
from dbo_greenlet.trace.timetable import render_order

CARRIERS = ["greenlet", "thread"]
LAYERS = 4

# One layer in the steady state, word for word (vLLM, docs/design/dbo.md).
DOCUMENTED = (
    "D_1 send, A0_0, A1_0, D_1 recv, D_0 send, MLP_1, D_0 recv, "
    "C_1 send, S_1, MLP_0, C_1 recv, C_0 send, S_0, A0_1, A1_1, C_0 recv, "
)
EXCHANGED = (
    "D_0 send, A0_1, A1_1, D_0 recv, D_1 send, MLP_0, D_1 recv, "
    "C_0 send, S_0, MLP_1, C_0 recv, C_1 send, S_1, A0_0, A1_0, C_1 recv, "
)


def moe_model(me: int, layers: int, done: list[str]) -> Callable[[], None]:
    """A model of `layers` Mixture-of-Experts layers, which notes what it does: low latency, with receive hooks."""

    def send(name: str) -> None:
        dbo_maybe_run_recv_hook()
        done.append(f"{name}_{me} send")
        dbo_register_recv_hook(lambda: done.append(f"{name}_{me} recv"))

    def forward() -> None:
        for layer in range(layers):
            done.extend((f"A0_{me}", f"A1_{me}"))
            send("D")
            dbo_yield(f"layer{layer}.dispatch")
            done.append(f"MLP_{me}")
            send("C")
            done.append(f"S_{me}")
            dbo_yield(f"layer{layer}.combine")
        done.append(f"out_{me}")

    return forward


def run(policy: Policy, *, count: int = 2, layers: int = LAYERS, carrier: str = "greenlet") -> tuple[str, Schedule]:
    done: list[str] = []
    entries = [moe_model(index, layers, done) for index in range(count)]
    schedule = Scheduler(policy, carrier=carrier, strict=True).run(entries).schedule
    return ", ".join(done), schedule


def notation(schedule: Schedule) -> str:
    """The order that the schedule alone gives, without the marks of receives that no sibling ran."""
    return ", ".join(str(item).rstrip("*") for item in order(schedule.decisions, schedule.sites))


def test_the_ids_are_exchanged() -> None:
    # A0 and A1 are names of work; what follows the underscore is the microbatch.
    assert re.sub("_[01]", lambda found: "_1" if found[0] == "_0" else "_0", DOCUMENTED) == EXCHANGED


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_phase_offset_of_two_is_the_documented_order_literally(carrier: str) -> None:
    done, schedule = run(PhaseOffset(2), carrier=carrier)
    # Microbatch 0 is a layer ahead: it runs alone at the beginning, and microbatch 1 at the end.
    begin = "A0_0, A1_0, D_0 send, D_0 recv, MLP_0, C_0 send, S_0, A0_1, A1_1, C_0 recv, "
    end = "D_1 send, out_0, D_1 recv, MLP_1, C_1 send, S_1, C_1 recv, out_1"
    assert done == begin + DOCUMENTED * (LAYERS - 1) + end
    assert notation(schedule) == done


@pytest.mark.parametrize("carrier", CARRIERS)
def test_round_robin_is_the_documented_order_with_the_ids_exchanged(carrier: str) -> None:
    done, schedule = run(RoundRobin(), carrier=carrier)
    # In the last layer, what follows S_1 is the rest of the model and not another layer's attention.
    end = EXCHANGED.replace("A0_0, A1_0, C_1 recv, ", "out_0, C_1 recv, out_1")
    assert done == "A0_0, A1_0, " + EXCHANGED * (LAYERS - 1) + end
    assert notation(schedule) == done


def test_the_timetable_of_a_phase_offset_is_the_drawing() -> None:
    _, schedule = run(PhaseOffset(2))
    drawn = render_order(order(schedule.decisions, schedule.sites), layers=[1], width=71).splitlines()
    # vLLM's drawing is one dash short in the last cell.
    assert drawn[1:3] == [
        "Comp: |-A0_0-A1_0-||-MLP_1-||-S_1-MLP_0-||-S_0-A0_1-A1_1-|",
        "Comm: |----D_1----||--D_0--||----C_1----||------C_0------|",
    ]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "policy",
    [
        RoundRobin(),
        InTurn(),
        *map(PhaseOffset, range(1, 5)),
        *map(SeededRandom, range(4)),
        *(Pct(seed, 3, 16) for seed in range(4)),
    ],
    ids=repr,
)
def test_what_is_done_is_what_the_notation_says_under_every_policy(policy: Policy, count: int) -> None:
    done, schedule = run(policy, count=count, layers=2)
    assert notation(schedule) == done
    for me in range(count):
        mine = [step for step in done.split(", ") if step.split()[0].endswith(f"_{me}")]
        layer = f"A0_{me}, A1_{me}, D_{me} send, D_{me} recv, MLP_{me}, C_{me} send, S_{me}, C_{me} recv, "
        assert ", ".join(mine) == layer * 2 + f"out_{me}"


def most_in_flight(policy: Policy, count: int) -> int:
    done, _ = run(policy, count=count)
    flying = most = 0
    for step in done.split(", "):
        flying += step.endswith("send") - step.endswith("recv")
        most = max(most, flying)
    return most


@given(st.integers(0, 9), st.integers(0, 2**32), st.integers(1, 8))
def test_two_microbatches_have_one_receive_outstanding_under_every_policy(offset: int, seed: int, depth: int) -> None:
    """DeepEP's low-latency kernels need it."""
    for policy in (RoundRobin(), InTurn(), PhaseOffset(offset), SeededRandom(seed), Pct(seed, depth, 18)):
        assert most_in_flight(policy, 2) == 1


@pytest.mark.parametrize("count", [3, 4, 5])
def test_more_microbatches_have_so_only_in_ring_order(count: int) -> None:
    assert most_in_flight(RoundRobin(), count) == most_in_flight(InTurn(), count) == 1
    # The later ones go first and receive for each other; nobody between them receives for the earlier ones.
    assert most_in_flight(PhaseOffset(1), count) == most_in_flight(PhaseOffset(2), count) == count - 1
