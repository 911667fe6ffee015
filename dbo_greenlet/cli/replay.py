"""`dbo-greenlet replay`: a recorded run again, by its recorded decisions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["replay"]


def replay(
    file: Annotated[Path, typer.Argument(help="A trace that dbo-greenlet run wrote.")],
    model: Annotated[
        Path | None, typer.Option(help="The checkpoint's folder, where it is not the recorded one.")
    ] = None,
    run: Annotated[str | None, typer.Option(help="Which run: dbo, thread, unsplit, dbo-graph, unsplit-graph.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> int:
    """Run a recorded job again by its recorded decisions, and say whether each of them was met.

    Exit code 1 where a decision, or on an equal torch and processor an output or a token, was not met.

    Example: dbo-greenlet replay trace.jsonl
    """
    from ..job.replay import plan_replay
    from ..job.replay import replay as replay_plan
    from .progress import JobProgress

    plan = plan_replay(file, model=model, run=run)
    with JobProgress(plan.spec) as progress:
        report = replay_plan(plan, progress.follow)
    print(json.dumps(report.as_json(), indent=2) if as_json else report.render())
    return 0 if report.met else 1
