"""Graph replays and low-latency kernels: what a profile does not show of them is told."""

from __future__ import annotations

from pathlib import Path

from dbo_greenlet.trace.overlap.text import is_reliable
from tests.trace.overlap_reports import low_latency, report
from tests.trace.profiles import DISPATCH, GEMM, ChromeProfile


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
