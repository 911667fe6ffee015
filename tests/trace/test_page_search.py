"""Searching a page in a real browser: what a query finds, and how the matches are gone through and shown."""

from __future__ import annotations

import pytest

from dbo_greenlet.trace import SliceRecord, Trace
from dbo_greenlet.trace.notation import parse_site
from tests.trace.browser import Browser
from tests.trace.pages import of_slices


def layer(record: SliceRecord) -> int | None:
    site = parse_site(record.site)
    return None if site is None else site.layer


QUERIES = {
    "layer 2 microbatch 1 track:microbatch": lambda r: layer(r) == 2 and r.ubatch == 1,
    "layer:2-3 track:microbatch": lambda r: layer(r) in (2, 3),
    "ubatch:0 step:1 rank:1 track:microbatch": lambda r: (r.ubatch, r.step, r.rank) == (0, 1, 1),
    "site:combine track:microbatch": lambda r: "combine" in r.site,
    'track:microbatch "layer3.dispatch"': lambda r: r.site == "layer3.dispatch",
    "track:microbatch longer:40us": lambda r: r.end - r.begin >= 40,
    "track:microbatch shorter:25 step 0-1": lambda r: r.end - r.begin <= 25 and r.step <= 1,
    "track:microbatch stage:experts run:dbo": lambda r: r.site.endswith("combine"),
    "track:microbatch slice 6": lambda r: r.slice == 6,
    "track:microbatch no-such-thing": lambda r: False,
}


@pytest.mark.parametrize("query", QUERIES)
def test_a_search_finds_what_the_trace_holds(opened: Browser, trace: Trace, query: str) -> None:
    wanted = sorted((r.step, r.rank, r.ubatch, r.slice) for _, r in of_slices(trace) if QUERIES[query](r))
    said = opened.search(query)
    assert said == f"{len(wanted)} found"
    found = opened.run(
        """return timeline.search.list.map((n) => { const [track, i] = timeline.trace.locate(n), d = track.details(i);
        return [d.step, timeline.trace.process.get(track.process).rank, d.microbatch, d.slice]; })"""
    )
    assert sorted(map(tuple, found)) == wanted


def test_next_and_previous_go_through_the_matches(opened: Browser) -> None:
    opened.search("layer 2 microbatch 1 rank 0 site:dispatch track:microbatch")
    numbers = opened.run("return timeline.search.list")
    assert len(numbers) == 3  # one a step
    opened.driver.find_element("id", "query").send_keys("\ue007")  # Enter
    assert (opened.selected(), opened.text("#found")) == (numbers[0], "1 of 3")
    opened.press_button("next")
    opened.press_button("next")
    assert (opened.selected(), opened.text("#found")) == (numbers[2], "3 of 3")
    begin, end = opened.run("return timeline.trace.span(arguments[0])", numbers[2])
    assert opened.view()[0] <= begin and end <= opened.view()[1]
    opened.press_button("next")
    assert opened.selected() == numbers[0]
    opened.press_button("previous")
    assert opened.selected() == numbers[2]
    assert opened.details()["step"] == "2"


def test_what_does_not_match_is_dimmed(opened: Browser) -> None:
    hit, other = (opened.named(f'step 1 rank 0 track:"microbatch 0" slice:{n}')[0] for n in (2, 3))
    opened.fit(hit, other)

    def colours() -> list[tuple[int, int, int]]:
        return [opened.colour(opened.box(n)[2] - 8, opened.box(n)[1] + 6) for n in (hit, other)]

    assert colours() == [opened.css_colour("attention"), opened.css_colour("experts")]
    opened.search("layer 2 stage:attention")
    bright, dim = colours()
    assert bright == opened.css_colour("attention") and dim != opened.css_colour("experts")
    opened.driver.find_element("id", "query").send_keys("\ue00c")  # Escape
    opened.painted()
    assert opened.text("#found") == "" and colours()[1] == opened.css_colour("experts")
