"""The command line: help, exit codes, errors as one sentence, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dbo_greenlet._version import __version__
from dbo_greenlet.job.replay import plan_replay
from dbo_greenlet.selftest import SelfTestCase, SelfTestResult
from dbo_greenlet.trace import read_trace
from tests.job.command import SECONDS, arguments, dbo_greenlet, environment, in_process, one_sentence, write_prompts


@pytest.mark.parametrize("words", [["run"], ["show"], ["replay"], ["selftest"], ["doctor"]])
def test_help_has_an_example_and_needs_no_torch(words: list[str]) -> None:
    code = (
        "import sys, dbo_greenlet.cli.main as m\n"
        "try:\n    m.main(sys.argv[1:])\n"
        "finally:\n    print(sorted({'torch', 'numpy', 'greenlet'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words, "--help"], capture_output=True, text=True, timeout=60, env=environment()
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"Example: dbo-greenlet {words[0]}" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_version_and_bare_command() -> None:
    assert dbo_greenlet("--version").stdout == f"dbo-greenlet {__version__}\n"
    bare = dbo_greenlet()
    assert (bare.returncode, bare.stdout) == (0, in_process("--help").stdout)
    assert "Usage: dbo-greenlet" in bare.stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["run", "--no-such-option"], "No such option: --no-such-option"),
        (["walk"], "No such command 'walk'"),
        (["run", "--limit", "0"], "Invalid value for '--limit'"),
        (["run", "--ranks", "0"], "--ranks is 0; use 1 or more"),
        (["run", "--rank-timeout", "nan"], "--rank-timeout is nan; use more than 0 and at most 1000000 seconds"),
        (["run", "--rank-timeout", "2e6"], "--rank-timeout is 2000000.0; use more than 0"),
        (["run", "--threads", "5000"], "--threads is 5000; use 1 to 1024"),
        (
            ["run", "--max-num-batched-tokens", "63"],
            "--max-num-batched-tokens is 63, but 64 running requests (--max-num-seqs) have a token each",
        ),
        (["run", "--max-new-tokens", "0"], "--max-new-tokens is 0; use 1 or more"),
        (["run", "--carrier", "pigeon"], "--carrier is 'pigeon'; use one of greenlet, thread"),
        (["run", "--policy", "chance"], "--policy is 'chance'; use one of round_robin"),
        (["run", "--device", "tpu"], "--device is 'tpu'; use one of cpu, cuda"),
        (["run", "--all2all", "loopback"], "--all2all loopback serves one rank, --ranks is 2"),
        (["run", "--rule", "v9"], "is 'v9'; use one of v1, v2"),
        (
            ["run", "--num-microbatches", "9"],
            "--dbo-decode-token-threshold is 8, but with --ubatch-size 9 a step of fewer than 9 tokens cannot be split",
        ),
        (["run", "--prompts", "absent.jsonl"], "absent.jsonl cannot be read: no such file"),
        (["show", "absent.jsonl"], "absent.jsonl: no such file"),
    ],
)
def test_an_error_is_one_sentence_and_exit_code_2(words: list[str], sentence: str) -> None:
    done = in_process(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert sentence in one_sentence(done.stderr)


def test_an_empty_prompt_file_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    done = in_process("run", "--prompts", empty)
    assert done.returncode == 2
    assert one_sentence(done.stderr).startswith(f"{empty} holds no prompt")


def test_a_trace_is_not_written_over_its_prompts(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", [0])
    text = prompts.read_text(encoding="utf-8")
    (tmp_path / "link").symlink_to(prompts)
    done = in_process("run", "--prompts", prompts, "--trace", tmp_path / "link")
    assert done.returncode == 2 and "is the prompt file itself; name another file" in one_sentence(done.stderr)
    assert prompts.read_text(encoding="utf-8") == text


def test_closed_standard_streams_are_no_error() -> None:
    code = "import os, sys; os.closerange(0, 3); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    words = arguments("run", "--help")[1:]
    assert subprocess.run([sys.executable, "-c", code, *words], timeout=SECONDS, env=environment()).returncode == 0


def test_help_names_no_path_of_this_machine() -> None:
    assert " ".join(in_process("run", "--help").stdout.split()).count("default: (packaged)") == 2


def test_what_the_ranks_find_is_one_sentence_too(tmp_path: Path) -> None:
    done = dbo_greenlet("run", "--model", tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert one_sentence(done.stderr).startswith(f"{tmp_path / 'config.json'} does not exist; give the folder of")


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = subprocess.Popen(
        arguments("run", "--help"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    )
    command.stdout.close()
    assert command.stderr.read() == b""
    assert command.wait(SECONDS) == 0


def steps_in(trace: Path) -> int:
    return trace.read_bytes().count(b'"t":"step"') if trace.exists() else 0


def group_is_gone(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def wait_until(happened: object, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.05)


@pytest.mark.parametrize("ok", [True, False])
def test_the_self_test_has_a_table_and_an_exit_code(monkeypatch: pytest.MonkeyPatch, ok: bool) -> None:
    # What the cases find is tested where they are; here it is how it is told.
    cases = (
        SelfTestCase("a case", "ok", "", 1.25),
        SelfTestCase("one more", "ok" if ok else "failed", "" if ok else "it broke", 0.0),
    )
    monkeypatch.setattr("dbo_greenlet.selftest.run_selftest", lambda timeout: SelfTestResult(ok, cases))
    done = in_process("selftest")
    assert done.returncode == (0 if ok else 1)
    assert done.stdout.splitlines() == [
        "a case    ok          1.2 s",
        "one more  ok          0.0 s" if ok else "one more  failed      0.0 s  it broke",
        "All cases hold." if ok else "Direct operators do not work here; do not rely on them.",
    ]
    assert json.loads(in_process("selftest", "--json").stdout)["ok"] is ok


class Command:
    """A job in a process group of its own, as a terminal starts it; a context manager that leaves nothing behind."""

    def __init__(self, folder: Path) -> None:
        self.trace = folder / "trace.jsonl"
        prompts = write_prompts(folder / "prompts.jsonl", [3 * n for n in range(200)])
        self.process = subprocess.Popen(
            arguments("run", "--prompts", prompts, "--trace", self.trace),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**environment(), "TMPDIR": str(folder)},
            start_new_session=True,
        )
        self.folder = folder

    def folders(self) -> list[Path]:
        """The job's temporary folders."""
        return list(self.folder.glob("dbo-greenlet-*"))

    def interrupt(self) -> None:
        """Ctrl-C: the terminal sends the signal to every process of the group."""
        os.killpg(self.process.pid, signal.SIGINT)
        self.ends(130, "stopped by Ctrl-C")

    def terminate(self) -> None:
        """SIGTERM, to the command only."""
        self.process.terminate()
        self.ends(143, "stopped by SIGTERM")

    def ends(self, code: int, sentence: str) -> None:
        assert self.process.wait(10) == code
        # What is left of the group still imports, and then finds itself alone.
        stdout, stderr = self.process.communicate(timeout=60)
        assert stdout == ""
        assert one_sentence(stderr) == sentence
        wait_until(lambda: group_is_gone(self.process.pid), 10)
        assert self.folders() == []

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *error: object) -> None:
        if not group_is_gone(self.process.pid):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


@pytest.mark.parametrize(
    ("how", "error"), [(Command.interrupt, "KeyboardInterrupt"), (Command.terminate, "Terminated")]
)
def test_ctrl_c_and_sigterm_stop_the_ranks_and_leave_a_readable_trace(
    tmp_path: Path, how: Callable[[Command], None], error: str
) -> None:
    with Command(tmp_path) as command:
        wait_until(lambda: steps_in(command.trace) > 4, SECONDS)
        how(command)
    read = read_trace(command.trace)
    assert not read.torn
    assert [(end.ok, end.error) for end in read.ends.values()] == [(False, error)] * 2
    assert plan_replay(command.trace).spec.passes[0].last_step >= 1


def test_ctrl_c_is_heard_while_the_ranks_are_loading(tmp_path: Path) -> None:
    with Command(tmp_path) as command:
        command.trace.write_text("an earlier run")
        # The folder is made before the first rank is started.
        wait_until(command.folders, SECONDS)
        command.interrupt()
    # What was there before is lost only to a job that starts.
    assert command.trace.read_text() == "an earlier run"


def test_a_killed_parent_takes_its_ranks_along(tmp_path: Path) -> None:
    with Command(tmp_path) as command:
        wait_until(lambda: steps_in(command.trace) > 4, SECONDS)
        command.process.kill()
        command.process.wait()
        wait_until(lambda: group_is_gone(command.process.pid), 30)
    assert read_trace(command.trace).ends == {}
