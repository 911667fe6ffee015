"""The pytest plugin, end to end: small suites in processes of their own, and the lines that they print."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from dbo_greenlet.testing import ReplayCase
from tests.testing.pytest_runs import PLUGIN, ROOT, Suite, environment, failures, sections, the_line

MODEL = """
    from functools import partial

    from dbo_greenlet import dbo_yield
    from dbo_greenlet.testing import InjectedFault, low_latency

    LAYERS = 2

    def build(bed):
        log = []

        def forward(i):
            log.append(i)
            for layer in range(LAYERS):
                dbo_yield(f"layer{layer}.dispatch")
                log.append(i)
                dbo_yield(f"layer{layer}.combine")
                log.append(i)
            return "".join(map(str, log))

        return [partial(forward, i) for i in range(bed.count)]
"""


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    suite = Suite(tmp_path)
    suite.write("model.py", MODEL)
    return suite


# -- the line ----------------------------------------------------------------------------------------------------------

FAILING = {
    "an assertion": (
        """
        from model import build

        def test_it(dbo_run):
            assert dbo_run(build, "random:3").outputs[1] == "nothing"
        """,
        "nothing",
    ),
    "a microbatch that raises": (
        """
        from model import build

        def breaking(bed):
            first, second = build(bed)

            def raising():
                second()
                raise ValueError("in microbatch 1")

            return [first, raising]

        def test_it(dbo_run):
            run = dbo_run(breaking, "phase_offset:2")
            if run.error:
                raise run.error
        """,
        "in microbatch 1",
    ),
    "a fault": (
        """
        from model import build

        def test_it(dbo_run):
            run = dbo_run(build, "random:1", faults="raise@1.2+raise@0.99")
            assert run.succeeded, run.error
        """,
        "raise@1.2",
    ),
    "the third of several steps": (
        """
        from model import build

        def test_it(dbo_run):
            for number in range(5):
                run = dbo_run(build, f"random:{number}")
                assert run.schedule.decisions[:5] != (0, 0, 1, 0, 1), f"step {number}"
        """,
        "AssertionError: step ",
    ),
    "an exploration": (
        """
        from dbo_greenlet.testing import high_throughput
        from dbo_greenlet import dbo_switch_to_compute

        def forgets_to_wait(run):
            run.back_to_compute = dbo_switch_to_compute

        def test_it(dbo_explore):
            dbo_explore(high_throughput(1, mutate=forgets_to_wait))
        """,
        "is not bit-equal to the one it gives without interleaving",
    ),
    "an exploration under a fault": (
        """
        from dbo_greenlet.testing import Faults
        from model import build

        def only_in_order(run, reference):
            return "out of order" if run.schedule.decisions[:4] == (0, 1, 0, 1) and run.faults else None

        def test_it(dbo_explore):
            dbo_explore(build, verdicts=[only_in_order], faults=Faults.parse("late@0.1:50us"))
        """,
        "out of order",
    ),
    "an exploration of a step that raises": (
        """
        from model import build

        def raising(bed):
            began = []

            def noted(i, entry):
                began.append(i)
                value = entry()
                if began == [0, 1] and i == 0:
                    raise ValueError("microbatch 1 had begun")
                return value

            return [lambda i=i, entry=entry: noted(i, entry) for i, entry in enumerate(build(bed))]

        def only_success(run, reference):
            return str(run.error) if run.error else None

        def test_it(dbo_explore):
            dbo_explore(raising, verdicts=[only_success])
        """,
        "microbatch 1 had begun",
    ),
    "an exploration where no memory is left": (
        """
        from dbo_greenlet import dbo_yield
        from dbo_greenlet.testing import Faults

        def build(bed):
            def entry(i):
                dbo_yield("a")
                if bed.faults is not None:
                    bed.faults.allocating(i)
                return i

            return [lambda i=i: entry(i) for i in range(bed.count)]

        def never_this(run, reference):
            return "microbatch 1 first" if run.schedule.decisions[:2] == (0, 1) else None

        def test_it(dbo_explore):
            dbo_explore(build, verdicts=[never_this], faults=Faults.parse("oom@1.0"))
        """,
        "microbatch 1 first",
    ),
    "hypothesis": (
        """
        from hypothesis import HealthCheck, given, settings, strategies as st
        from model import build

        @settings(suppress_health_check=list(HealthCheck), database=None)
        @given(st.integers(0, 1000))
        def test_it(dbo_run, seed):
            assert dbo_run(build, f"random:{seed}").schedule.decisions[:4] != (0, 0, 1, 0)
        """,
        "assert (0, 0, 1, 0) != (0, 0, 1, 0)",
    ),
    "a fixture": (
        """
        import pytest
        from model import build

        @pytest.fixture
        def step(dbo_run):
            run = dbo_run(build, "in_turn")
            assert run.outputs == ["no", "such"]
            return run

        def test_it(step):
            pass
        """,
        "such",
    ),
}


# What a report shows of the code under test, where a step's error is the reason.
MODELS_LINE = {
    "a microbatch that raises": 'raise ValueError("in microbatch 1")',
    "an exploration of a step that raises": 'raise ValueError("microbatch 1 had begun")',
}


def file_of(kind: str) -> str:
    return f"test_{kind.replace(' ', '_')}.py"


class Failed:
    """All of `FAILING` in one suite, run once. Attribute `reports`: what it said of each."""

    def __init__(self, suite: Suite) -> None:
        self.suite = suite
        for kind, (text, _) in FAILING.items():
            suite.write(file_of(kind), text)
        done = suite.pytest()
        assert done.returncode == 1 and len(sections(done.stdout)) == len(FAILING), done.stdout + done.stderr
        self.reports = {}
        for report in sections(done.stdout):
            (kind,) = [kind for kind in FAILING if f"'{file_of(kind)}::test_it'" in the_line(report)]
            self.reports[kind] = report

    def line(self, kind: str) -> str:
        return the_line(self.reports[kind])


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Failed:
    suite = Suite(tmp_path_factory.mktemp("failed"))
    suite.write("model.py", MODEL)
    return Failed(suite)


@pytest.mark.parametrize("kind", FAILING)
def test_a_failing_test_prints_one_line_that_fails_in_the_same_way(failed: Failed, kind: str) -> None:
    expected = FAILING[kind][1]
    first, line = failed.reports[kind], failed.line(kind)
    assert line.startswith(f"python -m pytest -p {PLUGIN} '{file_of(kind)}::test_it' --dbo-replay='dbor1:")
    again = failed.suite.shell(line)
    assert again.returncode == 1, again.stdout + again.stderr
    assert "dbo-greenlet: replaying " in again.stdout and "1 passed" not in again.stdout
    # The replayed schedule is judged alone: of an exploration's words only the finding is left.
    wanted = [f for f in failures(first) if expected in f]
    assert wanted and [f for f in failures(again.stdout) if expected in f]
    if "exploration" not in kind:
        assert failures(again.stdout)[0] == failures(first)[0]
    for shown in (first, again.stdout):
        assert "Run it again" not in shown
        places = [each.removeprefix(">").strip() for each in shown.splitlines() if each.startswith(">")]
        assert MODELS_LINE.get(kind, places[0]) in places
    assert the_line(again.stdout) == line


def test_the_line_names_the_step_of_a_test_with_several(failed: Failed) -> None:
    case = ReplayCase.decode(failed.line("the third of several steps").partition("--dbo-replay=")[2])
    assert case.call > 1 and case.schedule.decisions[:5] == (0, 0, 1, 0, 1)


def test_the_line_has_the_faults(failed: Failed) -> None:
    case = ReplayCase.decode(failed.line("a fault").partition("--dbo-replay=")[2])
    assert case.faults == "raise@1.2+raise@0.99"
    # Up to the slice that the fault ended, which has no site.
    assert len(case.schedule.sites) == len(case.schedule) - 1 and case.schedule.decisions[-1] == 1


def test_the_line_works_from_another_folder_and_with_odd_names(suite: Suite) -> None:
    suite.write("pytest.ini", "[pytest]\npythonpath = .\n")
    suite.write(
        "deeper/it's here/test_it.py",
        """
        import pytest
        from model import build

        @pytest.mark.parametrize("word", ["it's [a] $HOME; `x`"])
        def test_it(dbo_run, word):
            assert dbo_run(build).outputs == word
        """,
    )
    elsewhere = suite.folder / "deeper"
    first = suite.pytest("-c", "../pytest.ini", "--rootdir=..", "it's here", folder=elsewhere)
    assert first.returncode == 1, first.stdout + first.stderr
    again = suite.shell(the_line(first.stdout), folder=elsewhere)
    assert "1 failed" in again.stdout, again.stdout + again.stderr
    assert failures(again.stdout)[0] == failures(first.stdout)[0]


@pytest.mark.parametrize("style", ["no", "line", "short", "native"])
def test_the_line_is_printed_in_every_style_of_traceback(suite: Suite, style: str) -> None:
    suite.write("test_it.py", FAILING["an assertion"][0])
    the_line(suite.pytest(f"--tb={style}", "--show-capture=no", "-q").stdout)


def test_a_test_whose_teardown_fails_too_has_one_line(suite: Suite) -> None:
    suite.write(
        "test_it.py",
        """
        import pytest
        from model import build

        @pytest.fixture
        def broken():
            yield
            raise OSError("teardown")

        def test_it(dbo_run, broken):
            assert dbo_run(build).outputs == 7
        """,
    )
    done = suite.pytest()
    assert "1 failed, 1 error" in done.stdout
    the_line(done.stdout)


def test_a_time_limit_of_the_test_runner_leaves_a_line_too(suite: Suite) -> None:
    """What it raises is no error of the step, and comes out of the middle of one."""
    suite.write(
        "test_it.py",
        """
        import pytest
        from model import build

        def slow(bed):
            first, second = build(bed)

            def stuck():
                second()
                pytest.fail("too slow")

            return [first, stuck]

        def test_it(dbo_run):
            dbo_run(slow, "random:4")
        """,
    )
    first = suite.pytest()
    again = suite.shell(the_line(first.stdout))
    assert "too slow" in again.stdout and "1 failed" in again.stdout


def test_options_that_the_failure_depends_on_are_in_the_line(suite: Suite) -> None:
    suite.write(
        "test_it.py",
        """
        from model import build

        def test_it(dbo_run):
            dbo_run(build)
            assert dbo_run.seed == 3
            assert dbo_run(build, "random").schedule.decisions == ()
        """,
    )
    line = the_line(suite.pytest("--dbo-seed=3", "--dbo-schedules=7").stdout)
    assert " --dbo-seed=3 --dbo-schedules=7 --dbo-replay='dbor1:2@2;" in line
    assert "1 failed" in suite.shell(line).stdout


# -- replaying a changed program ---------------------------------------------------------------------------------------


def recorded_line(suite: Suite, failed: Failed, kind: str, mended: tuple[str, str] = ("", "")) -> str:
    """The line that a test printed; `suite` has the test as it is now."""
    suite.write(file_of(kind), FAILING[kind][0].replace(*mended))
    return failed.line(kind)


def test_replay_of_a_changed_program_stops_at_the_first_decision_that_differs(suite: Suite, failed: Failed) -> None:
    line = recorded_line(suite, failed, "an assertion")
    suite.write("model.py", MODEL.replace("layer{layer}.combine", "layer{layer}.gather"))
    again = suite.shell(line)
    assert again.returncode == 1
    assert failures(again.stdout)[-1].endswith(
        "ReplayMismatch: replay parts at decision 1: microbatch 0 yielded at 'layer0.gather', in the recorded step it "
        "yielded at 'layer0.combine'"
    )
    assert the_line(again.stdout) == line


def test_replay_of_another_model_is_one_sentence_and_exit_code_2(suite: Suite, failed: Failed) -> None:
    line = recorded_line(suite, failed, "an assertion")
    suite.write("model.py", MODEL.replace("layer{layer}", "block{layer}"))
    again = suite.shell(line)
    assert again.returncode == 2
    sentence = "the replay string is of another model or another test: microbatch 0 first yielded at 'block0.dispatch'"
    assert sentence in again.stdout and ">  " not in again.stdout  # a sentence and no traceback
    assert "--dbo-replay=" not in again.stdout


def test_a_bug_that_is_mended_passes(suite: Suite, failed: Failed) -> None:
    line = recorded_line(suite, failed, "an assertion", ('== "nothing"', '!= "nothing"'))
    assert suite.shell(line).returncode == 0
    line = recorded_line(suite, failed, "an exploration", ("run.back_to_compute = ", "run.unused = "))
    again = suite.shell(line + " -rs")
    assert again.returncode == 0 and "1 skipped" in again.stdout
    assert "the replayed schedule passes every verdict; without --dbo-replay the test explores" in again.stdout


# -- bad input ---------------------------------------------------------------------------------------------------------

STRING = "dbor1:2;0101;a,.|=;;" + "b1b5b7f2"


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


# -- golden schedules --------------------------------------------------------------------------------------------------


def test_golden_files_are_written_compared_and_guarded(suite: Suite) -> None:
    suite.write(
        "deeper/test_it.py",
        """
        import pytest
        from dbo_greenlet.testing import low_latency

        @pytest.mark.parametrize("policy", ["round_robin", "phase_offset:2"])
        def test_it(dbo_run, dbo_golden, policy):
            dbo_golden(dbo_run(low_latency(2), policy))

        def test_by_name(dbo_run, dbo_golden):
            dbo_golden(dbo_run(low_latency(1)).schedule, name="one_layer")
        """,
    )
    missing = suite.pytest()
    assert missing.returncode == 2 and "3 failed" in missing.stdout
    assert "one_layer.txt does not exist; write it with pytest --dbo-update-golden" in missing.stdout
    written = suite.pytest("--dbo-update-golden")
    assert written.returncode == 0 and "golden schedules written" in written.stdout
    goldens = suite.folder / "deeper" / "goldens"
    names = {"one_layer.txt", "test_it-phase_offset-2.txt", "test_it-round_robin.txt"}
    assert {path.name for path in goldens.iterdir()} == names
    again = suite.pytest("--dbo-update-golden")
    assert again.returncode == 0 and "golden schedules written" not in again.stdout
    assert suite.pytest().returncode == 0
    # Another schedule is a failure with a difference; a hand-edited file a mistake. Both at once: the mistake counts.
    swapped = goldens / "test_it-round_robin.txt"
    (goldens / "test_it-phase_offset-2.txt").replace(swapped)
    differing = suite.pytest("-k", "round_robin")
    assert differing.returncode == 1
    # The difference, and not the source of what compares.
    assert "def compare" not in differing.stdout
    assert "  > " in differing.stdout and "policy: golden phase_offset:2, this step round_robin" in differing.stdout
    the_line(differing.stdout)
    edited = goldens / "one_layer.txt"
    edited.write_text(edited.read_text(encoding="utf-8").replace("  1  ", "  0  ", 1), encoding="utf-8")
    refused = suite.pytest()
    assert refused.returncode == 2 and "3 failed" in refused.stdout
    assert "one_layer.txt was edited by hand: its check line does not fit" in refused.stdout


def test_two_steps_do_not_share_a_golden_file(suite: Suite) -> None:
    suite.write(
        "test_it.py",
        """
        from dbo_greenlet.testing import low_latency

        def test_it(dbo_run, dbo_golden):
            for layers in (1, 1, 2):
                dbo_golden(dbo_run(low_latency(layers)))
        """,
    )
    done = suite.pytest("--dbo-update-golden")
    assert done.returncode == 2 and "two steps of this run have the golden file" in done.stdout


def test_a_failed_step_is_no_golden_one(suite: Suite) -> None:
    suite.write(
        "test_it.py",
        """
        from model import build

        def test_it(dbo_run, dbo_golden):
            dbo_golden(dbo_run(build, faults="raise@0.1"))
        """,
    )
    done = suite.pytest("--dbo-update-golden")
    assert done.returncode == 1 and "Microbatch 0 of 2 failed in slice 1" in done.stdout
    assert not (suite.folder / "goldens").exists()


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


# -- the debugger ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("carrier", ["greenlet", "thread"])
def test_until_stops_in_the_model_before_the_slice_of_a_decision(suite: Suite, carrier: str) -> None:
    suite.write(
        "test_it.py",
        f"""
        from model import build

        def test_it(dbo_run):
            assert dbo_run(build, "phase_offset:2", carrier="{carrier}").outputs == "no such"
        """,
    )
    line = the_line(suite.pytest().stdout)
    case = ReplayCase.decode(line.partition("--dbo-replay=")[2])
    assert case.schedule.decisions[:4] == (0, 0, 1, 0)
    done = subprocess.run(
        line + " --dbo-until 3",
        shell=True,
        cwd=suite.folder,
        input="p 'AT', i, layer, log\nn\nn\nc\n",
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(),
        check=False,
    )
    assert "decision 3: microbatch 0 goes on after 'layer0.combine'" in done.stdout, done.stdout + done.stderr
    assert "('AT', 0, 0, [0, 0, 1])" in done.stdout
    # The next two lines are the model's, not the scheduler's.
    assert "-> for layer in range(LAYERS):" in done.stdout
    assert done.returncode == 1 and "1 failed" in done.stdout  # and the test goes on


def test_until_stops_before_a_first_slice_and_can_be_left(suite: Suite) -> None:
    suite.write("test_it.py", FAILING["an assertion"][0])
    done = suite.pytest("--dbo-until", "0", stdin="n\np 'AT', i, log\nq\n")
    assert "decision 0: microbatch 0 begins" in done.stdout
    assert "('AT', 0, [])" in done.stdout
    assert done.returncode == 2 and "Quitting debugger" in done.stdout


def test_until_in_the_schedule_that_an_exploration_found(suite: Suite, failed: Failed) -> None:
    line = recorded_line(suite, failed, "an exploration")
    test = line.partition("'")[2].partition("'")[0]
    done = suite.pytest(test, line.rpartition(" ")[2].replace("'", ""), "--dbo-until=2", stdin="p 'AT', site\nc\n")
    assert "decision 2: microbatch 0 goes on after 'layer0.before_combine'" in done.stdout
    assert "('AT', 'layer0.before_combine')" in done.stdout and "1 failed" in done.stdout


def test_until_behind_the_end_is_told_beside_a_failure_too(suite: Suite) -> None:
    suite.write("test_it.py", FAILING["an assertion"][0])
    failed = suite.pytest("--dbo-until=99")
    assert failed.returncode == 1 and "1 failed" in failed.stdout
    assert "dbo-greenlet: --dbo-until: no step came to decision 99; the last was decision 9" in failed.stdout
    suite.write("test_it.py", "def test_it(dbo_run):\n    dbo_run(lambda bed: [int, int])\n")
    passed = suite.pytest("--dbo-until=2")
    assert passed.returncode == 2 and "no step came to decision 2; the last was decision 1" in passed.stdout


# -- scenarios ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def scenarios(suite: Suite) -> Suite:
    suite.write(
        "tests/test_it.py",
        """
        import os, subprocess, sys
        from dbo_greenlet.testing.sometimes import declare, sometimes

        declare("here", "in a subprocess", "never")

        def test_here():
            sometimes("here", True)

        def test_subprocess():
            code = "from dbo_greenlet.testing.sometimes import sometimes; sometimes('in a subprocess')"
            subprocess.run([sys.executable, "-c", code], check=True)

        def test_never():
            sometimes("never", os.environ.get("NOW"))
        """,
    )
    return suite


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


# -- no cost, no surprise ----------------------------------------------------------------------------------------------

UNUSED = """
    import sys

    def pytest_sessionfinish():
        heavy = {"torch", "hypothesis", "greenlet", "numpy"} & set(sys.modules)
        ours = sorted(name for name in sys.modules if name.startswith("dbo_greenlet"))
        print("\\nLOADED", sorted(heavy), ours)
"""


def test_a_suite_that_does_not_use_it_pays_for_three_small_files(suite: Suite) -> None:
    suite.write("conftest.py", UNUSED)
    suite.write("test_it.py", "def test_it():\n    pass\n\ndef test_that_fails():\n    assert False\n")
    done = suite.pytest("-s")
    assert "1 failed, 1 passed" in done.stdout and done.returncode == 1
    ours = [
        "dbo_greenlet",
        "dbo_greenlet._version",
        "dbo_greenlet.testing",
        PLUGIN,
        "dbo_greenlet.testing.suite_report",
    ]
    assert f"LOADED [] {ours}" in done.stdout
    assert "dbo" not in done.stdout.replace("LOADED", "").replace(str(ours), "").replace(str(suite.folder), "").lower()


def test_a_suite_that_uses_it_loads_neither_torch_nor_hypothesis(suite: Suite) -> None:
    suite.write("conftest.py", UNUSED)
    suite.write(
        "test_it.py",
        """
        from dbo_greenlet.testing import low_latency

        def test_it(dbo_run, dbo_explore):
            assert dbo_run(low_latency(2)).succeeded and dbo_explore(low_latency(1)).complete
        """,
    )
    done = suite.pytest("-s")
    assert done.returncode == 0 and "LOADED ['greenlet'] [" in done.stdout, done.stdout


def installed(folder: Path) -> str:
    """A folder to put on the path, with the metadata that an installation of this project writes."""
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project.entry-points.pytest11]\n")[2]
    metadata = folder / "site" / "dbo_greenlet_here-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: dbo-greenlet-here\nVersion: 1\n", encoding="utf-8")
    name, _, value = declared.splitlines()[0].partition(" = ")
    (metadata / "entry_points.txt").write_text(f"[pytest11]\n{name} = {value.strip(chr(34))}\n", encoding="utf-8")
    return str(metadata.parent)


@pytest.mark.parametrize(
    ("by_hand", "ini"),
    [
        ([], ""),
        (["-p", PLUGIN], ""),
        (["-p", "dbo_greenlet"], ""),
        ([], f"[pytest]\naddopts = -p {PLUGIN}\n"),
    ],
)
def test_the_entry_point_and_p_together_register_it_once(suite: Suite, by_hand: list[str], ini: str) -> None:
    env = environment(autoload=True, path=installed(suite.folder))
    if ini:
        suite.write("pytest.ini", ini)
    suite.write("test_it.py", FAILING["an assertion"][0])
    done = suite.pytest(*by_hand, plugin=False, env=env)
    assert done.returncode == 1, done.stdout + done.stderr
    line = the_line(done.stdout)
    # With the entry point nobody needs to name it again.
    assert line.startswith("python -m pytest 'test_it.py::test_it' --dbo-replay=")


def test_the_entry_point_can_be_switched_off(suite: Suite) -> None:
    env = environment(autoload=True, path=installed(suite.folder))
    suite.write("test_it.py", "def test_it(dbo_run):\n    pass\n")
    for name in ("dbo_greenlet", PLUGIN):
        done = suite.pytest("-p", f"no:{name}", plugin=False, env=env)
        assert "fixture 'dbo_run' not found" in done.stdout, done.stdout + done.stderr


# -- pytest-xdist ------------------------------------------------------------------------------------------------------

xdist = pytest.mark.skipif(importlib.util.find_spec("xdist") is None, reason="needs pytest-xdist")
DISTRIBUTED = ["-p", "xdist", "-n", "2"]


@xdist
def test_lines_and_mistakes_come_from_workers_too(suite: Suite) -> None:
    suite.write("test_it.py", FAILING["an assertion"][0])
    suite.write("test_bad.py", "def test_bad(dbo_run):\n    from model import build\n    dbo_run(build, faults='x')\n")
    done = suite.pytest(*DISTRIBUTED)
    assert done.returncode == 2 and "2 failed" in done.stdout
    assert "\nfault 'x' in 'x' is of no known kind" in done.stdout
    line = the_line(done.stdout)
    # Replays run in the process itself, also where the suite's own options distribute.
    suite.write("pytest.ini", "[pytest]\naddopts = -p xdist -n 2\n")
    again = suite.shell(
        line + " --dbo-until=1 <<< $'c'" if sys.platform == "win32" else f"echo c | {line} --dbo-until=1"
    )
    assert "decision 1: microbatch 0" in again.stdout and "1 failed" in again.stdout


@xdist
def test_scenarios_and_golden_files_of_all_workers_count(scenarios: Suite) -> None:
    scenarios.write(
        "tests/test_golden.py",
        """
        import pytest
        from dbo_greenlet.testing import low_latency

        @pytest.mark.parametrize("layers", range(4))
        def test_it(dbo_run, dbo_golden, layers):
            dbo_golden(dbo_run(low_latency(layers + 1)))
        """,
    )
    done = scenarios.pytest(*DISTRIBUTED, "--dbo-update-golden")
    assert done.returncode == 1 and done.stdout.count("test_it-") == 4
    assert done.stdout.partition("scenarios that were never reached")[2].splitlines()[1:2] == ["never"]
    assert scenarios.pytest(*DISTRIBUTED, env={**environment(), "NOW": "1"}).returncode == 0
