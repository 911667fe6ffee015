"""Ranks that communicate in different orders: a collective of one rank meets another one's, or nobody's."""

from __future__ import annotations

from itertools import zip_longest

from .checks import Check, Facts, Looked, StepView, layer_of
from .findings import Hit, Missing, Place

__all__ = ["OrderMismatch"]

# (microbatch, site) of each communication, in the order in which a rank starts them.
_Order = tuple[tuple[int, str], ...]


class OrderMismatch(Check):
    """Compares each step of a run between the ranks that the trace holds.

    A step that failed on any of them is left out: it ended somewhere in between. So are steps of one number whose votes
    differ: those are not the same step.
    """

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._orders: dict[_Order, _Order] = {}  # each order once
        self._steps: dict[tuple[str, int], dict[int, tuple[_Order, str] | None]] = {}

    def step(self, view: StepView) -> Looked:
        world = self.facts.world
        if world < 2:
            return None
        step = view.step
        ranks = self._steps.setdefault((step.run, step.step), {})
        ranks[step.rank] = self._said(view)
        if len(ranks) < world:
            return None
        del self._steps[step.run, step.step]
        return _compared(step.run, step.step, ranks)

    def _said(self, view: StepView) -> tuple[_Order, str] | None:
        step = view.step
        if view.failed:
            return None
        if step.receives:
            order = tuple((each.ubatch, each.site) for each in step.receives)
        else:
            order = tuple((each.ubatch, each.site) for each in step.slices if each.site)
        replayed = step.record is not None and step.record.execution == "replayed"
        if not order and step.record is not None and step.record.split and replayed:
            return None  # from its graph, whose order was compared when it was captured
        votes = "" if step.record is None else repr(step.record.votes)
        return self._orders.setdefault(order, order), votes

    def end(self) -> list[Hit | Missing]:
        out: list[Hit | Missing] = []
        for (run, number), ranks in self._steps.items():
            if len(ranks) > 1:
                found = _compared(run, number, ranks)
                out += [] if found is None or isinstance(found, Missing) else found
            elif next(iter(ranks.values())) not in (None, ((), "")):
                out.append(Missing(f"needs the same step of another rank, of the {self.facts.world} that ran"))
        return out


def _compared(run: str, number: int, ranks: dict[int, tuple[_Order, str] | None]) -> Looked:
    known = {rank: said for rank, said in ranks.items() if said is not None}
    if len(known) < 2 or len(known) < len(ranks):
        return None
    (reference, (order, votes)), *others = sorted(known.items())
    hits = []
    for rank, (other, its_votes) in others:
        if its_votes != votes:
            return Missing("needs one step on all ranks; the votes in these of the same number differ")
        if other is order:
            continue
        place, (mine, theirs) = next(
            (place, pair) for place, pair in enumerate(zip_longest(order, other)) if pair[0] != pair[1]
        )
        what = (
            f"communication {place} of the step is {_words(mine)} on rank {reference} and "
            f"{_words(theirs)} on rank {rank}"
        )
        microbatch, site = theirs or mine or (None, "")
        hits.append(
            Hit(what, Place(run, number, rank, microbatch, None, site, layer_of(site)), (reference, rank, mine, theirs))
        )
    return hits


def _words(each: tuple[int, str] | None) -> str:
    return "none at all" if each is None else f"that of microbatch {each[0]} before {each[1]!r}"
