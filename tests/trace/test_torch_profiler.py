"""Reading torch.profiler's JSON: what comes out, in blocks of any size, and what is refused with which sentence."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo_greenlet.errors import TraceFileError
from dbo_greenlet.trace.importers import json_blocks, read_profile
from dbo_greenlet.trace.importers.json_blocks import JsonBlocks
from dbo_greenlet.trace.profile import COPY, KERNEL, SET, Profile, save
from tests.trace.profiles import COMBINE, DISPATCH, GEMM, ChromeProfile


def small(**options: Any) -> ChromeProfile:
    """Two compute kernels with a dispatch beside them, a copy and a set."""
    made = ChromeProfile(**options)
    made.range("attn(F)", 0, 50)
    made.kernel(GEMM, 10, 20.5, launch=2)
    made.kernel(DISPATCH, 15, 40, stream=21, launch=5)
    made.kernel(GEMM, 22, 30, launch=8, node=77)
    made.kernel("Memcpy DtoD (Device -> Device)", 31, 32, launch=11, category="gpu_memcpy", bytes=4096)
    made.kernel("Memset (Device)", 33, 34, launch=12, category="gpu_memset", bytes=64)
    made.add("cpu_op", "aten::mm", 0, 5, 4000, 100, **{"Input Dims": [[1, 2], [3, 4]]})
    made.call("cudaEventQuery", 13, 14)
    return made


@pytest.mark.parametrize(
    "args, size",
    [
        ({"In msg nelems": 1024, "dtype": "BFloat16"}, 2048),
        ({"In msg nelems": 1024, "dtype": "c10::Float"}, 4096),
        ({"In msg nelems": 0, "dtype": "Long"}, 0),
        ({"In msg nelems": 1024, "dtype": "of a later version"}, -1),
        ({"dtype": "Float"}, -1),
        ({}, -1),
    ],
)
def test_the_size_of_a_collective(tmp_path: Path, args: dict[str, Any], size: int) -> None:
    made = ChromeProfile()
    made.kernel("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 10, 20, launch=1, **args)
    assert read_profile(made.write(tmp_path / "p.json")).activities.size.tolist() == [size]


def test_columns(tmp_path: Path) -> None:
    profile = read_profile(small(rank=3).write(tmp_path / "p.json"))
    ran = profile.activities
    assert profile.source == "torch.profiler" and profile.unit == "us" and profile.gpus == ["NVIDIA H200"]
    assert profile.ranks and profile.groups()[0] == [(3, 0)] and profile.missing == [] and profile.notes == []
    assert profile.origin == 1_700_000_000_000_000
    assert [profile.names[n] for n in ran.name][:3] == [GEMM, DISPATCH, GEMM]
    assert ran.begin.tolist() == [10, 15, 22, 31, 33] and ran.end.tolist() == [20.5, 40, 30, 32, 34]
    assert ran.kind.tolist() == [KERNEL, KERNEL, KERNEL, COPY, SET]
    assert ran.stream.tolist() == [7, 21, 7, 7, 7] and set(ran.device) == {0}
    assert ran.graph_node.tolist() == [-1, -1, 77, -1, -1]
    assert ran.size.tolist() == [-1, -1, -1, 4096, 64]
    # What asks about an event puts no work on a stream.
    assert [profile.names[n] for n in profile.calls.name] == ["cudaLaunchKernel"] * 5
    assert profile.calls.correlation.tolist() == ran.correlation.tolist() == [1, 2, 3, 4, 5]
    assert [profile.names[n] for n in profile.ranges.name] == ["attn(F)"]


def same(left: Profile, right: Profile) -> None:
    assert left.names == right.names
    for table in ("activities", "calls", "ranges"):
        for name in getattr(left, table).__dataclass_fields__:
            assert np.array_equal(getattr(getattr(left, table), name), getattr(getattr(right, table), name)), name


def test_gzip_and_bare_array_are_the_same_profile(tmp_path: Path) -> None:
    made = small()
    plain = read_profile(made.write(tmp_path / "p.json"))
    same(plain, read_profile(made.write(tmp_path / "p.json.gz")))
    bare = tmp_path / "bare.json"
    bare.write_text(json.dumps(made.events))
    same(plain, read_profile(bare))


def test_keys_behind_the_events_and_a_word_like_theirs_in_front(tmp_path: Path) -> None:
    made = small()
    file = tmp_path / "p.json"
    around = {"note": '"traceEvents": [', "inner": {"traceEvents": [1]}}
    file.write_text(json.dumps({**around, "traceEvents": made.events, **made.head}))
    profile = read_profile(file)
    assert profile.gpus == ["NVIDIA H200"] and profile.ranks and profile.origin == 1_700_000_000_000_000
    same(profile, read_profile(made.write(tmp_path / "other.json")))


def test_the_order_in_the_file_does_not_matter(tmp_path: Path) -> None:
    made = small()
    expected = read_profile(made.write(tmp_path / "a.json"))
    made.events.reverse()
    turned = read_profile(made.write(tmp_path / "b.json"))
    assert turned.activities.begin.tolist() == expected.activities.begin.tolist()
    assert turned.activities.correlation.tolist() == expected.activities.correlation.tolist()


def test_the_rank_from_the_name_where_the_file_does_not_say(tmp_path: Path) -> None:
    made = small(rank=None)
    assert read_profile(made.write(tmp_path / "dp0_pp0_tp0_ep1_rank5.17.pt.trace.json")).groups()[0] == [(5, 0)]
    unnamed = read_profile(made.write(tmp_path / "host_4000.json"))
    assert not unnamed.ranks and unnamed.groups()[0] == [(0, 0)]


def test_old_categories_and_whole_microseconds_of_the_century(tmp_path: Path) -> None:
    made = ChromeProfile(base=None)
    made.kernel(GEMM, 1_700_000_000_000_010, 1_700_000_000_000_020, category="Kernel")
    made.kernel(DISPATCH, 1_700_000_000_000_015, 1_700_000_000_000_040, stream=21, category="Kernel")
    profile = read_profile(made.write(tmp_path / "p.json"))
    assert profile.activities.begin.tolist() == [0, 5]
    assert profile.missing == ["no calls of the host (launches), as the profiler's CPU activities were off"]


def test_an_event_of_another_shape_is_left_out(tmp_path: Path) -> None:
    made = small()
    made.events += [
        {"ph": "X", "cat": "kernel", "name": "no place", "ts": 50, "dur": 1, "args": {"stream": None}},
        {"ph": "X", "cat": "kernel", "name": "no time", "pid": 0, "tid": 7, "dur": 1},
        {"ph": ["X"], "name": 3},
        {"ph": "X", "cat": "kernel", "name": GEMM, "pid": 0, "tid": 7, "ts": "60.5", "args": {"bytes": [1]}},
        {"ph": "X", "cat": "kernel", "name": GEMM, "pid": 0, "tid": 7, "ts": 61, "args": {"correlation": "none"}},
        {"ph": "X", "cat": "kernel", "name": GEMM, "pid": 0, "tid": 7, "ts": 61, "args": {"stream": 1 << 64}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 0, "tid": "main", "ts": 61},
        {"ph": "X", "cat": "user_annotation", "name": "layer 3", "pid": 0, "tid": 1 << 70, "ts": 61},
        {"ph": "X", "cat": "kernel", "name": GEMM, "pid": 0, "tid": 7, "ts": "62.5", "dur": "1"},
    ]
    profile = read_profile(made.write(tmp_path / "p.json"))
    # Whatever is left out leaves the columns of the others as they are.
    whole = read_profile(small().write(tmp_path / "q.json"))
    assert profile.activities.begin.tolist() == [*whole.activities.begin, 62.5]
    assert profile.activities.stream.tolist() == [*whole.activities.stream, 7]
    assert profile.calls.correlation.tolist() == whole.calls.correlation.tolist()
    assert len(profile.ranges) == len(whole.ranges)
    assert profile.notes == ["8 events that torch.profiler cannot have written were left out."]


# -- blocks ------------------------------------------------------------------------------------------------------------

awkward = st.text(alphabet='},{ ][":\\\nx', max_size=12)
values = st.recursive(
    awkward | st.integers(0, 9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(awkward, inner, max_size=3),
)


@given(
    st.lists(st.fixed_dictionaries({"name": awkward, "args": st.dictionaries(st.sampled_from(["x", "y"]), values)})),
    st.integers(1, 200),
    st.sampled_from([None, 1]),
    st.booleans(),
)
def test_blocks_of_any_size_give_the_events(
    tmp_path_factory: pytest.TempPathFactory, events: list[Any], size: int, indent: int | None, bare: bool
) -> None:
    file = tmp_path_factory.mktemp("blocks") / "p.json"
    document = {"deviceProperties": [{"name": "},{"}], "traceEvents": events, "tail": [{"a": "b"}, {"c": {}}]}
    file.write_text(json.dumps(events if bare else document, indent=indent))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_blocks, "BLOCK_BYTES", size)
        blocks = JsonBlocks(file)
        found = [event.name for block in blocks for event in block]
    assert found == [event["name"] for event in events]
    assert blocks.bytes == file.stat().st_size
    assert bare or [device.name for device in blocks.document.deviceProperties or []] == ["},{"]


def test_blocks_are_cut_and_not_read_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = small()
    for number in range(200):
        made.range(f"range {number}", number, number + 1)
    monkeypatch.setattr(json_blocks, "BLOCK_BYTES", 4096)
    lengths = [len(block) for block in JsonBlocks(made.write(tmp_path / "p.json"))]
    assert len(lengths) > 5 and max(lengths) < 60 and sum(lengths) == len(made.events)


# -- what is refused ---------------------------------------------------------------------------------------------------


def refused(file: Path) -> str:
    with pytest.raises(TraceFileError) as error:
        read_profile(file)
    text = str(error.value)
    assert text.startswith(f"{file}: ") and "\n" not in text
    return text.removeprefix(f"{file}: ")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "the file is empty"),
        (b"  \n", "the file is empty"),
        (b"Hello", "is not JSON; give a profile of torch.profiler or Nsight Systems"),
        (b"\x7fELF\0\0\0", "is a binary file; give a profile"),
        (b'{"a": 1}', 'JSON, but no profile: it has no "traceEvents"'),
        (b'{"a": 1', "not JSON (Input data was truncated)"),
        (b'{"traceEvents": []}', "the profile holds no events"),
        (b"[]", "the profile holds no events"),
        (b'{"traceEvents": [{"ph": "X"}, {"ph": "X"', "the JSON ends in the middle"),
        (b'{"traceEvents": [{"ph": "X"}, {"ph" "X"}]}', "not JSON behind event"),
        (b'{"traceEvents": [{"ph": "X"}]} and more', "not JSON behind event"),
        (b'{"traceEvents": [{"ph": "i", "name": "nothing"}]}', "it holds nothing that torch.profiler writes"),
    ],
)
def test_no_profile(tmp_path: Path, content: bytes, sentence: str) -> None:
    file = tmp_path / "p.json"
    file.write_bytes(content)
    assert sentence in refused(file)
    zipped = tmp_path / "p.json.gz"
    zipped.write_bytes(gzip.compress(content))
    assert sentence in refused(zipped)


def test_no_such_file_and_a_folder(tmp_path: Path) -> None:
    assert refused(tmp_path / "absent.json") == "no such file"
    assert refused(tmp_path) == "this is a directory; name a file in it"


@pytest.mark.parametrize("keep", [1, 5, 15, 200, -12])
def test_cut_off_gzip(tmp_path: Path, keep: int) -> None:
    file = small().write(tmp_path / "p.json.gz")
    file.write_bytes(file.read_bytes()[:keep])
    assert refused(file) in (
        "the gzip data ends in the middle; the copy is not whole",
        "is not JSON; give a profile of torch.profiler or Nsight Systems",  # of one byte nobody can tell
    )


def test_damaged_gzip(tmp_path: Path) -> None:
    file = small().write(tmp_path / "p.json.gz")
    data = bytearray(file.read_bytes())
    data[-6] ^= 0xFF
    file.write_bytes(data)
    assert "damaged gzip data" in refused(file)
    data[12:40] = b"\xff" * 28
    file.write_bytes(data)
    assert "damaged gzip data" in refused(file)


def test_only_the_host(tmp_path: Path) -> None:
    made = ChromeProfile()
    made.range("step", 0, 10)
    made.call("cudaLaunchKernel", 1, 2)
    assert refused(made.write(tmp_path / "p.json")) == (
        "none of its 2 events ran on a GPU, it holds only what the host did; "
        "profile with ProfilerActivity.CUDA, on a machine with a GPU"
    )


@pytest.mark.parametrize(
    ("category", "process", "vendor"),
    [
        ("xpu_runtime", "python", "an Intel GPU"),
        ("x", "Ascend Hardware", "an Ascend NPU"),
        ("x", "/device:GPU:0", "TensorFlow or JAX"),
    ],
)
def test_another_vendor(tmp_path: Path, category: str, process: str, vendor: str) -> None:
    made = ChromeProfile()
    made.events.append({"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": process}})
    made.add(category, "urEnqueueKernelLaunch", 0, 5, 1, 1)
    if category == "xpu_runtime":
        made.kernel(GEMM, 1, 2)
    expected = f"a profile of {vendor}; only those of NVIDIA and AMD GPUs are read"
    assert refused(made.write(tmp_path / "p.json")) == expected


def test_an_amd_profile_is_read(tmp_path: Path) -> None:
    made = ChromeProfile()
    correlation = made.call("hipLaunchKernel", 0, 1)
    made.add("kernel", "Cijk_Alik_Bljk", 5, 5, 2, 0, device=2, stream=0, correlation=correlation)
    profile = read_profile(made.write(tmp_path / "p.json"))
    assert profile.groups()[0] == [(0, 2)] and profile.calls.correlation.tolist() == [correlation]


@pytest.mark.parametrize(("factor", "unit"), [(1000, "nanoseconds"), (0.001, "milliseconds")])
def test_other_clock_units(tmp_path: Path, factor: float, unit: str) -> None:
    sentence = f"its times are {unit}, where a profile has microseconds; convert them (ts and dur) first"
    by_clock = ChromeProfile(base=None)
    by_clock.kernel(GEMM, 1_700_000_000_000_010 * factor, 1_700_000_000_000_020 * factor)
    assert refused(by_clock.write(tmp_path / "clock.json")) == sentence
    # Relative times do not tell; a copy's bandwidth does. 64 MB in 1 ms are 64 GB/s.
    by_copies = ChromeProfile()
    for number in range(3):
        begin = 2000 * number * factor
        made = {"bytes": 64_000_000, "memory bandwidth (GB/s)": 64.0}
        by_copies.kernel("Memcpy DtoD", begin, begin + 1000 * factor, category="gpu_memcpy", **made)
    assert refused(by_copies.write(tmp_path / "copies.json")) == sentence


def test_backward_events(tmp_path: Path) -> None:
    made = small()
    made.kernel(GEMM, 60, 50)
    assert refused(made.write(tmp_path / "p.json")) == "1 of its events end before they begin"


def test_profiles_of_several_processes_in_one(tmp_path: Path) -> None:
    made = small()
    made.add("kernel", GEMM, 10, 5, 1000, 7, device=0, stream=7)
    assert "2 processes have a GPU 0 in it" in refused(made.write(tmp_path / "p.json"))


def test_overlapping_slices_on_one_lane(tmp_path: Path) -> None:
    made = small()
    made.kernel(COMBINE, 50, 90, stream=21)
    made.kernel(DISPATCH, 60, 70, stream=21)
    text = refused(made.write(tmp_path / "p.json"))
    assert text.startswith("1 events overlap on one stream, which runs one at a time (the first on stream 21: ")
    assert "were the profiles of several processes merged" in text


def test_the_same_events_twice(tmp_path: Path) -> None:
    made = small()
    made.events += made.events
    assert "overlap on one stream" in refused(made.write(tmp_path / "p.json"))


def test_a_kernel_that_begins_early_is_dependent_launch(tmp_path: Path) -> None:
    made = small()
    for begin, end in ((50, 60), (57, 70), (58, 80)):
        made.kernel(GEMM, begin, end)
    profile = read_profile(made.write(tmp_path / "p.json"))
    assert profile.notes == [
        "2 events begin before the one in front of them on their stream has ended, as kernels do with programmatic "
        "dependent launch."
    ]


def test_branches_of_a_graph_may_share_a_lane(tmp_path: Path) -> None:
    made = small()
    made.kernel(COMBINE, 50, 90, node=5)
    made.kernel(GEMM, 60, 70, node=6)
    assert read_profile(made.write(tmp_path / "p.json")).notes == []


def test_kernels_out_of_order(tmp_path: Path) -> None:
    made = small()
    made.kernel(GEMM, 80, 85, launch=40)
    made.kernel(GEMM, 70, 75, launch=50)
    text = refused(made.write(tmp_path / "p.json"))
    assert "1 events ran in another order than they were launched in, which a stream never does" in text
    assert "on stream 7, at 80 us" in text


def test_nsights_own_report_and_a_trace_of_ours(tmp_path: Path) -> None:
    report = tmp_path / "r.nsys-rep"
    report.write_bytes(b"x")
    assert f"nsys export --type sqlite {report}" in refused(report)
    own = tmp_path / "t.jsonl"
    own.write_text('{"t":"header","schema":1,"package":"1","rank":0,"world":1}\n')
    assert "a trace of dbo_greenlet already" in refused(own)


# -- imported profiles -------------------------------------------------------------------------------------------------


def test_import_and_back(tmp_path: Path) -> None:
    profile = read_profile(small().write(tmp_path / "p.json"))
    save(profile, tmp_path / "out")
    found = read_profile(tmp_path / "out")
    same(profile, found)
    assert found.notes == [f"Imported from {tmp_path / 'p.json'}."]
    assert (found.source, found.origin, found.gpus, found.ranks) == (profile.source, profile.origin, profile.gpus, True)
    assert [path.name for path in tmp_path.iterdir() if "part" in path.name] == []


def test_a_damaged_import(tmp_path: Path) -> None:
    out = tmp_path / "out"
    save(read_profile(small().write(tmp_path / "p.json")), out)
    data = out.read_bytes()
    out.write_bytes(data[: len(data) // 2])
    assert refused(out) == "the imported profile is damaged; import it again"
    np.savez(tmp_path / "foreign.npz", x=np.zeros(3))
    assert refused(tmp_path / "foreign.npz") == "a ZIP archive, but no imported profile"


def test_an_import_of_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dbo_greenlet.trace import profile as module

    out = tmp_path / "out"
    profile = read_profile(small().write(tmp_path / "p.json"))
    with monkeypatch.context() as patch:
        patch.setattr(module, "FORMAT_VERSION", 2)
        save(profile, out)
    sentence = "an imported profile of version 2, this version of dbo_greenlet reads 1; import it again"
    assert refused(out) == sentence


def test_an_output_that_cannot_be_written(tmp_path: Path) -> None:
    profile = read_profile(small().write(tmp_path / "p.json"))
    with pytest.raises(TraceFileError, match="cannot be written: no such file or directory"):
        save(profile, tmp_path / "absent" / "out")
