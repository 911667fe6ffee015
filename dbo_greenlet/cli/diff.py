"""`dbo-greenlet diff`: where two traces part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["diff"]


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A trace of ours; it may still be growing.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one, of the same program with the same settings.")],
    run: Annotated[str | None, typer.Option(help="Compare only this run: dbo, thread or unsplit.")] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Compare only this rank.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON, times in microseconds.")] = False,
) -> int:
    """Compare two traces of the same job: the first decision that differs, then their times by stage and by step.

    Exit code 1: a decision, an output or a sampled token differs. Times alone never do.

    Example: dbo-greenlet diff before.jsonl after.jsonl
    """
    from ..trace.diff import diff_traces
    from ..trace.diff_text import diff_json, render_diff

    found = diff_traces(a, b, run=run, rank=rank)
    print(json.dumps(diff_json(found), indent=2) if as_json else render_diff(found))
    return 0 if found.equal else 1
