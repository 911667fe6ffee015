"""Overlap: hidden and exposed communication of profiles and of our own traces, idle time, and what cannot be known."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import bench_overlap
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo_greenlet.errors import TraceFileError
from dbo_greenlet.trace import (
    GpuRecord,
    HeaderRecord,
    Record,
    RecvRecord,
    SliceRecord,
    StepRecord,
    TraceWriter,
    intervals,
    step_columns,
)
from dbo_greenlet.trace.idle import idle_time
from dbo_greenlet.trace.importers import read_profile
from dbo_greenlet.trace.kernels import KernelTable
from dbo_greenlet.trace.overlap import OverlapReport, Row, apart
from dbo_greenlet.trace.overlap_profile import profile_overlap
from dbo_greenlet.trace.overlap_text import is_reliable, overlap_json, render_overlap
from dbo_greenlet.trace.overlap_trace import trace_overlap
from dbo_greenlet.trace.step_columns import read_columns
from tests.trace.profiles import (
    COMBINE,
    DISPATCH,
    FLASH,
    GEMM,
    LOW_LATENCY_COMBINE,
    LOW_LATENCY_DISPATCH,
    ChromeProfile,
)

SHARED = Path(__file__).resolve().parents[3] / "shared"
GOLDEN = SHARED / "data" / "deepseek_train_1f1b.json.gz"

needs_golden = pytest.mark.skipif(not GOLDEN.exists(), reason="needs ../shared/data/deepseek_train_1f1b.json.gz")


def report(made: ChromeProfile, tmp_path: Path, **options: Any) -> OverlapReport:
    return profile_overlap(read_profile(made.write(tmp_path / "p.json")), **options)


def row(rows: list[Row], key: str | int) -> Row:
    (found,) = [each for each in rows if each.key == key]
    return found


# -- DeepSeek's published profile --------------------------------------------------------------------------------------


@needs_golden
def test_golden() -> None:
    found = profile_overlap(read_profile(GOLDEN))
    assert found.kernels is not None and found.in_flight is None
    whole = found.kernels.measure
    assert whole.communication == 113_440 and whole.compute == 124_310 and whole.both == 109_250
    assert whole.exposed == 4_190 and whole.window == 129_012 and whole.events == 36
    assert whole.hidden is not None and round(100 * whole.hidden, 2) == 96.31
    assert found.libraries == {"DeepEP": 36}
    assert found.unreliable == [] and found.notes == [] and is_reliable(found)
    assert found.idle is not None and found.idle.total == pytest.approx(129_012 - 124_310)
    exposed = found.idle.host_exposed + found.idle.event_exposed + found.idle.other_exposed
    assert exposed == pytest.approx(4_190)
    stages = {each.key: each for each in found.kernels.by_stage}
    assert stages["dispatch"].communication + stages["combine"].communication == 113_440
    assert sum(each.events for each in stages.values()) == 36
    assert stages["attention"].compute > 40_000 and stages["experts"].compute > 60_000


@needs_golden
def test_golden_against_a_slow_count() -> None:
    """The same from the file with json and sets of microseconds (its times are whole ones)."""
    events = [e for e in json.loads(gzip.decompress(GOLDEN.read_bytes()))["traceEvents"] if e.get("cat") == "kernel"]
    busy: dict[bool, set[int]] = {True: set(), False: set()}
    for event in events:
        busy["dpsk::ep::" in event["name"]].update(range(event["ts"], event["ts"] + event["dur"]))
    found = profile_overlap(read_profile(GOLDEN)).kernels
    assert found is not None
    assert found.measure.communication == len(busy[True]) and found.measure.compute == len(busy[False])
    assert found.measure.both == len(busy[True] & busy[False])


# -- kernels -----------------------------------------------------------------------------------------------------------


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


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 60), st.integers(1, 15)), min_size=1, max_size=12))
def test_parts_add_up(kernels: list[tuple[bool, int, int]]) -> None:
    """Exposed by cause is exposed; both is never more than either; idle and compute fill the window."""
    comm = intervals.union([b for c, b, _ in kernels if c], [b + n for c, b, n in kernels if c])
    work = sorted((b, b + n) for c, b, n in kernels if not c)
    compute = intervals.union([b for b, _ in work], [e for _, e in work])
    everything = [(b, b + n) for _, b, n in kernels]
    window = intervals.span(min(b for b, _ in everything), max(e for _, e in everything))
    begin = np.array([b for b, _ in work], dtype=np.float64)
    launched = np.where(np.arange(len(begin)) % 3 == 2, np.nan, begin - 3)
    waits, graph = np.arange(len(begin)) % 2 == 1, np.arange(len(begin)) % 5 == 4
    idle = idle_time(window, compute, comm, begin, launched, waits, graph)
    assert idle.total == pytest.approx(intervals.length(window) - intervals.length(compute))
    exposed = idle.host_exposed + idle.event_exposed + idle.other_exposed + idle.unknown_exposed
    assert exposed == pytest.approx(intervals.length(intervals.difference(comm, compute)))
    assert idle.graph <= idle.other + 1e-9


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


# -- idle time and launches --------------------------------------------------------------------------------------------


def test_idle_by_cause(tmp_path: Path) -> None:
    made = ChromeProfile()
    made.kernel(GEMM, 10, 20, launch=1)
    made.kernel(DISPATCH, 20, 40, stream=21, launch=3)
    made.kernel(GEMM, 50, 60, launch=44)  # launched (and the call over) at 45: 25 host late, 5 on its way
    made.call("cudaStreamWaitEvent", 46, 47)
    made.kernel(GEMM, 70, 80, launch=48)  # in time, behind a wait
    made.kernel(GEMM, 82, 90, launch=50)  # in time, no wait since
    made.kernel(COMBINE, 90, 95, stream=21, launch=52)  # behind the last compute
    idle = report(made, tmp_path).idle
    assert idle is not None
    assert (idle.host, idle.event, idle.other, idle.unknown) == (25, 10, 5 + 2 + 5, 0)
    assert (idle.host_exposed, idle.event_exposed, idle.other_exposed) == (20, 0, 5)
    assert idle.graph == 0


def test_a_wait_counts_for_the_next_launch_onto_a_stream_by_whichever_thread(tmp_path: Path) -> None:
    made = ChromeProfile()
    made.kernel(DISPATCH, 0, 5, stream=21)
    made.call("cudaStreamWaitEvent", 1, 2, thread=101)
    made.kernel(GEMM, 10, 20, launch=3)
    made.kernel(GEMM, 30, 40, launch=7)  # the wait was for the one before
    idle = report(made, tmp_path).idle
    assert idle is not None
    assert (idle.host, idle.event, idle.other) == (4, 6, 10)


def test_launch_delay(tmp_path: Path) -> None:
    made = ChromeProfile()
    made.kernel(DISPATCH, 0, 5, stream=21)
    for number in range(100):
        made.kernel(GEMM, 10 * number + number / 10, 10 * number + 9.95, launch=10 * number)
    delay = report(made, tmp_path).launch_delay
    assert delay is not None
    assert (delay.kernels, delay.early) == (100, 0)
    assert delay.median == pytest.approx(4.95) and delay.longest == pytest.approx(9.9)
    assert delay.p95 == pytest.approx(9.405)


def test_clocks_that_differ(tmp_path: Path) -> None:
    made = ChromeProfile()
    made.kernel(DISPATCH, 0, 5, stream=21)
    made.kernel(GEMM, 10, 20, launch=30)
    found = report(made, tmp_path)
    assert {entry.view for entry in found.unreliable} == {"idle", "launch_delay"}
    assert is_reliable(found), "the GPU's own times are not touched by it"


def test_without_launches_the_cause_is_unknown(tmp_path: Path) -> None:
    made = ChromeProfile()
    made.kernel(DISPATCH, 0, 5, stream=21)
    made.kernel(GEMM, 10, 20)
    found = report(made, tmp_path)
    assert found.idle is not None and found.launch_delay is None
    assert (found.idle.unknown, found.idle.unknown_exposed, found.idle.host) == (10, 5, 0)
    assert found.unreliable[0].view == "idle"
    assert "the profile does not show the host's launches" in found.unreliable[0].why
    assert found.notes[0].startswith("Not in the profile: no calls of the host")


# -- graphs and low latency --------------------------------------------------------------------------------------------


def test_replays_without_their_kernels_are_unreliable(tmp_path: Path) -> None:
    made = ChromeProfile()
    made.call("cudaGraphLaunch", 0, 5)
    made.call("cudaGraphLaunch", 10, 15)
    made.kernel(GEMM, 20, 30, launch=18)
    found = report(made, tmp_path)
    assert not is_reliable(found)
    assert found.unreliable[0].view == "kernels"
    assert "2 of 2 graph replays have no kernels in the profile" in found.unreliable[0].why


def test_one_replay_at_the_edge_of_a_profile_is_a_note(tmp_path: Path) -> None:
    made = ChromeProfile()
    made.kernel(DISPATCH, 0, 5, stream=21)
    for number in range(200):
        made.call("cudaGraphLaunch", 10 * number, 10 * number + 1)
        if number:
            place = {"device": 0, "stream": 7, "correlation": number + 1, "graph node id": 3}
            made.add("kernel", GEMM, 10 * number + 5, 2, 0, 7, **place)
    found = report(made, tmp_path)
    assert is_reliable(found)
    assert "1 of 200 graph replays have no kernels in the profile." in found.notes


def test_replays_with_their_kernels_are_fine(tmp_path: Path) -> None:
    made = ChromeProfile()
    made.call("cudaStreamWaitEvent", 0, 1)  # before the replay; the nodes' own waits are the graph's
    correlation = made.call("cudaGraphLaunch", 2, 5)
    for name, begin, end, stream in ((GEMM, 10, 20, 7), (DISPATCH, 15, 30, 21), (GEMM, 30, 35, 7)):
        place = {"device": 0, "stream": stream, "correlation": correlation, "graph node id": begin}
        made.add("kernel", name, begin, end - begin, 0, stream, **place)
    found = report(made, tmp_path)
    assert found.unreliable == [] and found.launch_delay is None
    assert found.kernels is not None and found.kernels.measure.both == 5
    assert found.idle is not None and (found.idle.other, found.idle.graph, found.idle.host) == (10, 10, 0)
    assert "3 events ran in graph replays" in found.notes[0]


def low_latency(tmp_path: Path, *, hooks: bool = True) -> OverlapReport:
    """A send, compute while the bytes fly, a receive; dispatch and combine."""
    made = ChromeProfile()
    for begin, name in ((0, LOW_LATENCY_DISPATCH), (100, LOW_LATENCY_COMBINE)):
        made.kernel(name, begin, begin + 10, launch=begin)
        made.kernel(GEMM, begin + 10, begin + 70, launch=begin + 2)
        if hooks:
            made.kernel(name, begin + 80, begin + 90, launch=begin + 4)
    return report(made, tmp_path)


def test_low_latency_flies_while_no_kernel_runs(tmp_path: Path) -> None:
    found = low_latency(tmp_path)
    assert found.kernels is not None and found.in_flight is not None
    assert found.kernels.measure.hidden == 0.0
    assert found.unreliable[0].view == "kernels" and "bytes fly" in found.unreliable[0].why
    flight = found.in_flight.measure
    assert (flight.communication, flight.both, flight.exposed, flight.events) == (180, 120, 60, 2)
    assert [(each.key, each.communication) for each in found.in_flight.by_stage if each.events] == [
        ("dispatch", 90),
        ("combine", 90),
    ]
    assert is_reliable(found), "the view in flight sees it"


def test_low_latency_without_hooks_cannot_be_known(tmp_path: Path) -> None:
    found = low_latency(tmp_path, hooks=False)
    assert {entry.view for entry in found.unreliable} == {"kernels", "in_flight"}
    assert not is_reliable(found)


# -- text and JSON -----------------------------------------------------------------------------------------------------


def test_json_has_what_the_text_has(tmp_path: Path) -> None:
    found = low_latency(tmp_path)
    data = json.loads(json.dumps(overlap_json(found)))
    assert data["reliable"] is True and data["source"] == "torch.profiler"
    assert data["in_flight"]["hidden"] == pytest.approx(2 / 3) and data["in_flight"]["exposed"] == 60
    assert data["kernels"]["by_stage"][0]["key"] == "dispatch"
    assert data["idle"]["total"] == data["idle"]["host"] + data["idle"]["event"] + data["idle"]["other"]
    assert data["launch_delay"]["kernels"] == 6
    text = render_overlap(found)
    assert "by kernels  in flight" in text
    assert re.search(r"^hidden +0\.00 % \? +66\.67 %$", text, re.MULTILINE), "what is doubted has a question mark"
    assert "unreliable (by kernels): 4 kernels are of a low-latency all-to-all" in text
    assert all(len(line) == len(line.rstrip()) for line in text.splitlines())


# -- traces of ours ----------------------------------------------------------------------------------------------------


def write(tmp_path: Path, *records: Record) -> Path:
    file = tmp_path / "t.jsonl"
    with TraceWriter(file) as writer:
        writer.write(HeaderRecord("0.1.0", 0, 1), *records)
    return file


def hooks(step: int = 0, *, rank: int = 0, shift: float = 0.0, gpu: bool = False) -> list[Record]:
    """Two microbatches, a dispatch each: 0 sends at 8 and receives at 28, 1 sends at 18 and receives at 45."""
    sent = "layer2.dispatch"
    slices = [(0, 0, sent, 0, 10), (1, 0, sent, 10, 20), (0, 1, "", 22, 30), (1, 1, "", 40, 50)]
    records: list[Record] = [StepRecord(step, rank, "dbo", 8, 8, True, "split")]
    records += [SliceRecord(step, rank, "dbo", u, n, site, b + shift, e + shift) for u, n, site, b, e in slices]
    records += [
        RecvRecord(step, rank, "dbo", 0, "layer2.dispatch", 8 + shift, None, 28 + shift, 2, 0),
        RecvRecord(step, rank, "dbo", 1, "layer2.dispatch", 18 + shift, None, 45 + shift, 3, 1),
    ]
    if gpu:
        records += [
            GpuRecord(step, rank, "dbo", 0, 0, "layer2.dispatch", "compute", 5, 15, error=3.0),
            GpuRecord(step, rank, "dbo", 1, 0, "layer2.dispatch", "compute", 15, 25),
            GpuRecord(step, rank, "dbo", 0, 1, "", "compute", 25, 35, waited=4.0),
            GpuRecord(step, rank, "dbo", 1, 1, "", "compute", 46, 60),
        ]
    return records


def own(file: Path, **options: Any) -> OverlapReport:
    return trace_overlap(read_columns(file), **options)


def test_windows_over_the_hosts_slices(tmp_path: Path) -> None:
    found = own(write(tmp_path, *hooks()))
    assert found.kernels is None and found.in_flight is not None and found.idle is None
    whole = found.in_flight.measure
    # In flight from 8 to 45 in all; no slice from 20 to 22 and from 30 to 40.
    assert (whole.communication, whole.compute, whole.both, whole.exposed, whole.window) == (37, 38, 25, 12, 50)
    assert found.in_flight.by_microbatch == [Row(0, 20, 2, 18, 10, 1), Row(1, 27, 12, 20, 15, 1)]
    assert found.in_flight.by_layer == [Row(2, 37, 12, 20, 12, 2)]
    assert row(found.in_flight.by_stage, "dispatch") == Row("dispatch", 37, 12, 0, 0, 2)
    assert row(found.in_flight.by_stage, "attention").compute == 20
    assert [entry.view for entry in found.unreliable] == ["in_flight"] and not is_reliable(found)


def test_windows_on_the_gpus_axis(tmp_path: Path) -> None:
    found = own(write(tmp_path, *hooks(gpu=True)))
    assert found.in_flight is not None and found.kernels is not None and found.idle is not None
    # Compute from 5 to 25, 29 to 35, 46 to 60. Sent at 15 and 25, where the sending slices end on the GPU; received by
    # their owners at 29 and 46, where the slices begin that receive.
    whole = found.in_flight.measure
    assert (whole.communication, whole.compute, whole.both, whole.window) == (31, 40, 10 + 6, 55)
    assert [entry.view for entry in found.unreliable] == ["kernels", "kernels", "idle", "in_flight"]
    assert "nothing ran on the communication stream" in found.unreliable[0].why
    # 25 to 29 waited for; 35 to 46: the slice began on the host at 40, and then it took 6 to arrive.
    assert (found.idle.host, found.idle.event, found.idle.other) == (5, 4, 6)
    assert any("within 3 us" in note for note in found.notes)


def test_a_siblings_receive_ends_with_its_slice(tmp_path: Path) -> None:
    sent = "layer2.dispatch"
    file = write(
        tmp_path,
        SliceRecord(0, 0, "dbo", 0, 0, sent, 0, 1),
        SliceRecord(0, 0, "dbo", 1, 0, sent, 1, 2),
        RecvRecord(0, 0, "dbo", 0, sent, 0.9, 1, 1.9, decision=1, sent_decision=0),
        RecvRecord(0, 0, "dbo", 1, sent, 1.9, 0, 2.9, decision=7, sent_decision=1),  # ran in no slice of the trace
        GpuRecord(0, 0, "dbo", 0, 0, sent, "compute", 100, 120),
        GpuRecord(0, 0, "dbo", 1, 0, sent, "compute", 130, 170),
    )
    found = own(file)
    assert found.in_flight is not None and found.kernels is not None
    whole = found.in_flight.measure
    assert (whole.communication, whole.both, whole.events) == (50, 40, 1)
    # Both slices were launched before the GPU came to them, so nothing in them waited for the host.
    assert [entry.view for entry in found.unreliable] == ["kernels", "in_flight"]


def test_compute_that_the_host_was_still_launching(tmp_path: Path) -> None:
    def step(host_end: float) -> OverlapReport:
        return own(
            write(
                tmp_path,
                SliceRecord(0, 0, "dbo", 0, 0, "layer0.before_dispatch", 0, host_end),
                GpuRecord(0, 0, "dbo", 0, 0, "layer0.before_dispatch", "compute", 10, 110),
                GpuRecord(0, 0, "dbo", 0, 1, "", "comm", 60, 160, after="layer0.before_dispatch"),
            )
        )

    late = step(60)
    assert [entry.view for entry in late.unreliable] == ["kernels", "idle"] and not is_reliable(late)
    assert "0.050 ms of compute (50 %) are of slices that the host was still launching" in late.unreliable[0].why
    quick = step(13)
    assert quick.unreliable == [] and is_reliable(quick)
    assert any("0.003 ms of compute (3 %)" in note for note in quick.notes)
    assert not any("still launching" in note for note in step(10).notes)


def test_steps_whose_gpu_was_not_timed_are_left_out(tmp_path: Path) -> None:
    timed = own(write(tmp_path, *hooks(0, gpu=True)))
    both = own(write(tmp_path, *hooks(0, gpu=True), *hooks(1)))
    assert both.in_flight == timed.in_flight and both.kernels == timed.kernels and both.idle == timed.idle
    assert "Windows of 1 steps are left out, because the GPU's times of these were not taken." in both.notes


def test_high_throughput_by_streams(tmp_path: Path) -> None:
    def gpu(ubatch: int, number: int, site: str, *rest: Any) -> GpuRecord:
        stream, begin, end, after, waited = (*rest, "", 0.0)[:5] if len(rest) < 4 else (*rest, 0.0)[:5]
        return GpuRecord(4, 1, "dbo-graph", ubatch, number, site, stream, begin, end, waited, after)

    file = write(
        tmp_path,
        StepRecord(4, 1, "dbo-graph", 8, 8, True, "split", execution="replayed"),
        gpu(0, 0, "layer0.before_dispatch", "compute", 0, 10),
        gpu(0, 1, "layer0.before_combine", "comm", 10, 30, "layer0.before_dispatch"),
        gpu(1, 0, "layer0.before_dispatch", "compute", 10, 20),
        gpu(0, 1, "layer0.before_combine", "compute", 20, 50, "layer0.before_dispatch", 10),
        gpu(0, 2, "layer0.combine", "comm", 50, 70, "layer0.before_combine"),
        gpu(0, 2, "layer0.combine", "compute", 55, 60, "layer0.before_combine"),
    )
    found = own(file)
    assert found.kernels is not None and found.in_flight is None and found.unreliable == []
    whole = found.kernels.measure
    assert (whole.communication, whole.compute, whole.both, whole.window) == (40, 45, 15, 70)
    stages = {each.key: (each.communication, each.exposed, each.compute) for each in found.kernels.by_stage}
    assert stages == {
        "attention": (0, 0, 20),
        "dispatch": (20, 10, 0),
        "experts": (0, 0, 20),
        "combine": (20, 15, 0),
        "shared": (0, 0, 5),
    }
    # A replay has no slices on the host, so nothing there is late: 20 to 30 waited for, 50 to 55 and 60 to 70 other.
    assert found.idle is not None
    assert (found.idle.host, found.idle.event, found.idle.other, found.idle.unknown) == (0, 10, 15, 0)


def test_steps_ranks_and_runs(tmp_path: Path) -> None:
    unsplit = [
        StepRecord(0, 0, "unsplit", 8, 8, False, "reference"),
        SliceRecord(0, 0, "unsplit", 0, 0, "", 0.0, 100.0),
    ]
    # Steps at the same times on two ranks, and a second step: each on a time line of its own.
    records = [*unsplit, *hooks(0), *hooks(0, rank=1), *hooks(1, shift=0.5)]
    file = write(tmp_path, *records)
    found = own(file)
    assert found.in_flight is not None
    assert (found.in_flight.measure.communication, found.in_flight.measure.both) == (3 * 37, 3 * 25)
    assert [(each.key, each.events) for each in found.in_flight.by_rank] == [(0, 4), (1, 2)]
    assert found.notes[0] == "Run dbo, 3 steps. Others in the file: unsplit."
    one = own(file, rank=1)
    assert one.in_flight is not None and one.in_flight.measure.events == 2
    with pytest.raises(TraceFileError, match="no communication in run unsplit"):
        own(file, run="unsplit")
    with pytest.raises(TraceFileError) as error:
        own(file, run="other", rank=3)
    assert str(error.value) == (
        f"{file} has no steps of run other on rank 3; it holds the runs unsplit, dbo of the ranks 0, 1"
    )


def test_open_receives_and_a_torn_line(tmp_path: Path) -> None:
    file = write(tmp_path, *hooks(), RecvRecord(0, 0, "dbo", 1, "layer2.combine", 49.0))
    with open(file, "ab") as growing:
        growing.write(b'{"t":"slice","step":9')
    notes = own(file).notes
    assert "1 receives never were complete and are left out." in notes
    assert notes[-1].startswith("The last line is torn")


def test_unknown_kinds_and_keys_are_passed_over(tmp_path: Path) -> None:
    file = write(tmp_path, *hooks())
    plain = own(file)
    with open(file, "ab") as growing:
        growing.write(b'{"t":"weather","sky":"blue"}\n')
    assert own(file) == plain
    file.write_text(file.read_text().replace('"t":"slice"', '"t":"slice","colour":"red"'))
    assert own(file) == plain


def test_small_blocks_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, *hooks(gpu=True), *hooks(1))
    expected = own(file)
    monkeypatch.setattr(step_columns, "BLOCK_BYTES", 100)
    assert own(file) == expected


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"t":"slice","step":"one"}', 'line 9: "step" of a slice record is "one", expected int'),
        ("{nothing}", "line 9: not JSON"),
    ],
)
def test_a_wrong_record_is_named_by_the_strict_reader(tmp_path: Path, line: str, sentence: str) -> None:
    file = write(tmp_path, *hooks())
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(TraceFileError) as error:
        own(file)
    assert sentence in str(error.value) and str(error.value).startswith(str(file))


def test_a_compressed_trace(tmp_path: Path) -> None:
    file = write(tmp_path, *hooks())
    file.write_bytes(gzip.compress(file.read_bytes()))
    with pytest.raises(TraceFileError, match="a compressed trace of ours; decompress it first"):
        own(file)


def test_a_trace_without_steps_and_one_of_a_newer_schema(tmp_path: Path) -> None:
    file = write(tmp_path)
    with pytest.raises(TraceFileError, match="the trace has no steps"):
        own(file)
    file.write_text('{"t":"header","schema":2,"package":"9","rank":0,"world":1}\n')
    with pytest.raises(TraceFileError, match="schema 2, this version of dbo_greenlet reads up to 1"):
        own(file)


# -- the files that the benchmark makes --------------------------------------------------------------------------------


def test_generated_files_are_what_their_readers_read(tmp_path: Path) -> None:
    bench_overlap.write_json(tmp_path / "p.json", 300_000)
    by_json = profile_overlap(read_profile(tmp_path / "p.json"))
    assert by_json.unreliable == [] and by_json.notes == []
    assert by_json.kernels is not None and len(by_json.kernels.by_microbatch) == 2
    bench_overlap.write_nsys(tmp_path / "p.sqlite", 100)
    by_nsys = profile_overlap(read_profile(tmp_path / "p.sqlite"))
    assert by_nsys.unreliable == [] and by_nsys.libraries == {"DeepEP": 40}
    bench_overlap.write_own(tmp_path / "t.jsonl", 500)
    by_own = own(tmp_path / "t.jsonl")
    assert by_own.in_flight is not None and len(by_own.in_flight.by_layer) == bench_overlap.LAYERS
