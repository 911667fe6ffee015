"""The numbers on a GPU: hand-offs, eager steps, overlap, graphs, timeline, ranks, scaling.

    python scripts/bench_gpu.py [--rows NAME ...] [--quick] [--rounds N] [--json FILE] [--merge FILE] [--markdown]

Each row is a comparison of its own in a process of its own, `scripts/bench_gpu_<row>.py`, and can be run by itself. The
results are written as JSON, one entry a row, each with the machine, versions, date and commit it was measured at; rows
that are not run again stay as they are in the file given by `--merge`. Without rows to run (`--rows` and no name) the
tables of the merged file are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench_gpu_common
from bench_gpu_common import print_report

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Row:
    """A comparison's script: the seconds after which it is given up, and which options it takes."""

    seconds: int
    options: tuple[str, ...] = ("--quick", "--cpu", "--rounds")


ROWS = {
    "handoff": Row(180),
    "step": Row(300),
    "profile": Row(120),
    "overlap": Row(600, ("--quick",)),
    "capture": Row(300, ("--quick", "--rounds")),
    "timeline": Row(300, ("--quick", "--rounds")),
    "ranks": Row(900, ("--rounds",)),
    "scaling": Row(300),
}


def run_row(name: str, options: list[str]) -> dict[str, Any]:
    """Run one comparison; its report, or {"error": what it printed last}."""
    script = HERE / f"bench_gpu_{name}.py"
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "report.json"
        command = [sys.executable, str(script), "--json", str(target), *options]
        # In a session of its own, so that what the row has started ends with it: a rank that spins on the GPU would
        # be in the next row's numbers.
        row = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            stdout, stderr = row.communicate(timeout=ROWS[name].seconds)
        except subprocess.TimeoutExpired:
            return {"error": f"took longer than {ROWS[name].seconds} s"}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(row.pid, signal.SIGKILL)
            row.communicate()
        if row.returncode != 0 or not target.exists():
            return {"error": f"exit status {row.returncode}", "printed": (stdout + stderr)[-4000:]}
        report: dict[str, Any] = json.loads(target.read_text())
        if "tables" not in report:
            report["printed"] = stdout[-12000:]
        if "machine" not in report:
            report["machine"] = machine_of("--cpu" in options)
        return report


def machine_of(on_cpu: bool) -> dict[str, Any]:
    """What is recorded of the machine, asked of a process of its own: this one must not hold a CUDA context."""
    command = [sys.executable, str(Path(bench_gpu_common.__file__)), *["--cpu"] * on_cpu]
    asked = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return dict(json.loads(asked.stdout)) if asked.returncode == 0 else {}


def as_markdown(report: dict[str, Any]) -> str:
    lines = []
    for table in report.get("tables", ()):
        lines += ["", f"**{table['title']}**", ""]
        lines.append("| " + " | ".join(map(str, table["columns"])) + " |")
        lines.append("|" + " --- |" * len(table["columns"]))
        lines += ["| " + " | ".join(map(str, row)) + " |" for row in table["rows"]]
    lines += [""] + [f"- {sentence}" for sentence in report.get("said", ())]
    return "\n".join(lines)


def show(name: str, report: dict[str, Any], markdown: bool) -> None:
    known = report.get("machine", {})
    where = ", ".join(str(known[key]) for key in ("gpu", "cpu", "date", "commit") if key in known)
    print(f"\n== {name}" + (f" ({where})" if where else ""))
    if "error" in report:
        print(report["error"], report.get("printed", ""), sep="\n")
    elif markdown and "tables" in report:
        print(as_markdown(report))
    elif "tables" in report:
        print_report(report)
    else:
        printed = report.get("printed", "")
        print(f"```\n{printed}\n```" if markdown else printed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="*", default=None, metavar="NAME", help=f"of {', '.join(ROWS)}; default all")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: a look")
    parser.add_argument("--rounds", type=int, default=None, help="rounds of taking turns, where a row takes it")
    parser.add_argument("--cpu", action="store_true", help="a dry run on the CPU whose numbers mean nothing")
    parser.add_argument("--json", type=Path, default=Path("out/bench_gpu.json"), help="where the results go")
    parser.add_argument("--merge", type=Path, default=None, help="keep the rows of this file that are not run again")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    arguments = parser.parse_args()
    wanted = list(ROWS) if arguments.rows is None else list(arguments.rows)
    if unknown := [name for name in wanted if name not in ROWS]:
        parser.error(f"no row {', '.join(unknown)}; there are {', '.join(ROWS)}")
    if arguments.cpu:
        for name in [name for name in wanted if "--cpu" not in ROWS[name].options]:
            print(f"{name} needs a GPU and is left out")
            wanted.remove(name)
    results: dict[str, Any] = {}
    if arguments.merge is not None:
        results = json.loads(arguments.merge.read_text())
    if not wanted:
        for name, report in results.items():
            show(name, report, arguments.markdown)
        return 0
    asked = {"--quick": ["--quick"] * arguments.quick, "--cpu": ["--cpu"] * arguments.cpu}
    if arguments.rounds is not None:
        asked["--rounds"] = ["--rounds", str(arguments.rounds)]
    failed = []
    for name in wanted:
        begin = time.perf_counter()
        report = run_row(name, [word for option in ROWS[name].options for word in asked.get(option, ())])
        show(name, report, arguments.markdown)
        print(f"({time.perf_counter() - begin:.0f} s)", flush=True)
        if "error" in report:
            failed.append(name)
            # A row that failed now does not wipe out what it gave before.
            if "error" not in results.get(name, {"error": ""}):
                continue
        results[name] = report
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\nwritten to {arguments.json}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
