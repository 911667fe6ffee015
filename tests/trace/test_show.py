"""What the command `show` adds to the texts of the room."""

from __future__ import annotations

from pathlib import Path

import pytest

from dbo_greenlet.cli.show import show
from dbo_greenlet.schedule import Schedule
from dbo_greenlet.trace import HeaderRecord, StepRecord, TraceWriter


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
    assert show(path, lanes=True) == 0
    assert capsys.readouterr().out.splitlines() == [
        "step 0, rank 0, run dbo: 8 tokens",
        "split: split; its slices are not in the trace (yet)",
        "microbatches in the order in which they ran: 0 1 0 1",
        "",
        "no lanes: its slices are not in the trace (yet)",
        "",
        f"The last line of {path} is torn and was left out: the run is writing it right now, or died there.",
    ]
