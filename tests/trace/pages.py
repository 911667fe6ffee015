"""Traces to make pages of, and a page's data read back, without the code that wrote it."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

from dbo_greenlet.trace import (
    GpuRecord,
    HeaderRecord,
    Record,
    RecvRecord,
    SliceRecord,
    StepRecord,
    StepTrace,
    Trace,
    TraceWriter,
)
from dbo_greenlet.trace.schema import OpRecord

SITES = [f"layer{layer}.{stage}" for layer in (1, 2, 3) for stage in ("dispatch", "combine")]


def step_records(step: int, rank: int, begin: float, *, run: str = "dbo", seed: int = 0) -> list[Record]:
    """A step of two microbatches in round robin through three layers, with GPU times on two streams."""
    chance = random.Random(f"{seed} {step} {rank} {run}")
    key = {"step": step, "rank": rank, "run": run}
    now = begin + 5
    slices: list[Record] = []
    receives: list[Record] = []
    gpu: list[Record] = []
    gpu_now = now + 40
    for number, site in enumerate([*SITES, ""]):
        for ubatch in (0, 1):
            end = round(now + chance.uniform(20, 60), 3)
            slices.append(SliceRecord(**key, ubatch=ubatch, slice=number, site=site, begin=now, end=end))
            if site:
                decision = 2 * number + ubatch
                receives.append(
                    RecvRecord(
                        **key,
                        ubatch=ubatch,
                        site=site,
                        sent=round(end - 2, 3),
                        by=1 - ubatch,
                        at=round(end + 15, 3),
                        decision=decision + 1,
                        sent_decision=decision,
                    )
                )
            gpu_end = round(gpu_now + chance.uniform(30, 50), 3)
            wait = 10.0 if number else 0.0
            after = SITES[number - 1] if number else ""
            times = {"begin": gpu_now, "end": gpu_end, "waited": wait, "after": after, "error": 1.5}
            gpu.append(GpuRecord(**key, ubatch=ubatch, slice=number, site=site, stream="compute", **times))
            if number:
                times |= {"begin": round(gpu_now + 1, 3), "end": round(gpu_end - 1, 3), "waited": 0.0}
                gpu.append(GpuRecord(**key, ubatch=ubatch, slice=number, site=site, stream="comm", **times))
            now, gpu_now = round(end + 0.5, 3), gpu_end
    record = StepRecord(
        **key,
        tokens=64,
        padded=64,
        split=True,
        reason="split-decode",
        slices=[[0, 32, 0, 32], [32, 64, 32, 64]],
        yields=[6, 6],
        requests=list(range(64)),
        begin=begin,
        end=max(now, gpu_now) + 5,
        execution="eager",
    )
    return [record, *slices, *receives, *gpu]


def write_trace(path: Path, *, steps: int = 3, ranks: int = 2) -> Path:
    """Steps of some ranks, whose clocks have one origin each, 100 us apart."""
    with TraceWriter(path) as writer:
        for rank in range(ranks):
            writer.write(HeaderRecord("0.1.0", rank, ranks, torch="2.13.0", origin_ns=10**9 + 100_000 * rank))
        begin = 0.0
        for step in range(steps):
            ends = []
            for rank in range(ranks):
                records = step_records(step, rank, begin)
                ends.append(records[0].end)
                writer.write(*records, *(operations(step, rank) if step == rank == 0 else ()))
            begin = round(max(ends) + 50, 3)
    return path


def operations(step: int, rank: int) -> list[Record]:
    key = {"step": step, "rank": rank, "run": "dbo"}
    return [
        OpRecord(**key, number=0, op="record", ubatch=0, slice=0, stream="compute", event=7),
        OpRecord(**key, number=1, op="wait", ubatch=0, slice=1, stream="comm", event=7, of=0),
        OpRecord(**key, number=2, op="work", ubatch=0, slice=1, name="mm", memory=[["write", 4096, 0, 512]]),
    ]


def data_of(page: str) -> dict[str, Any]:
    """The data block of a page."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    data: dict[str, Any] = json.loads(text)
    return data


def slices_of(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Every slice of the data, in order: track, name, stage, begin, end, waited, details."""
    out = []
    ranks = {process["id"]: process["rank"] for process in data["processes"]}
    for track in data["tracks"]:
        waits = dict(zip(track["wait"][::2], track["wait"][1::2], strict=True))
        used = [0] * len(track["shapes"])
        begin = 0
        for number, difference in enumerate(track["begin"]):
            begin += difference
            shape = track["shape"][number] if track["shape"] else 0
            keys, columns = track["shapes"][shape]["keys"], track["shapes"][shape]["columns"]
            details = {key: _cell(column, used[shape]) for key, column in zip(keys, columns, strict=True)}
            used[shape] += 1
            out.append(
                {
                    "rank": ranks[track["process"]],
                    "track": track["name"],
                    "name": data["strings"][track["text"][number]],
                    "stage": data["stages"][track["stage"][number]],
                    "begin": begin,
                    "end": begin + track["length"][number],
                    "waited": waits.get(number, 0),
                    "details": details,
                }
            )
    return out


def _cell(column: Any, row: int) -> Any:
    if isinstance(column, list):
        return column[row]
    return column["all"] if "all" in column else column["of"][column["at"][row]]


def of_slices(trace: Trace, **wanted: int) -> list[tuple[StepTrace, SliceRecord]]:
    """The slices whose fields have these values, each with its step."""
    return [
        (step, record)
        for step in trace.steps.values()
        for record in step.slices
        if all(getattr(record, key) == value for key, value in wanted.items())
    ]
