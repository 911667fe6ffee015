"""Profiles for viewers: tracks of ranges, calls and streams, what a kernel says, and arrows where there are edges."""

from __future__ import annotations

import io
import json
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("msgspec", reason="msgspec is not installed, so profiles are not read")
pytest.importorskip("perfetto", reason="perfetto is not installed")
from dbo_greenlet.errors import ConfigurationError, TraceFileError
from dbo_greenlet.trace.export.chrome import write_chrome
from dbo_greenlet.trace.export.open_export import open_export
from dbo_greenlet.trace.export.perfetto import write_perfetto
from dbo_greenlet.trace.importers import read_profile
from tests.trace.exported import Shown, from_chrome, from_perfetto
from tests.trace.profiles import COMBINE, DISPATCH, FLASH, GEMM, ChromeProfile, NsysProfile
from tests.trace.test_overlap_published import GOLDEN, needs_golden


def profile(*, rank: int | None = 0, base: int = 1_700_000_000_000_000_000, late: float = 0.0) -> ChromeProfile:
    made = ChromeProfile(rank=rank, base=base)
    made.range("ubatch 1 layer 4 attention", 1.0 + late, 9.0 + late)
    made.range("inner", 2.0 + late, 5.0 + late)
    made.kernel(GEMM, 10.0 + late, 20.0 + late, launch=3.0 + late)
    record = made.call("cudaEventRecord", 5.0 + late, 6.0 + late)
    wait = made.call("cudaStreamWaitEvent", 6.0 + late, 7.0 + late)
    made.add(
        "cuda_sync", "Stream Wait Event", 6.0 + late, 0.5, 0, 21, device=0, stream=21, correlation=wait,
        wait_on_stream=7, wait_on_cuda_event_record_corr_id=record,
    )  # fmt: skip
    made.kernel(DISPATCH, 21.0 + late, 30.0 + late, stream=21, launch=8.0 + late)
    made.kernel(FLASH, 20.0 + late, 25.0 + late, launch=11.0 + late)
    # Programmatic dependent launch: on the same stream before the one in front of it has ended.
    made.kernel(GEMM, 24.0 + late, 28.0 + late, launch=12.0 + late)
    made.kernel(COMBINE, 40.0 + late, 45.0 + late, stream=21, launch=31.0 + late)
    return made


def events(paths: list[Path], phase: str, **asked: Any) -> list[dict[str, Any]]:
    file = io.BytesIO()
    write_chrome(open_export(paths, **asked), file)
    return [event for event in json.loads(file.getvalue())["traceEvents"] if event["ph"] == phase]


def both(paths: list[Path], **asked: Any) -> Shown:
    """As Chrome shows it, which is as Perfetto does."""
    shown = []
    for write, read in ((write_chrome, from_chrome), (write_perfetto, from_perfetto)):
        file = io.BytesIO()
        write(open_export(paths, **asked), file)
        shown.append(read(file.getvalue()))
    assert shown[0] == shown[1]
    return shown[0]


def test_tracks_and_their_slices(tmp_path: Path) -> None:
    path = profile().write(tmp_path / "p.json")
    assert both([path]).slices == Counter(
        {
            (0, track, round((begin - 1) * 1000), round((end - 1) * 1000)): 1
            for track, begin, end in [
                ("ranges of thread 100", 1, 9),
                ("ranges of thread 100", 2, 5),
                ("calls of thread 100", 3, 4),
                ("calls of thread 100", 6, 7),
                ("calls of thread 100", 8, 9),
                ("calls of thread 100", 11, 12),
                ("calls of thread 100", 12, 13),
                ("calls of thread 100", 31, 32),
                ("stream 7", 10, 20),
                ("stream 7", 20, 25),
                ("stream 7", 24, 28),
                ("stream 21", 21, 30),
                ("stream 21", 40, 45),
            ]
        }
    )
    threads = {e["tid"]: e["args"] for e in events([path], "M") if e["name"] == "thread_name"}
    assert [args["name"] for args in threads.values()] == [
        "ranges of thread 100",
        "ranges of thread 100 (2)",
        "calls of thread 100",
        "stream 7",
        "stream 7 (2)",
        "stream 21",
    ]
    (labels,) = [e["args"]["labels"] for e in events([path], "M") if e["name"] == "process_labels"]
    assert labels == "torch.profiler, NVIDIA H200"


def test_a_kernel_says_whose_work_it_is(tmp_path: Path) -> None:
    drawn = events([profile().write(tmp_path / "p.json")], "X")
    (gemm, *_) = [e for e in drawn if e["args"].get("kernel") == GEMM]
    assert gemm["cat"] == "kernel" and gemm["name"] == GEMM
    assert gemm["args"] == {
        "kernel": GEMM,
        "stream": 7,
        "does": "compute",
        "stage": "attention",
        "layer": 4,
        "microbatch": 1,
        "correlation": 1,
    }
    (dispatch,) = [e for e in drawn if e["args"].get("kernel") == DISPATCH]
    assert dispatch["name"] == "deep_ep::internode::dispatch"
    assert (dispatch["args"]["does"], dispatch["args"]["stage"]) == ("communication", "dispatch")
    assert [e["name"] for e in drawn if e["cat"] == "range"] == ["ubatch 1 layer 4 attention", "inner"]


def test_arrows_of_launches_and_event_waits(tmp_path: Path) -> None:
    path = profile().write(tmp_path / "p.json")
    starts, ends = ({e["id"]: e for e in events([path], phase)} for phase in ("s", "f"))
    drawn = sorted((starts[n]["cat"], starts[n]["ts"] + 1, ends[n]["ts"] + 1, starts[n]["name"]) for n in starts)
    assert drawn == [
        # The wait was behind the first product only: what came later on its stream was not waited for.
        ("event", 19.999, 21.0, "deep_ep::internode::dispatch"),
        ("launch", 3.0, 10.0, GEMM),
        ("launch", 8.0, 21.0, "deep_ep::internode::dispatch"),
        ("launch", 11.0, 20.0, "flash::compute_attn_ws"),
        ("launch", 12.0, 24.0, GEMM),
        ("launch", 31.0, 40.0, "deep_ep::internode::combine"),
    ]


def test_a_graph_launch_points_at_its_first_kernel(tmp_path: Path) -> None:
    made = ChromeProfile()
    launch = made.call("cudaGraphLaunch", 1.0, 2.0)
    for node, begin in ((11, 6.0), (10, 5.0)):
        made.add(
            "kernel", GEMM, begin, 1.0, 0, 7, device=0, stream=7, correlation=launch, **{"graph node id": node}
        )  # fmt: skip
    path = made.write(tmp_path / "p.json")
    (end,) = events([path], "f")
    assert end["ts"] == 4.0
    assert [e["args"]["graph node"] for e in events([path], "X") if e["cat"] == "kernel"] == [10, 11]


def test_ranks_of_several_files_lie_on_one_axis(tmp_path: Path) -> None:
    """The second clock reads 1000 us less; no rank leaves an all-to-all before the other has come to it."""
    paths = [profile().write(tmp_path / "a.json"), profile(rank=1, late=-1000.0).write(tmp_path / "b.json")]
    model = open_export(paths)
    items = list(model)
    assert items and model.offsets.keys() == {0, 1} and len(model.axis_text()) >= 1
    shown = both(paths)
    for rank in (0, 1):
        mine = {(track, begin, end) for r, track, begin, end in shown.slices if r == rank}
        assert ("stream 21", 39_000, 44_000) in mine, mine
    # One rank alone keeps the place that it has beside the other one.
    assert {r for r, *_ in both(paths, rank=1).slices} == {1}
    with pytest.raises(TraceFileError, match="nothing to export of rank 5; there is 0, 1"):
        list(open_export(paths, rank=5))


def test_files_that_do_not_say_their_rank_are_processes(tmp_path: Path) -> None:
    paths = [profile(rank=None).write(tmp_path / name) for name in ("a.json", "b.json")]
    names = [e["args"]["name"] for e in events(paths, "M") if e["name"] == "process_name"]
    assert names == ["process 0 (a.json)", "process 1 (b.json)"]


def test_nsight_systems(tmp_path: Path) -> None:
    made = NsysProfile(tmp_path / "p.sqlite")
    made.kernel(GEMM, 10.0, 20.0, launch=1.0, device=0)
    made.kernel(DISPATCH, 12.0, 30.0, launch=2.0, device=1)
    made.copy(1, 31.0, 32.0)
    paths = [made.done()]
    threads = {e["tid"]: e["args"]["name"] for e in events(paths, "M") if e["name"] == "thread_name"}
    drawn = [(threads[e["tid"]], e["name"], e["cat"], e["ts"], e["dur"]) for e in events(paths, "X")]
    assert drawn[2:] == [
        ("GPU 0, stream 7", GEMM, "kernel", 9.0, 10.0),
        ("GPU 0, stream 7", "Memcpy HtoD", "copy", 30.0, 1.0),
        ("GPU 1, stream 7", "deep_ep::internode::dispatch", "kernel", 11.0, 18.0),
    ]
    (copy,) = [e for e in events(paths, "X") if e["cat"] == "copy"]
    assert copy["args"]["bytes"] == 4096
    assert len(events(paths, "s")) == 2


def test_what_cannot_be_asked_of_a_profile(tmp_path: Path) -> None:
    path = profile().write(tmp_path / "p.json")
    for asked in ({"run": "dbo"}, {"steps": range(3)}):
        with pytest.raises(ConfigurationError, match="is a profile; --run and --steps choose from a trace of ours"):
            open_export([path], **asked)


def test_a_rank_that_is_none_does_not_meet_the_tracks(tmp_path: Path) -> None:
    path = profile(rank=1_000_000).write(tmp_path / "p.json")
    assert {e["pid"] for e in events([path], "X")} == {1}


def test_rounding_opens_no_lane(tmp_path: Path) -> None:
    """Between two nanoseconds, an end and the begin that is the same time may be rounded apart."""
    made = ChromeProfile()
    begin, length = Decimal(0), Decimal("1.0305")
    for _ in range(2000):
        made.add("kernel", GEMM, float(begin), float(length), 0, 7, device=0, stream=7)
        begin += length
    path = made.write(tmp_path / "p.json")
    assert {e["args"]["name"] for e in events([path], "M") if e["name"] == "thread_name"} == {"stream 7"}
    assert len(both([path]).slices) == 2000


thousandths = st.integers(0, 5_000)
lengths = st.integers(0, 40) | st.integers(0, 3_000)


@settings(
    max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
@given(
    ranges=st.lists(st.tuples(thousandths, lengths, st.integers(1, 2)), max_size=12),
    gaps=st.lists(
        st.tuples(st.integers(-300, 500), st.integers(400, 3_000), st.integers(0, 1)), min_size=1, max_size=12
    ),
)
def test_everything_arrives_once(
    tmp_path: Path, ranges: list[tuple[int, int, int]], gaps: list[tuple[int, int, int]]
) -> None:
    """Ranges as no program nests them, and kernels that begin before the one in front of them has ended."""
    made = ChromeProfile()
    wanted: Counter[tuple[int, str, int, int]] = Counter()
    for begin, length, thread in ranges:
        made.range("inner", begin / 1000, (begin + length) / 1000, thread=thread)
        wanted[0, f"ranges of thread {thread}", begin, begin + length] += 1
    now = {0: 6_000, 1: 6_000}
    for number, (gap, length, stream) in enumerate(gaps):
        begin = now[stream] + gap
        now[stream] = begin + length
        launch = 10 * number
        made.kernel(DISPATCH, begin / 1000, now[stream] / 1000, stream=stream, launch=launch / 1000, thread=3)
        wanted[0, f"stream {stream}", begin, now[stream]] += 1
        wanted[0, "calls of thread 3", launch, launch + 1000] += 1
    zero = min(begin for _, _, begin, _ in wanted)
    shown = both([made.write(tmp_path / "p.json")])
    assert shown.slices == Counter({(*key[:2], key[2] - zero, key[3] - zero): n for key, n in wanted.items()})
    assert shown.flows.total() == len(gaps)


@needs_golden
def test_the_published_profile_arrives_whole() -> None:
    shown = both([GOLDEN])
    read = read_profile(GOLDEN)
    assert shown.slices.total() == len(read.activities) + len(read.calls) + len(read.ranges)
    streams = Counter(track for _, track, _, _ in shown.slices.elements() if track.startswith("stream"))
    assert streams == Counter(f"stream {stream}" for stream in read.activities.stream.tolist())
    assert shown.flows.total() == len(read.activities), "each kernel, copy and set has its launch"
