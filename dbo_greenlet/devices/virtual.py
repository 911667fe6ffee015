"""A GPU whose clock is a number: streams, events, transfers and a host, exact to the microsecond and without any GPU.

    device = VirtualDevice(launch=3.0)
    device.work("attention", 60.0)
    sent = device.send("dispatch", 50.0)
    device.work("shared expert", 20.0)
    device.receive(sent)                  # the stream stands still for the 27 us that are left
    device.synchronize()
    device.now                            # 113.0

The rules, which are those of CUDA:

* A stream runs its operations one after the other. Each begins when the one before it has ended, and not before the
  host has enqueued it, which takes the host `launch`, `record` or `wait` microseconds.
* An event stands for what its stream held when it was last recorded. A wait refers to the latest record at the moment
  when the wait is enqueued; recording the event again changes nothing about it. An event that was never recorded holds
  nobody up.
* A transfer leaves when its stream comes to the send, flies without occupying any stream (DeepEP low latency; whoever
  wants one that does, launches `work` on a comm stream), and holds up the stream that receives it until it arrives.
* The host's clock goes forward by what the host enqueues and by `host(us)`. Where the host waits for the device, it
  jumps to the moment at which that is done.

Nothing ever refers to what is enqueued later, so each operation's begin and end are known when it is enqueued: there is
no event loop, and a run costs no more than its bookkeeping. (One that simulates step by step was rejected for that; it
is in the tests, to compare with.)

All threads share one host clock, and each has its own current stream, as with CUDA. They must take turns, as the
microbatches of a step do.

What is not modelled: kernels of two streams that slow each other down, transfers that share a wire (`transfer_time` can
do that), a bound on how far the host may run ahead, and the time that a stream itself takes for an event.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from ..errors import ConfigurationError, GraphCaptureError
from ..stream_program import Access, Operation, Transfer, whole
from .virtual_clocks import VirtualClocks
from .virtual_graph import VirtualGraph
from .virtual_parts import (
    INFINITE,
    Buffer,
    VirtualEvent,
    VirtualStream,
    no_time,
)
from .virtual_times import Lane, Overlap, Window, busy, lanes, overlap, windows

__all__ = ["Buffer", "VirtualDevice", "VirtualEvent", "VirtualStream"]


class VirtualDevice(VirtualClocks):
    """The device protocol on virtual time, and what a program enqueues on it. All times are microseconds.

    Args:
        launch: what enqueueing work, a send, a receive or a whole graph takes the host.
        record, wait: what recording an event and making a stream wait for one take the host.
        primary: name of the default stream.
        keep_places: note for each operation the line of code that issued it.

    Attributes:
        program: everything that was enqueued, with begin and end of each operation. A record begins and ends when the
            stream passes it; a wait or a receive begins when the stream comes to it and ends when the stream goes on.
        default_stream: the stream that is current until a thread sets another.

    Raises:
        ConfigurationError: a time that is negative or not finite.
    """

    name = "virtual"

    # -- work and transfers --------------------------------------------------------------------------------------------

    def new_buffer(self, name: str) -> Buffer:
        """Memory to name in accesses; two with the same name are two."""
        return Buffer(name)

    def work(
        self,
        name: str,
        us: float,
        *,
        reads: Iterable[Hashable | Access] = (),
        writes: Iterable[Hashable | Access] = (),
        accesses: tuple[Access, ...] = (),
        stream: VirtualStream | None = None,
    ) -> Operation:
        """Enqueue work of `us` microseconds.

        Args:
            name: what the program calls it.
            us: how long it occupies its stream, in microseconds.
            reads, writes: the buffers it touches, whole or as an `Access` says.
            accesses: the same, made beforehand (a step that is run thousands of times); then without the other two.
            stream: default: the current one.

        Raises:
            ConfigurationError: `us` is negative or not finite.
        """
        if not 0.0 <= us < INFINITE:
            raise no_time(name, us)
        if stream is None:
            stream = self._thread.stream or self.default_stream
        if reads or writes:
            accesses = whole(reads, writes)
        operation = self.program.add("work", stream.name, name, accesses)
        if stream.graph is not None:
            stream.graph.note(operation, stream, us)
            return operation
        shared = self._shared
        shared.now = now = shared.now + shared.launch
        begin = stream.free
        if now > begin:
            begin = now
        operation.begin = begin
        operation.end = stream.free = begin + us
        return operation

    def send(
        self,
        name: str,
        us: float,
        *,
        reads: Iterable[Hashable | Access] = (),
        writes: Iterable[Hashable | Access] = (),
        accesses: tuple[Access, ...] = (),
        stream: VirtualStream | None = None,
    ) -> Transfer:
        """Enqueue a send; what it starts flies for `us` microseconds from the moment the stream comes to it.

        The send itself takes no time on its stream. Arguments as of `work`.

        Raises:
            ConfigurationError: `us`, or what `transfer_time` makes of it, is negative or not finite.
        """
        if not 0.0 <= us < INFINITE:
            raise no_time(name, us)
        if stream is None:
            stream = self._thread.stream or self.default_stream
        if reads or writes:
            accesses = whole(reads, writes)
        operation = self.program.send(stream.name, name, accesses)
        transfer: Any = operation.transfer
        if stream.graph is not None:
            stream.graph.note(operation, stream, us)
            return transfer  # type: ignore[no-any-return]
        shared = self._shared
        shared.now = now = shared.now + shared.launch
        begin = stream.free
        if now > begin:
            begin = now
        operation.begin = operation.end = begin
        transfer.arrives = begin + (us if shared.transfer_time is None else self._flight(transfer, us))
        return transfer  # type: ignore[no-any-return]

    def receive(
        self,
        transfer: Transfer,
        us: float = 0.0,
        *,
        reads: Iterable[Hashable | Access] = (),
        writes: Iterable[Hashable | Access] = (),
        accesses: tuple[Access, ...] = (),
        stream: VirtualStream | None = None,
    ) -> Operation:
        """Enqueue the receive part of `transfer`: the stream stands still until it arrives, then works for `us`.

        Arguments as of `work`. Receiving twice is possible, as it is with the real thing; the program tells.

        Raises:
            ConfigurationError: `us` is negative or not finite.
            GraphCaptureError: the one is part of a capture that the other is not.
        """
        if not 0.0 <= us < INFINITE:
            raise no_time(transfer.name, us)
        if stream is None:
            stream = self._thread.stream or self.default_stream
        graph = stream.graph
        if transfer.arrives is None if graph is None else transfer not in graph.transfers:
            raise GraphCaptureError(
                f"transfer {transfer.name!r} was {'captured into a graph' if graph is None else 'sent outside'} and "
                f"its receive is {'not' if graph is None else 'captured'}; capture both parts, or none"
            )
        if reads or writes:
            accesses = whole(reads, writes)
        operation = self.program.receive(stream.name, transfer, accesses)
        if graph is not None:
            graph.note(operation, stream, us)
            return operation
        shared = self._shared
        shared.now = now = shared.now + shared.launch
        begin = stream.free
        if now > begin:
            begin = now
        operation.begin = begin
        arrives: Any = transfer.arrives
        operation.end = stream.free = (begin if arrives < begin else arrives) + us
        return operation

    @property
    def transfer_time(self) -> Callable[[Transfer, float], float] | None:
        """What decides how long a transfer flies, from the transfer and the `us` of its send; None: those `us`."""
        return self._shared.transfer_time

    @transfer_time.setter
    def transfer_time(self, decide: Callable[[Transfer, float], float] | None) -> None:
        self._shared.transfer_time = decide

    def _flight(self, transfer: Transfer, us: float) -> float:
        decide = self._shared.transfer_time
        if decide is not None:
            us = decide(transfer, us)
            if not 0.0 <= us < INFINITE:
                raise no_time(f"transfer_time of {transfer.name!r}", us)
        return us

    # -- graphs --------------------------------------------------------------------------------------------------------

    def capturing(self) -> bool:
        """Whether the current stream is being captured."""
        return (self._thread.stream or self.default_stream).graph is not None

    def capture(self, run: Callable[[], Any], streams: Sequence[VirtualStream] | None = None) -> VirtualGraph:
        """Run `run` once; what it enqueues on `streams` (default: the current one) becomes a graph instead of running.

        The first of `streams` is where the graph begins; the others are forked from it and joined to it, as
        `GraphPool.capture` does. The operations are in `program` all the same; their begin and end are those of the
        latest replay. What `run` raises passes through, and there is no graph then.

        Raises:
            ConfigurationError: no stream, or one is being captured already.
            GraphCaptureError: in `run`, where the host waits, or an event or transfer joins a capture from outside.
        """
        taken = [self.current_stream()] if streams is None else list(streams)
        if not taken or any(stream.graph is not None for stream in taken):
            raise ConfigurationError("a capture needs at least one stream, and none that is being captured already")
        graph = VirtualGraph(self, taken)
        for stream in taken:
            stream.graph = graph
        try:
            graph.output = run()
        finally:
            graph.open = False
            for stream in taken:
                stream.graph = None
        return graph

    # -- what happened -------------------------------------------------------------------------------------------------

    @property
    def finished_at(self) -> float:
        """When the last operation ends and the last transfer arrives."""
        arrivals = [each.arrives for each in self.program.transfers if each.arrives is not None]
        return max([stream.free for stream in self._shared.streams] + arrivals)

    def lanes(self) -> list[Lane]:
        """What occupied the streams and the wire, in order of time; see `virtual_times.lanes`."""
        return lanes(self.program)

    def busy(self, stream: VirtualStream | str | None = None) -> float:
        """Microseconds in which `stream` (default: the primary one; "wire": transfers) works, standing still left out.

        On the wire, transfers that fly at the same time count once.
        """
        name = self.program.primary if stream is None else stream if isinstance(stream, str) else stream.name
        return busy(self.program, name)

    def windows(self) -> list[Window]:
        """Each transfer's time in flight; see `virtual_times.windows`."""
        return windows(self.program)

    def overlap(self) -> Overlap:
        """How much communication was hidden behind compute; see `virtual_times.overlap`."""
        return overlap(self.program)

    def __repr__(self) -> str:
        return f"VirtualDevice(now={self.now}, {len(self.program.operations)} operations)"
