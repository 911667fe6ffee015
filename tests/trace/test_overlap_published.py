"""Overlap of DeepSeek's published profile, against its known figures and a slow count."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from dbo_greenlet.trace.importers import read_profile
from dbo_greenlet.trace.overlap.profile import profile_overlap
from dbo_greenlet.trace.overlap.text import is_reliable

SHARED = Path(__file__).resolve().parents[3] / "shared"
GOLDEN = SHARED / "data" / "deepseek_train_1f1b.json.gz"

needs_golden = pytest.mark.skipif(not GOLDEN.exists(), reason="needs ../shared/data/deepseek_train_1f1b.json.gz")


@needs_golden
def test_golden() -> None:
    found = profile_overlap(read_profile(GOLDEN))
    assert found.kernels is not None and found.in_flight is None
    whole = found.kernels.measure
    assert whole.communication == 113_440 and whole.compute == 124_310 and whole.both == 109_250
    assert whole.exposed == 4_190 and whole.window == 129_012 and whole.events == 36
    assert whole.hidden is not None and round(100 * whole.hidden, 2) == 96.31
    assert found.libraries == {"DeepEP": 36}
    assert found.unreliable == [] and found.notes == [] and is_reliable(found)
    assert found.idle is not None and found.idle.total == pytest.approx(129_012 - 124_310)
    exposed = found.idle.host_exposed + found.idle.event_exposed + found.idle.other_exposed
    assert exposed == pytest.approx(4_190)
    stages = {each.key: each for each in found.kernels.by_stage}
    assert stages["dispatch"].communication + stages["combine"].communication == 113_440
    assert sum(each.events for each in stages.values()) == 36
    assert stages["attention"].compute > 40_000 and stages["experts"].compute > 60_000


@needs_golden
def test_golden_against_a_slow_count() -> None:
    """The same from the file with json and sets of microseconds (its times are whole ones)."""
    events = [e for e in json.loads(gzip.decompress(GOLDEN.read_bytes()))["traceEvents"] if e.get("cat") == "kernel"]
    busy: dict[bool, set[int]] = {True: set(), False: set()}
    for event in events:
        busy["dpsk::ep::" in event["name"]].update(range(event["ts"], event["ts"] + event["dur"]))
    found = profile_overlap(read_profile(GOLDEN)).kernels
    assert found is not None
    assert found.measure.communication == len(busy[True]) and found.measure.compute == len(busy[False])
    assert found.measure.both == len(busy[True] & busy[False])
