"""From a schedule to the order of work in vLLM's notation. Pure: no clock, no text, no file.

A microbatch i runs through a Mixture-of-Experts layer in slices that end at yield sites, and what is in such a slice
follows from the site at its end. Low latency, and whatever else completes a receive by a hook, has two kinds of sites:

    ends at            runs, in this order
    layer3.dispatch    A0_i, A1_i of layer 3; the receives that are due; D_i send
    layer3.combine     MLP_i of layer 3; the receives that are due; C_i send; S_i
    "" (returned)      what is left of the model; the receives that are left

with A0 attention's input projections, A1 attention, output projection and gate, D dispatch, MLP the routed experts,
C combine, S the shared expert. "Receives that are due" are those which the previous microbatch of the ring left for
this one; a microbatch that no sibling served starts its slice with its own receive (`Item.no_sibling`).

High throughput has no receive hooks. A microbatch yields before its dispatch and before its combine, is launched onto
the communication stream when it is resumed, and the compute stream waits for it at a fixed place. Its slices end at
three kinds of sites:

    layer3.before_dispatch   the wait for C_i of the layer below; A0_i, A1_i; the event that D_i waits for
    layer3.before_combine    D_i is launched; the wait for D_i; MLP_i; the event that C_i waits for
    layer3.combine           C_i is launched; S_i
    "" (returned)            the wait for the last C_i; what is left of the model

There the order is that of the compute stream: "send" is the event that D_i or C_i waits for (from there on the
communication stream may run it), "recv" the compute stream's wait for it. The launch in between was rejected as the
beginning of a window: the host launches a dispatch long after the device may run it, and right before the wait, so
that every window would look empty. The communication stream runs one after the other what is in flight at once.

The order of the scheduler's decisions thus gives the order of the pieces, and `order` is these tables and nothing else.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import TraceFileError

__all__ = [
    "Item",
    "Receive",
    "Site",
    "is_high_throughput",
    "order",
    "parse_site",
    "ring_receives",
    "why_no_notation",
]

_SITE = re.compile(r"(?:.*\D)?(\d+)\.(before_dispatch|before_combine|dispatch|combine)")
# The sites that a microbatch passes in each layer.
_LOW_LATENCY = ("dispatch", "combine")
_HIGH_THROUGHPUT = ("before_dispatch", "before_combine", "combine")


@dataclass(frozen=True)
class Site:
    """A yield site of a Mixture-of-Experts layer: its number, and "dispatch", "combine" or "before_" one of these."""

    layer: int
    stage: str


@dataclass(frozen=True)
class Receive:
    """Who completed a receive, and during which slice.

    Attributes:
        owner: the microbatch that sent.
        by: the microbatch that ran the receive; None where no sibling did, and it ran when its owner was resumed.
        decision: index in the schedule of the slice during which it ran.
    """

    owner: int
    by: int | None
    decision: int


@dataclass(frozen=True)
class Item:
    """One entry of the order.

    Attributes:
        piece: "A0", "A1", "MLP", "S", "D" or "C"; "in", "L<n>" or "out" for layers without yields before, between and
            after the ones that yield.
        microbatch, layer: whose it is, and in which layer.
        action: "send" or "recv" for D and C, "" for compute.
        decision: index in the schedule of the slice it belongs to.
        no_sibling: a receive that no sibling ran.
    """

    piece: str
    microbatch: int
    layer: int
    action: str
    decision: int
    no_sibling: bool = False

    @property
    def label(self) -> str:
        """The piece with its microbatch, as in the timetable: "A0_1", "D_0"."""
        return f"{self.piece}_{self.microbatch}"

    def __str__(self) -> str:
        text = f"{self.label} {self.action}" if self.action else self.label
        return text + "*" if self.no_sibling else text


# A run has a few hundred sites, and each of its slices and windows has one of them.
@functools.lru_cache(maxsize=4096)
def parse_site(site: str) -> Site | None:
    """What a label such as "layer3.dispatch" or "model.layers.3.combine" says; None for every other label."""
    match = _SITE.fullmatch(site)
    return Site(int(match[1]), match[2]) if match else None


def is_high_throughput(sites: Sequence[str]) -> bool:
    """Whether these are the sites of the high-throughput pattern; see the module."""
    return any((site := parse_site(text)) is not None and site.stage == _HIGH_THROUGHPUT[0] for text in sites)


def why_no_notation(decisions: Sequence[int], sites: Sequence[str]) -> str | None:
    """None, or why this schedule cannot be written with dispatches and combines: one clause, no full stop."""
    if len(decisions) != len(sites):
        return f"the schedule has {len(decisions)} decisions and {len(sites)} sites"
    stages = _HIGH_THROUGHPUT if is_high_throughput(sites) else _LOW_LATENCY
    expected: dict[int, Site] = {}
    for position, (index, text) in enumerate(zip(decisions, sites, strict=True)):
        wanted = expected.get(index)
        if not text:
            if wanted is not None and wanted.stage != stages[0]:
                return f"microbatch {index} returned between a dispatch and its combine"
            continue
        site = parse_site(text)
        if site is None:
            return f"its sites are not dispatch and combine labels (the first other one is {text!r})"
        if wanted is None or wanted.stage == stages[0]:
            in_order = site.stage == stages[0] and (wanted is None or site.layer >= wanted.layer)
        else:
            in_order = site == wanted
        if not in_order:
            return f"microbatch {index} came to {text!r} (decision {position}) out of turn"
        passed = stages.index(site.stage) + 1
        next_layer = passed == len(stages)
        expected[index] = Site(site.layer + next_layer, stages[0] if next_layer else stages[passed])
    if not expected:
        return "it has no yields"
    return None


def ring_receives(decisions: Sequence[int], sites: Sequence[str], count: int) -> list[Receive]:
    """Who runs which receive where nothing was recorded: the rule of the ring.

    Every send leaves its receive to the next microbatch of the ring, which runs it before its own next send or when it
    returns. Whoever is resumed with its receive outstanding runs it first. High throughput has no such receives.

    Args:
        decisions, sites: the schedule.
        count: number of microbatches N.

    Raises:
        TraceFileError: the sites are no dispatches and combines.
    """
    _require(decisions, sites)
    if is_high_throughput(sites):
        return []
    outstanding = [0] * count
    out: list[Receive] = []
    for decision, (index, site) in enumerate(zip(decisions, sites, strict=True)):
        if outstanding[index]:
            outstanding[index] = 0
            out.append(Receive(index, None, decision))
        previous = (index - 1) % count
        if outstanding[previous]:
            outstanding[previous] = 0
            out.append(Receive(previous, index, decision))
        if site:
            outstanding[index] = 1
    return out


def order(
    decisions: Sequence[int],
    sites: Sequence[str],
    receives: Sequence[Receive] | None = None,
    *,
    shared_expert: bool = True,
) -> list[Item]:
    """The order of work of one step.

    Args:
        decisions: the microbatch that ran, slice by slice.
        sites: the site at which each slice ended, "" = returned.
        receives: who ran which receive, in the order in which they ran; None applies the rule of the ring.
        shared_expert: whether the model has one; sites cannot tell.

    A receive without a send before it is left out, and a send whose receive is missing (a failed step) stays open. High
    throughput has no recorded receives: its waits follow from the sites.

    Raises:
        TraceFileError: the sites are no dispatches and combines; `why_no_notation` tells beforehand.
    """
    _require(decisions, sites)
    waits = is_high_throughput(sites)
    if receives is None:
        receives = ring_receives(decisions, sites, 1 + max(decisions))
    due: dict[int, list[Receive]] = defaultdict(list)
    for receive in receives:
        due[receive.decision].append(receive)
    items: list[Item] = []
    in_flight: dict[int, Item] = {}
    layers: dict[int, int] = {}  # microbatch -> the layer of its latest site
    for decision, (index, site) in enumerate(zip(decisions, sites, strict=True)):
        pieces = _pieces(parse_site(site), layers.get(index, -1), waits)
        layers[index] = pieces.layer
        hub = [r for r in due[decision] if r.by is None]
        siblings = [r for r in due[decision] if r.by is not None]
        items += _received(hub, in_flight, decision)
        if pieces.waits and (sent := in_flight.pop(index, None)) is not None:
            items.append(Item(sent.piece, index, sent.layer, "recv", decision))
        items += [Item(name, index, pieces.layer, "", decision) for name in pieces.before]
        items += _received(siblings, in_flight, decision)
        if pieces.send:
            in_flight[index] = Item(pieces.send, index, pieces.layer, "send", decision)
            items.append(in_flight[index])
        if shared_expert:
            items += [Item(name, index, pieces.layer, "", decision) for name in pieces.after]
    return items


@dataclass(frozen=True)
class _Pieces:
    layer: int
    before: tuple[str, ...]  # the receives that are due come between `before` and `send`
    send: str = ""
    after: tuple[str, ...] = ()
    waits: bool = False  # the compute stream waits, before all else, for what the microbatch has in flight


def _pieces(site: Site | None, previous_layer: int, high_throughput: bool) -> _Pieces:
    """What runs in the slice that ends at `site`: the tables at the head of this module."""
    if site is None:
        return _Pieces(previous_layer + 1, ("out",), waits=high_throughput)
    if site.stage == "combine":
        return _Pieces(site.layer, (), after=("S",)) if high_throughput else _Pieces(site.layer, ("MLP",), "C", ("S",))
    if site.stage == "before_combine":
        return _Pieces(site.layer, ("MLP",), "C", waits=True)
    skipped = (_without_yields(previous_layer + 1, site.layer - 1),) if site.layer > previous_layer + 1 else ()
    return _Pieces(site.layer, (*skipped, "A0", "A1"), "D", waits=high_throughput)


def _received(receives: Sequence[Receive], in_flight: dict[int, Item], decision: int) -> list[Item]:
    out: list[Item] = []
    for receive in receives:
        if (sent := in_flight.pop(receive.owner, None)) is not None:
            out.append(Item(sent.piece, receive.owner, sent.layer, "recv", decision, receive.by is None))
    return out


def _without_yields(first: int, last: int) -> str:
    # Layers before the first yield may be none of this rank's (a pipeline stage), so they are not counted by name.
    if first == 0:
        return "in"
    return f"L{first}" if first == last else f"L{first}..{last}"


def _require(decisions: Sequence[int], sites: Sequence[str]) -> None:
    if (why := why_no_notation(decisions, sites)) is not None:
        raise TraceFileError(f"this step cannot be written as dispatches and combines: {why}")
