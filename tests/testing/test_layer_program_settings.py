"""The documented layers under faults and with other numbers of microbatches, experts and layers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dbo_greenlet.errors import ConfigurationError, MicrobatchFailed
from dbo_greenlet.testing.faults import Faults
from dbo_greenlet.testing.layer_programs import low_latency
from dbo_greenlet.testing.step_run import Build, run_in_turn, run_step
from tests.testing.layer_runs import BOTH, ran

# -- faults ------------------------------------------------------------------------------------------------------------


@BOTH
def test_an_empty_microbatch_computes_for_the_others_only(program: Callable[..., Build]) -> None:
    run = ran(program(1), faults=Faults.parse("empty@1"))
    lengths = {each.name: each.end - each.begin for each in run.program.operations if each.microbatch == 1}
    assert [lengths[name] for name in ("A0", "A1", "MLP", "S", "out")] == [0, 0, 60, 0, 0]
    assert run.outputs == run_in_turn(program(1))


@BOTH
def test_attention_and_experts_allocate(program: Callable[..., Build]) -> None:
    for number, name in enumerate(["A0", "MLP", "A0", "MLP"]):
        run = run_step(program(2), faults=Faults.parse(f"oom@0.{number}"))
        assert isinstance(run.error, MicrobatchFailed) and isinstance(run.error.__cause__, MemoryError)
        assert sum(each.name == name and each.microbatch == 0 for each in run.program.operations) == number // 2
    assert run_step(program(2), faults=Faults.parse("oom@0.4")).error is None


# -- the interface -----------------------------------------------------------------------------------------------------


def test_a_run_with_another_number_of_microbatches_has_buffers_of_its_own() -> None:
    build = low_latency(1)
    two, three = ran(build, count=2), ran(build, count=3)
    again = ran(build, count=2)
    assert len(three.outputs) == 3
    buffers = [{a.buffer for o in run.program.operations for a in o.accesses} for run in (two, three, again)]
    assert buffers[0] == buffers[2] and not buffers[0] & buffers[1]
    names = sorted(map(str, buffers[0]))
    assert names == [
        "KV cache of layer 0",
        *(f"combined of microbatch {i}" for i in (0, 1)),
        *(f"expert outputs of microbatch {i}" for i in (0, 1)),
        *(f"hidden of microbatch {i}" for i in (0, 1)),
        *(f"result of microbatch {i}" for i in (0, 1)),
        *(f"rows of microbatch {i}" for i in (0, 1)),
        *(f"shared of microbatch {i}" for i in (0, 1)),
        "workspace",
    ]


@BOTH
def test_a_model_without_a_shared_expert_runs_none(program: Callable[..., Build]) -> None:
    run = ran(program(2, shared_expert=False))
    assert {each.name for each in run.program.operations if each.kind == "work"} - {"counts", "D", "C"} == {
        "A0",
        "A1",
        "MLP",
        "out",
    }


@BOTH
def test_a_negative_number_of_layers(program: Callable[..., Build]) -> None:
    with pytest.raises(ConfigurationError, match="layers=-1"):
        program(-1)
    assert repr(program(3)) in ("LowLatency(3 layers)", "HighThroughput(3 layers)")
