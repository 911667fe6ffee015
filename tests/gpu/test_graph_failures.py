"""A capture that fails, wherever it does, leaves nothing behind.

Run where there is a GPU: python -m pytest -m gpu
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run: python -m pytest -m gpu"),
]

from tests.gpu.stream_model import StreamModel, decode_step, make_runner  # noqa: E402


def healthy(model: Any, n: int = 2) -> None:
    """The process can do what a failed capture is known to break."""
    # The generator believes in a capture that never ended.
    assert torch.rand(4, device="cuda").shape == (4,)
    # The allocator sends what is allocated to the pool of the capture, and never frees what another stream used.
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    for _ in range(8):
        block = torch.empty(1 << 20, device="cuda")
        block.record_stream(side)
        with torch.cuda.stream(side):
            block.zero_()
        del block
        torch.cuda.synchronize()
    torch.empty(1, device="cuda")
    assert torch.cuda.memory_allocated() - held <= (1 << 22) + 4096
    # A capture works, and so does an eager step.
    runner = make_runner(model, n, graph_sizes=[8])
    runner.capture_graphs()
    eager = make_runner(model, n, graph_sizes=[8], use_graphs=False)
    step = decode_step(8, 3)
    assert torch.equal(runner.step(step).output, eager.step(step).output)


@pytest.mark.parametrize("what", ["raises", "reads back", "interrupted"])
@pytest.mark.parametrize("microbatch", [0, 1])
def test_a_capture_that_fails_leaves_a_usable_process(what: str, microbatch: int) -> None:
    from dbo_greenlet import dbo_current_ubatch_id, dbo_enabled
    from dbo_greenlet.errors import GraphCaptureError

    unwound: list[int] = []

    class Breakable(StreamModel):
        def __call__(self, step: Any) -> Any:
            capturing = torch.cuda.is_current_stream_capturing()
            try:
                return super().__call__(step)
            finally:
                if capturing:
                    unwound.append(dbo_current_ubatch_id())

    def bad(layer: int) -> None:
        if layer == 2 and dbo_current_ubatch_id() == microbatch and torch.cuda.is_current_stream_capturing():
            if what == "raises":
                raise ValueError("no such expert")
            if what == "interrupted":
                raise KeyboardInterrupt
            torch.ones(1, device="cuda").item()

    model = Breakable()
    model.break_at = bad
    runner = make_runner(model, 2, graph_sizes=[8])
    expected = KeyboardInterrupt if what == "interrupted" else GraphCaptureError
    with pytest.raises(expected) as caught:
        runner.capture_graphs()
    # The one that failed, then its sibling, wherever it was parked.
    assert unwound == [microbatch, 1 - microbatch]
    if what != "interrupted":
        text = str(caught.value)
        assert text.startswith("the step of 8 tokens in 2 microbatch(es): not captured into a CUDA graph")
        assert f"in microbatch {microbatch}" in text and "'layer2.dispatch'" in text
        assert ("no such expert" if what == "raises" else "nothing may be read back from the device") in text
    assert not dbo_enabled() and not torch.cuda.is_current_stream_capturing()
    healthy(StreamModel())
    # The same runner, once the fault is gone.
    model.break_at = lambda layer: None
    runner.capture_graphs()
    step = decode_step(7, 4)
    eager = make_runner(model, 2, graph_sizes=[8], use_graphs=False)
    assert torch.equal(runner.step(step).output, eager.step(step).output)


@pytest.mark.parametrize("where", ["capture_begin", "capture_end", "instantiation"])
@pytest.mark.parametrize("kind", ["error", "interrupt"])
def test_a_failure_at_either_end_of_a_capture(where: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from dbo_greenlet.devices.cuda import CudaDevice
    from dbo_greenlet.errors import GraphCaptureError
    from dbo_greenlet.graphs import GraphPool

    error = RuntimeError("CUDA error: out of memory") if kind == "error" else KeyboardInterrupt()
    device = CudaDevice()
    pool = GraphPool(device)
    x = torch.ones(4, device="cuda")
    kept = pool.capture(lambda: x * 2)

    armed = [True]

    class Failing(torch.cuda.CUDAGraph):
        def capture_begin(self, *args: Any, **options: Any) -> None:
            super().capture_begin(*args, **options)
            self.fail("capture_begin")

        def capture_end(self) -> None:
            self.fail("capture_end")
            super().capture_end()
            self.fail("instantiation")

        def fail(self, here: str) -> None:
            if armed and here == where:
                armed.clear()
                raise error

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Failing)
    with pytest.raises(KeyboardInterrupt if kind == "interrupt" else GraphCaptureError):
        pool.capture(lambda: x * 3)
    monkeypatch.undo()
    with device.stream_scope(pool.stream):
        assert not torch.cuda.is_current_stream_capturing()
    healthy(StreamModel())
    kept.replay()
    again = pool.capture(lambda: x * 5)
    again.replay()
    torch.cuda.synchronize()
    assert (kept.output.tolist(), again.output.tolist()) == ([2.0] * 4, [5.0] * 4)


def test_a_stream_that_is_not_joined_is_an_error_and_no_disaster() -> None:
    from dbo_greenlet.devices.cuda import CudaDevice
    from dbo_greenlet.errors import GraphCaptureError
    from dbo_greenlet.graphs import GraphPool

    device = CudaDevice()
    pool, astray = GraphPool(device), torch.cuda.Stream()
    x = torch.ones(4, device="cuda")

    def run() -> Any:
        astray.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(astray):
            return x + 1

    with pytest.raises(GraphCaptureError, match="unjoined|not permitted"):
        pool.capture(run)
    healthy(StreamModel())
    captured = pool.capture(lambda: x * 3)
    captured.replay()
    torch.cuda.synchronize()
    assert captured.output.tolist() == [3.0] * 4
