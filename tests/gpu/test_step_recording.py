"""What recorders see of steps on CUDA: streams by name, events, memory and what is held. Run: pytest -m gpu"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run: python -m pytest -m gpu"),
]


def high_throughput(contexts: list[Any], work: Any = None) -> Any:
    from dbo_greenlet.yields import dbo_switch_to_compute_sync, dbo_yield_and_switch_from_compute_to_comm

    def entry() -> None:
        dbo_yield_and_switch_from_compute_to_comm("layer0.before_dispatch")
        if work is not None:
            work()
        dbo_switch_to_compute_sync()

    return entry


def test_the_step_recorder_names_streams_and_events() -> None:
    from dbo_greenlet import Scheduler
    from dbo_greenlet.devices.cuda import CudaDevice
    from dbo_greenlet.gpu_timeline import GpuTimeline
    from dbo_greenlet.microbatch import make_ubatch_contexts
    from dbo_greenlet.trace import OpRecord, SliceRecord, StepRecorder

    recorder = StepRecorder()
    timeline = GpuTimeline(recorder.device(CudaDevice()))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # not the default stream, which alone is called "compute" by the device
        contexts = make_ubatch_contexts(2, device=recorder.device(CudaDevice()))
        for timed in (False, True):
            bracket = timeline.eager(contexts) if timed else None
            Scheduler(instruments=[recorder]).run([high_throughput(contexts)] * 2, contexts, bracket=bracket)
            records = recorder.records(step=0)
            assert [r.stream for r in records if isinstance(r, SliceRecord)] == ["compute"] * 4
            # The timeline's own events are no part of the program.
            assert [(r.op, r.ubatch, r.slice, r.stream, r.of) for r in records if isinstance(r, OpRecord)] == [
                ("record", 0, 0, "compute", None),
                ("record", 1, 0, "compute", None),
                ("wait", 0, 1, "comm", 0),
                ("record", 0, 1, "comm", None),
                ("wait", 0, 1, "compute", 3),
                ("wait", 1, 1, "comm", 1),
                ("record", 1, 1, "comm", None),
                ("wait", 1, 1, "compute", 6),
            ]
            if bracket is not None:
                assert len(bracket.read()) == 4


def test_the_memory_recorder_sees_frees_holds_and_host_waits() -> None:
    from dbo_greenlet import Scheduler
    from dbo_greenlet.devices.cuda import CudaDevice
    from dbo_greenlet.memory_recorder import MemoryRecorder
    from dbo_greenlet.microbatch import make_ubatch_contexts

    memory = MemoryRecorder(CudaDevice())
    contexts = make_ubatch_contexts(1, device=memory.device)
    given = torch.ones(1024, device="cuda")
    addresses = []

    def on_comm() -> None:
        made = given * 2
        made.record_stream(torch.cuda.default_stream())
        addresses.append(made.data_ptr())
        del made
        given.sum().item()

    Scheduler(instruments=[memory]).run([high_throughput(contexts, on_comm)], contexts)
    torch.cuda.synchronize()
    records = memory.records(step=0)
    assert [(r.op, r.name.rpartition("made by ")[2].rstrip(")"), r.stream) for r in records] == [
        ("record", "record", "compute"),
        ("wait", "wait", "comm"),
        ("work", "mul", "comm"),
        ("hold", "record_stream", "compute"),
        ("free", "mul", "comm"),
        ("work", "sum", "comm"),
        ("work", "_local_scalar_dense", "comm"),
        ("host_wait", "the host reads _local_scalar_dense", "comm"),
        ("free", "sum", "comm"),
        ("record", "record", "comm"),
        ("wait", "wait", "compute"),
    ]
    hold, free = records[3], records[4]
    assert hold.memory == [["read", addresses[0], 0, 4096]] and free.memory == [["write", addresses[0], 0, 4096]]
