"""The kit on the project's own model: real numerics under all schedules, under faults, with every access recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from dbo_greenlet.all2all.loopback import Loopback
from dbo_greenlet.batching import VoteSettings
from dbo_greenlet.policies import PhaseOffset, SeededRandom
from dbo_greenlet.runner import Runner
from dbo_greenlet.testing import (
    ExplorationFailed,
    Faults,
    ReplayCase,
    check_deterministic,
    checksum,
    count_interleavings,
    explore,
    find_hazards,
    run_in_turn,
    run_step,
)
from dbo_greenlet.testing.plugin_runs import DboExplore, DboGolden, DboRun
from dbo_greenlet.testing.verdicts import DEFAULT, is_injected, laws_kept, no_hazard
from tests.runner.tiny import CONFIG, tiny_step
from tests.testing.own_model import REQUESTS, OwnModel

VERDICTS = (*DEFAULT, laws_kept)


@contextmanager
def recorded(layers: int, count: int = 2, *, static: bool = False) -> Iterator[OwnModel]:
    own = OwnModel(layers, count=count, all_to_all=Loopback(CONFIG.n_routed_experts, static_shapes=static))
    with own.recording():
        yield own


# -- without a bug -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("static", [False, True])
def test_one_layer_is_right_in_every_schedule(dbo_explore: DboExplore, static: bool) -> None:
    with recorded(1, static=static) as own:
        found = dbo_explore(own.build, make_device=own.make_device, verdicts=VERDICTS)
    # Two yields and the slice in which it returns.
    assert found.slices == (3, 3) and found.complete
    assert found.schedules == found.distinct == found.space == count_interleavings([3, 3]) == 5


def test_two_layers_are_right_with_few_preemptions(dbo_explore: DboExplore) -> None:
    with recorded(2) as own:
        found = dbo_explore(own.build, make_device=own.make_device, verdicts=VERDICTS, preemptions=1)
    assert found.slices == (5, 5) and not found.complete
    assert found.schedules == found.space == count_interleavings([5, 5], preemptions=1)


@pytest.mark.parametrize("how", ["pct", "random"])
def test_three_microbatches_are_right_by_chance(dbo_explore: DboExplore, how: str) -> None:
    with recorded(1, 3) as own:
        found = dbo_explore(
            own.build, make_device=own.make_device, verdicts=VERDICTS, count=3, how=how, schedules=5, seed=11
        )
    assert found.slices == (3, 3, 3) and found.schedules == 5 and found.distinct > 2


def test_the_recorded_step_is_a_whole_one() -> None:
    """What the verdicts above have looked at: each microbatch's operators, its four transfers, the cache."""
    with recorded(2) as own:
        run = run_step(own.build, PhaseOffset(2), make_device=own.make_device)
    program = run.program
    assert run.succeeded and program is not None
    for index in range(2):
        mine = [each for each in program.operations if each.microbatch == index]
        assert {each.slice for each in mine} == set(range(5))
        assert sum(each.name == "index_copy_" for each in mine) == 3
        assert [(each.name, each.received) for each in program.transfers if each.owner == index] == [
            ("dispatch", 1), ("combine", 1)
        ] * 2  # fmt: skip
    caches = {str(a.buffer) for each in program.operations for a in each.accesses if each.name == "index_copy_"}
    assert "KV cache" in caches


def test_two_runs_are_the_same_in_everything() -> None:
    with recorded(1, static=True) as own:
        first = check_deterministic(own.build, SeededRandom(3), make_device=own.make_device)
        reference = checksum(run_in_turn(own.build, make_device=own.make_device))
    assert first.checksum == reference


def test_the_runner_takes_the_committed_schedule(dbo_golden: DboGolden, dbo_run: DboRun) -> None:
    """By the runner, and by the kit with everything recorded: one golden schedule, and the same output."""
    own = OwnModel(2)
    runner = Runner(own.model, kv_cache=own.cache(), settings=VoteSettings(2, 2, 4), policy=PhaseOffset(2))
    through_the_runner = runner.step(tiny_step(REQUESTS))
    dbo_golden(through_the_runner.schedule, "own_model_phase_offset_2")
    with own.recording():
        run = dbo_run(own.build, "phase_offset:2", make_device=own.make_device)
    dbo_golden(run, "own_model_phase_offset_2")
    assert run.schedule.hash == through_the_runner.schedule.hash
    assert torch.equal(torch.cat(run.outputs), through_the_runner.output)


# -- when something goes wrong -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "fails"),
    [
        ("raise@0.0", True),
        ("raise@1.1", True),
        ("fail@0.1", True),
        ("fail@1.0+raise@0.1", True),
        ("signal@1.0:INT", True),
        ("late@0.0:1ms+early@1.0", False),
        ("reorder@1.0", False),
    ],
)
def test_a_fault_fails_its_step_and_no_other(text: str, fails: bool) -> None:
    with recorded(1) as own:
        reference = checksum(run_in_turn(own.build, make_device=own.make_device))
        for seed in range(2):
            faults = Faults.parse(text)
            run = run_step(own.build, SeededRandom(seed), make_device=own.make_device, faults=faults)
            if fails:
                assert is_injected(run.error), run.error
                assert faults.struck
            else:
                assert run.succeeded and run.checksum == reference
                assert not find_hazards(run.program)
            assert not run.left_behind
            following = run_step(own.build, SeededRandom(seed), make_device=own.make_device)
            assert following.checksum == reference and not following.left_behind


def test_every_schedule_survives_a_fault(dbo_explore: DboExplore) -> None:
    with recorded(1) as own:
        found = dbo_explore(own.build, make_device=own.make_device, faults=Faults.parse("late@1.0:50us+early@0.1"))
    assert found.complete and found.schedules == 5


# -- a bug -------------------------------------------------------------------------------------------------------------


def share_the_norms_output(own: OwnModel) -> None:
    """All microbatches get the rows for their feed-forward part in one buffer; the shared expert reads them after the
    dispatch, and by then a sibling may have written its own."""
    norm = own.model.layers[1].post_attention_layernorm
    original, buffer = norm.forward, torch.empty(16, CONFIG.hidden_size)

    def forward(x: torch.Tensor) -> torch.Tensor:
        rows = buffer[: len(x)]
        rows.copy_(original(x))
        return rows

    norm.forward = forward


def test_a_buffer_that_is_shared_over_a_yield_is_found_shrunk_and_replayed() -> None:
    with recorded(1) as own:
        share_the_norms_output(own)
        reference = checksum(run_in_turn(own.build, make_device=own.make_device))
        with pytest.raises(ExplorationFailed) as failed:
            explore(own.build, make_device=own.make_device, report=None)
        assert "the output of microbatch 0 is not bit-equal" in str(failed.value)
        case = ReplayCase.decode(failed.value.replay)
        # Microbatch 1's first slice before the second one of microbatch 0: no smaller schedule has the bug.
        assert case.schedule.decisions[:2] == (0, 1)
        again = run_step(own.build, case.policy(), make_device=own.make_device)
        assert again.checksum != reference
        (hazard,) = find_hazards(again.program)
        assert hazard.kind == "workspace-reused" and hazard.first.microbatch == 1 and hazard.second.microbatch == 0
        # The hazard is there whatever the numbers are: by itself it is found in the same schedule.
        with pytest.raises(ExplorationFailed, match="workspace-reused") as by_hazard:
            explore(own.build, make_device=own.make_device, verdicts=[no_hazard], report=None)
        assert by_hazard.value.replay == failed.value.replay
