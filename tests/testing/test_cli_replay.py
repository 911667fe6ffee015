"""`dbo-greenlet replay TEST STRING`: a failed test again, from the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dbo_greenlet.testing import ReplayCase
from tests.testing.pytest_runs import SECONDS, Suite, environment, failures, the_line

pytest.importorskip("typer", reason="the command line needs typer")

TEST = """
    from functools import partial

    from dbo_greenlet import dbo_yield

    def build(bed):
        def forward(i):
            for layer in range(2):
                dbo_yield(f"layer{layer}.dispatch")
            return i

        return [partial(forward, i) for i in range(bed.count)]

    def test_it(dbo_run):
        assert dbo_run(build, "phase_offset:2").schedule.decisions[:2] == (0, 1)

    def test_other(dbo_run):
        assert dbo_run(build).succeeded
"""


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    suite = Suite(tmp_path)
    suite.write("test_it.py", TEST)
    return suite


@pytest.fixture
def string(suite: Suite) -> str:
    return the_line(suite.pytest().stdout).partition("--dbo-replay='")[2].rstrip("'")


def replay(suite: Suite, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dbo_greenlet.cli", "replay", *words],
        cwd=suite.folder,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=environment(),
        check=False,
    )


def test_a_failed_test_fails_again_and_exits_with_1(suite: Suite, string: str) -> None:
    done = replay(suite, "test_it.py::test_it", string)
    assert done.returncode == 1 and "dbo-greenlet: replaying 6 decisions in each step of one test" in done.stdout
    assert failures(done.stdout)[0] == failures(suite.pytest().stdout)[0]
    assert replay(suite, "test_it.py::test_other", string).returncode == 0


def test_until_starts_the_debugger_before_the_decision(suite: Suite, string: str) -> None:
    done = replay(suite, "test_it.py::test_it", string, "--until", "1", stdin="p 'AT', i, layer\nc\n")
    assert "decision 1: microbatch 0 goes on after 'layer0.dispatch'" in done.stdout
    assert "('AT', 0, 0)" in done.stdout and done.returncode == 1


def test_a_test_that_is_not_there_exits_with_2(suite: Suite, string: str) -> None:
    done = replay(suite, "test_it.py::test_nothing", string)
    assert done.returncode == 2 and "test_nothing" in done.stdout + done.stderr
    # Not one test but a file of several.
    done = replay(suite, "test_it.py", string)
    assert done.returncode == 2 and "name the one that printed the string" in done.stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["test_it.py::test_it", "dbor1:2;01;;;00000000"], "the replay string is truncated or mistyped"),
        (["test_it.py::test_it", "dbor7:2;01;;;00000000"], "is of version 7 of the encoding"),
        (["test_it.py::test_it", "no string"], "a replay string begins with 'dbor1:' and this begins with 'nostring'"),
        (["test_it.py::test_it"], "a test is replayed by its name and by the string that it printed"),
        (["dbor1:2;01;;;00000000"], "a test is replayed by its name and by the string that it printed"),
        (["dbor1:2;01;;;00000000", "test_it.py::test_it"], "a test is replayed by its name and by the string"),
        (["test_it.py"], "a test is replayed by its name and by the string that it printed"),
        (["test_it.py::test_it", "dbor1:2", "--json"], "--model, --run and --json are for traces"),
        (["test_it.py::test_it", "dbor1:2", "--until=-1"], "--until is -1; use 0 or more"),
        (["test_it.py::test_it", "dbor1:2", "--until=x"], "Invalid value for '--until'"),
        (["absent.jsonl"], "absent.jsonl: no such file"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path: Path, words: list[str], sentence: str) -> None:
    done = replay(Suite(tmp_path), *words)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("dbo-greenlet: ") and sentence in line


def test_without_pytest_it_says_what_to_install(tmp_path: Path) -> None:
    from dbo_greenlet import Schedule

    string = ReplayCase(Schedule(1, (0,), ("",))).encode()
    code = (
        "import importlib.util as u, sys\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'pytest' else find(name, *rest)\n"
        "from dbo_greenlet.cli.main import main\n"
        "main(sys.argv[1:])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "replay", "test_it.py::test_it", string],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=environment(),
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == "dbo-greenlet: replaying a test needs pytest; install dbo-greenlet[testing]\n"
