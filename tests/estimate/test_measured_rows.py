"""Every step that was measured, split and unsplit, against what is predicted for it (scripts/check_estimate.py)."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dbo_greenlet.estimate import estimate
from dbo_greenlet.estimate.predict import SPLIT
from tests.estimate.missed_rows import MISSED

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_estimate.py"
GROUPS = json.loads(SCRIPT.with_name("measured_steps.json").read_text())["groups"]


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("check_estimate", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_estimate"] = module
    spec.loader.exec_module(module)
    return module


def test_each_group_says_where_its_figures_are_from() -> None:
    for group in GROUPS:
        assert len(group["source"]) > 20, group["name"]
        assert group["date"].startswith("202"), group["name"]
    names = [(group["name"], row["name"]) for group in GROUPS for row in group["rows"]]
    assert len(names) == len(set(names))


ROWS = [(group, row) for group in GROUPS for row in group["rows"]]


def measured(row: dict[str, Any]) -> float:
    return float(row["gain"] if "gain" in row else row["unsplit_ms"] / row["split_ms"])


def test_from_shapes_what_lost_is_never_recommended_and_what_is_missed_is_known(script: Any) -> None:
    off, known = [], []
    # Of the sweep every other row, for its time; the script takes all.
    rows = [each for group in GROUPS for each in ROWS[:: 1 + (len(group["rows"]) > 50)] if each[0] is group]
    for group, row in rows:
        found = estimate(script.setup_of(row, group), (2,), (script.POLICY,))
        assert not (measured(row) < 1 and found.verdict == SPLIT), (group["name"], row["name"], found.best)
        if abs(found.best.gain - measured(row)) > script.POINTS:
            off.append((group["name"], row["name"]))
        if row["name"] in MISSED["shapes"].get(group["name"], ()):
            known.append((group["name"], row["name"]))
    assert len(ROWS) >= 273
    assert off == known


def test_the_rows_that_are_known_to_be_missed_are_rows() -> None:
    rows = {(group["name"], row["name"]) for group, row in ROWS}
    for groups in MISSED.values():
        for group, names in groups.items():
            assert {(group, name) for name in names} <= rows


def test_nor_is_a_split_into_more_or_another_order_of_what_lost(script: Any) -> None:
    lost = [(group, row) for group, row in ROWS if measured(row) < 1]
    for group, row in lost[::5]:
        found = estimate(script.setup_of(row, group), (3,), ("phase_offset:1", "round_robin"))
        assert found.verdict != SPLIT, (group["name"], row["name"], found.best)


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group["name"])
def test_by_an_unsplit_step_what_lost_is_never_recommended(script: Any, group: dict[str, Any]) -> None:
    rows = [script.check(row, group) for row in group["rows"][::11]]
    assert [row.name for row in rows if row.wrong] == []
    missed = {row.name for row in rows if abs(row.off("unsplit")) > script.POINTS}
    assert missed == MISSED["unsplit"].get(group["name"], set()) & {row.name for row in rows}


def test_the_table_lists_the_rows_that_are_missed(script: Any) -> None:
    group = next(group for group in GROUPS if "two H200s, low latency" in group["name"])
    rows = [script.check(row, group) for row in group["rows"] if "64 requests, drop-in" in row["name"]]
    text = "\n".join(script.table(rows, every=False))
    assert "LL 27 layers, eager, 64 requests, drop-in" in text
    assert "LL 27 layers, full graph, 64 requests, drop-in" not in text
    assert "LL 27 layers, full graph, 64 requests, drop-in" in "\n".join(script.table(rows, every=True))


def test_a_recommendation_of_what_lost_ends_the_script_with_1(script: Any, tmp_path: Path, monkeypatch: Any) -> None:
    group = next(group for group in GROUPS if "published" in group["name"])
    won = next(row for row in group["rows"] if row["gain"] > 1)
    for gain, code in ((won["gain"], 0), (0.9, 1)):
        rows = tmp_path / f"{code}.json"
        rows.write_text(json.dumps({"groups": [{**group, "rows": [{**won, "gain": gain}]}]}))
        monkeypatch.setattr(sys, "argv", ["check", "--rows", str(rows), "--json", str(tmp_path / "out.json")])
        assert script.main() == code
