"""`dbo-greenlet replay`: a recorded run again by its recorded decisions, or a failed test again by its string."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["replay"]


def replay(
    what: Annotated[
        str, typer.Argument(metavar="TRACE|TEST", help="A trace of dbo-greenlet run; or a test, as pytest names it.")
    ],
    string: Annotated[
        str | None, typer.Argument(metavar="STRING", help="With a test: the replay string that it printed.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="The checkpoint's folder, where it is not the recorded one.")
    ] = None,
    run: Annotated[str | None, typer.Option(help="Which run: dbo, thread, unsplit, dbo-graph, unsplit-graph.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    until: Annotated[
        int | None,
        typer.Option(
            metavar="STEP", help="Start the debugger there: before this step on rank 0, or before a test's decision."
        ),
    ] = None,
) -> int:
    """Run a recorded job again by its recorded decisions, and say whether each of them was met.

    Exit code 1 where a decision, or on an equal torch and processor an output or a token, was not met.

    With a test and its replay string: run that test by it. Exit code 1 where the test fails.

    Example: dbo-greenlet replay trace.jsonl

    Example: dbo-greenlet replay tests/test_model.py::test_step 'dbor1:2;(01*5);...'
    """
    from ..errors import ConfigurationError

    if until is not None and until < 0:
        raise ConfigurationError(f"--until is {until}; use 0 or more")
    # A string in place of the test, and a test without its string; the former also where the two changed places.
    if what.startswith("dbor") or (string is None and ("::" in what or what.endswith(".py"))):
        raise ConfigurationError(
            "a test is replayed by its name and by the string that it printed when it failed: dbo-greenlet replay "
            "tests/test_model.py::test_step 'dbor1:...'"
        )
    if string is None:
        return _replay_job(Path(what), model, run, as_json, until)
    if model is not None or run is not None or as_json:
        raise ConfigurationError("--model, --run and --json are for traces; a test takes --until only")
    return _replay_test(what, string, until)


def _replay_job(file: Path, model: Path | None, run: str | None, as_json: bool, until: int | None) -> int:
    from ..trace.not_ours import refuse_profile

    # Before torch is loaded.
    refuse_profile(file, "replay needs a trace of dbo-greenlet run")
    from ..job import process
    from ..job.replay import plan_replay
    from ..job.replay import replay as replay_plan
    from .progress import JobProgress

    plan = plan_replay(file, model=model, run=run)
    with contextlib.ExitStack() as stack:
        follow = None
        rank_main: Callable[..., None] = process.rank_main
        if until is None:
            follow = stack.enter_context(JobProgress(plan.spec)).follow
        else:
            from ..job.debugged_step import debug_step

            plan, rank_main = stack.enter_context(debug_step(plan, until))
        report = replay_plan(plan, follow, rank_main=rank_main)
    print(json.dumps(report.as_json(), indent=2) if as_json else report.render())
    return 0 if report.met else 1


def _replay_test(test: str, string: str, until: int | None) -> int:
    import importlib.util
    import subprocess
    import sys

    from ..errors import ConfigurationError
    from ..testing.replay_case import ReplayCase

    # Here, because pytest would need a second to say the same.
    string = ReplayCase.decode(string).encode()
    if importlib.util.find_spec("pytest") is None:
        raise ConfigurationError("replaying a test needs pytest; install dbo-greenlet[testing]")
    command = [sys.executable, "-m", "pytest", "-p", "dbo_greenlet.testing.plugin", f"--dbo-replay={string}", test]
    if until is not None:
        command.append(f"--dbo-until={until}")
    code = subprocess.run(command, check=False).returncode
    # pytest: 0 passed, 1 failed, 2 a mistake or interrupted; the others mean that no test ran.
    return code if code in (0, 1) else 2
