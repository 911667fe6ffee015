"""What was recorded, in words: for each process, and what to type next; or why there is nothing."""

from __future__ import annotations

import dataclasses
import shlex
from typing import Any

from .process_summary import ProcessFile
from .record_output import Recorded

__all__ = ["nothing_recorded", "summary_json", "summary_text"]


def summary_text(found: Recorded) -> str:
    """One line a process, what is wrong, and the command that comes next."""
    lines = [f"Recorded to {found.output}:"]
    lines += [f"  {_process(each)}" for each in found.files]
    lines += [f"  problem: {text}" for text in found.notes.get("problem", ())]
    lines += [f"  note: {text}" for text in found.notes.get("partial", ())]
    if found.problem is not None:
        lines.append(f"  {found.problem}")
    if found.steps:
        shown = found.output
        if found.problem is None:
            lines.append(f"Next: dbo-greenlet show {shlex.quote(str(shown))}")
        else:
            biggest = max(found.files, key=lambda each: each.steps)
            lines.append(f"Next: dbo-greenlet show {shlex.quote(str(biggest.path))}")
    return "\n".join(lines)


def _process(each: ProcessFile) -> str:
    name = f"rank {each.rank}, process {each.process}: " if each.process else f"rank {each.rank}: "
    text = name + f"{_count(each.steps, 'step')}, {each.split} split, {_count(each.slices, 'slice')}"
    if each.windows:
        text += f", {_count(each.windows, 'window')} in flight"
    if each.operations:
        text += f", {_count(each.operations, 'operation')}"
    if each.gpu:
        text += f", {_count(each.gpu, 'GPU time')}"
    if each.failed:
        text += f"; {_count(each.failed, 'step')} failed"
    if not each.ended:
        where = "before its first step was complete" if each.last is None else f"after step {each.last}"
        text += f"; it did not end in order, the trace is complete up to {where}"
    elif each.error is not None:
        first_line = each.error.strip().partition("\n")[0]
        text += f"; ended by {first_line}"
    return text


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def nothing_recorded(found: Recorded, code: int) -> str:
    """Why no step was recorded, in a sentence."""
    notes = found.notes
    died = f" (it ended with exit code {code})" if code else ""
    if problem := notes.get("problem"):
        return f"nothing was recorded: {problem[0]}"
    if left := notes.get("left"):
        return f"nothing was recorded{died}: microbatches were left to vLLM's own implementation: {left[0]}"
    if found.files or "scheduler" in notes:
        return f"nothing was recorded{died}: there was a scheduler, but it ran no step that was split"
    if "vllm" in notes:
        return (
            f"nothing was recorded{died}: vLLM loaded the drop-in, but no worker of it ran microbatches; start it with "
            "--enable-dbo"
        )
    return (
        f"nothing was recorded{died}: no process of the command made a scheduler of dbo_greenlet (Scheduler, Runner, "
        "or vLLM with the drop-in)"
    )


def summary_json(found: Recorded) -> dict[str, Any]:
    """The same as JSON values."""
    return {
        "output": str(found.output),
        "steps": found.steps,
        "problem": found.problem,
        "notes": found.notes,
        "processes": [dataclasses.asdict(each) | {"path": str(each.path)} for each in found.files],
    }
