"""What splitting cost or gained: step times of the split steps of a trace, beside the same steps run otherwise.

    dbo-greenlet run --trace trace.jsonl
    python scripts/step_times.py trace.jsonl [--out FILE.json]

A row per kind of step (the vote's reason) and run: the median over steps and ranks of the whole step, in milliseconds,
scheduler, all-to-all and recorder included. Only steps that the run "dbo" split count, and each run is compared with
"dbo" on the steps that both have.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

from dbo_greenlet.errors import TraceFileError
from dbo_greenlet.trace import StepRecord, read_trace


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--out", type=Path, default=Path("out/step_times.json"))
    arguments = parser.parse_args()
    try:
        trace = read_trace(arguments.trace)
    except TraceFileError as error:
        print(error, file=sys.stderr)
        return 2
    records: dict[tuple[int, int], dict[str, StepRecord]] = defaultdict(dict)
    for (run, step, rank), recorded in trace.steps.items():
        if recorded.record is not None:
            records[step, rank][run] = recorded.record
    pairs: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for runs in records.values():
        split = runs.get("dbo")
        if split is None or not split.split:
            continue
        for run, other in runs.items():
            if run != "dbo":
                pairs[split.reason, run].append((_milliseconds(split), _milliseconds(other)))
    rows = [
        {
            "steps": reason,
            "run": run,
            "count": len(times),
            "dbo_ms": statistics.median(time for time, _ in times),
            "run_ms": statistics.median(time for _, time in times),
        }
        for (reason, run), times in sorted(pairs.items())
    ]
    print(f"{'steps':16} {'against':8} {'count':>5} {'dbo ms':>8} {'ms':>8} {'dbo / it':>8}")
    for row in rows:
        print(
            f"{row['steps']:16} {row['run']:8} {row['count']:5} {row['dbo_ms']:8.1f} {row['run_ms']:8.1f}"
            f" {row['dbo_ms'] / row['run_ms']:8.2f}"
        )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({"trace": arguments.trace.name, "rows": rows}, indent=1) + "\n")
    return 0


def _milliseconds(record: StepRecord) -> float:
    if record.begin is None or record.end is None:
        return float("nan")
    return (record.end - record.begin) / 1000


if __name__ == "__main__":
    sys.exit(main())
