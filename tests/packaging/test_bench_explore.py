"""What scripts/bench_explore.py measures, and that it runs from a shell."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import bench_explore as script
import pytest

from dbo_greenlet.testing.verdicts import laws_kept, no_hazard, same_outputs


def test_the_row_aimed_at_has_the_verdicts_that_are_promised():
    (row,) = [each for each in script.rows() if each.name == script.AIMED_AT]
    assert {laws_kept, no_hazard} <= set(row.verdicts)
    assert same_outputs not in row.verdicts
    found = row.explore()
    assert (found.schedules, found.space, found.complete) == (42, 42, True)


@pytest.mark.parametrize("name", [each.name for each in script.rows()])
def test_every_row_explores_without_a_finding(name):
    (row,) = [each for each in script.rows() if each.name == name]
    assert row.explore().schedules > 1


def test_each_row_is_first_in_turn(monkeypatch):
    turns = []
    monkeypatch.setattr(script, "one_round", lambda row, seconds: (turns.append(row.name) or len(turns), 7))
    every = script.rows()[:3]
    pieces: list[float] = []
    measured = script.measure(every, 3, 0.0, pieces)
    assert len(pieces) == 3 and min(pieces) > 0
    a, b, c = (row.name for row in every)
    assert turns == [a, b, c, b, c, a, c, a, b]
    assert measured[a] == {"schedules": 7, "per_second": 6, "least": 1, "most": 8, "us": 1e6 / 6}


def test_from_a_shell(tmp_path):
    out = tmp_path / "folder" / "bench.json"
    done = subprocess.run(
        [sys.executable, script.__file__, "--quick", "--out", str(out)],
        cwd=Path(script.__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert f"aim: 2,000 a second for {script.AIMED_AT}: " in done.stdout
    assert "a fixed piece of Python took " in done.stdout
    report = json.loads(out.read_text())
    assert {row.name for row in script.rows()} <= set(report["rows"])
    assert all(row["per_second"] > 0 for row in report["rows"].values())
