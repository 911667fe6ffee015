"""Overlap reports of profiles and traces made by hand, and the traces themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dbo_greenlet.trace import GpuRecord, HeaderRecord, Record, RecvRecord, SliceRecord, StepRecord, TraceWriter
from dbo_greenlet.trace.importers import read_profile
from dbo_greenlet.trace.overlap.profile import profile_overlap
from dbo_greenlet.trace.overlap.report import OverlapReport, Row
from dbo_greenlet.trace.overlap.trace import trace_overlap
from dbo_greenlet.trace.step_columns import read_columns
from tests.trace.profiles import GEMM, LOW_LATENCY_COMBINE, LOW_LATENCY_DISPATCH, ChromeProfile


def report(made: ChromeProfile, tmp_path: Path, **options: Any) -> OverlapReport:
    return profile_overlap(read_profile(made.write(tmp_path / "p.json")), **options)


def row(rows: list[Row], key: str | int) -> Row:
    (found,) = [each for each in rows if each.key == key]
    return found


def low_latency(tmp_path: Path, *, hooks: bool = True) -> OverlapReport:
    """A send, compute while the bytes fly, a receive; dispatch and combine."""
    made = ChromeProfile()
    for begin, name in ((0, LOW_LATENCY_DISPATCH), (100, LOW_LATENCY_COMBINE)):
        made.kernel(name, begin, begin + 10, launch=begin)
        made.kernel(GEMM, begin + 10, begin + 70, launch=begin + 2)
        if hooks:
            made.kernel(name, begin + 80, begin + 90, launch=begin + 4)
    return report(made, tmp_path)


def write(tmp_path: Path, *records: Record) -> Path:
    file = tmp_path / "t.jsonl"
    with TraceWriter(file) as writer:
        writer.write(HeaderRecord("0.1.0", 0, 1), *records)
    return file


def hooks(step: int = 0, *, rank: int = 0, shift: float = 0.0, gpu: bool = False) -> list[Record]:
    """Two microbatches, a dispatch each: 0 sends at 8 and receives at 28, 1 sends at 18 and receives at 45."""
    sent = "layer2.dispatch"
    slices = [(0, 0, sent, 0, 10), (1, 0, sent, 10, 20), (0, 1, "", 22, 30), (1, 1, "", 40, 50)]
    records: list[Record] = [StepRecord(step, rank, "dbo", 8, 8, True, "split")]
    records += [SliceRecord(step, rank, "dbo", u, n, site, b + shift, e + shift) for u, n, site, b, e in slices]
    records += [
        RecvRecord(step, rank, "dbo", 0, "layer2.dispatch", 8 + shift, None, 28 + shift, 2, 0),
        RecvRecord(step, rank, "dbo", 1, "layer2.dispatch", 18 + shift, None, 45 + shift, 3, 1),
    ]
    if gpu:
        records += [
            GpuRecord(step, rank, "dbo", 0, 0, "layer2.dispatch", "compute", 5, 15, error=3.0),
            GpuRecord(step, rank, "dbo", 1, 0, "layer2.dispatch", "compute", 15, 25),
            GpuRecord(step, rank, "dbo", 0, 1, "", "compute", 25, 35, waited=4.0),
            GpuRecord(step, rank, "dbo", 1, 1, "", "compute", 46, 60),
        ]
    return records


def own(file: Path, **options: Any) -> OverlapReport:
    return trace_overlap(read_columns(file), **options)
