"""An overlap report as text and as JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dbo_greenlet.trace.overlap.text import overlap_json, render_overlap
from tests.trace.overlap_reports import low_latency


def test_json_has_what_the_text_has(tmp_path: Path) -> None:
    found = low_latency(tmp_path)
    data = json.loads(json.dumps(overlap_json(found)))
    assert data["reliable"] is True and data["source"] == "torch.profiler"
    assert data["in_flight"]["hidden"] == pytest.approx(2 / 3) and data["in_flight"]["exposed"] == 60
    assert data["kernels"]["by_stage"][0]["key"] == "dispatch"
    assert data["idle"]["total"] == data["idle"]["host"] + data["idle"]["event"] + data["idle"]["other"]
    assert data["launch_delay"]["kernels"] == 6
    text = render_overlap(found)
    assert "by kernels  in flight" in text
    assert re.search(r"^hidden +0\.00 % \? +66\.67 %$", text, re.MULTILINE), "what is doubted has a question mark"
    assert "unreliable (by kernels): 4 kernels are of a low-latency all-to-all" in text
    assert all(len(line) == len(line.rstrip()) for line in text.splitlines())
