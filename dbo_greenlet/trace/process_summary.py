"""What a process recorded, from a quick look at its file: no line but a step's or an end's is parsed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["ProcessFile", "summarise"]


@dataclass(frozen=True)
class ProcessFile:
    """One file.

    Attributes:
        path: the file.
        rank, process: whose it is; process is 0 where the header does not say.
        steps, split, failed: how many steps, how many of them in microbatches, how many failed.
        slices, windows, gpu: how many slices, in-flight windows and times on the GPU.
        operations: how many operations, events among them; 0 where what they do to memory was not noted.
        last: number of the last step; None where there is none.
        ended: whether the process ended in order, so that the trace is complete.
        error: what the process died of, as far as it could say.
    """

    path: Path
    rank: int
    process: int
    steps: int = 0
    split: int = 0
    failed: int = 0
    slices: int = 0
    windows: int = 0
    operations: int = 0
    gpu: int = 0
    last: int | None = None
    ended: bool = False
    error: str | None = None


def summarise(path: Path) -> ProcessFile:
    """Count what is in a file that we have written, whole or torn.

    Raises:
        OSError: it cannot be read.
    """
    counts = dict.fromkeys(("slice", "recv", "op", "gpu"), 0)
    steps: list[dict[str, Any]] = []
    header: dict[str, Any] = {}
    end: dict[str, Any] | None = None
    with open(path, "rb") as file:
        for line in file:
            kind = line[6:].partition(b'"')[0].decode("ascii", "replace")  # {"t":"slice",...
            if kind in counts:
                counts[kind] += 1
            elif kind in ("header", "step", "end") and line.endswith(b"\n"):
                record = json.loads(line)
                if kind == "step":
                    steps.append({name: record.get(name) for name in ("step", "split", "error")})
                elif kind == "end":
                    end = record
                else:
                    header = record
    about = header.get("settings", {}).get("trace", {})
    about = about if isinstance(about, dict) else {}
    return ProcessFile(
        path=path,
        rank=header.get("rank", 0),
        process=about.get("process", 0),
        steps=len(steps),
        split=sum(bool(step["split"]) for step in steps),
        failed=sum(step["error"] is not None for step in steps),
        slices=counts["slice"],
        windows=counts["recv"],
        operations=counts["op"] if about.get("memory") else 0,
        gpu=counts["gpu"],
        last=steps[-1]["step"] if steps else None,
        ended=end is not None,
        error=None if end is None else end.get("error"),
    )
