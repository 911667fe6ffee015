"""torch.profiler over vLLM's real runners with the drop-in: a range for each slice, and every operator in its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM, which is driven here (make test-vllm)")

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from dbo_greenlet.errors import MicrobatchFailed
from dbo_greenlet.trace.importers import read_profile
from dbo_greenlet.trace.kernels import KernelTable
from dbo_greenlet.trace.profile_slices import slices_of
from tests.trace.launched import launched
from tests.trace.profiles import GEMM
from tests.vllm_dropin.drive import Case, Drive, drop_in, harness, run_case
from tests.vllm_dropin.fake_cuda import who_runs
from tests.vllm_dropin.scenarios import break_at, captured, mend

pytestmark = pytest.mark.vllm

LAYERS = 3
SITES = {"LL": ("dispatch", "combine"), "HT": ("before_dispatch", "before_combine", "combine")}
STAGES = {"LL": ("attention", "experts"), "HT": ("attention", "experts", "shared")}
X = torch.ones(4)
# What the model runs at the begin, before each layer and at the end: an operator of no
# other use, which says whose microbatch it is.
OPERATORS = {"0": (torch.erf, "aten::erf"), "1": (torch.digamma, "aten::digamma")}


def mark(place: str) -> None:
    OPERATORS[who_runs()][0](X)


def events(recorded: Any, path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The ranges of microbatches and the operators that `mark` ran, in order, as the exported file has them."""
    marks = {name: GEMM for _, name in OPERATORS.values()}
    made = sorted(launched(recorded, path, marks), key=lambda event: event["ts"])
    ranges = [e for e in made if e["cat"] == "user_annotation" and e["name"].startswith("microbatch")]
    return ranges, [e for e in made if e["cat"] == "cpu_op" and e["name"] in marks]


def scheduled(backend: str) -> list[str]:
    """The slices of a step under round robin."""
    sites = [f"layer{layer}.{kind}" for layer in range(LAYERS) for kind in SITES[backend]]
    return [
        f"microbatch {index}, slice {number}" + (f", after {site}" if site else "")
        for number, site in enumerate(["", *sites])
        for index in range(2)
    ]


def inside(event: dict[str, Any], ranges: list[dict[str, Any]]) -> list[str]:
    return [
        each["name"]
        for each in ranges
        if each["ts"] <= event["ts"] and event["ts"] + event["dur"] <= each["ts"] + each["dur"]
    ]


@pytest.mark.parametrize("backend", ["LL", "HT"])
@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_eager_steps(runner: str, backend: str, tmp_path: Path) -> None:
    with drop_in(), harness() as log:
        drive = Drive(Case(runner, backend, layers=LAYERS), log)
        drive.model.hook = mark
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            drive.step()
            drive.step()
    path = tmp_path / "profile.json"
    ranges, marks = events(recorded, path)
    slices = [each for each in ranges if "slice" in each["name"]]
    assert [each["name"] for each in slices] == scheduled(backend) * 2
    for each in marks:
        (own,) = inside(each, slices)
        assert each["name"] == OPERATORS[own[len("microbatch ")]][1]
    # At the begin, before each layer and at the end, of both microbatches of both steps.
    assert len(marks) == (LAYERS + 2) * 2 * 2
    receives = [each["name"] for each in ranges if "receive" in each["name"]]
    messages = [f"layer{layer}.{kind}" for layer in range(LAYERS) for kind in SITES[backend]]
    sent = [f"microbatch {index}, receive of {site}" for site in messages for index in range(2)]
    assert receives == (sent * 2 if backend == "LL" else [])
    found = [each for each in slices_of(read_profile(path), KernelTable()) if each.microbatch == 1]
    stages = [*STAGES[backend] * LAYERS, ""]
    layers = [layer for layer in range(LAYERS) for _ in SITES[backend]] + [-1]
    assert [(each.stage, each.layer) for each in found] == [*zip(stages, layers, strict=True)] * 2


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_a_captured_step_has_ranges_and_its_replays_have_none(runner: str, tmp_path: Path) -> None:
    with drop_in(), harness() as log:
        drive = Drive(Case(runner, mode="capture", layers=LAYERS), log)
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            captured(drive)
        with profile(activities=[ProfilerActivity.CPU]) as replayed:
            drive.replay()
    recorded.export_chrome_trace(str(tmp_path / "captured.json"))
    replayed.export_chrome_trace(str(tmp_path / "replayed.json"))
    names = {
        file: [
            event["name"]
            for event in json.loads((tmp_path / f"{file}.json").read_text())["traceEvents"]
            if event.get("cat") == "user_annotation" and "slice" in event["name"]
        ]
        for file in ("captured", "replayed")
    }
    warm_up = 1 if runner == "V2" else 0
    assert names == {"captured": scheduled("LL") * (1 + warm_up), "replayed": []}


@pytest.mark.parametrize("backend", ["LL", "HT"])
@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_a_profiler_changes_nothing(runner: str, backend: str) -> None:
    case = Case(runner, backend, layers=2)
    with drop_in():
        plain = run_case(case)
        with profile(activities=[ProfilerActivity.CPU]):
            watched = run_case(case)
    assert watched.log == plain.log
    for step, other in zip(watched.outputs, plain.outputs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(step, other, strict=True))


def test_a_failed_step_leaves_no_range_open(tmp_path: Path) -> None:
    with drop_in(), harness() as log:
        drive = Drive(Case(layers=LAYERS), log)
        break_at(drive, 1, "layer1")
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            with pytest.raises(MicrobatchFailed):
                drive.step()
            with record_function("between"):
                torch.sin(X)
            mend(drive)
            drive.step()
    recorded.export_chrome_trace(str(tmp_path / "profile.json"))
    made = json.loads((tmp_path / "profile.json").read_text())["traceEvents"]
    ranges = [each for each in made if each.get("cat") == "user_annotation"]
    (between,) = (each for each in ranges if each["name"] == "between")
    assert inside(between, ranges) == ["between"]
    # It failed in microbatch 1's third slice: two of each, and microbatch 0's third, before it.
    slices = [each["name"] for each in sorted(ranges, key=lambda each: each["ts"]) if "slice" in each["name"]]
    assert slices == scheduled("LL")[:6] + scheduled("LL")
