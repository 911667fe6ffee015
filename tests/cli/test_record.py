"""`dbo-greenlet record`: what a program records, its exit code and signals, and why there may be nothing."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dbo_greenlet.trace import read_trace
from dbo_greenlet.trace.clocks.offsets import common_axis
from dbo_greenlet.trace.files import TraceFiles
from tests.cli.loaded import output_and_loaded
from tests.job.command import SECONDS, arguments, dbo_greenlet, environment, in_process, one_sentence

PROGRAM = str(Path(__file__).with_name("script_recorded.py"))


def recorded(*options: object, program: tuple[object, ...]) -> subprocess.CompletedProcess[str]:
    return dbo_greenlet("record", *options, "--", sys.executable, PROGRAM, *program)


def only_file(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


def test_help_has_an_example_and_needs_nothing_heavy() -> None:
    output, loaded = output_and_loaded("torch numpy greenlet msgspec", "record", "--help")
    assert "Example: dbo-greenlet record -o traces/ -- python serve.py" in output
    assert loaded == "[]"


def test_a_program_is_recorded_and_left_alone(tmp_path: Path) -> None:
    done = recorded("-o", tmp_path / "rec", program=("steps", 3, 7))
    assert (done.returncode, done.stdout) == (7, "from the program\n")
    file = only_file(tmp_path / "rec")
    trace = read_trace(file)
    process = int(file.stem.rpartition("-")[2])
    assert done.stderr.splitlines() == [
        f"Recorded to {tmp_path / 'rec'}:",
        f"  rank 0, process {process}: 3 steps, 3 split, 30 slices",
        f"Next: dbo-greenlet show {tmp_path / 'rec'}",
    ]
    assert [len(step.slices) for step in trace.steps.values()] == [10, 10, 10]
    first = trace.step(0).record
    assert first is not None and (first.split, first.yields, first.policy, first.execution) == (
        True,
        [4, 4],
        "round_robin",
        "eager",
    )
    assert first.hash and first.begin is not None and first.begin < first.end
    assert trace.header.settings["program"] == "script_recorded.py"
    assert trace.header.settings["trace"]["process"] == process
    assert (trace.ends[0].ok, trace.ends[0].error) == (True, None)
    shown = in_process("show", tmp_path / "rec")
    assert shown.returncode == 0 and shown.stdout.startswith("step 0, rank 0, run dbo")


def test_every_how_manieth_step(tmp_path: Path) -> None:
    done = recorded("-o", tmp_path / "rec", "--every", 3, "--json", program=("steps", 7, 0))
    told = json.loads(done.stdout.partition("\n")[2])
    assert (done.returncode, told["exit_code"], told["steps"]) == (0, 0, 3)
    assert [step for _, step, _ in read_trace(only_file(tmp_path / "rec")).steps] == [0, 3, 6]
    (process,) = told["processes"]
    assert (process["rank"], process["split"], process["last"], process["ended"]) == (0, 3, 6, True)


def test_options_of_the_program_are_its_own(tmp_path: Path) -> None:
    done = dbo_greenlet(
        "record", "-o", tmp_path / "rec", sys.executable, "-c", "import sys; print(sys.argv)", "--every", "-o"
    )
    assert done.stdout == "['-c', '--every', '-o']\n"


def test_a_process_that_dies_leaves_a_readable_trace(tmp_path: Path) -> None:
    done = recorded("-o", tmp_path / "rec", program=("die",))
    assert done.returncode == 128 + signal.SIGKILL
    assert "it did not end in order, the trace is complete up to after step 2" in done.stderr
    trace = read_trace(only_file(tmp_path / "rec"))
    assert (len(trace.steps), trace.torn, trace.ends) == (3, False, {})


def test_an_error_is_in_the_trace(tmp_path: Path) -> None:
    done = recorded("-o", tmp_path / "rec", program=("fail",))
    assert done.returncode == 1 and "the model broke" in done.stderr
    assert "; 1 step failed; ended by MicrobatchFailed: Microbatch 1 of 2 failed in slice 1" in done.stderr
    trace = read_trace(only_file(tmp_path / "rec"))
    record = trace.step(1).record
    assert record is not None and record.error is not None and "ValueError: the model broke" in record.error
    assert (record.schedule, [s.ubatch for s in trace.step(1).slices if s.failed]) == ("", [1])
    assert not trace.ends[0].ok and "the model broke" in trace.ends[0].error


def test_ranks_are_taken_from_torchruns_variables(tmp_path: Path) -> None:
    done = recorded("-o", tmp_path / "rec", program=("children", 1, 0))
    assert done.returncode == 0
    files = TraceFiles(tmp_path / "rec")
    assert [(step.step, step.rank) for step in files] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [header.world for header in files.headers.values()] == [2, 2]


@pytest.mark.parametrize("name", ["all.jsonl", "all.jsonl.gz"])
def test_one_file_for_all_ranks(tmp_path: Path, name: str) -> None:
    done = recorded("-o", tmp_path / name, program=("children", 0, 1))
    assert done.returncode == 0 and f"Next: dbo-greenlet show {tmp_path / name}" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == [name], "the processes' folder is gone"
    trace = read_trace(tmp_path / name)
    assert trace.ranks == [0, 1] and len(trace.steps) == 6 and sorted(trace.ends) == [0, 1]


def test_two_processes_of_one_rank_stay_apart(tmp_path: Path) -> None:
    done = recorded("-o", tmp_path / "all.jsonl", program=("children", 0, 0))
    assert done.returncode == 0 and not (tmp_path / "all.jsonl").exists()
    folder = only_file(tmp_path)
    assert f"two files are of one rank, so they stay apart in {folder}" in done.stderr
    assert [len(read_trace(file).steps) for file in folder.iterdir()] == [3, 3]


@pytest.mark.parametrize(("what", "steps"), [("nested", 4), ("threads", 60)])
def test_steps_inside_steps_and_in_threads(tmp_path: Path, what: str, steps: int) -> None:
    recorded("-o", tmp_path / "rec", program=(what,))
    files = TraceFiles(tmp_path / "rec")
    numbers = [step.step for step in files]
    # In ascending order, or it could not be read as a stream; each step whole.
    assert len(numbers) == steps and numbers == sorted(set(numbers))
    assert all(step.record is not None and step.record.hash for step in TraceFiles(tmp_path / "rec"))


def test_a_forked_child_has_a_file_of_its_own(tmp_path: Path) -> None:
    recorded("-o", tmp_path / "rec", program=("fork",))
    assert sorted(len(read_trace(file).steps) for file in (tmp_path / "rec").iterdir()) == [1, 2]


@pytest.mark.slow
def test_our_own_job_is_recorded_rank_by_rank(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    done = dbo_greenlet("record", "-o", tmp_path / "rec", "--", *arguments("run", "--limit", 2))
    assert done.returncode == 0 and "did not end in order" not in done.stderr
    files = TraceFiles(tmp_path / "rec")
    found = list(files)
    assert sorted(files.headers) == sorted(files.ends) == [0, 1] and all(end.ok for end in files.ends.values())
    assert {step.rank for step in found if step.slices} == {0, 1}
    reasons = {step.record.reason for step in found if step.record and not step.record.split}
    assert reasons and "" not in reasons
    axis = common_axis(files)
    assert axis.how == f"The ranks lie on one axis by the clock of their host, and {len(found) // 2} votes agree."


# -- signals -----------------------------------------------------------------------------------------------------------


def started(*program: object, folder: Path, **options: Any) -> subprocess.Popen[str]:
    words = arguments("record", "-o", folder, "--", sys.executable, PROGRAM, *program)
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), **options
    )


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_signals_reach_the_program_once(tmp_path: Path, name: str) -> None:
    process = started("count", name, folder=tmp_path / "rec", start_new_session=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(getattr(signal, name))
    out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, out) == (5, "came 1\n")
    assert "1 step, 1 split" in err


def test_ctrl_c_in_a_terminal_reaches_the_program_once(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    # A session of its own whose terminal this is: what setsid and TIOCSCTTY do.
    code = (
        "import fcntl, os, sys, termios\n"
        "os.setsid()\nfcntl.ioctl(0, termios.TIOCSCTTY, 0)\nos.execv(sys.argv[1], sys.argv[1:])"
    )
    words = arguments("record", "-o", tmp_path / "rec", "--", sys.executable, PROGRAM, "count", "SIGINT")
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words], stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment(),
    )  # fmt: skip
    os.close(theirs)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    os.write(ours, b"\x03")
    out, _ = process.communicate(timeout=SECONDS)
    os.close(ours)
    assert (process.returncode, out) == (5, "came 1\n")


def test_a_program_that_a_signal_ends(tmp_path: Path) -> None:
    process = started("interrupt", folder=tmp_path / "rec", start_new_session=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 130 and "KeyboardInterrupt" in err
    assert "rank 0" in err and "1 step, 1 split" in err


# -- nothing, and what cannot be ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "code", "sentence"),
    [
        (("none", 0), 1, "nothing was recorded: no process of the command made a scheduler of dbo_greenlet"),
        (("none", 3), 3, "nothing was recorded (it ended with exit code 3): no process of the command"),
        (("idle",), 1, "nothing was recorded: there was a scheduler, but it ran no step that was split"),
        (("left",), 1, "microbatches were left to vLLM's own implementation: CUDA graphs of another kind"),
    ],
)
def test_nothing_recorded_and_why(tmp_path: Path, program: tuple[object, ...], code: int, sentence: str) -> None:
    done = recorded("-o", tmp_path / "rec", program=program)
    assert done.returncode == code and done.stdout == ""
    assert sentence in one_sentence(done.stderr)
    assert list(tmp_path.iterdir()) == [], "no empty folder is left behind"


def test_a_server_whose_drop_in_is_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DBO_GREENLET", "0")
    done = recorded("-o", tmp_path / "rec", program=("server",))
    assert done.returncode == 1
    assert one_sentence(done.stderr) == (
        "nothing was recorded: microbatches were left to vLLM's own implementation: it is switched off (DBO_GREENLET)"
    )


def test_what_is_too_large_is_said(tmp_path: Path) -> None:
    done = recorded("-o", tmp_path / "rec", "--megabytes", 1, program=("steps", 900, 0))
    assert done.returncode == 0 and "ends here: it is as large as it may be (--megabytes)" in done.stderr
    file = only_file(tmp_path / "rec")
    assert file.stat().st_size <= 1_000_000 and 300 < len(read_trace(file).steps) < 900


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "Missing argument 'COMMAND'"),
        (["--", "no-such-program"], "no-such-program: no such command"),
        (["-o", "old", "--", "true"], "--output old holds a recording already, and ranks of two runs"),
        (["-o", "file.txt", "--", "true"], "--output file.txt is a file; name a folder, or a file that ends in .jsonl"),
        (
            ["-o", "no/folder.jsonl", "--", "true"],
            "--output no/folder.jsonl cannot be written: its folder does not exist",
        ),
        (["-o", "file.txt/rec", "--", "true"], "--output file.txt/rec cannot be written: not a directory"),
        (["--", "./x.py"], "./x.py cannot be run: permission denied; for a Python script: python ./x.py"),
        (["--every", "0", "true"], "Invalid value for '--every'"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("old").mkdir()
    for name in ("old/dbo-rank0-1.jsonl", "file.txt", "x.py"):
        Path(name).touch()
    before = sorted(Path().iterdir())
    done = in_process("record", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert sentence in one_sentence(done.stderr)
    assert sorted(Path().iterdir()) == before


def test_without_a_name_the_folder_has_the_time(tmp_path: Path) -> None:
    done = subprocess.run(
        arguments("record", sys.executable, PROGRAM, "steps", "1", "0"),
        capture_output=True, text=True, timeout=SECONDS, cwd=tmp_path,
        env={**environment(), "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    folder = only_file(tmp_path)
    assert done.returncode == 0 and folder.name.startswith("dbo-trace-2")
    assert len(read_trace(only_file(folder)).steps) == 1
