"""Streams that wait for events, as profilers write them when they are asked to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("msgspec", reason="msgspec is not installed")
from dbo_greenlet.trace.importers import read_profile
from dbo_greenlet.trace.profile import Profile, load, save
from tests.trace.profiles import GEMM, ChromeProfile, NsysProfile

COLUMNS = ("device", "stream", "on_stream", "correlation", "record_correlation")


def rows(profile: Profile) -> list[tuple[int, ...]]:
    return [tuple(int(getattr(profile.waits, name)[n]) for name in COLUMNS) for n in range(len(profile.waits))]


def torch_profile(path: Path) -> Path:
    made = ChromeProfile(rank=3)
    made.kernel(GEMM, 10.0, 20.0, launch=1.0)
    record = made.call("cudaEventRecord", 4.0, 5.0)
    wait = made.call("cudaStreamWaitEvent", 6.0, 7.0)
    event = {"stream": 21, "device": 0, "correlation": wait, "wait_on_stream": 7, "wait_on_cuda_event_id": 5}
    made.add("cuda_sync", "Stream Wait Event", 6.25, 0.5, 0, 21, wait_on_cuda_event_record_corr_id=record, **event)
    # What waits on the host is no stream that waits, and of an old wait nobody knows the record.
    made.add("cuda_sync", "Context Sync", 8.0, 1.0, 0, -1, stream=-1, device=0, correlation=99)
    made.add("cuda_sync", "Event Sync", 9.0, 1.0, 0, 7, stream=7, device=0, correlation=98, wait_on_stream=21)
    made.add("cuda_sync", "Stream Wait Event", 2.0, 0.5, 0, 7, wait_on_cuda_event_record_corr_id=77, **event)
    return made.write(path)


def test_torch_profiler_with_sync_events(tmp_path: Path) -> None:
    profile = read_profile(torch_profile(tmp_path / "p.json"))
    assert rows(profile) == [(0, 21, 7, 3, 77), (0, 21, 7, 3, 2)]
    assert profile.waits.rank.tolist() == [3, 3]
    since = profile.origin - 1_700_000_000_000_000
    assert (profile.waits.begin + since).tolist() == pytest.approx([2.0, 6.25])
    assert (profile.waits.end + since).tolist() == pytest.approx([2.5, 6.75])
    assert np.isnan(profile.waits.recorded[0]) and profile.waits.recorded[1] + since == pytest.approx(4.0)


def test_an_imported_profile_keeps_them(tmp_path: Path) -> None:
    profile = read_profile(torch_profile(tmp_path / "p.json"))
    save(profile, tmp_path / "p.npz")
    assert rows(load(tmp_path / "p.npz")) == rows(profile)
    # One that was imported by a version without them has none.
    with np.load(tmp_path / "p.npz") as archive:
        old = {name: archive[name] for name in archive.files if not name.startswith("waits.")}
    np.savez(tmp_path / "old.npz", **old)
    assert len(load(tmp_path / "old.npz").waits) == 0
    assert len(load(tmp_path / "old.npz").activities) == 1


def test_a_profile_without_them_has_none(tmp_path: Path) -> None:
    made = ChromeProfile()
    made.kernel(GEMM, 10.0, 20.0, launch=1.0)
    made.call("cudaStreamWaitEvent", 6.0, 7.0)
    assert len(read_profile(made.write(tmp_path / "p.json")).waits) == 0


_TABLES = """
CREATE TABLE CUPTI_ACTIVITY_KIND_SYNCHRONIZATION (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER, contextId INTEGER, greenContextId INTEGER,
    streamId INTEGER, correlationId INTEGER, globalPid INTEGER, syncType INTEGER, eventId INTEGER{number});
CREATE TABLE CUPTI_ACTIVITY_KIND_CUDA_EVENT (
    deviceId INTEGER, contextId INTEGER, greenContextId INTEGER, streamId INTEGER, correlationId INTEGER,
    globalPid INTEGER, eventId INTEGER{number});
"""


@pytest.mark.parametrize("numbered", [True, False])
def test_nsight_systems(tmp_path: Path, numbered: bool) -> None:
    """An event recorded twice: each wait is for the record in front of it, by its number where there is one."""
    made = NsysProfile(tmp_path / "p.sqlite")
    made.kernel(GEMM, 10.0, 20.0, launch=1.0)
    made.database.executescript(_TABLES.format(number=", eventSyncId INTEGER" if numbered else ""))
    process = 50 << 24
    for number, (recorded, waited) in enumerate([(3.0, 4.0), (6.0, 8.0)]):
        made.call("cudaEventRecord_v3020", recorded, recorded + 0.5)
        extra = (100 + number,) if numbered else ()
        made.insert("CUPTI_ACTIVITY_KIND_CUDA_EVENT", (0, 1, None, 7, 2 + 2 * number, process, 5, *extra))
        made.call("cudaStreamWaitEvent_v3020", waited, waited + 0.5)
        base = 1_700_000_000_000_000_000
        when = (base + round(waited * 1000), base + round(waited * 1000) + 500)
        row = (*when, 0, 1, None, 21, 3 + 2 * number, process, 2, 5, *extra)
        made.insert("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", row)
        made.insert("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", (*when, 0, 1, None, 21, 90, process, 3, 5, *extra))
    profile = read_profile(made.done())
    assert rows(profile) == [(0, 21, 7, 3, 2), (0, 21, 7, 5, 4)]
    # The first event of the file is the launch at 1 us.
    assert profile.waits.begin.tolist() == [3.0, 7.0] and profile.waits.recorded.tolist() == [2.0, 5.0]
