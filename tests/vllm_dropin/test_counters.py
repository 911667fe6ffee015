"""The counters of steps: what they count, what another process reads, and what happens at their bounds."""

from __future__ import annotations

import mmap
import subprocess
import sys
import threading

import pytest

from dbo_greenlet.errors import DboError
from dbo_greenlet.vllm.counters import BLOCK_SIZE, EXECUTED_KINDS, OTHER, StepCounters, read_block


def test_what_was_counted_is_in_the_snapshot_and_zeros_are_not():
    counts = StepCounters()
    assert counts.snapshot() == {"executed": {}, "split": {}, "unsplit": {}}
    for kind in EXECUTED_KINDS:
        counts.executed(kind)
    counts.executed("eager")
    counts.decided(True, "split-decode")
    counts.decided(False, "split-decode")
    counts.decided(False, "rank-veto")
    counts.decided(False, "rank-veto")
    assert counts.snapshot() == {
        "executed": {"eager": 2, "captured": 1, "replayed": 1, "failed": 1},
        "split": {"split-decode": 1},
        "unsplit": {"split-decode": 1, "rank-veto": 2},
    }
    counts.reset()
    assert counts.snapshot() == {"executed": {}, "split": {}, "unsplit": {}}
    counts.decided(False, "rank-veto")
    assert counts.snapshot()["unsplit"] == {"rank-veto": 1}


def test_a_kind_that_does_not_exist_is_refused_by_name():
    with pytest.raises(DboError, match="eager, captured, replayed, failed, not as 'lazy'"):
        StepCounters().executed("lazy")


def test_reasons_without_end_are_counted_together_and_take_no_more_room():
    counts = StepCounters()
    for i in range(1000):
        counts.decided(i % 2 == 0, f"reason {i}")
    counts.decided(True, "a reason " * 20)
    snapshot = counts.snapshot()
    assert sum(snapshot["split"].values()) == 501 and sum(snapshot["unsplit"].values()) == 500
    assert snapshot["split"][OTHER] > 1 and snapshot["unsplit"][OTHER] > 1
    assert len(snapshot["split"]) + len(snapshot["unsplit"]) == 57 + 2
    assert snapshot["split"]["reason 0"] == 1
    counts.decided(True, "reason 0")
    assert counts.snapshot()["split"]["reason 0"] == 2


def test_threads_that_count_at_once_lose_nothing():
    counts = StepCounters()
    interval = sys.getswitchinterval()

    def count():
        for i in range(20_000):
            counts.executed("eager")
            counts.decided(True, f"reason {i % 7}")

    threads = [threading.Thread(target=count) for _ in range(4)]
    try:
        sys.setswitchinterval(1e-6)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    snapshot = counts.snapshot()
    assert snapshot["executed"] == {"eager": 80_000}
    assert sum(snapshot["split"].values()) == 80_000 and len(snapshot["split"]) == 7


def test_another_process_reads_the_counts_while_they_go_on(tmp_path):
    path = tmp_path / "block"
    path.write_bytes(bytes(BLOCK_SIZE))
    counts = StepCounters()
    counts.executed("captured")
    with open(path, "r+b") as file:
        counts.place_in(mmap.mmap(file.fileno(), BLOCK_SIZE), rank=5)
    counts.executed("captured")
    counts.decided(False, "a reason from after the move")
    script = "import sys; from dbo_greenlet.vllm.counters import *; print(read_block(open(sys.argv[1], 'rb').read()))"
    read = [sys.executable, "-c", script, str(path)]
    said = subprocess.run(read, capture_output=True, text=True, check=True, timeout=60).stdout
    assert said.strip() == str(
        (
            5,
            {
                "executed": {"eager": 0, "captured": 2, "replayed": 0, "failed": 0},
                "split": {OTHER: 0},
                "unsplit": {OTHER: 0, "a reason from after the move": 1},
            },
        )
    )
    assert counts.snapshot()["executed"] == {"captured": 2}


def test_a_block_of_another_size_is_refused_and_counting_goes_on():
    counts = StepCounters()
    with pytest.raises(DboError, match="4096 bytes, got 100"):
        counts.place_in(bytearray(100), rank=0)
    counts.executed("eager")
    assert counts.snapshot()["executed"] == {"eager": 1}


@pytest.mark.parametrize(
    "damage", [bytes(BLOCK_SIZE), bytes(10), b"", b"dboSTEP9" + bytes(BLOCK_SIZE - 8), b"dboSTEP1" + b"\xff" * 4088]
)
def test_bytes_that_are_no_block_are_refused(damage):
    with pytest.raises(DboError):
        read_block(damage)
