"""The stand-ins for CUDA and DeepEP see the mistakes that they are there to see."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs vLLM, under which the stand-ins are put (make test-vllm)")

import torch
from vllm.utils.torch_utils import current_stream

from tests.vllm_dropin import fake_cuda, fake_deep_ep
from tests.vllm_dropin.drive import Case, Drive, harness
from tests.vllm_dropin.fake_cuda import Call, FakeEvent, FakeGraph, FakeStream, Recorder
from tests.vllm_dropin.model import tensors_of
from tests.vllm_dropin.scenarios import captured

pytestmark = pytest.mark.vllm


def streams(log: Recorder) -> tuple[FakeStream, FakeStream]:
    return FakeStream(name="one", recorder=log), FakeStream(name="two", recorder=log)


def test_vllms_own_stream_functions_run_on_the_stand_in() -> None:
    with fake_cuda.installed() as log:
        one, _ = streams(log)
        with torch.cuda.stream(one):
            assert current_stream() is one is torch.cuda.current_stream()
            log.work("kernel")
        assert current_stream().name == "compute"
        assert log.log == [
            Call("set_stream", "-", "one", ("one",)),
            Call("kernel", "-", "one"),
            Call("set_stream", "-", "compute", ("compute",)),
        ]


def test_a_fork_that_is_not_joined_fails_the_capture() -> None:
    def capture(*, join: bool) -> FakeGraph:
        one, two = streams(log)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=one):
            two.wait_event(one.record_event())
            with torch.cuda.stream(two):
                log.work("kernel")
            if join:
                one.wait_event(two.record_event())
        return graph

    with fake_cuda.installed() as log:
        assert [stream.name for stream in capture(join=True).taken_in] == ["one", "two"]
        with pytest.raises(RuntimeError, match="two was forked by the capture of graph1 and not joined"):
            capture(join=False)


def test_work_on_a_stream_outside_the_capture_is_an_error() -> None:
    with fake_cuda.installed() as log:
        one, two = streams(log)
        with pytest.raises(RuntimeError, match="kernel was launched on two"), torch.cuda.graph(FakeGraph(), stream=one):
            # An event from before the capture takes nothing in.
            two.wait_event(FakeEvent())
            with torch.cuda.stream(two):
                log.work("kernel")


def test_the_default_stream_cannot_be_captured() -> None:
    with fake_cuda.installed() as log, pytest.raises(RuntimeError, match="default stream"):
        torch.cuda.set_stream(log.default_stream)
        FakeGraph().capture_begin()


def test_a_receive_that_did_not_run_leaves_nan_and_runs_once() -> None:
    with fake_cuda.installed():
        buffer = fake_deep_ep.Buffer(num_experts=2, num_slots=4)
        x = torch.arange(6.0).reshape(3, 2)
        ids, weights = torch.tensor([[0, 1], [1, 0], [1, 0]]), torch.tensor([[0.5, 0.5]] * 3)
        received, counts, handle, _, hook = buffer.low_latency_dispatch(x, ids, 4, 2, return_recv_hook=True)
        assert received.isnan().all()
        hook()
        assert counts.tolist() == [3, 3]
        assert torch.equal(received[0, :3], x)
        with pytest.raises(RuntimeError, match="ran twice"):
            hook()
        out = torch.zeros_like(x)
        _, _, hook = buffer.low_latency_combine(received, ids, weights, handle, return_recv_hook=True, out=out)
        assert out.isnan().all()
        hook()
        assert torch.equal(out, x)


def test_high_throughput_brings_tokens_back_to_their_rows() -> None:
    with fake_cuda.installed():
        buffer = fake_deep_ep.Buffer(num_experts=4, num_slots=4)
        x, ids = torch.arange(6.0).reshape(3, 2), torch.tensor([[0, 1], [3, 0], [2, 1]])
        _, _, per_expert, _, _ = buffer.get_dispatch_layout(ids, 4)
        rows, row_ids, _, counts, handle, event = buffer.dispatch(
            x, num_tokens_per_expert=per_expert, topk_idx=ids, topk_weights=torch.ones(3, 2), async_finish=True
        )
        assert counts == [2, 2, 1, 1]
        assert event.event is not None
        assert not torch.equal(rows, x), "arrival order is another one"
        assert torch.equal(row_ids, ids.flip(0))
        combined, _, event = buffer.combine(rows, handle)
        assert event.event is None
        assert torch.equal(combined, x)


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_a_replay_computes_from_what_the_inputs_hold_then(runner: str) -> None:
    with harness() as log:
        drive = Drive(Case(runner, mode="capture", output="aux"), log)
        first = [one.clone() for one in drive.in_turn()]
        kept = tensors_of(captured(drive))
        for one in kept:
            one.zero_()
        replayed = tensors_of(drive.replay())
        assert all(torch.equal(a, b) for a, b in zip(replayed, first, strict=True))
        drive.change_inputs(seed=1)
        second = [one.clone() for one in drive.in_turn()]
        assert not torch.equal(second[0], first[0])
        replayed = tensors_of(drive.replay())
        assert all(torch.equal(a, b) for a, b in zip(replayed, second, strict=True))
        assert all(a is b for a, b in zip(replayed, kept, strict=True)), "the same tensors at every replay"


def test_a_request_that_straddles_the_split_reads_what_the_first_microbatch_wrote() -> None:
    """The other way round, its rows would be NaN: the keys of this step are NaN until they are written."""
    with harness() as log:
        drive = Drive(Case(batch={"queries": [5, 7, 4], "contexts": [2, 0, 6]}), log)
        parts = drive.current.slices()
        assert [(p.request_slice, p.token_slice) for p in parts] == [
            (slice(0, 2), slice(0, 8)),
            (slice(1, 3), slice(8, 16)),
        ]
        assert not drive.step().isnan().any()
        for layer in drive.model.layers:
            layer.attention.cache.fill_(float("nan"))
        drive.current.fill_context(drive.model)
        alone = drive.microbatches_in_turn([1])[0]
        # 4 tokens of the straddling request, and 4 of the last one.
        assert alone.isnan().any(dim=1).tolist() == [True] * 4 + [False] * 4
