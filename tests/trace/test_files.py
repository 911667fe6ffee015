"""What an argument of a command may be: files, folders, compressed, several; and what it may not be."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dbo_greenlet.errors import TraceFileError
from dbo_greenlet.trace import EndRecord, HeaderRecord, SliceRecord, StepRecord, TraceWriter, read_trace
from dbo_greenlet.trace.files import TraceFiles, expand, is_trace


def write(path: Path, ranks: list[int], steps: list[int], *, runs: tuple[str, ...] = ("dbo",), origin: int = 5) -> Path:
    with TraceWriter(path) as writer:
        for rank in ranks:
            writer.write(HeaderRecord("0.1.0", rank, 2, origin_ns=origin + rank))
        for run in runs:
            for step in steps:
                for rank in ranks:
                    writer.write(
                        StepRecord(step, rank, run, 8, 8, True, "split"),
                        SliceRecord(step, rank, run, 0, 0, "layer0.dispatch", 1.0 * step, 2.0 * step),
                    )
        writer.write(*(EndRecord(True, rank) for rank in ranks))
    return path


def keys(files: TraceFiles) -> list[tuple[str, int, int]]:
    return [(step.run, step.step, step.rank) for step in files]


def test_two_files_are_one_trace(tmp_path: Path) -> None:
    whole = write(tmp_path / "all.jsonl", [0, 1], [0, 1, 2], runs=("dbo", "unsplit"))
    parts = [write(tmp_path / f"{rank}.jsonl", [rank], [0, 1, 2], runs=("dbo", "unsplit")) for rank in (1, 0)]
    files = TraceFiles(parts)
    assert keys(files) == keys(TraceFiles(whole))
    assert files.steps == 12 and sorted(files.headers) == sorted(files.ends) == [0, 1]
    one, both = read_trace(whole), TraceFiles(parts).read()
    assert both.steps == one.steps and list(both.steps) == list(one.steps)
    assert both.headers == one.headers and both.ends == one.ends
    assert list(TraceFiles(parts)) == list(TraceFiles(whole))


def test_all_headers_stand_before_the_first_step(tmp_path: Path) -> None:
    files = TraceFiles([write(tmp_path / f"{rank}.jsonl", [rank], [4]) for rank in (0, 1, 2)])
    next(iter(files))
    assert sorted(files.headers) == [0, 1, 2]


def test_ranks_that_recorded_different_steps(tmp_path: Path) -> None:
    files = TraceFiles([write(tmp_path / "0.jsonl", [0], [0, 2, 4]), write(tmp_path / "1.jsonl", [1], [2, 3])])
    assert keys(files) == [("dbo", 0, 0), ("dbo", 2, 0), ("dbo", 2, 1), ("dbo", 3, 1), ("dbo", 4, 0)]


def test_gzip_is_read_as_it_is(tmp_path: Path) -> None:
    plain = write(tmp_path / "0.jsonl", [0], [0, 1])
    packed = tmp_path / "0.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert is_trace(packed) and is_trace(plain)
    assert list(TraceFiles(packed)) == list(TraceFiles(plain))


def test_a_servers_folder_gives_each_ranks_newest_file(tmp_path: Path) -> None:
    for age, (name, rank) in enumerate(
        [
            ("dbo-rank0-30.jsonl", 0),
            ("dbo-rank1-31.jsonl", 1),
            ("dbo-rank0-10.jsonl", 0),
            ("dbo-rank0-30.older.jsonl", 0),
        ]
    ):
        write(tmp_path / name, [rank], [7], origin=100 * age)
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    (tmp_path / "server.log").write_text("no trace")
    files = TraceFiles(tmp_path)
    assert [path.name for path in files.paths] == ["dbo-rank0-30.jsonl", "dbo-rank1-31.jsonl"]
    assert files.notes == [
        f"{tmp_path}: of each rank the file that was written last; 2 others (older parts, other processes) are left "
        "out, name them to read them."
    ]
    assert [path.name for path in TraceFiles(tmp_path, rank=1).paths] == ["dbo-rank1-31.jsonl"]
    assert TraceFiles(tmp_path, rank=1).notes == []
    with pytest.raises(TraceFileError, match=r"no trace of rank 5; it holds ranks 0, 1"):
        TraceFiles(tmp_path, rank=5)


def test_any_other_folder_gives_its_traces_by_name(tmp_path: Path) -> None:
    for rank in (1, 0):
        write(tmp_path / f"rank{rank}.jsonl", [rank], [0])
    (tmp_path / "notes.txt").write_text("no trace")
    (tmp_path / "deeper.jsonl").mkdir()
    assert [path.name for path in TraceFiles(tmp_path).paths] == ["rank0.jsonl", "rank1.jsonl"]
    (tmp_path / "p.json").write_text("{}")
    assert [path.name for path in expand([tmp_path])[0]] == ["p.json", "rank0.jsonl", "rank1.jsonl"]
    with pytest.raises(TraceFileError, match=r"p\.json: not a trace of ours; name it without traces of ours beside it"):
        TraceFiles(tmp_path)


def test_a_part_before_is_read_with_the_one_after_it(tmp_path: Path) -> None:
    parts = [
        write(tmp_path / "dbo-rank0-3.jsonl", [0], [5, 6], origin=9),
        write(tmp_path / "dbo-rank0-3.older.jsonl", [0], [3, 4], origin=9),
    ]
    assert [step for _, step, _ in keys(TraceFiles(parts))] == [3, 4, 5, 6]
    assert sorted(step for _, step, _ in TraceFiles(parts).read().steps) == [3, 4, 5, 6]


def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    one, two = write(tmp_path / "a.jsonl", [0], [0], origin=1), write(tmp_path / "b.jsonl", [0], [0], origin=2)
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(one.read_bytes())
    for second, sentence in ((two, "both hold rank 0"), (copy, "two of these files hold step 0 of run dbo, rank 0")):
        with pytest.raises(TraceFileError, match=sentence):
            list(TraceFiles([one, second]))
        with pytest.raises(TraceFileError, match=sentence):
            TraceFiles([one, second]).read()


def test_a_torn_file_is_named(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{rank}.jsonl", [rank], [0]) for rank in (0, 1)]
    with open(paths[1], "ab") as file:
        file.write(b'{"t":"sl')
    files = TraceFiles(paths)
    list(files)
    assert files.torn and files.torn_paths == [paths[1]]
    assert TraceFiles(paths).read().torn


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "no trace was named"),
        (["absent.jsonl", "absent2.jsonl"], "absent.jsonl: no such file"),
        (["empty"], "empty: a folder without traces or profiles"),
    ],
)
def test_bad_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], sentence: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    with pytest.raises(TraceFileError, match=sentence):
        list(TraceFiles(arguments))


def test_what_is_no_trace(tmp_path: Path) -> None:
    for name, content in (("a", b""), ("b", b'{"traceEvents": []}'), ("c", b"\x1f\x8b broken"), ("d", b"\0\0")):
        (tmp_path / name).write_bytes(content)
        assert not is_trace(tmp_path / name)
    with pytest.raises(TraceFileError, match="this is a directory"):
        is_trace(tmp_path)


def test_it_needs_nothing_but_the_standard_library() -> None:
    code = (
        "import sys, dbo_greenlet.trace.files, dbo_greenlet.trace.clocks.offsets\n"
        "print(sorted({'numpy', 'msgspec', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")
