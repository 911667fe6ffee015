"""The slow and obvious way to order a program and to find its hazards: a graph of operations, and every pair.

Written from the text of `hazards` and `happens_before`, without their data structures.
"""

from __future__ import annotations

from collections.abc import Iterator

from dbo_greenlet.stream_program import Access, Operation, StreamProgram

WORK = ("work", "send", "receive")


class Graph:
    """Nodes are operations; each path is made of the four kinds of edges."""

    def __init__(self, program: StreamProgram, order_of_microbatches: bool = True) -> None:
        self.program = program
        self.together = order_of_microbatches
        operations = program.operations
        self.after: dict[int, set[int]] = {each.number: set() for each in operations}
        for later in operations:
            for earlier in operations[: later.number]:
                if self._edge(earlier, later):
                    self.after[earlier.number].add(later.number)
        # Nodes are in topological order: the reach of later ones is known.
        self.reach: dict[int, set[int]] = {}
        for number in range(len(operations) - 1, -1, -1):
            reached = set()
            for later in self.after[number]:
                reached |= {later} | self.reach[later]
            self.reach[number] = reached

    def _edge(self, earlier: Operation, later: Operation) -> bool:
        if later.kind == "host_wait":
            if later.event is not None:
                return earlier.number == later.of or earlier.kind == "host_wait"
            return later.stream in (None, earlier.stream) or earlier.kind == "host_wait"
        if earlier.kind == "host_wait":
            return True
        if earlier.stream == later.stream and (
            self.together or earlier.owner == later.owner or None in (earlier.owner, later.owner)
        ):
            return True
        if later.kind == "wait":
            return earlier.number == later.of
        return later.kind == "receive" and earlier.kind == "send" and earlier.transfer is later.transfer

    def before(self, first: Operation, second: Operation) -> bool:
        return second.number in self.reach[first.number]

    def before_the_end(self, operation: Operation) -> bool:
        ends = [
            each.number
            for each in self.program.operations
            if each.kind == "host_wait" or each.stream == self.program.primary
        ]
        return operation.stream == self.program.primary or any(each in self.reach[operation.number] for each in ends)


def meets(one: Access, other: Access) -> bool:
    end = float("inf")
    return one.buffer == other.buffer and max(one.begin, other.begin) < min(
        end if one.end is None else one.end, end if other.end is None else other.end
    )


def uses(program: StreamProgram) -> list[tuple[Operation, Access, object]]:
    """(operation, access, transfer that goes on touching it), reads of an operation first."""
    found: list[tuple[Operation, Access, object]] = []
    for operation in program.operations:
        transfer, accesses = operation.transfer, operation.accesses
        those: list[tuple[Operation, Access, object]] = []
        if operation.kind == "send":
            assert transfer is not None
            arrival = () if transfer.arrived is None else program.operations[transfer.arrived].accesses
            for access in dict.fromkeys((*accesses, *(each for each in arrival if each.write))):
                those.append((operation, access, transfer if access.write or access in arrival else None))
        elif operation.kind == "receive" and transfer is not None and transfer.arrived != operation.number:
            continue
        else:
            those = [(operation, access, None) for access in accesses]
        found += sorted(those, key=lambda each: each[1].write)
    return found


def updates(operation: Operation, access: Access) -> bool:
    return any(
        each.write != access.write and each[2:] == access[2:] for each in operation.accesses if each[0] == access[0]
    )


def in_flight(transfer: object, other: Operation) -> bool:
    if transfer is None or other.transfer is transfer:
        return False
    arrived = transfer.arrived  # type: ignore[attr-defined]
    return arrived is None or arrived > other.number


def hazards(program: StreamProgram, order_of_microbatches: bool = True) -> set[tuple[str, int, int | None]]:
    return set(_hazards(program, Graph(program, order_of_microbatches)))


def _hazards(program: StreamProgram, graph: Graph) -> Iterator[tuple[str, int, int | None]]:
    everything = uses(program)
    racing: set[tuple[int, int]] = set()
    shared: dict[object, tuple[int, int]] = {}
    flights: dict[object, tuple[int, int]] = {}
    early: dict[object, tuple[int, int]] = {}
    for position, (first, mine, flight) in enumerate(everything):
        for second, other, _ in everything[position + 1 :]:
            if first is second or not (mine.write or other.write) or not meets(mine, other):
                continue
            pair = (first.number, second.number)
            if in_flight(flight, second):
                read_by_owner = mine.write and not other.write and first.owner == second.owner
                told = early if read_by_owner else flights
                told[flight] = min(told.get(flight, pair), pair, key=lambda each: each[1])
            elif not graph.before(first, second):
                racing.add(pair)
                key = (mine.buffer, frozenset((first.owner, second.owner)))
                shared[key] = min(shared.get(key, pair), pair, key=lambda each: (each[1], -each[0]))
    operations = program.operations

    def follows(pair: tuple[int, int], other: tuple[int, int]) -> bool:
        (a, b), (c, d) = pair, other
        return (a == c or graph.before(operations[a], operations[c])) and (
            b == d or graph.before(operations[d], operations[b])
        )

    for pair in racing if graph.together else ():
        if not any(other != pair and follows(pair, other) for other in racing):
            yield ("race", *pair)
    for pair in () if graph.together else shared.values():
        yield ("race", *pair)
    for pair in flights.values():
        yield ("race", *pair)
    for transfer in program.transfers:
        parts = [each for each in operations if each.transfer is transfer]
        send, receives = parts[0], parts[1:]
        for again in receives[1:]:
            yield "hook-twice", receives[0].number, again.number
        if not receives:
            yield "hook-never", send.number, early[transfer][1] if transfer in early else None
        elif transfer in early:
            yield ("receive-before-use", *early[transfer])
    yield from _reused(everything, graph)
    yield from _late_events(operations, graph)
    for stream in {each.stream for each in operations}:
        last = [each for each in operations if each.stream == stream and each.kind in WORK]
        if last and not graph.before_the_end(last[-1]):
            yield "unjoined-stream", last[-1].number, None


def _reused(everything: list, graph: Graph) -> Iterator[tuple[str, int, int]]:
    told = set()
    for position, (reader, read, flight) in enumerate(everything):
        i = reader.owner
        if read.write or flight is not None or i is None:
            continue
        earlier = [each for each in everything[:position] if each[1].write and each[0] is not reader]
        if updates(reader, read):
            earlier = [each for each in earlier if not updates(each[0], each[1]) or each[0].owner == i]
        for at, (over, written, over_flight) in enumerate(earlier):
            if over.owner in (i, None) or written.partial or not meets(written, read) or in_flight(over_flight, reader):
                continue
            if any(meets(access, written) and meets(access, read) for _, access, _ in earlier[at + 1 :]):
                continue
            own = [
                op
                for op, access, _ in earlier[:at]
                if op.owner == i and meets(access, written) and meets(access, read) and graph.before(op, over)
            ]
            if own and graph.before(over, reader) and over.number not in told:
                told.add(over.number)
                yield "workspace-reused", over.number, reader.number


def _late_events(operations: list[Operation], graph: Graph) -> Iterator[tuple[str, int, int]]:
    for record in operations:
        i = record.microbatch
        if record.kind != "record" or i is None:
            continue
        on_stream = [each for each in operations[: record.number] if each.stream == record.stream]
        on_stream = [each for each in on_stream if each.kind in (*WORK, "wait")]
        own = [each for each in on_stream if each.owner == i]
        waits = [each for each in operations if each.kind == "wait" and each.of == record.number]
        waits = [each for each in waits if each.owner == i]
        if not own or own[-1].slice == record.slice or own[-1].microbatch != i:
            continue
        if not waits or waits[0].stream == record.stream:
            continue
        since = on_stream[on_stream.index(own[-1]) + 1 :]
        if any(each.owner is None for each in since):
            continue
        behind = [each for each in since if each.kind in WORK]
        wait = waits[0]
        held = [each for each in operations[wait.number + 1 :] if each.stream == wait.stream]
        new = [each for each in behind if _only_through(each, record, wait, graph)]
        needed = any(
            (one.write or other.write) and meets(one, other)
            for later in held
            if later.owner == i
            for one in later.accesses
            for sibling in behind
            for other in sibling.accesses
        )
        if new and any(each.kind in WORK for each in held) and not needed:
            yield "event-after-switch", new[-1].number, record.number


def _only_through(sibling: Operation, record: Operation, wait: Operation, graph: Graph) -> bool:
    """Without that wait's own edge the sibling's work would not be before it."""
    others = {number for number, later in graph.after.items() if wait.number in later and number != record.number}
    return not any(sibling.number == number or number in graph.reach[sibling.number] for number in others)
