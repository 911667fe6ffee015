"""A page without a browser: its data says what the export says, and nothing in a trace can become markup or code."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings

from dbo_greenlet.errors import ConfigurationError, TraceFileError
from dbo_greenlet.trace import HeaderRecord, Record, SliceRecord, StepRecord, TraceWriter, page
from dbo_greenlet.trace.export.items import Item, Process, Slice, SliceTrack
from dbo_greenlet.trace.export.open_export import open_export
from dbo_greenlet.trace.item_stages import STAGES, stage_of
from dbo_greenlet.trace.op_text import operation_text
from dbo_greenlet.trace.page import StepWords, page_json, write_page
from dbo_greenlet.trace.schema import OpRecord
from tests.trace.pages import data_of, slices_of, write_trace
from tests.trace.random_traces import traces

NASTY = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>\u2028 & \"'"


def page_of(items: object, *, title: str = "a trace", steps: object = (), facts: object = ()) -> str:
    file = io.BytesIO()
    write_page(items, file, title=title, steps=steps, facts=facts)  # type: ignore[arg-type]
    return file.getvalue().decode("utf-8")


def one_slice(name: str = "A1", **details: object) -> list[Item]:
    return [
        Process(1, 0, "rank 0", ()),
        SliceTrack(1_000_000, 1, "microbatch 0", 0),
        Slice(1_000_000, 5, 9, name, "slice", dict(details)),
    ]


# -- the data ----------------------------------------------------------------------------------------------------------


def items_of(path: Path) -> list[Item]:
    return list(open_export([path]))


def compare(items: list[Item]) -> None:
    processes = {item.id: item.rank for item in items if isinstance(item, Process)}
    tracks = {item.id: item for item in items if isinstance(item, SliceTrack)}
    wanted = []
    for item in items:
        if isinstance(item, Slice):
            track = tracks[item.track]
            wanted.append((processes[track.process], track.place, track.id, item.begin, item))
    # Within a track the order is the export's: slices without length may begin together.
    wanted.sort(key=lambda each: each[:3])
    found = slices_of(data := data_of(page_of(items)))
    assert len(found) == len(wanted)
    for shown, (rank, _, number, _, item) in zip(found, wanted, strict=True):
        assert (shown["rank"], shown["track"], shown["name"]) == (rank, tracks[number].name, item.name)
        assert (shown["begin"], shown["end"], shown["waited"]) == (item.begin, item.end, item.waited)
        layer = {"layer": shown["details"]["layer"]} if "layer" in shown["details"] else {}
        assert shown["details"] == item.details | layer
        assert shown["stage"] == stage_of(item)
    arrows = {(arrow[2], arrow[2] + arrow[3], data["strings"][arrow[4]]) for arrow in data["arrows"]}
    ends = {flow.id: flow for _, _, _, _, item in wanted for flow in item.arrives}
    starts = [flow for _, _, _, _, item in wanted for flow in item.departs]
    assert arrows == {(flow.at, ends[flow.id].at, flow.name) for flow in starts}
    for from_slice, to_slice, departs, travels, *_ in data["arrows"]:
        assert wanted[from_slice][4].begin <= departs <= wanted[from_slice][4].end
        assert wanted[to_slice][4].begin <= departs + travels <= wanted[to_slice][4].end


@given(traces())
@settings(max_examples=60, deadline=None)
def test_the_page_holds_what_the_export_shows(tmp_path_factory: pytest.TempPathFactory, records: list[Record]) -> None:
    path = tmp_path_factory.mktemp("page") / "t.jsonl"
    with TraceWriter(path) as writer:
        writer.write(*records)
    try:
        items = items_of(path)
    except TraceFileError:
        return  # refused, as by the other exports; the tests of these say when
    compare(items)


def test_layers_and_stages_of_a_usual_trace(tmp_path: Path) -> None:
    items = items_of(write_trace(tmp_path / "t.jsonl"))
    compare(items)
    shown = slices_of(data_of(page_of(items)))
    stages = {(each["track"], each["name"].split(",")[0]): each["stage"] for each in shown}
    assert stages["microbatch 0", "A1"] == "attention"
    assert stages["microbatch 1", "M3"] == "experts"
    assert stages["microbatch 1", "out"] == "other"
    assert stages["dispatch in flight", "D2"] == "dispatch"
    assert stages["combine in flight", "C2"] == "combine"
    assert stages["comm stream", "C1"] == "combine"
    assert {stage for (track, _), stage in stages.items() if track == "steps"} == {"other"}
    layers = {(each["name"].split(",")[0]): each["details"].get("layer") for each in shown}
    assert (layers["A1"], layers["C2"], layers["M3"], layers["out"]) == (1, 2, 3, None)


def test_what_the_profiler_says_of_a_stage_comes_first() -> None:
    item = Slice(1, 0, 1, "A1", "kernel", {"stage": "combine", "layer": 7})
    assert stage_of(item) == "combine"
    assert stage_of(Slice(1, 0, 1, "A1", "kernel", {"stage": "of mine"})) == "other"
    assert stage_of(Slice(1, 0, 1, "Attention kernel", "kernel", {})) == "other"


def test_columns_are_small(tmp_path: Path) -> None:
    """A row per slice was four times as large as the columns are: this is what keeps them from becoming rows again."""
    items = items_of(write_trace(tmp_path / "t.jsonl", steps=40))
    count = sum(isinstance(item, Slice) for item in items)
    assert len(page_json(data_of(page_of(items))["tracks"])) / count < 50


# -- the file ----------------------------------------------------------------------------------------------------------


def test_nothing_in_a_trace_becomes_markup() -> None:
    step = StepWords("dbo", 0, 0, NASTY, NASTY, {(0, 0): [NASTY]})
    whole = page_of(one_slice(NASTY, site=NASTY), title=NASTY, steps=[step], facts=[(NASTY, NASTY)])
    assert whole.count("<script") == whole.count("</script>") == 2
    assert "<img" not in whole and "alert(1)</script>" not in whole and "<!--" not in whole.replace("<!DOCTYPE", "")
    data = data_of(whole)
    assert slices_of(data)[0]["name"] == slices_of(data)[0]["details"]["site"] == NASTY
    assert data["texts"] == [NASTY] and data["steps"][0]["heading"] == data["title"] == NASTY
    assert data["facts"][0] == [NASTY, NASTY]


def test_a_title_that_looks_like_the_frames_marks_is_a_title() -> None:
    title = "@@data@@ @@script@@"
    assert page_of(one_slice(), title=title).count(title) == 3  # window, head, data


def test_the_policy_lets_only_the_pages_own_script_and_style_run() -> None:
    whole = page_of(one_slice())
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', whole)
    (script,) = re.findall(r"<script>(.*?)</script>", whole, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", whole, re.DOTALL)
    for kind, text in (("script", script), ("style", style)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy


def test_the_page_names_no_other_address() -> None:
    whole = page_of(one_slice())
    assert re.findall(r"(?:https?:)?//[\w.-]+\.\w+|@import|url\(", whole) == []
    assert set(re.findall(r'\b(?:src|href)="([^"]*)"', whole)) == {"data:,"}


def test_a_page_that_no_browser_could_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "MAX_SLICES", 3)
    items = one_slice()
    assert data_of(page_of([*items, *items[2:] * 2]))["tracks"][0]["length"] == [4, 4, 4]
    with pytest.raises(ConfigurationError, match=r"holds up to 3 slices, .* \(--step 100-200\)"):
        page_of([*items, *items[2:] * 3])


def test_values_that_python_takes_for_equal_stay_apart(tmp_path: Path) -> None:
    items = one_slice(a=True, b=[1])
    items += [Slice(1_000_000, 10, 11, "A1", "slice", {"a": 1, "b": [1]})]
    found = [each["details"] for each in slices_of(data_of(page_of(items)))]
    assert [json.dumps(each) for each in found] == ['{"a": true, "b": [1]}', '{"a": 1, "b": [1]}']


def test_stages_have_colours_in_the_pages_style() -> None:
    style = re.findall(r"<style>(.*?)</style>", page_of(one_slice()), re.DOTALL)[0]
    for stage in STAGES:
        assert len(re.findall(rf"--{stage}: #", style)) == 3  # light, dark by the system, dark by choice


# -- words -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"op": "record", "stream": "compute", "event": 3}, "4: record on compute event 3"),
        ({"op": "wait", "stream": "comm", "event": 3, "of": 1}, "4: wait on comm for event 3 of operation 1"),
        ({"op": "send", "stream": "comm", "bytes": 4096, "at": 1.5}, "4: send on comm, 4096 bytes, at 1.5 us"),
        ({"op": "receive", "owner": 1}, "4: receive for microbatch 1"),
        (
            {
                "op": "work",
                "name": "mm",
                "memory": [["read", 255, 0, 8], ["write", "kv", 4, None], ["write", "x", 0, None]],
            },
            "4: work mm; reads 0xff +0 to +8; writes kv +4 to its end; writes x",
        ),
        ({"op": "work", "memory": ["odd"]}, "4: work; memory odd"),
        (
            {"op": "work", "memory": [["read", "x", 0, None]] * 11},
            "4: work; " + "; ".join(["reads x"] * 8) + "; and 3 more",
        ),
    ],
)
def test_an_operation_in_words(fields: dict[str, object], text: str) -> None:
    assert operation_text(OpRecord(step=0, rank=0, run="dbo", number=4, **fields)) == text  # type: ignore[arg-type]


def test_a_step_without_slices_makes_a_page_too(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with TraceWriter(path) as writer:
        writer.write(HeaderRecord("0.1.0", 0, 1), StepRecord(0, 0, "dbo", 8, 8, False, "why", begin=1.0, end=2.0))
    (shown,) = slices_of(data_of(page_of(items_of(path))))
    assert (shown["track"], shown["name"], shown["details"]["reason"]) == ("steps", "step 0, not split", "why")


def test_a_failed_slice_says_so(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with TraceWriter(path) as writer:
        writer.write(
            HeaderRecord("0.1.0", 0, 1), SliceRecord(0, 0, "dbo", 0, 0, "layer1.dispatch", 1.0, 2.0, failed=True)
        )
    (shown,) = slices_of(data_of(page_of(items_of(path))))
    assert (shown["name"], shown["details"]["failed"]) == ("failed", True)
