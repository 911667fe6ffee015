"""`dbo-greenlet critical-path`: the chain that set a step's length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .trace_extra import needs_trace_extra

__all__ = ["critical_path"]


def critical_path(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE",
            help="A trace of ours (also .gz; several files, or a folder of them: ranks of one run), profiles of "
            "torch.profiler (JSON, also .gz; vLLM's too) or of Nsight Systems (exported SQLite), or what `import` made "
            "of them.",
        ),
    ],
    kernels: Annotated[
        Path | None,
        typer.Option("--kernels", metavar="TOML", help="Names of kernels and ranges to know, before those built in."),
    ] = None,
    run: Annotated[
        str | None, typer.Option(help="Of a trace of ours: which run; default: the first split one.")
    ] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Of a trace of ours: whose steps; default: all.")] = None,
    step: Annotated[int | None, typer.Option(min=0, help="Only this step; default: all of them, added up.")] = None,
    every: Annotated[
        int | None,
        typer.Option(min=1, help="Of a trace of ours: measure each so-manieth step; default: all, of many a part."),
    ] = None,
    shorter: Annotated[
        str, typer.Option(metavar="PERCENT,...", help="By how much to shorten each stage; 100 is without it.")
    ] = "10,50,100",
    pieces: Annotated[int, typer.Option(min=0, help="How many pieces of the path to print, the longest.")] = 30,
    steps: Annotated[bool, typer.Option("--steps", help="Also print a line for each step.")] = False,
    width: Annotated[int, typer.Option(min=40, help="Characters a line.")] = 100,
    as_json: Annotated[bool, typer.Option("--json", help="Print the reports as JSON, times in microseconds.")] = False,
) -> int:
    """Find the chain of work and waits that set the length of the steps, and what shortening each stage would give.

    A gain is found by solving the step again with that stage shorter, so what was hidden behind it turns up. It is a
    range where the trace does not say what set a time.

    Exit code 1: the answer is not reliable, and the report says why.

    Example: dbo-greenlet critical-path trace.jsonl --step 12 --rank 0
    """
    from ..errors import ConfigurationError

    percent = _percents(shorter)
    with needs_trace_extra():
        from ..trace.critical_path.profile import profile_path
        from ..trace.critical_path.text import path_json, render_path
        from ..trace.critical_path.trace import trace_path
        from ..trace.files import expand, is_trace
        from ..trace.importers import read_profile
        from ..trace.kernels import KernelTable

        table = KernelTable(kernels)
        reports = []
        paths, _ = expand(files, rank=rank)
        profiles = [path for path in paths if not is_trace(path)]
        if len(profiles) < len(paths):
            own: list[Path] = [path for path in files if path.is_dir() or path not in profiles]
            reports.append(trace_path(own, run=run, rank=rank, step=step, every=every, percent=percent))
        for path in profiles:
            if run is not None or rank is not None:
                raise ConfigurationError(f"{path} is a profile; --run and --rank choose from a trace of ours")
            reports.append(profile_path(read_profile(path), table, step=step, percent=percent))
    if as_json:
        print(json.dumps({"reports": [path_json(report) for report in reports]}, indent=2))
    else:
        print("\n\n\n".join(render_path(report, width=width, pieces=pieces, steps=steps) for report in reports))
    return 1 if any(report.unreliable for report in reports) else 0


def _percents(text: str) -> tuple[float, ...]:
    """Percentages as a user types them, ascending.

    Raises:
        ConfigurationError: something else, or not between 0 and 100.
    """
    from ..errors import ConfigurationError

    try:
        values = sorted({float(part) for part in text.split(",")})
    except ValueError:
        values = []
    if not values or not all(0.0 < value <= 100.0 for value in values):
        raise ConfigurationError(f"--shorter {text}: give percentages above 0 and up to 100, for example 10,50,100")
    return tuple(values)
