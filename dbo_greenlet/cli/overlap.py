"""`dbo-greenlet overlap`: how much communication is hidden, and how much is exposed."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .trace_extra import needs_trace_extra

if TYPE_CHECKING:
    from ..trace.clocks.bounds import Collective
    from ..trace.clocks.offsets import CommonAxis
    from ..trace.clocks.profiles import ProfileClocks

__all__ = ["overlap"]

_APART = (
    "These files share no collective, as those of one run do, so each is measured by itself, on a clock of its own."
)


def overlap(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE",
            help="Traces of ours, profiles of torch.profiler (JSON, also .gz; vLLM's too) or of Nsight Systems "
            "(exported SQLite), or what `import` made of them. One a rank, or a folder of them.",
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

    Several files of one run are put on one axis by the collectives that they share, which tells what in a communication
    is waiting for a late rank. A share behind "<=" is an upper bound: a trace of ours without the GPU's times has no
    other. Exit code 1: of some file no share can be trusted, not even as a bound ("?"), and the report says why.

    Example: dbo-greenlet overlap rank0.pt.trace.json.gz
    """
    from ..errors import ConfigurationError
    from ..trace.clocks.arrivals import arrivals_json, render_arrivals
    from ..trace.files import expand

    paths, left_out = expand(files, rank=rank)
    for note in left_out:
        print(f"dbo-greenlet: {note}", file=sys.stderr)
    with needs_trace_extra():
        from ..trace.clocks.profiles import ProfileClocks
        from ..trace.importers import is_own_trace, read_profile
        from ..trace.kernels import KernelTable
        from ..trace.overlap.profile import profile_overlap
        from ..trace.overlap.text import overlap_json, render_overlap, render_summary, says_something
        from ..trace.overlap.trace import trace_overlap
        from ..trace.step_columns import read_columns

        table = KernelTable(kernels)
        clocks = ProfileClocks(table)
        reports = []
        own = []
        for path in paths:
            if is_own_trace(path):
                own.append(path)
                reports.append(trace_overlap(read_columns(path), run=run, rank=rank))
            elif run is not None or rank is not None:
                raise ConfigurationError(f"{path} is a profile; --run and --rank choose from a trace of ours")
            else:
                profile = read_profile(path)
                clocks.add(profile)
                reports.append(profile_overlap(profile, table))
    axes = _axes(clocks, own)
    if as_json:
        found = [arrivals_json(axis, collectives) | {"notes": notes} for axis, collectives, notes in axes]
        print(json.dumps({"reports": [overlap_json(report) for report in reports], "axes": found}, indent=2))
    else:
        texts = [render_overlap(report) for report in reports]
        if len(reports) > 1:
            texts.append(render_summary(reports))
        for axis, collectives, notes in axes:
            if collectives:
                texts.append("\n".join([render_arrivals(axis, collectives), *(f"note: {note}" for note in notes)]))
            else:
                # Files that share nothing need not be of one run.
                texts.append("\n".join(f"note: {note}" for note in [*notes, _APART]))
        print("\n\n\n".join(texts))
    return 0 if all(says_something(report) for report in reports) else 1


def _axes(clocks: ProfileClocks, own: Sequence[Path]) -> list[tuple[CommonAxis, list[Collective], list[str]]]:
    """One for the profiles and one for the traces of ours, where there are several of them."""
    from ..errors import TraceFileError
    from ..trace.clocks.offsets import axis_of, read_votes

    axes = []
    if len(clocks.names) > 1:
        collectives, notes = clocks.match()
        axes.append((clocks.axis(collectives), collectives, notes))
    if len(own) > 1:
        try:
            votes = read_votes(own)
        except TraceFileError as error:
            # Each was read already, so what is left to find is that they are of several runs: to be compared, then.
            axes.append((axis_of([], ranks=()), [], [f"{error}."]))
        else:
            axes.append((votes.axis(), votes.collectives, []))
    return axes
