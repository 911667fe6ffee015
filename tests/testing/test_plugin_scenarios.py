"""Scenarios that a suite declares and never reaches, by the pytest plugin."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.testing.pytest_runs import Suite, environment


def test_a_scenario_that_was_never_reached_fails_the_suite(scenarios: Suite) -> None:
    done = scenarios.pytest()
    assert done.returncode == 1 and "3 passed" in done.stdout
    section = done.stdout.partition("scenarios that were never reached")[2].splitlines()[1]
    assert section == "never"
    reached = scenarios.pytest(env={**environment(), "NOW": "1"})
    assert reached.returncode == 0 and "scenarios" not in reached.stdout


@pytest.mark.parametrize("arguments", [["tests/test_it.py::test_never"], ["-k", "never"], ["tests/test_it.py"]])
def test_a_part_of_the_suite_need_not_reach_everything(scenarios: Suite, arguments: list[str]) -> None:
    done = scenarios.pytest(*arguments)
    assert done.returncode == 0 and "(this is no failure: only a part of the suite was to run)" in done.stdout


def test_a_suite_within_a_suite_counts_for_itself(scenarios: Suite, tmp_path: Path) -> None:
    notes = tmp_path / "notes.jsonl"
    notes.touch()
    done = scenarios.pytest(env={**environment(), "DBO_GREENLET_SOMETIMES": str(notes)})
    assert done.returncode == 1 and notes.read_text() == ""
