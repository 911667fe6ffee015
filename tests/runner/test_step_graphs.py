"""Which steps a graph serves, how they are padded, and that padding changes nothing: all of it without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dbo_greenlet.all2all.loopback import Loopback
from dbo_greenlet.batching import RankVote, StepInput, VoteSettings, check_step, decide, idle_step
from dbo_greenlet.devices import CpuDevice
from dbo_greenlet.errors import ConfigurationError, MicrobatchFailed
from dbo_greenlet.moe import DeepseekV2Model, KVCache
from dbo_greenlet.runner import Runner
from dbo_greenlet.step_graphs import CapturedStep, StepGraphs
from tests.runner.tiny import CONFIG, ROW_LENGTH, ROWS, tiny_cache, tiny_model, tiny_step

CPU = torch.device("cpu")
DECODES = [(0, 5, 1), (1, 0, 1), (2, 9, 1), (3, 2, 1), (4, 7, 1)]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


def static_cache() -> KVCache:
    return KVCache(CONFIG, ROWS, ROW_LENGTH, static_shapes=True)


@given(counts=st.lists(st.integers(1, 8), min_size=1, max_size=8), seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_the_buffers_hold_the_step_and_padding_whatever_they_held_before(counts: list[int], seed: int) -> None:
    graphs = StepGraphs([1, 2, 4, 8], CPU)
    generator = torch.Generator().manual_seed(seed)
    for count in counts:
        step = tiny_step([(row, int(torch.randint(0, 9, (1,), generator=generator)), 1) for row in range(count)], seed)
        vote, fits = graphs.vote(step, RankVote.of_step(step))
        size = vote.num_padded_tokens
        assert fits and vote.uniform_decode and size in (1, 2, 4, 8) and count <= size < 2 * count
        graphs.buffers.fill(step, size)
        padded = graphs.buffers.padded(step, size)
        check_step(padded)
        behind = size - count
        expected = {
            "positions": step.positions.tolist() + [0] * behind,
            "slot_mapping": step.slot_mapping.tolist() + [-1] * behind,
            "request_rows": step.request_rows.tolist() + [-1] * behind,
            "input_ids": step.input_ids.tolist() + [0] * behind,
            "query_start_loc": step.query_start_loc.tolist() + [count] * behind,
            "seq_lens": step.seq_lens.tolist() + [0] * behind,
            "query_start_loc_cpu": step.query_start_loc_cpu.tolist() + [count] * behind,
            "seq_lens_cpu": step.seq_lens_cpu.tolist() + [0] * behind,
        }
        assert {name: getattr(padded, name).tolist() for name in expected} == expected
        assert (padded.num_tokens, padded.num_requests) == (count, count)
        assert (padded.num_padded_tokens, padded.num_padded_requests) == (size, size)


def test_addresses_stay() -> None:
    graphs = StepGraphs([4, 8], CPU)
    seen = set()
    for count in (3, 8, 1):
        step = tiny_step([(row, 1, 1) for row in range(count)], 0)
        graphs.buffers.fill(step, 8)
        step = graphs.buffers.padded(step, 8)
        names = ("positions", "slot_mapping", "request_rows", "input_ids", "query_start_loc", "seq_lens")
        seen.add(tuple(getattr(step, name).data_ptr() for name in names))
    assert len(seen) == 1


@pytest.mark.parametrize(
    "step",
    [
        tiny_step([(0, 0, 2), (1, 0, 2)], 0),  # two new tokens each
        tiny_step([(0, 0, 1), (1, 0, 3)], 0),  # mixed
        tiny_step([(row, 0, 1) for row in range(9)], 0),  # larger than any graph
        replace(tiny_step([(0, 0, 1)], 0), input_ids=None, inputs_embeds=torch.zeros(1, 4)),
        replace(tiny_step([(0, 0, 1)], 0), positions=torch.zeros(3, 1, dtype=torch.int64)),
        replace(tiny_step([(0, 0, 1)], 0), intermediate_tensors={"hidden": torch.zeros(1, 4)}),
    ],
)
def test_steps_that_no_graph_is_made_for(step: StepInput) -> None:
    vote = RankVote.of_step(step)
    ours, fits = StepGraphs([4, 8], CPU).vote(step, vote)
    assert not fits and ours.num_padded_tokens == step.num_tokens
    # Told as no decode only where another rank could take it for one of a graph's.
    assert ours.uniform_decode is (vote.uniform_decode and step.num_tokens > 8)


@pytest.mark.parametrize(
    ("votes", "rule", "size"),
    [
        ([(7, 8, 1), (5, 8, 1)], "v1", 8),
        ([(2, 4, 1), (7, 8, 1)], "v1", 8),  # not split, and one size for both all the same
        ([(7, 8, 1), (10, 10, 0)], "v1", None),  # the other rank prefills
        ([(7, 8, 1), (8, 8, 0)], "v1", None),  # the same number of tokens, but no decode
        ([(8, 8, 1), (4, 4, 1)], "v2", None),  # the last microbatch is padding alone on rank 1
        ([(3, 4, 1), (0, 0, 0)], "v1", 4),  # an idle rank runs padding
        ([(3, 5, 1), (0, 0, 0)], "v1", None),  # a decode that no graph is made for
    ],
)
def test_the_one_size_of_a_decision(votes: list[tuple[int, int, int]], rule: str, size: int | None) -> None:
    decision = decide([RankVote(*vote) for vote in votes], VoteSettings(2, 4, 4, rule))
    assert StepGraphs([4, 8], CPU).size_of(decision) == size


def test_an_idle_rank_runs_padding() -> None:
    graphs = StepGraphs([4], CPU)
    graphs.buffers.fill(tiny_step([(0, 3, 1), (1, 4, 1)], 0), 4)
    vote, fits = graphs.vote(idle_step(), RankVote.of_step(idle_step()))
    assert fits and (vote.num_tokens, vote.num_padded_tokens) == (0, 0)
    graphs.buffers.fill(idle_step(), 4)
    padded = graphs.buffers.padded(idle_step(), 4)
    assert (padded.num_tokens, padded.num_requests, padded.num_padded_tokens) == (0, 0, 4)
    assert padded.slot_mapping.tolist() == [-1] * 4 and padded.query_start_loc.tolist() == [0] * 5


@pytest.mark.parametrize("n", [2, 3])
def test_the_all_to_all_is_told_what_every_rank_knows(n: int) -> None:
    told: list[Any] = []

    class Told(Loopback):
        def expect_tokens(self, most: int | None) -> None:
            told.append(most)

        @contextmanager
        def reserve_sms(self) -> Iterator[None]:
            told.append("reserved")
            try:
                yield
            finally:
                told.append("given back")

    transport = Told(CONFIG.n_routed_experts)
    model = DeepseekV2Model(CONFIG, transport)
    runner = Runner(model, kv_cache=tiny_cache(), settings=VoteSettings(n, n, n), all2all=transport)
    runner.step(tiny_step([(0, 0, 11)], 0))
    runner.step(tiny_step([(0, 11, 1)], 0))
    assert told == [11 - (n - 1) * (11 // n), "reserved", "given back", 1]
    model.norm.weight = None  # the step fails at its end
    with pytest.raises(MicrobatchFailed):
        runner.step(tiny_step([(0, 12, 8)], 0))
    assert told[-2:] == ["reserved", "given back"]


def test_what_is_captured_largest_first_and_once() -> None:
    graphs = StepGraphs([2, 8, 4, 8], CPU)
    assert graphs.wanted(VoteSettings(2, 4, 4)) == [(8, 2), (8, 1), (4, 2), (4, 1), (2, 1)]
    assert graphs.wanted(VoteSettings(1, 4, 4)) == [(8, 1), (4, 1), (2, 1)]
    made: list[tuple[int, int]] = []

    def capture(size: int, microbatches: int) -> CapturedStep:
        made.append((size, microbatches))
        return CapturedStep(size, microbatches, None)  # type: ignore[arg-type]

    graphs.capture_all(VoteSettings(1, 4, 4), capture)
    graphs.capture_all(VoteSettings(2, 4, 4), capture)
    assert made == [(8, 1), (4, 1), (2, 1), (8, 2), (4, 2)]
    # The ranks' group was reset: all of it once more.
    graphs.capture_all(VoteSettings(1, 4, 4), capture, generation=1)
    assert made[5:] == [(8, 1), (4, 1), (2, 1)] and graphs.find(8, 2) is None
    graphs.capture_all(VoteSettings(1, 4, 4), capture, generation=1)
    graphs.drop()
    assert len(made) == 8 and graphs.captured() == []
    graphs.capture_all(VoteSettings(2, 4, 4), capture, generation=1)
    assert graphs.find(8, 2) is not None and graphs.find(2, 2) is None and len(graphs.captured()) == 5


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("mode", ["auto", "never", "sequential"])
def test_padding_changes_no_row(model: Any, mode: str, n: int) -> None:
    options: Any = {"settings": VoteSettings(n, n, 2 * n), "inference_mode": True}
    plain = Runner(model, kv_cache=static_cache(), **options)
    padded = Runner(model, kv_cache=static_cache(), graph_sizes=[1, 2, 4, 8], use_graphs=False, **options)
    for seed, requests in enumerate([[(0, 0, 6), (1, 0, 5), (2, 0, 9), (3, 0, 2), (4, 0, 7)], DECODES, DECODES[:3]]):
        a, b = (runner.step(tiny_step(requests, seed), mode=mode) for runner in (plain, padded))
        assert b.decision.votes[0].num_padded_tokens == {25 + 4: 29, 5: 8, 3: 4}[len(a.output)]
        torch.testing.assert_close(a.output, b.output, rtol=1e-4, atol=1e-5)
        assert (b.execution, b.timeline) == ("eager", None)


def test_split_equals_in_turn_bit_for_bit_when_padded(model: Any) -> None:
    outputs = []
    for mode in ("auto", "sequential"):
        runner = Runner(
            model, kv_cache=static_cache(), settings=VoteSettings(2, 2, 2), graph_sizes=[8], use_graphs=False
        )
        outputs.append(runner.step(tiny_step(DECODES, 1), mode=mode))
    assert outputs[0].decision.split and outputs[0].decision.padded_tokens == 8
    assert torch.equal(outputs[0].output, outputs[1].output)


def test_what_graphs_need_is_said(model: Any) -> None:
    with pytest.raises(
        ConfigurationError, match="graphs need a CUDA device, this runner is on cpu; .*use_graphs=False"
    ):
        Runner(model, kv_cache=static_cache(), graph_sizes=[4])
    with pytest.raises(ConfigurationError, match="graph_sizes has 0"):
        Runner(model, kv_cache=static_cache(), graph_sizes=[0, 4], use_graphs=False)
    with pytest.raises(ConfigurationError, match="makes no graphs"):
        Runner(model, kv_cache=static_cache(), graph_sizes=[4], use_graphs=False).capture_graphs()


class Group:
    """Rank 0 of a group whose other ranks vote as told."""

    rank = 0

    def __init__(self, *others: tuple[int, int, int]) -> None:
        self.others = [RankVote(*vote) for vote in others]
        self.world_size = 1 + len(others)
        self.rows: list[list[int]] = []

    def exchange(self, row: Tensor) -> Tensor:
        self.rows.append(row.tolist())
        return torch.stack([row, *(vote.to_row() for vote in self.others)])

    def announce_failure(self, microbatch: int | None, error: BaseException) -> None:
        raise error


@pytest.mark.parametrize(
    ("requests", "other", "tokens", "split"),
    [
        (DECODES, (8, 8, 1), 8, True),
        (DECODES, (7, 8, 1), 8, True),
        (DECODES[:2], (7, 8, 1), 8, False),  # too few to split, and the size of the other rank all the same
        ([], (3, 4, 1), 4, False),  # idle: padding alone
        (DECODES, (11, 11, 0), 8, False),  # the other one prefills: own size
        (DECODES, (0, 0, 0), 8, False),
    ],
)
def test_what_a_rank_runs_beside_another(
    model: Any, requests: list[Any], other: tuple[int, int, int], tokens: int, split: bool
) -> None:
    group = Group(other)
    runner = Runner(
        model,
        kv_cache=static_cache(),
        settings=VoteSettings(2, 3, 6),
        group=group,
        graph_sizes=[4, 8],
        use_graphs=False,
    )
    step = tiny_step(requests, 3) if requests else idle_step()
    out = runner.step(step)
    assert (out.tokens, out.decision.split, out.output.shape[0]) == (tokens, split, len(requests))
    alone = Runner(model, kv_cache=static_cache(), settings=VoteSettings(1, 3, 6))
    if requests:
        torch.testing.assert_close(out.output, alone.step(step).output, rtol=1e-4, atol=1e-5)


def test_a_decode_that_no_graph_takes_is_told_as_none(model: Any) -> None:
    group = Group((3, 4, 1))
    runner = Runner(
        model, kv_cache=static_cache(), settings=VoteSettings(2, 2, 2), group=group, graph_sizes=[4], use_graphs=False
    )
    step = tiny_step(DECODES[:3], 3)
    embedded = replace(step, input_ids=None, inputs_embeds=model.embed_tokens.weight[step.input_ids])
    runner.step(embedded)
    runner.step(step)
    assert [row[1:4] for row in group.rows] == [[3, 3, 0], [3, 4, 1]]


def test_an_interrupted_fill_leaves_no_slots_that_pass_for_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = StepGraphs([8], CPU).buffers
    copy, calls = torch._foreach_copy_, []

    def interrupted(ours: Any, theirs: Any) -> None:
        calls.append(1)
        copy(ours, theirs)
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(torch, "_foreach_copy_", interrupted)
    with pytest.raises(KeyboardInterrupt):
        buffers.fill(tiny_step([(row, 3, 1) for row in range(8)], 0), 8)
    one = tiny_step([(0, 3, 1)], 0)
    buffers.fill(one, 8)
    padded = buffers.padded(one, 8)
    assert padded.slot_mapping.tolist() == [one.slot_mapping.item()] + [-1] * 7
    assert padded.request_rows.tolist() == [0] + [-1] * 7


def test_a_larger_step_does_not_take_the_buffers_of_a_graph(model: Any) -> None:
    runner = Runner(model, kv_cache=static_cache(), settings=VoteSettings(2, 2, 2), max_requests=2)
    captured = CapturedStep(2, 2, None, buffers=runner._buffers)  # type: ignore[arg-type]
    runner.step(tiny_step(DECODES, 1))
    assert runner._buffers is not captured.buffers and captured.buffers.max_requests == 2


def test_a_step_on_another_stream_runs_behind_the_last_one(model: Any) -> None:
    waits: list[tuple[str, str]] = []

    class Noting(CpuDevice):
        def wait(self, stream: Any, event: Any) -> None:
            waits.append((stream.name, event.stream.name))

    device = Noting()
    first, second = device.new_stream("first"), device.new_stream("second")
    runner = Runner(model, kv_cache=static_cache(), settings=VoteSettings(1, 2, 2), device=device)
    for stream in (first, first, second, first):
        with device.stream_scope(stream):
            runner.step(tiny_step(DECODES, 1))
    assert waits == [("second", "first"), ("first", "second")]
