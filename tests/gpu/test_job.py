"""The whole command on one GPU that two ranks share. Run where there is one: python -m pytest -m gpu"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from dbo_greenlet.trace import read_trace  # noqa: E402 - behind the skip
from tests.job.command import SECONDS, arguments, environment  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run: python -m pytest -m gpu"),
]

TRANSPORTS = {"nccl": "float32", "deepep_ll": "bfloat16", "deepep_ht": "bfloat16"}


def on_one_gpu(*words: object) -> subprocess.CompletedProcess[str]:
    env = {**environment(), "CUDA_VISIBLE_DEVICES": "0"}
    return subprocess.run(arguments(*words), capture_output=True, text=True, timeout=SECONDS, env=env)


@dataclass(frozen=True)
class Ran:
    all2all: str
    report: dict[str, Any]
    trace: Path


@pytest.fixture(scope="module", params=TRANSPORTS)
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    all2all: str = request.param
    if all2all.startswith("deepep") and find_spec("deep_ep") is None:
        pytest.skip("needs DeepEP: pip install dbo-greenlet[deepep]")
    trace = tmp_path_factory.mktemp(all2all) / "trace.jsonl"
    words = ("--all2all", all2all, "--dtype", TRANSPORTS[all2all], "--limit", 24, "--trace", trace, "--json")
    done = on_one_gpu("run", "--device", "cuda", *words)
    assert done.returncode == 0, done.stderr
    return Ran(all2all, json.loads(done.stdout), trace)


def test_problems_are_solved_split_and_unsplit(ran: Ran) -> None:
    rows = {row["run"]: row for row in ran.report["table"]}
    # The checkpoint solves three of four.
    for run in ("eager, no DBO", "eager, DBO"):
        assert rows[run]["n"] == 24 and rows[run]["exact_match"] >= 0.5
    assert ran.report["steps"]["split"] > 0
    assert ran.report["tokens"]["unexplained"] == 0
    assert ran.report["logits"]["unsplit"]["rows"] > 24
    assert ran.report["schedule_hash"]["agreed"]


def test_ranks_that_share_the_gpu_say_so(ran: Ran) -> None:
    assert [(each["device"], each["sharing"]) for each in ran.report["devices"]] == [("cuda:0", 2)] * 2


def test_graphs_give_what_eager_steps_give(ran: Ran) -> None:
    rows = {row["run"]: row for row in ran.report["table"]}
    if ran.all2all == "deepep_ht":
        assert rows["graph, DBO"]["exact_match"] is None
        assert "reads row counts on the host" in rows["graph, DBO"]["needs"]
        return
    graphs = ran.report["graphs"]["runs"]
    assert list(graphs) == ["dbo-graph", "unsplit-graph"]
    for run, each in graphs.items():
        assert each["replayed"] > 0
        assert each["sizes"] == [8, 16, 32, 64]
        # Prefills lie between them.
        assert each["outputs"]["steps"] > each["outputs"]["replayed"] == each["replayed"]
        assert each["outputs"]["differing"] == each["outputs"]["missing"] == each["tokens_differ"] == [], run
    assert graphs["dbo-graph"]["split_and_replayed"] > 0
    assert rows["graph, DBO"]["exact_match"] == rows["eager, DBO"]["exact_match"]


def test_carriers_give_the_same_bits(ran: Ran) -> None:
    assert ran.report["carriers"]["steps"] > 0
    assert ran.report["carriers"]["differing"] == []


def test_replayed_steps_have_no_slices_and_eager_ones_have(ran: Ran) -> None:
    trace = read_trace(ran.trace)
    replayed = 0
    for (run, _, _), step in trace.steps.items():
        if step.record.execution == "replayed":
            assert run.endswith("graph") and not step.slices
            replayed += 1
        elif step.record.split:
            assert len(step.slices) == len(step.decisions) > 2
    assert (replayed > 0) is (ran.all2all != "deepep_ht")


def test_the_trace_can_be_replayed_bit_for_bit(ran: Ran) -> None:
    run = {"nccl": "unsplit-graph", "deepep_ll": "dbo-graph", "deepep_ht": "dbo"}[ran.all2all]
    done = on_one_gpu("replay", ran.trace, "--run", run, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["met"] and report["steps"] > 10 and not report["outputs"] and not report["not_comparable"]
