"""Stream programs written by hand: each operation with the microbatch and slice that it is to be charged to."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from dbo_greenlet.stream_program import Access, Operation, StreamProgram, Transfer, whole

Accesses = Sequence[Hashable | Access]


class Hand:
    """A program under construction; `turn` says who issues what comes next."""

    def __init__(self) -> None:
        self.program = StreamProgram()
        self.microbatch: int | None = None
        self.slice: int | None = None
        self.site = ""
        self._slices: dict[int, int] = {}

    def turn(self, microbatch: int | None, site: str = "") -> Hand:
        """The next slice of `microbatch`, which begins at `site`; None: outside of all."""
        self.microbatch, self.site = microbatch, site
        self.slice = None
        if microbatch is not None:
            self.slice = self._slices[microbatch] = self._slices.get(microbatch, -1) + 1
        return self

    def _mark(self, operation: Operation) -> Operation:
        operation.microbatch, operation.slice, operation.site = self.microbatch, self.slice, self.site
        if operation.kind != "receive":
            operation.owner = self.microbatch
        return operation

    def work(self, stream: str, name: str, reads: Accesses = (), writes: Accesses = ()) -> Operation:
        return self._mark(self.program.add("work", stream, name, whole(reads, writes)))

    def record(self, stream: str, event: int) -> Operation:
        return self._mark(self.program.add("record", stream, "record", event=event))

    def wait(self, stream: str, event: int) -> Operation:
        return self._mark(self.program.add("wait", stream, "wait", event=event))

    def host_wait(self, stream: str | None = None, event: int | None = None) -> Operation:
        return self._mark(self.program.add("host_wait", stream, "wait", event=event))

    def send(self, stream: str, name: str, reads: Accesses = (), writes: Accesses = ()) -> Transfer:
        operation = self._mark(self.program.send(stream, name, whole(reads, writes)))
        transfer = operation.transfer
        assert transfer is not None
        transfer.owner = self.microbatch
        return transfer

    def receive(self, stream: str, transfer: Transfer, writes: Accesses = (), reads: Accesses = ()) -> Operation:
        operation = self._mark(self.program.receive(stream, transfer, whole(reads, writes)))
        operation.owner = transfer.owner
        return operation
