"""How faults strike: at the real yields and receives, in a subclass of the carrier's own kind of microbatch, and on the
device's own transfers and allocations.

The yield is the place for what comes from outside as well. A signal that is sent there by the microbatch itself reaches
its handler at the same instruction in each run; a timer would do so somewhere.

A transfer is a `Transfer` of a device that times them (it has `transfer_time`, as `VirtualDevice` has) or work on a
stream of it other than the primary (DeepEP high throughput), and otherwise a receive hook that a microbatch registers.
Its number is that of the send part either way. On a hook, "late" makes whoever runs it wait, "early" runs it where it
is registered, and "reorder" puts it behind the hook registered next. Work on a comm stream stays in the stream's order;
it fails where it is launched.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any

from ..step import Microbatch, Receive, running
from .errors import InjectedFault

if TYPE_CHECKING:
    from ..stream_program import Transfer
    from .faults import Fault, Faults

__all__ = ["make_device_faulty", "make_faulty"]

# A microbatch on a thread of its own waits for the handler, which Python runs on the main thread. Before it sends, the
# main thread must have gone to sleep: a signal that comes while it is about to is handled only when it next wakes up,
# which can be at the end of the step.
_ASLEEP_SECONDS = 0.01
# For the handler of Ctrl-C, which is known to end the step; should it not have run after a while, it is sent again.
_INTERRUPT_SECONDS = 0.5
_INTERRUPTS = 20
# For any other, which may do nothing that could be seen here.
_HANDLER_SECONDS = 0.05


def make_faulty(base: type[Microbatch], faults: Faults) -> type[Microbatch]:
    """A subclass of `base` whose yields and receives `faults` strike. One for each run."""
    counts: dict[int, int] = {}  # microbatch -> receives registered
    # microbatch -> id of its receive that is to be overtaken. Not the receive: this class outlives the step.
    held: dict[int, int] = {}
    caller = get_ident()

    class FaultyMicrobatch(base):  # type: ignore[misc, valid-type]
        __slots__ = ()

        def register_receive(self, hook: Callable[[], Any]) -> None:
            index = self.index
            number = counts.get(index, 0)
            counts[index] = number + 1
            super().register_receive(_faulty_hook(hook, faults, index, number, self._device()))
            if not self.outstanding:
                return  # a step that is being aborted takes none
            receive = self.outstanding[-1]
            overtaken = held.pop(index, None)
            # The latest is left out: it may have the id of one that is gone.
            for earlier in [each for each in self.outstanding[:-1] if id(each) == overtaken]:
                _overtake(self, earlier)
                faults.strike("reorder", index, number - 1)
            if faults.waiting("reorder", index, number):
                held[index] = id(receive)
            if faults.strike("early", index, number):
                receive.run(index)

        def _device(self) -> Any:
            return None if self.context is None else self.context.device

    # Every yield of a greenlet ends in `hand_over`, some without passing `yield_`; threads have `yield_` alone.
    place = "hand_over" if hasattr(base, "hand_over") else "yield_"
    original: Callable[[Any, str], None] = getattr(base, place)

    def yielding(self: Any, site: str) -> None:
        step = self.step
        if step is not None and not step.aborting:
            _strike_yield(self, site, faults, caller)
        original(self, site)

    setattr(FaultyMicrobatch, place, yielding)
    FaultyMicrobatch.__name__ = FaultyMicrobatch.__qualname__ = f"Faulty{base.__name__}"
    return FaultyMicrobatch


def make_device_faulty(device: Any, faults: Faults) -> None:
    """Let `faults` strike the transfers and allocations of `device`, as far as it has them."""
    kinds = {fault.kind for fault in faults.faults}
    if kinds & {"late", "early", "reorder", "fail"} and hasattr(device, "transfer_time"):
        flights = _Flights(device, faults)
        device.transfer_time = flights.time
        device.work = flights.work
        if "fail" in kinds:
            device.receive = flights.receive
    if "oom" in kinds and hasattr(device, "new_buffer"):
        new_buffer = device.new_buffer

        def exhausted(name: str) -> Any:
            microbatch = running.get(get_ident())
            if microbatch is not None:
                faults.allocating(microbatch.index)
            return new_buffer(name)

        device.new_buffer = exhausted


class _Flights:
    """The transfers of one run on a device that times them."""

    def __init__(self, device: Any, faults: Faults) -> None:
        self._device = device
        self._faults = faults
        self._inner_time = device.transfer_time
        self._inner_receive = device.receive
        self._inner_work = device.work
        self._sent: dict[int, int] = {}  # microbatch -> transfers sent
        self._numbers: dict[Transfer, tuple[int, int]] = {}  # transfer -> its microbatch and its number there
        self._held: list[Transfer] = []

    def time(self, transfer: Transfer, us: float) -> float:
        """Microseconds that `transfer` flies; asked once for each, when it leaves."""
        if self._inner_time is not None:
            us = self._inner_time(transfer, us)
        owner = transfer.owner
        if owner is None:
            return us
        number = self._next(owner)
        self._numbers[transfer] = (owner, number)
        us = self._struck(us, owner, number)
        self._let_overtake(us)
        if self._faults.waiting("reorder", owner, number):
            self._held.append(transfer)
        return us

    def work(self, name: str, us: float, *, stream: Any = None, **keywords: Any) -> Any:
        microbatch = running.get(get_ident())
        where = self._device.current_stream() if stream is None else stream
        if microbatch is not None and where is not self._device.default_stream:
            owner = microbatch.index
            number = self._next(owner)
            fault = self._faults.strike("fail", owner, number)
            if fault is not None:
                raise _failed(fault)
            us = self._struck(us, owner, number)
        return self._inner_work(name, us, stream=stream, **keywords)

    def _next(self, owner: int) -> int:
        number = self._sent.get(owner, 0)
        self._sent[owner] = number + 1
        return number

    def _struck(self, us: float, owner: int, number: int) -> float:
        """`us`, as far as it is late or early."""
        if self._faults.strike("early", owner, number):
            us = 0.0
        late = self._faults.strike("late", owner, number)
        return us if late is None else us + late.microseconds

    def _let_overtake(self, us: float) -> None:
        """Those that are to be overtaken arrive 1 us behind the one that leaves now and flies for `us`."""
        begin = self._device.program.operations[-1].begin
        for transfer in self._held:
            if not transfer.received and transfer.arrives is not None and begin is not None:
                self._faults.strike("reorder", *self._numbers[transfer])
                transfer.arrives = max(transfer.arrives, begin + us + 1.0)
        self._held.clear()

    def receive(self, transfer: Transfer, *arguments: Any, **keywords: Any) -> Any:
        place = self._numbers.get(transfer)
        fault = None if place is None else self._faults.strike("fail", *place)
        if fault is not None:
            raise _failed(fault)
        return self._inner_receive(transfer, *arguments, **keywords)


def _faulty_hook(hook: Callable[[], Any], faults: Faults, index: int, number: int, device: Any) -> Callable[[], Any]:
    late = faults.waiting("late", index, number)
    if late is None and faults.waiting("fail", index, number) is None:
        return hook

    def faulty() -> Any:
        # Only now: what never runs has not struck. The device may have come first.
        fault = faults.strike("fail", index, number)
        if fault is not None:
            raise _failed(fault)
        if late is not None and faults.strike("late", index, number):
            if hasattr(device, "host"):
                device.host(late.microseconds)
            else:
                time.sleep(late.seconds)
        return hook()

    return faulty


def _failed(fault: Fault) -> InjectedFault:
    return InjectedFault(f"{fault}: transfer {fault.number} of microbatch {fault.microbatch} did not complete")


def _overtake(microbatch: Any, receive: Receive) -> None:
    """Move `receive` to the end of the queues that it stands in, behind what its owner registered after it."""
    successor = microbatch.successor
    for queue in (microbatch.outstanding, () if successor is None else successor.inbox):
        if receive in queue:
            queue.remove(receive)  # type: ignore[union-attr]  # nothing is in ()
            queue.append(receive)  # type: ignore[union-attr]


def _strike_yield(microbatch: Any, site: str, faults: Faults, caller: int) -> None:
    index, number = microbatch.index, microbatch.slice_number
    fault = faults.strike("signal", index, number)
    if fault is not None:
        _send_signal(microbatch, signal.Signals[f"SIG{fault.signal}"], caller)
        if microbatch.step.aborting:
            return  # the yield itself says so
    fault = faults.strike("raise", index, number)
    if fault is not None:
        raise InjectedFault(f"{fault}: in place of yield {number} of microbatch {index}, at {site!r}")


def _send_signal(microbatch: Any, number: signal.Signals, caller: int) -> None:
    main = threading.main_thread().ident
    if get_ident() == main or main is None:
        # The handler runs before this returns.
        signal.raise_signal(number)
    elif caller != main:
        # The main thread has no part in the step, and so no say in when it goes on.
        signal.pthread_kill(main, number)
    else:
        # To that thread: it waits for the step, and only a signal of its own wakes it. Without waiting for the handler
        # the microbatch would go on for as long as the operating system pleases, and no two runs would be the same.
        ends_the_step = signal.getsignal(number) is signal.default_int_handler
        for _ in range(_INTERRUPTS if ends_the_step else 1):
            time.sleep(_ASLEEP_SECONDS)
            signal.pthread_kill(main, number)
            if _aborts_within(microbatch, _INTERRUPT_SECONDS if ends_the_step else _HANDLER_SECONDS):
                return


def _aborts_within(microbatch: Any, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if microbatch.step.aborting:
            return True
        time.sleep(0.001)
    return False
