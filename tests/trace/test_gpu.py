"""GPU times in a trace: how they are summed up and drawn, and steps that have nothing else."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo_greenlet.cli.show import show
from dbo_greenlet.errors import ConfigurationError
from dbo_greenlet.trace import (
    GpuRecord,
    GpuUse,
    HeaderRecord,
    StepRecord,
    StepTrace,
    TraceWriter,
    gpu_use,
    read_trace,
    render_gpu,
    render_step,
)


def at(
    ubatch: int, number: int, after: str, site: str, stream: str, begin: float, end: float, waited: float = 0.0
) -> GpuRecord:
    return GpuRecord(7, 0, "dbo", ubatch, number, site, stream, 1000 + begin, 1000 + end, waited, after, 6.0)


DISPATCH, COMBINE = "layer3.before_dispatch", "layer3.before_combine"
SLICES = [
    at(0, 0, "", DISPATCH, "compute", 0, 100),
    at(1, 0, "", DISPATCH, "compute", 100, 180),
    at(0, 1, DISPATCH, COMBINE, "compute", 180, 210),
    at(0, 1, DISPATCH, COMBINE, "comm", 0, 150, 100),
    at(1, 1, DISPATCH, COMBINE, "compute", 210, 420, 170),
    at(1, 1, DISPATCH, COMBINE, "comm", 150, 380, 30),
    at(0, 2, COMBINE, "layer3.combine", "compute", 420, 440),
    at(0, 2, COMBINE, "layer3.combine", "comm", 420, 500),
    at(1, 2, COMBINE, "layer3.combine", "compute", 440, 460),
    at(0, 3, "layer3.combine", "", "compute", 460, 520, 40),
    at(1, 3, "layer3.combine", "", "compute", 520, 530),
]
STEP = StepTrace("dbo", 7, 0, None, gpu=SLICES)
RECORD = StepRecord(
    7,
    0,
    "dbo",
    8,
    8,
    True,
    "split-decode",
    slices=[[0, 4, 0, 1], [4, 8, 1, 2]],
    yields=[3, 3],
    begin=965.0,
    execution="replayed",
)


def picture(text: str) -> str:
    return textwrap.dedent(text).strip("\n")


def test_what_is_in_use_at_once() -> None:
    # Compute 0-210, 380-460, 500-530; comm 100-150, 180-380, 420-500.
    assert gpu_use(SLICES) == GpuUse(length=530, compute=320, comm=330, both=120)
    assert gpu_use([]) == GpuUse(0, 0, 0, 0)
    assert gpu_use(SLICES[:1]) == GpuUse(100, 100, 0, 0)


def test_a_row_for_each_stream_and_microbatch() -> None:
    assert render_gpu(STEP, width=63) == picture("""
        on the GPU: 530.0 us, compute in use 320.0 us, comm 330.0 us,
        120.0 us of it under compute (36 %)
                  0 us                        530 us (10.0 us a column)
        compute 0 ┃A3━━━━━━━        ┃M3                     ┃━  ····┃━
        compute 1           ┃A3━━━━━   ·················┃M3━  ┃━      ┃
        comm 0    ··········┃D3━━                           ┃C3━━━━━
        comm 1                   ···┃D3━━━━━━━━━━━━━━━━━
    """)


def test_layers_choose_a_stretch_of_time_and_ascii_does_without_unicode() -> None:
    text = render_gpu(STEP, layers=[3], width=40, unicode=False)
    assert text.isascii() and text.splitlines()[3].startswith("0 us to 520 us")
    with pytest.raises(ConfigurationError, match="--layers 9: none of them is in this step, which has 3"):
        render_gpu(STEP, layers=[9])


def test_the_place_on_the_hosts_axis_is_said_with_its_error() -> None:
    step = StepTrace("dbo", 7, 0, RECORD, gpu=SLICES)
    assert render_gpu(step).splitlines()[1:3] == [
        "its events make a replay longer, the more the shorter its kernels are",
        "begins 35 us after the host began the step, +- 6 us",
    ]


def test_a_step_that_used_no_comm_stream_and_one_without_times() -> None:
    alone = StepTrace("dbo", 7, 0, None, gpu=[s for s in SLICES if s.stream == "compute"])
    assert render_gpu(alone).splitlines()[0] == (
        "on the GPU: 530.0 us, compute in use 320.0 us; no slice used the comm stream"
    )
    assert render_gpu(StepTrace("dbo", 7, 0)) == ""


def test_other_sites_name_what_they_are_after() -> None:
    step = StepTrace("x", 0, 0, None, gpu=[at(0, 0, "", "a", "compute", 0, 50), at(0, 1, "a", "", "comm", 50, 100)])
    compute, comm = render_gpu(step, width=60, unicode=False).splitlines()[-2:]
    assert compute.startswith("compute 0 |a====") and comm.endswith(" |a=======================")


def test_a_replayed_step_has_a_timetable() -> None:
    lines = render_step(StepTrace("dbo", 7, 0, RECORD, gpu=SLICES)).splitlines()
    assert lines[0] == "step 7, rank 0, run dbo: 8 tokens, 2 microbatches, 8 slices, replayed"
    assert lines[1].startswith("no slices on the host: the order is that of its slices on the GPU, with the receives")
    assert any(line.startswith("Order:") for line in lines)


def test_a_replayed_step_with_other_sites_is_listed() -> None:
    step = StepTrace("x", 0, 0, None, gpu=[at(0, 0, "", "a", "compute", 0, 50), at(0, 1, "a", "", "compute", 50, 100)])
    assert render_step(step).splitlines()[-2:] == [
        "    0  microbatch 0  slice   0  to a",
        "    1  microbatch 0  slice   1  returned",
    ]


def test_show_prints_it_and_json_carries_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.jsonl"
    with TraceWriter(path) as writer:
        writer.write(HeaderRecord("0.1.0", 0, 1), StepRecord(6, 0, "dbo", 8, 8, False, "small"), RECORD, *SLICES)
    assert read_trace(path).step(7).gpu == SLICES
    assert show([path]) == 0
    out = capsys.readouterr().out
    assert out.startswith("step 7, ") and "\n\non the GPU: 530.0 us" in out
    assert show([path], as_json=True) == 0
    printed = json.loads(capsys.readouterr().out)
    assert len(printed["gpu"]) == 11 and printed["slices"] == []
    assert GpuRecord(**printed["gpu"][5]) == SLICES[5]


times = st.floats(-1e6, 1e6)
records = st.builds(
    GpuRecord,
    step=st.just(0),
    rank=st.just(0),
    run=st.just("dbo"),
    ubatch=st.integers(0, 3),
    slice=st.integers(0, 3),
    site=st.sampled_from(["", "a", "layer1.dispatch", "layer12.combine", "layer1.before_combine"]),
    stream=st.sampled_from(["compute", "comm"]),
    begin=times,
    end=times,
    waited=st.floats(0, 1e6),
    after=st.sampled_from(["", "a", "layer1.dispatch", "layer12.combine", "layer1.before_combine"]),
)


@given(st.lists(records, min_size=1, max_size=20), st.integers(-5, 150), st.booleans())
def test_whatever_stands_in_a_trace_is_drawn_within_the_width(gpu: list[GpuRecord], width: int, unicode: bool) -> None:
    lines = render_gpu(StepTrace("x", 0, 0, None, gpu=gpu), width=width, unicode=unicode).splitlines()
    rows = lines[-len({(s.stream, s.ubatch) for s in gpu}) :]
    assert all(len(row.split(None, 2)) == 3 and len(row) <= max(width, 20) for row in rows)
    use = gpu_use(gpu)
    assert 0 <= use.both <= min(use.compute, use.comm)
