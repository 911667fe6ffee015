"""The tables of scripts/bench_gpu_overlap.py, from its rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench_gpu_common import Report, Table
from bench_gpu_overlap_limit import where_it_loses

Row = Mapping[str, Any]
# Below this share of what no order can beat, the step did not wait for its transfers.
TOO_FAST = 0.98


def report(rows: Mapping[str, Row]) -> Report:
    """A table over all rows, then one for each with its sweep."""
    made = Report(tables=[_summary(rows)], numbers={})
    for name, row in rows.items():
        made.tables.append(_sweep(name, row))
        made.said.append(f"{name}: {excess(row)}")
    made.said += [f"WRONG: {sentence}" for sentence in too_fast(rows)]
    return made


def too_fast(rows: Mapping[str, Row]) -> list[str]:
    return [
        f"{name} at {point['ratio']:g} took {point['over']['limit_with_ends']:.3f} of what it takes at least: is a "
        "wait missing?"
        for name, row in rows.items()
        for point in row["points"]
        if point["over"]["limit_with_ends"] < TOO_FAST
    ]


def _summary(rows: Mapping[str, Row]) -> Table:
    ratios = sorted({point["ratio"] for row in rows.values() for point in row["points"]})
    shown = [ratio for ratio in ratios if ratio in (0.25, 0.5, 1.0, 2.0)]
    table = Table(
        "Split by greenlets: time over max(compute, communication) / gain over unsplit, at communication over compute",
        ["", *(f"{ratio:g}" for ratio in shown), "loses at", "layers", "rounds", "host / GPU ms"],
    )
    for name, row in rows.items():
        points = {point["ratio"]: point for point in row["points"]}
        cells = [
            f"{p['over']['limit']:.3f} / {p['gain']:.2f}" + "*" * p["host_bound"]
            for ratio in shown
            if (p := points.get(ratio))
        ]
        losses = where_it_loses(list(points), [point["gain"] for point in points.values()])
        said = ", ".join(f"{begin:.2f} to {end:.2f}" for begin, end in losses) or "-"
        host = f"{row['host']['split, no transfers']:.2f} / {row['compute']:.2f}"
        table.rows.append([name, *cells, said, str(row["layers"]), str(row["rounds"]), host])
    return table


def _sweep(name: str, row: Row) -> Table:
    stages = row["stages"]
    why = "chosen so that attention and experts take the same time" if row["balanced"] else "short"
    table = Table(
        f"{name}: {row['layers']} layers, context {row['context']} ({why}), {row['rounds']} rounds, wire "
        f"{row['wire']!r}. A layer of a microbatch: attend {stages['attend']:.3f}, experts {stages['experts']:.3f}, "
        f"unpack {stages['unpack']:.3f} ms. Compute {row['compute']:.3f} ms, in this mode "
        f"{row['compute_same_mode']:.3f}, beside a busy wire {row['compute_beside_wire']:.3f}; split without transfers "
        f"{row['split_no_transfers']:.3f}; unsplit {row['unsplit_compute']:.3f}; host: "
        + ", ".join(f"{what} {host:.2f}" for what, host in row["host"].items()),
        [
            "comm/compute",
            "transfer ms",
            "unsplit ms",
            "in turn ms",
            "split ms (quartiles)",
            "limit ms",
            "over limit",
            "over ends",
            "over order",
            "over limit of this mode",
            "gain",
            "host ms",
            "",
        ],
    )
    for point in row["points"]:
        low, high = point["split_quartiles"]
        over = point["over"]
        remarks = ["loss"] * (point["gain"] < 1) + ["host-bound"] * point["host_bound"]
        table.rows.append(
            [
                f"{point['ratio']:g}",
                f"{point['transfer']:.4f}",
                f"{point['unsplit']:.3f}",
                "-" if point["in_turn"] is None else f"{point['in_turn']:.3f}",
                f"{point['split']:.3f} ({low:.3f} to {high:.3f})",
                f"{point['bounds']['limit']:.3f}",
                f"{over['limit']:.3f}",
                f"{over['limit_with_ends']:.3f}",
                f"{over['round_robin']:.3f}",
                f"{over['limit_same_mode']:.3f}",
                f"{point['gain']:.3f}",
                f"{point['split_host']:.2f}",
                ", ".join(remarks),
            ]
        )
    return table


def excess(row: Row) -> str:
    """What the time above the limit consists of where it is largest for a graph: at equal compute and communication."""
    point = min(row["points"], key=lambda each: abs(each["ratio"] - 1))
    bounds = point["bounds"]
    transfers = 4 * row["layers"]
    total = point["split"] - bounds["limit"]
    parts = {
        "first stage and last transfer": bounds["limit_with_ends"] - bounds["limit"],
        "unequal stages": bounds["round_robin"] - bounds["limit_with_ends"],
        "the wire's use of memory": row["compute_beside_wire"] - row["compute"],
    }
    if row["mode"] == "graph":
        parts["order of the microbatches"] = row["split_one_stream"] - row["compute"]
        parts[f"events of {transfers} transfers"] = row["split_no_transfers"] - row["split_one_stream"]
    else:
        parts["launches"] = row["split_no_transfers"] - row["compute"]
    parts["rest"] = total - sum(parts.values())
    said = ", ".join(f"{what} {value:.3f}" for what, value in parts.items())
    return f"at {point['ratio']:g} it is {total:.3f} ms above the limit: {said}"
