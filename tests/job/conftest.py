"""One recorded run of the whole command, shared by every test that looks at what it left."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.job.command import dbo_greenlet, write_prompts

# Two ranks with six requests each; the last ones come when the others decode, and two after everything is answered.
ARRIVALS = [0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 60, 61]


@dataclass(frozen=True)
class Recorded:
    """`report` is the JSON that the command printed, `trace` the file that it wrote."""

    report: dict[str, Any]
    stderr: str
    trace: Path
    prompts: Path


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("recorded")
    prompts = write_prompts(folder / "prompts.jsonl", ARRIVALS)
    trace = folder / "trace.jsonl"
    done = dbo_greenlet(
        "run",
        "--prompts",
        prompts,
        "--trace",
        trace,
        "--dbo-decode-token-threshold",
        4,
        "--max-new-tokens",
        24,
        "--json",
    )
    assert done.returncode == 0, done.stderr
    return Recorded(json.loads(done.stdout), done.stderr, trace, prompts)
