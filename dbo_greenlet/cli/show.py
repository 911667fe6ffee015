"""`dbo-greenlet show`: one recorded step as a timetable."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["show"]


def show(
    file: Annotated[
        Path,
        typer.Argument(
            help="A trace; it may still be growing. Or the folder of a server's traces: the latest of --rank, or of "
            "the lowest rank."
        ),
    ],
    step: Annotated[int | None, typer.Option(min=0, help="Which step; default: the first that was split.")] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Whose; default: the first rank that recorded it.")] = None,
    run: Annotated[str | None, typer.Option(help="Of which run: dbo, thread or unsplit.")] = None,
    layers: Annotated[str | None, typer.Option(help="Layers to show, 3 or 3-5; default: all.")] = None,
    last: Annotated[bool, typer.Option("--last", help="Without --step: the last that was split.")] = False,
    lanes: Annotated[bool, typer.Option("--lanes", help="Also draw the slices over host time.")] = False,
    width: Annotated[int, typer.Option(min=40, help="Characters a line.")] = 100,
    as_json: Annotated[bool, typer.Option("--json", help="Print the step's record as JSON.")] = False,
) -> int:
    """Print the timetable of a recorded step in the Comp / Comm / Order notation, and its GPU times if it has some.

    Example: dbo-greenlet show trace.jsonl --step 12 --rank 1 --layers 1-2

    Of a running server: dbo-greenlet show $DBO_GREENLET_TRACE --last
    """
    import dataclasses

    from ..errors import ConfigurationError
    from ..trace import newest_trace, parse_layers, read_trace, render_gpu, render_lanes, render_step

    wanted = None if layers is None else parse_layers(layers)
    if last and step is not None:
        raise ConfigurationError("--last: --step names a step already; leave one of them out")
    if file.is_dir():
        file = newest_trace(file, rank)
        # Which one it is, is no part of what was asked for.
        print(f"dbo-greenlet: this is {file}", file=sys.stderr)
    trace = read_trace(file)
    if step is None:
        asked = [s for s in trace.steps.values() if run in (None, s.run) and rank in (None, s.rank)]
        if last:
            asked.reverse()
        first = next((s for s in asked if s.slices or s.gpu), asked[0] if asked else None)
        step, run, rank = (0, run, rank) if first is None else (first.step, first.run, first.rank)
    found = trace.step(step, run=run, rank=rank)
    if as_json:
        record = None if found.record is None else dataclasses.asdict(found.record)
        slices = [dataclasses.asdict(each) for each in found.slices]
        receives = [dataclasses.asdict(each) for each in found.receives]
        gpu = [dataclasses.asdict(each) for each in found.gpu]
        print(json.dumps({"record": record, "slices": slices, "receives": receives, "gpu": gpu}, indent=2))
        return 0
    print(render_step(found, layers=wanted, width=width))
    if lanes:
        print()
        print(render_lanes(found, layers=wanted, width=width))
    if gpu_rows := render_gpu(found, layers=wanted, width=width):
        print()
        print(gpu_rows)
    if trace.torn:
        print()
        print(f"The last line of {file} is torn and was left out: the run is writing it right now, or died there.")
    return 0
