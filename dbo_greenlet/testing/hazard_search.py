"""The search for hazards: every pair of accesses that matters, with words for what it finds (kinds: `hazards`)."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import islice

from ..stream_program import Operation, StreamProgram, Transfer
from . import hazard_words as words
from .happens_before import Order
from .hazard_uses import Found, Use, uses_of

__all__ = ["search"]

_WORK = ("work", "send", "receive")


def search(program: StreamProgram, order_of_microbatches: bool = True) -> list[Found]:
    """All hazards of `program`, in the order in which they come about."""
    order = Order(program, order_of_microbatches=order_of_microbatches)
    buffers = uses_of(program)
    found = [
        *_races(program, order, buffers, order_of_microbatches),
        *_before_receive(program, buffers),
        *_receives(program, buffers),
        *_reused(order, buffers),
        *_events_after_switches(program, order),
        *_unjoined(program, order),
    ]
    # Two operations may collide in several buffers, and are told once, unless it is the buffers that are asked for.
    unique = {(each.kind, each.place, None if order_of_microbatches else each.buffer): each for each in reversed(found)}
    return sorted(unique.values(), key=lambda each: each.place)


# -- races -------------------------------------------------------------------------------------------------------------


def _races(program: StreamProgram, order: Order, buffers: dict[Hashable, list[Use]], only_needed: bool) -> list[Found]:
    pairs: list[tuple[Use, Use]] = []
    in_flight: dict[int, tuple[Use, Use]] = {}
    for uses in buffers.values():
        for first, second in _conflicts(order, uses, only_needed):
            if first.in_flight_at(second):
                # Reads of what it brings are told as such.
                if second.access.write or not _is_owner(first, second):
                    flight = first.flight.number if first.flight is not None else -1
                    known = in_flight.get(flight)
                    if known is None or second.operation.number < known[1].operation.number:
                        in_flight[flight] = (first, second)
            else:
                pairs.append((first, second))
    return [
        *(_in_flight(program, first, second) for first, second in in_flight.values()),
        *(
            Found(
                "race",
                first.operation,
                second.operation,
                first.access.buffer,
                words.race(first.operation, first.access, second.operation, second.access),
                words.edge(program, first.operation, second.operation),
            )
            for first, second in (_needed(order, pairs) if only_needed else _shared(pairs))
        ),
    ]


def _conflicts(order: Order, uses: list[Use], only_needed: bool) -> Iterator[tuple[Use, Use]]:
    """Pairs without a path; with `only_needed` some that follow from others by what is ordered are left out."""
    live: list[Use] = []
    for second in uses:
        kept = []
        for first in live:
            apart = first.operation is second.operation
            flies = first.in_flight_at(second)
            ordered = not apart and order.before(first.operation, second.operation)
            if (
                not apart
                and (flies or not ordered)
                and (first.access.write or second.access.write)
                and first.access.meets(second.access)
            ):
                yield first, second
            # Whoever collides with `first` from here on collides with `second` too, and that says more.
            replaced = (
                only_needed
                and ordered
                and not flies
                and second.flight is None
                and (second.access.write or not first.access.write)
                and second.access.covers(first.access)
            )
            if not replaced:
                kept.append(first)
        kept.append(second)
        live = kept


def _needed(order: Order, pairs: list[tuple[Use, Use]]) -> list[tuple[Use, Use]]:
    """Those pairs that no edge for another pair would put in order, one for each two operations."""
    by_operations: dict[tuple[int, int], tuple[Use, Use]] = {}
    for first, second in pairs:
        by_operations.setdefault((first.operation.number, second.operation.number), (first, second))
    unique = list(by_operations.values())

    def follows(pair: tuple[Use, Use], other: tuple[Use, Use]) -> bool:
        first, second = pair[0].operation, pair[1].operation
        early, late = other[0].operation, other[1].operation
        return (first is early or order.before(first, early)) and (second is late or order.before(late, second))

    return [pair for pair in unique if not any(other is not pair and follows(pair, other) for other in unique)]


def _shared(pairs: list[tuple[Use, Use]]) -> list[tuple[Use, Use]]:
    """For each buffer and each two microbatches the first time that they meet there."""
    found: dict[Hashable, tuple[Use, Use]] = {}

    def place(pair: tuple[Use, Use]) -> tuple[int, int]:
        return pair[1].operation.number, -pair[0].operation.number

    for pair in pairs:
        key = (pair[0].access.buffer, frozenset(use.operation.owner for use in pair))
        if key not in found or place(pair) < place(found[key]):
            found[key] = pair
    return list(found.values())


def _is_owner(send: Use, other: Use) -> bool:
    return send.operation.owner == other.operation.owner


def _in_flight(program: StreamProgram, send: Use, other: Use) -> Found:
    return Found(
        "race",
        send.operation,
        other.operation,
        send.access.buffer,
        words.in_flight(send.operation, send.access, other.operation, other.access),
        words.after_receive(program, send.operation, other.operation),
    )


# -- transfers ---------------------------------------------------------------------------------------------------------


def _before_receive(program: StreamProgram, buffers: dict[Hashable, list[Use]]) -> Iterator[Found]:
    for transfer, (send, use) in _early_reads(buffers).items():
        if transfer.arrived is not None:
            yield Found(
                "receive-before-use",
                send.operation,
                use.operation,
                use.access.buffer,
                words.early(send.operation, use.operation, use.access),
                words.after_receive(program, send.operation, use.operation),
            )


def _early_reads(buffers: dict[Hashable, list[Use]]) -> dict[Transfer, tuple[Use, Use]]:
    """For each transfer the first read, by the microbatch that sent, of what is still in flight."""
    found: dict[Transfer, tuple[Use, Use]] = {}
    for uses in buffers.values():
        for position, send in enumerate(uses):
            if send.flight is None or not send.access.write:
                continue
            landed = send.flight.arrived
            for use in islice(uses, position + 1, None):
                if landed is not None and use.operation.number >= landed:
                    break
                if (
                    not use.access.write
                    and send.in_flight_at(use)
                    and _is_owner(send, use)
                    and send.access.meets(use.access)
                ):
                    known = found.get(send.flight)
                    if known is None or use.operation.number < known[1].operation.number:
                        found[send.flight] = (send, use)
                    break
    return found


def _receives(program: StreamProgram, buffers: dict[Hashable, list[Use]]) -> Iterator[Found]:
    sends: dict[Transfer, Operation] = {}
    receives: dict[Transfer, Operation] = {}
    for operation in program.operations:
        transfer = operation.transfer
        if transfer is None:
            continue
        if operation.kind == "send":
            sends[transfer] = operation
        elif transfer in receives:
            first = receives[transfer]
            yield Found("hook-twice", first, operation, None, words.twice(first, operation), words.ONCE)
        else:
            receives[transfer] = operation
    early = _early_reads(buffers) if len(receives) < len(sends) else {}
    for transfer, send in sends.items():
        if transfer not in receives:
            use = early[transfer][1] if transfer in early else None
            yield Found(
                "hook-never",
                send,
                None if use is None else use.operation,
                None if use is None else use.access.buffer,
                words.never(send, None if use is None else use.operation),
                words.RECEIVE,
            )


# -- microbatches ------------------------------------------------------------------------------------------------------


def _reused(order: Order, buffers: dict[Hashable, list[Use]]) -> Iterator[Found]:
    told: dict[int, tuple[Use, Use, Use]] = {}  # of each write over something, the first who reads it
    for uses in buffers.values():
        writes: list[Use] = []
        for use in uses:
            if use.access.write:
                writes.append(use)
            elif use.flight is None:
                for own, over in _overwritten(order, writes, use):
                    known = told.get(over.operation.number)
                    if known is None or use.operation.number < known[2].operation.number:
                        told[over.operation.number] = own, over, use
    for own, over, use in told.values():
        yield Found(
            "workspace-reused",
            over.operation,
            use.operation,
            use.access.buffer,
            words.reused(own.operation, over.operation, use.operation, use.access),
            words.own_buffer(over.operation, use.operation),
        )


def _overwritten(order: Order, writes: list[Use], use: Use) -> Iterator[tuple[Use, Use]]:
    """The write of the reader and the sibling's write over it, where the latter is what the reader gets to see."""
    reader = use.operation.owner
    if reader is None:
        return
    later: list[Use] = []
    for position in range(len(writes) - 1, -1, -1):
        over = writes[position]
        if not over.access.meets(use.access) or over.operation is use.operation:
            continue
        if over.operation.owner != reader and _is_update(over) and _is_update(use):
            continue  # both add to what is there
        hidden = any(each.access.meets(over.access) for each in later)
        later.append(over)
        owner = over.operation.owner
        if not (hidden or over.access.partial or owner in (reader, None) or over.in_flight_at(use)) and order.before(
            over.operation, use.operation
        ):
            for own in map(writes.__getitem__, range(position - 1, -1, -1)):
                if (
                    own.operation.owner == reader
                    and own.access.meets(over.access)
                    and own.access.meets(use.access)
                    and order.before(own.operation, over.operation)
                ):
                    yield own, over
                    break
        if over.access.covers(use.access):
            return  # whatever was written before is hidden by it


def _is_update(use: Use) -> bool:
    return use.access._replace(write=not use.access.write) in use.operation.accesses


def _events_after_switches(program: StreamProgram, order: Order) -> Iterator[Found]:
    operations = program.operations
    on_stream: dict[str | None, list[Operation]] = {}
    records: list[tuple[Operation, list[Operation], Operation]] = []  # record, sibling's work before it, its last own
    for operation in operations:
        before = on_stream.setdefault(operation.stream, [])
        if operation.kind == "record" and operation.microbatch is not None and before:
            behind, own = _behind_siblings(operation, before)
            # What a sibling's slice, or the hub, received for it could not be marked before the switch.
            if behind and own is not None and own.slice != operation.slice and own.microbatch == own.owner:
                records.append((operation, behind, own))
        elif operation.kind == "wait" or operation.kind in _WORK:
            before.append(operation)
    for record, behind, own in records:
        wait = next(
            (
                each
                for each in operations[record.number :]
                if each.kind == "wait" and each.of == record.number and each.owner == record.microbatch
            ),
            None,
        )
        if wait is None or wait.stream == record.stream:
            continue
        new = [each for each in behind if not order.before(each, wait)]
        held_up = any(each.stream == wait.stream and each.kind in _WORK for each in operations[wait.number :])
        if new and held_up and not _is_needed(behind, wait, operations):
            yield Found(
                "event-after-switch",
                new[-1],
                record,
                None,
                words.late_event(record, wait, own, new[-1]),
                words.early_event(record, own),
            )


def _behind_siblings(record: Operation, before: list[Operation]) -> tuple[list[Operation], Operation | None]:
    """What siblings put on the stream since the recording microbatch did, and what that one did last."""
    behind: list[Operation] = []
    for operation in reversed(before):
        if operation.owner == record.microbatch:
            return behind[::-1], operation
        if operation.owner is None:
            break
        if operation.kind in _WORK:
            behind.append(operation)
    return [], None


def _is_needed(behind: list[Operation], wait: Operation, operations: list[Operation]) -> bool:
    """Whether anything of the waiting microbatch behind the wait touches what the siblings' work touches."""
    return any(
        (ours.write or theirs.write) and ours.meets(theirs)
        for later in operations[wait.number + 1 :]
        if later.stream == wait.stream and later.owner == wait.owner
        for ours in later.accesses
        for sibling in behind
        for theirs in sibling.accesses
    )


# -- streams -----------------------------------------------------------------------------------------------------------


def _unjoined(program: StreamProgram, order: Order) -> Iterator[Found]:
    last: dict[str, Operation] = {}
    for operation in program.operations:
        if operation.kind in _WORK and operation.stream is not None:
            last[operation.stream] = operation
    for operation in last.values():
        if not order.before_the_end(operation):
            yield Found(
                "unjoined-stream",
                operation,
                None,
                None,
                words.unjoined(operation, program.primary),
                words.join(program, operation),
            )
