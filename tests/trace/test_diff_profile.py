"""Two profiles compared: kernels that came, went, ran more or less often, and where the time went."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("msgspec", reason="msgspec is not installed, so profiles are not read")
from dbo_greenlet.trace.diff.profiles import Numbers, ProfileDiff, diff_profiles
from dbo_greenlet.trace.diff.profiles_text import profile_diff_json, render_profile_diff
from dbo_greenlet.trace.diff.program import some_of
from dbo_greenlet.trace.importers import read_profile
from dbo_greenlet.trace.overlap.profile import profile_overlap
from tests.job.command import in_process, one_sentence
from tests.trace.profiles import COMBINE, DISPATCH, FLASH, GEMM, ChromeProfile
from tests.trace.test_export_chrome import HEADER, STEP, write

NEW = "void the_new_kernel(int)"


def before(rank: int = 0) -> ChromeProfile:
    made = ChromeProfile(rank=rank)
    made.range("ubatch 0 layer 4 attention", 1.0, 9.0)
    made.kernel(GEMM, 10.0, 20.0, launch=3.0)
    made.kernel(FLASH, 20.0, 40.0, launch=5.0)
    made.kernel(DISPATCH, 30.0, 50.0, stream=21, launch=11.0)
    made.kernel(GEMM, 50.0, 60.0, launch=12.0)
    made.kernel(COMBINE, 60.0, 65.0, stream=21, launch=13.0)
    return made


def after() -> ChromeProfile:
    made = ChromeProfile()
    made.range("ubatch 0 layer 4 attention", 1.0, 9.0)
    made.kernel(GEMM, 10.0, 20.0, launch=3.0)
    made.kernel(DISPATCH, 30.0, 55.0, stream=21, launch=11.0)
    made.kernel(NEW, 40.0, 48.0, launch=11.5)
    made.kernel(GEMM, 50.0, 60.0, launch=12.0)
    made.kernel(GEMM, 60.0, 61.0, launch=13.0)
    return made


@pytest.fixture
def compare(tmp_path: Path) -> Callable[..., ProfileDiff]:
    def compared(a: list[ChromeProfile], b: list[ChromeProfile]) -> ProfileDiff:
        sides = []
        for name, made in (("a", a), ("b", b)):
            paths = [each.write(tmp_path / f"{name}{number}.json") for number, each in enumerate(made)]
            sides.append([read_profile(path) for path in paths])
        return diff_profiles(*sides)

    return compared


def test_a_profile_equals_itself(compare: Callable[..., ProfileDiff]) -> None:
    found = compare([before()], [before()])
    assert found.equal and found.notes == []
    assert found.changes() == {"added": 0, "deleted": 0, "increased": 0, "decreased": 0, "unchanged": 4}
    assert found.a.whole == found.b.whole


def test_times_alone_are_no_difference(compare: Callable[..., ProfileDiff]) -> None:
    slower = before()
    for event in slower.events:
        if event["name"] == DISPATCH:
            event["dur"] *= 1.4
    found = compare([before()], [slower])
    assert found.equal
    assert found.kernels[0].name == DISPATCH
    assert (found.kernels[0].a, found.kernels[0].b) == (Numbers(1, 20.0), Numbers(1, 28.0))


def test_every_class_of_kernel_once(compare: Callable[..., ProfileDiff]) -> None:
    found = compare([before()], [after()])
    assert not found.equal
    # The largest difference of times first.
    assert [(row.name, row.change, row.does, row.a.count, row.b.count) for row in found.kernels] == [
        (FLASH, "deleted", "compute", 1, 0),
        (NEW, "added", "compute", 0, 1),
        (COMBINE, "deleted", "communication", 1, 0),
        (DISPATCH, "unchanged", "communication", 1, 1),
        (GEMM, "increased", "compute", 2, 3),
    ]
    back = compare([after()], [before()])
    assert back.changes() == {"added": 2, "deleted": 1, "increased": 0, "decreased": 1, "unchanged": 1}


def test_stages_and_exposed_communication_are_those_of_the_overlap_report(
    compare: Callable[..., ProfileDiff], tmp_path: Path
) -> None:
    found = compare([before()], [after()])
    reports = [profile_overlap(read_profile(tmp_path / f"{name}0.json")) for name in "ab"]
    for side, report in zip((found.a, found.b), reports, strict=True):
        assert report.kernels is not None and report.idle is not None
        measure = report.kernels.measure
        assert {name: side.whole[name] for name in ("window", "compute", "communication", "both", "exposed")} == {
            "window": measure.window,
            "compute": measure.compute,
            "communication": measure.communication,
            "both": measure.both,
            "exposed": measure.exposed,
        }
        assert side.whole["no compute: host"] == report.idle.host
        assert side.whole["no compute: event"] == report.idle.event
    # By hand: of the dispatch [30, 50] compute ran until 40; of [30, 55] in [40, 48] and from 50 on.
    (dispatch,) = [row for row in found.stages if row.stage == "dispatch"]
    assert dispatch.communication == (20.0, 25.0) and dispatch.exposed == pytest.approx((10.0, 12.0))
    assert (dispatch.a, dispatch.b, dispatch.change) == (Numbers(1, 20.0), Numbers(1, 25.0), "unchanged")
    (combine,) = [row for row in found.stages if row.stage == "combine"]
    assert combine.communication == (5.0, 0.0) and combine.exposed == (5.0, 0.0) and combine.change == "deleted"
    (attention,) = [row for row in found.stages if row.stage == "attention"]
    assert (attention.a, attention.b) == (Numbers(2, 30.0), Numbers(1, 10.0)) and attention.compute == (30.0, 10.0)


def test_ranks_are_added_up(compare: Callable[..., ProfileDiff]) -> None:
    one, two = compare([before()], [before()]), compare([before(), before(1)], [before(), before(1)])
    assert {name: 2 * time for name, time in one.a.whole.items()} == two.a.whole
    assert [(row.name, 2 * row.a.count, 2 * row.a.time) for row in one.kernels] == [
        (row.name, row.a.count, row.a.time) for row in two.kernels
    ]
    uneven = compare([before()], [before(), before(1)])
    assert uneven.notes == [
        "A is of 1 profile and B of 2, so their sums are not of as many ranks.",
        "4 of 4 kernels in both ran 2 times as often in B: do the two hold another number of steps?",
    ]


def test_a_profile_without_communication_is_compared_too(compare: Callable[..., ProfileDiff]) -> None:
    silent = ChromeProfile()
    silent.kernel(GEMM, 10.0, 20.0, launch=3.0)
    found = compare([silent], [before()])
    assert not found.equal and found.a.whole["communication"] == 0.0 and found.b.whole["communication"] == 25.0
    assert "hidden, in %" not in render_profile_diff(found)


def test_other_machines_are_said(compare: Callable[..., ProfileDiff]) -> None:
    other = before()
    other.head["deviceProperties"] = [{"id": 0, "name": "NVIDIA H800"}]
    assert compare([before()], [other]).notes == ["The GPUs differ: NVIDIA H200; NVIDIA H800."]


def test_the_text(compare: Callable[..., ProfileDiff]) -> None:
    lines = [line.split() for line in render_profile_diff(compare([before()], [after()])).splitlines()]
    text = "Kernels: 1 only in B, 2 only in A, 1 more often in B, 0 less often in B, 1 as often in both."
    assert text.split() in lines
    assert ["void", "the_new_kernel(int)", "0", "1", "0.000", "0.008", "+0.008", "compute"] in lines
    assert ["exposed", "0.015", "0.012", "-0.003", "-20.0", "%"] in lines
    assert ["hidden,", "in", "%", "40.00", "52.00", "+12.00"] in lines


def test_json_holds_everything(compare: Callable[..., ProfileDiff]) -> None:
    found = compare([before()], [after()])
    said = json.loads(json.dumps(profile_diff_json(found)))
    assert said["equal"] is False and said["changes"]["deleted"] == 2
    assert said["kernels"][0] == {
        "name": FLASH,
        "does": "compute",
        "change": "deleted",
        "a": {"count": 1, "time": 20.0},
        "b": {"count": 0, "time": 0.0},
    }
    assert {row["stage"] for row in said["stages"]} == {"attention", "dispatch", "combine", "other"}


def test_the_command(tmp_path: Path) -> None:
    a, b = before().write(tmp_path / "a.json.gz"), after().write(tmp_path / "b.json")
    done = in_process("diff", a, a)
    assert (done.returncode, done.stderr) == (0, "") and "4 as often in both" in done.stdout
    done = in_process("diff", a, b, "--json")
    assert (done.returncode, done.stderr) == (1, "")
    assert json.loads(done.stdout)["a"]["path"] == str(a)
    folder = tmp_path / "ranks"
    folder.mkdir()
    before().write(folder / "rank0.json")
    before(1).write(folder / "rank1.json")
    done = in_process("diff", folder, folder, "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["kernels"][0]["a"]["count"] in (2, 4)


def test_a_table_of_names_changes_what_is_communication(tmp_path: Path) -> None:
    table = tmp_path / "names.toml"
    table.write_text('[[kernel]]\npattern = "the_new_kernel"\nkind = "communication"\nstage = "combine"\n')
    a, b = before().write(tmp_path / "a.json"), after().write(tmp_path / "b.json")
    said = json.loads(in_process("diff", a, b, "--kernels", table, "--json").stdout)
    assert {row["name"]: row["does"] for row in said["kernels"]}[NEW] == "communication"


def test_a_trace_and_a_profile_are_refused_with_the_reason(tmp_path: Path) -> None:
    trace, profile = write(tmp_path / "t", HEADER, *STEP), before().write(tmp_path / "p.json")
    for words in ((trace, profile), (profile, trace)):
        done = in_process("diff", *words)
        assert (done.returncode, done.stdout) == (2, "")
        assert one_sentence(done.stderr) == (
            f"{trace} is a trace of ours and {profile} is none: a trace says what was decided, a profile which kernels "
            "ran; compare two of one kind"
        )
    done = in_process("export", trace, profile, "--format", "chrome", "-o", tmp_path / "out")
    assert done.returncode == 2
    assert one_sentence(done.stderr).endswith("is none: their times have no axis in common; export them one by one")


def test_choices_of_the_other_kind_are_refused(tmp_path: Path) -> None:
    trace, profile = write(tmp_path / "t", HEADER, *STEP), before().write(tmp_path / "p.json")
    done = in_process("diff", profile, profile, "--rank", 0)
    assert done.returncode == 2
    assert one_sentence(done.stderr) == f"{profile} is a profile; --run and --rank choose from a trace of ours"
    done = in_process("diff", trace, trace, "--kernels", profile)
    assert done.returncode == 2
    assert one_sentence(done.stderr) == f"--kernels says what names in profiles mean; {trace} is a trace of ours"


def test_profiles_of_other_programs_are_not_compared(tmp_path: Path) -> None:
    other = ChromeProfile()
    for number in range(5):
        other.kernel(f"void training_{number}(int)", 10.0 * number, 10.0 * number + 5)
    files = [before().write(tmp_path / "a.json"), other.write(tmp_path / "b.json")]
    done = in_process("diff", *files)
    assert (done.returncode, done.stdout) == (2, "")
    assert one_sentence(done.stderr) == (
        f"{files[0]} and {files[1]} are not of the same program, so their kernels cannot be compared: of 4 and 5 "
        "kernels none is in both"
    )


def test_three_reasons_are_enough() -> None:
    reasons = ["a is not stated and 1", "b is 1 and 2", "c is not stated and 1", "d is 3 and 4", "2 ranks and 1"]
    assert some_of(reasons) == "b is 1 and 2, d is 3 and 4, 2 ranks and 1 and 2 more"
    assert some_of(reasons[:2]) == "b is 1 and 2, a is not stated and 1"
