"""A trace measured in parts gives what it gives in one, wherever it is cut and however its lines are mixed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="msgspec is not installed")
from dbo_greenlet.trace import GpuRecord, Record
from dbo_greenlet.trace.overlap import trace as overlap_trace
from dbo_greenlet.trace.overlap.text import overlap_json
from tests.trace.overlap_reports import hooks, own, write


def records(*, gpu: str) -> list[Record]:
    """Twelve steps of two ranks at different paces, whose GPU times are there for all, some or none of the steps."""
    out: list[Record] = []
    for step in range(12):
        for rank in (0, 1):
            timed = gpu == "all" or (gpu == "some" and step % 3 == 0)
            out += hooks(step, rank=rank, shift=1000.0 * step + 7 * rank, gpu=timed)
            if timed:
                out.append(GpuRecord(step, rank, "dbo", 0, 1, "", "comm", 16.0, 24.0, 1.0, "layer2.dispatch"))
    return out


def close(found: Any, wanted: Any) -> None:
    if isinstance(wanted, float):
        assert found == pytest.approx(wanted, abs=1e-6)
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key in wanted:
            close(found[key], wanted[key])
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            close(one, other)
    else:
        assert found == wanted


@pytest.mark.parametrize("gpu", ["all", "some", "none"])
@pytest.mark.parametrize("rows", [1, 20, 60])
@pytest.mark.parametrize("mixed", [False, True])
def test_parts_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: str, rows: int, mixed: bool) -> None:
    some = records(gpu=gpu)
    whole = overlap_json(own(write(tmp_path, *some)))
    if mixed:
        # Lines of two ranks that write into one file by turns; those of one rank and step keep their order.
        keys = sorted({(r.step, r.rank) for r in some})  # type: ignore[union-attr]
        pieces = {key: [r for r in some if (r.step, r.rank) == key] for key in keys}  # type: ignore[union-attr]
        turns = [key for key in keys for _ in pieces[key]]
        random.Random(5).shuffle(turns)
        some = [pieces[key].pop(0) for key in turns]
    monkeypatch.setattr(overlap_trace, "ROWS_AT_ONCE", rows)
    cuts = []
    monkeypatch.setattr(overlap_trace, "_measure", _counting(overlap_trace._measure, cuts))
    parts = overlap_json(own(write(tmp_path, *some)))
    assert len(cuts) > 1
    close(parts, whole)
    assert parts["in_flight"]["by_rank"] and parts["in_flight"]["events"] == whole["in_flight"]["events"] > 0


def _counting(function: Any, calls: list[Any]) -> Any:
    def counted(*args: Any, **named: Any) -> Any:
        calls.append(args)
        return function(*args, **named)

    return counted
