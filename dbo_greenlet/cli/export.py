"""`dbo-greenlet export`: a trace for chrome://tracing or Perfetto."""

from __future__ import annotations

import json
import re
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["export"]


class Format(str, Enum):
    """What `export` writes."""

    chrome = "chrome"
    perfetto = "perfetto"


def export(
    file: Annotated[
        Path,
        typer.Argument(
            help="A trace of ours; it may still be growing. Or the folder of a server's traces: the latest of --rank, "
            "or of the lowest rank."
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The file to write.")],
    kind: Annotated[
        Format,
        typer.Option(
            "--format", help="chrome: JSON that most viewers open. perfetto: TrackEvent packets, exact and smaller."
        ),
    ],
    run: Annotated[str | None, typer.Option(help="Only this run: dbo, thread or unsplit.")] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Only this rank.")] = None,
    steps: Annotated[str | None, typer.Option(help="Only these steps, 3 or 3-5; default: all.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> int:
    """Write a trace in a format that viewers open: one process per rank, arrows from sends to receives, counters.

    Example: dbo-greenlet export trace.jsonl --format perfetto -o trace.pftrace

    Then open it at ui.perfetto.dev.
    """
    from ..errors import ConfigurationError
    from ..trace import newest_trace
    from ..trace.export import export_trace
    from ..trace.export_chrome import write_chrome
    from ..trace.export_model import ExportModel

    wanted = None if steps is None else _range(steps)
    write = write_chrome
    if kind is Format.perfetto:
        try:
            from ..trace.export_perfetto import write_perfetto
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] not in ("perfetto", "google"):
                raise
            raise ConfigurationError(f"{error.name} is not installed; install dbo-greenlet[trace]") from error
        write = write_perfetto
    if file.is_dir():
        file = newest_trace(file, rank)
        print(f"dbo-greenlet: this is {file}", file=sys.stderr)
    model = ExportModel(file, run=run, rank=rank, steps=wanted)
    export_trace(model, output, write)
    shown = {name.replace(" ", "_"): number for name, number in model.shown.items()}
    apart = max(model.offsets.values()) - min(model.offsets.values())
    if as_json:
        summary: dict[str, object] = {"file": str(file), "output": str(output), "format": kind.value, **shown}
        summary |= {"ranks": sorted(model.offsets), "offsets_us": model.offsets, "torn": model.stream.torn}
        print(json.dumps(summary, indent=2))
        return 0
    ranks = ", ".join(map(str, sorted(model.offsets)))
    print(
        f"{output}: {shown['steps']} steps of rank{'s' if len(model.offsets) > 1 else ''} {ranks}, "
        f"{shown['slices']} slices, {shown['flows']} arrows, {shown['counter_samples']} counter samples"
    )
    if len(model.offsets) > 1:
        print(
            f"The ranks lie on one axis by the clock of their host; their origins are up to {apart:.3f} us apart. Of "
            "ranks on several hosts this says nothing."
        )
    if model.stream.torn:
        print(f"The last line of {file} is torn and was left out: the run is writing it right now, or died there.")
    return 0


def _range(text: str) -> range:
    from ..errors import ConfigurationError

    match = re.fullmatch(r"\s*(\d{1,12})\s*(?:-\s*(\d{1,12})\s*)?", text)
    if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
        raise ConfigurationError(f"--steps {text}: give one step (3) or a range with both ends (3-5)")
    return range(int(match[1]), int(match[2] or match[1]) + 1)
