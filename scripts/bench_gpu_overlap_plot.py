"""The picture of scripts/bench_gpu_overlap.py: one panel per shape and number of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from bench_gpu_overlap_limit import where_it_loses

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLORS = {"graph": "tab:blue", "eager": "tab:orange"}


def plot(rows: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Time over the limit (solid) and over the order without overheads (dotted), gain over unsplit (dashed)."""
    panels: dict[str, dict[str, Mapping[str, Any]]] = {}
    for name, row in rows.items():
        panels.setdefault(name.removesuffix(f", {row['mode']}"), {})[row["mode"]] = row
    names = sorted(panels, key=lambda name: ("short" in name, "V3" in name, _tokens(panels[name])))
    columns = 3 if len(names) > 4 else max(1, min(2, len(names)))
    lines = -(-len(names) // columns)
    figure, grid = plt.subplots(lines, columns, figsize=(5 * columns, 3.5 * lines), squeeze=False)
    for axes, name in zip(grid.flat, names, strict=False):
        _panel(axes, name, panels[name])
    for axes in list(grid.flat)[len(names) :]:
        axes.set_axis_off()
    grid[0][0].legend(fontsize=7, loc="upper left")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _tokens(panel: Mapping[str, Mapping[str, Any]]) -> int:
    return int(next(iter(panel.values()))["tokens"])


def _panel(axes: Any, name: str, modes: Mapping[str, Mapping[str, Any]]) -> None:
    for mode, row in sorted(modes.items()):
        ratios = [p["ratio"] for p in row["points"]]
        gains = [p["gain"] for p in row["points"]]
        color = COLORS[mode]
        axes.plot(
            ratios, [p["over"]["limit"] for p in row["points"]], "o-", ms=3, color=color, label=f"{mode}: over limit"
        )
        axes.plot(
            ratios, [p["over"]["round_robin"] for p in row["points"]], ":", color=color, label=f"{mode}: over the order"
        )
        axes.plot(ratios, gains, "s--", ms=3, color=color, label=f"{mode}: gain over unsplit")
        for begin, end in where_it_loses(ratios, gains):
            axes.axvspan(begin, end, color=color, alpha=0.15, lw=0, label=f"{mode}: splitting loses")
    axes.axhline(1, color="black", lw=0.6)
    axes.axhline(1.05, color="gray", lw=0.6, ls=":")
    axes.set_xscale("log")
    ticks = [0.1, 0.25, 0.5, 1, 2, 3]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_title(name, fontsize=9)
    axes.set_xlabel("communication / compute of a microbatch in a layer", fontsize=8)
    axes.tick_params(labelsize=8)
