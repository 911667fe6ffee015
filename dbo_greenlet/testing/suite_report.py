"""What the pytest plugin says about a whole run, and what it makes of its exit code.

Two things can only be said at the end: that what was asked for never happened (a replay that met no step, a decision
that no step came to), and that a scenario which the suite declared (`sometimes`) was never reached. And a mistake in
what was asked for makes the exit code 2, whichever tests failed besides.

With pytest-xdist each worker has one of these, and its last words go to the one of the process that started it.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .plugin import Kit

__all__ = ["SuiteReport", "nodeid_here", "quoted"]

_RUN_STEPS = {"dbo_run", "dbo_explore"}
# Where `sometimes` keeps its notes. By name: importing it is what a suite without marks must not pay for.
_SCENARIOS = "dbo_greenlet.testing.sometimes"
_SCENARIO_FILE = "DBO_GREENLET_SOMETIMES"
_EXIT_MISTAKE = 2


class SuiteReport:
    """A plugin of one run of pytest."""

    def __init__(self, config: pytest.Config, kit: Kit) -> None:
        self._config = config
        self._kit = kit
        self._mistaken = False  # by a test, whose report says how
        self._not_done: list[str] = []
        self._lines: list[str] = []
        self._written: set[str] = set()
        self._deselected = 0
        self._reached: set[str] = set()
        self._unreached: set[str] = set()
        self._watches_scenarios = False
        self._is_worker = hasattr(config, "workerinput")
        if not self._is_worker and _SCENARIOS not in sys.modules:
            # A suite that is started by a test of another one counts for itself.
            os.environ.pop(_SCENARIO_FILE, None)

    # -- which tests -----------------------------------------------------------------------------------------------

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self._deselected += len(items)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        config = self._config
        if config.option.collectonly:
            return
        if self._kit.replay is not None:
            _refuse_several(session.items)
        if _SCENARIOS in sys.modules and not os.environ.get(_SCENARIO_FILE):
            sys.modules[_SCENARIOS].watch()
            self._watches_scenarios = True

    # -- what happens ----------------------------------------------------------------------------------------------

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._mistaken |= getattr(report, "dbo_mistake", False)
        if line := getattr(report, "dbo_line", None):
            self._lines.append(line)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A worker of pytest-xdist has ended."""
        found = getattr(node, "workeroutput", {}).get("dbo_greenlet")
        if found is not None:  # None: it died
            self._reached.update(found["reached"])
            self._unreached.update(found["unreached"])
            self._written.update(found["written"])
            self._deselected = max(self._deselected, found["deselected"])

    # -- the end ---------------------------------------------------------------------------------------------------

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        self._written.update(self._kit.written)
        if self._watches_scenarios:
            scenarios = sys.modules[_SCENARIOS]
            self._reached.update(scenarios.reached())
            self._unreached.update(scenarios.unreached())
            scenarios.stop()
        if self._is_worker:
            self._config.workeroutput["dbo_greenlet"] = {  # type: ignore[attr-defined]
                "reached": sorted(self._reached),
                "unreached": sorted(self._unreached),
                "written": sorted(self._written),
                "deselected": self._deselected,
            }
            return
        self._unreached -= self._reached
        missed_stop = ""
        if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED, pytest.ExitCode.TESTS_FAILED):
            if not self._config.option.collectonly:
                self._not_done, missed_stop = self._what_was_not_done()
            if self._mistaken or self._not_done or (missed_stop and not session.testsfailed):
                session.exitstatus = _EXIT_MISTAKE
            if missed_stop:
                self._not_done.append(missed_stop)
        if self._unreached and self._is_whole() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._lines:
            terminalreporter.section("run it again")
            for line in self._lines:
                terminalreporter.line(line)
        if self._written:
            terminalreporter.section("golden schedules written")
            for path in sorted(self._written):
                terminalreporter.line(path)
        if self._unreached:
            terminalreporter.section("scenarios that were never reached")
            for name in sorted(self._unreached):
                terminalreporter.line(name)
            terminalreporter.line(
                "(each must be reached once in a run of the whole suite: this run fails)"
                if self._is_whole()
                else "(this is no failure: only a part of the suite was to run)"
            )
        for sentence in self._not_done:
            terminalreporter.line(f"dbo-greenlet: {sentence}", red=True)

    def _what_was_not_done(self) -> tuple[list[str], str]:
        """A sentence for what was asked for and did not happen; apart from them, that nothing stopped in the debugger.

        The latter alone is no mistake where a test fails: its step may have failed before that decision.
        """
        kit = self._kit
        if kit.replay is not None and not kit.replayed:
            which = f"the string is for step {kit.replay.call} of a test, and" if kit.replay.call else "because"
            return [f"nothing was replayed, {which} no such step ran by dbo_run or dbo_explore"], ""
        if kit.until is None or kit.stopped_at_decision:
            return [], ""
        last = f"; the last was decision {kit.last_decision}" if kit.last_decision >= 0 else ""
        return [], f"--dbo-until: no step came to decision {kit.until}{last}"

    def _is_whole(self) -> bool:
        """Whether the run was to be all of a suite, or of a folder of it: only then it must reach what it declares."""
        words = [str(each) for each in self._config.args]
        return not self._deselected and not any("::" in word or word.endswith(".py") for word in words)


def _refuse_several(items: list[pytest.Item]) -> None:
    using = [item for item in items if _RUN_STEPS & set(getattr(item, "fixturenames", ()))]
    if len(using) > 1:
        first = quoted(nodeid_here(using[0]))
        pytest.exit(
            f"--dbo-replay is for one test, and {len(using)} of those selected use dbo_run or dbo_explore; name the "
            f"one that printed the string, for example: pytest {first} --dbo-replay=...",
            returncode=_EXIT_MISTAKE,
        )


def nodeid_here(item: pytest.Item) -> str:
    """The test's name, as pytest takes it in the folder that it was started in."""
    # By hand: pytest's own function for it takes another type since 9.2.
    path, colons, name = item.nodeid.partition("::")
    config = item.config
    if config.invocation_params.dir != config.rootpath:
        path = os.path.relpath(config.rootpath / path, config.invocation_params.dir)
    return path + colons + name


def quoted(text: str) -> str:
    """`text` as one word of a shell, in single quotes."""
    return "'" + text.replace("'", "'\"'\"'") + "'"
