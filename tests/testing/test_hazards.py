"""Each planted bug is found, with its two accesses and the missing edge; nothing is found where nothing is wrong."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo_greenlet.policies import policy_from_text
from dbo_greenlet.policy import Policy
from dbo_greenlet.step import Step
from dbo_greenlet.testing.errors import HazardError
from dbo_greenlet.testing.hazard_scan import looks_clean
from dbo_greenlet.testing.hazard_search import search
from dbo_greenlet.testing.hazards import KINDS, check, find_hazards
from dbo_greenlet.testing.layer_programs import Costs, high_throughput, low_latency
from dbo_greenlet.testing.step_run import StepRun, run_step
from tests.testing.planted_bugs import PLANTED

Short = tuple[str, str, "str | None", str, int, "int | None"]

# Of each planted bug: kind, names of the two operations, buffer, their numbers.
EXPECTED: dict[str, list[Short]] = {
    "race": [
        ("race", "D", "MLP", "rows of microbatch 0", 9, 10),
        ("race", "D", "MLP", "rows of microbatch 1", 15, 16),
    ],
    "receive-before-use": [
        ("receive-before-use", "D", "MLP", "rows of microbatch 0", 2, 6),
        ("receive-before-use", "D", "MLP", "rows of microbatch 1", 5, 10),
    ],
    "hook-twice": [("hook-twice", "C", "C", "None", 12, 15), ("hook-twice", "C", "C", "None", 17, 18)],
    "hook-never": [("hook-never", "D", None, "None", 2, None), ("hook-never", "D", None, "None", 5, None)],
    "workspace-reused": [("workspace-reused", "A0", "A1", "workspace", 1, 2)],
    "event-after-switch": [
        ("event-after-switch", "A1", "record", "None", 3, 4),
        ("event-after-switch", "MLP", "record", "None", 11, 13),
    ],
    "unjoined-stream": [
        ("unjoined-stream", "log", None, "None", 34, None),
        ("unjoined-stream", "log", None, "None", 39, None),
    ],
    "race with a transfer in flight": [("race", "D", "MLP", "rows of microbatch 0", 6, 7)],
    "race without an event": [
        ("race", "A1", "counts", "hidden of microbatch 0", 1, 4),
        ("race", "A1", "counts", "hidden of microbatch 1", 3, 10),
        ("race", "MLP", "C", "expert outputs of microbatch 0", 9, 16),
        ("race", "MLP", "C", "expert outputs of microbatch 1", 15, 19),
    ],
}

# The first of each, word for word.
WORDS = {
    "race": (
        "race: #9 work 'D' on comm, microbatch 0 (slice 1, after 'layer0.before_dispatch') writes rows of microbatch "
        "0, and #10 work 'MLP' on compute, microbatch 0 (slice 1, after 'layer0.before_dispatch') reads rows of "
        "microbatch 0, and nothing puts one behind the other. Missing: compute waiting, before #10, for an event "
        "recorded on comm behind #9 (it does so only at #26, behind #10)."
    ),
    "receive-before-use": (
        "receive-before-use: #6 work 'MLP' on compute, microbatch 0 (slice 1, after 'layer0.dispatch') reads rows of "
        "microbatch 0, which the transfer of #2 send 'D' on compute, microbatch 0 (slice 0, before its first yield) "
        "brings and whose receive has not run. Missing: the receive of #2 before #6 (it runs at #7, on compute, run "
        "by microbatch 0)."
    ),
    "hook-twice": (
        "hook-twice: transfer 'C' of microbatch 0 is received by #12 receive 'C' on compute, microbatch 1 (slice 1, "
        "after 'layer0.dispatch') and again by #15 receive 'C' on compute, microbatch 0 (slice 2, after "
        "'layer0.combine'). Missing: each recv hook is to run once: clear it when it has run, or leave that to "
        "dbo_register_recv_hook."
    ),
    "hook-never": (
        "hook-never: the transfer of #2 send 'D' on compute, microbatch 0 (slice 0, before its first yield) is never "
        "received. Missing: its recv hook: register it with dbo_register_recv_hook before the yield, or call it."
    ),
    "workspace-reused": (
        "workspace-reused: #2 work 'A1' on compute, microbatch 0 (slice 1, after 'layer0.attention') reads workspace, "
        "which its microbatch wrote at #0 ('A0') and #1 work 'A0' on compute, microbatch 1 (slice 0, before its first "
        "yield) has written over. Missing: a buffer for each microbatch, or #2 in the same slice as the write that it "
        "wants: between the two microbatch 1 had its turn."
    ),
    "event-after-switch": (
        "event-after-switch: #4 record 'record' on compute, microbatch 0 (slice 1, after 'layer0.before_dispatch') "
        "stands behind #3 work 'A1' on compute, microbatch 1 (slice 0, before its first yield), so comm waits (#5) "
        "for the sibling's work too; what microbatch 0 itself put on compute ends with #1 ('A1'), before the switch. "
        "Missing: the record of event 1 before the yield, right behind #1: dbo_yield_and_switch_from_compute_to_comm "
        "does it, and dbo_get_previous_event is to be called before the yield."
    ),
    "unjoined-stream": (
        "unjoined-stream: #34 work 'log' on log, microbatch 0 (slice 3, after 'layer0.combine') may still run when "
        "the step is over: compute never waits for it. Missing: compute waiting for an event recorded on log behind "
        "#34 before the step is over."
    ),
    "race with a transfer in flight": (
        "race: the transfer of #6 send 'D' on compute, microbatch 1 (slice 0, before its first yield) is in flight "
        "into rows of microbatch 0 when #7 work 'MLP' on compute, microbatch 0 (slice 1, after 'layer0.dispatch') "
        "reads rows of microbatch 0. Missing: the receive of #6 before #7 (it runs at #8, on compute, run by "
        "microbatch 0)."
    ),
    "race without an event": (
        "race: #1 work 'A1' on compute, microbatch 0 (slice 0, before its first yield) writes hidden of microbatch 0, "
        "and #4 work 'counts' on comm, microbatch 0 (slice 1, after 'layer0.before_dispatch') reads hidden of "
        "microbatch 0, and nothing puts one behind the other. Missing: comm waiting, before #4, for an event recorded "
        "on compute behind #1."
    ),
}


def run(build: Any, policy: Policy | str = "round_robin", count: int = 2) -> StepRun:
    made = run_step(build, policy_from_text(policy) if isinstance(policy, str) else policy, count=count)
    assert made.error is None, made.error
    return made


def program_of(build: Any) -> Any:
    return run(build).program


# -- planted bugs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found_with_both_accesses_and_nothing_else_is(name: str) -> None:
    found = find_hazards(program_of(PLANTED[name]))
    short = [
        (
            each.kind,
            each.first.name,
            None if each.second is None else each.second.name,
            str(each.buffer),
            each.first.number,
            None if each.second is None else each.second.number,
        )
        for each in found
    ]
    assert short == EXPECTED[name]
    assert str(found[0]) == WORDS[name]


def test_a_bug_of_each_kind_is_planted() -> None:
    assert set(PLANTED) >= set(KINDS)
    assert {kind for name in EXPECTED for kind, *_ in EXPECTED[name]} == set(KINDS)


def test_check_raises_all_of_them_and_survives_being_sent_to_another_process() -> None:
    program = program_of(PLANTED["race"])
    with pytest.raises(HazardError, match=r"2 hazards in a program of \d+ operations:\n  race: #9 ") as raised:
        check(program)
    assert [each.kind for each in raised.value.hazards] == ["race", "race"]
    assert str(pickle.loads(pickle.dumps(HazardError("found", ())))) == "found"
    check(program_of(high_throughput(1)))


def test_the_line_that_issued_an_operation_is_named_where_the_program_keeps_it() -> None:
    from dbo_greenlet.devices.virtual import VirtualDevice

    build = PLANTED["workspace-reused"]
    made = run_step(build, make_device=lambda: VirtualDevice(keep_places=True))
    (found,) = find_hazards(made.program)
    assert "planted_bugs.py:" in str(found)


@given(st.sampled_from(sorted(PLANTED)), st.integers(2, 3), st.integers(0, 2**32))
@settings(max_examples=60)
def test_in_whatever_order_a_planted_bug_is_taken_for_no_other_one(name: str, count: int, seed: int) -> None:
    """Where it shows at all: two that share a workspace may happen not to be in each other's way."""
    program = run(PLANTED[name], _Drawn(seed, 0.3), count).program
    assert program is not None
    kinds = {each.kind for each in find_hazards(program)}
    # Rows that come into a shared buffer are a race while they are on their way, and a reuse once they are there.
    allowed = {"race", "workspace-reused"} if name == "race with a transfer in flight" else {EXPECTED[name][0][0]}
    assert kinds <= allowed
    assert kinds or name in ("workspace-reused", "event-after-switch", "race with a transfer in flight")


# -- no false alarms ---------------------------------------------------------------------------------------------------


POLICIES = ["round_robin", "phase_offset:1", "phase_offset:2", "in_turn", *(f"random:{seed}" for seed in range(4))]
CORRECT: dict[str, Callable[[int], Any]] = {
    "low latency": lambda layers: low_latency(layers, numerics=False),
    "low latency, no shared expert": lambda layers: low_latency(layers, numerics=False, shared_expert=False),
    "high throughput": lambda layers: high_throughput(layers, numerics=False),
    "high throughput, no shared expert": lambda layers: high_throughput(layers, numerics=False, shared_expert=False),
    "nothing takes any time": lambda layers: high_throughput(
        layers, numerics=False, costs=Costs(0, 0, 0, 0, 0, 0, 0, 0, 0)
    ),
}


@pytest.mark.parametrize("name", CORRECT)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_documented_layers_are_clean_under_every_policy(name: str, count: int) -> None:
    for policy in POLICIES:
        for layers in (1, 3):
            program = run(CORRECT[name](layers), policy, count).program
            assert program is not None
            assert search(program) == [], policy
            assert looks_clean(program), policy  # the quick look, too, or exploration would be slow


class _Drawn:
    """A policy that picks one of the runnable ones by chance."""

    name = "drawn"

    def __init__(self, seed: int, stubborn: float) -> None:
        self._seed = seed
        self._stubborn = stubborn

    def start(self, step: Step) -> Callable[[], int]:
        chance = random.Random(self._seed)

        def choose() -> int:
            runnable = step.runnable()
            if step.last in runnable and chance.random() < self._stubborn:
                return step.last
            return chance.choice(runnable)

        return choose


@given(
    st.sampled_from(sorted(CORRECT)),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.5, 0.9]),
)
@settings(max_examples=60)
def test_the_documented_layers_are_clean_in_every_order(
    name: str, count: int, layers: int, seed: int, stubborn: float
) -> None:
    program = run(CORRECT[name](layers), _Drawn(seed, stubborn), count).program
    assert program is not None
    assert search(program) == []


def test_without_an_order_of_microbatches_what_they_share_is_listed_and_nothing_else() -> None:
    program = program_of(low_latency(2, numerics=False))
    assert find_hazards(program) == []
    shared = {str(each.buffer) for each in find_hazards(program, order_of_microbatches=False)}
    assert shared == {"workspace", "KV cache of layer 0", "KV cache of layer 1"}
