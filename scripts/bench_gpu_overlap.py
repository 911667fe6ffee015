"""Overlap on one GPU: how close a split step comes to max(compute, communication), and when splitting loses.

    python scripts/bench_gpu_overlap.py [--quick] [--rows NAME ...] [--graph-only] [--json FILE.json]
                                        [--merge FILE.json ...] [--plot FILE.png] [--wire copy|timer]

All rows, with the picture: `python scripts/bench_gpu_overlap.py --plot out/overlap.png`, which should take about six
minutes; `--rows "V2-Lite, 512 tokens" "V3, 64 tokens"` about one and a half. The file is written after each row, and
`--rows --merge FILE.json --plot FILE.png` prints and plots what it holds.

Layers in the shapes of DeepSeek-V2-Lite and V3 (`bench_gpu_overlap_layers`) against transfers that take no SMs
(`bench_gpu_overlap_wire`), from 0.1 to 3 times the compute; eager and captured into a graph. Unsplit has every transfer
exposed, each twice as long as a microbatch's, because it carries twice the bytes. A wire with a latency that does not
depend on the bytes would be worse for splitting than what is shown here.

For each length the split step is compared with the unsplit one (a gain under 1 is a loss) and with three bounds. They
are made of the graphs' compute and transfers in both modes, since an eager step that is bound by its launches would
otherwise be compared with launches; the limit made of the same mode's compute stands beside them.

    limit     max(compute of the two microbatches in turn without transfers, all transfers back to back)
    ends      the same with what no order can hide: the first stage before anything is sent, the last transfer
    order     the time of round robin's order on queues without overheads (`bench_gpu_overlap_limit`): above `ends`
              where attention and experts take different times

Rows without "short context" have a context in which attention and experts take the same time, the best case of round
robin with two microbatches: each transfer lies beside one stage of the other one. "host-bound" marks steps whose
launches take the host longer than the limit. Times are medians between CUDA events; the host is ahead of the GPU when a
measurement begins.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from bench_gpu_common import Bench, machine, print_report
from bench_gpu_overlap_layers import SHAPES
from bench_gpu_overlap_measure import RATIOS, Row, measure_row
from bench_gpu_overlap_table import report, too_fast
from bench_gpu_overlap_wire import WIRES

SHORT_CONTEXT = 1024
QUICK_RATIOS = (0.25, 1.0, 2.0)


def rows() -> list[Row]:
    """Fewer layers than the models have (26 and 58 with experts): as many as a measurement of a minute allows."""
    lite, large = SHAPES["V2-Lite"], SHAPES["V3"]
    return [
        Row(lite, 64, 20),
        Row(lite, 512, 20),
        Row(lite, 4096, 10),
        Row(large, 64, 10),
        Row(large, 512, 10),
        Row(large, 4096, 8),
        Row(lite, 64, 20, SHORT_CONTEXT),
        Row(lite, 512, 20, SHORT_CONTEXT),
        Row(lite, 4096, 10, SHORT_CONTEXT),
        Row(large, 4096, 8, SHORT_CONTEXT),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three lengths, few rounds: to see that it runs")
    parser.add_argument(
        "--rows", nargs="*", default=None, help="rows of these names, or whose name contains one; or none"
    )
    parser.add_argument("--graph-only", action="store_true", help="no eager steps")
    parser.add_argument("--wire", choices=sorted(WIRES), default="copy")
    parser.add_argument("--seconds", type=float, default=20.0, help="time for the rounds of one row (default 20)")
    parser.add_argument("--json", type=Path, default=Path("out/bench_gpu_overlap.json"))
    parser.add_argument("--merge", type=Path, nargs="*", default=[], help="take these files' rows in as well")
    parser.add_argument("--plot", type=Path, default=None, help="the sweep as a PNG file (needs matplotlib)")
    arguments = parser.parse_args()
    wanted = choose(arguments.rows)
    if arguments.rows and not wanted:
        parser.error(f"no row's name contains any of {arguments.rows}; there are {[r.name for r in rows()]}")
    merged: dict[str, Any] = {}
    for path in arguments.merge:
        merged.update(json.loads(path.read_text())["rows"])
    if wanted:
        measure(wanted, arguments, merged)
    made = write(arguments.json, merged)
    print_report(made)
    if arguments.plot is not None:
        from bench_gpu_overlap_plot import plot

        plot(merged, arguments.plot)
    return 1 if too_fast(merged) else 0


def choose(parts: Sequence[str] | None) -> list[Row]:
    """In the order asked for: what comes last is what a time limit cuts off."""
    if parts is None:
        return rows()
    known = rows()
    chosen: dict[str, Row] = {}
    for part in parts:
        matching = [row for row in known if row.name == part] or [row for row in known if part in row.name]
        chosen.update((row.name, row) for row in matching)
    return list(chosen.values())


def write(path: Path, merged: dict[str, Any]) -> dict[str, Any]:
    """The report with its rows as JSON; each row keeps the machine that it was measured on."""
    made = {**asdict(report(merged)), "rows": merged}
    if merged:
        made["machine"] = list(merged.values())[-1].get("machine", {})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(made, indent=1) + "\n")
    return made


def measure(wanted: Sequence[Row], arguments: argparse.Namespace, merged: dict[str, Any]) -> None:
    """Measure rows into `merged`; the file is written after each, so that a time limit costs the last one only."""
    from dbo_greenlet.devices.cuda import CudaDevice

    torch.cuda.init()
    # Flash attention alone: one kernel, known to be the same from run to run.
    torch.backends.cuda.enable_cudnn_sdp(False)
    device = CudaDevice(0)
    wire = WIRES[arguments.wire](device.name)
    here = {**machine(Bench(device, arguments.quick)), "quick": arguments.quick}
    with torch.inference_mode():
        wire.calibrate()
        for row in wanted:
            begin = time.perf_counter()
            measured = measure_row(
                row,
                device,
                wire,
                ratios=QUICK_RATIOS if arguments.quick else RATIOS,
                seconds=2.0 if arguments.quick else arguments.seconds,
                eager=not arguments.graph_only,
            )
            merged.update({name: {**values, "machine": here} for name, values in measured.items()})
            write(arguments.json, merged)
            print(f"{row.name}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
