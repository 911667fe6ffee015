"""`dbo-greenlet diff`: where two traces part, or what differs between two profiles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .trace_extra import needs_trace_extra

__all__ = ["diff"]

_ONE_KIND = "a trace says what was decided, a profile which kernels ran; compare two of one kind"


def diff(
    a: Annotated[
        Path,
        typer.Argument(
            metavar="A",
            help="A trace of ours (also .gz), which may still be growing, or a profile of torch.profiler or Nsight "
            "Systems; or a folder with those of all ranks.",
        ),
    ],
    b: Annotated[
        Path, typer.Argument(metavar="B", help="Another one. A trace: of the same program with the same settings.")
    ],
    run: Annotated[str | None, typer.Option(help="Of traces: compare only this run: dbo, thread or unsplit.")] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Of traces: compare only this rank.")] = None,
    kernels: Annotated[
        Path | None,
        typer.Option("--kernels", metavar="TOML", help="Of profiles: names to know, before those built in."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON, times in microseconds.")] = False,
) -> int:
    """Compare two traces of the same job: the first decision that differs, then their times by stage and by step.

    Of two profiles: the kernels that came, went or ran more or less often, then times by kernel and stage, and what of
    the communication is exposed.

    Exit code 1: a decision, an output or a sampled token differs; of profiles: a kernel ran another number of times.
    Times alone never do.

    Example: dbo-greenlet diff before.jsonl after.jsonl
    """
    from ..errors import ConfigurationError
    from ..trace.diff.text import diff_json, render_diff
    from ..trace.diff.traces import diff_traces
    from ..trace.file_kinds import all_ours
    from ..trace.files import expand

    paths = [expand([each], rank=rank)[0] for each in (a, b)]
    if all_ours(paths[0] + paths[1], _ONE_KIND):
        if kernels is not None:
            raise ConfigurationError(f"--kernels says what names in profiles mean; {a} is a trace of ours")
        found = diff_traces(a, b, run=run, rank=rank)
        print(json.dumps(diff_json(found), indent=2) if as_json else render_diff(found))
        return 0 if found.equal else 1
    if run is not None or rank is not None:
        raise ConfigurationError(f"{paths[0][0]} is a profile; --run and --rank choose from a trace of ours")
    with needs_trace_extra():
        from ..trace.diff.profiles import diff_profiles
        from ..trace.diff.profiles_text import profile_diff_json, render_profile_diff
        from ..trace.importers import read_profile
        from ..trace.kernels import KernelTable

        profiles = [[read_profile(path) for path in some] for some in paths]
        compared = diff_profiles(profiles[0], profiles[1], KernelTable(kernels), names=(str(a), str(b)))
    print(json.dumps(profile_diff_json(compared), indent=2) if as_json else render_profile_diff(compared))
    return 0 if compared.equal else 1
