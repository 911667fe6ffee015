"""Memory that goes back to the allocator while another stream may still use it.

A caching allocator gives memory back to the stream that it was made on, and that stream's next work may have it at
once: the stream's own order keeps its own uses apart, and nothing keeps another stream's use apart from it. Either the
memory is held for the other stream (`record_stream`, or an event that keeps the tensors until it is done), or the
stream waits for the other one before its next work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING

from .checks import WORK, Check, Looked, StepView
from .findings import Hit, Missing
from .hazard_checks import NO_JOIN, NO_MEMORY
from .programs import accesses_of

if TYPE_CHECKING:
    from ...stream_program import Access, Operation
    from ...testing.happens_before import Order
    from ..schema import OpRecord

__all__ = ["CrossStreamFrees"]

NO_MAKER = "needs frees with the stream that the memory was made on; of some nobody saw it"
NO_FREES = "needs op records with frees: when memory went back to the allocator was not recorded"


class CrossStreamFrees(Check):
    """By frees, holds and uses among the operations."""

    def step(self, view: StepView) -> Looked:
        if not view.split or view.failed:
            return None
        if not view.has_memory:
            return Missing(NO_MEMORY)
        frees = [each for each in view.ops if each.op == "free"]
        if not frees:
            return Missing(NO_FREES)
        found = list(_hits(view))
        hits: list[Hit | Missing] = [hit for hit, at_the_end in found if view.whole or not at_the_end]
        if len(hits) < len(found):
            hits.append(Missing(NO_JOIN))
        return hits if all(free.stream is not None for free in frees) else [*hits, Missing(NO_MAKER)]


class _Memory:
    """What was done to a buffer since it was made: an address that was given back before is another tensor's by now."""

    def __init__(self) -> None:
        self.uses: list[tuple[Operation, Access]] = []
        self.holds: list[tuple[str | None, Access]] = []


def _hits(view: StepView) -> Iterator[tuple[Hit, bool]]:
    """Each with whether it is one because nothing in the step joins the stream."""
    from ...testing.happens_before import Order

    order = Order(view.program)
    buffers: dict[Hashable, _Memory] = defaultdict(_Memory)
    for op, operation in zip(view.ops, view.program.operations, strict=True):
        if op.op == "free":
            for access in accesses_of(op):
                memory = buffers[access.buffer]
                yield from _late_uses(view, order, op, operation.number, access, memory)
                memory.uses = [each for each in memory.uses if not each[1].meets(access)]
                memory.holds = [each for each in memory.holds if not each[1].meets(access)]
        elif op.op == "hold":
            for access in accesses_of(op):
                buffers[access.buffer].holds.append((op.stream, access))
        elif op.op in WORK:
            for access in accesses_of(op):
                buffers[access.buffer].uses.append((operation, access))


def _late_uses(
    view: StepView, order: Order, free: OpRecord, place: int, freed: Access, memory: _Memory
) -> Iterator[tuple[Hit, bool]]:
    """The last use on each other stream, where nothing keeps it apart from what may have the memory next.

    Args:
        place: of the free, among the operations of the step.
    """
    held = {stream for stream, access in memory.holds if access.meets(freed)}
    used = {
        use.stream: use
        for use, access in memory.uses
        if use.stream not in (None, free.stream) and use.stream not in held and access.meets(freed)
    }
    if free.stream is None or None in held:
        return
    for stream, use in used.items():
        following = [
            each for each in view.program.operations[place + 1 :] if each.stream == free.stream and each.kind in WORK
        ]
        late = next((each for each in following if not order.before(use, each)), None)
        if late is None and (following or order.before_the_end(use)):
            continue
        risk = f"the next work on {free.stream}" if late is None else f"#{late.number} {late.name!r} on {free.stream}"
        what = (
            f"{free.name or freed.buffer} is used on {stream} (#{use.number} {use.name!r}) and given back to "
            f"{free.stream} at #{place}, and {risk} may get it while {stream} is still at it"
        )
        where = view.place(free.ubatch, free.slice, operation=free.number, at=free.at)
        yield Hit(what, where, (stream, free.stream, use.name)), late is None
