"""Any trace as a page in a real browser: what the page's own reading of its data gives, and what cannot hurt it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from dbo_greenlet.cli.show import show
from dbo_greenlet.errors import TraceFileError
from dbo_greenlet.trace import HeaderRecord, Record, RecvRecord, SliceRecord, StepRecord, TraceWriter
from tests.trace.browser import Browser
from tests.trace.pages import data_of, slices_of, write_trace
from tests.trace.profiles import DISPATCH, FLASH, GEMM, ChromeProfile
from tests.trace.random_traces import traces

# What the page's reading of its data gives, slice by slice, and its arrows.
DUMP = """
const { trace } = timeline, slices = [];
for (const track of trace.tracks) for (let i = 0; i < track.count; i++) slices.push({
  rank: trace.process.get(track.process).rank, track: track.name, name: trace.name(track.first + i),
  stage: trace.stages[track.stage[i]], begin: track.begin[i], end: track.end[i], waited: track.wait.get(i) || 0,
  details: track.details(i) });
return [slices, trace.arrows.map((a) => [a.from, a.to, a.departs, a.arrives, a.name])];
"""


def page_of(path: Path) -> Path:
    out = path.with_suffix(".html")
    assert show([path], html=out) == 0
    return out


def quiet(browser: Browser) -> None:
    browser.painted()
    assert browser.complaints() == []
    assert [url for url in browser.requests() if not url.startswith(("file:", "data:"))] == []


@given(traces())
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_browser_reads_what_the_export_shows(
    browser: Browser, tmp_path_factory: pytest.TempPathFactory, records: list[Record]
) -> None:
    path = tmp_path_factory.mktemp("any") / "t.jsonl"
    with TraceWriter(path) as writer:
        writer.write(*records)
    try:
        page = page_of(path)
    except TraceFileError:
        return  # refused, as by the other exports
    browser.open(page)
    data = data_of(page.read_text(encoding="utf-8"))
    slices, arrows = browser.run(DUMP)
    assert slices == slices_of(data)
    strings = data["strings"]
    assert arrows == [
        [a, b, departs, departs + travels, strings[name]] for a, b, departs, travels, name, _ in data["arrows"]
    ]
    # Everything can be selected, and nothing of it is an error.
    for number in range(0, len(slices), max(len(slices) // 5, 1)):
        browser.run("timeline.select(arguments[0], true)", number)
        assert browser.text("#details h2") == slices[number]["name"]
    quiet(browser)


def test_a_trace_that_means_harm_is_text(browser: Browser, tmp_path: Path) -> None:
    nasty = "</script><script>window.harmed = 1</script><img src=x onerror='window.harmed = 1'><!--"
    path = tmp_path / "t.jsonl"
    with TraceWriter(path) as writer:
        writer.write(
            HeaderRecord("0.1.0", 0, 1, settings={nasty: nasty}, env={nasty: nasty}),
            StepRecord(0, 0, nasty, 8, 8, True, nasty, begin=0.0, end=40.0, execution=nasty, error=nasty),
            SliceRecord(0, 0, nasty, 0, 0, nasty, 1.0, 10.0, stream=nasty),
            SliceRecord(0, 0, nasty, 0, 1, "", 11.0, 20.0),
        )
    browser.open(page_of(path))
    (number,) = [n for n, _, name in browser.run("return timeline.named('track:microbatch')") if name == nasty]
    browser.run("timeline.select(arguments[0], true)", number)
    details = browser.details()
    assert details["site"] == details["run"] == details["stream"] == nasty
    assert nasty in browser.text("#timetable") and nasty in browser.text("#tab-steps")
    assert browser.text("#tab-about").count(nasty) == 4
    box = browser.box(number)
    browser.move_to((box[0] + box[2]) / 2, (box[1] + box[3]) / 2).perform()
    assert nasty in browser.text("#tip")
    assert browser.search(nasty) == "1 found"  # each of its words is in its name
    browser.search(f'site:"{nasty}"')
    assert browser.run("return window.harmed === undefined") is True
    quiet(browser)


def test_the_policy_holds_where_escaping_would_not(browser: Browser, tmp_path: Path) -> None:
    """The second wall, by itself: a script that got into the file after all does not run."""
    page = page_of(write_trace(tmp_path / "t.jsonl", steps=1))
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("<header>", "<script>window.harmed = 1</script><header>", 1), encoding="utf-8")
    browser.open(page)
    assert browser.run("return [window.harmed === undefined, timeline.trace.slices > 0]") == [True, True]
    (complaint,) = browser.complaints()
    assert "Content Security Policy" in complaint


def test_a_trace_without_slices(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with TraceWriter(path) as writer:
        writer.write(
            HeaderRecord("0.1.0", 0, 1), StepRecord(0, 0, "unsplit", 8, 8, False, "too few", begin=1.0, end=9.0)
        )
    browser.open(page_of(path))
    assert browser.run("return timeline.trace.slices") == 1
    assert browser.text("#timetable") == "step 0, rank 0, run unsplit: 8 tokens\nnot split: too few\ntook 0.008 ms"
    browser.press("w", "0", "n", "f", "\ue014", "/")
    assert browser.search("layer 3") == "0 found"
    quiet(browser)


def test_what_failed_and_what_never_arrived_has_a_dashed_edge(browser: Browser, tmp_path: Path) -> None:
    key = {"step": 0, "rank": 0, "run": "dbo"}
    path = tmp_path / "t.jsonl"
    with TraceWriter(path) as writer:
        writer.write(
            HeaderRecord("0.1.0", 0, 1),
            SliceRecord(**key, ubatch=0, slice=0, site="layer1.dispatch", begin=0.0, end=10.0),
            SliceRecord(**key, ubatch=1, slice=0, site="", begin=10.0, end=20.0, failed=True),
            RecvRecord(**key, ubatch=0, site="layer1.dispatch", sent=9.0),
        )
    browser.open(page_of(path))

    def dark_on_top(query: str) -> int:
        """Of the points along the upper edge, how many are as dark as writing."""
        left, top, right, _ = browser.box(browser.named(query)[0])
        points = [browser.colour(left + 12 + n, top + 4) for n in range(0, min(60, int(right - left) - 20), 2)]
        return sum(point == browser.css_colour("strong") for point in points)

    assert dark_on_top("name:A1") == 0
    assert 8 <= dark_on_top("name:failed") <= 22  # dashes of 4 and gaps of 3
    assert 8 <= dark_on_top("complete:false") <= 22
    quiet(browser)


def test_a_long_slice_that_shares_its_first_pixel_with_short_ones_is_drawn(browser: Browser, tmp_path: Path) -> None:
    key = {"step": 0, "rank": 0, "run": "dbo", "ubatch": 0}
    path = tmp_path / "t.jsonl"
    sites = ["layer1.dispatch", "layer1.combine", "layer2.dispatch", "layer2.combine", ""]
    ends = [0.01, 0.02, 0.03, 100.0, 200.0]
    with TraceWriter(path) as writer:
        writer.write(HeaderRecord("0.1.0", 0, 1))
        for number, (site, end) in enumerate(zip(sites, ends, strict=True)):
            begin = ends[number - 1] if number else 0.0
            writer.write(SliceRecord(**key, slice=number, site=site, begin=begin, end=end))
    browser.open(page_of(path))
    (number,) = browser.named("track:microbatch slice:3")
    left, top, right, _ = browser.box(number)
    first, _, _, _ = browser.box(browser.named("track:microbatch slice:0")[0])
    assert int(first) == int(left), "they do share a pixel"
    assert browser.colour((left + right) / 2, top + 6) == browser.css_colour("experts")
    quiet(browser)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return page_of(write_trace(tmp_path_factory.mktemp("large") / "t.jsonl", steps=900))


@pytest.mark.slow
def test_a_hundred_thousand_slices(browser: Browser, large: Path) -> None:
    browser.open(large)
    assert browser.run("return timeline.trace.slices") > 90_000
    # One pixel holds many slices: each is still found, and shown when it is looked for.
    assert browser.search("layer 2 microbatch 1 track:microbatch site:dispatch") == "1800 found"
    assert browser.search("step 777 rank 1 track:microbatch slice 6 microbatch 1") == "1 found"
    browser.press_button("next")
    assert browser.details()["step"] == "777"
    left, top, right, _ = browser.box(browser.selected())
    assert right - left >= 3
    browser.press("f")
    left, top, right, _ = browser.box(browser.selected())
    assert browser.colour(right - 30, top + 5) == browser.css_colour("other")
    browser.press_button("whole")
    browser.press("w", "d", "a", "s", "c", "x")
    quiet(browser)


def test_a_profile(browser: Browser, tmp_path: Path) -> None:
    pytest.importorskip("msgspec", reason="msgspec is not installed")
    profile = ChromeProfile()
    profile.range("attn(F)", 0, 40)
    profile.kernel(FLASH, 10, 60, stream=7, launch=5)
    profile.kernel(DISPATCH, 20, 120, stream=9, launch=15)
    profile.kernel(GEMM, 70, 100, stream=7, launch=30)
    browser.open(page_of(profile.write(tmp_path / "profile.json.gz")))
    (number,) = browser.named("deep_ep stage:dispatch")
    browser.run("timeline.select(arguments[0], true)", number)
    details = browser.details()
    assert details["kernel"] == DISPATCH and details["length"] == "100 us" and details["track"] == "rank 0, stream 9"
    assert "cudaLaunchKernel" in details["comes from"]
    # Launches have arrows when one of their ends is selected.
    browser.painted()
    assert browser.run("return timeline.arrows") == 1
    browser.press("\ue00c")
    assert browser.run("return timeline.arrows") == 0
    assert browser.run("return document.getElementById('timetable').offsetWidth") == 0
    assert browser.text("#tab-steps") == "There are no steps in this trace."
    quiet(browser)
