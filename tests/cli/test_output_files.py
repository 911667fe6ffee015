"""Files that commands write: one rule for what is there already, and a sentence for what cannot be, before the work."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dbo_greenlet.cli.output_file import check_output
from dbo_greenlet.errors import ConfigurationError
from dbo_greenlet.job.requests import PACKAGED_PROMPTS
from dbo_greenlet.job.spec import PACKAGED_MODEL
from dbo_greenlet.trace import HeaderRecord, SliceRecord, StepRecord, TraceWriter, read_trace
from tests.job.command import in_process, one_sentence
from tests.trace.profiles import DISPATCH, GEMM, ChromeProfile

PROGRAM = Path(__file__).with_name("script_recorded.py")


def write_trace(path: Path) -> Path:
    with TraceWriter(path) as writer:
        writer.write(
            HeaderRecord("0.1.0", 0, 1),
            StepRecord(0, 0, "dbo", 8, 8, True, "split"),
            SliceRecord(0, 0, "dbo", 0, 0, "layer0.dispatch", 0.0, 10.0),
        )
    return path


def write_profile(path: Path) -> Path:
    made = ChromeProfile()
    made.kernel(GEMM, 10, 30, launch=1)
    made.kernel(DISPATCH, 20, 40, stream=21, launch=5)
    return made.write(path)


# What makes the words of each command that writes a file, of a folder to read from and the file to write.
COMMANDS: dict[str, Callable[[Path, Path], list[object]]] = {
    "run": lambda folder, out: ["run", "--limit", 1, "--trace", out],
    "record": lambda folder, out: ["record", "-o", out, "--", sys.executable, PROGRAM, "steps", 1, 0],
    "export": lambda folder, out: ["export", write_trace(folder / "t"), "--format", "chrome", "-o", out],
    "import": lambda folder, out: ["import", write_profile(folder / "p.json"), "-o", out],
    "show": lambda folder, out: ["show", write_trace(folder / "t"), "--html", out],
}
ALL = pytest.mark.parametrize("command", sorted(COMMANDS))


@ALL
def test_the_help_says_what_becomes_of_a_file_that_is_there(command: str) -> None:
    done = in_process(command, "--help")
    assert done.returncode == 0
    assert "one that is there is replaced" in " ".join(done.stdout.split()).replace("│ │ ", "")


@ALL
def test_a_folder_that_is_not_there(tmp_path: Path, command: str) -> None:
    out = tmp_path / "absent" / "out.jsonl"
    done = in_process(*COMMANDS[command](tmp_path, out))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{out} cannot be written: its folder does not exist" in one_sentence(done.stderr)


@pytest.mark.parametrize("command", ["export", "import", "run", "show"])
def test_a_folder_and_a_device_that_takes_nothing(tmp_path: Path, command: str) -> None:
    (tmp_path / "there").mkdir()
    for out, sentence in (
        (tmp_path / "there", f"{tmp_path / 'there'} cannot be written: it is a folder"),
        (f"{tmp_path / 'new'}/", f"{tmp_path / 'new'}/ names a folder; name the file to write in it"),
        (Path("/dev/full"), "/dev/full cannot be written: no space left on device"),
    ):
        done = in_process(*COMMANDS[command](tmp_path, out))  # type: ignore[arg-type]
        assert (done.returncode, done.stdout) == (2, "")
        assert sentence in one_sentence(done.stderr)


@pytest.mark.parametrize("command", ["export", "import", "record", "show"])
def test_a_file_that_is_there_is_replaced(tmp_path: Path, command: str) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("what was there")
    done = in_process(*COMMANDS[command](tmp_path, out))
    assert done.returncode == 0, done.stderr
    assert b"what was there" not in out.read_bytes() and out.stat().st_size > 100


def test_a_recording_is_replaced_only_by_another_one(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("what was there")
    assert in_process("record", "-o", out, "--", sys.executable, PROGRAM, "idle").returncode == 1
    assert out.read_text() == "what was there" and [each.name for each in tmp_path.iterdir()] == ["out.jsonl"]
    assert in_process("record", "-o", out, "--", sys.executable, PROGRAM, "steps", 2, 0).returncode == 0
    assert len(read_trace(out).steps) == 2


def test_it_is_found_out_before_anything_is_read(tmp_path: Path) -> None:
    out, absent = tmp_path / "absent" / "out", tmp_path / "none"
    for words in (
        ["run", "--prompts", absent, "--trace", out],
        ["import", absent, "-o", out],
        ["export", absent, "--format", "chrome", "-o", out],
        ["show", absent, "--html", out],
    ):
        done = in_process(*words)
        assert (done.returncode, one_sentence(done.stderr)) == (
            2,
            f"{out} cannot be written: its folder does not exist",
        )


def test_what_a_command_reads_is_never_replaced(tmp_path: Path) -> None:
    trace, table = write_trace(tmp_path / "t"), tmp_path / "k.toml"
    table.write_text("")
    kept = {each: each.read_bytes() for each in (trace, table, PACKAGED_PROMPTS, PACKAGED_MODEL / "config.json")}
    for words, what in (
        (["export", trace, "--format", "chrome", "-o", trace], f"--output {trace} is the trace itself"),
        (
            ["export", trace, "--format", "chrome", "--kernels", table, "-o", table],
            f"--output {table} is the table of kernels itself",
        ),
        (["show", trace, "--html", trace], f"--html {trace} is the trace itself"),
        (["run", "--trace", PACKAGED_PROMPTS], f"--trace {PACKAGED_PROMPTS} is the prompt file itself"),
        (
            ["run", "--trace", PACKAGED_MODEL / "config.json"],
            f"--trace {PACKAGED_MODEL / 'config.json'} is a file of the model itself",
        ),
    ):
        done = in_process(*words)
        assert (done.returncode, done.stdout) == (2, "")
        assert one_sentence(done.stderr) == f"{what}; name another file"
    assert {each: each.read_bytes() for each in kept} == kept


def test_to_look_changes_nothing(tmp_path: Path) -> None:
    kept, link, pipe = tmp_path / "kept", tmp_path / "link", tmp_path / "pipe"
    kept.write_text("what was there")
    link.symlink_to(tmp_path / "later")
    os.mkfifo(pipe)
    before = sorted(each.name for each in tmp_path.iterdir())
    # A pipe has no reader yet, and is not waited for.
    for path in (kept, link, pipe, tmp_path / "new", Path("/dev/null")):
        check_output(path, "--trace")
    assert sorted(each.name for each in tmp_path.iterdir()) == before and kept.read_text() == "what was there"
    astray = tmp_path / "astray"
    astray.symlink_to(tmp_path / "absent" / "t")
    for path, reason in ((astray, "its folder does not exist"), (kept / "t", "its folder is a file")):
        with pytest.raises(ConfigurationError, match=reason):
            check_output(path, "--trace")
