"""Overlap by kernels: what counts as communication, and its parts by stage, layer, microbatch and GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo_greenlet.errors import TraceFileError
from dbo_greenlet.trace import intervals
from dbo_greenlet.trace.kernels import KernelTable
from dbo_greenlet.trace.overlap.report import Row, apart
from tests.trace.overlap_reports import report, row
from tests.trace.profiles import COMBINE, DISPATCH, FLASH, GEMM, ChromeProfile


def test_by_stage_layer_and_microbatch(tmp_path: Path) -> None:
    made = ChromeProfile()
    made.range("ubatch 0", 0, 9)
    made.range("layer3.attention", 0, 4)
    made.kernel(GEMM, 10, 30, launch=1)  # a matrix product is of the stage that launches it
    made.range("layer3.dispatch", 4, 9)
    made.kernel(DISPATCH, 30, 50, stream=21, launch=5)
    made.range("ubatch 1", 10, 29)
    made.range("layer 4 experts", 10, 20)
    made.kernel(GEMM, 35, 45, launch=11)
    made.range("layer 4", 20, 29)
    made.kernel(COMBINE, 60, 65, stream=21, launch=21)
    made.kernel(FLASH, 70, 80, launch=30)  # outside of every range: by its name
    found = report(made, tmp_path).kernels
    assert found is not None
    whole = found.measure
    assert (whole.communication, whole.compute, whole.both, whole.exposed, whole.window) == (25, 40, 10, 15, 70)
    assert [each.key for each in found.by_stage] == ["attention", "dispatch", "experts", "combine"]
    assert row(found.by_stage, "attention") == Row("attention", 0, 0, 30, 0, 0)
    assert row(found.by_stage, "dispatch") == Row("dispatch", 20, 10, 0, 0, 1)
    assert row(found.by_stage, "experts") == Row("experts", 0, 0, 10, 10, 0)
    assert row(found.by_stage, "combine") == Row("combine", 5, 5, 0, 0, 1)
    assert found.by_layer == [Row(3, 20, 10, 20, 0, 1), Row(4, 5, 5, 10, 10, 1)]
    assert found.by_microbatch == [Row(0, 20, 10, 20, 0, 1), Row(1, 5, 5, 10, 10, 1)]
    assert found.by_rank == []


def test_the_innermost_range_decides_but_not_over_a_communications_name(tmp_path: Path) -> None:
    made = ChromeProfile()
    made.range("ubatch 1 layer 2 experts", 0, 20)
    made.range("layer 3 attention", 2, 10)
    made.kernel(GEMM, 30, 40, launch=3)
    made.kernel(COMBINE, 40, 50, stream=21, launch=5)
    made.kernel(GEMM, 50, 60, launch=12)
    found = report(made, tmp_path).kernels
    assert found is not None
    stages = {each.key: (each.communication, each.compute) for each in found.by_stage}
    assert stages == {"attention": (0, 10), "experts": (0, 10), "combine": (10, 0)}
    assert [(each.key, each.compute) for each in found.by_layer] == [(2, 10), (3, 10)]
    assert [each.key for each in found.by_microbatch] == [1], "what the inner one does not say, the outer one does"


def test_ranges_of_another_thread_say_nothing(tmp_path: Path) -> None:
    made = ChromeProfile()
    made.range("layer 3", 0, 100, thread=1)
    made.range("layer 4", 0, 100, thread=2)
    made.kernel(DISPATCH, 10, 20, launch=1, thread=2)
    found = report(made, tmp_path).kernels
    assert found is not None and [each.key for each in found.by_layer] == [4]


def test_copies_are_neither_but_peer_copies_are_communication(tmp_path: Path) -> None:
    made = ChromeProfile()
    made.kernel(GEMM, 0, 10)
    made.kernel("Memcpy PtoP (Device -> Device)", 5, 25, stream=21, category="gpu_memcpy")
    made.kernel("Memcpy DtoD (Device -> Device)", 12, 20, category="gpu_memcpy")
    found = report(made, tmp_path).kernels
    assert found is not None
    assert (found.measure.communication, found.measure.compute, found.measure.both) == (20, 10, 5)


def test_every_gpu_has_its_own_time_line(tmp_path: Path) -> None:
    made = ChromeProfile()
    made.kernel(GEMM, 0, 10, device=0)
    made.kernel(DISPATCH, 0, 10, device=1)  # of another GPU: nothing on its own hides it
    made.kernel(GEMM, 10, 30, device=1)
    found = report(made, tmp_path).kernels
    assert found is not None
    assert (found.measure.communication, found.measure.both, found.measure.window) == (10, 0, 40)
    assert found.by_rank == [Row(0, 0, 0, 10, 0, 0), Row(1, 10, 10, 20, 0, 1)]


def test_a_users_table(tmp_path: Path) -> None:
    made = ChromeProfile()
    made.kernel(GEMM, 0, 10)
    made.kernel("acme_send<1>", 5, 10, stream=21)
    file = tmp_path / "mine.toml"
    file.write_text("[[kernel]]\npattern = 'acme_send'\nkind = 'communication'\n")
    found = report(made, tmp_path, table=KernelTable(file))
    assert found.kernels is not None and found.kernels.measure.both == 5
    assert found.libraries == {"other": 1}


def test_no_communication(tmp_path: Path) -> None:
    made = ChromeProfile()
    made.kernel(GEMM, 0, 10)
    with pytest.raises(TraceFileError) as error:
        report(made, tmp_path)
    assert str(error.value) == (
        f"{tmp_path / 'p.json'}: no communication in it: none of its kernels is known as one; "
        "name yours in a TOML file (--kernels FILE)"
    )
    made.kernel("acme_all_to_all", 20, 30)
    with pytest.raises(TraceFileError, match="though the name of acme_all_to_all looks like it"):
        report(made, tmp_path)


def test_doubtful_and_fused_kernels_are_named(tmp_path: Path) -> None:
    made = ChromeProfile()
    made.kernel(DISPATCH, 0, 10)
    made.kernel("acme_all_to_all", 20, 30)
    made.kernel("sm100_fp8_mega_moe_impl<1>", 40, 50)
    notes = "\n".join(report(made, tmp_path).notes)
    assert "looks like communication: acme_all_to_all" in notes
    assert "1 kernels compute and communicate in one" in notes


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-20, 20), st.integers(0, 9)), min_size=1, max_size=12))
def test_time_lines_side_by_side(items: list[tuple[int, int, int]]) -> None:
    numbers = {group: number for number, group in enumerate(sorted({group for group, _, _ in items}))}
    group = np.array([numbers[group] for group, _, _ in items])
    begin = np.array([begin for _, begin, _ in items], dtype=np.float64)
    end = begin + np.array([length for _, _, length in items])
    shift, window = apart(group, begin, end)
    slow = 0.0
    for number in range(len(numbers)):
        mine = group == number
        assert len(set(shift[mine])) == 1
        slow += end[mine].max() - begin[mine].min()
    assert intervals.length(window) == slow
    moved = intervals.union(begin + shift, end + shift)
    assert intervals.length(moved) == sum(
        intervals.length(intervals.union(begin[group == n], end[group == n])) for n in range(len(numbers))
    )
    assert intervals.cover(window)(moved) == intervals.length(moved)
