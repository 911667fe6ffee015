"""An overlap report as text and as JSON."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from dbo_greenlet.trace.importers import read_profile
from dbo_greenlet.trace.overlap.profile import profile_overlap
from dbo_greenlet.trace.overlap.report import Unreliable
from dbo_greenlet.trace.overlap.text import overlap_json, render_overlap
from tests.trace.overlap_reports import low_latency
from tests.trace.profiles import DISPATCH, GEMM, ChromeProfile


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
    assert "\n?: not to be trusted, for what is said of this column below\n" in text
    assert "unreliable (by kernels): 4 kernels are of a low-latency all-to-all" in text
    assert all(len(line) == len(line.rstrip()) for line in text.splitlines())


def test_what_is_known_to_be_the_most_is_said_to_be(tmp_path: Path) -> None:
    found = low_latency(tmp_path)
    bound = replace(found, unreliable=[Unreliable("in_flight", "a wait counts as compute", at_most=True)])
    text = render_overlap(bound)
    assert re.search(r"^hidden +0\.00 % +<= 66\.67 %$", text, re.MULTILINE) and "\n?:" not in text
    assert overlap_json(bound)["unreliable"][0]["at_most"] is True
    both = replace(bound, unreliable=[*bound.unreliable, Unreliable("in_flight", "nobody knows")])
    assert "66.67 % ?" in render_overlap(both)


def test_what_a_profiler_does_to_the_times(tmp_path: Path) -> None:
    """Two steps in one profile, in which the GPU waits for the host."""
    made = ChromeProfile()
    for number in range(2):
        made.range(f"ProfilerStep#{3 + number}", 100.0 * number, 100.0 * number + 90)
        made.kernel(DISPATCH, 100.0 * number + 10, 100.0 * number + 20, launch=100.0 * number + 5)
        made.kernel(GEMM, 100.0 * number + 60, 100.0 * number + 70, launch=100.0 * number + 58)
    text = render_overlap(profile_overlap(read_profile(made.write(tmp_path / "p.json"))))
    assert "note: The profile is of 2 steps, by its ranges; every time is of all of them together." in text
    assert re.search(r"note: For \d+ % of the time no compute ran because the host was late; a profiler makes", text)
