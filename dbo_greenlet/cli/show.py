"""`dbo-greenlet show`: recorded steps as timetables, as a page, or as a picture."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output_file import REPLACES, check_output, output_file
from .step_range import step_range

if TYPE_CHECKING:
    from ..trace.reader import StepTrace

__all__ = ["Asked", "are_ours", "show"]


def show(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE",
            help="A trace, also .gz; it may still be growing. The folder of a server's traces: the latest of --rank, "
            "or of the lowest rank; with --html and --png of every rank. Or the files of several ranks, or a profile.",
        ),
    ],
    steps: Annotated[
        str | None,
        typer.Option(
            "--step",
            "--steps",
            metavar="N|N-M",
            help="Which steps, 3 or 3-5; default: the first that was split, and for --html all of them.",
        ),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(min=0, help="Whose; default: the first rank that recorded it, for --html and --png all."),
    ] = None,
    run: Annotated[str | None, typer.Option(help="Of which run: dbo, thread or unsplit.")] = None,
    layers: Annotated[str | None, typer.Option(help="Layers to show, 3 or 3-5; default: all.")] = None,
    last: Annotated[bool, typer.Option("--last", help="Without --step: the last that was split.")] = False,
    lanes: Annotated[bool, typer.Option("--lanes", help="Also draw the slices over host time.")] = False,
    width: Annotated[int, typer.Option(min=40, help="Characters a line.")] = 100,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html",
            parser=output_file,
            metavar="PAGE",
            help=f"Write a page instead: zoom, search, details; it needs no network. The file: {REPLACES}",
        ),
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(
            "--png",
            parser=output_file,
            metavar="PICTURE",
            help=f"Write a picture instead; needs matplotlib. The file: {REPLACES}",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the records as JSON; of a page or a picture, what was written.")
    ] = False,
) -> int:
    """Print the timetable of recorded steps in the Comp / Comm / Order notation, and their GPU times if they have some.

    Example: dbo-greenlet show trace.jsonl --step 12 --rank 1 --layers 1-2

    Of a running server: dbo-greenlet show $DBO_GREENLET_TRACE --last

    As a page for the browser: dbo-greenlet show trace.jsonl --html trace.html
    """
    from ..errors import ConfigurationError
    from ..trace import parse_layers

    numbers = None if steps is None else step_range(steps, "--step")
    wanted = None if layers is None else parse_layers(layers)
    if last and numbers is not None:
        raise ConfigurationError("--last: --step names a step already; leave one of them out")
    if html is not None and png is not None:
        raise ConfigurationError("--html and --png: write one after the other")
    if lanes and (html is not None or png is not None):
        raise ConfigurationError("--lanes: a page and a picture are lanes; leave it out")
    if html is not None and wanted is not None:
        raise ConfigurationError("--layers: the page shows all layers, and finds one (layer 3); leave it out")
    for option, output in (("--html", html), ("--png", png)):
        if output is not None:
            check_output(output, option, [(file, "the trace") for file in files])
    asked = Asked(files, numbers, run, rank, last)
    if html is not None:
        from .show_picture import write_html

        write_html(asked, html, as_json=as_json)
    elif png is not None:
        from .show_picture import write_png

        write_png(asked, png, layers=wanted, as_json=as_json)
    elif not are_ours(files, rank):
        from .show_profile import show_profile

        show_profile(asked, width=width, as_json=as_json)
    elif as_json:
        chosen, _ = _read(asked)
        objects = [_as_json(step) for step in chosen]
        alone = numbers is None or len(numbers) == 1
        print(json.dumps(objects[0] if alone else {"steps": objects}, indent=2))
    else:
        chosen, torn = _read(asked)
        for place, step in enumerate(chosen):
            if place:
                print(f"\n{'-' * width}\n")
            _print_step(step, wanted, lanes, width)
        _print_torn(torn)
    return 0


@dataclass(frozen=True)
class Asked:
    """What of which files: the arguments of the command of these names."""

    files: Sequence[Path]
    steps: range | None
    run: str | None
    rank: int | None
    last: bool


def are_ours(files: Sequence[Path], rank: int | None) -> bool:
    """Whether the files are traces of ours, which have steps, and not profiles.

    An empty file, and one with the name of a trace, are taken for one: its reader says what is wrong with it. So is a
    pipe, which can be read only once.
    """
    from ..trace.files import expand, is_trace

    paths, _ = expand(files, rank=rank)
    return all(
        (path.exists() and not path.is_file()) or is_trace(path) or path.suffix == ".jsonl" or not path.stat().st_size
        for path in paths
    )


def _read(asked: Asked) -> tuple[list[StepTrace], Sequence[Path]]:
    """The steps that are asked for, and the files whose last line is torn."""
    from ..trace.files import TraceFiles
    from ..trace.step_choice import choose_steps

    files = asked.files
    if len(files) == 1 and files[0].is_dir():
        files = _of_folder(files[0], asked.rank)
        # Which one it is, is no part of what was asked for.
        print(f"dbo-greenlet: this is {', '.join(map(str, files))}", file=sys.stderr)
    stream = TraceFiles(files, quick=True)
    chosen = choose_steps(stream, stream.path, steps=asked.steps, run=asked.run, rank=asked.rank, last=asked.last)
    return chosen, stream.torn_paths


def _print_step(step: StepTrace, layers: Collection[int] | None, lanes: bool, width: int) -> None:
    from ..trace import render_gpu, render_lanes, render_step

    print(render_step(step, layers=layers, width=width))
    if lanes:
        print()
        print(render_lanes(step, layers=layers, width=width))
    if gpu_rows := render_gpu(step, layers=layers, width=width):
        print()
        print(gpu_rows)


def _print_torn(torn: Sequence[Path]) -> None:
    for path in torn:
        print()
        print(f"The last line of {path} is torn and was left out: the run is writing it right now, or died there.")


def _of_folder(folder: Path, rank: int | None) -> list[Path]:
    """Of a server's folder the latest file of one rank: another rank's schedule is the same, and reading it takes time.

    Of another folder all files, since which rank is in which one only reading them tells.
    """
    from ..errors import TraceFileError
    from ..trace import newest_trace
    from ..trace.files import expand

    try:
        return [newest_trace(folder, rank)]
    except TraceFileError:
        paths, _ = expand([folder], rank=rank)  # raises what is wrong with a folder that is none of either
        return paths


def _as_json(step: StepTrace) -> dict[str, Any]:
    return {
        "record": None if step.record is None else _fields(step.record),
        "slices": [_fields(each) for each in step.slices],
        "receives": [_fields(each) for each in step.receives],
        "gpu": [_fields(each) for each in step.gpu],
        "ops": [_fields(each) for each in step.ops],
    }


def _fields(record: Any) -> dict[str, Any]:
    """The record's fields, in the order of the schema. What is read quickly is no dataclass, but is as one."""
    import dataclasses

    from ..trace.schema import KINDS

    return {field.name: getattr(record, field.name) for field in dataclasses.fields(KINDS[record.kind])}
