"""The quick reader hands out what the strict one does, and says what the strict one says, of any file whatever."""

from __future__ import annotations

import dataclasses
import gzip
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("msgspec", reason="msgspec is not installed, so there is no quick reader")
from dbo_greenlet.errors import TraceFileError
from dbo_greenlet.trace import (
    EndRecord,
    HeaderRecord,
    PromptRecord,
    Record,
    SliceRecord,
    StepRecord,
    TraceReader,
    TraceWriter,
    quick_records,
)
from dbo_greenlet.trace.quick_records import QuickReader
from dbo_greenlet.trace.schema import KINDS, from_json, to_json
from dbo_greenlet.trace.step_stream import StepStream
from tests.trace.random_traces import traces

HEADER = HeaderRecord("0.1.0", 0, 1, torch="2.13.0", settings={"policy": "x"}, env={"A": "b"})
ALL = [
    HEADER,
    PromptRecord(0, 0, 0, "one", [1, 2]),
    StepRecord(0, 0, "dbo", 8, 8, True, "r", [[1, None]], [[0, 4, 0, 1]], "s", "h", [1], "o", [0], [5], 0.0, 9.0),
    SliceRecord(0, 0, "dbo", 0, 0, "layer1.dispatch", 1.0, 2.0),
    EndRecord(True, 0),
]


def plain(record: Any) -> dict[str, Any]:
    """Its fields; a time that JSON has as a whole number is the float nearest to it."""
    out = {field.name: getattr(record, field.name) for field in dataclasses.fields(KINDS[record.kind])}
    return {
        name: float(value) if name in ("begin", "end") and value is not None else value for name, value in out.items()
    }


def outcome(reader: TraceReader) -> tuple[Any, ...]:
    records, error = [], None
    try:
        records = [(record.kind, plain(record)) for record in reader]
    except TraceFileError as caught:
        error = str(caught)
    return records if error is None else error, reader.line, reader.torn, reader.unknown_kinds, reader.version


def written(path: Path, records: list[Record]) -> Path:
    with TraceWriter(path) as writer:
        writer.write(*records)
    return path


def test_every_kind_arrives_whole(tmp_path: Path) -> None:
    path = written(tmp_path / "t", ALL)
    found = outcome(QuickReader(path))
    assert found == outcome(TraceReader(path)) and len(found[0]) == len(ALL)
    # Only the header, which the strict reader judges, is one of its records.
    kinds = [isinstance(record, tuple(KINDS.values())) for record in QuickReader(path)]
    assert kinds == [True] + [False] * (len(ALL) - 1)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(records=traces())
def test_random_traces(tmp_path: Path, records: list[Record]) -> None:
    path = written(tmp_path / "t", records)
    assert outcome(QuickReader(path)) == outcome(TraceReader(path))


LINES = [to_json(record).encode() for record in ALL]
ODD_LINES = [
    b"",
    b" ",
    b"null",
    b"[]",
    b"not json",
    b'{"t":"later","x":1}',
    b'{"t":5}',
    b'{"x":1}',
    LINES[3].replace(b'"slice":0', b'"slice":0.0'),
    LINES[3].replace(b'"slice":0', b'"slice":true'),
    LINES[3].replace(b'"slice":0', b'"slice":"0"'),
    LINES[3].replace(b'"begin":1.0', b'"begin":1'),
    LINES[3].replace(b'"begin":1.0', b'"begin":NaN'),
    LINES[3].replace(b'"begin":1.0', b'"begin":1e999'),
    LINES[3].replace(b'"begin":1.0', b'"begin":123456789012345678901234567890'),
    LINES[3].replace(b'"begin":1.0,', b""),
    LINES[3].replace(b"layer1", b"\\ud800"),
    LINES[3].replace(b"layer1", b"\xff"),
    LINES[3].replace(b"layer1", b"\0"),
    LINES[3].replace(b"layer1", b"\t"),
    LINES[3][:-1] + b',"further":[1,{"a":2}]}',
    LINES[3][:-1] + b',"slice":7}',
    LINES[3] + LINES[3],
    LINES[3] + b"\r",
    LINES[2].replace(b'"tokens":8', b'"tokens":' + b"9" * 30),
    LINES[2].replace(b'"split":true', b'"split":1'),
    LINES[1].replace(b"[1,2]", b"[1,2.5]"),
]


@pytest.mark.parametrize("odd", ODD_LINES)
@pytest.mark.parametrize("place", [1, 3, len(LINES)])
def test_an_odd_line_is_judged_alike(tmp_path: Path, odd: bytes, place: int) -> None:
    path = tmp_path / "t"
    for ending in (b"\n", b""):
        path.write_bytes(b"\n".join([*LINES[:place], odd, *LINES[place:]]) + ending)
        assert outcome(QuickReader(path)) == outcome(TraceReader(path))


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_judged_alike(tmp_path: Path, data: st.DataObject) -> None:
    text = bytearray(b"\n".join(LINES * 2) + b"\n")
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(text) - 1))
        length = data.draw(st.integers(0, 5))
        text[place : place + length] = data.draw(
            st.binary(max_size=4) | st.sampled_from([b'"', b"\n", b"{", b",1", b"0"])
        )
    path = tmp_path / "t"
    path.write_bytes(bytes(text))
    assert outcome(QuickReader(path)) == outcome(TraceReader(path))


def test_blocks_end_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t"
    path.write_bytes(b"\n".join([*LINES, ODD_LINES[5], *LINES[2:]]) + b"\n" + LINES[3][:-5])
    wanted = outcome(TraceReader(path))
    assert wanted[2] and wanted[3] == {"later"}
    for size in (1, 7, 100, 1000):
        monkeypatch.setattr(quick_records, "_BLOCK_BYTES", size)
        assert outcome(QuickReader(path)) == wanted


def test_compressed_and_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "t.gz"
    whole = gzip.compress(b"\n".join(LINES) + b"\n")
    path.write_bytes(whole)
    assert outcome(QuickReader(path)) == outcome(TraceReader(path)) and len(outcome(QuickReader(path))[0]) == len(ALL)
    path.write_bytes(whole[:-9])
    assert outcome(QuickReader(path))[0] == outcome(TraceReader(path))[0]


def test_steps_are_put_together_alike(tmp_path: Path) -> None:
    path = written(tmp_path / "t", ALL)
    quick, strict = (list(StepStream(path, quick=each)) for each in (True, False))
    assert len(quick) == len(strict) == 1
    assert plain(quick[0].record) == plain(strict[0].record) and quick[0].decisions == strict[0].decisions
    assert strict[0].slices == [from_json({"t": "slice", **plain(quick[0].slices[0])})]
