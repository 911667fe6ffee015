"""`dbo-greenlet run`: answer a file of prompts, split and unsplit, and say what happened."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigurationError
from ..job.requests import PACKAGED_PROMPTS
from ..job.spec import PACKAGED_MODEL, Settings, default_token_budget
from .output_file import REPLACES, check_output, output_file

__all__ = ["run"]

_DEFAULT = Settings()


def run(
    prompts: Annotated[
        Path,
        typer.Option(
            help='JSON Lines, {"prompt": ...} a line; also "answer", "arrival" (a step), "id".', show_default="packaged"
        ),
    ] = PACKAGED_PROMPTS,
    model: Annotated[
        Path,
        typer.Option(envvar="DBO_GREENLET_MODEL", help="Folder of a DeepSeek-V2 checkpoint.", show_default="packaged"),
    ] = PACKAGED_MODEL,
    limit: Annotated[int | None, typer.Option(min=1, help="Take the first N prompts only.")] = None,
    max_new_tokens: Annotated[
        int, typer.Option(help="Most tokens to generate for a prompt.")
    ] = _DEFAULT.max_new_tokens,
    ranks: Annotated[
        int, typer.Option(envvar="DBO_GREENLET_RANKS", help="Expert-parallel, data-parallel processes.")
    ] = _DEFAULT.ranks,
    num_microbatches: Annotated[
        int, typer.Option("--num-microbatches", "--ubatch-size", help="Microbatches of a split step.")
    ] = _DEFAULT.num_microbatches,
    decode_threshold: Annotated[
        int, typer.Option("--dbo-decode-token-threshold", help="Tokens a rank needs for a decode step to be split.")
    ] = _DEFAULT.decode_threshold,
    prefill_threshold: Annotated[
        int, typer.Option("--dbo-prefill-token-threshold", help="The same for any other step.")
    ] = _DEFAULT.prefill_threshold,
    rule: Annotated[
        str, typer.Option("--rule", "--vote-rule", help="Voting rule of vLLM's model runner: v1 or v2.")
    ] = _DEFAULT.rule,
    policy: Annotated[
        str,
        typer.Option(
            help="Which microbatch goes next: round_robin, in_turn, phase_offset:YIELDS, random:SEED or "
            "pct:SEED,depth=D,length=DECISIONS."
        ),
    ] = _DEFAULT.policy,
    carrier: Annotated[str, typer.Option(help="What carries a microbatch: greenlet or thread.")] = _DEFAULT.carrier,
    all2all: Annotated[
        str,
        typer.Option(
            help="auto, loopback (one rank), torch (gloo, or NCCL with exact sizes), nccl (fixed size), deepep_ll or "
            "deepep_ht."
        ),
    ] = _DEFAULT.all2all,
    device: Annotated[
        str, typer.Option(envvar="DBO_GREENLET_DEVICE", help="cpu or cuda; ranks share GPUs where there are fewer.")
    ] = _DEFAULT.device,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = _DEFAULT.dtype,
    max_num_seqs: Annotated[int, typer.Option(help="Requests that a rank runs at once.")] = _DEFAULT.max_requests,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(help="Most tokens in a step of a rank.", show_default="512; 510 with deepep_ll"),
    ] = None,
    cudagraph_sizes: Annotated[
        str,
        typer.Option(
            help="Token counts of decode steps to capture graphs for, 8,16,32; auto: powers of two up to "
            "--max-num-seqs; none."
        ),
    ] = _DEFAULT.cudagraph_sizes,
    threads: Annotated[
        int, typer.Option(envvar="DBO_GREENLET_THREADS", help="Torch threads of a rank.")
    ] = _DEFAULT.threads,
    strict: Annotated[
        bool, typer.Option("--strict", help="Check sites and frames at every yield (also DBO_GREENLET_STRICT=1).")
    ] = False,
    rank_timeout: Annotated[
        float, typer.Option(help="Seconds after which a silent rank counts as stalled.")
    ] = _DEFAULT.rank_timeout,
    gpu_timeline: Annotated[
        bool,
        typer.Option("--gpu-timeline", help="With --trace: also when each slice ran on the GPU, in graphs too."),
    ] = False,
    memory: Annotated[
        bool,
        typer.Option(
            "--memory",
            help="With --trace: also what each operation reads, writes, frees and holds, for `lint`. It costs "
            "some 60 us an operation, so times mean little then, and no graphs are made.",
        ),
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(parser=output_file, metavar="FILE", help=f"Write the trace (JSON Lines) to this file; {REPLACES}"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> int:
    """Answer prompts with expert-parallel ranks: every step split where the vote says so, then the same unsplit.

    Prints accuracy, whether the tokens are equal, which steps were split and why (not), yields, schedule hashes, host
    time per yield for greenlets and for threads, and the timetable of one step. On a GPU, with an all-to-all that can
    be captured (nccl, deepep_ll), both runs are repeated with decode steps as CUDA graphs, and compared.

    Example: dbo-greenlet run --limit 60 --trace trace.jsonl
    """
    settings = Settings(
        ranks=ranks,
        num_microbatches=num_microbatches,
        decode_threshold=decode_threshold,
        prefill_threshold=prefill_threshold,
        rule=rule,
        policy=policy,
        carrier=carrier,
        strict=strict or os.environ.get("DBO_GREENLET_STRICT", "") not in ("", "0"),
        all2all=all2all,
        device=device,
        dtype=dtype,
        max_new_tokens=max_new_tokens,
        max_requests=max_num_seqs,
        token_budget=default_token_budget(all2all) if max_num_batched_tokens is None else max_num_batched_tokens,
        threads=threads,
        rank_timeout=rank_timeout,
        cudagraph_sizes=cudagraph_sizes,
        gpu_timeline=gpu_timeline,
        memory=memory,
    )
    settings.check()
    for flag, given in (("--gpu-timeline", gpu_timeline), ("--memory", memory)):
        if given and trace is None:
            raise ConfigurationError(f"{flag} writes into the trace, and there is none; name it with --trace")
    if trace is not None:
        check_output(trace, "--trace", [(prompts, "the prompt file"), *_files_of(model)])

    from ..job.launch import run_job
    from ..job.report import findings, make_report, render_report
    from ..job.requests import read_requests
    from ..job.spec import JobSpec, passes_of
    from .progress import JobProgress

    requests = tuple(read_requests(prompts, limit))
    spec = JobSpec(settings, str(model), str(prompts), requests, passes_of(settings))
    with JobProgress(spec) as progress:
        result = run_job(spec, trace=trace, follow=progress.follow)
    report = make_report(result)
    print(json.dumps(report, indent=2) if as_json else render_report(report))
    if trace is not None and not report["trace_problem"]:
        print(f"Trace: {trace}", file=sys.stderr)
    found = findings(report)
    for sentence in found:
        print(sentence, file=sys.stderr)
    return 1 if found else 0


def _files_of(model: Path) -> list[tuple[Path, str]]:
    """What is read of the checkpoint; nothing of a folder that cannot be, which the ranks complain about."""
    if not model.is_dir() or not os.access(model, os.R_OK):
        return []
    return [(each, "a file of the model") for each in model.iterdir() if each.is_file()]
