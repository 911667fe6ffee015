"""`dbo-greenlet overlap`: how much communication is hidden, and how much is exposed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .trace_extra import needs_trace_extra

__all__ = ["overlap"]


def overlap(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE",
            help="Traces of ours, profiles of torch.profiler (JSON, also .gz; vLLM's too) or of Nsight Systems "
            "(exported SQLite), or what `import` made of them. One a rank.",
        ),
    ],
    kernels: Annotated[
        Path | None,
        typer.Option("--kernels", metavar="TOML", help="Names of kernels and ranges to know, before those built in."),
    ] = None,
    run: Annotated[str | None, typer.Option(help="Of a trace of ours: which run; default: one that overlaps.")] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Of a trace of ours: whose steps; default: all.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the reports as JSON, times in microseconds.")] = False,
) -> int:
    """Measure how much communication compute hides, by stage, layer, microbatch and rank, and why there was no compute.

    Exit code 1: the answer is not reliable, and the report says why.

    Example: dbo-greenlet overlap rank0.pt.trace.json.gz
    """
    from ..errors import ConfigurationError

    with needs_trace_extra():
        from ..trace.importers import is_own_trace, read_profile
        from ..trace.kernels import KernelTable
        from ..trace.overlap_profile import profile_overlap
        from ..trace.overlap_text import is_reliable, overlap_json, render_overlap, render_summary
        from ..trace.overlap_trace import trace_overlap
        from ..trace.step_columns import read_columns

        table = KernelTable(kernels)
        reports = []
        for file in files:
            if is_own_trace(file):
                reports.append(trace_overlap(read_columns(file), run=run, rank=rank))
            elif run is not None or rank is not None:
                raise ConfigurationError(f"{file} is a profile; --run and --rank choose from a trace of ours")
            else:
                reports.append(profile_overlap(read_profile(file), table))
    if as_json:
        print(json.dumps({"reports": [overlap_json(report) for report in reports]}, indent=2))
    else:
        texts = [render_overlap(report) for report in reports]
        if len(reports) > 1:
            texts.append(render_summary(reports))
        print("\n\n\n".join(texts))
    return 0 if all(is_reliable(report) for report in reports) else 1
