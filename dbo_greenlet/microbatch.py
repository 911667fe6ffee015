"""`UBatchContext`: one microbatch's streams and events, and the switching between them.

The order inside the two `yield_and_switch` calls is law 4: the event that the other stream will wait for is recorded
*before* the thread is handed over. Recorded after it, the event would stand behind the sibling's work, and the
communication would wait for compute that it does not need: correct, and without overlap.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from greenlet import getcurrent

from .errors import ConfigurationError, ForeignSwitchError
from .greenlet_carrier import Carrier
from .step import running

if TYPE_CHECKING:
    from .devices import Device, Event, Stream

__all__ = ["UBatchContext", "make_ubatch_contexts"]


class UBatchContext:
    """Streams and events of one microbatch.

    Attributes: `id`, `device`, `compute_stream` and `comm_stream` (shared by all microbatches of a step),
    `gpu_compute_done_event` and `gpu_comm_done_event` (its own), `forward_context` (whatever the host framework wants
    to be current while it runs, or None).
    """

    __slots__ = (
        "comm_stream",
        "compute_stream",
        "device",
        "forward_context",
        "gpu_comm_done_event",
        "gpu_compute_done_event",
        "id",
        "ready_barrier",
        "schedule",
    )

    def __init__(
        self,
        id: int,
        device: Device,
        compute_stream: Stream,
        comm_stream: Stream,
        gpu_compute_done_event: Event,
        gpu_comm_done_event: Event,
        forward_context: Any = None,
        ready_barrier: threading.Barrier | None = None,
        schedule: str = "default",
    ) -> None:
        self.id = id
        self.device = device
        self.compute_stream = compute_stream
        self.comm_stream = comm_stream
        self.gpu_compute_done_event = gpu_compute_done_event
        self.gpu_comm_done_event = gpu_comm_done_event
        self.forward_context = forward_context
        self.ready_barrier = ready_barrier
        self.schedule = schedule

    @property
    def current_stream(self) -> Stream:
        """The stream that is current on this thread."""
        stream: Stream = self.device.current_stream()
        return stream

    @property
    def recv_hook(self) -> Any:
        """What runs the oldest receive that the previous microbatch left for this one; None where there is none."""
        microbatch = running.get(threading.get_ident())
        if microbatch is None or microbatch.step is None:
            return None
        inbox = microbatch.step.microbatches[self.id].inbox
        return partial(inbox[0].run, microbatch.index) if inbox else None

    def enter(self) -> None:
        """The microbatch starts: on the compute stream."""
        self.update_stream(self.compute_stream)

    def compute_scope(self) -> AbstractContextManager[None]:
        """The compute stream is current inside."""
        return self.device.stream_scope(self.compute_stream)

    def update_stream(self, stream: Stream) -> None:
        """Make `stream` current; nothing happens where it is already."""
        device = self.device
        if device.current_stream() is not stream:
            device.set_stream(stream)

    def yield_(self, site: str = "yield") -> None:
        """Yield; returns on the stream it was called on.

        Raises:
            ForeignSwitchError: this thread runs no microbatch.
        """
        _yield(self, site)

    def yield_and_switch_from_compute_to_comm(self, site: str = "yield") -> None:
        device, comm = self.device, self.comm_stream
        device.record(self.gpu_compute_done_event, self.compute_stream)
        self._yield_onto(comm, self.compute_stream, site)
        device.wait(comm, self.gpu_compute_done_event)

    def yield_and_switch_from_comm_to_compute(self, site: str = "yield") -> None:
        device, compute = self.device, self.compute_stream
        device.record(self.gpu_comm_done_event, self.comm_stream)
        self._yield_onto(compute, self.comm_stream, site)
        device.wait(compute, self.gpu_comm_done_event)

    def _yield_onto(self, target: Stream, source: Stream, site: str) -> None:
        """Yield, and go on on `target`: nobody is asked which stream is current, before or after.

        Only receives that may have to run when the yield returns must find the stream they were registered on.
        """
        carrier: Any = getcurrent()
        own = carrier.__class__ is Carrier
        microbatch: Any = carrier.microbatch if own else running.get(threading.get_ident())
        if microbatch is None:
            raise _outside(self, site)
        if microbatch.outstanding:
            self.update_stream(source)
            microbatch.yield_(site)
        elif own:
            # Nothing to receive: straight to the hub.
            microbatch.hand_over(site)
        else:
            microbatch.yield_(site)
        self.device.set_stream(target)

    def switch_to_comm(self) -> None:
        self.update_stream(self.comm_stream)

    def switch_to_comm_sync(self) -> None:
        self.device.record(self.gpu_compute_done_event, self.compute_stream)
        self.update_stream(self.comm_stream)
        self.device.wait(self.comm_stream, self.gpu_compute_done_event)

    def switch_to_compute(self) -> None:
        self.update_stream(self.compute_stream)

    def switch_to_compute_sync(self) -> None:
        self.device.record(self.gpu_comm_done_event, self.comm_stream)
        self.update_stream(self.compute_stream)
        self.device.wait(self.compute_stream, self.gpu_comm_done_event)

    def __repr__(self) -> str:
        return f"UBatchContext(id={self.id}, device={self.device.name})"


def _yield(context: UBatchContext, site: str) -> None:
    microbatch = running.get(threading.get_ident())
    if microbatch is None:
        raise _outside(context, site)
    microbatch.yield_(site)


def _outside(context: UBatchContext, site: str) -> ForeignSwitchError:
    return ForeignSwitchError(
        f"the context of microbatch {context.id} was asked to yield at {site!r} by a thread that runs none; "
        "only dbo_yield and its kin may be called outside a step"
    )


def make_ubatch_contexts(
    num_micro_batches: int,
    compute_stream: Stream | None = None,
    comm_stream: Stream | None = None,
    forward_contexts: Sequence[Any] | None = None,
    ready_barrier: threading.Barrier | None = None,
    schedule: str = "default",
    *,
    device: Device | None = None,
) -> list[UBatchContext]:
    """One context per microbatch, sharing both streams, each with events of its own.

    Args:
        num_micro_batches: N >= 1.
        compute_stream: default: the device's current stream.
        comm_stream: default: a new stream of the device.
        forward_contexts: one opaque object per microbatch, or None.
        ready_barrier: accepted and kept for callers of vLLM's function; nothing here waits on it.
        schedule: only "default".
        device: default: the CPU.

    Raises:
        ConfigurationError: N < 1, another schedule, or as many forward contexts as there are not microbatches.
    """
    if num_micro_batches < 1:
        raise ConfigurationError(f"num_micro_batches={num_micro_batches}: a step has at least one microbatch")
    if schedule != "default":
        raise ConfigurationError(f"schedule={schedule!r} is not known; use 'default', and a policy for other orders")
    if forward_contexts is not None and len(forward_contexts) != num_micro_batches:
        raise ConfigurationError(f"{len(forward_contexts)} forward contexts for {num_micro_batches} microbatches")
    if device is None:
        from .devices import cpu_device

        device = cpu_device()
    compute = device.current_stream() if compute_stream is None else compute_stream
    comm = device.new_stream("comm") if comm_stream is None else comm_stream
    return [
        UBatchContext(
            i,
            device,
            compute,
            comm,
            device.new_event(),
            device.new_event(),
            None if forward_contexts is None else forward_contexts[i],
            ready_barrier,
            schedule,
        )
        for i in range(num_micro_batches)
    ]
