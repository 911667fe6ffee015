"""What a rule is, and what it is given of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ..notation import is_high_throughput, parse_site
from .findings import Hit, Missing, Place

if TYPE_CHECKING:
    from ...stream_program import StreamProgram
    from ...testing.hazard_uses import Found
    from ..files import TraceFiles
    from ..reader import StepTrace
    from ..schema import EndRecord, HeaderRecord, OpRecord

__all__ = ["WORK", "Check", "Facts", "Looked", "Rule", "StepView", "layer_of"]

WORK = ("work", "send", "receive")

Looked = Sequence[Hit | Missing] | Missing | None
"""What a check says of a step: what it found (an empty list: nothing), why it could not look (in the list: at a part),
or None where there is nothing of its kind in the step."""


class Facts:
    """What is known of the run beside its steps, as far as it has been read.

    Args:
        trace: what the steps are read from.
        cutoff: bytes below which a message counts as small; None for what is known of the transport.
    """

    def __init__(self, trace: TraceFiles, cutoff: int | None = None) -> None:
        self._trace = trace
        self.cutoff = cutoff
        self._world = 0

    @property
    def headers(self) -> dict[int, HeaderRecord]:
        """By rank."""
        return self._trace.headers

    @property
    def ends(self) -> dict[int, EndRecord]:
        """By rank."""
        return self._trace.ends

    @property
    def torn(self) -> bool:
        """Whether the last line was cut off."""
        return self._trace.torn

    @property
    def world(self) -> int:
        """Number of ranks. Every header says it, so the first one is enough."""
        if not self._world:
            self._world = next((header.world for header in self.headers.values()), 1)
        return self._world

    def setting(self, rank: int, name: str) -> object:
        """A setting in the rank's header, or in any other's: ranks run with the same ones."""
        headers = self.headers
        header = headers.get(rank) or next(iter(headers.values()), None)
        return None if header is None else header.settings.get(name)


class StepView:
    """One step, and what several rules ask of it, worked out once.

    Attributes: `step`, its records.
    """

    def __init__(self, step: StepTrace) -> None:
        self.step = step

    @cached_property
    def split(self) -> bool:
        """Whether more than one microbatch ran."""
        return self.step.count > 1

    @cached_property
    def failed(self) -> bool:
        """Whether the step failed, as far as the trace tells."""
        record = self.step.record
        return (record is not None and record.error is not None) or any(each.failed for each in self.step.slices)

    @cached_property
    def high_throughput(self) -> bool:
        """Whether its sites are those of communication on a comm stream."""
        return is_high_throughput(self.step.sites)

    @cached_property
    def ops(self) -> list[OpRecord]:
        return sorted(self.step.ops, key=lambda each: each.number)

    @cached_property
    def has_work(self) -> bool:
        """Whether the operations are more than events: what was enqueued is among them."""
        return any(each.op in WORK for each in self.ops)

    @cached_property
    def has_memory(self) -> bool:
        """Whether they say what memory they touch."""
        return any(each.memory for each in self.ops if each.op in WORK)

    @cached_property
    def whole(self) -> bool:
        """Whether what followed the last slice is among the operations: of a program with a scheduler only it is not.

        Such a program tells nothing of its steps, not even where its batch was cut.
        """
        record = self.step.record
        return record is None or bool(record.slices)

    @cached_property
    def program(self) -> StreamProgram:
        """The operations as a stream program."""
        from .programs import program_of

        return program_of(self)

    @cached_property
    def hazards(self) -> list[Found]:
        """The hazards of that program."""
        # Not `find_hazards`: what it makes of them, for people, is made of the same here.
        from ...testing.hazard_scan import looks_clean
        from ...testing.hazard_search import search

        return [] if looks_clean(self.program) else search(self.program)

    @cached_property
    def sites_by_slice(self) -> dict[tuple[int, int], str]:
        """The site at which a slice ends, by (microbatch, slice)."""
        return {(each.ubatch, each.slice): each.site for each in self.step.slices}

    @cached_property
    def layers(self) -> dict[tuple[int | None, int | None], int | None]:
        """The layer that a slice's site names, by (microbatch, slice), where the trace says so."""
        return {(each.ubatch, each.slice): each.layer for each in self.step.slices}

    def place(
        self,
        microbatch: int | None = None,
        slice: int | None = None,
        *,
        site: str | None = None,
        operation: int | None = None,
        at: float | None = None,
    ) -> Place:
        """A place in this step. Without a site it is the one at which the slice ends."""
        step = self.step
        if site is None and microbatch is not None and slice is not None:
            site = self.sites_by_slice.get((microbatch, slice))
        layer = self.layers.get((microbatch, slice))
        if layer is None and site is not None:
            layer = layer_of(site)
        return Place(step.run, step.step, step.rank, microbatch, slice, site, layer, operation, at)


class Check:
    """Looks at the steps of a trace one after the other, and once at the end.

    A new one is made for each trace, so it may remember what it saw.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    def step(self, view: StepView) -> Looked:
        """Look at one step."""
        return None

    def end(self) -> list[Hit | Missing]:
        """What only shows when all steps were seen. One `Missing` here stands for one step."""
        return []


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        id: its name on the command line.
        severity: "error" or "warning".
        why: one sentence: what it looks for, and what it costs.
        remedy: what to do about it, a sentence.
        origin: the bug behind it.
        check: makes what looks at a trace of ours.
        on_profiles: "" where a rule of this id looks at profiles, else why it cannot: a clause.
    """

    id: str
    severity: str
    why: str
    remedy: str
    origin: str
    check: Callable[[Facts], Check]
    on_profiles: str = ""


def layer_of(site: str) -> int | None:
    """The layer that a yield site names."""
    parsed = parse_site(site)
    return None if parsed is None else parsed.layer
