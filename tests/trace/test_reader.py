from __future__ import annotations

import gzip
import os
import threading
from pathlib import Path

import pytest

from dbo_greenlet.errors import TraceFileError
from dbo_greenlet.schedule import Schedule
from dbo_greenlet.trace import (
    EndRecord,
    HeaderRecord,
    OpRecord,
    RecvRecord,
    SliceRecord,
    StepRecord,
    TraceReader,
    read_trace,
    schema,
)

HEADER = '{"t":"header","schema":1,"package":"0.1.0","rank":0,"world":1}\n'
END = '{"t":"end","ok":true,"rank":0}\n'


@pytest.fixture
def trace_file(tmp_path: Path):
    def write(content: str | bytes) -> Path:
        path = tmp_path / "t.jsonl"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def refusal(path: Path) -> str:
    with pytest.raises(TraceFileError) as caught:
        read_trace(path)
    return str(caught.value)


def test_operations_belong_to_their_step(trace_file) -> None:
    ops = [
        OpRecord(2, 0, "dbo", 0, "record", 0, 1, "compute", event=0),
        OpRecord(2, 0, "dbo", 1, "wait", event=0, of=0),
    ]
    trace = read_trace(trace_file(HEADER + "".join(schema.to_json(r) + "\n" for r in ops)))
    assert trace.step(2).ops == ops and trace.step(2).record is None


def test_steps_are_found_by_run_step_and_rank(trace_file) -> None:
    records = [
        HeaderRecord("0.1.0", 1, 2),
        StepRecord(4, 1, "dbo", 8, 8, True, "split", slices=[[0, 4, 0, 1], [4, 8, 1, 2]]),
        SliceRecord(4, 1, "dbo", 1, 0, "layer0.dispatch", 3.0, 4.0),
        SliceRecord(4, 1, "dbo", 0, 0, "", 4.0, 5.0),
        SliceRecord(4, 1, "dbo", 1, 1, "layer0.dispatch", 5.0, 6.0, failed=True),
        RecvRecord(4, 1, "dbo", 1, "layer0.dispatch", 3.5, 0, 4.5, 1, 0),
        StepRecord(4, 1, "unsplit", 8, 8, False, "asked for"),
        EndRecord(True, 1),
    ]
    trace = read_trace(trace_file("".join(schema.to_json(r) + "\n" for r in records)))
    step = trace.steps["dbo", 4, 1]
    assert (step.record, step.slices, step.receives) == (records[1], records[2:5], [records[5]])
    assert (step.decisions, step.sites, step.count) == ((1, 0), ("layer0.dispatch", ""), 2)
    assert trace.steps["unsplit", 4, 1].count == 0
    assert (trace.headers, trace.header, trace.ends) == ({1: records[0]}, records[0], {1: records[-1]})
    assert (trace.runs, trace.ranks) == (["dbo", "unsplit"], [1])
    assert trace.step(4) is step
    assert trace.step(4, run="unsplit", rank=1) is trace.steps["unsplit", 4, 1]
    with pytest.raises(TraceFileError) as caught:
        trace.step(5, run="dbo", rank=0)
    assert str(caught.value) == (
        f"{trace.path} has no step 5 of run dbo on rank 0; it holds step 4 of runs dbo, unsplit on rank 1"
    )


@pytest.mark.parametrize(
    ("numbers", "held"),
    [
        ([3, 4, 5], "steps 3 to 5"),
        ([0, 100, 200], "steps 0, 100, 200"),
        (range(0, 2000, 100), "20 of the steps 0 to 1900, the latest 1400, 1500, 1600, 1700, 1800, 1900"),
    ],
)
def test_a_step_that_is_not_there_is_answered_with_those_that_are(trace_file, numbers, held: str) -> None:
    steps = [schema.to_json(StepRecord(n, 0, "dbo", 8, 8, True, "split")) + "\n" for n in numbers]
    trace = read_trace(trace_file(HEADER + "".join(steps)))
    with pytest.raises(TraceFileError) as caught:
        trace.step(150)
    assert str(caught.value) == f"{trace.path} has no step 150; it holds {held} of run dbo on rank 0"


def test_a_trace_without_steps_says_so(trace_file) -> None:
    trace = read_trace(trace_file(HEADER))
    with pytest.raises(TraceFileError) as caught:
        trace.step(0)
    assert str(caught.value) == f"{trace.path} has no step 0; it holds no steps (yet)"


def test_a_step_whose_record_never_came_is_kept(trace_file) -> None:
    line = schema.to_json(SliceRecord(0, 0, "dbo", 1, 0, "a", 1.0, 2.0)) + "\n"
    trace = read_trace(trace_file(HEADER + line))
    assert trace.steps["dbo", 0, 0].record is None
    assert trace.steps["dbo", 0, 0].count == 2


@pytest.mark.parametrize("cut", range(1, len(END)))
def test_a_torn_last_line_is_dropped_wherever_it_is_torn(trace_file, cut: int) -> None:
    reader = TraceReader(trace_file(HEADER + END[:cut]))
    records = list(reader)
    whole = cut == len(END) - 1  # only the newline is missing
    assert len(records) == (2 if whole else 1)
    assert reader.torn is not whole


def test_a_torn_line_that_is_not_the_last_is_an_error(trace_file) -> None:
    path = trace_file(HEADER + END[:10] + "\n" + END)
    assert refusal(path).startswith(f"{path}, line 2: not JSON: ")


def test_kinds_from_the_future_are_passed_over_and_named(trace_file) -> None:
    trace = read_trace(trace_file(HEADER + '{"t":"weather"}\n' + END))
    assert trace.unknown_kinds == {"weather"} and trace.ends == {0: EndRecord(True, 0)}


def test_a_newer_schema_is_refused_with_both_numbers(trace_file) -> None:
    path = trace_file('{"t":"header","schema":7,"package":"9.0.1"}\n')
    assert refusal(path) == (
        f"{path}: the trace has schema 7, this version of dbo_greenlet reads up to 1; it was written by 9.0.1: "
        "read it with that one or a later one"
    )


def test_a_schema_that_never_was(trace_file) -> None:
    path = trace_file(HEADER.replace('"schema":1', '"schema":0'))
    assert (
        refusal(path)
        == f"{path}: the trace states schema 0, which never existed; this version of dbo_greenlet reads 1 to 1"
    )


def test_a_file_of_the_first_schema_is_read_and_what_it_lacks_has_its_default() -> None:
    """Written by the first version that wrote traces: two ranks, two split steps, and the same unsplit."""
    path = Path(__file__).parent / "data" / "trace_of_the_first_schema.jsonl"
    assert b'"layer"' not in path.read_bytes() and b'"execution"' not in path.read_bytes()
    trace = read_trace(path)
    assert (trace.ranks, trace.runs, trace.torn, trace.unknown_kinds) == ([0, 1], ["dbo", "unsplit"], False, set())
    step = trace.step(1, run="dbo", rank=1)
    assert step.record is not None and step.record.schedule == Schedule(2, step.decisions, step.sites).encode()
    assert (step.record.policy, step.record.seed, step.record.vote_begin, step.record.execution) == ("", None, None, "")
    assert (len(step.slices), len(step.receives), step.gpu, step.ops) == (18, 16, [], [])
    assert {(each.stream, each.layer) for each in step.slices} == {(None, None)}
    assert {each.bytes for each in step.receives} == {None}
    assert trace.ends == {0: EndRecord(True, 0), 1: EndRecord(True, 1)}


def test_a_compressed_trace_is_read_like_a_plain_one(trace_file) -> None:
    lines = (HEADER + END).encode()
    plain = read_trace(trace_file(lines))
    for compressed in (gzip.compress(lines), gzip.compress(lines[:50]) + gzip.compress(lines[50:])):
        path = trace_file(compressed)
        trace = read_trace(path)
        assert (trace.headers, trace.ends, trace.path) == (plain.headers, plain.ends, str(path))


def test_a_torn_line_in_a_compressed_trace_is_dropped_too(trace_file) -> None:
    trace = read_trace(trace_file(gzip.compress((HEADER + END[:10]).encode())))
    assert trace.torn and trace.ends == {}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
@pytest.mark.parametrize("packed", [bytes, gzip.compress])
def test_a_pipe_is_read_once(tmp_path: Path, packed) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writing = threading.Thread(target=path.write_bytes, args=(packed((HEADER + END).encode()),))
    writing.start()
    assert read_trace(path).ends == {0: EndRecord(True, 0)}
    writing.join()


def test_an_older_schema_is_read(trace_file, monkeypatch: pytest.MonkeyPatch) -> None:
    path = trace_file(HEADER + END)
    monkeypatch.setattr(schema, "SCHEMA_VERSION", 2)
    monkeypatch.setattr(schema, "UPGRADES", {1: lambda data: {**data, "ok": not data["ok"]} if "ok" in data else data})
    reader = TraceReader(path)
    assert list(reader)[1] == EndRecord(False, 0)
    assert reader.version == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", ": no trace yet: the file is empty"),
        ('{"t":"hea', ": no trace yet: its first line is cut off; the run has only just started, or died"),
        ("hello", ", line 1: not JSON: Expecting value: line 1 column 1 (char 0)"),
        ("[1, 2]\n", ": the first record is no header; this is not a trace of dbo_greenlet"),
        (END, ": the first record is no header; this is not a trace of dbo_greenlet"),
        ('{"traceEvents": []}\n', ": the first record is no header; this is not a trace of dbo_greenlet"),
        ('{"t":"header","schema":"1"}\n', ': "schema" of the header is "1", expected int'),
        ('{"t":"header","schema":1}\n', ', line 1: a header record needs the key "package"'),
        (HEADER + "\n", ", line 2: not JSON: Expecting value: line 2 column 1 (char 1)"),
        (HEADER + "7\n", ", line 2: a record is a JSON object, not 7"),
        (HEADER + END + '{"t":"end","ok":"yes","rank":0}\n', ', line 3: "ok" of an end record is "yes", expected bool'),
        (HEADER + HEADER, ", line 2: a second header of rank 0; are these two traces in one file?"),
        (HEADER + END + END, ", line 3: a second end record of rank 0; are these two traces in one file?"),
        (HEADER + '{"t":"x","a":NaN}\n', ", line 2: not JSON: NaN is no number in JSON"),
        (HEADER + '{"t":"x","a":-Infinity}\n', ", line 2: not JSON: -Infinity is no number in JSON"),
        (HEADER + '{"t":"x","a":1e999}\n', ", line 2: not JSON: the number 1e999 is too large"),
        (bytes(range(256)), ", line 1: not text; this is a binary file, not a trace"),
        (HEADER.encode() + b'{"t":"\xff\xfe"}\n', ", line 2: not text; this is a binary file, not a trace"),
        (HEADER.encode() + b"{\0\0\0", ", line 2: not text; this is a binary file, not a trace"),
        (gzip.compress(b"", mtime=0), ": no trace yet: the file is empty"),
        (gzip.compress(b"hello", mtime=0), ", line 1: not JSON: Expecting value: line 1 column 1 (char 0)"),
        (gzip.compress(bytes(range(9)), mtime=0), ", line 1: not text; this is a binary file, not a trace"),
        (gzip.compress(HEADER.encode(), mtime=0)[:-9], ": the gzip data ends in the middle; the copy is not whole"),
        (b"\x1f\x8b", ": the gzip data ends in the middle; the copy is not whole"),
        (b"\x1f\x8bzip " * 2, ": damaged gzip data (Unknown compression method)"),
    ],
)
def test_what_is_no_trace_is_refused_with_file_and_line(trace_file, content: str | bytes, message: str) -> None:
    path = trace_file(content)
    assert refusal(path) == f"{path}{message}"


def test_a_step_that_is_there_twice(trace_file) -> None:
    line = schema.to_json(StepRecord(2, 0, "dbo", 8, 8, True, "split")) + "\n"
    path = trace_file(HEADER + line + line)
    assert (
        refusal(path)
        == f"{path}, line 3: a second record of step 2, run 'dbo', rank 0; are these two traces in one file?"
    )


def test_a_line_without_an_end(trace_file, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dbo_greenlet.trace.reader.MAX_LINE_BYTES", 100)
    path = trace_file(HEADER + '{"t":"' + "x" * 1000)
    assert refusal(path).startswith(f"{path}, line 2: not JSON")


def test_deeply_nested_json_is_an_error_and_no_crash(trace_file) -> None:
    path = trace_file(HEADER + '{"t":' + "[" * 100_000 + "\n")
    assert refusal(path).startswith(f"{path}, line 2: not JSON")


def test_a_directory_and_a_missing_file(tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"{tmp_path}: this is a directory; name the trace file in it"
    assert refusal(tmp_path / "x") == f"{tmp_path / 'x'}: no such file"


def test_a_reader_can_be_iterated_again_while_the_file_grows(trace_file) -> None:
    path = trace_file(HEADER + END[:7])
    reader = TraceReader(path)
    assert len(list(reader)) == 1 and reader.torn
    with open(path, "a") as file:
        file.write(END[7:])
    assert len(list(reader)) == 2 and not reader.torn and reader.line == 2
