"""What the fixtures `dbo_run`, `dbo_explore` and `dbo_golden` give to a test."""

from __future__ import annotations

import bdb
import contextlib
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import pytest

from ..errors import ConfigurationError, ReplayMismatch
from ..policies import policy_from_text, text_of
from ..policy import Policy, RoundRobin
from ..schedule import Schedule
from .errors import ExplorationFailed, GoldenFileError, ReplayStringError
from .faults import Faults
from .golden import Golden
from .replay_case import ReplayCase
from .step_record import StepRecord
from .step_run import Build, StepRun, StepRunner, run_step

if TYPE_CHECKING:
    from ..step import Step
    from .explore import Exploration
    from .plugin import Kit

__all__ = ["DboExplore", "DboGolden", "DboRun", "TestCalls"]


class TestCalls:
    """The steps and explorations that one test ran so far.

    Attributes: `number` of them; `case`: how to repeat the latest one, None where there is none.
    """

    __test__ = False  # to pytest, a class called Test... is a test

    def __init__(self, counted: bool) -> None:
        self._counted = counted
        self.number = 0
        self.case: ReplayCase | None = None

    def begin(self) -> int:
        self.number += 1
        self.case = None
        return self.number

    def note(self, case: ReplayCase) -> None:
        self.case = case

    def last_case(self) -> ReplayCase | None:
        """How to repeat the latest: with its number where there were several that can be told apart by it."""
        if self.case is None:
            return None
        return self.case.for_call(self.number if self.number > 1 and self._counted else 0)


class DboRun:
    """`run_step`, bound to the command line. Attribute `seed`: that of --dbo-seed, 0 where it is not given."""

    def __init__(self, kit: Kit, calls: TestCalls) -> None:
        self._kit = kit
        self._calls = calls
        self.seed: int = kit.seed

    def __call__(
        self,
        build: Build,
        policy: Policy | str | None = None,
        *,
        faults: Faults | str | None = None,
        **options: Any,
    ) -> StepRun:
        """Run a step once; see `run_step`.

        Args:
            build: makes the step.
            policy: a policy or its text, such as "phase_offset:2"; "random" and "pct" take the seed of --dbo-seed.
            faults: what is to go wrong, or its text.
            options: what else `run_step` takes.

        With --dbo-replay the string has the policy and the faults. With --dbo-until the debugger starts.

        Raises:
            ReplayMismatch: the step is not the one of the string any more.
            ReplayStringError: it never was.
        """
        __tracebackhide__ = True
        case = self._kit.case_for(self._calls.begin())
        chosen: Policy | None
        parsed: Faults | None
        if case is not None:
            chosen, parsed = case.policy(), Faults.parse(case.faults)
        else:
            chosen, parsed = self._policy(policy), Faults.parse(faults) if isinstance(faults, str) else faults
        record = StepRecord(options.get("count", 2))
        until = self._kit.until_for(case)
        instruments = [record, *options.pop("instruments", ())]
        if until is not None:
            build = until.armed(build)
            instruments.append(until)
        try:
            run = run_step(build, chosen, faults=parsed or None, instruments=instruments, **options)
        finally:
            # In any case: a time limit comes as an exception that is not the step's.
            self._calls.note(ReplayCase(record.schedule(), str(parsed or "")))
            self._kit.stopped(until)
        _raise_what_is_not_the_steps(run, case is not None)
        # Its whole text where it has one: a golden file says it to whoever reads it.
        with contextlib.suppress(ConfigurationError):
            run.policy = text_of(chosen or RoundRobin())
        return run

    def _policy(self, policy: Policy | str | None) -> Policy | None:
        if not isinstance(policy, str):
            return policy
        return policy_from_text(f"{policy}:{self.seed}" if policy in ("random", "pct") else policy)


class _Latest:
    """An instrument that knows the step that began last: cheap enough for thousands of them, and holds none of it."""

    def __init__(self) -> None:
        self.count = 0  # of its microbatches; 0 before the first step
        self._decisions: list[int] = []
        self._sites: list[str] = []
        self._failed: int | None = None

    def before_step(self, step: Step) -> None:
        self.count, self._decisions, self._sites, self._failed = step.count, step.decisions, step.sites, None

    def after_step(self, step: Step, error: BaseException | None) -> None:
        self._failed = step.failed_index

    def schedule(self) -> Schedule:
        """As far as it came; one decision more than sites where a slice was cut off."""
        cut_off = () if self._failed is None else (self._failed,)
        return Schedule(self.count, (*self._decisions, *cut_off), tuple(self._sites))


class DboExplore:
    """`explore`, bound to the command line."""

    def __init__(self, kit: Kit, calls: TestCalls) -> None:
        self._kit = kit
        self._calls = calls

    def __call__(self, build: Build, **options: Any) -> Exploration:
        """Explore a step; see `explore`. --dbo-seed and --dbo-schedules go before what the test says.

        With --dbo-replay only the string's schedule runs, judged by the same verdicts. Where nothing is found the test
        ends there and counts as skipped: its other statements are about an exploration.

        Raises:
            ExplorationFailed: a schedule failed, or the replayed one does.
        """
        __tracebackhide__ = True
        kit = self._kit
        case = kit.case_for(self._calls.begin())
        if case is not None:
            self._replay(build, case, options)
        if kit.seed_given:
            options["seed"] = kit.seed
        if kit.schedules is not None:
            options["schedules"] = kit.schedules
        from .explore import explore
        from .failure_text import AGAIN

        if isinstance(options.get("faults"), str):
            options["faults"] = Faults.parse(options["faults"]) or None
        latest = _Latest()
        options["instruments"] = [latest, *options.get("instruments", ())]
        try:
            return explore(build, **options)
        except ExplorationFailed as error:
            if error.replay:
                self._calls.note(ReplayCase.decode(error.replay))
                # The report ends with the line, and there it has the test's name.
                error.args = (str(error).rpartition(AGAIN)[0],)
            # Where in `explore` it was raised tells nobody anything; where in the model its cause was, does.
            raise error.with_traceback(None) from error.__cause__
        except Exception:
            # A mistake in what was asked for, or a step that is another one each time: no schedule repeats that.
            raise
        except BaseException:
            # A time limit, Ctrl-C: the schedule that hung is the one to run again.
            if latest.count:
                self._calls.note(ReplayCase(latest.schedule(), str(options.get("faults") or "")))
            raise

    def _replay(self, build: Build, case: ReplayCase, options: dict[str, Any]) -> None:
        __tracebackhide__ = True
        from .explore import reference_of
        from .verdicts import DEFAULT, first_finding

        self._calls.note(case)
        faults = Faults.parse(case.faults) or None
        where = {name: options[name] for name in ("count", "make_device") if name in options}
        how = {name: options[name] for name in ("strict", "thread_state") if name in options}
        reference = reference_of(build, faults=faults, **where)
        until = self._kit.until_for(case)
        runner = StepRunner(
            build if until is None else until.armed(build),
            faults=faults,
            instruments=() if until is None else (until,),
            **where,
            **how,
        )
        try:
            run = runner.run(case.policy())
        finally:
            self._kit.stopped(until)
        _raise_what_is_not_the_steps(run, True)
        found = first_finding(run, reference, options.get("verdicts", DEFAULT))
        if found is not None:
            raise ExplorationFailed(f"the replayed schedule fails: {found.text}", case.encode()) from run.error
        pytest.skip("the replayed schedule passes every verdict; without --dbo-replay the test explores")


class DboGolden:
    """Compares a step's schedule with the one that is committed beside the test."""

    def __init__(self, kit: Kit, folder: Path, name: str) -> None:
        self._kit = kit
        self._folder = folder
        self._name = name

    def __call__(self, ran: Any, name: str | None = None) -> None:
        """Pass if the schedule of `ran` is that of the golden file `goldens/NAME.txt` beside the test file.

        Args:
            ran: a `StepRun`, a `StepResult`, or a `Schedule` with its sites.
            name: of the file; default the test's name.

        With --dbo-update-golden the file is written instead.

        Raises:
            GoldenMismatch: another schedule; the message is the difference.
            GoldenFileError: no file, or one that was edited by hand.
        """
        __tracebackhide__ = True
        if isinstance(ran, StepRun) and ran.error is not None:
            raise ran.error
        schedule = ran if isinstance(ran, Schedule) else getattr(ran, "schedule", None)
        if not isinstance(schedule, Schedule):
            raise ConfigurationError(f"dbo_golden takes what a step gave or its schedule, not {type(ran).__name__}")
        golden = Golden(self._folder / f"{name or self._name}.txt")
        policy = getattr(ran, "policy", "")
        if not self._kit.update_golden:
            golden.compare(schedule, policy)
            return
        if self._kit.goldens.setdefault(golden.path, schedule) != schedule:
            raise GoldenFileError(
                f"two steps of this run have the golden file {golden.path} and other schedules; give them names: "
                "dbo_golden(run, name=...)"
            )
        if golden.update(schedule, policy):
            self._kit.written.append(str(golden.path))


def _raise_what_is_not_the_steps(run: StepRun, replayed: bool) -> None:
    """A replay that is not met, and who quits the debugger: both are in the run as the step's error."""
    __tracebackhide__ = True
    error = run.error
    if replayed and isinstance(error, (ReplayMismatch, ReplayStringError)):
        raise error
    while error is not None:
        if isinstance(error, (pytest.exit.Exception, bdb.BdbQuit)):
            raise error
        error = error.__cause__


def debug(frame: FrameType, into_call: bool, passed_over: tuple[str, ...], title: str) -> None:
    """Start pytest's debugger at `frame`: it takes care of captured output, and of --pdbcls."""
    from _pytest.debugging import pytestPDB

    # Not `pytest.set_trace`, which starts in the frame that calls it. What it is made of has kept its name since
    # pytest 5; a pytest that renames it is told apart by the tests.
    start: Any = pytestPDB._init_pdb
    debugger = start("set_trace", header=title, skip=["bdb", "pdb", __name__, *passed_over])
    debugger.set_trace(frame)
    if not into_call:
        # Not in what is still to return before the model goes on, such as a stream's wait.
        debugger.set_next(frame)
