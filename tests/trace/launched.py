"""A torch.profiler trace of a step on the CPU, as it would be of a GPU: each operator launches a kernel.

Ranges, operators, threads and times are what torch wrote. Added are, for each operator that has a kernel here, the call
that launches it in the operator's middle, and the kernel behind it, on one stream.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LAUNCH_US = 0.5


def launched(recorded: Any, path: Path, kernels: Mapping[str, str]) -> list[dict[str, Any]]:
    """Write what `recorded`, a profile that was stopped, exports, with kernels; returns torch's own events.

    Args:
        kernels: operator -> name of its kernel.
    """
    recorded.export_chrome_trace(str(path))
    document = json.loads(path.read_text(encoding="utf-8"))
    own = [event for event in document["traceEvents"] if event["ph"] == "X"]
    document["deviceProperties"] = [{"id": 0, "name": "NVIDIA H200"}]
    free = 0.0
    for number, event in enumerate(sorted((e for e in own if e["name"] in kernels), key=lambda e: e["ts"]), 1):
        call = event["ts"] + event["dur"] / 2
        begin = max(free, call + 2 * LAUNCH_US)
        free = begin + 1.0
        common = {"ph": "X", "args": {"correlation": number, "device": 0, "stream": 7}}
        document["traceEvents"] += [
            common | {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": event["pid"], "tid": event["tid"],
                      "ts": call, "dur": event["dur"] / 4},
            common | {"cat": "kernel", "name": kernels[event["name"]], "pid": 0, "tid": 7, "ts": begin, "dur": 1.0},
        ]  # fmt: skip
    path.write_text(json.dumps(document), encoding="utf-8")
    return own
