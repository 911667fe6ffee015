"""The profiles and traces that the overlap benchmark makes are what their readers read."""

from __future__ import annotations

from pathlib import Path

import bench_overlap

from dbo_greenlet.trace.importers import read_profile
from dbo_greenlet.trace.overlap.profile import profile_overlap
from tests.trace.overlap_reports import own


def test_generated_files_are_what_their_readers_read(tmp_path: Path) -> None:
    bench_overlap.write_json(tmp_path / "p.json", 300_000)
    by_json = profile_overlap(read_profile(tmp_path / "p.json"))
    assert by_json.unreliable == [] and by_json.notes == []
    assert by_json.kernels is not None and len(by_json.kernels.by_microbatch) == 2
    bench_overlap.write_nsys(tmp_path / "p.sqlite", 100)
    by_nsys = profile_overlap(read_profile(tmp_path / "p.sqlite"))
    assert by_nsys.unreliable == [] and by_nsys.libraries == {"DeepEP": 40}
    bench_overlap.write_own(tmp_path / "t.jsonl", 500)
    by_own = own(tmp_path / "t.jsonl")
    assert by_own.in_flight is not None and len(by_own.in_flight.by_layer) == bench_overlap.LAYERS
