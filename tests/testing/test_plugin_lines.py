"""The one line that the pytest plugin prints of a failing test, and what it does when the program has changed."""

from __future__ import annotations

import pytest

from dbo_greenlet.testing import ReplayCase
from tests.testing.plugin_suites import FAILING, MODEL, file_of
from tests.testing.pytest_runs import PLUGIN, Suite, failures, sections, the_line

# What a report shows of the code under test, where a step's error is the reason.
MODELS_LINE = {
    "a microbatch that raises": 'raise ValueError("in microbatch 1")',
    "an exploration of a step that raises": 'raise ValueError("microbatch 1 had begun")',
}


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


def test_until_in_the_schedule_that_an_exploration_found(suite: Suite, failed: Failed) -> None:
    line = recorded_line(suite, failed, "an exploration")
    test = line.partition("'")[2].partition("'")[0]
    done = suite.pytest(test, line.rpartition(" ")[2].replace("'", ""), "--dbo-until=2", stdin="p 'AT', site\nc\n")
    assert "decision 2: microbatch 0 goes on after 'layer0.before_combine'" in done.stdout
    assert "('AT', 'layer0.before_combine')" in done.stdout and "1 failed" in done.stdout
