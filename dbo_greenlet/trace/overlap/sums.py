"""Adding up what was measured of parts of a trace whose time lines have nothing in common.

Steps lie on time lines of their own, so a report over them is the sum of the reports over some of them each. Measured
in parts, a trace of ten million slices needs memory for its columns and for one part, and the part stays in the
processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields

from ..idle import Idle
from ..kernels import STAGES
from .report import Measure, Row, View

__all__ = ["sum_of_idle", "sum_of_views"]


def sum_of_views(how: str, parts: Sequence[View]) -> View:
    """The view of them together, its rows in the order in which they are shown.

    Args:
        how: what counts as communication and as compute in all of them.
        parts: one or more.
    """
    measures = [part.measure for part in parts]
    by_rank = _rows(part.by_rank for part in parts)
    order = {stage: place for place, stage in enumerate(STAGES)}
    return View(
        how=how,
        measure=Measure(**{f.name: sum(getattr(each, f.name) for each in measures) for f in fields(Measure)}),
        by_stage=sorted(
            _rows(part.by_stage for part in parts), key=lambda row: (order.get(str(row.key), len(order)), str(row.key))
        ),
        by_layer=_rows(part.by_layer for part in parts),
        by_microbatch=_rows(part.by_microbatch for part in parts),
        by_rank=by_rank if len(by_rank) > 1 else [],
    )


def _rows(parts: Iterable[Sequence[Row]]) -> list[Row]:
    by_key: dict[str | int, list[Row]] = {}
    for rows in parts:
        for row in rows:
            by_key.setdefault(row.key, []).append(row)
    numbers = [f.name for f in fields(Row) if f.name != "key"]
    return [
        Row(key=key, **{name: sum(getattr(row, name) for row in by_key[key]) for name in numbers})
        for key in sorted(by_key, key=lambda key: (str(key) if isinstance(key, str) else "", key))
    ]


def sum_of_idle(parts: Sequence[Idle]) -> Idle:
    """All of them together."""
    return Idle(**{f.name: sum(getattr(each, f.name) for each in parts) for f in fields(Idle)})
