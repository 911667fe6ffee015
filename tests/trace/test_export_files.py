"""Several files and folders in one export: ranks on one axis, by the votes of their steps."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from dbo_greenlet.errors import TraceFileError
from dbo_greenlet.trace import HeaderRecord, SliceRecord, StepRecord, TraceWriter
from dbo_greenlet.trace.export.chrome import write_chrome
from dbo_greenlet.trace.export.open_export import open_export
from tests.job.command import in_process


def write_rank(path: Path, rank: int, *, clock: float = 0.0, steps: range = range(4), origin: int = 0) -> Path:
    """A rank whose clock reads `clock` microseconds more than that of rank 0. Each vote ends at once everywhere."""
    with TraceWriter(path) as writer:
        writer.write(HeaderRecord("0.1.0", rank, 2, origin_ns=origin))
        for step in steps:
            begin = 1000.0 * step + clock
            # Rank 1 comes first to every second vote: only so do votes bound the clocks from both sides.
            early = 5.0 if (step + rank) % 2 else 0.0
            vote = {"vote_begin": begin + 10.0 - early, "vote_end": begin + 11.0}
            writer.write(
                StepRecord(step, rank, "dbo", 8, 8, True, "r", [], [[0, 8, 0, 1]], begin=begin, end=begin + 90, **vote),
                SliceRecord(step, rank, "dbo", 0, 0, "", begin + 20.0, begin + 80.0),
            )
    return path


def begins(arguments: list[Path], name: str = "out") -> dict[int, list[float]]:
    """Process -> begins of its slices, as Chrome's JSON has them."""
    file = io.BytesIO()
    write_chrome(open_export(arguments), file)
    found: dict[int, list[float]] = {}
    for event in json.loads(file.getvalue())["traceEvents"]:
        if event["ph"] == "X" and event["name"] == name:
            found.setdefault(event["pid"], []).append(event["ts"])
    return found


@pytest.mark.parametrize("clock", [0.0, 123_456.0, -7_000_000.0])
def test_files_of_several_ranks_are_moved_by_their_votes(tmp_path: Path, clock: float) -> None:
    files = [write_rank(tmp_path / "a.jsonl", 0), write_rank(tmp_path / "b.jsonl", 1, clock=clock)]
    found = begins(files)
    assert found.keys() == {1, 2}
    for first, second in zip(found[1], found[2], strict=True):
        # Votes of one microsecond bound the clocks to that.
        assert first == pytest.approx(second, abs=1.0)
    model = open_export(files)
    assert list(model) and model.axis_text()[0].startswith("The ranks lie on one axis by 4 votes")
    # A rank's times go through its clock's zero, which is the axis's where it is the earliest.
    assert min(model.offsets.values()) == 0.0 and max(model.offsets.values()) == pytest.approx(abs(clock), abs=1.0)
    assert begins(list(reversed(files))) == found


def test_a_folder_of_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "ranks"
    folder.mkdir()
    files = [write_rank(folder / "rank0.jsonl", 0), write_rank(folder / "rank1.jsonl", 1, clock=50.0)]
    assert begins([folder]) == begins(files)


def test_two_files_of_one_rank_are_no_run(tmp_path: Path) -> None:
    files = [write_rank(tmp_path / name, 0) for name in ("a.jsonl", "b.jsonl")]
    with pytest.raises(TraceFileError, match="rank 0"):
        begins(files)


def test_clocks_that_fit_no_offset_are_left_and_said(tmp_path: Path) -> None:
    files = [write_rank(tmp_path / "a.jsonl", 0), tmp_path / "b.jsonl"]
    with TraceWriter(files[1]) as writer:
        writer.write(HeaderRecord("0.1.0", 1, 2))
        for step in range(4):
            begin = 1000.0 * step + (400.0 if step == 2 else 0.0)
            vote = {"vote_begin": begin + 10.0, "vote_end": begin + 11.0}
            writer.write(StepRecord(step, 1, "dbo", 8, 8, False, "r", begin=begin, end=begin + 90, **vote))
    model = open_export(files)
    assert list(model) and model.offsets == {0: 0.0, 1: 0.0}
    assert "fits all votes" in model.axis_text()[-1]


def test_the_output_is_none_of_the_files(tmp_path: Path) -> None:
    files = [write_rank(tmp_path / "a.jsonl", 0), write_rank(tmp_path / "b.jsonl", 1)]
    done = in_process("export", *files, "--format", "chrome", "-o", files[1])
    assert done.returncode == 2 and f"--output {files[1]} is the trace itself" in done.stderr
    done = in_process("export", *files, "--format", "chrome", "-o", tmp_path / "out", "--json")
    assert done.returncode == 0
    said = json.loads(done.stdout)
    assert said["files"] == [str(file) for file in files] and said["ranks"] == [0, 1] and said["steps"] == 8
