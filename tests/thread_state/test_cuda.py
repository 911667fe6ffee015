"""What CUDA keeps per thread: the current stream and the current device belong to the microbatch, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dbo_greenlet import Scheduler, dbo_yield, make_ubatch_contexts
from dbo_greenlet.errors import MicrobatchFailed

pytestmark = pytest.mark.gpu


def on_a_stream_of_its_own(stream: Any) -> list[int]:
    seen = []
    with torch.cuda.stream(stream):
        for _ in range(3):
            seen.append(torch.cuda.current_stream().cuda_stream)
            dbo_yield("a")
    return [*seen, torch.cuda.current_stream().cuda_stream]


@pytest.mark.parametrize("with_contexts", [False, True])
def test_the_current_stream_belongs_to_the_microbatch(with_contexts: bool) -> None:
    torch.cuda.init()
    outer = torch.cuda.current_stream().cuda_stream
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    contexts = None
    if with_contexts:
        from dbo_greenlet.devices.cuda import CudaDevice

        contexts = make_ubatch_contexts(2, device=CudaDevice())
    step = Scheduler().run([lambda s=s: on_a_stream_of_its_own(s) for s in streams], contexts)
    assert step.outputs == [[s.cuda_stream] * 3 + [outer] for s in streams]
    assert torch.cuda.current_stream().cuda_stream == outer


def test_a_stream_that_a_failing_microbatch_left_on_is_taken_off() -> None:
    torch.cuda.init()
    outer = torch.cuda.current_stream().cuda_stream

    def failing() -> None:
        torch.cuda.set_stream(torch.cuda.Stream())
        dbo_yield("a")
        raise ArithmeticError

    with pytest.raises(MicrobatchFailed):
        Scheduler().run([failing, failing])
    assert torch.cuda.current_stream().cuda_stream == outer


def test_the_current_device_belongs_to_the_microbatch() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    torch.cuda.init()
    outer = torch.cuda.current_device()

    def entry(index: int) -> list[int]:
        seen = []
        with torch.cuda.device(index):
            for _ in range(3):
                seen.append(torch.cuda.current_device())
                dbo_yield("a")
        return [*seen, torch.cuda.current_device()]

    step = Scheduler().run([lambda: entry(1), lambda: entry(0)])
    assert step.outputs == [[1, 1, 1, outer], [0, 0, 0, outer]]
    assert torch.cuda.current_device() == outer


@pytest.mark.parametrize("carrier", ["greenlet", "thread"])
def test_microbatches_begin_on_the_callers_device(carrier: str) -> None:
    """Whatever carries them: a new OS thread stands on GPU 0, and kernels would go there."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    torch.cuda.init()

    def entry() -> list[Any]:
        seen = [torch.cuda.current_device(), torch.zeros(1, device="cuda").device.index]
        dbo_yield("a")
        return [*seen, torch.cuda.current_device()]

    with torch.cuda.device(1):
        assert Scheduler(carrier=carrier).run([entry, entry]).outputs == [[1, 1, 1], [1, 1, 1]]
