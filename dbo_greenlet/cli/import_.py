"""`dbo-greenlet import`: a profile, converted once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .output_file import REPLACES, check_output, output_file
from .trace_extra import needs_trace_extra

__all__ = ["import_profile"]


def import_profile(
    file: Annotated[
        Path,
        typer.Argument(help="A profile of torch.profiler (JSON, also .gz) or of Nsight Systems (exported SQLite)."),
    ],
    output: Annotated[
        Path,
        typer.Option("-o", "--output", parser=output_file, metavar="FILE", help=f"The file to write; {REPLACES}"),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print what was read as JSON.")] = False,
) -> int:
    """Convert a profile into a file of columns that the other commands read in a fraction of the time.

    The file is numpy's .npz: one array a column, times in microseconds.

    Example: dbo-greenlet import rank0.pt.trace.json.gz -o rank0.npz
    """
    check_output(output, "--output", [(file, "the profile")])
    with needs_trace_extra():
        from ..trace.importers import read_profile
        from ..trace.no_communication import no_communication_note
        from ..trace.profile import save

        profile = read_profile(file)
        save(profile, output)
        notes = profile.notes + no_communication_note(profile)
    activities = profile.activities
    window = float(activities.end.max() - activities.begin.min())
    summary = {
        "file": str(file),
        "output": str(output),
        "source": profile.source,
        "gpus": profile.gpus,
        "activities": len(activities),
        "calls": len(profile.calls),
        "ranges": len(profile.ranges),
        "window": window,
        "missing": profile.missing,
        "notes": notes,
    }
    if as_json:
        print(json.dumps(summary, indent=2))
        return 0
    print(
        f"{output}: {len(activities)} events on the GPU, {len(profile.calls)} calls, {len(profile.ranges)} ranges, "
        f"{window / 1000:.3f} ms ({profile.source})"
    )
    for text in [f"not in the profile: {what}." for what in profile.missing] + notes:
        print(f"note: {text}")
    return 0
