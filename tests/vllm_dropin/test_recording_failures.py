"""What keeps a server's trace from being written, and never stops the server. Needs no vLLM."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dbo_greenlet.trace import read_trace, rolling
from dbo_greenlet.vllm.decisions import StepDecision
from dbo_greenlet.vllm.recording import ServerTrace
from tests.vllm_dropin.servers import ENVIRONMENT, SCRIPT, Server, serving

UNSPLIT = StepDecision(False, "below-decode-threshold", 3, 3, (3, 40))


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """What is logged as a warning. Not by caplog: an imported vLLM keeps its loggers from passing records on."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    listener = Listener(logging.WARNING)
    logger = logging.getLogger("vllm.plugins.dbo_greenlet")
    logger.addHandler(listener)
    yield said
    logger.removeHandler(listener)


def serve_on(trace: ServerTrace) -> None:
    """Whatever became of the trace, the server's steps run as ever, and none with the recorder on."""
    server = Server(trace)
    assert not server.step()
    assert not server.step(fail=True)
    trace.unsplit_step(UNSPLIT)
    trace.close()
    trace.close()
    assert trace.path is None


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"folder": "/dev/full"}, "file exists"),
        ({"folder": "/dev/full/trace"}, "not a directory"),
        ({"every": 0}, "every=0 is not a whole number of 1 or more"),
        ({"every": 2.5}, "every=2.5 is not a whole number of 1 or more"),
        ({"megabytes": 0.01}, "megabytes=0.01 is not a number of 0.1 or more"),
        ({"megabytes": float("nan")}, "megabytes=nan is not a number of 0.1 or more"),
        ({"megabytes": float("inf")}, "megabytes=inf is not a number of 0.1 or more"),
        ({"settings": {"x": "y" * 30_000}, "megabytes": 0.1}, "must be 100000 and hold four headers"),
        ({"settings": None}, "'NoneType' object has no attribute 'items'"),
    ],
    ids=str,
)
def test_one_log_line_and_nothing_recorded(tmp_path: Path, warnings, options: dict, why: str) -> None:
    arguments = {"folder": tmp_path, "every": 1, "megabytes": 1.0, "rank": 0, "world": 1, "settings": {}} | options
    trace = ServerTrace(**arguments)
    serve_on(trace)
    assert warnings == [trace.problem]
    assert trace.problem.startswith(f"The trace in {arguments['folder']} is not written: ") and why in trace.problem
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_is_a_file(tmp_path: Path, warnings) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text("mine")
    serve_on(ServerTrace(file, every=1, megabytes=1, rank=0, world=1, settings={}))
    assert warnings == [f"The trace in {file} is not written: file exists; the server runs without it."]
    assert file.read_text() == "mine"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path, warnings) -> None:
    tmp_path.chmod(0o500)
    serve_on(ServerTrace(tmp_path, every=1, megabytes=1, rank=0, world=1, settings={}))
    assert warnings == [f"The trace in {tmp_path} is not written: permission denied; the server runs without it."]


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="needs a file system in which nobody can make a folder")
def test_a_folder_that_cannot_be_made(warnings) -> None:
    trace = ServerTrace("/sys/kernel/dbo/trace", every=1, megabytes=1, rank=0, world=1, settings={})
    serve_on(trace)
    assert warnings == [trace.problem] and "is not written: " in trace.problem


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_disk_that_is_full_from_the_start(tmp_path: Path, warnings, monkeypatch: pytest.MonkeyPatch) -> None:
    # The file is made, as on a full disk, and the first byte does not fit.
    from dbo_greenlet.trace import rolling
    from dbo_greenlet.trace.writer import TraceWriter

    monkeypatch.setattr(rolling, "TraceWriter", lambda path: TraceWriter("/dev/full"))
    trace = ServerTrace(tmp_path, every=1, megabytes=1, rank=0, world=1, settings={})
    serve_on(trace)
    assert warnings == [trace.problem] and "no space left on device" in trace.problem


@pytest.mark.skipif(sys.platform != "linux", reason="the limit on a file's size is tried on Linux")
def test_a_disk_that_fills_up_while_the_server_runs(tmp_path: Path) -> None:
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, 8_000));"
        f"sys.argv[1:] = [{str(tmp_path)!r}, '1', '1']; sys.path.insert(0, {str(SCRIPT.parent)!r});"
        "import script_server; script_server.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        input="step\n" * 12,
        capture_output=True,
        text=True,
        timeout=120,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0 and done.stdout.split()[-1] == "12"
    (path,) = tmp_path.iterdir()
    assert done.stderr.splitlines() == [
        f"The trace {path} is not complete: file too large; the run went on without it."
    ]
    trace = read_trace(path)
    assert trace.steps and not trace.torn and not trace.ends


def test_a_trace_that_somebody_deletes_begins_anew(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        server.step()
        Path(server.trace.path).unlink()
        server.step()
        assert [s.step for s in read_trace(server.trace.path).steps.values()] == [1]
        for path in tmp_path.iterdir():
            path.unlink()
        tmp_path.rmdir()
        server.step()
        assert "no such file or directory" in server.trace.problem
        assert not server.step()


def test_what_cannot_be_written_ends_the_recording_and_not_the_server(tmp_path: Path, warnings) -> None:
    with serving(tmp_path) as server:
        server.step()
        server.step(cuts=["not a slice"])
        assert not server.step()
    assert warnings == [server.trace.problem]
    assert server.trace.problem.startswith("The trace of this server ends here: ValueError: ")
    (path,) = tmp_path.iterdir()
    assert len(read_trace(path).steps) == 1


def test_an_unsplit_step_that_cannot_be_written_late_does_not_reach_the_split_one(
    tmp_path: Path, warnings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written when the next step begins, which a split one tells by asking whether it is due."""

    def breaks(self: object, data: bytes) -> None:
        raise RuntimeError("the file system is gone")

    with serving(tmp_path) as server:
        server.trace.unsplit_step(UNSPLIT)
        with monkeypatch.context() as patch:
            patch.setattr(rolling.RollingTrace, "write", breaks)
            assert server.trace.due() is False
        assert not server.step()
    assert warnings == ["The trace of this server ends here: RuntimeError: the file system is gone"]


class Speechless(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def test_an_error_without_a_text_is_written_by_its_name(tmp_path: Path, warnings) -> None:
    with serving(tmp_path) as server:
        trace = server.trace
        trace.due()
        cuts = [(0, 1, 0, 1), (1, 2, 1, 2)]
        trace.split_step(kind="eager", slices=cuts, tokens=2, padded=2, schedule=None, error=Speechless())
        path = trace.path
        server.step()
    assert (warnings, trace.problem) == ([], None)
    first, second = (step.record for step in read_trace(path).steps.values())
    assert first.error == "Speechless: (its text cannot be had)" and second.error is None


def test_a_failure_without_a_text_ends_the_recording_and_not_the_server(tmp_path: Path, warnings) -> None:
    def cuts():
        raise Speechless

    class Settings(dict):
        def items(self):
            raise Speechless

    with serving(tmp_path) as server:
        server.trace.due()
        server.trace.split_step(kind="eager", slices=(cuts() for _ in "1"), tokens=2, padded=2, schedule=None)
        assert not server.step()
    assert warnings == ["The trace of this server ends here: Speechless: (its text cannot be had)"]
    trace = ServerTrace(tmp_path, every=1, megabytes=1, rank=1, world=2, settings=Settings())
    serve_on(trace)
    assert trace.problem is not None and "is not written: (its text cannot be had)" in trace.problem


def test_steps_in_one_thread_and_the_end_in_another(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        path = server.trace.path
        stop = threading.Event()
        written = threading.Event()

        def serve() -> None:
            while not stop.is_set():
                server.step(1)
                written.set()

        worker = threading.Thread(target=serve)
        worker.start()
        assert written.wait(timeout=60)
        server.trace.close()
        stop.set()
        worker.join(timeout=60)
    trace = read_trace(path)
    assert trace.ends[0].ok and not trace.torn and server.trace.problem is None
    assert json.loads(Path(path).read_text().splitlines()[-1])["t"] == "end"
