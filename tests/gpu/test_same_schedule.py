"""The schedule of a step on a GPU, eager and captured, is that of the virtual device: one hash under every policy.

Run where there is a GPU: python -m pytest -m gpu
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run: python -m pytest -m gpu"),
]

from dbo_greenlet import policy_from_text  # noqa: E402
from dbo_greenlet.testing.step_run import TestBed, run_step  # noqa: E402
from dbo_greenlet.yields import (  # noqa: E402
    dbo_yield_and_switch_from_comm_to_compute,
    dbo_yield_and_switch_from_compute_to_comm,
)
from tests.gpu.stream_model import LAYERS, StreamModel, decode_step, make_runner  # noqa: E402

POLICIES = ["round_robin", "in_turn", "phase_offset:1", "phase_offset:2", "random:7", "pct:4,depth=3,length=24"]


class RecordedModel(StreamModel):
    """`StreamModel`, for every policy: torch's allocator is told which tensors the other stream uses.

    Round robin does not need that: what a microbatch frees, its sibling's next event stands behind. Where a microbatch
    has run ahead and returned, that event may be older than the last use.
    """

    def __call__(self, step: Any) -> Any:
        x = self.embedding[step.input_ids] + step.positions[:, None] * 0.01
        for layer, weight in enumerate(self.weights):
            torch.cuda._sleep(300_000)
            x = torch.tanh(x @ weight)
            compute = torch.cuda.current_stream()
            dbo_yield_and_switch_from_compute_to_comm(f"layer{layer}.dispatch")
            torch.cuda._sleep(200_000)
            sent = x.flip(1)
            sent.record_stream(compute)
            x.record_stream(torch.cuda.current_stream())
            dbo_yield_and_switch_from_comm_to_compute(f"layer{layer}.combine")
            x = x + sent
        return x


def virtual_model(bed: TestBed) -> list[Any]:
    """The yields and the streams of `RecordedModel`, on a virtual device."""

    def forward(index: int) -> None:
        for layer in range(LAYERS):
            bed.device.work("compute", 150.0)
            dbo_yield_and_switch_from_compute_to_comm(f"layer{layer}.dispatch")
            bed.device.work("communication", 100.0)
            dbo_yield_and_switch_from_comm_to_compute(f"layer{layer}.combine")

    return [partial(forward, index) for index in range(bed.count)]


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_eager_captured_threads_and_virtual_have_one_hash_and_the_same_bits(policy: str, n: int) -> None:
    model, step = RecordedModel(), decode_step(8)
    graphs = make_runner(model, n, graph_sizes=[8], policy=policy_from_text(policy))
    eager = make_runner(model, n, graph_sizes=[8], policy=policy_from_text(policy), use_graphs=False)
    threads = make_runner(model, n, policy=policy_from_text(policy), carrier="thread")
    split, _ = graphs.capture_graphs()
    virtual = run_step(virtual_model, policy_from_text(policy), count=n)
    assert virtual.error is None and virtual.schedule == split.schedule
    replayed, ran, by_threads = graphs.step(step), eager.step(step), threads.step(step)
    assert (replayed.execution, ran.execution) == ("replayed", "eager")
    assert len({out.schedule.hash for out in (split, replayed, ran, by_threads, virtual)}) == 1
    sequential = eager.step(step, mode="sequential").output
    assert all(torch.equal(out.output, sequential) for out in (replayed, ran, by_threads))


def test_a_step_with_a_policy_of_its_own_is_not_replayed_and_the_graphs_stay() -> None:
    model, step = RecordedModel(), decode_step(8)
    runner = make_runner(model, 2, graph_sizes=[8], policy=policy_from_text("phase_offset:2"))
    split, _ = runner.capture_graphs()
    before, own, after = runner.step(step), runner.step(step, policy=policy_from_text("in_turn")), runner.step(step)
    assert [out.execution for out in (before, own, after)] == ["replayed", "eager", "replayed"]
    assert before.schedule == after.schedule == split.schedule
    assert own.schedule.decisions == (0,) * (2 * LAYERS + 1) + (1,) * (2 * LAYERS + 1)
    assert torch.equal(own.output, before.output) and torch.equal(after.output, before.output)
