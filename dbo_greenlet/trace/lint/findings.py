"""What a rule finds, and what it could not look at."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .checks import Rule

__all__ = ["ERROR", "WARNING", "Coverage", "Finding", "Hit", "Missing", "NotChecked", "Place", "Report"]

# A wrong result, a crash or a hang; and what only costs time.
ERROR = "error"
WARNING = "warning"


@dataclass(frozen=True)
class Place:
    """Where something was found; None is what does not apply or is not known.

    Attributes:
        run, step, rank: the step.
        microbatch, slice: whose slice.
        site: the yield site at which that slice ends, "" where the microbatch returned; of a communication the site
            behind its send.
        layer: of that site.
        operation: number of the operation in the step (`OpRecord.number`).
        at: microseconds on the trace's axis.
    """

    run: str | None = None
    step: int | None = None
    rank: int | None = None
    microbatch: int | None = None
    slice: int | None = None
    site: str | None = None
    layer: int | None = None
    operation: int | None = None
    at: float | None = None


@dataclass(frozen=True)
class Hit:
    """One place at which a rule found something.

    Attributes:
        what: a sentence's worth, without a full stop.
        place: where.
        group: hits of one rule with equal groups become one finding, which is told by the first.
        remedy: what to do about it; "" is the rule's own.
    """

    what: str
    place: Place
    group: Hashable = ()
    remedy: str = ""


@dataclass(frozen=True)
class Missing:
    """Why a rule could not look at a step: a clause, as in "not checked: <why>"."""

    why: str


@dataclass
class Finding:
    """Hits of one kind.

    Attributes:
        rule: which rule.
        what, place, remedy: of the first hit.
        count: number of hits.
        steps, ranks, microbatches, layers: where they are.
    """

    rule: Rule
    what: str
    place: Place
    remedy: str
    count: int = 0
    steps: set[int] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)
    microbatches: set[int] = field(default_factory=set)
    layers: set[int] = field(default_factory=set)

    def add(self, place: Place) -> None:
        """Count a hit."""
        self.count += 1
        for held, value in (
            (self.steps, place.step),
            (self.ranks, place.rank),
            (self.microbatches, place.microbatch),
            (self.layers, place.layer),
        ):
            if value is not None:
                held.add(value)


@dataclass
class Coverage:
    """What a rule looked at.

    Attributes:
        checked: number of steps (or of other things it looks at as a whole).
        missing: why not, and how often.
    """

    checked: int = 0
    missing: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class NotChecked:
    """A rule that could not look at everything.

    Attributes:
        rule: which rule.
        why: a clause.
        steps: how many steps lacked it; 0 where it is not about steps.
        checked: how many it did look at.
    """

    rule: Rule
    why: str
    steps: int
    checked: int


@dataclass(frozen=True)
class Report:
    """What `dbo-greenlet lint` prints.

    Attributes:
        path, source: the file or files, and what wrote them.
        about: what was looked at, a clause.
        findings: errors first, then in the order of the rules.
        not_checked: in the order of the rules.
        checked: rules that looked at something.
        ignored: rules that were left out by id.
        notes: what else to know, as sentences.
    """

    path: str
    source: str
    about: str
    findings: list[Finding]
    not_checked: list[NotChecked]
    checked: list[Rule]
    ignored: list[Rule]
    notes: list[str] = field(default_factory=list)
