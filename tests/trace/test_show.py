"""What the command `show` adds to the texts of the room."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from dbo_greenlet.cli.show import show
from dbo_greenlet.errors import ConfigurationError, TraceFileError
from dbo_greenlet.schedule import Schedule
from dbo_greenlet.trace import HeaderRecord, SliceRecord, StepRecord, TraceWriter, newest_trace


def test_a_step_whose_slices_were_torn_off_is_split_and_the_torn_line_is_mentioned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.jsonl"
    with TraceWriter(path) as writer:
        writer.write(HeaderRecord("0.1.0", 0, 1))
        writer.write(
            StepRecord(0, 0, "dbo", 8, 8, True, "split", schedule=Schedule(2, (0, 1) * 2).encode(), yields=[1, 1])
        )
        writer.write_lines([b'{"t":"slice","step":0,"ra'])
    assert show([path], lanes=True) == 0
    assert capsys.readouterr().out.splitlines() == [
        "step 0, rank 0, run dbo: 8 tokens",
        "split: split; its slices are not in the trace (yet)",
        "microbatches in the order in which they ran: 0 1 0 1",
        "",
        "no lanes: its slices are not in the trace (yet)",
        "",
        f"The last line of {path} is torn and was left out: the run is writing it right now, or died there.",
    ]


def test_tokens_that_nobody_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As of a Scheduler of a script, which knows of functions alone."""
    path = tmp_path / "t.jsonl"
    with TraceWriter(path) as writer:
        writer.write(HeaderRecord("0.1.0", 0, 1), StepRecord(0, 0, "dbo", 0, 0, True, "", yields=[0, 0]))
    assert show([path]) == 0
    assert capsys.readouterr().out.startswith("step 0, rank 0, run dbo: tokens not known\n")


# -- the folder of a server's traces -----------------------------------------------------------------------------------


def server_trace(path: Path, rank: int, reasons: list[str], changed: float) -> None:
    with TraceWriter(path) as writer:
        writer.write(HeaderRecord("0.1.0", rank, 2))
        for step, reason in enumerate(reasons):
            writer.write(StepRecord(step, rank, "dbo", 8, 8, False, reason))
    os.utime(path, (changed, changed))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    server_trace(tmp_path / "dbo-rank0-11.jsonl", 0, ["crashed"], 1000)
    server_trace(tmp_path / "dbo-rank0-12.older.jsonl", 0, ["earlier"], 3000)  # renamed, so as new as the current one
    server_trace(tmp_path / "dbo-rank0-12.jsonl", 0, ["first", "now"], 2000)
    server_trace(tmp_path / "dbo-rank1-13.jsonl", 1, ["other rank"], 4000)
    server_trace(tmp_path / "newer-but-no-server.jsonl", 0, ["run"], 5000)
    return tmp_path


@pytest.mark.parametrize(
    ("options", "name", "reason"),
    [
        ({}, "dbo-rank0-12", "first"),
        ({"last": True}, "dbo-rank0-12", "now"),
        ({"rank": 1}, "dbo-rank1-13", "other rank"),
    ],
    ids=str,
)
def test_a_folder_shows_the_latest_trace_of_a_rank(
    folder: Path, capsys: pytest.CaptureFixture[str], options: dict[str, object], name: str, reason: str
) -> None:
    assert show([folder], **options) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[1] == f"not split: {reason}"
    assert said.err == f"dbo-greenlet: this is {folder / name}.jsonl\n"


def test_the_part_before_it_where_a_process_died_between_two(folder: Path) -> None:
    (folder / "dbo-rank0-11.jsonl").unlink()
    (folder / "dbo-rank0-12.jsonl").unlink()
    assert newest_trace(folder).name == "dbo-rank0-12.older.jsonl"


def test_a_folder_without_it(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(TraceFileError, match=re.escape(f"{folder} has no trace of rank 7; it holds ranks 0, 1")):
        show([folder], rank=7)
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(TraceFileError, match=re.escape(f"{empty}: a folder without traces or profiles")):
        show([empty])


def test_json_of_a_folder_is_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show([folder], as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["record"]["reason"] == "first"


def test_last_is_the_last_step_that_was_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.jsonl"
    with TraceWriter(path) as writer:
        writer.write(HeaderRecord("0.1.0", 0, 1))
        for step in range(4):
            writer.write(StepRecord(step, 0, "dbo", 8, 8, step < 3, "why"))
            if step < 2:
                writer.write(SliceRecord(step, 0, "dbo", 0, 0, "", 1.0, 2.0))
    assert show([path], last=True) == 0
    assert capsys.readouterr().out.startswith("step 1, ")
    with pytest.raises(ConfigurationError, match="--last: --step names a step already"):
        show([path], last=True, steps="1")
