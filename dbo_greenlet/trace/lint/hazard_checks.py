"""What the search for hazards finds in the operations of a step; one check for each kind that it knows."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

from .checks import Check, Facts, Looked, StepView
from .findings import Hit, Missing

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...testing.hazard_uses import Found

__all__ = ["NO_JOIN", "NO_MEMORY", "NO_OPS", "NO_SENDS", "HazardCheck", "hazard_check", "hits_of", "without_numbers"]

NO_OPS = (
    "needs op records, the operations of each step, which were not recorded; `dbo-greenlet record --memory` has them"
)
NO_SENDS = "needs op records with sends and receives, which only `dbo-greenlet record --memory` has"
NO_MEMORY = "needs op records of what operations read and write, which only `dbo-greenlet record --memory` has"
NO_JOIN = (
    "needs a step of a runner: what the program did behind this one, and whether that joined its streams, was not "
    "recorded"
)


class HazardCheck(Check):
    """Hazards of one kind.

    Args:
        kind: of `hazards.KINDS`.
        needs: "sends", or "memory": what was read and written.
    """

    def __init__(self, facts: Facts, kind: str, *, needs: str) -> None:
        super().__init__(facts)
        self._kind = kind
        self._needs = needs

    def step(self, view: StepView) -> Looked:
        if not view.split:
            return None
        if not view.ops:
            return Missing(NO_OPS)
        if self._needs == "memory" and not view.has_memory:
            return Missing(NO_MEMORY)
        if not view.has_work:
            return Missing(NO_SENDS)
        return [] if view.failed else hits_of(view, self._kind)


def hazard_check(kind: str, *, needs: str) -> Callable[[Facts], Check]:
    """What makes the check of a kind."""
    return partial(HazardCheck, kind=kind, needs=needs)


def hits_of(view: StepView, kind: str) -> list[Hit]:
    """The hazards of a kind in a step."""
    return [_hit(view, found) for found in view.hazards if found.kind == kind]


def _hit(view: StepView, found: Found) -> Hit:
    # The later of the two operations: what is missing is missing before it.
    late = found.first if found.second is None else found.second
    place = view.place(late.microbatch, late.slice, operation=late.number, at=view.ops[late.number].at)
    group = (found.kind, late.kind, late.stream, without_numbers(place.site), without_numbers(found.buffer))
    return Hit(found.what, place, group, f"put in what is missing: {found.missing}")


def without_numbers(name: object) -> str:
    """What layers and microbatches have in common."""
    return "" if name is None else re.sub(r"\d+", "#", str(name))
