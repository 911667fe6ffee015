"""The pytest plugin: fixtures `dbo_run`, `dbo_explore` and `dbo_golden`, and the options that begin with --dbo.

    def test_two_layers(dbo_run):
        run = dbo_run(build, "phase_offset:2")
        assert run.succeeded

A test that fails ends its report with the line that runs it again. Whoever does not use the fixtures pays for reading
this file and nothing else: everything that it needs is imported when a fixture is.

Mistakes in what is asked for (a mistyped replay string, a golden file that was edited by hand, a space that is too
large) are one sentence, and the run's exit code is then 2. Other tests run on: a wrong golden file is no reason to
learn nothing about them.

The file is a plugin by two ways, the installed entry point "dbo_greenlet" and `-p dbo_greenlet.testing.plugin`, and is
registered once also where both are taken. (PYTEST_DONT_REWRITE: it has no assertions, and by the first way it is
imported before pytest could rewrite them, which pytest would warn about.)
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from .suite_report import SuiteReport, nodeid_here, quoted

if TYPE_CHECKING:
    from .plugin_runs import DboExplore, DboGolden, DboRun, TestCalls
    from .replay_case import ReplayCase
    from .until import Until

__all__ = ["Kit", "dbo_explore", "dbo_golden", "dbo_run", "entry_point"]


class _EntryPoint:
    """What the installed entry point registers: it has this file registered under the name that `-p` would use."""

    def pytest_addhooks(self, pluginmanager: pytest.PytestPluginManager) -> None:
        pluginmanager.import_plugin(__name__)


entry_point = _EntryPoint()


class Kit:
    """What the command line asks for, and what has come of it so far.

    Attributes:
        replay: what to run again; None for nothing.
        until: the decision to stop before; None for none.
        seed, seed_given: of --dbo-seed; 0 and False where it is not given.
        schedules: of --dbo-schedules.
        update_golden: whether golden files are to be written.
        goldens, written: schedules that tests have for golden files, and the files that were changed.
        replayed, stopped_at_decision: whether a step did what `replay` and `until` ask for.
        last_decision: the last one that a step came to which was to be stopped; -1 for none.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.seed_given = config.option.dbo_seed is not None
        self.seed = _whole_number(config, "seed") or 0
        self.schedules = _whole_number(config, "schedules", least=1)
        self.until = _whole_number(config, "until")
        self.update_golden: bool = config.option.dbo_update_golden
        self.replay = _replay(config)
        if self.replay is not None and self.update_golden:
            raise _Mistake("--dbo-update-golden would make what --dbo-replay runs golden schedules; give one of them")
        self.goldens: dict[Path, Any] = {}
        self.written: list[str] = []
        self.replayed = False
        self.stopped_at_decision = False
        self.last_decision = -1

    def case_for(self, call: int) -> ReplayCase | None:
        """What step number `call` of a test is to repeat."""
        case = self.replay
        if case is None or case.call not in (0, call):
            return None
        self.replayed = True
        return case

    def until_for(self, case: ReplayCase | None) -> Until | None:
        """Stops the step that repeats `case`; the first one that comes to the decision where nothing is repeated."""
        if self.until is None or self.stopped_at_decision or (case is None and self.replay is not None):
            return None
        from .plugin_runs import debug
        from .until import Until

        return Until(self.until, debug)

    def stopped(self, until: Until | None) -> None:
        if until is not None:
            self.stopped_at_decision |= until.reached
            self.last_decision = max(self.last_decision, until.last)


class _Mistake(Exception):
    """A mistake on the command line, as one sentence."""


_FIXTURES = {"dbo_run", "dbo_explore", "dbo_golden"}
_KIT = pytest.StashKey[Kit]()
_CALLS = pytest.StashKey["TestCalls"]()
_HAS_LINE = pytest.StashKey[bool]()

# -- options -----------------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("dbo-greenlet", "dbo-greenlet: overlap of microbatches")
    group.addoption(
        "--dbo-replay",
        metavar="STRING",
        help="run one test with the schedule and the faults of this string, which a failing test has printed",
    )
    group.addoption(
        "--dbo-until",
        metavar="DECISION",
        help="start the debugger right before the slice of this decision (from 0) of a step",
    )
    group.addoption("--dbo-update-golden", action="store_true", help="write the golden schedules that differ")
    group.addoption("--dbo-seed", metavar="N", help="seed of what goes by chance (default: what the tests say, or 0)")
    group.addoption(
        "--dbo-schedules", metavar="N", help="number of schedules in explorations by chance (default: what tests say)"
    )


def _whole_number(config: pytest.Config, name: str, least: int = 0) -> int | None:
    text = getattr(config.option, f"dbo_{name}")
    if text is None:
        return None
    if not re.fullmatch("[0-9]{1,18}", text) or int(text) < least:
        raise _Mistake(f"--dbo-{name} is {text!r}; use a whole number, {least} or more")
    return int(text)


def _replay(config: pytest.Config) -> ReplayCase | None:
    text = config.option.dbo_replay
    if text is None:
        return None
    from .errors import FaultStringError, ReplayStringError
    from .faults import Faults
    from .replay_case import ReplayCase

    try:
        case = ReplayCase.decode(text)
        Faults.parse(case.faults)
    except (ReplayStringError, FaultStringError) as error:
        raise _Mistake(f"--dbo-replay: {error}") from None
    return case


def pytest_configure(config: pytest.Config) -> None:
    try:
        kit = config.stash[_KIT] = Kit(config)
    except _Mistake as mistake:
        pytest.exit(str(mistake), returncode=2)
    config.pluginmanager.register(SuiteReport(config, kit), "dbo_greenlet suite report")


@pytest.hookimpl(wrapper=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, Any, Any]:
    option = config.option
    if (option.dbo_replay is not None or option.dbo_until is not None) and hasattr(option, "numprocesses"):
        # pytest-xdist, perhaps by the suite's own addopts: one test is run, and a debugger needs this terminal.
        option.numprocesses, option.dist, option.tx = None, "no", []
    return (yield)


def pytest_report_header(config: pytest.Config) -> str | None:
    kit = config.stash[_KIT]
    words = []
    if kit.replay is not None:
        which = f"step {kit.replay.call}" if kit.replay.call else "each step"
        words.append(f"replaying {len(kit.replay.schedule)} decisions in {which} of one test")
    if kit.until is not None:
        words.append(f"stopping before decision {kit.until}")
    if kit.update_golden:
        words.append("writing golden schedules")
    if kit.seed_given:
        words.append(f"seed {kit.seed}")
    if kit.schedules is not None:
        words.append(f"{kit.schedules} schedules in explorations by chance")
    return f"dbo-greenlet: {', '.join(words)}" if words else None


# -- fixtures ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def dbo_run(request: pytest.FixtureRequest) -> DboRun:
    """Runs a step under test once: `dbo_run(build, policy)`, see `dbo_greenlet.testing.run_step`."""
    from .plugin_runs import DboRun

    return DboRun(request.config.stash[_KIT], _calls(request.node))


@pytest.fixture
def dbo_explore(request: pytest.FixtureRequest) -> DboExplore:
    """Runs a step under many schedules: `dbo_explore(build, preemptions=2)`, see `dbo_greenlet.testing.explore`."""
    from .plugin_runs import DboExplore

    return DboExplore(request.config.stash[_KIT], _calls(request.node))


@pytest.fixture
def dbo_golden(request: pytest.FixtureRequest) -> DboGolden:
    """Compares a step's schedule with the committed one: `dbo_golden(run)`, see `dbo_greenlet.testing.Golden`."""
    from .plugin_runs import DboGolden

    name = re.sub(r"[^A-Za-z0-9_.]+", "-", request.node.name).strip("-")
    return DboGolden(request.config.stash[_KIT], request.path.parent / "goldens", name)


def _calls(item: Any) -> TestCalls:
    """The one that all fixtures of a test share."""
    calls: TestCalls | None = item.stash.get(_CALLS, None)
    if calls is None:
        from .plugin_runs import TestCalls

        # Hypothesis calls a test as often as it likes, and another time begins with the example that failed.
        by_hypothesis = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
        calls = item.stash[_CALLS] = TestCalls(counted=not by_hypothesis)
    return calls


# -- reports -----------------------------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if not report.failed or call.excinfo is None:
        return report
    if (mistake := _mistake(item, call.excinfo.value)) is not None:
        # As attributes, for `SuiteReport`: pytest-xdist carries them to the process that reports.
        report.dbo_mistake = True
        report.longrepr = mistake
        return report
    line = None if item.stash.get(_HAS_LINE, False) else _line(item)
    if line is not None:
        item.stash[_HAS_LINE] = True  # its teardown may fail as well
        report.dbo_line = line
        if item.config.option.tbstyle not in ("no", "line") and hasattr(report.longrepr, "addsection"):
            report.longrepr.addsection("run it again", line, "-")
            report.dbo_line = None
    return report


def _mistake(item: pytest.Item, error: BaseException) -> str | None:
    """The sentence of a mistake in what was asked of the kit's fixtures; None for every other error."""
    if not _FIXTURES & set(getattr(item, "fixturenames", ())):
        return None
    from . import errors

    kinds = (errors.ReplayStringError, errors.GoldenFileError, errors.FaultStringError, errors.SpaceTooLargeError)
    return " ".join(str(error).split()) if isinstance(error, kinds) else None


def _line(item: pytest.Item) -> str | None:
    """What runs the latest step of a test again; None for a test without one."""
    config = item.config
    calls = item.stash.get(_CALLS, None)
    if calls is None:
        return None
    kit = config.stash[_KIT]
    case = kit.replay if kit.replay is not None else calls.last_case()
    if case is None:
        return None
    # By module, pytest puts the current folder on the path; the tests may need it.
    words = ["python -m pytest" if Path(sys.argv[0]).name == "__main__.py" else "pytest"]
    if not config.pluginmanager.has_plugin("dbo_greenlet") and _named_by_hand(config):
        words.append(f"-p {__name__}")
    words.append(quoted(nodeid_here(item)))
    if kit.seed_given:
        words.append(f"--dbo-seed={kit.seed}")
    if kit.schedules is not None:
        words.append(f"--dbo-schedules={kit.schedules}")
    return " ".join([*words, f"--dbo-replay={quoted(case.encode())}"])


def _named_by_hand(config: pytest.Config) -> bool:
    arguments = [str(each) for each in config.invocation_params.args]
    return f"-p{__name__}" in arguments or ("-p", __name__) in itertools.pairwise(arguments)
