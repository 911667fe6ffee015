"""What was recorded, in words."""

from __future__ import annotations

from pathlib import Path

from dbo_greenlet.trace.process_summary import ProcessFile
from dbo_greenlet.trace.record_output import Recorded
from dbo_greenlet.trace.record_summary import summary_json, summary_text


def test_a_process_has_one_line_also_where_its_error_has_several() -> None:
    error = "AssertionError: Tensor-likes are not close!\n\nMismatched elements: 16 / 16 (100.0%)\n"
    file = ProcessFile(Path("rec/rank0.jsonl"), 0, 7, steps=1, split=1, slices=14, last=0, ended=True, error=error)
    found = Recorded(Path("rec"), [file])
    assert summary_text(found).splitlines() == [
        "Recorded to rec:",
        "  rank 0, process 7: 1 step, 1 split, 14 slices; ended by AssertionError: Tensor-likes are not close!",
        "Next: dbo-greenlet show rec",
    ]
    (process,) = summary_json(found)["processes"]
    assert process["error"] == error
