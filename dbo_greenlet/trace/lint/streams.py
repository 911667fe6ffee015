"""Which stream communication runs on, and whether every stream is joined when the step is over."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .checks import Check, Looked, StepView
from .findings import Hit, Missing, Place
from .hazard_checks import NO_JOIN, NO_OPS, hits_of
from .programs import PRIMARY

if TYPE_CHECKING:
    from ...stream_program import Operation
    from ..schema import OpRecord

__all__ = ["CommOnCompute", "UnjoinedStreams"]

# What people and libraries call it; matched against work only, since a send flies whatever stream it leaves from.
_COMMUNICATES = re.compile(
    r"(?i)^(d|c|counts|dispatch|combine)(_\d+)?$|nccl|all_?to_?all|all_?gather|reduce_?scatter|a2a"
)


class CommOnCompute(Check):
    """Communication that occupies the compute stream, so that nothing can run behind it."""

    def step(self, view: StepView) -> Looked:
        if not view.split or view.failed:
            return None
        if view.has_work:
            return [*_collectives(view), *_waited_for_at_once(view)]
        if not view.high_throughput:
            # Recv hooks: what flies occupies no stream, and whether something else does only operations tell.
            return Missing(NO_OPS + "; with recv hooks nothing else tells on which stream a collective runs")
        streams = {each.stream for each in view.ops if each.stream} or {each.stream for each in view.step.gpu}
        if not streams:
            return Missing("needs op records or GPU times: which streams were used was not recorded")
        if streams != {PRIMARY}:
            return []
        first = view.step.slices[0] if view.step.slices else view.step.gpu[0]
        what = (
            f"its sites are those of communication on a stream of its own ({first.site!r}), and the step uses none but "
            f"{PRIMARY}: its dispatches and combines run there, and the other microbatch waits behind them"
        )
        return [Hit(what, view.place(first.ubatch, first.slice, at=first.begin), "no comm stream")]


def _collectives(view: StepView) -> list[Hit]:
    return [
        Hit(
            f"#{op.number} {op.name!r} is communication and runs on {op.stream}, where the other microbatch computes",
            _place(view, op),
            ("collective", op.name),
        )
        for op in view.ops
        if op.op == "work" and op.stream == PRIMARY and op.ubatch is not None and _COMMUNICATES.search(op.name)
    ]


def _waited_for_at_once(view: StepView) -> list[Hit]:
    hits = []
    sends: dict[int, Operation] = {}
    for operation in view.program.operations:
        if operation.transfer is None:
            continue
        if operation.kind == "send":
            sends[operation.transfer.number] = operation
            continue
        send = sends[operation.transfer.number]
        mine = operation.microbatch is not None and operation.microbatch == send.microbatch
        if mine and operation.slice == send.slice and operation.stream == PRIMARY:
            what = (
                f"#{send.number} sends {send.name!r} and {PRIMARY} waits for it at #{operation.number}, in the same "
                "slice: the other microbatch has no turn while it flies"
            )
            hits.append(Hit(what, _place(view, view.ops[send.number]), ("at once", send.name)))
    return hits


class UnjoinedStreams(Check):
    """By hazards where the trace has work; by events alone a stream that waited for another one has work behind it."""

    def step(self, view: StepView) -> Looked:
        if not view.split or view.failed or view.step.record is None:
            return None
        if not view.ops:
            return Missing(NO_OPS)
        if view.has_work:
            hits = hits_of(view, "unjoined-stream")
            return hits if view.whole or not hits else Missing(NO_JOIN)
        from ...testing.happens_before import Order

        program = view.program
        order = Order(program)
        last = {each.stream: each for each in program.operations if each.kind == "wait" and each.stream != PRIMARY}
        return [
            Hit(
                f"{stream} waits at #{each.number} for work to do, and {PRIMARY} never waits for {stream} behind that",
                _place(view, view.ops[each.number]),
                ("unjoined", stream),
            )
            for stream, each in last.items()
            if not order.before_the_end(each)
        ]


def _place(view: StepView, op: OpRecord) -> Place:
    return view.place(op.ubatch, op.slice, operation=op.number, at=op.at)
