"""Slices in a profile: torch.profiler over real steps, and what our readers make of the ranges that it finds."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

pytest.importorskip("msgspec", reason="msgspec is not installed, so profiles are not read")
from dbo_greenlet import Scheduler, dbo_maybe_run_recv_hook, dbo_range, dbo_register_recv_hook, dbo_yield
from dbo_greenlet.batching import VoteSettings
from dbo_greenlet.runner import Runner
from dbo_greenlet.schedule import Schedule
from dbo_greenlet.trace.attribution import Attribution, attribute
from dbo_greenlet.trace.critical_path.profile import profile_path
from dbo_greenlet.trace.export.chrome import write_chrome
from dbo_greenlet.trace.export.open_export import open_export
from dbo_greenlet.trace.importers import read_profile
from dbo_greenlet.trace.kernels import Annotation, KernelTable
from dbo_greenlet.trace.launches import find_launches
from dbo_greenlet.trace.overlap.profile import profile_overlap
from dbo_greenlet.trace.profile import Profile, load, save
from dbo_greenlet.trace.profile_slices import slices_of
from tests.runner.tiny import SITES, tiny_cache, tiny_model, tiny_step
from tests.trace.launched import launched
from tests.trace.profiles import FLASH, GEMM, LOW_LATENCY_COMBINE, LOW_LATENCY_DISPATCH, ChromeProfile, NsysProfile

X = torch.ones(8)
LAYERS = 2
SEND = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
# Names that say nothing of the stage, so that the ranges have to.
KERNELS = {"aten::sin": GEMM, "aten::cos": GEMM, "aten::tanh": GEMM, "aten::exp": SEND, "aten::sigmoid": SEND}


def low_latency() -> None:
    """Attention sin, experts cos, output tanh; messages are exp, and sigmoid where they are received."""
    for layer in range(LAYERS):
        for operator, stage in ((torch.sin, "dispatch"), (torch.cos, "combine")):
            operator(X)
            dbo_maybe_run_recv_hook()
            torch.exp(X)
            dbo_register_recv_hook(lambda: torch.sigmoid(X))
            dbo_yield(f"layer{layer}.{stage}")
    torch.tanh(X)


def high_throughput() -> None:
    """As vLLM's: the messages are launched after the yield in front of them."""
    for layer in range(LAYERS):
        torch.sin(X)
        dbo_yield(f"layer{layer}.before_dispatch")
        torch.exp(X)
        torch.cos(X)
        dbo_yield(f"layer{layer}.before_combine")
        torch.exp(X)
        torch.tanh(X)
        dbo_yield(f"layer{layer}.combine")
    torch.tanh(X)


def profiled(
    model: Callable[[], None], path: Path, *, count: int = 2, steps: int = 1
) -> tuple[Profile, list[Schedule], list[dict[str, Any]]]:
    with profile(activities=[ProfilerActivity.CPU]) as recorded, torch.inference_mode():
        schedules = [Scheduler().run([model] * count).schedule for _ in range(steps)]
    events = launched(recorded, path, KERNELS)
    return read_profile(path), schedules, events


def spoken(found: Attribution) -> list[tuple[str, int, int]]:
    """Stage, layer and microbatch of each kernel, in the order of their launches."""
    return [
        (found.stages[stage], int(layer), int(microbatch))
        for stage, layer, microbatch in zip(found.stage, found.layer, found.microbatch, strict=True)
    ]


def attributed(made: Profile) -> Attribution:
    return attribute(made, find_launches(made), KernelTable())


# -- what a range says -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("microbatch 1, slice 0", Annotation(microbatch=1, slice=0)),
        ("microbatch 0, slice 12, after layer5.dispatch", Annotation(microbatch=0, slice=12, site="layer5.dispatch")),
        ("microbatch 0, slice 1, after a, b", Annotation(microbatch=0, slice=1, site="a, b")),
        ("microbatch 1, receive of layer5.combine", Annotation("combine", 5, 1)),
        ("my microbatch 0, slice 1", Annotation(microbatch=0)),
        ("microbatch 0, slice one", Annotation(microbatch=0)),
    ],
)
def test_names_of_ranges(name: str, said: Annotation) -> None:
    assert KernelTable().annotation(name) == said


def test_a_table_of_ones_own_may_name_slices(tmp_path: Path) -> None:
    table = tmp_path / "mine.toml"
    table.write_text("[[annotation]]\npattern = '^mb(?P<microbatch>\\d+)#(?P<slice>\\d+)@?(?P<site>.*)$'\n")
    made = ChromeProfile()
    for number, name in enumerate(("mb0#0", "mb1#0", "mb0#1@layer3.dispatch", "mb1#1@layer3.dispatch")):
        made.range(name, 10 * number, 10 * number + 9)
        made.kernel(GEMM, 10 * number + 3, 10 * number + 8, launch=10 * number + 1)
    path = made.write(tmp_path / "profile.json")
    found = slices_of(read_profile(path), KernelTable(table))
    assert [(each.microbatch, each.number, each.end_site, each.stage, each.layer) for each in found] == [
        (0, 0, "layer3.dispatch", "attention", 3),
        (0, 1, "", "", -1),
        (1, 0, "layer3.dispatch", "attention", 3),
        (1, 1, "", "", -1),
    ]


# -- real steps --------------------------------------------------------------------------------------------------------


def as_scheduled(schedules: Sequence[Schedule]) -> list[tuple[int, int, str, str]]:
    """Microbatch, number, begin and end of each slice, in order."""
    rows = []
    for schedule in schedules:
        site, number = [""] * schedule.count, [0] * schedule.count
        for index, end in zip(schedule.decisions, schedule.sites, strict=True):
            rows.append((index, number[index], site[index], end))
            site[index], number[index] = end, number[index] + 1
    return rows


@pytest.mark.parametrize("model", [low_latency, high_throughput])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_slices_are_those_of_the_schedules(model: Callable[[], None], count: int, tmp_path: Path) -> None:
    made, schedules, _ = profiled(model, tmp_path / "profile.json", count=count, steps=3)
    found = sorted(slices_of(made, KernelTable()), key=lambda each: each.range)
    rows = [(each.microbatch, each.number, each.begin_site, each.end_site) for each in found]
    assert rows == as_scheduled(schedules)


def test_every_operator_of_the_file_lies_in_the_range_of_its_slice(tmp_path: Path) -> None:
    _, (schedule,), events = profiled(low_latency, tmp_path / "profile.json")
    slices = [e for e in events if e["cat"] == "user_annotation" and "slice" in e["name"]]
    slices.sort(key=lambda event: event["ts"])
    assert len(slices) == len(schedule.decisions)
    operators = [e for e in events if e["cat"] == "cpu_op" and e["name"] in KERNELS]
    held = [[o for o in operators if s["ts"] <= o["ts"] and o["ts"] + o["dur"] <= s["ts"] + s["dur"]] for s in slices]
    assert sum(map(len, held)) == len(operators)
    # Of each slice: what it computed, by the site at its end; the sibling's receive from its second site on; its send.
    computes = {"dispatch": "aten::sin", "combine": "aten::cos", "": "aten::tanh"}
    for ended, mine in zip(schedule.sites, held, strict=True):
        names = [each["name"] for each in sorted(mine, key=lambda each: each["ts"])]
        stage = ended.rpartition(".")[2]
        assert [name for name in names if name != "aten::sigmoid"] == [computes[stage], *["aten::exp"] * bool(ended)]


def test_steps_of_a_runner_with_a_model_of_experts(tmp_path: Path) -> None:
    runner = Runner(tiny_model(), kv_cache=tiny_cache(), settings=VoteSettings(2, 2, 4))
    split, unsplit = tiny_step([(0, 0, 11), (1, 0, 6)]), tiny_step([(0, 11, 1)])
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        outputs = [runner.step(step) for step in (split, unsplit)]
    assert [out.decision.split for out in outputs] == [True, False]
    path = tmp_path / "profile.json"
    launched(recorded, path, {"aten::mm": GEMM, "aten::softmax": FLASH})
    made = read_profile(path)
    found = slices_of(made, KernelTable())
    for index in range(2):
        mine = [each for each in found if each.microbatch == index]
        assert [each.end_site for each in mine] == list(SITES)
        assert [(each.stage, each.layer) for each in mine] == [
            ("attention", 1), ("experts", 1), ("attention", 2), ("experts", 2), ("", -1),
        ]  # fmt: skip
    attributed_to = attributed(made).microbatch
    last = max(np.flatnonzero(attributed_to >= 0))
    # Every product of the split step has its microbatch, and none of the unsplit one behind it has.
    assert (attributed_to[: last + 1] >= 0).all() and len(attributed_to) > last + 1
    assert {0, 1} == set(attributed_to[: last + 1].tolist())


def test_kernels_of_low_latency(tmp_path: Path) -> None:
    made, (schedule,), _ = profiled(low_latency, tmp_path / "profile.json")
    found = attributed(made)
    expected: list[tuple[str, int, int]] = []
    sent: dict[int, tuple[str, int, int]] = {}
    for index, site in zip(schedule.decisions, schedule.sites, strict=True):
        layer, _, stage = site.partition(".")
        number = int(layer.removeprefix("layer")) if site else -1
        received = [sent.pop(1 - index)] if 1 - index in sent else []
        if not site:  # it computes before it returns, and then receives what is left
            expected += [("", -1, index), *received]
            continue
        expected += [("attention" if stage == "dispatch" else "experts", number, index), *received]
        sent[index] = (stage, number, index)
        expected.append(sent[index])
    assert spoken(found) == expected
    assert found.communication.sum() == 2 * 2 * 2 * LAYERS


def test_kernels_of_high_throughput(tmp_path: Path) -> None:
    made, (schedule,), _ = profiled(high_throughput, tmp_path / "profile.json")
    launched_by = {
        "before_dispatch": ["attention"], "before_combine": ["dispatch", "experts"], "combine": ["combine", "shared"],
        "": [""],
    }  # fmt: skip
    expected = [
        (stage, int(site[5]) if site else -1, index)
        for index, site in zip(schedule.decisions, schedule.sites, strict=True)
        for stage in launched_by[site.rpartition(".")[2]]
    ]
    assert spoken(attributed(made)) == expected


def test_kernels_that_say_their_stage_and_ranges_inside_come_first(tmp_path: Path) -> None:
    def entry() -> None:
        torch.sin(X)
        with dbo_range("shared experts"):
            torch.cos(X)
        torch.exp(X)
        dbo_yield("layer4.combine")

    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        Scheduler().run([entry])
    path = tmp_path / "profile.json"
    launched(recorded, path, {"aten::sin": FLASH, "aten::cos": GEMM, "aten::exp": LOW_LATENCY_DISPATCH})
    assert spoken(attributed(read_profile(path))) == [("attention", 4, 0), ("shared", 4, 0), ("dispatch", 4, 0)]


def test_the_overlap_report_by_stage_layer_and_microbatch(tmp_path: Path) -> None:
    made, _, _ = profiled(low_latency, tmp_path / "profile.json")
    view = profile_overlap(made).kernels
    # A kernel of the file takes a microsecond, and none runs beside another.
    rows = {
        name: {row.key: (round(row.communication, 3), round(row.compute, 3)) for row in getattr(view, name)}
        for name in ("by_stage", "by_layer", "by_microbatch")
    }
    assert rows == {
        "by_stage": {
            "attention": (0, 4), "dispatch": (8, 0), "experts": (0, 4), "combine": (8, 0), "other": (0, 2),
        },
        "by_layer": {0: (8, 4), 1: (8, 4)},
        "by_microbatch": {0: (8, 5), 1: (8, 5)},
    }  # fmt: skip


def test_the_critical_path_by_stage(tmp_path: Path) -> None:
    made, _, _ = profiled(low_latency, tmp_path / "profile.json")
    report = profile_path(made)
    stages = {row.stage for row in report.total.stages} - {"host", "launch", "idle", "communication"}
    assert stages == {"attention", "dispatch", "experts", "combine", "other"}


def test_an_imported_profile_and_an_exported_one_keep_them(tmp_path: Path) -> None:
    made, _, _ = profiled(low_latency, tmp_path / "profile.json")
    save(made, tmp_path / "imported")
    again = load(tmp_path / "imported")
    assert slices_of(again, KernelTable()) == slices_of(made, KernelTable())
    file = io.BytesIO()
    write_chrome(open_export([tmp_path / "imported"]), file)
    events = json.loads(file.getvalue())["traceEvents"]
    launched_in = [e["args"]["launched in"] for e in events if "launched in" in e.get("args", {})]
    assert launched_in[0] == "microbatch 0, slice 0" and len(launched_in) == len(made.activities)
    assert len([e for e in events if e.get("ph") == "X" and e["name"].startswith("microbatch")]) == len(made.ranges)


# -- profiles that are not whole, and of other kinds -------------------------------------------------------------------


def test_a_profile_that_begins_and_ends_in_the_middle(tmp_path: Path) -> None:
    made = ChromeProfile()
    names = [
        "microbatch 1, slice 3, after layer1.dispatch",
        "microbatch 0, slice 4, after layer1.combine",
        "microbatch 1, slice 4, after layer1.combine",
        # the next step
        "microbatch 0, slice 0",
    ]
    for number, name in enumerate(names):
        made.range(name, 10 * number, 10 * number + 9)
        made.kernel(GEMM, 10 * number + 3, 10 * number + 8, launch=10 * number + 1)
    found = attributed(read_profile(made.write(tmp_path / "profile.json")))
    assert spoken(found) == [("experts", 1, 1), ("", -1, 0), ("", -1, 1), ("", -1, 0)]


def test_slices_of_a_step_inside_a_slice_are_apart(tmp_path: Path) -> None:
    made = ChromeProfile()
    for name, begin, end in (
        ("microbatch 0, slice 0", 0, 100),
        ("microbatch 0, slice 0", 10, 20),
        ("microbatch 0, slice 1, after layer7.dispatch", 30, 40),
        ("microbatch 0, slice 1, after layer2.dispatch", 110, 120),
    ):
        made.range(name, begin, end)
    made.kernel(GEMM, 130, 131, launch=115)
    found = slices_of(read_profile(made.write(tmp_path / "profile.json")), KernelTable())
    assert [each.end_site for each in found] == ["layer2.dispatch", "layer7.dispatch", "", ""]


def test_sites_that_are_no_dispatches_and_combines(tmp_path: Path) -> None:
    made = ChromeProfile()
    for number, name in enumerate(
        ("microbatch 0, slice 0", "microbatch 0, slice 1, after layer3.norm", "microbatch 0, slice 2, after model.py:7")
    ):
        made.range(name, 10 * number, 10 * number + 9)
        made.kernel(GEMM, 10 * number + 3, 10 * number + 8, launch=10 * number + 1)
    found = attributed(read_profile(made.write(tmp_path / "profile.json")))
    assert spoken(found) == [("", 3, 0), ("", -1, 0), ("", -1, 0)]


def test_nvtx_ranges_of_nsight_systems(tmp_path: Path) -> None:
    made = NsysProfile(tmp_path / "profile.sqlite")
    for number, name in enumerate(("microbatch 0, slice 0", "microbatch 0, slice 1, after layer3.dispatch")):
        made.range(name, 100 * number, 100 * number + 90)
        made.kernel(GEMM, 100 * number + 30, 100 * number + 80, launch=100 * number + 10)
    made.kernel(LOW_LATENCY_COMBINE, 191, 192, launch=150)
    found = attributed(read_profile(made.done()))
    assert spoken(found) == [("attention", 3, 0), ("", -1, 0), ("combine", -1, 0)]
