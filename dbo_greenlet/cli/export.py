"""`dbo-greenlet export`: traces and profiles for chrome://tracing or Perfetto."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from .output_file import REPLACES, check_output, output_file
from .step_range import step_range
from .trace_extra import needs_trace_extra

__all__ = ["export"]


class Format(str, Enum):
    """What `export` writes."""

    chrome = "chrome"
    perfetto = "perfetto"


def export(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE",
            help="Traces of ours (also .gz), which may still be growing, or profiles of torch.profiler or Nsight "
            "Systems; of one run, one a rank. Or a folder of them.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option("-o", "--output", parser=output_file, metavar="FILE", help=f"The file to write; {REPLACES}"),
    ],
    kind: Annotated[
        Format,
        typer.Option(
            "--format", help="chrome: JSON that most viewers open. perfetto: TrackEvent packets, exact and smaller."
        ),
    ],
    run: Annotated[str | None, typer.Option(help="Of traces of ours: only this run: dbo, thread or unsplit.")] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Only this rank.")] = None,
    steps: Annotated[
        str | None, typer.Option(help="Of traces of ours: only these steps, 3 or 3-5; default: all.")
    ] = None,
    kernels: Annotated[
        Path | None,
        typer.Option("--kernels", metavar="TOML", help="Of profiles: names to know, before those built in."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> int:
    """Write traces or profiles in a format that viewers open: one process per rank, all on one time axis.

    Arrows go from sends to receives, from calls to the kernels they launch, and from a recorded event to what waited
    for it. Counters show transfers and bytes in flight, and runnable microbatches.

    Example: dbo-greenlet export trace.jsonl --format perfetto -o trace.pftrace

    Then open it at ui.perfetto.dev.
    """
    from ..errors import ConfigurationError
    from ..trace.export.chrome import write_chrome
    from ..trace.export.open_export import open_export
    from ..trace.export.write import export_trace

    wanted = None if steps is None else step_range(steps, "--steps")
    reads = [(file, "the trace") for file in files]
    check_output(output, "--output", reads if kernels is None else [*reads, (kernels, "the table of kernels")])
    write = write_chrome
    if kind is Format.perfetto:
        try:
            from ..trace.export.perfetto import write_perfetto
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] not in ("perfetto", "google"):
                raise
            raise ConfigurationError(f"{error.name} is not installed; install dbo-greenlet[trace]") from error
        write = write_perfetto
    with needs_trace_extra():
        model = open_export(files, run=run, rank=rank, steps=wanted, kernels=kernels)
        export_trace(model, output, write)
    if as_json:
        shown = {name.replace(" ", "_"): number for name, number in model.shown.items()}
        summary: dict[str, object] = {"files": model.paths, "output": str(output), "format": kind.value, **shown}
        summary |= {"ranks": sorted(model.offsets), "offsets_us": model.offsets}
        print(json.dumps(summary | {"axis": model.axis_text(), "notes": model.notes}, indent=2))
        return 0
    print(f"{output}: {_counted(model.shown, sorted(model.offsets))}")
    for line in model.axis_text():
        print(line)
    for note in model.notes:
        print(f"note: {note}")
    return 0


def _counted(shown: dict[str, int], ranks: list[int]) -> str:
    steps = f"{shown['steps']} step{'' if shown['steps'] == 1 else 's'}, " if "steps" in shown else ""
    of = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return f"{of}: {steps}{shown['slices']} slices, {shown['flows']} arrows, {shown['counter samples']} counter samples"
