"""Running one step under test: what to run, where, and what came of it.

A step under test is a function that builds it anew for each run, because a run uses it up:

    def build(bed):
        hidden = bed.device.new_buffer("hidden")
        return [partial(forward, bed, i) for i in range(bed.count)]

    run = run_step(build, RoundRobin())
    run.schedule, run.outputs, run.error, run.program

`bed.device` is a virtual device unless another one is given, so a run needs no GPU, and its program and times are the
same each time. Nothing here judges; `explore`, `hazards` and `determinism` do.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError
from ..microbatch import UBatchContext, make_ubatch_contexts
from ..policy import Policy, RoundRobin
from ..schedule import Schedule
from ..scheduler import CARRIERS, Scheduler
from ..step import Step
from .checksum import checksum

if TYPE_CHECKING:
    from ..stream_program import StreamProgram
    from .faults import Faults

__all__ = ["Build", "StepRun", "StepRunner", "StepUnderTest", "TestBed", "run_in_turn", "run_step"]


class TestBed:
    """Where a step under test runs: one for each run.

    Attributes:
        device: a `VirtualDevice`, a `RecordingDevice`, or what `make_device` gave.
        count: number of microbatches N.
        faults: what is to go wrong in this run; None for nothing.
    """

    __test__ = False  # to pytest, a class called Test... is a test

    def __init__(self, device: Any, count: int, faults: Faults | None = None) -> None:
        self.device = device
        self.count = count
        self.faults = faults

    @property
    def program(self) -> StreamProgram | None:
        """What was enqueued; None where the device keeps no program."""
        return getattr(self.device, "program", None)

    def contexts(self, comm: Any = None) -> list[UBatchContext]:
        """One context for each microbatch, on the device's current stream and a comm stream."""
        return make_ubatch_contexts(self.count, comm_stream=comm, device=self.device)


@dataclass
class StepUnderTest:
    """What `build` may return instead of a plain list of entries.

    Attributes:
        entries: one callable per microbatch.
        contexts: one `UBatchContext` per microbatch; None: made from the bed's device.
        after: called when all microbatches have returned, before the device is asked for what happened: joins streams.
            None: the compute stream waits for the comm stream, as `Runner` has it.
        check: called with the outputs of a step that succeeded; raises `AssertionError` where they are wrong.
    """

    entries: Sequence[Callable[[], Any]]
    contexts: Sequence[UBatchContext] | None = None
    after: Callable[[], None] | None = None
    check: Callable[[list[Any]], None] | None = None


Build = Callable[[TestBed], "StepUnderTest | Sequence[Callable[[], Any]]"]


@dataclass(repr=False)
class StepRun:
    """What came of a run.

    Attributes:
        schedule: the decisions taken, with sites, as far as the step came.
        outputs: of each microbatch; None where the step failed.
        error: what the step or `check` raised, None where it succeeded.
        program: the operations that were enqueued; None where the device keeps none.
        runnable: for each decision the microbatches that could have run; empty unless `watch` was set.
        checksum: over the outputs; "" where the step failed or nobody asked.
        left_behind: what the step left that it should not have, one clause each.
        failed: the microbatch in whose slice the step failed; that slice is not in the schedule. None where no slice
            failed.
        faults: what was made to go wrong, as a string; "" for nothing.
        policy: name of the policy.
    """

    schedule: Schedule
    outputs: list[Any] | None = None
    error: BaseException | None = None
    program: StreamProgram | None = None
    runnable: list[tuple[int, ...]] = field(default_factory=list)
    checksum: str = ""
    left_behind: list[str] = field(default_factory=list)
    faults: str = ""
    policy: str = ""
    failed: int | None = None

    @property
    def succeeded(self) -> bool:
        return self.error is None

    def __repr__(self) -> str:
        # What a failing `assert run.succeeded` shows, cut off behind some eighty characters: the error comes first.
        if self.error is None:
            return f"<StepRun succeeded: {self.schedule.encode()}, policy {self.policy}>"
        return f"<StepRun failed: {type(self.error).__name__}: {self.error}; after {self.schedule.encode()}>"


class StepRunner:
    """Runs a step under test any number of times, each time built anew, on one scheduler.

    An exploration runs thousands. Args: see `run_step`.
    """

    def __init__(
        self,
        build: Build,
        *,
        count: int = 2,
        make_device: Callable[[], Any] | None = None,
        faults: Faults | None = None,
        carrier: str = "greenlet",
        strict: bool = True,
        thread_state: Any = "auto",
        instruments: Iterable[Any] = (),
        outputs: bool = True,
    ) -> None:
        self.build = _callable(build)
        self.count = count
        self.make_device = make_device or virtual_device()
        self.faults = faults
        self.outputs = outputs
        self.strict = strict
        self.thread_state = thread_state
        self._scheduler = Scheduler(carrier=carrier, strict=strict, thread_state=thread_state, instruments=instruments)
        self._carrier = carrier
        self._fault_text = "" if faults is None else str(faults)
        self._caught: tuple[type[BaseException], ...] = (Exception,)
        if faults is not None and faults.interrupts:
            self._caught = (Exception, KeyboardInterrupt)

    def run(self, policy: Policy, *, watch: bool = False) -> StepRun:
        """Build the step and run it once; see `run_step`."""
        bed = _bed(self.make_device, self.count, self.faults)
        step = _built(self.build, bed)
        watched = _Watched(policy, watch)
        run = StepRun(Schedule(self.count, ()), None, None, bed.program, watched.runnable)
        run.faults = self._fault_text
        run.policy = watched.name
        scheduler = self._scheduler
        scheduler.policy = watched
        if self.faults is not None:
            scheduler.microbatch_type = self.faults.microbatch_type(CARRIERS[self._carrier][0], bed)
        stream = bed.device.current_stream()
        # Inside: what the step made to go wrong may be a signal, and it must not hit the caller after the step.
        try:
            result = scheduler.run(step.entries, step.contexts)
            if step.after is not None:
                step.after()
            run.schedule, run.outputs = result.schedule, result.outputs
            if self.outputs:
                run.checksum = checksum(result.outputs)
                if step.check is not None:
                    step.check(result.outputs)
        except self._caught as error:
            # Without this frame, which holds `run`: or what the microbatches held would wait for the garbage collector.
            run.error = error.with_traceback(error.__traceback__.tb_next if error.__traceback__ else None)
            run.schedule, run.failed = watched.schedule(self.count), watched.failed()
        _look_round(run, watched, bed, stream)
        return run


class _Watched:
    """A policy that answers what `policy` answers, and keeps the step's record, and its microbatches weakly.

    With `watch` it also notes who could have run.
    """

    def __init__(self, policy: Policy, watch: bool) -> None:
        self.policy = policy
        self.name = getattr(policy, "name", type(policy).__name__)
        self.runnable: list[tuple[int, ...]] = []
        self._watch = watch
        self._step: Step | None = None
        self._microbatches: list[weakref.ref[Any]] = []

    def start(self, step: Step) -> Callable[[], int]:
        self._step = step
        self._microbatches = [weakref.ref(each) for each in step.microbatches]
        choose = self.policy.start(step)
        if not self._watch:
            return choose

        def noted() -> int:
            self.runnable.append(tuple(step.runnable()))
            return choose()

        return noted

    def finish(self, step: Step) -> None:
        if finish := getattr(self.policy, "finish", None):
            finish(step)

    def schedule(self, count: int) -> Schedule:
        step = self._step
        return Schedule(count, ()) if step is None else Schedule(step.count, tuple(step.decisions), tuple(step.sites))

    def failed(self) -> int | None:
        return None if self._step is None else self._step.failed_index

    def still_alive(self) -> list[int]:
        """Microbatches that something holds although the step is over."""
        self._step = None
        return [index for index, each in enumerate(self._microbatches) if each() is not None]


def run_step(
    build: Build,
    policy: Policy | None = None,
    *,
    count: int = 2,
    make_device: Callable[[], Any] | None = None,
    faults: Faults | None = None,
    carrier: str = "greenlet",
    strict: bool = True,
    thread_state: Any = "auto",
    instruments: Iterable[Any] = (),
    watch: bool = False,
    outputs: bool = True,
) -> StepRun:
    """Build a step and run it once. What the step raises is in the result; what `build` raises passes through.

    Args:
        build: makes the step for a bed.
        policy: who goes next; default round robin.
        count: number of microbatches.
        make_device: makes the device of this run; default a new `VirtualDevice`.
        faults: what is to go wrong.
        carrier, strict, thread_state, instruments: see `Scheduler`.
        watch: note for each decision who could have run.
        outputs: compute the checksum of the outputs and call `check`.

    Raises:
        ConfigurationError: `build` made as many entries as there are not microbatches.
    """
    runner = StepRunner(
        build,
        count=count,
        make_device=make_device,
        faults=faults,
        carrier=carrier,
        strict=strict,
        thread_state=thread_state,
        instruments=instruments,
        outputs=outputs,
    )
    return runner.run(RoundRobin() if policy is None else policy, watch=watch)


def run_in_turn(
    build: Build, *, count: int = 2, make_device: Callable[[], Any] | None = None, faults: Faults | None = None
) -> list[Any]:
    """The outputs of the same microbatches one after the other, outside a step, where no yield does anything.

    This is the reference for bit-equality. What an entry raises passes through.
    """
    step = _built(_callable(build), _bed(make_device or virtual_device(), count, faults))
    outputs = [entry() for entry in step.entries]
    if step.after is not None:
        step.after()
    return outputs


def virtual_device() -> Callable[[], Any]:
    """What makes the device of a run where nothing else is asked for."""
    from ..devices.virtual import VirtualDevice

    return VirtualDevice


def _bed(make_device: Callable[[], Any], count: int, faults: Faults | None) -> TestBed:
    bed = TestBed(make_device(), count, faults)
    if faults is not None:
        faults.prepare(bed)
    return bed


def _callable(build: Build) -> Build:
    if not callable(build):
        raise ConfigurationError(
            f"build is a function that takes a TestBed and returns the entries, and not {type(build).__name__}: "
            "a run uses its step up, and the next one needs a new one"
        )
    return build


def _built(build: Build, bed: TestBed) -> StepUnderTest:
    made = build(bed)
    step = made if isinstance(made, StepUnderTest) else StepUnderTest(made)
    if len(step.entries) != bed.count:
        raise ConfigurationError(f"the step under test has {len(step.entries)} entries for {bed.count} microbatches")
    if step.contexts is None:
        step.contexts = bed.contexts()
    if step.after is None:
        step.after = partial(_join, bed.device, step.contexts[0])
    return step


def _join(device: Any, context: UBatchContext) -> None:
    event = device.new_event()
    device.record(event, context.comm_stream)
    device.wait(context.compute_stream, event)


def _look_round(run: StepRun, watched: _Watched, bed: TestBed, stream: Any) -> None:
    left = run.left_behind
    if bed.device.current_stream() != stream:
        left.append(f"the current stream is {bed.device.current_stream()!r}; before the step it was {stream!r}")
        bed.device.set_stream(stream)
    if run.error is not None:
        return  # its traceback holds the frames, and a failed step may drop its receives
    if run.program is not None:
        for each in run.program.transfers:
            if not each.received:
                left.append(f"microbatch {each.owner}'s transfer {each.name!r} was never received")
    for index in watched.still_alive():
        left.append(f"microbatch {index} is still referenced")
