"""The critical path drawn over the lanes of its step."""

from __future__ import annotations

import pytest

pytest.importorskip("numpy", reason="numpy is not installed")
from dbo_greenlet.trace.critical_path.graph import Piece
from dbo_greenlet.trace.critical_path.lanes import render_path_lanes
from dbo_greenlet.trace.critical_path.report import StepPath


def piece(begin: float, end: float, stage: str, lane: str, what: str = "", kind: str = "work") -> Piece:
    return Piece(begin, end, stage, what, lane, kind)


def shown(*pieces: Piece) -> StepPath:
    return StepPath("dbo", 0, 0, 100.0, 100.0, [], {}, list(pieces))


def test_what_is_on_the_path_is_heavy_and_the_rest_is_light() -> None:
    path = shown(
        piece(100, 120, "host", "host", "launching A0 of microbatch 0", "host"),
        piece(120, 160, "attention", "compute 0", "A0 of microbatch 0"),
        piece(160, 180, "dispatch", "comm 0", "D0 of microbatch 0"),
        piece(180, 200, "experts", "compute 0", "M0 of microbatch 0"),
    )
    lanes = {
        "compute 0": [(120.0, 160.0), (180.0, 200.0)],
        "host": [(100.0, 150.0)],
        "compute 1": [(160.0, 180.0)],
        "comm 0": [(140.0, 180.0)],
    }
    assert render_path_lanes(path, lanes, width=60).splitlines() == [
        "          0 us                      100 us (2.0 us a column)",
        "host      ┃host━━━━━───────────────",
        "compute 0           ┃A0━━━━━━━━━━━━━━━━━          ┃M0━━━━━━━",
        "compute 1                               ──────────",
        "comm 0                        ──────────┃D0━━━━━━━",
    ]
    assert render_path_lanes(path, lanes, width=60, unicode=False).splitlines()[-1] == (
        "comm 0                        ----------|D0======="
    )


def test_lanes_are_in_order_host_streams_wire() -> None:
    names = ["stream 21", "in flight", "stream 7", "thread 3", "comm 1", "host 10", "host 2", "host"]
    text = render_path_lanes(shown(), dict.fromkeys(names, ()), width=60)
    assert [line.strip() for line in text.splitlines()[1:]] == [
        "host", "host 2", "host 10", "thread 3", "stream 7", "stream 21", "comm 1", "in flight",
    ]  # fmt: skip


def test_what_is_too_short_for_a_box_joins_its_neighbour() -> None:
    """Sixty kernels of a microsecond are one box, with the name of the longest, the first of equals."""
    pieces = [piece(100 + n, 101 + n, "experts" if n % 2 else "idle", "stream 7") for n in range(60)]
    pieces.append(piece(160, 200, "attention", "stream 7"))
    text = render_path_lanes(shown(*pieces), {}, width=60)
    assert text.splitlines()[1] == "stream 7 ┃idle━━━━━━━━━━━━━━━━━━━━━━━━━╋┃attention━━━━━━━━━━"


def test_what_ran_outside_the_step_is_left_out() -> None:
    text = render_path_lanes(shown(), {"stream 7": [(0.0, 50.0), (150.0, 160.0), (300.0, 400.0)]}, width=60)
    assert text.splitlines()[1].split() == ["stream", "7", "─" * 6]
