"""The words of hazards: what collides, and which edge is missing, as the author of the streams would put it."""

from __future__ import annotations

from ..stream_program import Access, Operation, StreamProgram

__all__ = [
    "ONCE",
    "RECEIVE",
    "after_receive",
    "early",
    "early_event",
    "edge",
    "in_flight",
    "join",
    "late_event",
    "never",
    "own_buffer",
    "race",
    "reused",
    "twice",
    "unjoined",
]

ONCE = "each recv hook is to run once: clear it when it has run, or leave that to dbo_register_recv_hook"
RECEIVE = "its recv hook: register it with dbo_register_recv_hook before the yield, or call it"


def race(first: Operation, mine: Access, second: Operation, other: Access) -> str:
    return f"{first} {_does(mine)}, and {second} {_does(other)}, and nothing puts one behind the other"


def in_flight(send: Operation, sent: Access, other: Operation, access: Access) -> str:
    way = "into" if sent.write else "out of"
    return f"the transfer of {send} is in flight {way} {sent.buffer} when {other} {_does(access)}"


def early(send: Operation, use: Operation, access: Access) -> str:
    return f"{use} {_does(access)}, which the transfer of {send} brings and whose receive has not run"


def never(send: Operation, use: Operation | None) -> str:
    said = f"the transfer of {send} is never received"
    return said if use is None else f"{said}, and {use} reads what it brings"


def twice(first: Operation, second: Operation) -> str:
    return f"{_transfer(first)} is received by {first} and again by {second}"


def reused(own: Operation, over: Operation, use: Operation, access: Access) -> str:
    return (
        f"{use} {_does(access)}, which its microbatch wrote at #{own.number} ({own.name!r}) and {over} has written over"
    )


def late_event(record: Operation, wait: Operation, own: Operation, sibling: Operation) -> str:
    return (
        f"{record} stands behind {sibling}, so {wait.stream} waits (#{wait.number}) for the sibling's work too; what "
        f"microbatch {record.microbatch} itself put on {record.stream} ends with #{own.number} ({own.name!r}), before "
        "the switch"
    )


def unjoined(last: Operation, primary: str) -> str:
    return f"{last} may still run when the step is over: {primary} never waits for it"


# -- what is missing ---------------------------------------------------------------------------------------------------


def edge(program: StreamProgram, first: Operation, second: Operation) -> str:
    """The edge from `first` to `second`, with what there is of it already."""
    source, target = first.stream, second.stream
    if source == target:
        return (
            f"an order between the two microbatches that does not depend on the schedule: on {source} they are in this "
            "order only because of the turns that they took"
        )
    wanted = f"{target} waiting, before #{second.number}, for an event recorded on {source} behind #{first.number}"
    operations = program.operations
    waits = [each for each in operations if each.kind == "wait" and each.stream == target]
    records = [each for each in operations if each.kind == "record" and each.stream == source]
    for wait in waits:
        if wait.number > second.number and wait.of is not None and first.number < wait.of:
            recorded = operations[wait.of]
            if recorded.stream == source:
                return f"{wanted} (it does so only at #{wait.number}, behind #{second.number})"
    for wait in reversed(waits):
        if not first.number < wait.number < second.number:
            continue
        if wait.of is None:
            return f"{wanted} (#{wait.number} waits for an event that was not recorded yet, which waits for nothing)"
        if operations[wait.of].stream == source:
            return f"{wanted} (#{wait.number} waits for #{wait.of}, which was recorded before #{first.number})"
    for record in records:
        if first.number < record.number < second.number:
            return f"{wanted} (#{record.number} records one, and {target} does not wait for it)"
    return wanted


def after_receive(program: StreamProgram, send: Operation, use: Operation) -> str:
    transfer = send.transfer
    if transfer is None or transfer.arrived is None:
        return f"the receive of #{send.number} before #{use.number}"
    receive = program.operations[transfer.arrived]
    return f"the receive of #{send.number} before #{use.number} (it runs at #{receive.number}, {_where(receive)})"


def own_buffer(over: Operation, use: Operation) -> str:
    return (
        f"a buffer for each microbatch, or #{use.number} in the same slice as the write that it wants: between the two "
        f"microbatch {over.owner} had its turn"
    )


def early_event(record: Operation, own: Operation) -> str:
    return (
        f"the record of event {record.event} before the yield, right behind #{own.number}: "
        "dbo_yield_and_switch_from_compute_to_comm does it, and dbo_get_previous_event is to be called before the yield"
    )


def join(program: StreamProgram, last: Operation) -> str:
    primary, stream = program.primary, last.stream
    wanted = f"{primary} waiting for an event recorded on {stream} behind #{last.number} before the step is over"
    records = [each for each in program.operations if each.kind == "record" and each.stream == stream]
    behind = [each for each in records if each.number > last.number]
    if behind:
        return f"{wanted} (#{behind[0].number} records one, and {primary} does not wait for it)"
    waits = [
        each
        for each in program.operations
        if each.kind == "wait" and each.stream == primary and each.of is not None and each.of < last.number
    ]
    ours = [each for each in waits if program.operations[each.of or 0].stream == stream]
    if ours:
        return f"{wanted} (its last wait, #{ours[-1].number}, is for #{ours[-1].of}, recorded before)"
    return wanted


def _does(access: Access) -> str:
    return str(access)


def _transfer(operation: Operation) -> str:
    owner = "" if operation.owner is None else f" of microbatch {operation.owner}"
    return f"transfer {operation.name!r}{owner}"


def _where(operation: Operation) -> str:
    who = "outside the microbatches" if operation.microbatch is None else f"run by microbatch {operation.microbatch}"
    return f"on {operation.stream}, {who}"
