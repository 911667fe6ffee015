"""`dbo-greenlet record`: run a program with recording on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigurationError
from .output_file import REPLACES

__all__ = ["CONTEXT_SETTINGS", "record"]

# What follows the command's name is the command's, options included.
CONTEXT_SETTINGS = {"allow_interspersed_args": False}


def record(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="The program and its arguments.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="A folder, new or empty; or a file that ends in .jsonl or .jsonl.gz, for all processes together: "
            f"{REPLACES}",
            show_default="dbo-trace-DATE-TIME",
        ),
    ] = None,
    every: Annotated[int, typer.Option(min=1, help="Record every how-manieth step.")] = 1,
    gpu: Annotated[
        bool,
        typer.Option("--gpu", help="Also when each slice ran on the GPU. Every recorded step then ends with a wait."),
    ] = False,
    memory: Annotated[
        bool,
        typer.Option(
            "--memory",
            help="Also what each operation of torch in a step reads, writes, frees and holds, for `lint`. It costs "
            "some 60 us an operation, so times mean little then (fewer steps: --every). Not of vLLM, nor of CUDA "
            "graphs.",
        ),
    ] = False,
    megabytes: Annotated[float, typer.Option(min=1.0, help="How much a process may write.")] = 4000.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was recorded as JSON.")] = False,
) -> int:
    """Run a program of Python, or one that starts some, and record the steps of its schedulers: of ours, of a script
    that uses Scheduler or Runner, of a vLLM server with the drop-in.

    The program is run as it is, with environment variables added (DBO_GREENLET_TRACE and its like). Each process has a
    file of its own. Exit code: the program's; 1 where it ended well and nothing was recorded.

    Example: dbo-greenlet record -o traces/ -- python serve.py --batch 64
    """
    from ..trace.record_output import RecordOutput
    from ..trace.record_summary import nothing_recorded, summary_json, summary_text
    from .passing_on import run_passing_on

    if not command:
        raise ConfigurationError("there is no command to run; put it behind the options: record -o DIR -- python x.py")
    with RecordOutput(output, every=every, gpu=gpu, memory=memory, megabytes=megabytes) as recording:
        code = run_passing_on(command, recording.environment)
        found = recording.collect()
    if as_json:
        print(json.dumps({"command": command, "exit_code": code} | summary_json(found), indent=2))
    elif found.files:
        # Not among what the program prints.
        print(summary_text(found), file=sys.stderr)
    if not found.steps:
        print(f"dbo-greenlet: {nothing_recorded(found, code)}", file=sys.stderr)
        return code or 1
    return code
