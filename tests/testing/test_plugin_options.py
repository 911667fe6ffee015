"""The options of the pytest plugin: what is refused in one sentence, and what goes before the test's own words."""

from __future__ import annotations

import pytest

from dbo_greenlet.testing import ReplayCase
from tests.testing.plugin_suites import FAILING
from tests.testing.pytest_runs import Suite

# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--dbo-replay=dbor9:2;01;;;00000000"],
            "is of version 9 of the encoding and this dbo_greenlet reads version 1",
        ),
        (["--dbo-replay=dbor1:2;01;;;00000000"], "--dbo-replay: the replay string is truncated or mistyped"),
        (["--dbo-replay="], "a replay string begins with 'dbor1:' and this begins with ''"),
        (["--dbo-until=soon"], "--dbo-until is 'soon'; use a whole number, 0 or more"),
        (["--dbo-until=-1"], "--dbo-until is '-1'; use a whole number, 0 or more"),
        (["--dbo-seed=x"], "--dbo-seed is 'x'; use a whole number, 0 or more"),
        (["--dbo-schedules=0"], "--dbo-schedules is '0'; use a whole number, 1 or more"),
        (["--dbo-until=9"], "--dbo-until: no step came to decision 9"),
    ],
)
def test_bad_options_are_one_sentence_and_exit_code_2(suite: Suite, arguments: list[str], sentence: str) -> None:
    suite.write("test_it.py", "def test_it():\n    pass\n")
    done = suite.pytest("-q", *arguments)
    said = [line for line in (done.stdout + done.stderr).splitlines() if sentence in line]
    assert done.returncode == 2 and len(said) == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def encoded(**changes: object) -> str:
    from dbo_greenlet import Schedule

    return ReplayCase(Schedule(2, (0, 1, 0, 1), ("a", "a", "", "")), **changes).encode()


def test_faults_in_a_string_that_nobody_knows_are_told(suite: Suite) -> None:
    suite.write("test_it.py", FAILING["an assertion"][0])
    done = suite.pytest(f"--dbo-replay={encoded(faults='melt@1.2')}")
    assert done.returncode == 2
    assert "--dbo-replay: fault 'melt@1.2' in 'melt@1.2' is of no known kind" in done.stderr


def test_replay_and_update_of_golden_files_exclude_each_other(suite: Suite) -> None:
    suite.write("test_it.py", FAILING["an assertion"][0])
    done = suite.pytest(f"--dbo-replay={encoded()}", "--dbo-update-golden")
    assert done.returncode == 2 and "would make what --dbo-replay runs golden schedules" in done.stderr


def test_replay_with_several_tests_selected_names_one(suite: Suite) -> None:
    suite.write(
        "test_it.py",
        """
        def test_a():
            pass

        def test_b(dbo_run):
            pass

        def test_c(dbo_explore):
            pass
        """,
    )
    done = suite.pytest(f"--dbo-replay={encoded()}")
    assert done.returncode == 2
    assert (
        "--dbo-replay is for one test, and 2 of those selected use dbo_run or dbo_explore; name the one that printed "
        "the string, for example: pytest 'test_it.py::test_b' --dbo-replay=..."
    ) in done.stdout


def test_replay_where_nothing_could_be_replayed_is_told(suite: Suite) -> None:
    suite.write("test_it.py", "def test_a():\n    pass\n\ndef test_b(dbo_run):\n    pass\n")
    done = suite.pytest("-q", f"--dbo-replay={encoded()}")
    assert done.returncode == 2 and "2 passed" in done.stdout
    assert "nothing was replayed, because no such step ran by dbo_run or dbo_explore" in done.stdout
    done = suite.pytest("-q", f"--dbo-replay={encoded(call=3)}")
    assert done.returncode == 2
    assert "nothing was replayed, the string is for step 3 of a test, and no such step ran" in done.stdout
    assert suite.pytest("-q", "--collect-only", f"--dbo-replay={encoded()}").returncode == 0


def test_a_mistake_in_a_test_is_one_sentence_and_the_others_run(suite: Suite) -> None:
    suite.write(
        "test_it.py",
        """
        from dbo_greenlet.testing import low_latency
        from model import build

        def test_a_fault(dbo_run):
            dbo_run(build, faults="melt@1")

        def test_b_space(dbo_explore):
            dbo_explore(low_latency(8), most=1000)

        def test_c(dbo_run):
            assert dbo_run(build).succeeded
        """,
    )
    done = suite.pytest()
    assert done.returncode == 2 and "2 failed, 1 passed" in done.stdout
    assert "\nfault 'melt@1' in 'melt@1' is of no known kind" in done.stdout
    assert "of 2 microbatches with 17 slices each, and most=1,000. Use preemptions=" in done.stdout
    assert "Error" not in done.stdout and "--dbo-replay" not in done.stdout


# -- options of explorations -------------------------------------------------------------------------------------------


def test_seed_and_number_of_schedules_go_before_what_the_test_says(suite: Suite) -> None:
    suite.write(
        "test_it.py",
        """
        from model import low_latency

        def test_it(dbo_explore):
            found = dbo_explore(low_latency(2), how="random", schedules=5, seed=1)
            print("EXPLORED", found.schedules, found.seed)
        """,
    )
    assert "EXPLORED 5 1" in suite.pytest("-s").stdout
    done = suite.pytest("-s", "--dbo-seed=9", "--dbo-schedules=12")
    assert "EXPLORED 12 9" in done.stdout
    assert "dbo-greenlet: seed 9, 12 schedules in explorations by chance" in done.stdout
