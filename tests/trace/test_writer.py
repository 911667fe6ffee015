from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

import dbo_greenlet
from dbo_greenlet.trace import (
    EndRecord,
    HeaderRecord,
    PromptRecord,
    SliceRecord,
    StepRecord,
    TraceReader,
    TraceWriter,
    read_trace,
)

SCRIPT = Path(__file__).with_name("script_write_trace.py")
# A subprocess finds the package that these tests run on, installed or not.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(dbo_greenlet.__file__).parents[1])}
HEADER = HeaderRecord("0.1.0", 0, 1)


def step(number: int, rank: int = 0) -> StepRecord:
    return StepRecord(number, rank, "dbo", 8, 8, True, "split")


def slices(number: int, rank: int = 0) -> list[SliceRecord]:
    return [SliceRecord(number, rank, "dbo", ubatch, 0, "", 1.0 + ubatch, 2.0 + ubatch) for ubatch in (0, 1)]


def write(path: Path, records: Iterable[object]) -> Path:
    with TraceWriter(path) as writer:
        for record in records:
            writer.write(record)
    assert writer.problem is None
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    records = [HEADER, PromptRecord(0, 0, 0, "hé\u2028llo", [1, 2]), step(0), *slices(0), EndRecord(True, 0)]
    assert list(TraceReader(write(tmp_path / "t.jsonl", records))) == records


def test_every_write_is_in_the_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    writer = TraceWriter(path)
    writer.write(HEADER)
    assert list(TraceReader(path)) == [HEADER]
    writer.write(step(0), *slices(0))
    assert list(TraceReader(path)) == [HEADER, step(0), *slices(0)]
    writer.close()


@pytest.mark.parametrize("last", ["die", "half"])
def test_a_file_is_readable_while_another_process_writes_it_and_after_that_one_died(tmp_path: Path, last: str) -> None:
    path = tmp_path / "t.jsonl"
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            for count in (1, 2, 3):
                process.stdin.write("step\n")
                process.stdin.flush()
                assert process.stdout.readline() == f"{count}\n"
                trace = read_trace(path)
                assert len(trace.steps) == count and not trace.torn and not trace.ends
            process.stdin.write(f"{last}\n")
            process.stdin.flush()
            assert process.wait(timeout=60) == 3
        finally:
            process.kill()
    trace = read_trace(path)
    assert len(trace.steps) == 3
    assert trace.torn is (last == "half")


# -- what keeps a trace from being written, and never stops the run ----------------------------------------------------


def test_a_directory(tmp_path: Path) -> None:
    with TraceWriter(tmp_path) as writer:
        writer.write(HEADER)
    assert writer.problem == f"The trace {tmp_path} is not complete: is a directory; the run went on without it."


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    path = tmp_path / "gone" / "t.jsonl"
    with TraceWriter(path) as writer:
        writer.write(HEADER)
    assert writer.problem == (
        f"The trace {path} is not complete: no such file or directory; the run went on without it."
    )


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_full_device() -> None:
    with TraceWriter("/dev/full") as writer:
        writer.write(HEADER)
        writer.write(step(0))
    assert writer.problem == (
        "The trace /dev/full is not complete: no space left on device; the run went on without it."
    )


@pytest.mark.skipif(sys.platform != "linux", reason="the limit on a file's size is tried on Linux")
def test_a_file_that_can_grow_no_further_ends_with_a_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    program = (
        "import resource, signal, sys\n"
        "from dbo_greenlet.trace import HeaderRecord, PromptRecord, TraceWriter\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "with TraceWriter(sys.argv[1]) as writer:\n"
        "    writer.write(HeaderRecord('0.1.0', 0, 1))\n"
        "    for n in range(100):\n"
        "        writer.write(PromptRecord(n, 0, 0, 'x' * 50, []))\n"
        "print(writer.problem)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=60, env=ENVIRONMENT
    )
    assert done.stdout == f"The trace {path} is not complete: file too large; the run went on without it.\n", (
        done.stderr
    )
    assert path.read_bytes().endswith(b"}\n")
    trace = read_trace(path)
    assert [p.request for p in trace.prompts] == list(range(len(trace.prompts))) and len(trace.prompts) >= 3


def test_a_folder_that_vanishes_during_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    writer = TraceWriter(folder / "t.jsonl")
    writer.write(HEADER)
    shutil.rmtree(folder)
    writer.write(step(0))
    writer.close()
    assert writer.problem is not None and "no such file or directory" in writer.problem


def test_another_file_in_its_place(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    writer = TraceWriter(path)
    writer.write(HEADER)
    other = write(tmp_path / "other.jsonl", [HEADER])
    os.replace(other, path)
    writer.close()
    assert (
        writer.problem == f"The trace {path} is not complete: another file took its place; the run went on without it."
    )


def test_a_record_that_json_cannot_say(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with TraceWriter(path) as writer:
        writer.write(HEADER)
        writer.write(HeaderRecord("0.1.0", 1, 2, settings={"path": Path("x")}))
        writer.write(step(0))
    assert writer.problem is not None and "PosixPath is not JSON serializable" in writer.problem
    assert list(TraceReader(path)) == [HEADER]


def test_an_interrupt_in_the_middle_of_a_write_leaves_no_half_line_behind(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    writer = TraceWriter(path)
    writer.write(HEADER)

    class Interrupted:
        """The open file, but half a write goes through and then Ctrl-C arrives."""

        def __init__(self, file: object) -> None:
            self.file = file

        def write(self, data: bytes) -> int:
            self.file.write(data[: len(data) // 2])
            raise KeyboardInterrupt

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

    real = writer._file
    writer._file = Interrupted(real)
    with pytest.raises(KeyboardInterrupt):
        writer.write(step(0))
    writer._file = real
    end = EndRecord(False, 0, "interrupted")
    writer.write(end)
    writer.close()
    assert writer.problem is None
    assert list(TraceReader(path)) == [HEADER, end]


def test_closing_twice_is_fine(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t.jsonl")
    writer.write(HEADER)
    writer.close()
    writer.close()
    assert writer.problem is None
