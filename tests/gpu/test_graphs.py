"""Steps captured as CUDA graphs: equal to eager bit for bit, and what they share and keep.

Run where there is a GPU: python -m pytest -m gpu
"""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run: python -m pytest -m gpu"),
]

from tests.gpu.stream_model import LAYERS, WIDTH, StreamModel, decode_step, make_runner  # noqa: E402


@pytest.mark.parametrize("n", [2, 3, 4])
def test_replays_equal_eager_bit_for_bit(n: int) -> None:
    model = StreamModel()
    graphs = make_runner(model, n, graph_sizes=[8, 16])
    eager = make_runner(model, n, graph_sizes=[8, 16], use_graphs=False)
    captured = graphs.capture_graphs()
    assert [(c.size, c.microbatches) for c in captured] == [(16, n), (16, 1), (8, n), (8, 1)]
    for round_ in range(3):
        # Few enough padding tokens: whatever N is, the last microbatch has a real token.
        for count in (16, 7, 15, 8, 1):
            step = decode_step(count, 10 * round_ + count)
            for mode in ("auto", "never") if count > 1 else ("auto",):
                a, b = graphs.step(step, mode=mode), eager.step(step, mode=mode)
                assert torch.equal(a.output, b.output)
                if a.decision.split:
                    assert torch.equal(a.output, eager.step(step, mode="sequential").output)
                assert a.output.shape == (count, WIDTH)
                # "never" and "auto" ask for different graphs of one pool, alternately.
                assert (a.execution, b.execution) == ("replayed", "eager")
                assert a.decision == b.decision and a.slices == b.slices
                assert a.schedule == b.schedule and a.yields == b.yields


def test_the_schedule_of_a_capture_is_that_of_eager() -> None:
    model = StreamModel()
    graphs = make_runner(model, 2, graph_sizes=[8])
    (split, _) = graphs.capture_graphs()
    eager = make_runner(model, 2, graph_sizes=[8], use_graphs=False).step(decode_step(8))
    assert split.schedule.hash == eager.schedule.hash and split.schedule == eager.schedule


def test_a_replay_allocates_nothing_and_addresses_stay() -> None:
    graphs = make_runner(StreamModel(), 2, graph_sizes=[16])
    graphs.capture_graphs()
    steps = [decode_step(count, count) for count in (16, 12, 16, 9)]
    addresses = {graphs.step(step).output.data_ptr() for step in steps}
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for step in steps:
        addresses.add(graphs.step(step).output.data_ptr())
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert len(addresses) == 1


def test_outputs_of_steps_that_graphs_are_not_made_for() -> None:
    model = StreamModel()
    graphs = make_runner(model, 2, graph_sizes=[8])
    graphs.capture_graphs()
    large = decode_step(20)
    assert graphs.step(large).execution == "eager"
    assert torch.equal(graphs.step(large).output, make_runner(model, 2).step(large).output)


def test_a_pool_whose_graphs_are_gone_is_used_again() -> None:
    from dbo_greenlet.devices.cuda import CudaDevice
    from dbo_greenlet.graphs import GraphPool

    pool = GraphPool(CudaDevice())
    x = torch.ones(4, device="cuda")
    for factor in range(4):
        captured = pool.capture(lambda factor=factor: x * factor)
        captured.replay()
        torch.cuda.synchronize()
        assert captured.output.tolist() == [float(factor)] * 4
        del captured


def test_graphs_after_a_larger_eager_step_and_on_another_stream() -> None:
    model = StreamModel()
    runner = make_runner(model, 2, graph_sizes=[8], max_requests=8)
    eager = make_runner(model, 2, graph_sizes=[8], use_graphs=False)
    runner.capture_graphs()
    runner.step(decode_step(40))  # more requests than it had buffers for: these are made anew
    gc.collect()
    torch.cuda.empty_cache()
    scribble = [torch.full((64,), -1, dtype=torch.int32, device="cuda") for _ in range(64)]
    side = torch.cuda.Stream()
    expected = {count: eager.step(decode_step(count, count)).output.clone() for count in (8, 7, 6)}
    torch.cuda.synchronize()
    for _ in range(5):
        # Enqueued on two streams in turn, with nobody waiting in between: the buffers are the same.
        outputs = {}
        for count, stream in ((8, side), (7, torch.cuda.default_stream()), (6, side)):
            with torch.cuda.stream(stream):
                out = runner.step(decode_step(count, count))
                assert out.execution == "replayed"
                outputs[count] = out.output.clone()
        torch.cuda.synchronize()
        assert all(torch.equal(outputs[count], expected[count]) for count in outputs)
    assert all(bool((each == -1).all()) for each in scribble)


def test_another_thread_that_copies_does_not_spoil_a_capture() -> None:
    model = StreamModel()
    stop, copies, wrong = threading.Event(), [0], []

    def copy() -> None:
        stream = torch.cuda.Stream()
        pinned = torch.arange(1 << 16, dtype=torch.float32).pin_memory()
        with torch.cuda.stream(stream):
            while not stop.is_set():
                there = pinned.to("cuda", non_blocking=True)
                torch.cuda.current_stream().synchronize()
                if float(there[-1]) != (1 << 16) - 1:
                    wrong.append(float(there[-1]))
                    return
                # A new allocation on the device and on the host, which a capture in global mode does not survive.
                pinned = (
                    torch.empty((1 << 16) + copies[0] % 7, dtype=torch.float32)[: 1 << 16].copy_(pinned).pin_memory()
                )
                torch.cuda.empty_cache()
                copies[0] += 1

    thread = threading.Thread(target=copy)
    thread.start()
    try:
        deadline = time.monotonic() + 20
        while not copies[0] and time.monotonic() < deadline:
            time.sleep(0.001)
        runner, done = make_runner(model, 2, graph_sizes=[2, 4, 8]), copies[0]
        runner.capture_graphs()
        assert copies[0] > done
    finally:
        stop.set()
        thread.join()
    assert wrong == []
    step = decode_step(8, 2)
    eager = make_runner(model, 2, graph_sizes=[2, 4, 8], use_graphs=False)
    out = runner.step(step)
    assert out.execution == "replayed" and torch.equal(out.output, eager.step(step).output)


def test_graphs_share_their_memory_and_give_it_back() -> None:
    model = StreamModel()
    runner = make_runner(model, 2, graph_sizes=[8, 16, 32, 64])
    captured = runner.capture_graphs()
    first, *others = [c.captured.pool_bytes for c in captured]
    assert first > 0 and sum(others) <= first
    torch.cuda.synchronize()
    held = torch.cuda.memory_reserved()
    del runner, captured
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < held


@pytest.mark.parametrize("n", [2, 3])
def test_the_timeline_of_a_replay_changes_nothing_and_is_read_after_each(n: int) -> None:
    from dbo_greenlet.gpu_timeline import GpuTimeline

    model = StreamModel()
    plain = make_runner(model, n, graph_sizes=[16])
    timed = make_runner(model, n, graph_sizes=[16], timeline=GpuTimeline(plain.device))
    plain.capture_graphs()
    timed.capture_graphs()
    for count in (16, 13, 16):
        step = decode_step(count, count)
        a, b = timed.step(step), plain.step(step)
        assert torch.equal(a.output, b.output) and a.execution == b.execution == "replayed"
        assert b.timeline is None
        times = a.timeline.read()
        assert [t.microbatch for t in times] == list(a.schedule.decisions)
        assert [t.end_site for t in times] == list(a.schedule.sites)
        ends = [t.compute.end for t in times]
        assert ends == sorted(ends)
        # Each layer sleeps 300,000 cycles on the compute stream, and an H200 has no more than 2 GHz.
        assert sum(t.compute.end - t.compute.begin - t.compute.waited for t in times) > n * LAYERS * 150
        records = a.timeline.records(step=3, rank=0, run="dbo-graph", origin_ns=0)
        assert len(records) >= len(times)
    eager = make_runner(model, n, timeline=GpuTimeline(plain.device)).step(decode_step(20))
    assert eager.execution == "eager" and len(eager.timeline.read()) == len(eager.schedule.decisions)


def test_a_slice_can_be_captured_by_itself() -> None:
    """A bracket that captures every slice into a graph of its own; replayed in the order of the schedule."""
    from dbo_greenlet import Scheduler, make_ubatch_contexts
    from dbo_greenlet.devices.cuda import CudaDevice

    device = CudaDevice()
    stream = device.new_stream("graph")
    handle = torch.cuda.graph_pool_handle()
    graphs: list[Any] = []

    class SliceGraphs:
        def begin(self, slice: Any) -> None:
            graphs.append(torch.cuda.CUDAGraph())
            graphs[-1].capture_begin(pool=handle, capture_error_mode="thread_local")

        def end(self, slice: Any) -> None:
            graphs[-1].capture_end()

    weights = [torch.randn(64, 64, device="cuda") / 8 for _ in range(4)]
    inputs = [torch.zeros(8, 64, device="cuda") for _ in range(2)]

    def entry(i: int) -> Any:
        from dbo_greenlet import dbo_yield

        x = inputs[i]
        for layer, weight in enumerate(weights):
            x = torch.tanh(x @ weight)
            dbo_yield(f"layer{layer}")
        return x * 2

    entries = [lambda: entry(0), lambda: entry(1)]
    with device.stream_scope(stream):
        scheduler = Scheduler()
        contexts = make_ubatch_contexts(2, device=device)
        scheduler.run(entries, contexts)
        device.synchronize()
        outputs = scheduler.run(entries, contexts, bracket=SliceGraphs()).outputs
        assert len(graphs) == 10
        for _ in range(3):
            for x in inputs:
                x.copy_(torch.randn(8, 64, device="cuda"))
            expected = scheduler.run(entries, contexts).outputs
            for graph in graphs:
                graph.replay()
            device.synchronize()
            assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
