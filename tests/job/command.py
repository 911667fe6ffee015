"""Running `dbo-greenlet` as a user does: in a process of its own, with a time limit."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from dbo_greenlet.cli.main import main
from dbo_greenlet.job.requests import PACKAGED_PROMPTS

# A process imports torch and transformers; on a busy machine with two cores that alone takes tens of seconds.
SECONDS = 240


def environment() -> dict[str, str]:
    return {**os.environ, "COLUMNS": "100"}


def arguments(*words: object) -> list[str]:
    return [sys.executable, "-m", "dbo_greenlet.cli", *map(str, words)]


def dbo_greenlet(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments(*words), capture_output=True, text=True, timeout=SECONDS, env=environment())


def in_process(*words: object) -> subprocess.CompletedProcess[str]:
    """The same in this process, which has torch and the ranks' fork server already: for tests of what it says."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with redirect_stdout(stdout), redirect_stderr(stderr), pytest.raises(SystemExit) as left:
        main(list(map(str, words)))
    return subprocess.CompletedProcess(list(words), left.value.code, stdout.getvalue(), stderr.getvalue())


def write_prompts(path: Path, arrivals: list[int]) -> Path:
    """The first packaged prompts, with other arrivals."""
    lines = PACKAGED_PROMPTS.read_text(encoding="utf-8").splitlines()
    records = [{**json.loads(line), "arrival": arrival} for line, arrival in zip(lines, arrivals, strict=False)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def one_sentence(stderr: str) -> str:
    """What an error says; asserts that it is one line and no traceback."""
    lines = stderr.splitlines()
    assert len(lines) == 1, stderr
    assert "Traceback" not in stderr
    assert lines[0].startswith("dbo-greenlet: ")
    return lines[0].removeprefix("dbo-greenlet: ")
