"""The stream program of a step of vLLM's on the stand-ins for CUDA and DeepEP, for the test kit to judge.

It is put together from three sources, while the step runs, so that each operation is charged to its microbatch and
slice: what the stand-in for CUDA logs of events and streams; the operators that the model and the stand-in's kernels
call, by `TorchAccesses`; and the sends and recv hooks of low latency, by the kit's own recording of DeepEP.

Where a model asks for a value the host waits, and that counts for nothing here. The stand-in's attention does so in
Python where a GPU has a kernel, and everything would be in order by it; so what the kit finds to be in order is so by
streams, events and hooks alone. Only what says that it waits for the whole device does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from dbo_greenlet.policy import Policy, RoundRobin
from dbo_greenlet.schedule import Schedule
from dbo_greenlet.stream_program import RecordingDevice, StreamProgram
from dbo_greenlet.testing.checksum import checksum
from dbo_greenlet.testing.recorded_deepep import record_deepep
from dbo_greenlet.testing.step_record import StepRecord
from dbo_greenlet.testing.step_run import StepRun
from dbo_greenlet.testing.torch_accesses import TorchAccesses
from dbo_greenlet.testing.verdicts import Reference
from dbo_greenlet.vllm import step as host_step
from tests.vllm_dropin.drive import Drive
from tests.vllm_dropin.fake_cuda import Call, FakeGraph, FakeStream, Recorder
from tests.vllm_dropin.fake_deep_ep import Buffer
from tests.vllm_dropin.model import tensors_of


class _StandIn:
    """What a `RecordingDevice` asks of a device."""

    name = "cpu"

    def __init__(self, log: Recorder) -> None:
        self._log = log

    def current_stream(self) -> FakeStream:
        return self._log.current()


class StandInDevice(RecordingDevice):
    """The recording twin of the stand-in, whose log has names where others have streams and events."""

    def __init__(self, log: Recorder, comm: FakeStream) -> None:
        self._events: dict[str, int] = {}
        super().__init__(_StandIn(log), StreamProgram(keep_places=True))
        self._events = {}  # by name; the class that is extended keeps objects
        self.name_stream(comm, "comm")

    def name_stream(self, stream: Any, wanted: str | None = None) -> str:
        name = getattr(stream, "name", stream)
        return super().name_stream(name, wanted or name)

    def number_of(self, event: Any) -> int:
        return self._events.setdefault(getattr(event, "name", event), len(self._events))

    def see(self, call: Call) -> None:
        """Note what a call of the log does to streams and events."""
        if call.what == "event.record":
            event, stream = call.detail
            self._note("record", stream, event)
        elif call.what == "event.wait":
            stream, event = call.detail
            self._note("wait", stream, event)
        elif call.what == "stream.wait_stream":
            stream, other = call.detail
            event = f"of wait_stream {len(self.program.operations)}"
            self._note("record", other, event)
            self._note("wait", stream, event)
        elif call.what == "synchronize":
            self.program.add("host_wait", None, "synchronize")

    def _note(self, kind: str, stream: str, event: str) -> None:
        self.program.add(kind, self.name_stream(stream), kind, event=self.number_of(event))


class _Operators(TorchAccesses):
    def _host_waits(self, *what: Any) -> bool:
        return False


class _Library:
    """What `record_deepep` takes for the transport: it replaces `call`."""

    def call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named)


@contextmanager
def recorded(log: Recorder, comm: FakeStream) -> Iterator[StreamProgram]:
    """The program of what runs inside; the stream that is current at the beginning is the compute stream."""
    device, library = StandInDevice(log, comm), _Library()
    restore = record_deepep(library, device)

    def noted(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda buffer, *arguments, **named: library.call(original.__get__(buffer), *arguments, **named)

    with ExitStack() as stack:
        stack.callback(restore)
        for name in ("low_latency_dispatch", "low_latency_combine"):
            stack.enter_context(patch.object(Buffer, name, noted(getattr(Buffer, name))))
        log.observers.append(device.see)
        stack.callback(log.observers.remove, device.see)
        stack.enter_context(_Operators(device))
        yield device.program


class Watched:
    """A policy that notes who could have run at each decision, with the record of the decisions."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.name = policy.name
        self.forget()

    def forget(self) -> None:
        """What was noted is of another step."""
        self.runnable: list[tuple[int, ...]] = []
        self.record = StepRecord(2)

    def before_step(self, step: Any) -> None:
        self.record.before_step(step)

    def before_slice(self, microbatch: Any) -> None:
        self.record.before_slice(microbatch)

    def after_slice(self, microbatch: Any) -> None:
        self.record.after_slice(microbatch)

    def start(self, step: Any) -> Callable[[], int]:
        choose = self.policy.start(step)

        def noted() -> int:
            self.runnable.append(tuple(step.runnable()))
            return choose()

        return noted


class DropInSteps:
    """Steps of one of vLLM's runners with the drop-in under a policy of the kit, each as a `StepRun`."""

    def __init__(self, drive: Drive) -> None:
        self.drive = drive
        self.comm = drive.wrapper.comm_stream if drive.case.runner == "V1" else drive.runner.comm_stream

    def reference(self) -> Reference:
        """What the microbatches give one after the other."""
        self._forget_keys()
        outputs = [one.clone() for one in self.drive.in_turn()]
        return Reference(outputs, checksum(outputs))

    def run(self, policy: Policy | None = None) -> StepRun:
        """One step: an eager one, or the one that is captured, without the warm-up that may come first."""
        drive, eager = self.drive, self.drive.case.mode == "eager"
        self._forget_keys()
        run = StepRun(Schedule(2, ()))
        with ExitStack() as stack:
            watched = stack.enter_context(_scheduled(RoundRobin() if policy is None else policy))
            if eager:
                run.program = stack.enter_context(recorded(drive.log, self.comm))
            else:
                stack.enter_context(torch.cuda.stream(FakeStream(name="capture", recorder=drive.log)))
                stack.enter_context(self._in_the_capture(run, watched))
            try:
                run.outputs = [one.clone() for one in tensors_of(drive.step() if eager else drive.capture())]
                run.checksum = checksum(run.outputs)
            except Exception as error:  # whatever the step raised is the result
                run.error = error
        run.policy, run.runnable, run.schedule = watched.name, watched.runnable, watched.record.schedule()
        return run

    def capture_with_all_around_it(self) -> StreamProgram:
        """The program of everything that is enqueued for a capture, a warm-up included."""
        self._forget_keys()
        stream = FakeStream(name="capture", recorder=self.drive.log)
        with torch.cuda.stream(stream), recorded(self.drive.log, self.comm) as program:
            self.drive.capture()
        return program

    def _forget_keys(self) -> None:
        for layer in self.drive.model.layers:
            layer.attention.cache.fill_(float("nan"))
        self.drive.current.fill_context(self.drive.model)

    @contextmanager
    def _in_the_capture(self, run: StepRun, watched: Watched) -> Iterator[None]:
        begin, end = FakeGraph.capture_begin, FakeGraph.capture_end
        with ExitStack() as recording:

            def capture_begin(graph: FakeGraph, *arguments: Any, **named: Any) -> None:
                begin(graph, *arguments, **named)
                watched.forget()
                run.program = recording.enter_context(recorded(self.drive.log, self.comm))

            def capture_end(graph: FakeGraph) -> None:
                recording.close()
                end(graph)

            with (
                patch.object(FakeGraph, "capture_begin", capture_begin),
                patch.object(FakeGraph, "capture_end", capture_end),
            ):
                yield


@contextmanager
def _scheduled(policy: Policy) -> Iterator[Watched]:
    """The drop-in's steps run under `policy`, and are watched."""
    watched = Watched(policy)
    scheduler = host_step.HostScheduler([watched])
    scheduler.policy = watched
    with patch.object(host_step, "_plain", scheduler):
        yield watched
