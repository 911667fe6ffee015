"""`overlap` on the files of several ranks: folders, one axis, who waits for whom, and files that are not of one run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("msgspec")
pytest.importorskip("numpy")

from dbo_greenlet.trace import HeaderRecord, RecvRecord, SliceRecord, StepRecord, TraceWriter
from tests.job.command import in_process, one_sentence
from tests.trace.profiles import DISPATCH, GEMM, ChromeProfile


def profile(path: Path, rank: int, *, late: float = 0.0, base: int = 1_700_000_000_000_000_000) -> Path:
    """Ten dispatches, which this rank enters `late` after 1000 us of each millisecond and leaves at 1080."""
    made = ChromeProfile(rank=rank, base=base)
    for number in range(10):
        at = 1000.0 * (number + 1)
        made.kernel(GEMM, at - 300, at - 200, launch=at - 320)
        made.kernel(DISPATCH, at + late, at + 80, stream=21, launch=at + late - 10)
    return made.write(path)


def trace(path: Path, rank: int, *, vote_begin: float = 0.0, origin: int = 10**12) -> Path:
    with TraceWriter(path) as writer:
        writer.write(HeaderRecord("0.1.0", rank, 2, origin_ns=origin))
        for step in range(4):
            at = 1000.0 * step
            writer.write(
                StepRecord(step, rank, "dbo", 8, 8, True, "split", vote_begin=at + vote_begin, vote_end=at + 40),
                SliceRecord(step, rank, "dbo", 0, 0, "layer0.dispatch", at + 50, at + 60),
                RecvRecord(step, rank, "dbo", 0, "layer0.dispatch", at + 55, 1, at + 65, 0, 0),
            )
    return path


def last_block(text: str) -> list[str]:
    return text.rstrip("\n").split("\n\n\n")[-1].splitlines()


def test_profiles_of_two_ranks(tmp_path: Path) -> None:
    files = [profile(tmp_path / "a.json", 0), profile(tmp_path / "b.json", 1, late=30)]
    done = in_process("overlap", *files)
    assert (done.returncode, done.stderr) == (0, "")
    assert last_block(done.stdout) == [
        "The ranks lie on one axis by the wall clocks that they have, and 10 collective kernels agree.",
        "rank 1: +0.000 us, give or take 80.050 us",
        "a collective on average, in us, and in how many a rank was the last to come:",
        "        inside  waiting      last",
        "rank 0  80.000   30.000   0 of 10",
        "rank 1  50.000    0.000  10 of 10",
    ]
    (axis,) = json.loads(in_process("overlap", "--json", *files).stdout)["axes"]
    assert [(each["name"], each["waits"], each["last"]) for each in axis["arrivals"]] == [
        ("rank 0", 30.0, 0),
        ("rank 1", 0.0, 10),
    ]


def test_a_folder_is_what_is_in_it(tmp_path: Path) -> None:
    profile(tmp_path / "rank1.json.gz", 1, late=30)
    profile(tmp_path / "rank0.json.gz", 0)
    (tmp_path / "notes.txt").write_text("of the run")
    told = json.loads(in_process("overlap", "--json", tmp_path).stdout)
    assert [Path(each["file"]).name for each in told["reports"]] == ["rank0.json.gz", "rank1.json.gz"]
    assert told["axes"][0]["collectives"] == 10


def test_traces_of_ours_of_two_ranks(tmp_path: Path) -> None:
    for rank, name in enumerate(("dbo-rank0-11.jsonl", "dbo-rank1-12.jsonl")):
        trace(tmp_path / name, rank, vote_begin=15.0 * rank)
    trace(tmp_path / "dbo-rank0-11.older.jsonl", 0)
    done = in_process("overlap", tmp_path)
    assert done.stderr.startswith(f"dbo-greenlet: {tmp_path}: of each rank the file that was written last; 1 other")
    assert last_block(done.stdout) == [
        "The ranks lie on one axis by the clock of their host, and 4 votes agree.",
        "a collective on average, in us, and in how many a rank was the last to come:",
        "        inside  waiting    last",
        "rank 0  40.000   15.000  0 of 4",
        "rank 1  25.000    0.000  4 of 4",
    ]
    assert "one axis" not in in_process("overlap", tmp_path, "--rank", 1).stdout


def test_files_of_two_runs_are_compared_and_not_aligned(tmp_path: Path) -> None:
    two = [trace(tmp_path / "a.jsonl", 0), trace(tmp_path / "b.jsonl", 0, origin=7)]
    done = in_process("overlap", *two)
    assert done.returncode == 0 and "on a clock of its own" in done.stdout
    (axis,) = json.loads(in_process("overlap", "--json", *two).stdout)["axes"]
    assert axis["notes"] == [
        f"{two[0]} and {two[1]} both hold rank 0, so they are of two runs or two processes; name one of them."
    ]
    same = [profile(tmp_path / "a.json", 0), profile(tmp_path / "b.json", 0)]
    for files in (two, same):
        table, said = in_process("overlap", *files).stdout.split("\n\n\n")[-2:]
        assert table.startswith("all, in ms")
        assert said.splitlines()[-1].startswith("note: These files share no collective, as those of one run do, so ")


def test_profiles_that_no_offset_fits(tmp_path: Path) -> None:
    first = profile(tmp_path / "a.json", 0)
    made = ChromeProfile(rank=1, base=1_700_000_000_000_000_000)
    for number in range(10):
        at = 1000.0 * number + 150 * (number % 3)
        made.kernel(DISPATCH, at, at + 20, stream=21)
    done = in_process("overlap", first, made.write(tmp_path / "b.json"))
    assert done.returncode == 0
    said = last_block(done.stdout)
    assert said[0] == "The times of the ranks are left as their own clocks have them."
    assert said[1].startswith("No offset of the clocks of rank 0 and rank 1 fits all collective kernels")
    assert not any("waiting" in line for line in said)


def test_an_empty_folder(tmp_path: Path) -> None:
    done = in_process("overlap", tmp_path)
    assert done.returncode == 2
    assert one_sentence(done.stderr).startswith(f"{tmp_path}: a folder without traces or profiles")
