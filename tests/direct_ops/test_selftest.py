"""The self-test: it holds here, and it reports what dies or hangs instead of dying or hanging itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dbo_greenlet.selftest import CASES, main, run_selftest

ROOT = Path(__file__).resolve().parents[2]


def test_it_holds_here_and_the_command_says_so() -> None:
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    done = subprocess.run(
        [sys.executable, "-O", "-m", "dbo_greenlet.selftest"],
        capture_output=True,
        text=True,
        timeout=280,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition("  ")[0] for line in lines] == list(CASES)
    assert all(" ok " in line for line in lines)


def with_broken_torch(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    (folder / "torch.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_a_case_that_dies_is_reported_and_the_others_still_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_broken_torch(
        tmp_path, monkeypatch, "import os, sys; print('last words', file=sys.stderr, flush=True); os.abort()"
    )
    assert main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(CASES)
    assert all("failed" in line and "died of SIGABRT: last words" in line for line in lines)


def test_a_case_that_hangs_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_broken_torch(tmp_path, monkeypatch, "import time; time.sleep(1000)")
    result = run_selftest(timeout=0.7)
    assert not result.ok
    assert [case.name for case in result.cases] == list(CASES)
    assert {case.detail for case in result.cases} == {"not finished within 0.7 s"}


def test_a_case_that_raises_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_broken_torch(tmp_path, monkeypatch, "raise ImportError('no torch today')")
    result = run_selftest(timeout=60)
    assert not result.ok
    assert {(case.status, case.detail) for case in result.cases} == {("failed", "ImportError: no torch today")}


def test_a_process_that_ends_early_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_broken_torch(tmp_path, monkeypatch, "import os; os._exit(3)")
    assert {case.detail for case in run_selftest(timeout=60).cases} == {"the process ended with code 3"}
