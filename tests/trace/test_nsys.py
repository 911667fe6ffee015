"""Reading Nsight Systems' SQLite, from databases built by the documented schema: none was exported by the tool."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
import pytest

from dbo_greenlet.errors import TraceFileError
from dbo_greenlet.trace.importers import read_profile
from dbo_greenlet.trace.overlap.profile import profile_overlap
from dbo_greenlet.trace.profile import COPY, GRAPH, KERNEL
from tests.trace.profiles import COMBINE, DISPATCH, GEMM, NsysProfile


def small(path: Path) -> NsysProfile:
    made = NsysProfile(path)
    made.range("layer 3 experts", 0, 9)
    made.range("ubatch 1", 0, 9, registered=True)
    made.kernel(GEMM, 10, 20.5, launch=2)
    made.kernel(DISPATCH, 15, 40, stream=21, launch=5, node=77)
    made.call("cudaEventQuery_v3020", 6, 7)
    made.copy(8, 31, 32)
    made.copy(8, 33, 34, target=1)
    return made


def test_columns(tmp_path: Path) -> None:
    profile = read_profile(small(tmp_path / "p.sqlite").done())
    ran = profile.activities
    assert profile.source == "Nsight Systems" and profile.unit == "ns" and profile.gpus == ["NVIDIA H200"]
    assert not profile.ranks and profile.groups()[0] == [(0, 0)] and profile.missing == []
    # The first event of all, the ranges included, is at 0.
    assert ran.begin.tolist() == [10, 15, 31, 33] and ran.end.tolist() == [20.5, 40, 32, 34]
    assert [profile.names[n] for n in ran.name] == [GEMM, DISPATCH, "Memcpy DtoD", "Memcpy PtoP"]
    assert ran.kind.tolist() == [KERNEL, KERNEL, COPY, COPY]
    assert ran.stream.tolist() == [7, 21, 7, 7] and ran.graph_node.tolist() == [-1, 77, -1, -1]
    assert ran.size.tolist() == [-1, -1, 4096, 4096]
    assert [profile.names[n] for n in profile.calls.name] == ["cudaLaunchKernel_v7000"] * 2
    assert sorted(profile.names[n] for n in profile.ranges.name) == ["layer 3 experts", "ubatch 1"]


def test_nanoseconds_of_a_wall_clock_are_kept(tmp_path: Path) -> None:
    made = NsysProfile(tmp_path / "p.sqlite")
    made.kernel(GEMM, 0, 0.001)
    made.kernel(GEMM, 0.001, 0.004)
    assert np.round(read_profile(made.done()).activities.end * 1000).tolist() == [1, 4]


def test_overlap_with_layer_and_microbatch(tmp_path: Path) -> None:
    report = profile_overlap(read_profile(small(tmp_path / "p.sqlite").done()))
    assert report.kernels is not None and report.unreliable == []
    # The dispatch runs from 15 to 40, the peer copy from 33 to 34, the matrix product until 20.5.
    whole = report.kernels.measure
    assert (whole.communication, whole.compute, whole.both, whole.events) == (25.0, 10.5, 5.5, 2)
    assert [row.key for row in report.kernels.by_layer] == [3]
    assert [row.key for row in report.kernels.by_microbatch] == [1]
    assert report.libraries == {"DeepEP": 1, "copy engine": 1}


def test_several_processes_keep_their_time_lines(tmp_path: Path) -> None:
    made = NsysProfile(tmp_path / "p.sqlite")
    for process in (50, 60):
        # The same GPU number, stream and correlation ids in both, as every process counts for itself.
        made.kernel(GEMM, 10, 20, process=process)
    made.kernel(COMBINE, 12, 30, stream=21, process=50)
    made.kernel(COMBINE, 30, 40, stream=21, process=60)
    profile = read_profile(made.done())
    assert profile.groups()[0] == [(0, 0), (1, 0)]
    report = profile_overlap(profile)
    assert report.kernels is not None
    assert (report.kernels.measure.communication, report.kernels.measure.both) == (28.0, 8.0)
    assert [(row.key, row.exposed) for row in report.kernels.by_rank] == [(0, 10.0), (1, 10.0)]


def test_a_graph_in_one_piece_makes_it_unreliable(tmp_path: Path) -> None:
    made = small(tmp_path / "p.sqlite")
    made.graph(50, 90)
    profile = read_profile(made.done())
    assert profile.activities.kind.tolist()[-1] == GRAPH
    report = profile_overlap(profile)
    assert [entry.view for entry in report.unreliable] == ["kernels"]
    assert "1 graph replays are recorded in one piece" in report.unreliable[0].why
    assert "--cuda-graph-trace=node" in report.unreliable[0].why
    assert report.kernels is not None and report.kernels.measure.compute == 10.5


def test_only_graphs_is_unreliable_and_no_error(tmp_path: Path) -> None:
    made = NsysProfile(tmp_path / "p.sqlite")
    made.graph(50, 90)
    report = profile_overlap(read_profile(made.done()))
    assert report.kernels is not None and report.kernels.measure.hidden is None
    assert report.unreliable[0].view == "kernels"


def test_an_older_version_without_some_columns(tmp_path: Path) -> None:
    file = tmp_path / "p.sqlite"
    database = sqlite3.connect(file)
    database.executescript(
        "CREATE TABLE StringIds (id INTEGER, value TEXT); INSERT INTO StringIds VALUES (1, 'k'), (2, 'step');"
        "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, end INT, deviceId INT, streamId INT, correlationId INT, "
        "shortName INT); INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (1000, 3000, 0, 7, 5, 1);"
        "CREATE TABLE NVTX_EVENTS (start INT, end INT, textId INT, globalTid INT);"
        "INSERT INTO NVTX_EVENTS VALUES (500, 4000, 2, 16777216);"
    )
    database.commit()
    database.close()
    profile = read_profile(file)
    assert profile.names[profile.activities.name[0]] == "k"
    assert (profile.activities.begin[0], profile.activities.end[0]) == (0.5, 2.5)
    assert profile.missing == ["no calls of the host (launches)"] and len(profile.ranges) == 1


# -- what is refused ---------------------------------------------------------------------------------------------------


def refused(file: Path) -> str:
    with pytest.raises(TraceFileError) as error:
        read_profile(file)
    text = str(error.value)
    assert text.startswith(f"{file}: ") and "\n" not in text
    return text.removeprefix(f"{file}: ")


def test_no_gpu_events(tmp_path: Path) -> None:
    made = NsysProfile(tmp_path / "p.sqlite")
    made.call("cudaLaunchKernel_v7000", 0, 1)
    assert refused(made.done()) == "no event in it ran on a GPU; record with nsys profile --trace=cuda,nvtx"


def test_backward_events(tmp_path: Path) -> None:
    made = small(tmp_path / "p.sqlite")
    made.kernel(GEMM, 60, 50)
    assert refused(made.done()) == "1 of its events end before they begin"


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ("rocpd_kernelapi", "a database of ROCm's profiler, which is not read; profile with torch.profiler instead"),
        ("anything", "an SQLite database, but not one that Nsight Systems exported"),
    ],
)
def test_another_database(tmp_path: Path, table: str, sentence: str) -> None:
    file = tmp_path / "p.sqlite"
    database = sqlite3.connect(file)
    database.execute(f"CREATE TABLE {table} (id INTEGER)")
    database.commit()
    database.close()
    assert refused(file) == sentence


def test_a_database_that_is_cut_off(tmp_path: Path) -> None:
    made = NsysProfile(tmp_path / "p.sqlite")
    for number in range(2000):
        made.kernel(f"{GEMM}{number}", 10 * number, 10 * number + 5)
    file = made.done()
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert "the SQLite database is damaged or not whole" in refused(file)


def test_overlapping_slices_on_one_lane(tmp_path: Path) -> None:
    made = small(tmp_path / "p.sqlite")
    made.kernel(COMBINE, 50, 90, stream=21)
    made.kernel(DISPATCH, 60, 70, stream=21)
    assert "1 events overlap on one stream" in refused(made.done())
