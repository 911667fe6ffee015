"""`dbo-greenlet lint`: what is wrong with a recorded run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .trace_extra import needs_trace_extra

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..trace.lint.checks import Rule
    from ..trace.lint.findings import Report

__all__ = ["lint"]


def lint(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILE",
            help="Traces of ours, of all ranks of a run (also .gz, or the folder that they are in), or profiles as "
            "overlap reads them.",
            show_default=False,
        ),
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option("--ignore", metavar="ID", help="Leave this rule out; may be given often.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="ID", help="Look by this rule alone; may be given often.")
    ] = None,
    rules: Annotated[bool, typer.Option("--rules", help="List the rules, and look at no file.")] = False,
    run: Annotated[str | None, typer.Option(help="Of a trace of ours: only this run.")] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Of a trace of ours: only this rank.")] = None,
    cutoff: Annotated[
        int | None,
        typer.Option(min=1, metavar="BYTES", help="Smaller messages are small; default: what the transport has."),
    ] = None,
    kernels: Annotated[
        Path | None,
        typer.Option("--kernels", metavar="TOML", help="Of a profile: names to know, before those built in."),
    ] = None,
    width: Annotated[int, typer.Option(min=40, help="Characters a line.")] = 100,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON, times in microseconds.")] = False,
) -> int:
    """Look for mistakes in streams, events, hooks and splitting that cost overlap, or the right answer.

    A rule that could not look says what it lacks. Exit code 1: something was found; 2: no rule could look at a file.

    Example: dbo-greenlet lint trace.jsonl --ignore no-overlap
    """
    from ..errors import ConfigurationError
    from ..trace.lint.rules import choose_rules
    from ..trace.lint.text import render_report, render_rules, report_json, rules_json

    if rules:
        print(json.dumps(rules_json(), indent=2) if as_json else render_rules(width=width))
        return 0
    if not files:
        raise ConfigurationError("name a trace or a profile to look at, or use --rules to see the rules")
    chosen = choose_rules(_ids(only), _ids(ignore))
    reports = _reports(files, chosen, run=run, rank=rank, cutoff=cutoff, kernels=kernels)
    if as_json:
        print(json.dumps({"reports": [report_json(each) for each in reports]}, indent=2))
    else:
        print("\n\n\n".join(render_report(each, width=width) for each in reports))
    if any(each.findings for each in reports):
        return 1
    # What a pipeline gates on must not pass because nobody looked.
    return 2 if any(each.not_checked and not each.checked for each in reports) else 0


def _reports(
    files: Sequence[Path],
    rules: Sequence[Rule],
    *,
    run: str | None,
    rank: int | None,
    cutoff: int | None,
    kernels: Path | None,
) -> list[Report]:
    from ..errors import ConfigurationError
    from ..trace.files import TraceFiles, expand, is_trace
    from ..trace.lint import lint_trace

    paths, notes = expand(files, rank=rank)
    own = [path for path in paths if is_trace(path)]
    if own and len(own) < len(paths):
        other = next(path for path in paths if path not in own)
        raise ConfigurationError(f"{other} is no trace of ours and {own[0]} is one; look at one kind at a time")
    if own:
        trace = TraceFiles(files, rank=rank, quick=True)
        return [lint_trace(trace, rules=rules, run=run, rank=rank, cutoff=cutoff)]
    if run is not None or rank is not None:
        raise ConfigurationError(f"{paths[0]} is a profile; --run and --rank choose from a trace of ours")
    with needs_trace_extra():
        from ..trace.importers import read_profile
        from ..trace.kernels import KernelTable
        from ..trace.lint.profile_rules import lint_profile

        table = KernelTable(kernels)
        return [
            lint_profile(read_profile(path), table, rules=rules, cutoff=cutoff, notes=notes if place == 0 else ())
            for place, path in enumerate(paths)
        ]


def _ids(given: Sequence[str] | None) -> list[str]:
    """Ids as people give them: each by itself, or several with commas between them."""
    return [part.strip() for each in given or () for part in each.split(",") if part.strip()]
