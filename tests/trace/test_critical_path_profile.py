"""The paths of profiles: by hand, of a virtual device's run again with shorter kernels, and of DeepSeek's profile."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("msgspec", reason="msgspec is not installed")
from dbo_greenlet.errors import TraceFileError
from dbo_greenlet.policies import InTurn
from dbo_greenlet.policy import RoundRobin
from dbo_greenlet.testing.layer_programs import Costs
from dbo_greenlet.trace.critical_path import activities as critical_path_activities
from dbo_greenlet.trace.critical_path.graph import CERTAIN, Edge, PathGraph
from dbo_greenlet.trace.critical_path.profile import ProfilePaths, profile_path
from dbo_greenlet.trace.critical_path.report import PathReport, StepPath
from dbo_greenlet.trace.importers import read_profile
from dbo_greenlet.trace.kernels import KernelTable
from tests.trace.profiles import COMBINE, DISPATCH, FLASH, GEMM, LOW_LATENCY_DISPATCH, ChromeProfile, NsysProfile
from tests.trace.test_overlap_published import GOLDEN, needs_golden
from tests.trace.virtual_steps import STAGES, VirtualStep, shorter

NOTIFY = "void deep_ep::intranode::notify_dispatch<8>(int const*, int*)"


def found(made: ChromeProfile, path: Path, **settings: Any) -> PathReport:
    return profile_path(read_profile(made.write(path / "p.json")), **settings)


def pieces(path: StepPath) -> list[tuple[float, float, str, str, tuple[str, ...]]]:
    return [(p.begin - path.begin, p.length, p.stage, p.kind, p.by) for p in path.pieces]


def gains(path: StepPath, stage: str) -> list[tuple[float, float]]:
    (row,) = (row for row in path.stages if row.stage == stage)
    return [(gain.least, gain.most) for gain in row.gains]


def test_launches_streams_and_a_wait_by_hand(tmp_path: Path) -> None:
    """Attention, its dispatch beside a second kernel, and what waits for both."""
    made = ChromeProfile()
    made.kernel(FLASH, 10, 40, launch=4)
    made.call("cudaStreamWaitEvent", 8, 9)
    made.kernel(DISPATCH, 41, 81, stream=21, launch=10)
    made.kernel(FLASH, 41, 61, launch=14)
    made.call("cudaStreamWaitEvent", 17, 18)
    made.kernel(GEMM, 82, 92, launch=20)
    report = found(made, tmp_path, percent=(50, 100))
    path = report.shown
    assert path.length == 88 and pieces(path)[0][:4] == (0, 6, "launch", "launch")
    assert pieces(path)[1:] == [
        (6, 30, "attention", "work", ()),
        (36, 1, "idle", "event", ()),
        (37, 40, "dispatch", "work", ()),
        (77, 1, "idle", "event", ()),
        (78, 10, "other", "work", ()),
    ]
    # 20 us of attention and a gap hide a part of the dispatch; the first attention is on the path as a whole.
    assert gains(path, "dispatch") == [(20, 20), (20, 20)]
    # Without it the dispatch could begin no sooner than 6 us behind its launch at 10, the shortest way there is here.
    assert gains(path, "attention") == [(15, 15), (41 - 16, 41 - 16)]
    assert gains(path, "other") == [(5, 5), (10, 10)]
    assert report.unreliable == []
    assert any("2 are taken to have waited for what ended last" in note for note in report.notes)
    assert {
        name: [(begin - path.begin, end - path.begin) for begin, end in spans] for name, spans in report.lanes.items()
    } == {
        "stream 7": [(6, 36), (37, 57), (78, 88)],
        "stream 21": [(37, 77)],
    }


def with_counts(wait: float) -> ChromeProfile:
    """The host launches what counts, looks at memory until that is done, and launches the dispatch."""
    made = ChromeProfile()
    made.kernel(GEMM, 5, 105, launch=0)
    made.kernel(NOTIFY, 6, 106, stream=21, launch=3)
    made.kernel(DISPATCH, 112 + wait, 150 + wait, stream=21, launch=107 + wait)
    return made


def test_a_host_that_looks_at_memory_has_waited_for_the_counts(tmp_path: Path) -> None:
    path = found(with_counts(0), tmp_path).shown
    assert [(stage, kind) for _, _, stage, kind, _ in pieces(path)][-4:] == [
        ("dispatch", "work"),
        ("host", "host wait"),
        ("launch", "launch"),
        ("dispatch", "work"),
    ]
    # Much later it was doing something else.
    path = found(with_counts(500), tmp_path).shown
    assert "host wait" not in path.links and path.length == 650


def test_a_synchronisation_waits_for_what_had_ended_and_what_comes_next_for_it(tmp_path: Path) -> None:
    made = ChromeProfile()
    made.kernel(GEMM, 10, 100, launch=2)
    made.call("cudaDeviceSynchronize", 5, 103)
    made.kernel(FLASH, 120, 150, launch=113)
    path = found(made, tmp_path, percent=(100,)).shown
    assert [(length, stage, kind) for _, length, stage, kind, _ in pieces(path)] == [
        (8, "launch", "launch"),
        (90, "other", "work"),
        (3, "host", "host wait"),
        (10, "host", "host"),
        (7, "launch", "launch"),
        (30, "attention", "work"),
    ]
    # Without the kernel the call would return at once: 103 is where it stands because of it.
    assert gains(path, "other") == [(90, 90)] and gains(path, "host") == [(13, 13)]


def test_a_blocking_copy_holds_up_the_host_and_a_slow_launch_is_none(tmp_path: Path) -> None:
    made = ChromeProfile()
    made.kernel(GEMM, 4, 8, launch=None)
    call = made.call("cudaLaunchKernel", 0, 50)
    made.events[-2]["args"]["correlation"] = call
    copy = made.call("cudaMemcpyAsync", 60, 90)
    made.add("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 64, 20, 0, 7, device=0, stream=7, correlation=copy)
    made.kernel(FLASH, 104, 110, launch=100)
    path = found(made, tmp_path).shown
    assert [(length, stage, kind) for _, length, stage, kind, _ in pieces(path)] == [
        (60, "host", "host"),
        (4, "launch", "launch"),
        (20, "copy", "work"),
        (6, "host", "host wait"),
        (10, "host", "host"),
        (4, "launch", "launch"),
        (6, "attention", "work"),
    ]


def test_a_profile_without_the_host_is_unreliable_and_has_a_path(tmp_path: Path) -> None:
    made = ChromeProfile()
    made.kernel(FLASH, 10, 40)
    made.kernel(GEMM, 50, 60)
    report = found(made, tmp_path, percent=(100,))
    assert [(length, stage) for _, length, stage, _, _ in pieces(report.shown)] == [
        (30, "attention"), (10, "idle"), (10, "other"),
    ]  # fmt: skip
    assert report.unreliable == [
        "the profile does not show the host's launches, so whether the host held up the GPU is not known"
    ]


def test_a_thread_that_stands_still_waits_for_the_other_one(tmp_path: Path) -> None:
    """Backward: autograd's thread launches, the main one goes on when it is done."""
    made = ChromeProfile()
    made.kernel(GEMM, 5, 10, launch=0, thread=1)
    for at in (20, 60, 100, 140):
        made.kernel(GEMM, at + 5, at + 10, launch=at, thread=2)
    made.kernel(FLASH, 165, 200, launch=160, thread=1)
    path = found(made, tmp_path).shown
    assert path.links["thread"] == 2 and path.length == 200
    assert {p.lane for p in path.pieces if p.stage == "host"} == {"thread 1", "thread 2"}


def test_what_a_low_latency_receive_waits_for_is_left_open(tmp_path: Path) -> None:
    """The second launch takes 60 us: it works, or it waits for what the first one sent."""
    made = ChromeProfile()
    made.kernel(LOW_LATENCY_DISPATCH, 10, 20, launch=1)
    made.kernel(FLASH, 20, 50, launch=3)
    made.kernel(LOW_LATENCY_DISPATCH, 50, 110, launch=5)
    path = found(made, tmp_path, percent=(100,)).shown
    last = path.pieces[-1]
    assert (last.stage, last.uncertain, last.instead) == ("dispatch", True, (f"in flight: {last.what}",))
    # If the flight is what it waits for, shorter attention changes nothing.
    assert gains(path, "attention") == [(0, 30)]


def test_steps_that_ranges_name_are_measured_one_by_one(tmp_path: Path) -> None:
    made = ChromeProfile()
    for step, at in ((7, 0), (8, 100)):
        made.range(f"ProfilerStep#{step}", at, at + 100)
        made.kernel(GEMM, at + 10, at + 110, launch=at + 1)
    report = found(made, tmp_path)
    assert report.what == "2 steps on one GPU"
    # The second one's kernel comes behind the first one's, which is still running when it begins.
    assert [(step.step, step.length) for step in report.steps] == [(7, 110), (8, 110)]
    only = found(made, tmp_path, step=8)
    assert [(length, stage) for _, length, stage, _, _ in pieces(only.shown)] == [(10, "step before"), (100, "other")]
    with pytest.raises(TraceFileError, match=r"p.json has no step 9; its ranges name 7, 8"):
        found(made, tmp_path, step=9)


def test_graph_replays_that_cannot_be_seen_make_it_unreliable(tmp_path: Path) -> None:
    made = ChromeProfile()
    made.kernel(GEMM, 10, 20, launch=1)
    made.call("cudaGraphLaunch", 3, 4)
    (why,) = found(made, tmp_path).unreliable
    assert why.startswith("1 of 1 graph replays have no kernels in the profile, so the path goes past what ran in them")
    nsys = NsysProfile(tmp_path / "n.sqlite")
    nsys.kernel(GEMM, 0, 10, launch=0)
    nsys.graph(10, 50)
    report = profile_path(read_profile(nsys.done()))
    assert report.unreliable[0].startswith("1 graph replays are recorded in one piece")


def test_kernels_of_a_graph_come_behind_its_launch_and_one_another(tmp_path: Path) -> None:
    made = ChromeProfile()
    launch = made.call("cudaGraphLaunch", 5, 8)
    for name, begin, end, stream in ((FLASH, 10, 30, 7), (DISPATCH, 31, 61, 21), (GEMM, 62, 70, 7)):
        made.add("kernel", name, begin, end - begin, 0, stream, device=0, stream=stream, correlation=launch,
                 **{"graph node id": stream})  # fmt: skip
    report = found(made, tmp_path, percent=(100,))
    assert [stage for _, _, stage, _, _ in pieces(report.shown)] == [
        "launch", "attention", "idle", "dispatch", "idle", "other",
    ]  # fmt: skip
    assert report.unreliable == [] and any("3 events ran in graph replays" in note for note in report.notes)


def test_two_gpus_have_a_path_each(tmp_path: Path) -> None:
    made = ChromeProfile()
    made.kernel(GEMM, 10, 20, launch=1)
    made.kernel(COMBINE, 10, 60, device=1, stream=9, launch=3)
    report = found(made, tmp_path)
    assert [(step.run, step.length) for step in report.steps] == [("GPU 0", 19), ("GPU 1", 57)]
    assert report.what == "step 0 on 2 GPUs" and report.shown.run == "GPU 1"


# -- a virtual device as the profiler ----------------------------------------------------------------------------------

TABLE = """
[[kernel]]
pattern = '^A[01]$'
kind = "compute"
stage = "attention"
[[kernel]]
pattern = '^(D|counts)$'
kind = "communication"
stage = "dispatch"
[[kernel]]
pattern = '^MLP$'
kind = "compute"
stage = "experts"
[[kernel]]
pattern = '^C$'
kind = "communication"
stage = "combine"
[[kernel]]
pattern = '^S$'
kind = "compute"
stage = "shared"
"""


def profiled(step: VirtualStep, launch: float) -> ChromeProfile:
    """The profile that torch.profiler makes of it when it is asked for the waits of streams."""
    made = ChromeProfile(base=None)
    streams = {"compute": 7, "comm": 21}
    records: dict[int, int] = {}
    host = 0.0
    for each in step.device.program.operations:
        if each.kind == "host_wait":
            made.call("cudaDeviceSynchronize", each.begin, each.end)
            continue
        stream = streams[each.stream or ""]
        if each.kind == "work":
            made.kernel(each.name, each.begin or 0.0, each.end or 0.0, stream=stream, launch=host)
            host += launch
        elif each.kind == "record":
            records[each.number] = made.call("cudaEventRecord", host, host)
        else:
            made.call("cudaStreamWaitEvent", host, host)
            of = step.device.program.operations[each.of or 0]
            made.add("cuda_sync", "Stream Wait Event", host, 0.0, 0, stream, stream=stream, device=0,
                     wait_on_stream=streams[of.stream or ""],
                     wait_on_cuda_event_record_corr_id=records[each.of or 0])  # fmt: skip
    return made


HALVES = st.integers(1, 40).map(lambda half: 2.0 * half)
LAYER_COSTS = st.builds(
    Costs, a0=HALVES, a1=HALVES, dispatch=HALVES, mlp=HALVES, combine=HALVES, shared=HALVES, out=HALVES
)


@settings(max_examples=40)
@given(LAYER_COSTS, st.sampled_from([RoundRobin, InTurn]), st.sampled_from(sorted(set(STAGES) - {"other"})))
def test_a_profile_that_has_the_waits_says_exactly_what_shorter_kernels_give(
    costs: Costs, policy: Any, stage: str
) -> None:
    step = VirtualStep("HT", 2, costs, policy(), launch=1.0, host_waits=False)
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "table.toml"
        table.write_text(TABLE)
        file = profiled(step, 1.0).write(Path(folder) / "p.json")
        report = profile_path(read_profile(file), KernelTable(table), percent=(50,))
    assert report.shown.length == step.length
    again = VirtualStep("HT", 2, shorter(costs, {stage: 0.5}), policy(), launch=1.0, host_waits=False)
    assert gains(report.shown, stage) == [(step.length - again.length, step.length - again.length)]


# -- DeepSeek's --------------------------------------------------------------------------------------------------------


class Logged(PathGraph):
    """Keeps what it was given."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.given: list[tuple[float | None, Sequence[Edge]]] = []

    def point(self, at: float | None, edges: Sequence[Edge]) -> int:
        self.given.append((at, edges))
        return super().point(at, edges)


@needs_golden
def test_golden(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek's 1F1B pair, whose communication is hidden by 96.31 %: without any of it little would be gained."""
    report = profile_path(read_profile(GOLDEN))
    path = report.shown
    assert report.unreliable == [] and path.step == 1 and path.contradictions == 0
    # From the first launch to the return of the synchronisation behind the last kernel; the GPU's window is 129,012.
    assert path.length == 129_043
    rows = {row.stage: row for row in path.stages}
    assert sum(row.on_path for row in path.stages if row.stage != "communication") == pytest.approx(129_043)
    assert rows["communication"].on_path == rows["dispatch"].on_path + rows["combine"].on_path
    # What is exposed is 4,190 us; hidden communication on the path is replaced by the compute that hides it.
    assert 0 < rows["communication"].gains[-1].least <= rows["communication"].gains[-1].most < 4_190
    assert rows["communication"].on_path > 5 * rows["communication"].gains[-1].most
    assert rows["attention"].on_path > 30_000 and rows["experts"].on_path > 50_000
    for row in path.stages:
        assert all(0 <= gain.least <= gain.most <= row.on_path + 1e-6 for gain in row.gains)
    assert any(note.startswith("4 times the host is taken to have waited for the counts") for note in report.notes)


@needs_golden
def test_golden_against_networkx(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest path of the same certain edges, by somebody else's program."""
    networkx = pytest.importorskip("networkx", reason="networkx is not installed")
    monkeypatch.setattr(critical_path_activities, "PathGraph", Logged)
    (made,) = ProfilePaths(read_profile(GOLDEN))
    graph: Any = made.graph
    for shortest in (0.0, 0.5):
        model = networkx.DiGraph()
        for number, (at, edges) in enumerate(graph.given, 1):
            certain = [edge for edge in edges if edge.role == CERTAIN]
            lags = {}
            for edge in certain:
                room = at - graph.at[edge.source]
                lags[edge] = room if edge.lag is None else min(edge.lag, room)
            late = max(certain, key=lambda edge: graph.at[edge.source] + lags[edge])
            for edge, lag in lags.items():
                idle = at - graph.at[edge.source] - lag if edge is late else 0.0
                left = lag * (1 - shortest if edge.stage == "experts" else 1) + idle
                known = model.get_edge_data(edge.source, number, {"weight": -1.0})["weight"]
                model.add_edge(edge.source, number, weight=max(known, left))
        length = networkx.dag_longest_path_length(model)
        (earliest,), _ = graph.shortened([{"experts": shortest}], made.end)
        assert earliest - graph.at[0] == pytest.approx(length)
