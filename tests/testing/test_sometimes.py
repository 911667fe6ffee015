"""Marks that a suite must reach: they never stop the code, cost nothing when off, and count across processes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

VARIABLE = "DBO_GREENLET_SOMETIMES"


def fresh() -> ModuleType:
    """The module once more: the session's own marks are none of these tests' business."""
    found = importlib.util.find_spec("dbo_greenlet.testing.sometimes")
    assert found is not None
    spec = importlib.util.spec_from_file_location("fresh_sometimes", found.origin)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.delenv(VARIABLE, raising=False)
    module = fresh()
    yield module
    module.stop()


def test_off_a_mark_does_nothing(marks: Any) -> None:
    called: list[int] = []
    marks.sometimes("a")
    marks.sometimes("b", lambda: called.append(1))
    assert called == [] and marks._marks == {}
    assert (marks.reached(), marks.unreached(), marks.report()) == ([], [], "")


def test_off_a_mark_takes_no_lock_and_looks_up_once(marks: Any) -> None:
    class Counting(dict):  # type: ignore[type-arg]
        lookups = 0

        def get(self, *arguments: Any) -> Any:
            Counting.lookups += 1
            return super().get(*arguments)

    marks._marks = Counting()
    calls: list[str] = []
    sys.setprofile(lambda frame, event, _: calls.append(event) if event in ("call", "c_call") else None)
    try:
        marks.sometimes("a")
    finally:
        sys.setprofile(None)
    # The mark itself, the look-up and what is below it, and the end of the profile.
    assert Counting.lookups == 1 and len(calls) <= 5, calls


def test_declared_is_to_be_reached(marks: Any) -> None:
    marks.declare("empty", "late", "late")
    assert (marks.reached(), marks.unreached()) == ([], ["empty", "late"])
    marks.sometimes("late", 0 > 1)
    marks.sometimes("empty", True)
    marks.sometimes("empty", False)
    assert (marks.reached(), marks.unreached()) == (["empty"], ["late"])
    marks.declare("empty")
    assert marks.reached() == ["empty"]
    assert marks.report() == (
        "sometimes 'empty': reached\nsometimes 'late': NEVER reached: its line ran, and the condition was never true"
    )


def test_a_mark_that_is_met_counts_as_declared(marks: Any) -> None:
    marks.declare()
    marks.sometimes("met", False)
    assert marks.unreached() == ["met"]


def test_a_condition_is_asked_until_it_was_true(marks: Any) -> None:
    asked: list[int] = []
    marks.declare("third")
    for _ in range(6):
        marks.sometimes("third", lambda: asked.append(1) or len(asked) == 3)
    assert len(asked) == 3 and marks.reached() == ["third"]


def test_a_mark_never_stops_the_code(marks: Any, capsys: pytest.CaptureFixture[str]) -> None:
    class NoTruth:
        def __bool__(self) -> bool:
            raise ValueError("more than one value")

    marks.declare("lambda", "truth")
    marks.sometimes("lambda", lambda: 1 / 0)
    marks.sometimes("truth", NoTruth())
    assert marks.unreached() == ["lambda", "truth"]
    assert "'lambda': NEVER reached: its condition raised ZeroDivisionError: division by zero" in marks.report()
    assert "'truth': NEVER reached: its condition raised ValueError: more than one value" in marks.report()
    # Where the notes cannot be written it is said, and the code goes on.
    marks.watch()
    os.environ[VARIABLE] = str(Path(os.environ[VARIABLE]) / "no such folder")
    marks.sometimes("lambda", True)
    assert "cannot note that 'lambda' was reached" in capsys.readouterr().err
    assert marks.reached() == ["lambda"]


def test_stop_forgets_and_removes(marks: Any) -> None:
    marks.watch()
    path = Path(os.environ[VARIABLE])
    marks.sometimes("a")
    assert path.exists() and marks.reached() == ["a"]
    marks.stop()
    assert not path.exists() and VARIABLE not in os.environ
    marks.sometimes("a")
    assert (marks.reached(), marks.unreached()) == ([], [])


def test_what_was_declared_before_the_watch_is_in_the_file(marks: Any) -> None:
    marks.declare("before", "reached before")
    marks.sometimes("reached before")
    marks.watch()
    other = fresh()
    assert (other.reached(), other.unreached()) == (["reached before"], ["before"])


def test_processes_count_together(marks: Any) -> None:
    """As ranks, subprocesses and the workers of pytest-xdist: also where one is killed right after its mark."""
    marks.watch()
    marks.declare("here", "in one that is killed", "nowhere")
    script = """
        import os, sys
        from dbo_greenlet.testing.sometimes import declare, sometimes, unreached
        number = int(sys.argv[1])
        declare("declared there")
        for k in range(200):
            sometimes(f"reached by {number}, {k}")
            sometimes("condition of all", k == 150)
        sometimes("never true anywhere", False)
        if number == 0:
            sometimes("in one that is killed", lambda: True)
            os._exit(9)
        """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    started = [
        subprocess.Popen([sys.executable, "-c", textwrap.dedent(script), str(n)], env=environment) for n in range(3)
    ]
    assert [process.wait(60) for process in started] == [9, 0, 0]
    marks.sometimes("here")
    assert marks.unreached() == ["declared there", "never true anywhere", "nowhere"]
    assert set(marks.reached()) == {
        "here",
        "in one that is killed",
        "condition of all",
        *(f"reached by {n}, {k}" for n in range(3) for k in range(200)),
    }
    # A line that a process was killed in the middle of is no note.
    with open(os.environ[VARIABLE], "a") as file:
        file.write('["nowhere", "rea')
    assert "nowhere" in marks.unreached()


def test_a_forked_rank_counts_too(marks: Any) -> None:
    marks.watch()
    marks.declare("in a fork")
    child = os.fork()
    if child == 0:
        marks.sometimes("in a fork")
        os._exit(0)
    os.waitpid(child, 0)
    assert marks.reached() == ["in a fork"]


# -- in a suite --------------------------------------------------------------------------------------------------------

SUITE = """
    from dbo_greenlet.testing.sometimes import declare, sometimes

    declare("both empty", "one empty")

    def test_one():
        sometimes("one empty", True)

    def test_two():
        sometimes("both empty", {both})
    """


def pytest_of(folder: Path, *arguments: str, both: bool) -> subprocess.CompletedProcess[str]:
    (folder / "test_suite.py").write_text(textwrap.dedent(SUITE.format(both=both)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    environment.pop(VARIABLE, None)
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "dbo_greenlet.testing.plugin", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, "-c", os.devnull, "--rootdir", str(folder), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_suite_fails_that_never_reached_a_scenario(tmp_path: Path) -> None:
    done = pytest_of(tmp_path, both=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 passed" in done.stdout
    after = done.stdout.split("scenarios that were never reached")[1]
    assert "both empty" in after and "one empty" not in after
    assert pytest_of(tmp_path, both=True).returncode == 0
