"""What a step enqueued: the stream program, as a list of operations in the order in which the host issued them.

A GPU runs the operations of one stream in that order; between streams only events order anything. So the program says
which operations certainly run before which others, whatever the times are, and it says it without a GPU: a virtual
device writes one while it simulates, and `RecordingDevice` writes one beside a real device. `testing.hazards` reads it.

    kind         what it is                                          what it refers to
    work         a kernel, a copy, a block of host-launched work     `accesses`
    record       an event is recorded behind what the stream holds   `event`
    wait         the stream waits for an event's latest record       `event`, `of`: the number of that record
    send         a transfer leaves, behind what the stream holds     `transfer`, `accesses` (what is sent)
    receive      the recv hook: the stream waits for the transfer    `transfer`, `accesses` (where it arrives)
    host_wait    the host waits for all that the stream holds        stream None: for all streams
    hold         memory is kept for what the stream holds            `accesses`, as read: what is kept

What a receive writes belongs to the transfer from its send on. A send may name it too, as written: it has to where the
receive may never run. What both name as read is being sent until the receive; what the send alone names has been read
when the send part ends.

An operation is charged to the microbatch that the thread runs when it is issued, and its slice; to none outside a step.
A receive that a sibling runs is the sibling's operation; `owner` is the microbatch that sent.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from .accesses import Access, whole
from .errors import ConfigurationError
from .step import running

__all__ = ["Access", "Operation", "RecordingDevice", "StreamProgram", "Transfer", "whole"]


class Transfer:
    """What a send part started: its number, its name, and the microbatch that sent (None outside a step)."""

    __slots__ = ("arrived", "arrives", "bytes", "name", "number", "owner", "received", "sent", "site")

    def __init__(self, number: int, name: str, owner: int | None, site: str, sent: int = 0) -> None:
        self.number = number
        self.name = name
        self.owner = owner
        self.site = site
        self.sent = sent  # number of the send
        self.bytes: int | None = None  # to other ranks, where somebody knows
        self.received = 0  # how often
        self.arrived: int | None = None  # number of the first receive
        self.arrives: float | None = None  # microseconds, where a device knows

    def __repr__(self) -> str:
        return f"Transfer({self.number}, {self.name!r}, owner={self.owner})"


class Operation:
    """One entry of the program.

    Attributes: `number` (its place in the program), `kind`, `stream` (its name), `microbatch`, `slice` (0-based slice
    of that microbatch; both None outside a step), `site` (the yield site that slice began at), `owner` (the microbatch
    whose data it handles: another one than `microbatch` for what a sibling's recv hook does), `name`, `accesses`
    (reads before writes), `event`, `of`, `transfer`, `begin` and `end` (microseconds, where a device knows), `at` (the
    host's clock, where the program has one), `where` ("file:line" that issued it; only where the program keeps places).
    """

    __slots__ = (
        "accesses",
        "at",
        "begin",
        "end",
        "event",
        "kind",
        "microbatch",
        "name",
        "number",
        "of",
        "owner",
        "site",
        "slice",
        "stream",
        "transfer",
        "where",
    )

    def __init__(self, number: int, kind: str, stream: str | None, name: str, accesses: tuple[Access, ...]) -> None:
        self.number = number
        self.kind = kind
        self.stream = stream
        self.name = name
        self.accesses = accesses
        self.event: int | None = None
        self.of: int | None = None
        self.transfer: Transfer | None = None
        self.begin: float | None = None
        self.end: float | None = None
        self.at: int | None = None
        self.where = ""
        microbatch = running.get(get_ident())
        if microbatch is None:
            self.microbatch: int | None = None
            self.slice: int | None = None
            self.site = ""
        else:
            self.microbatch = microbatch.index
            self.slice = microbatch.slice_number
            self.site = microbatch.site
        self.owner = self.microbatch

    def __str__(self) -> str:
        at = f"at {self.where}" if self.where else ""
        if self.microbatch is None:
            who = "outside the microbatches" + (f" ({at})" if at else "")
        else:
            since = f"after {self.site!r}" if self.site else "before its first yield"
            who = f"microbatch {self.microbatch} (slice {self.slice}, {since}{f', {at}' if at else ''})"
        place = "" if self.stream is None else f" on {self.stream}"
        return f"#{self.number} {self.kind} {self.name!r}{place}, {who}"

    def __repr__(self) -> str:
        return f"Operation({self})"


class StreamProgram:
    """The operations of one step, in the order in which the host issued them.

    Attributes: `operations`, `transfers`, `primary` (name of the stream that must hold everything in the end: the
    compute stream), `keep_places` (note for each operation the line of code that issued it; costs about 1 us each),
    `clock` (nanoseconds of the host, for `Operation.at`; None keeps no times), `began` (the clock when what is about to
    be added began, set by who notes an operation after the fact; None: it begins as it is added), `noting` (False:
    what is added is not kept; for the time between steps).
    """

    def __init__(
        self, primary: str = "compute", *, keep_places: bool = False, clock: Callable[[], int] | None = None
    ) -> None:
        self.clock = clock
        self.began: int | None = None
        self.noting = True
        self.operations: list[Operation] = []
        self.transfers: list[Transfer] = []
        self.primary = primary
        self.keep_places = keep_places
        self._last_record: dict[int, int] = {}  # event -> number of its latest record
        self._behalf: list[int | None] = []  # of whom a recv hook runs, innermost last

    def add(
        self, kind: str, stream: str | None, name: str, accesses: tuple[Access, ...] = (), *, event: int | None = None
    ) -> Operation:
        """Append an operation of the microbatch that runs now."""
        operations = self.operations
        operation = Operation(len(operations), kind, stream, name, accesses)
        if event is not None:
            operation.event = event
            if kind == "record" and self.noting:
                self._last_record[event] = operation.number
            else:
                operation.of = self._last_record.get(event)
        if self._behalf:
            operation.owner = self._behalf[-1]
        if self.keep_places:
            operation.where = _caller()
        if self.clock is not None:
            operation.at = self.clock() if self.began is None else self.began
        if self.noting:
            operations.append(operation)
        return operation

    @contextmanager
    def on_behalf_of(self, owner: int | None) -> Iterator[None]:
        """What is added inside handles the data of microbatch `owner`, whoever issues it: a recv hook runs."""
        self._behalf.append(owner)
        try:
            yield
        finally:
            self._behalf.pop()

    @contextmanager
    def since_now(self) -> Iterator[None]:
        """What is added inside began when the block did: a call that is noted when it has returned."""
        before = self.began
        if self.clock is not None:
            self.began = self.clock()
        try:
            yield
        finally:
            self.began = before

    def send(self, stream: str, name: str, accesses: tuple[Access, ...] = ()) -> Operation:
        """Append a send; its new `Transfer` is the operation's."""
        operation = self.add("send", stream, name, accesses)
        operation.transfer = Transfer(len(self.transfers), name, operation.owner, operation.site, operation.number)
        if self.noting:
            self.transfers.append(operation.transfer)
        return operation

    def receive(self, stream: str, transfer: Transfer, accesses: tuple[Access, ...] = ()) -> Operation:
        """Append the receive part of `transfer`."""
        operation = self.add("receive", stream, transfer.name, accesses)
        operation.transfer = transfer
        operation.owner = transfer.owner
        transfer.received += 1
        if transfer.arrived is None:
            transfer.arrived = operation.number
        return operation

    def clear(self) -> None:
        """Forget everything; events recorded before stand for nothing."""
        self.operations.clear()
        self.transfers.clear()
        self._last_record.clear()


class RecordingDevice:
    """A device that also writes the stream program: a twin of `device`, with the same streams and events.

    Args:
        device: a `CpuDevice`, a `CudaDevice`, or any other of the protocol.
        program: where to write; default: a new one whose primary stream is the current one.

    Streams get their names in the program by the order in which they turn up: the current one is "compute", others are
    called as the device calls them, with a number where that name is taken.

    `work`, `send` and `receive` note operations that are issued by other means than the device; for a torch model
    `testing.torch_accesses` calls them.

    Raises:
        ConfigurationError: `device` is itself a recording one.
    """

    def __init__(self, device: Any, program: StreamProgram | None = None) -> None:
        if isinstance(device, RecordingDevice):
            raise ConfigurationError("this device is recorded already; use the one program that it has")
        self.inner = device
        self.plain = getattr(device, "plain", device)  # for events that are no part of the program
        self.name = device.name
        self.program = StreamProgram() if program is None else program
        self._names: dict[Any, str] = {}
        self._taken: set[str] = set()
        self._events: dict[int, tuple[int, Any]] = {}  # id -> its number, and the event, kept so that the id stays its
        self.name_stream(device.current_stream(), self.program.primary)

    # What only passes through: also what a device has beyond the protocol (timing events, a fast path, a GPU's index).
    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # while being copied or unpickled there is none yet
            raise AttributeError(name)
        return getattr(self.inner, name)

    def record(self, event: Any, stream: Any) -> None:
        self.inner.record(event, stream)
        self.program.add("record", self.name_stream(stream), "record", event=self.number_of(event))

    def wait(self, stream: Any, event: Any) -> None:
        self.inner.wait(stream, event)
        self.program.add("wait", self.name_stream(stream), "wait", event=self.number_of(event))

    def synchronize(self) -> None:
        self.inner.synchronize()
        self.program.add("host_wait", None, "synchronize")

    # -- what is issued otherwise --------------------------------------------------------------------------------------

    def work(self, name: str, accesses: tuple[Access, ...] = ()) -> Operation:
        """Note work on the current stream."""
        return self.program.add("work", self.name_stream(self.inner.current_stream()), name, accesses)

    def send(self, name: str, accesses: tuple[Access, ...] = ()) -> Operation:
        """Note a send part on the current stream."""
        return self.program.send(self.name_stream(self.inner.current_stream()), name, accesses)

    def receive(self, transfer: Transfer, accesses: tuple[Access, ...] = ()) -> Operation:
        """Note the receive part of `transfer` on the current stream."""
        return self.program.receive(self.name_stream(self.inner.current_stream()), transfer, accesses)

    def name_stream(self, stream: Any, wanted: str | None = None) -> str:
        """The name of `stream` in the program; the first call decides it."""
        # By equality: CUDA makes stream objects that are equal and not the same.
        found = self._names.get(stream)
        if found is None:
            base = wanted or getattr(stream, "name", "") or "stream"
            found, count = base, 1
            while found in self._taken:
                count += 1
                found = f"{base}#{count}"
            self._names[stream] = found
            self._taken.add(found)
        return found

    def number_of(self, event: Any) -> int:
        """The number of `event` in the program."""
        known = self._events.get(id(event))
        if known is None and not self.program.noting:
            return -1  # nobody will ask, and it need not be kept
        if known is None:
            known = self._events[id(event)] = (len(self._events), event)
        return known[0]

    def clear(self) -> None:
        """Forget the program and the events: another step begins. Streams keep their names."""
        self.program.clear()
        self._events.clear()

    def __copy__(self) -> RecordingDevice:
        twin = object.__new__(RecordingDevice)
        twin.__dict__.update(self.__dict__)
        twin.inner = copy.copy(self.inner)
        return twin


def _caller() -> str:
    """The nearest line outside torch and the package's own device and context files."""
    frame: Any = sys._getframe(2)
    while frame is not None and ((name := frame.f_globals.get("__name__", "")) in _OWN or name.startswith("torch.")):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{frame.f_code.co_filename.replace(chr(92), '/').rpartition('/')[2]}:{frame.f_lineno}"


_OWN = {
    __name__,
    "dbo_greenlet.devices.virtual",
    "dbo_greenlet.devices.virtual_clocks",
    "dbo_greenlet.microbatch",
    "dbo_greenlet.yields",
    "dbo_greenlet.testing.recorded_all2all",
    "dbo_greenlet.testing.recorded_deepep",
    "dbo_greenlet.testing.torch_accesses",
}
