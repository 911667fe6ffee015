"""Traces to look at with the lint: real steps on the virtual device, recorded by the real recorder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dbo_greenlet.devices.virtual import VirtualDevice
from dbo_greenlet.gpu_timeline import GpuTimeline
from dbo_greenlet.microbatch import UBatchContext, make_ubatch_contexts
from dbo_greenlet.policy import Policy
from dbo_greenlet.scheduler import Scheduler
from dbo_greenlet.testing.step_run import StepUnderTest, TestBed, run_step
from dbo_greenlet.trace import StepRecorder, make_header
from dbo_greenlet.trace.files import TraceFiles
from dbo_greenlet.trace.lint import Report, choose_rules, lint_trace
from dbo_greenlet.trace.op_records import Freed, op_records
from dbo_greenlet.trace.records import OpRecord, Record, StepRecord
from dbo_greenlet.trace.schema import to_json

TOKENS = 16
# Of a step of two microbatches that was recorded by other means than `recorded`.
STEP = StepRecord(0, 0, "dbo", 8, 8, True, "split", slices=[[0, 4, 0, 1], [4, 8, 1, 2]], requests=[0, 1])


def recorded(
    build: Callable[[TestBed], Any],
    policy: Policy | None = None,
    *,
    count: int = 2,
    step: int = 0,
    rank: int = 0,
    run: str = "dbo",
    memory: bool = True,
    freed: Sequence[Freed] = (),
    **of_step: Any,
) -> list[Any]:
    """The records of one step: its slices, windows and operations, and the step record, with `of_step` changed in it.

    Without `memory` the operations are the events alone, as the recorder has them by itself. `freed` may be filled
    while the step runs.
    """
    device = VirtualDevice(launch=5.0, record=1.0, wait=1.0)
    device.program.clock = device.clock
    recorder = StepRecorder(clock=device.clock)
    twin = recorder.device(device)

    def with_contexts(bed: TestBed) -> StepUnderTest:
        made = build(bed)
        under_test = made if isinstance(made, StepUnderTest) else StepUnderTest(made)
        contexts = make_ubatch_contexts(count, device=twin)
        under_test.contexts = contexts
        if under_test.after is None:
            under_test.after = lambda: join(twin, contexts[0])
        return under_test

    ran = run_step(
        with_contexts, policy, count=count, make_device=lambda: device, instruments=[recorder], strict=False,
        outputs=False,
    )  # fmt: skip
    records = recorder.records(step=step, rank=rank, run=run)
    if memory:
        records = [each for each in records if not isinstance(each, OpRecord)]
        records += op_records(device.program, step=step, rank=rank, run=run, freed=freed)
    size = TOKENS // count
    slices = [[i * size, (i + 1) * size, i, i + 1] for i in range(count)]
    record = StepRecord(
        step, rank, run, TOKENS, TOKENS, True, "split", slices=slices,
        schedule=ran.schedule.encode(), hash=ran.schedule.hash, error=recorder.error, begin=recorder.begin,
        end=recorder.end, requests=list(range(count)),
    )  # fmt: skip
    return [*records, replace(record, **of_step)]


def join(device: Any, context: UBatchContext) -> None:
    """What a runner does behind a step."""
    event = device.new_event()
    device.record(event, context.comm_stream)
    device.wait(context.compute_stream, event)


def header(**settings: Any) -> Any:
    """A header without this machine's environment."""
    env = settings.pop("env", {})
    world, rank = settings.pop("world", 1), settings.pop("rank", 0)
    return replace(make_header(rank=rank, world=world, settings=settings), env=env, torch="2.11.0+cu130")


def write(path: Path, *records: Record | Iterable[Record]) -> Path:
    """A trace file."""
    lines = [to_json(each) for some in records for each in (some if isinstance(some, (list, tuple)) else [some])]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def look(*paths: Path, only: Sequence[str] = (), **options: Any) -> Report:
    return lint_trace(TraceFiles(list(paths)), rules=choose_rules(only), **options)


def found(report: Report) -> list[tuple[Any, ...]]:
    """(rule, count, step, rank, microbatch, slice, site) of each finding."""
    return [
        (
            each.rule.id, each.count, each.place.step, each.place.rank, each.place.microbatch, each.place.slice,
            each.place.site,
        )
        for each in report.findings
    ]  # fmt: skip


def missing(report: Report) -> dict[str, str]:
    """Why rules have not looked, by id."""
    return {each.rule.id: each.why for each in report.not_checked}


def timed(
    steps: int,
    entry: Callable[[VirtualDevice, int, int], None],
    policy: Policy | None = None,
    *,
    count: int = 2,
    rank: int = 0,
    run: str = "dbo",
) -> list[Any]:
    """The records of several steps on one virtual GPU with a timeline, `entry(device, step, microbatch)` each."""
    device = VirtualDevice(launch=5.0, record=1.0, wait=1.0)
    recorder = StepRecorder(clock=device.clock)
    timeline = GpuTimeline(device, clock=device.clock, capturing=device.capturing)
    comm = device.new_stream("comm")
    records: list[Any] = []
    size = TOKENS // count
    for step in range(steps):
        contexts = make_ubatch_contexts(count, comm_stream=comm, device=device)
        events = timeline.eager(contexts)
        entries = [partial(entry, device, step, index) for index in range(count)]
        scheduler = Scheduler(policy=policy, strict=False, instruments=[recorder])
        ran = scheduler.run(entries, contexts, bracket=events)
        device.synchronize()
        same = {"step": step, "rank": rank, "run": run}
        records += [*recorder.records(**same), *events.records(**same, origin_ns=recorder.origin_ns)]
        records.append(
            StepRecord(
                **same,
                tokens=TOKENS,
                padded=TOKENS,
                split=True,
                reason="split-decode",
                slices=[[i * size, (i + 1) * size, i, i + 1] for i in range(count)],
                schedule=ran.schedule.encode(),
                hash=ran.schedule.hash,
                requests=list(range(count)),
            )
        )
    return records
