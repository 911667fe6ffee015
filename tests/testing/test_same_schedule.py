"""One schedule everywhere: eager, thread carrier, captured, a virtual device, a model of torch: one hash (law 5).

And what it does everywhere: every receive before its use (law 4), program order kept (law 6), outputs of the same bits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dbo_greenlet import Scheduler, policy_from_text
from dbo_greenlet.devices.virtual import VirtualDevice
from dbo_greenlet.schedule import Schedule
from dbo_greenlet.stream_program import Operation
from dbo_greenlet.testing.layer_programs import HighThroughput, high_throughput, low_latency
from dbo_greenlet.testing.step_run import Build, StepUnderTest, TestBed, run_in_turn, run_step
from dbo_greenlet.trace.notation import order

POLICIES = ["round_robin", "in_turn", "phase_offset:1", "phase_offset:2", "phase_offset:3", "random:7", "random:8"]
POLICIES += ["pct:1,depth=3,length=20", "pct:4,depth=5,length=20"]
LAYERS = 3


class NoCounts(HighThroughput):
    """The host waits for nothing, so that it can be captured."""

    host_blocks = False


PROGRAMS: dict[str, Callable[[], Build]] = {
    "low latency": lambda: low_latency(LAYERS),
    "high throughput": lambda: high_throughput(LAYERS, kind=NoCounts),
}

every_program = pytest.mark.parametrize("program", PROGRAMS)
every_policy = pytest.mark.parametrize("policy", POLICIES)
every_count = pytest.mark.parametrize("count", [1, 2, 3, 4])


def captured(build: Build, policy: str, count: int) -> tuple[Schedule, list[Any], VirtualDevice, Any]:
    """The step, run once into a graph of the virtual device, and the graph replayed twice."""
    device = VirtualDevice()
    bed = TestBed(device, count)
    step = build(bed)
    assert isinstance(step, StepUnderTest)
    contexts = bed.contexts()
    scheduler = Scheduler(policy_from_text(policy), strict=True)
    streams = [contexts[0].compute_stream, contexts[0].comm_stream]
    graph = device.capture(lambda: scheduler.run(step.entries, contexts), streams)
    graph.replay()
    graph.replay()
    return graph.output.schedule, graph.output.outputs, device, graph


def words(operations: list[Operation]) -> list[tuple[Any, ...]]:
    """What was enqueued, where, by whom, in order."""
    return [(o.kind, o.stream, o.name, o.microbatch, o.slice, o.site, o.event, o.of) for o in operations]


@every_program
@every_policy
@every_count
def test_eager_threads_and_capture_take_the_same_decisions(program: str, policy: str, count: int) -> None:
    build = PROGRAMS[program]()
    eager = run_step(build, policy_from_text(policy), count=count)
    threads = run_step(build, policy_from_text(policy), count=count, carrier="thread")
    schedule, outputs, _, graph = captured(build, policy, count)
    assert eager.error is None and threads.error is None
    assert eager.left_behind == threads.left_behind == []
    assert eager.schedule == threads.schedule == schedule
    assert len({eager.schedule.hash, threads.schedule.hash, schedule.hash}) == 1
    assert eager.outputs == threads.outputs == outputs == run_in_turn(build, count=count)
    # Not only the decisions: what they enqueue. The join of the streams is the graph's own.
    assert eager.program is not None and threads.program is not None
    assert words(eager.program.operations) == words(threads.program.operations)
    assert words(graph.operations) == words(eager.program.operations)[: len(graph.operations)]
    assert len(eager.program.operations) == len(graph.operations) + 2


@every_policy
def test_a_step_in_another_thread_or_after_others_has_the_same_hash(policy: str) -> None:
    build, found = PROGRAMS["low latency"](), []
    for _ in range(3):
        worker = threading.Thread(target=lambda: found.append(run_step(build, policy_from_text(policy)).schedule.hash))
        worker.start()
        worker.join()
        found.append(run_step(build, policy_from_text(policy)).schedule.hash)
    assert len(found) == 6 and len(set(found)) == 1


@every_policy
@every_count
def test_costs_change_the_times_and_never_the_schedule(policy: str, count: int) -> None:
    build = PROGRAMS["low latency"]()
    runs = [
        run_step(
            build, policy_from_text(policy), count=count, make_device=lambda launch=launch: VirtualDevice(launch=launch)
        )
        for launch in (0.0, 3.0, 50.0)
    ]
    assert len({run.schedule.hash for run in runs}) == 1
    assert len({run.program.operations[-1].end for run in runs}) == 3


@every_policy
@every_count
def test_law_4_holds_on_the_virtual_device(policy: str, count: int) -> None:
    """Each transfer is received once, after its send, before its owner's next work; and the notation says the same."""
    run = run_step(low_latency(LAYERS), policy_from_text(policy), count=count)
    operations = run.program.operations
    assert [each.received for each in run.program.transfers] == [1] * (2 * LAYERS * count)
    for receive in operations:
        if receive.kind == "receive":
            sent = next(o for o in operations if o.kind == "send" and o.transfer is receive.transfer)
            assert sent.number < receive.number
            between = operations[sent.number + 1 : receive.number]
            own = [o.name for o in between if o.microbatch == sent.microbatch and o.kind == "work"]
            # The shared expert is of the slice that sends, and uses nothing of what comes.
            assert own in ([], ["S"])
    items = [item for item in order(run.schedule.decisions, run.schedule.sites) if item.piece != "in"]
    assert [said(item) for item in items] == [done(o) for o in operations if o.kind in ("work", "send", "receive")]


def said(item: Any) -> tuple[str, str, int]:
    return {"send": "send", "recv": "receive"}.get(item.action, "work"), item.piece, item.microbatch


def done(operation: Operation) -> tuple[str, str, int | None]:
    owner = operation.microbatch if operation.transfer is None else operation.transfer.owner
    return operation.kind, operation.name, owner


@every_program
@every_policy
@every_count
def test_law_6_holds_on_the_virtual_device(program: str, policy: str, count: int) -> None:
    """In each layer the attention of a microbatch lies on the compute stream behind that of every earlier one."""
    run = run_step(PROGRAMS[program](), policy_from_text(policy), count=count)
    seen = [0] * count
    for operation in run.program.operations:
        if operation.name == "A1" and operation.microbatch is not None:
            layer = seen[operation.microbatch]
            assert all(before > layer for before in seen[: operation.microbatch])
            seen[operation.microbatch] += 1
    assert seen == [LAYERS] * count


# -- and of a model of torch -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Any:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from dbo_greenlet.moe import DeepseekV2Model
    from tests.runner import tiny

    config = replace(tiny.CONFIG, num_hidden_layers=LAYERS, first_k_dense_replace=0)
    model = DeepseekV2Model(config, tiny.Loopback(config.n_routed_experts)).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 1 + 0.1 * noise)
    return model


@every_policy
@pytest.mark.parametrize("count", [2, 3])
def test_a_model_on_the_cpu_takes_the_decisions_of_the_virtual_device(model: Any, policy: str, count: int) -> None:
    import torch

    from dbo_greenlet import Runner
    from dbo_greenlet.batching import VoteSettings
    from dbo_greenlet.moe import KVCache
    from tests.runner.tiny import ROW_LENGTH, ROWS, tiny_step

    virtual = run_step(low_latency(LAYERS), policy_from_text(policy), count=count).schedule
    step = tiny_step([(0, 0, 11), (1, 0, 6), (2, 0, 5)])
    outputs = {}
    for carrier, mode in (("greenlet", "auto"), ("thread", "auto"), ("greenlet", "sequential")):
        cache = KVCache(model.config, ROWS, ROW_LENGTH)
        settings = VoteSettings(count, count, count)
        runner = Runner(
            model, kv_cache=cache, settings=settings, policy=policy_from_text(policy), carrier=carrier, strict=True
        )
        out = runner.step(step, mode=mode)
        outputs[carrier, mode] = out.output
        if mode == "auto":
            assert out.schedule == virtual and out.schedule.hash == virtual.hash
    # Law 4, and law 6: the requests are cut across the boundary, so a wrong order reads KV that is not there.
    first, *others = outputs.values()
    assert all(torch.equal(first, other) for other in others)
