"""The tables of scripts/gpu_vllm_serve.py in Markdown, from the merged results."""

from __future__ import annotations

import re
from collections.abc import Iterator
from statistics import median
from typing import Any

from gpu_vllm_serve_rows import FAULTS

WHY = re.compile(r"died|unexpectedly|Microbatch \d|torch\.cat|InjectedFault")
FRAMES = 6  # of the innermost of a stack


def tables(results: dict[str, Any]) -> list[str]:
    """Load, tokens, counters and faults, each under its title; what was not run is left out."""
    rows = results["rows"]
    parts = []
    for title, make in (
        ("Under load (`vllm bench serve`), medians of the rounds", _loads),
        ("Greedy answers to the same prompts", _answers),
        ("Steps by /metrics, both ranks", _counters),
        ("A rank of `vllm serve` is ruined in mid-step", _faults),
        ("Processes that outlived their server", _left),
        ("Not done", _not_done),
    ):
        lines = list(make(rows))
        if len(lines) > 2:
            parts.append("\n".join([f"**{title}**", "", *lines]))
    return parts


def _loads(rows: dict[str, Any]) -> Iterator[str]:
    yield (
        "| row, load | mode | requests/s | output tokens/s | TTFT ms p50 / p99 | TPOT ms p50 / p99 | ITL ms p50 / p99 "
        "| rounds, least to most requests/s |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for name, entry in rows.items():
        for load in entry["row"]["loads"]:
            for mode, found in entry["modes"].items():
                runs = found["bench"].get(load, [])
                if not runs:
                    continue
                rates = [run["request_throughput"] for run in runs]
                cells = [f"{median(rates):.2f}", f"{median(run['output_throughput'] for run in runs):.0f}"]
                for metric in ("ttft", "tpot", "itl"):
                    points = [median(run[f"{point}_{metric}_ms"] for run in runs) for point in ("p50", "p99")]
                    cells.append(" / ".join(f"{value:.1f}" for value in points))
                cells.append(f"{len(runs)}, {min(rates):.2f} to {max(rates):.2f}")
                yield f"| {name}, {load} | {mode} | {' | '.join(cells)} |"


def _answers(rows: dict[str, Any]) -> Iterator[str]:
    yield "| row | mode | the same again | as the first mode: all tokens / first token / its log-probability within |"
    yield "|---|---|---|---|"
    for name, entry in rows.items():
        first = next((found["answers"][0] for found in entry["modes"].values() if found["answers"]), None)
        for mode, found in entry["modes"].items():
            if not first or None in found["answers"]:
                continue
            again = _same(*found["answers"][:2])
            same, start, apart = compare(first, found["answers"][0])
            yield f"| {name} | {mode} | {again} of {len(first)} | {same} / {start} of {len(first)} / {apart:.3f} |"


def _same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> int:
    return sum(a["tokens"] == b["tokens"] for a, b in zip(one, other, strict=True))


def compare(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> tuple[int, int, float]:
    """Answers with the same tokens; with the same first token; how far apart that token's log-probabilities are."""
    starts = [(a, b) for a, b in zip(one, other, strict=True) if a["tokens"][0] == b["tokens"][0]]
    apart = max((abs(a["logprobs"][0] - b["logprobs"][0]) for a, b in starts), default=float("nan"))
    return _same(one, other), len(starts), apart


def _counters(rows: dict[str, Any]) -> Iterator[str]:
    yield "| row, load (all rounds) | mode | run as greenlets | decisions |"
    yield "|---|---|---|---|"
    for name, entry in rows.items():
        for mode, found in entry["modes"].items():
            before = found["counters_before"]
            for load, after in found.get("counters_after", {}).items():
                steps, decisions = totals(after, before)
                before = after
                if not steps and not decisions:
                    continue
                cells = [
                    ", ".join(f"{count:.0f} {what}" for what, count in each.items()) for each in (steps, decisions)
                ]
                yield f"| {name}, {load} | {mode} | {cells[0] or 0} | {cells[1]} |"


def totals(after: dict[str, float], before: dict[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Steps by kind and decisions by reason since `before`, of all ranks together, without zeros."""
    steps: dict[str, float] = {}
    decisions: dict[str, float] = {}
    for sample, count in after.items():
        grown = count - before.get(sample, 0)
        label = re.search(r'(?:kind|reason)="([^"]+)"', sample)
        if label is None or grown <= 0:
            continue
        into = steps if "steps_total" in sample else decisions
        into[label[1]] = into.get(label[1], 0) + grown
    return steps, decisions


def _faults(rows: dict[str, Any]) -> Iterator[str]:
    yield "| fault | mode | the client gets | after | gone after | server exits | the log says |"
    yield "|---|---|---|---|---|---|---|"
    for entry in rows.values():
        for found in entry["faults"].values():
            never = f"not within {found.get('patience_s', 45)} s"
            gone = ", ".join(f"{who} {never if s is None else _seconds(s)}" for who, s in found["gone_s"].items())
            left = f"{found['server_exit']}, {_seconds(found['server_exit_s'])}"
            said = [line for line in found["said"] if WHY.search(line)]
            log = "; ".join(f"`{_cell(line)}`" for line in said[:2]) or "-"
            gets = f"`{_cell(found['client_gets'] or 'nothing')}`"
            words = FAULTS[found["fault"]]
            yield f"| {words} | {found['mode']} | {gets} | {_seconds(found['client_s'])} | {gone} | {left} | {log} |"


def _left(rows: dict[str, Any]) -> Iterator[str]:
    yield "| fault | mode | process | its parent | main thread | GPUs | where its Python is |"
    yield "|---|---|---|---|---|---|---|"
    for entry in rows.values():
        for found in entry["faults"].values():
            for name, seen in found.get("left", {}).items():
                parent = seen.get("status", {}).get("PPid", "-")
                where = " < ".join(main_thread(seen.get("stacks", []))[:FRAMES]) or "-"
                gpus = "; ".join(seen.get("gpus", [])) or "-"
                words = FAULTS[found["fault"]]
                yield f"| {words} | {found['mode']} | {name} | {parent} | {seen.get('main', '-')} | {gpus} | {where} |"


def main_thread(stacks: list[str]) -> list[str]:
    """File, line and function of each frame of faulthandler's last thread, which is the main one; innermost first."""
    begin = max((number for number, line in enumerate(stacks) if "hread 0x" in line), default=len(stacks))
    frames = (re.match(r'  File "(?:.*/)?([^"/]+)", line (\d+) in (\S+)', line) for line in stacks[begin + 1 :])
    return [f"`{frame[1]}:{frame[2]} {frame[3]}`" for frame in frames if frame]


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f} s"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("`", "'").split())[:220]


def _not_done(rows: dict[str, Any]) -> Iterator[str]:
    yield "| row | status |"
    yield "|---|---|"
    for name, entry in rows.items():
        if entry["status"] != "done":
            yield f"| {name} | {_cell(entry['status'])} |"
