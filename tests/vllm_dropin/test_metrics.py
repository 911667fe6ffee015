"""The counters of the workers on the registry that answers vLLM's /metrics."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dbo_greenlet.vllm import prometheus
from dbo_greenlet.vllm.counters import StepCounters

SCRIPT = Path(__file__).with_name("script_metrics.py")
HELP = [
    "# HELP dbo_greenlet_decisions_total Steps by whether they were split into microbatches, and why.",
    "# HELP dbo_greenlet_steps_total Steps run as microbatches: eager, captured into a CUDA graph, replayed from one, "
    "failed.",
    "# TYPE dbo_greenlet_decisions_total counter",
    "# TYPE dbo_greenlet_steps_total counter",
]


def samples(*steps):
    lines = list(HELP)
    for rank, n in enumerate(steps):
        for split, reasons in (("true", {"split-decode": n, "other": 0}), ("false", {"rank-idle": n, "other": 0})):
            for reason, count in reasons.items():
                labels = f'rank="{rank}",reason="{reason}",split="{split}"'
                lines.append(f"dbo_greenlet_decisions_total{{{labels}}} {count}.0")
        for kind, count in {"eager": n, "captured": 1, "replayed": 0, "failed": 0}.items():
            lines.append(f'dbo_greenlet_steps_total{{kind="{kind}",rank="{rank}"}} {count}.0')
    return sorted(lines)


@pytest.mark.vllm
def test_a_front_end_shows_what_its_workers_count_while_they_count(tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path), prometheus.FOLDER: str(tmp_path / "of another server")}
    environment.pop("PROMETHEUS_MULTIPROC_DIR", None)
    run = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path)], capture_output=True, text=True, timeout=250, env=environment
    )
    assert run.returncode == 0, run.stderr
    said = json.loads(run.stdout.splitlines()[-1])
    assert said["own folder"] is True and said["made too early"] is False
    assert said["before"] == HELP
    assert said["after 3 and 5"] == samples(3, 5)
    assert said["after 4 and 5, several API servers"] == samples(4, 5)
    assert said["after one was killed"] == samples(4, 5)
    assert said["with broken files"] == samples(4, 5)
    assert said["mode"] == "0o700" and said["bytes"] == [4096, 4096]
    assert said["kept by a forked child"] is True
    assert Path(said["folder"]).parent == tmp_path and not Path(said["folder"]).exists()


@pytest.fixture
def announced(monkeypatch, tmp_path):
    folder = tmp_path / "metrics"
    monkeypatch.setenv(prometheus.FOLDER, str(folder))
    monkeypatch.setattr(prometheus, "_published", {})
    return folder


def test_a_worker_that_took_the_place_of_another_goes_on_in_the_same_sum(announced, monkeypatch):
    for steps in (2, 3):
        counts = StepCounters()
        for _ in range(steps):
            counts.executed("eager")
        prometheus.publish(counts, 1)
        prometheus._published.clear()
    assert len(list(announced.iterdir())) == 2
    assert [
        (rank, counts["executed"]["eager"])
        for rank, counts in sorted(prometheus.read_folder(announced), key=lambda read: read[1]["executed"]["eager"])
    ] == [(1, 2), (1, 3)]
    pytest.importorskip("prometheus_client")
    steps, _ = prometheus.StepCollector().collect()
    assert [sample.value for sample in steps.samples if sample.labels == {"kind": "eager", "rank": "1"}] == [5]


def test_without_a_front_end_nothing_is_written_and_counting_goes_on(monkeypatch, tmp_path):
    monkeypatch.delenv(prometheus.FOLDER, raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    counts = StepCounters()
    prometheus.publish(counts, 0)
    counts.executed("eager")
    assert counts.snapshot()["executed"] == {"eager": 1}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("obstacle", ["a file", "a missing parent"])
def test_a_folder_that_cannot_be_made_costs_the_metrics_alone(announced, obstacle, monkeypatch):
    if obstacle == "a file":
        announced.touch()
    else:
        monkeypatch.setenv(prometheus.FOLDER, str(announced / "a" / "b"))
    counts = StepCounters()
    prometheus.publish(counts, 0)
    counts.executed("eager")
    assert counts.snapshot()["executed"] == {"eager": 1}


def test_without_prometheus_client_a_server_starts_and_a_worker_counts(tmp_path):
    script = """
import os, sys
sys.modules["prometheus_client"] = None
from dbo_greenlet.vllm.prometheus import FOLDER, announce, publish, read_folder
from dbo_greenlet.vllm.counters import counters
announce()
publish(counters, 0)
counters.executed("eager")
(read,) = read_folder(os.environ[FOLDER])
print(read[0], read[1]["executed"]["eager"], "torch" in sys.modules, "vllm" in sys.modules)
"""
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert (run.stdout.split(), run.stderr) == (["0", "1", "False", "False"], "")
    assert list(tmp_path.iterdir()) == []
