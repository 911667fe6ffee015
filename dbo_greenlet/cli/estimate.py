"""`dbo-greenlet estimate`: should these steps be split?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .trace_extra import needs_trace_extra

__all__ = ["estimate"]

_STEPS, _MACHINE, _MEASURED = "The model and its steps", "The machine", "What was measured"


def estimate(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            help="Unsplit steps: a trace of ours that has their times and requests (of dbo-greenlet run, Runner, or a "
            "vLLM server's eager steps), or a profile (torch.profiler, Nsight Systems, or imported). Without one: from "
            "shapes alone.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="A preset (deepseek-v2-lite, deepseek-v3, qwen3-moe, qwen3-235b-a22b), a config.json or its folder, "
            "or a TOML file. Default: what the trace ran, else deepseek-v3; a profile needs it.",
            rich_help_panel=_STEPS,
        ),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a rank in a step; default 128.", rich_help_panel=_STEPS)
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            min=0, help="Keys that a token attends to; of a prefill, the prompt. Default 2048.", rich_help_panel=_STEPS
        ),
    ] = None,
    prefill: Annotated[
        bool | None,
        typer.Option("--prefill/--decode", help="Prompts, or one token a request.", rich_help_panel=_STEPS),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Of the model, where it was cut.", rich_help_panel=_STEPS)
    ] = None,
    all2all: Annotated[
        str | None,
        typer.Option(
            help="deepep_ll, deepep_ht, or stream (NCCL); default: what FILE ran with, else deepep_ll.",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Expert-parallel ranks; default: the trace's, else 16.", rich_help_panel=_MACHINE),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="By its name; default: the trace's, else H200.", rich_help_panel=_MACHINE)
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            help="nvlink, rdma or pcie; default nvlink for a trace of dbo-greenlet run with 8 ranks or fewer, else "
            "rdma.",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    gbs: Annotated[
        float | None, typer.Option(help="GB/s that a rank sends, instead of the link's.", rich_help_panel=_MACHINE)
    ] = None,
    latency_us: Annotated[
        float | None, typer.Option(help="Of a message, instead of the link's.", rich_help_panel=_MACHINE)
    ] = None,
    dispatch_bytes: Annotated[
        float | None,
        typer.Option(help="Bytes of an element in a dispatch: 1 (fp8) or 2 (default).", rich_help_panel=_MACHINE),
    ] = None,
    sms: Annotated[
        int | None, typer.Option(min=0, help="Multiprocessors of DeepEP HT; default 20.", rich_help_panel=_MACHINE)
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="Calibration: vllm-ll, vllm-ht, deepgemm, torch or runner; default by all-to-all and weights.",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    carrier: Annotated[
        str | None,
        typer.Option(help="greenlets (default), threads, or 'threads, one core'.", rich_help_panel=_MACHINE),
    ] = None,
    values: Annotated[
        Path | None,
        typer.Option(
            metavar="TOML",
            help="All of these from a file, and what has no option: [gpu], [shape], [calibration].",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    unsplit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOKENS=MS",
            help="A measured unsplit step; may be given several times, best with other numbers of tokens.",
            rich_help_panel=_MEASURED,
        ),
    ] = None,
    host_ms: Annotated[
        float | None,
        typer.Option(help="What the host took to launch that step; needs --unsplit.", rich_help_panel=_MEASURED),
    ] = None,
    outside_ms: Annotated[
        float | None, typer.Option(help="What a step takes beside the model.", rich_help_panel=_MEASURED)
    ] = None,
    split: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Split steps, to see the error: a trace of ours, or a profile whose ranges name microbatches (two "
            "steps or more; needs --tokens).",
            rich_help_panel=_MEASURED,
        ),
    ] = None,
    kernels: Annotated[
        Path | None, typer.Option(metavar="TOML", help="Names of kernels in the profile.", rich_help_panel=_MEASURED)
    ] = None,
    execution: Annotated[str, typer.Option(help="eager, graph or both.")] = "both",
    microbatches: Annotated[str, typer.Option(metavar="N,N", help="How many to try, from 2 to 4.")] = "2,3,4",
    policy: Annotated[list[str] | None, typer.Option(help="Orders to try; may be given several times.")] = None,
    most: Annotated[int | None, typer.Option("--max-tokens", min=2, help="Look for a threshold up to there.")] = None,
    margin: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Gains and losses within it are not called any; default 0.1. It is no bound of the error.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON, times in microseconds.")] = False,
) -> int:
    """Predict whether splitting a step pays, by running it on a virtual device, and from how many tokens on.

    Exit code 1: no split is recommended.

    Example: dbo-greenlet estimate --model deepseek-v2-lite --ranks 2 --link nvlink --tokens 64 --unsplit 64=27.6
    """
    from ..estimate.report import Question, answer

    given = {
        "model": model,
        "tokens": tokens,
        "context": context,
        "prefill": prefill,
        "layers": layers,
        "all2all": all2all,
        "ranks": ranks,
        "gpu": gpu,
        "link": link,
        "gbs": gbs,
        "latency_us": latency_us,
        "dispatch_bytes": dispatch_bytes,
        "sms": sms,
        "engine": engine,
        "carrier": carrier,
        "outside_ms": outside_ms,
        "margin": margin,
    }
    question = Question(
        values={name: value for name, value in given.items() if value is not None},
        values_file=values,
        file=file,
        execution=execution,
        microbatches=microbatches,
        policies=tuple(policy or ()),
        unsplit=tuple(unsplit or ()),
        host_ms=host_ms,
        split=split,
        kernels=kernels,
        most=most,
    )
    with needs_trace_extra():
        report = answer(question)
    print(report.json() if as_json else report.text())
    return 0 if report.recommends else 1
