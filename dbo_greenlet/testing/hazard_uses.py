"""What the search for hazards goes through: who touches each buffer, and for how long; and what it finds there."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from ..stream_program import Access, Operation, StreamProgram, Transfer

__all__ = ["Found", "Use", "uses_of"]


@dataclass(frozen=True)
class Found:
    """A hazard in the making; the fields are those of `hazards.Hazard`."""

    kind: str
    first: Operation
    second: Operation | None
    buffer: Hashable
    what: str
    missing: str

    @property
    def place(self) -> tuple[int, int]:
        second = self.first.number if self.second is None else self.second.number
        return max(second, self.first.number), self.first.number


@dataclass(frozen=True)
class Use:
    """An access of an operation. With `flight` set, the operation is that transfer's send, and the transfer goes on
    touching the bytes until its receive."""

    operation: Operation
    access: Access
    flight: Transfer | None = None
    arrives: Transfer | None = None  # the operation is the receive that ends this flight

    def in_flight_at(self, other: Use) -> bool:
        flight = self.flight
        return (
            flight is not None
            and other.arrives is not flight
            and other.operation is not self.operation
            and (flight.arrived is None or flight.arrived > other.operation.number)
        )


def uses_of(program: StreamProgram) -> dict[Hashable, list[Use]]:
    """Who touches each buffer, in the order of issue; those without a write are left out."""
    operations = program.operations
    buffers: dict[Hashable, list[Use]] = {}
    written: set[Hashable] = set()
    for operation in operations:
        transfer = operation.transfer
        uses: list[Use] = []
        if operation.kind == "send" and transfer is not None:
            arrival = () if transfer.arrived is None else operations[transfer.arrived].accesses
            for access in operation.accesses:
                held = access.write or access in arrival
                uses.append(Use(operation, access, transfer if held else None))
            uses += [
                Use(operation, access, transfer)
                for access in arrival
                if access.write and access not in operation.accesses
            ]
        elif operation.kind == "receive" and transfer is not None:
            if transfer.arrived != operation.number:
                continue  # a second receive is a hazard by itself
            uses += [Use(operation, access, arrives=transfer) for access in operation.accesses]
        else:
            uses += [Use(operation, access) for access in operation.accesses]
        for use in sorted(uses, key=lambda each: each.access.write):
            buffers.setdefault(use.access.buffer, []).append(use)
            if use.access.write:
                written.add(use.access.buffer)
    return {buffer: uses for buffer, uses in buffers.items() if buffer in written}
