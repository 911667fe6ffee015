"""What the operations of a step do to memory, for a trace: what they read and write, what is freed, what is held.

    memory = MemoryRecorder(device)
    model = Model(memory.all_to_all(all_to_all))
    contexts = make_ubatch_contexts(2, device=memory.device)
    Scheduler(instruments=[recorder, memory]).run(entries, contexts)
    writer.write(step_record, *recorder.records(step=0), *memory.records(step=0, origin_ns=recorder.origin_ns))

It writes the step's stream program by the means of the test kit (`testing.torch_accesses`, `testing.recorded_all2all`),
with two differences. Nothing is kept alive: memory that was freed is used again at the same address, as without the
recorder, so that a use which comes too late meets what lies there now. And three things are noted that the kit has no
need of:

    free    a tensor's memory goes back to the allocator: its last reference is gone, in Python and in C++. Its stream
            is the one that was current when the memory was made, whose further work may have it at once.
    hold    `Tensor.record_stream`: the allocator keeps the memory for that stream as well
    at      the host's time at which each operation began

Frees are seen by a weak reference to each storage: 2 us for each that is met, nothing until it goes. (PyTorch's own
record of allocations, `torch.cuda.memory._record_memory_history`, was rejected: it knows CUDA memory only, and has its
own clock, so that a free between two operations would come before or after them by chance.) Memory that comes from
elsewhere, such as a library's receive buffer, is never freed as far as this goes, and what tensors inside an operator
do is not seen.

All of it costs some 60 us an operator while the step runs, and 15 behind it for its lines (scripts/bench_trace.py, on a
busy machine), twenty times what the host takes for a small one, so times of such a trace tell little about overlap. It
is off where nobody asks for it. Steps that are captured into a graph are noted as they are captured; replays have no
operations on the host.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable
from threading import get_ident
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from .accesses import Access
from .devices import cpu_device
from .step import running
from .stream_program import RecordingDevice, StreamProgram
from .testing.recorded_all2all import RecordedAllToAll
from .testing.tensor_memory import Memory, TensorMemory
from .testing.torch_accesses import EMPTY, TorchAccesses
from .trace.op_records import Freed, op_lines, op_records

if TYPE_CHECKING:
    from .step import Step
    from .trace.records import OpRecord

__all__ = ["MemoryRecorder"]

logger = logging.getLogger("dbo_greenlet")


class MemoryRecorder:
    """An instrument of the scheduler that notes the operations of one step at a time, and what they do to memory.

    Args:
        device: where the steps run: a `CudaDevice`, or None for the CPU.
        clock: nanoseconds, the same clock as the trace's.

    Attributes:
        device: the twin of `device` for the contexts of the steps, and for what joins their streams.
        program: the operations of the step that ran last.
    """

    def __init__(self, device: Any = None, *, clock: Callable[[], int] = perf_counter_ns) -> None:
        self.program = StreamProgram(clock=clock)
        self.program.noting = False
        self.device = RecordingDevice(cpu_device() if device is None else device, self.program)
        self._memory = _LiveMemory(self.device, clock)
        self.device.__dict__["tensor_memory"] = self._memory  # where the kit looks for it
        self._accesses = _Accesses(self.device)
        self._streams: dict[str, str] = {}

    def all_to_all(self, inner: Any) -> Any:
        """`inner`, telling of its sends and receives; to be used in its place."""
        return RecordedAllToAll(inner, self.device)

    # -- what the scheduler calls --------------------------------------------------------------------------------------

    def before_step(self, step: Step) -> None:
        self.device.clear()
        self._memory.clear()
        context = step.microbatches[0].context
        for name in ("comm", "compute"):
            if (stream := getattr(context, f"{name}_stream", None)) is not None:
                self._streams[self.device.name_stream(stream)] = name
        self.program.noting = True
        # Round the whole step: each microbatch begins with the mode, like with any other state of its caller.
        self._accesses.__enter__()

    def after_step(self, step: Step, error: BaseException | None) -> None:
        self._accesses.__exit__(None, None, None)
        if error is not None:
            self.program.noting = False  # nothing that comes after it is the step's

    # -- what the run asks for -----------------------------------------------------------------------------------------

    def records(self, *, step: int, rank: int = 0, run: str = "dbo", origin_ns: int = 0) -> list[OpRecord]:
        """The operations of the step that ran last, with what joined its streams; ends the noting until the next one.

        To be called after each step that succeeded: until then, or until the next step begins, whatever the device is
        asked for is taken for a part of the step, and kept.

        Args:
            step, rank, run: the step.
            origin_ns: `StepRecorder.origin_ns`.
        """
        return op_records(self._end(), step=step, rank=rank, run=run, origin_ns=origin_ns, **self._beside())

    def json_lines(self, *, step: int, rank: int = 0, run: str = "dbo", origin_ns: int = 0) -> bytes:
        """What `to_json` makes of these `records`, each line with its newline, several times quicker."""
        return op_lines(self._end(), step=step, rank=rank, run=run, origin_ns=origin_ns, **self._beside())

    def _end(self) -> StreamProgram:
        self.program.noting = False
        return self.program

    def _beside(self) -> dict[str, Any]:
        return {"freed": self._memory.freed(), "streams": self._streams}


class _Accesses(TorchAccesses):
    """What operators touch, with the times at which they began, where memory was made, and what is held."""

    def __init__(self, device: RecordingDevice) -> None:
        super().__init__(device)
        self._logged = False

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if not self.program.noting:
            return
        try:
            self._note_operator(func, args, kwargs, result)
        except Exception:
            # Whatever a kind of tensor that nobody thought of raises when it is asked where it lies: an instrument must
            # not fail the step. What was noted so far is the step's beginning, and true; with a hole it would not be.
            self.program.noting = False
            if not self._logged:
                self._logged = True
                logger.warning(
                    "the operations of this step are recorded up to %s, whose tensors cannot be noted (logged once)",
                    func,
                    exc_info=True,
                )

    def _note_operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if func._opname == "record_stream":
            self._note_hold(*args)
        elif func._opname in EMPTY:
            # What writes to it may do so on another stream than the one that it belongs to.
            self.memory.find(result, func._opname)
        else:
            super()._note(func, args, kwargs, result)

    def _note_hold(self, tensor: Tensor, stream: Any) -> None:
        memory = self.memory.find(tensor)
        if memory is not None:
            access = Access(memory, False, 0, memory.end - memory.address)
            self.program.add("hold", self.device.name_stream(self._known(stream)), "record_stream", (access,))

    def _known(self, stream: Any) -> Any:
        """The device's own object for a stream of torch's."""
        address = (stream.stream_id, stream.device_index, stream.device_type)
        for each in getattr(self.device.inner, "_known", {}).values():
            if each.address == address:
                return each
        return stream


class _Moment(NamedTuple):
    """When a storage went: whether the step's operations were noted then; the rest as in `Freed`."""

    noting: bool
    position: int
    microbatch: int | None
    slice: int | None
    at: int


class _Watch(weakref.ref[Any]):
    """A reference to a storage; `key` is its identity, which it no longer can tell when it is gone."""

    __slots__ = ("key",)
    key: int


class _LiveMemory(TensorMemory):
    """Memory of tensors that come and go."""

    notes_holds = True

    def __init__(self, device: RecordingDevice, clock: Callable[[], int]) -> None:
        super().__init__()
        self._device = device
        self._clock = clock
        self._watched: dict[int, tuple[_Watch, int]] = {}  # storage -> its reference, number of its memory
        self._made_on: dict[int, str | None] = {}  # memory -> the stream; for memory that can be freed
        self._storages: dict[int, int] = {}  # memory -> how many storages lie there
        self._gone: deque[tuple[int, _Moment]] = deque()
        self._freed: list[Freed] = []

    def clear(self) -> None:
        """What was freed until now belongs to no step."""
        self._settle()
        self._freed = []

    def freed(self) -> list[Freed]:
        """What was freed since `clear`, in order."""
        self._settle()
        return self._freed

    def find(self, tensor: Tensor, maker: str = "") -> Memory | None:
        if self._gone:
            self._settle()  # or a new storage might be taken for the one that had its identity before
        return super().find(tensor, maker)

    def _met(self, key: int, storage: Any, memory: Memory, tensor: Tensor, maker: str) -> None:
        number = memory.number
        watch = _Watch(storage, self._storage_gone)
        watch.key = key
        self._watched[key] = (watch, number)
        self._storages[number] = self._storages.get(number, 0) + 1
        # Of another allocator (a library's buffer), or of the host beside a GPU: no stream gets it back.
        ours = storage.resizable() and (tensor.is_cuda or self._device.name == "cpu")
        if ours and number not in self._made_on:
            self._made_on[number] = self._device.name_stream(self._device.current_stream()) if maker else None

    def _storage_gone(self, watch: _Watch) -> None:
        # It may come at any time, in the middle of `find` (the garbage collector) and on any thread, so it does no more
        # than to append, and looks at nothing that could be half-way through a change.
        self._gone.append((watch.key, self._now()))

    def _left(self, key: int, memory: Memory) -> None:
        del self._watched[key]  # with the reference goes what it would have called
        self._release(memory.number, self._now())

    def _now(self) -> _Moment:
        it = running.get(get_ident())
        who = (None, None) if it is None else (it.index, it.slice_number)
        program = self._device.program
        return _Moment(program.noting, len(program.operations), *who, self._clock())

    def _settle(self) -> None:
        while self._gone:
            key, moment = self._gone.popleft()
            _, number = self._watched.pop(key)
            del self._of_storage[key]
            self._release(number, moment)

    def _release(self, number: int, moment: _Moment) -> None:
        """A storage is gone from that memory."""
        self._storages[number] -= 1
        if self._storages[number]:
            return
        del self._storages[number]
        memory = self._all[number]
        self._forget(memory)
        if number in self._made_on:
            stream = self._made_on.pop(number)
            if moment.noting:
                access = Access(memory, True, 0, memory.end - memory.address)
                self._freed.append(Freed(moment.position, access, stream, moment.microbatch, moment.slice, moment.at))
