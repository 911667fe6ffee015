from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo_greenlet.errors import TraceFileError
from dbo_greenlet.trace import (
    EndRecord,
    GpuRecord,
    HeaderRecord,
    OpRecord,
    PromptRecord,
    RecvRecord,
    SliceRecord,
    StepRecord,
    schema,
)

number = st.integers(min_value=0, max_value=2**53)
index = st.integers(min_value=0, max_value=40)
text = st.text()
time = st.floats(allow_nan=False, allow_infinity=False)
value = st.recursive(
    st.none() | st.booleans() | st.integers() | time | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
values = st.dictionaries(text, value, max_size=3)
ints = st.lists(number, max_size=5)

RECORDS = st.one_of(
    st.builds(
        HeaderRecord,
        package=text,
        rank=index,
        world=index,
        schema=st.just(schema.SCHEMA_VERSION),
        torch=text,
        python=text,
        platform=text,
        threads=index,
        model=values,
        settings=values,
        env=st.dictionaries(text, text, max_size=3),
        started=text,
        origin_ns=number,
        versions=st.dictionaries(text, text, max_size=3),
    ),
    st.builds(
        PromptRecord,
        request=index,
        rank=index,
        arrival=number,
        text=st.text(st.characters(codec=None)),  # lone surrogates too: broken input must be recordable
        ids=ints,
        answer=st.none() | text,
    ),
    st.builds(
        StepRecord,
        step=number,
        rank=index,
        run=text,
        tokens=number,
        padded=number,
        split=st.booleans(),
        reason=text,
        votes=st.lists(value, max_size=3),
        slices=st.lists(ints, max_size=3),
        schedule=text,
        hash=text,
        yields=ints,
        output=text,
        requests=ints,
        sampled=ints,
        begin=st.none() | time,
        end=st.none() | time,
        error=st.none() | text,
        execution=text,
        policy=text,
        seed=st.none() | number,
        vote_begin=st.none() | time,
        vote_end=st.none() | time,
    ),
    st.builds(
        SliceRecord,
        step=number,
        rank=index,
        run=text,
        ubatch=index,
        slice=index,
        site=text,
        begin=time,
        end=time,
        stream=st.none() | text,
        failed=st.booleans(),
        layer=st.none() | index,
    ),
    st.builds(
        RecvRecord,
        step=number,
        rank=index,
        run=text,
        ubatch=index,
        site=text,
        sent=time,
        by=st.none() | index,
        at=st.none() | time,
        decision=st.none() | number,
        sent_decision=st.none() | number,
        bytes=st.none() | number,
    ),
    st.builds(
        GpuRecord,
        step=number,
        rank=index,
        run=text,
        ubatch=index,
        slice=index,
        site=text,
        stream=text,
        begin=time,
        end=time,
        waited=time,
        after=text,
        error=time,
    ),
    st.builds(
        OpRecord,
        step=number,
        rank=index,
        run=text,
        number=number,
        op=text,
        ubatch=st.none() | index,
        slice=st.none() | index,
        stream=st.none() | text,
        at=st.none() | time,
        name=text,
        event=st.none() | number,
        of=st.none() | number,
        owner=st.none() | index,
        bytes=st.none() | number,
        memory=st.lists(st.tuples(text, text | number, number, st.none() | number).map(list), max_size=3),
    ),
    st.builds(EndRecord, ok=st.booleans(), rank=index, error=st.none() | text),
)


@given(RECORDS)
def test_a_record_comes_back_from_its_line_as_it_was(record: Any) -> None:
    line = schema.to_json(record)
    assert line.isascii() and "\n" not in line
    assert schema.from_json(json.loads(line)) == record


def test_the_line_of_a_slice() -> None:
    record = SliceRecord(3, 1, "dbo", 0, 7, "layer3.dispatch", 10.5, 20.125)
    assert schema.to_json(record) == (
        '{"t":"slice","step":3,"rank":1,"run":"dbo","ubatch":0,"slice":7,"site":"layer3.dispatch",'
        '"begin":10.5,"end":20.125,"stream":null,"failed":false,"layer":null}'
    )


def test_the_line_of_an_operation_leaves_out_what_it_lacks() -> None:
    least = OpRecord(3, 1, "", 0, "host_wait")
    assert schema.to_json(least) == '{"t":"op","step":3,"rank":1,"run":"","number":0,"op":"host_wait"}'
    record = OpRecord(3, 1, "dbo", 4, "wait", 0, 0, "comm", 0.0, event=0, of=0)
    assert schema.to_json(record) == (
        '{"t":"op","step":3,"rank":1,"run":"dbo","number":4,"op":"wait","ubatch":0,"slice":0,"stream":"comm",'
        '"at":0.0,"event":0,"of":0}'
    )


def test_the_line_of_a_slice_on_the_gpu() -> None:
    record = GpuRecord(3, 1, "dbo", 0, 7, "layer3.combine", "comm", 10.5, 20.125, 1.5, "layer3.dispatch", 6.1)
    assert schema.to_json(record) == (
        '{"t":"gpu","step":3,"rank":1,"run":"dbo","ubatch":0,"slice":7,"site":"layer3.combine","stream":"comm",'
        '"begin":10.5,"end":20.125,"waited":1.5,"after":"layer3.dispatch","error":6.1}'
    )


def test_keys_that_are_missing_take_their_defaults() -> None:
    data = {"t": "recv", "step": 0, "rank": 0, "run": "dbo", "ubatch": 1, "site": "", "sent": 4}
    assert schema.from_json(data) == RecvRecord(0, 0, "dbo", 1, "", 4)


def test_a_step_of_a_trace_from_before_there_was_its_execution() -> None:
    step = StepRecord(0, 0, "dbo", 8, 8, True, "split-decode")
    line = schema.to_json(step)
    older = line.replace(',"execution":""', "")
    assert older != line and schema.from_json(json.loads(older)) == step


def test_unknown_keys_are_passed_over() -> None:
    assert schema.from_json({"t": "end", "ok": True, "rank": 2, "mood": "good"}) == EndRecord(True, 2)


def test_unknown_kinds_are_no_record_and_no_error() -> None:
    assert schema.from_json({"t": "weather", "rain": 3}) is None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([1], "a record is a JSON object, not an array"),
        ("text", 'a record is a JSON object, not "text"'),
        ({"rank": 0}, 'the record has no kind (the key "t")'),
        ({"t": 5}, 'the record has no kind (the key "t")'),
        ({"t": "end", "rank": 0}, 'an end record needs the key "ok"'),
        ({"t": "end", "ok": 1, "rank": 0}, '"ok" of an end record is 1, expected bool'),
        ({"t": "end", "ok": True, "rank": True}, '"rank" of an end record is true, expected int'),
        ({"t": "end", "ok": True, "rank": 1.5}, '"rank" of an end record is 1.5, expected int'),
        ({"t": "end", "ok": True, "rank": None}, '"rank" of an end record is null, expected int'),
        (
            {"t": "end", "ok": False, "rank": 0, "error": {}},
            '"error" of an end record is an object, expected str | None',
        ),
        (
            {"t": "prompt", "request": 0, "rank": 0, "arrival": 0, "text": "", "ids": [1, "2"]},
            '"ids" of a prompt record is an array, expected list[int]',
        ),
    ],
)
def test_a_wrong_record_is_refused_by_name(data: object, message: str) -> None:
    with pytest.raises(TraceFileError) as caught:
        schema.from_json(data)
    assert str(caught.value) == message


@pytest.mark.parametrize("bad", [math.nan, math.inf, object(), {1, 2}])
def test_what_json_cannot_say_is_not_written(bad: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        schema.to_json(HeaderRecord("0.1.0", 0, 1, settings={"x": bad}))


def test_an_older_schema_is_upgraded_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    # As if schema 3 had called "reason" what 2 called "why" and 1 called "because".
    def rename(old: str, new: str) -> Any:
        return lambda data: {new if key == old else key: v for key, v in data.items()}

    monkeypatch.setattr(schema, "SCHEMA_VERSION", 3)
    monkeypatch.setattr(schema, "UPGRADES", {1: rename("because", "why"), 2: rename("why", "reason")})
    step = {"t": "step", "step": 0, "rank": 0, "run": "dbo", "tokens": 4, "padded": 4, "split": False}
    records = [
        schema.from_json({**step, key: "small"}, version) for version, key in enumerate(("because", "why", "reason"), 1)
    ]
    assert records == [StepRecord(0, 0, "dbo", 4, 4, False, "small")] * 3
