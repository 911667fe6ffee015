"""Which operations of a stream program certainly run before which others, whatever the times are.

Vector clocks over streams (Fidge 1988, Mattern 1989): with each operation goes, for every other stream, the number of
the last operation there that is complete before this one begins. Four things put one operation behind another:

* the stream: operations of one stream run in the order in which the host issued them;
* an event: what follows a `wait` runs behind what its `record` stood behind. A wait for an event that was not recorded
  before it waits for nothing, as in CUDA;
* a transfer: what follows a `receive` runs behind the `send`;
* the host: what it issues after it waited for a stream, an event or everything runs behind that.

Every one of these leads from an earlier issued operation to a later one, so one pass in the order of issue is enough.
"""

from __future__ import annotations

from collections.abc import Hashable

from ..stream_program import Operation, StreamProgram

__all__ = ["Order"]

# Lane -> number of the last operation there that is complete. Shared between operations, so never changed in place.
_Clock = dict[Hashable, int]


class Order:
    """The order of the operations of `program`.

    With `order_of_microbatches` False a stream orders the operations of one microbatch, and those outside of all with
    everything, but not two microbatches with each other: what is then without a path is in order only because this
    schedule has it so.
    """

    def __init__(self, program: StreamProgram, *, order_of_microbatches: bool = True) -> None:
        self._together = order_of_microbatches
        self._primary = program.primary
        # Of each operation: what is complete when it begins, but for those of its own lane, which the numbers tell.
        self._behind: list[_Clock] = []
        self._marks: dict[int, _Clock] = {}  # records and sends: what is complete when they are
        self._now: dict[Hashable, _Clock] = {}
        self._last: dict[Hashable, int] = {}
        self._lanes_of: dict[str | None, list[Hashable]] = {}
        self._host: _Clock = {}
        sends: dict[int, int] = {}
        for operation in program.operations:
            if operation.kind == "host_wait":
                self._host_wait(operation)
                self._behind.append(self._host)
                continue
            lane = self._enter(operation)
            if operation.kind == "wait":
                # A wait begins when its stream comes to it; what it waits for is behind what follows.
                self._behind.append(self._now[lane])
                self._join(lane, None if operation.of is None else self._marks[operation.of])
            elif operation.kind == "receive" and operation.transfer is not None:
                sent = sends.get(operation.transfer.number)
                self._join(lane, None if sent is None else self._marks[sent])
            if operation.kind != "wait":
                self._behind.append(self._now[lane])
            self._last[lane] = operation.number
            if operation.kind in ("record", "send"):
                self._marks[operation.number] = {**self._now[lane], lane: operation.number}
                if operation.kind == "send" and operation.transfer is not None:
                    sends[operation.transfer.number] = operation.number
            if not self._together and operation.owner is None:
                mark = {**self._now[lane], lane: operation.number}
                for each in self._lanes_of[operation.stream]:
                    self._join(each, mark)

    def before(self, first: Operation, second: Operation) -> bool:
        """`first` is certainly complete when `second` begins."""
        if first.number >= second.number:
            return False
        lane = self._lane(first)
        return lane == self._lane(second) or self._behind[second.number].get(lane, -1) >= first.number

    def before_the_end(self, operation: Operation) -> bool:
        """`operation` is certainly complete when the primary stream is, or the host knows that it is."""
        lane = self._lane(operation)
        return (
            operation.stream == self._primary
            or self._host.get(lane, -1) >= operation.number
            or any(self._now[each].get(lane, -1) >= operation.number for each in self._lanes_of.get(self._primary, ()))
        )

    def _lane(self, operation: Operation) -> Hashable:
        if self._together or operation.owner is None:
            return operation.stream
        return operation.stream, operation.owner

    def _enter(self, operation: Operation) -> Hashable:
        lane = self._lane(operation)
        stream = operation.stream
        lanes = self._lanes_of.setdefault(stream, [])
        if lane not in self._now:
            self._now[lane] = self._host
            if stream in self._last:
                # What was issued there outside of all microbatches comes first.
                self._join(lane, {**self._now[stream], stream: self._last[stream]})
            lanes.append(lane)
        if not self._together and operation.owner is None:
            for each in lanes:
                if each != lane:
                    self._join(lane, {**self._now[each], each: self._last[each]})
        return lane

    def _join(self, lane: Hashable, clock: _Clock | None) -> None:
        if clock is not None:
            self._now[lane] = _joined(self._now[lane], clock)

    def _host_wait(self, operation: Operation) -> None:
        reached: list[_Clock] = []
        if operation.event is not None:
            if operation.of is not None:
                reached.append(self._marks[operation.of])
        else:
            for stream, lanes in self._lanes_of.items():
                if operation.stream is None or operation.stream == stream:
                    reached += [{**self._now[lane], lane: self._last[lane]} for lane in lanes]
        for clock in reached:
            self._host = _joined(self._host, clock)
        for lane in self._now:
            self._join(lane, self._host)


def _joined(one: _Clock, other: _Clock) -> _Clock:
    if all(one.get(lane, -1) >= number for lane, number in other.items()):
        return one
    joined = dict(one)
    for lane, number in other.items():
        if joined.get(lane, -1) < number:
            joined[lane] = number
    return joined
