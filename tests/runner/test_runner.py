"""The runner on one rank, and against a group that is a recorder: what is split, what comes out, who is told."""

from __future__ import annotations

import dataclasses
from time import perf_counter_ns
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from dbo_greenlet import Scripted, dbo_yield
from dbo_greenlet.batching import RankVote, Reason, StepInput, Veto, VoteSettings, idle_step, pad_step
from dbo_greenlet.devices import CpuDevice
from dbo_greenlet.errors import (
    ConfigurationError,
    MicrobatchFailed,
    RankFailedError,
    ReplayMismatch,
    ScheduleDivergence,
)
from dbo_greenlet.runner import Runner
from dbo_greenlet.trace import StepRecorder
from tests.runner.tiny import SITES, tiny_cache, tiny_model, tiny_step

SETTINGS = VoteSettings(2, 2, 4)
# Batches of one run, in order: a prefill that is cut, a mixed step, decodes, a step too small to split.
STEPS = [
    [(0, 0, 11), (1, 0, 6)],
    [(0, 11, 1), (1, 6, 1), (2, 0, 9)],
    [(0, 12, 1), (1, 7, 1), (2, 9, 1), (3, 0, 1)],
    [(0, 13, 1)],
]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


def run_all(model: Any, mode: str, n: int = 2, **options: Any) -> list[Any]:
    runner = Runner(model, kv_cache=tiny_cache(), settings=VoteSettings(n, n, 2 * n), **options)
    return [runner.step(tiny_step(requests, seed), mode=mode) for seed, requests in enumerate(STEPS)]


@pytest.mark.parametrize("carrier", ["greenlet", "thread"])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_split_equals_sequential_bit_for_bit_and_unsplit_closely(model: Any, n: int, carrier: str) -> None:
    split, turns, plain = (
        run_all(model, "auto", n, carrier=carrier),
        run_all(model, "sequential", n),
        run_all(model, "never", n),
    )
    assert [out.decision.split for out in split] == [True, True, True, False]
    for a, b, c in zip(split, turns, plain, strict=True):
        assert torch.equal(a.output, b.output)
        assert a.decision == b.decision
        torch.testing.assert_close(a.output, c.output, rtol=1e-4, atol=1e-5)
        assert (a.schedule is not None) is a.decision.split
        assert b.schedule is None and not c.decision.split


def test_a_split_step_says_how_it_went(model: Any) -> None:
    out = run_all(model, "auto")[0]
    assert out.decision.reason is Reason.SPLIT_PREFILL
    assert [part.token_slice for part in out.slices] == [slice(0, 8), slice(8, 17)]
    assert out.yields == (4, 4)
    assert out.schedule.decisions == (0, 1) * 5
    assert out.schedule.sites == tuple(site for site in SITES for _ in range(2))


def test_an_unsplit_step_has_a_reason_and_no_schedule(model: Any) -> None:
    out = run_all(model, "auto")[3]
    assert (out.decision.split, out.decision.reason) == (False, Reason.TOO_FEW_TOKENS)
    assert (out.slices, out.schedule, out.yields) == ((), None, ())
    assert run_all(model, "never")[0].decision.reason is Reason.OFF


def test_rows_are_those_of_the_batch_that_came_in(model: Any) -> None:
    runner = Runner(model, kv_cache=tiny_cache(), settings=SETTINGS)
    padded = pad_step(tiny_step([(0, 0, 9)]), 12)
    assert runner.step(padded).output.shape[0] == 12
    assert runner.step(padded, veto=Veto.SHARED_PREFIX).output.shape[0] == 12


def test_contexts_and_buffers_are_kept_until_a_step_outgrows_them(model: Any) -> None:
    runner = Runner(model, kv_cache=tiny_cache(), settings=SETTINGS, max_requests=3)
    runner.step(tiny_step(STEPS[1]))
    contexts, buffers = runner._contexts, runner._buffers
    runner.step(tiny_step(STEPS[1]))
    assert runner._contexts is contexts and runner._buffers is buffers
    runner.step(tiny_step(STEPS[2]))
    assert runner._buffers.max_requests == 4


def test_the_comm_stream_is_joined_into_the_compute_stream() -> None:
    calls: list[tuple[str, str]] = []

    class Device(CpuDevice):
        def record(self, event: Any, stream: Any) -> None:
            calls.append(("record", stream.name))
            super().record(event, stream)

        def wait(self, stream: Any, event: Any) -> None:
            calls.append(("wait", f"{stream.name} for {event.stream.name}"))

    def forward(step: StepInput) -> Tensor:
        dbo_yield("here")
        return step.positions

    Runner(forward, settings=SETTINGS, device=Device()).step(tiny_step(STEPS[0]))
    assert calls == [("record", "comm"), ("wait", "compute for comm")]


class Outputs(NamedTuple):
    hidden: Tensor
    more: dict[str, list[Tensor]]


def test_structured_outputs_are_merged_and_cut() -> None:
    def forward(step: StepInput) -> Outputs:
        dbo_yield("here")
        return Outputs(step.positions, {"a": [step.slot_mapping]})

    group = Group([RankVote(20, 20)])
    step = tiny_step(STEPS[0])
    out = Runner(forward, settings=SETTINGS, group=group).step(step)
    assert out.decision.padded_tokens == 20
    assert isinstance(out.output, Outputs)
    assert torch.equal(out.output.hidden, step.positions)
    assert torch.equal(out.output.more["a"][0], step.slot_mapping)


@dataclasses.dataclass
class Group:
    """Rank 0 of a group whose other ranks vote as told."""

    others: list[RankVote]
    rank: int = 0
    announced: list[tuple[int | None, str]] = dataclasses.field(default_factory=list)

    @property
    def world_size(self) -> int:
        return 1 + len(self.others)

    def exchange(self, row: Tensor) -> Tensor:
        return torch.stack([row, *(vote.to_row() for vote in self.others)])

    def announce_failure(self, microbatch: int | None, error: BaseException) -> None:
        self.announced.append((microbatch, type(error).__name__))


def test_it_says_when_the_ranks_voted_and_nothing_of_a_rank_that_is_alone(model: Any) -> None:
    alone = Runner(model, kv_cache=tiny_cache(), settings=SETTINGS)
    alone.step(tiny_step(STEPS[0]))
    assert alone.voted is None
    runner = Runner(model, kv_cache=tiny_cache(), settings=SETTINGS, group=Group([RankVote(17, 17)]))
    times = [perf_counter_ns()]
    for _ in range(2):
        runner.step(tiny_step(STEPS[0]))
        times += [*(runner.voted or ()), perf_counter_ns()]
    assert len(times) == 7 and times == sorted(times)


def test_an_idle_rank_keeps_all_from_splitting_and_an_idle_group_runs_nothing(model: Any) -> None:
    runner = Runner(model, kv_cache=tiny_cache(), settings=SETTINGS, group=Group([RankVote(0, 0)]))
    out = runner.step(tiny_step(STEPS[0]))
    assert (out.decision.reason, out.decision.rank, out.output.shape[0]) == (Reason.RANK_IDLE, 1, 17)
    for mode in ("auto", "never", "sequential"):
        assert runner.step(idle_step(), mode=mode).output is None


def test_an_idle_rank_takes_part_in_the_others_step(model: Any) -> None:
    runner = Runner(model, kv_cache=tiny_cache(), settings=SETTINGS, group=Group([RankVote(9, 9)]))
    assert runner.step(idle_step()).output.shape == (0, 24)


def test_a_failing_microbatch_is_announced_with_its_number() -> None:
    def forward(step: StepInput) -> Tensor:
        dbo_yield("first")
        if int(step.positions[0]) == 8:
            raise ValueError("rotten token")
        dbo_yield("second")
        return step.positions

    group = Group([RankVote(17, 17)])
    runner = Runner(forward, settings=SETTINGS, group=group)
    with pytest.raises(MicrobatchFailed, match="Microbatch 1 of 2 failed .*'first'.*rotten token"):
        runner.step(tiny_step(STEPS[0]))
    assert group.announced == [(1, "MicrobatchFailed")]
    # The next step works.
    assert torch.equal(runner.step(tiny_step(STEPS[2])).output, tiny_step(STEPS[2]).positions)


def test_a_failing_unsplit_step_is_announced() -> None:
    def forward(step: StepInput) -> Tensor:
        raise ValueError("rotten batch")

    group = Group([RankVote(1, 1)])
    with pytest.raises(ValueError, match="rotten batch"):
        Runner(forward, settings=SETTINGS, group=group).step(tiny_step(STEPS[0]))
    assert group.announced == [(None, "ValueError")]


def test_a_step_can_be_scripted(model: Any) -> None:
    recorder = StepRecorder()
    runner = Runner(model, kv_cache=tiny_cache(), settings=SETTINGS, instruments=[recorder])
    first = runner.step(tiny_step(STEPS[0]))
    again = runner.step(tiny_step(STEPS[0]), policy=Scripted(first.schedule))
    assert again.schedule == first.schedule and torch.equal(again.output, first.output)
    ahead = Scripted([0, 0, 1, 1, 0, 0, 1, 1, 0, 1])
    other = runner.step(tiny_step(STEPS[0]), policy=ahead)
    assert other.schedule.hash != first.schedule.hash and torch.equal(other.output, first.output)
    assert [record.ubatch for record in recorder.records(step=0) if record.kind == "slice"] == list(ahead.decisions)
    with pytest.raises(ReplayMismatch, match="decision 0"):
        runner.step(tiny_step(STEPS[0]), policy=Scripted([1, 0]))


def test_schedules_can_be_compared_across_ranks(model: Any) -> None:
    class Comparing(Group):
        theirs = 0

        def exchange(self, row: Tensor) -> Tensor:
            if len(row) == len(self.others[0].to_row()):
                return super().exchange(row)
            # A hash, a length, or bytes; the other rank has another hash (tests/ranks has real ranks that differ).
            return torch.stack([row, row + self.theirs * (row[0] > 1 << 40)])

    group = Comparing([RankVote(17, 17)])
    runner = Runner(model, kv_cache=tiny_cache(), settings=SETTINGS, group=group, compare_schedules=True)
    assert runner.step(tiny_step(STEPS[0])).schedule is not None
    group.theirs = 1
    with pytest.raises(ScheduleDivergence, match="rank 0 and rank 1 ran this step in different orders"):
        runner.step(tiny_step(STEPS[0]))
    assert group.announced == [(None, "ScheduleDivergence")]


def test_a_failure_of_another_rank_is_told_as_such() -> None:
    def forward(step: StepInput) -> Tensor:
        dbo_yield("here")
        raise RankFailedError(1, 0, "it broke")

    with pytest.raises(RankFailedError, match="^rank 1, microbatch 0 failed: it broke$") as caught:
        Runner(forward, settings=SETTINGS, group=Group([RankVote(17, 17)])).step(tiny_step(STEPS[0]))
    assert isinstance(caught.value.__cause__, MicrobatchFailed)


def test_an_unknown_mode_is_refused(model: Any) -> None:
    with pytest.raises(ConfigurationError, match="mode='both'.*auto, never, sequential"):
        Runner(model, kv_cache=tiny_cache()).step(idle_step(), mode="both")


def test_steps_run_in_inference_mode_unless_told_otherwise() -> None:
    def forward(step: StepInput) -> Tensor:
        dbo_yield("here")
        return torch.full((step.num_padded_tokens, 1), float(torch.is_inference_mode_enabled()))

    for wanted in (True, False):
        out = Runner(forward, settings=SETTINGS, inference_mode=wanted).step(tiny_step(STEPS[0]))
        assert bool(out.output.all()) is wanted
    assert not torch.is_inference_mode_enabled()
