"""Operators, streams and events of a GPU, recorded: clean where they are right, and the missing edge named where not.

GPU: python -m pytest -m gpu tests/gpu/test_hazards.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run: python -m pytest -m gpu"),
]


def record(forward: Callable[[int], Any], count: int = 2) -> tuple[Any, Any, list[Any]]:
    """One recorded step on a compute and a comm stream, joined: its program, schedule and outputs."""
    from dbo_greenlet import Scheduler
    from dbo_greenlet.devices.cuda import CudaDevice
    from dbo_greenlet.microbatch import make_ubatch_contexts
    from dbo_greenlet.testing.torch_accesses import recorded_step

    torch.cuda.init()
    with recorded_step(CudaDevice()) as recording:
        contexts = make_ubatch_contexts(count, device=recording.device)
        result = Scheduler().run([partial(forward, i) for i in range(count)], contexts)
        event = recording.device.new_event()
        recording.device.record(event, contexts[0].comm_stream)
        recording.device.wait(contexts[0].compute_stream, event)
    torch.cuda.synchronize()
    return recording.program, result.schedule, result.outputs


def plain(forward: Callable[[int], Any], count: int = 2) -> tuple[Any, list[Any]]:
    from dbo_greenlet import Scheduler
    from dbo_greenlet.devices.cuda import CudaDevice
    from dbo_greenlet.microbatch import make_ubatch_contexts

    contexts = make_ubatch_contexts(count, device=CudaDevice())
    result = Scheduler().run([partial(forward, i) for i in range(count)], contexts)
    torch.cuda.synchronize()
    return result.schedule, result.outputs


def on_gpu(step: Any) -> Any:
    names = ("positions", "query_start_loc", "seq_lens", "slot_mapping", "request_rows", "input_ids")
    return dataclasses.replace(step, **{name: getattr(step, name).cuda() for name in names})


def test_the_stream_model_is_clean_and_runs_as_without_recording() -> None:
    from dbo_greenlet.testing.hazards import find_hazards
    from tests.gpu.stream_model import StreamModel, decode_step

    model, steps = StreamModel(), [decode_step(8, seed) for seed in range(2)]
    schedule, outputs = plain(lambda i: model(steps[i]))
    program, recorded_schedule, recorded = record(lambda i: model(steps[i]))
    assert find_hazards(program) == []
    assert recorded_schedule == schedule
    assert all(map(torch.equal, recorded, outputs))
    # Communication was seen where it ran, and so were the events.
    streams = {(each.name, each.stream) for each in program.operations if each.kind == "work"}
    assert ("flip", "comm") in streams
    assert ("tanh", "compute") in streams
    assert {each.kind for each in program.operations} == {"work", "record", "wait"}


@pytest.mark.parametrize("missing", ["record and wait before", "wait after"])
def test_a_missing_event_is_a_race_between_the_two_kernels(missing: str) -> None:
    from dbo_greenlet import yields as y
    from dbo_greenlet.testing.hazards import find_hazards

    weight = torch.eye(64, device="cuda")

    def forward(i: int) -> Any:
        x = weight @ weight
        if missing == "wait after":
            y.dbo_yield_and_switch_from_compute_to_comm("dispatch")
        else:
            y.dbo_yield("dispatch")
            y.dbo_switch_to_comm()
        sent = x.flip(1)
        if missing == "wait after":
            y.dbo_yield("combine")
            y.dbo_switch_to_compute()
        else:
            y.dbo_yield_and_switch_from_comm_to_compute("combine")
        return x + sent

    program, _, _ = record(forward)
    found = [(each.kind, each.first.name, each.second and each.second.name) for each in find_hazards(program)]
    pair = ("race", "flip", "add") if missing == "wait after" else ("race", "mm", "flip")
    assert found == [pair] * 2
    assert all("test_hazards.py:" in str(each) for each in find_hazards(program))


def test_reading_a_result_on_the_host_puts_what_follows_behind_it() -> None:
    from dbo_greenlet import yields as y
    from dbo_greenlet.testing.hazards import find_hazards

    def forward(reads: bool, i: int) -> Any:
        y.dbo_switch_to_comm()
        rows = torch.full((64,), float(i), device="cuda")
        if reads:
            rows.cpu()
        y.dbo_switch_to_compute()
        return rows + 1

    assert [each.kind for each in find_hazards(record(partial(forward, False))[0])] == ["race"] * 2
    program = record(partial(forward, True))[0]
    assert find_hazards(program) == []
    assert sum(each.kind == "host_wait" for each in program.operations) == 2


def test_work_of_the_host_is_no_work_of_a_stream() -> None:
    def forward(i: int) -> Any:
        (torch.ones(3) * 2).tolist()
        return torch.ones(3, device="cuda") * 2

    program, _, _ = record(forward)
    assert [each.name for each in program.operations if each.kind == "work"].count("mul") == 2


def test_the_model_over_loopback_is_clean() -> None:
    from dbo_greenlet.all2all.loopback import Loopback
    from dbo_greenlet.batching import UBatchBuffers, slice_all
    from dbo_greenlet.batching.slices import split_step
    from dbo_greenlet.devices.cuda import CudaDevice
    from dbo_greenlet.moe import DeepseekV2Model, KVCache
    from dbo_greenlet.testing.hazards import find_hazards
    from tests.runner.tiny import CONFIG, ROW_LENGTH, ROWS, tiny_model, tiny_step

    assert CudaDevice().name.startswith("cuda")
    for static in (False, True):
        model = DeepseekV2Model(CONFIG, Loopback(4, static_shapes=static), device="cuda").eval()
        model.load_state_dict(tiny_model().state_dict())
        cache = KVCache(CONFIG, ROWS, ROW_LENGTH, device="cuda", static_shapes=static)
        step = on_gpu(tiny_step([(0, 0, 9), (1, 3, 1), (2, 5, 7), (3, 2, 1)]))
        slices = slice_all(step, split_step(step, 2), UBatchBuffers(8, 2, torch.device("cuda")))
        program, _, outputs = record(lambda i, model=model, slices=slices, cache=cache: model(slices[i], cache))
        assert find_hazards(program) == []
        assert all(bool(each.isfinite().all()) for each in outputs)
        names = {each.name for each in program.operations if each.kind == "work"}
        assert {"index_copy_", "mm", "bmm"} <= names
        waits = sum(each.kind == "host_wait" for each in program.operations)
        assert (waits == 0) is static  # exact rows are counted on the host
