"""A page in a real browser: what it draws, and what it does when somebody clicks, zooms, drags, types and reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from dbo_greenlet.trace import RecvRecord, Trace, render_step
from tests.trace.browser import Browser
from tests.trace.pages import of_slices

AXIS = 24  # pixels, of the page


# -- what it is --------------------------------------------------------------------------------------------------------


def test_it_is_one_file_that_asks_for_nothing_and_complains_of_nothing(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.painted()
    assert [url for url in browser.requests() if not url.startswith("data:")] == [page.as_uri()]
    assert browser.complaints() == []
    assert browser.text("h1") == "t.jsonl"


def test_its_slices_have_the_colours_of_their_stages(opened: Browser) -> None:
    for query, stage in (
        ("step 1 rank 0 track:microbatch name:A2", "attention"),
        ("step 1 rank 1 track:compute name:M2", "experts"),
        ("step 1 rank 0 track:dispatch name:D1", "dispatch"),
        ("step 1 rank 0 track:comm name:C2", "combine"),
        ("step 1 rank 0 track:steps", "other"),
    ):
        number = opened.named(query)[0]
        opened.run("timeline.select(arguments[0], true); timeline.select(-1)", number)
        opened.fit(number)
        left, top, right, _ = opened.box(number)
        assert opened.colour(right - 6, top + 6) == opened.css_colour(stage), query
        assert opened.colour((left + right) / 2, top + 1) == opened.css_colour("back")  # the row's edge


def test_a_wait_is_a_thin_bar_before_its_slice(opened: Browser) -> None:
    # 10 us of 30 to 50.
    number = opened.named("step 0 rank 0 track:compute name:M2")[0]
    opened.fit(number)
    left, top, right, bottom = opened.box(number)
    wait = (
        (right - left) * 10_000 / opened.run("const [b, e] = timeline.trace.span(arguments[0]); return e - b", number)
    )
    assert opened.colour(left + wait + 40, top + 5) == opened.css_colour("experts")
    assert opened.colour(left + wait / 2, top + 5) == opened.css_colour("back")
    assert opened.colour(left + wait / 2, (top + bottom) / 2) not in map(opened.css_colour, ("experts", "back"))


def test_arrows_go_from_sends_to_receives(opened: Browser, trace: Trace) -> None:
    number = opened.named("step 0 rank 0 track:microbatch microbatch 0 name:A1")[0]
    opened.run("timeline.select(arguments[0])", number)
    opened.fit(number)
    assert opened.run("return timeline.arrows") >= 1
    window = next(r for r in trace.step(0, rank=0).receives if r.ubatch == 0)
    found = opened.details()["goes to"]
    assert found.startswith("D1, microbatch 0: A1 on microbatch 1, ")
    opened.driver.find_element("css selector", "#details .link").click()
    (target,) = [s for s in trace.step(0, rank=0).slices if s.ubatch == window.by and s.slice == 0]
    details = opened.details()
    assert (details["microbatch"], details["slice"], details["site"]) == ("1", "0", target.site)
    assert details["comes from"].startswith("D1, microbatch 0: A1 on microbatch 0, ")
    opened.press_button("arrows")
    opened.run("timeline.select(-1)")
    opened.painted()
    assert opened.run("return timeline.arrows") == 0


# -- reading -----------------------------------------------------------------------------------------------------------


def microseconds(text: str) -> float:
    return float(text.split(" us")[0].replace(",", ""))


def test_a_click_shows_all_that_is_recorded_of_a_slice(opened: Browser, trace: Trace) -> None:
    step, record = of_slices(trace, step=1, rank=1, ubatch=1, slice=3)[0]
    (number,) = opened.named('step 1 rank 1 track:"microbatch 1" slice:3')
    opened.fit(number)
    left, top, right, bottom = opened.box(number)
    opened.click((left + right) / 2, (top + bottom) / 2)
    assert opened.selected() == number
    assert opened.text("#details h2") == "M2"
    details = opened.details()
    shift = 100  # microseconds that rank 1's clock began later
    assert microseconds(details["begin"]) == pytest.approx(record.begin + shift, abs=1e-6)
    assert microseconds(details["end"]) == pytest.approx(record.end + shift, abs=1e-6)
    assert microseconds(details["length"]) == pytest.approx(record.end - record.begin, abs=1e-6)
    assert step.record is not None and step.record.begin is not None
    assert microseconds(details["in its step"]) == pytest.approx(record.begin - step.record.begin, abs=1e-6)
    assert details["track"] == "rank 1, microbatch 1"
    shown = {key: details[key] for key in ("step", "run", "microbatch", "slice", "site", "layer", "stage")}
    assert shown == {
        "step": "1",
        "run": "dbo",
        "microbatch": "1",
        "slice": "3",
        "site": "layer2.combine",
        "layer": "2",
        "stage": "experts",
    }
    # And below it the step that it is of.
    assert opened.text("#timetable") == render_step(step, width=110)
    opened.click(right + 4, AXIS + 300)  # beside everything
    opened.press("\ue00c")  # Escape
    assert opened.selected() == -1


def test_a_window_and_a_gpu_slice_show_their_fields(opened: Browser, trace: Trace) -> None:
    window: RecvRecord = trace.step(2, rank=0).receives[3]
    number = opened.named("step 2 rank 0 track:flight")[3]
    opened.run("timeline.select(arguments[0], true)", number)
    details = opened.details()
    assert window.at is not None
    assert microseconds(details["length"]) == pytest.approx(window.at - window.sent, abs=1e-6)
    assert (details["site"], details["complete"]) == (window.site, "true")
    assert details["received by"] == f"microbatch {window.by}"
    number = opened.named("step 2 rank 0 track:compute slice:4 microbatch 1")[0]
    opened.run("timeline.select(arguments[0], true)", number)
    details = opened.details()
    assert details["waits"] == "10 us of it, for the other stream"
    assert (details["site"], details["after"]) == ("layer3.dispatch", "layer2.combine")
    assert details["placed within (us)"] == "1.5"


def test_operations_are_shown_with_the_slice_that_issued_them(opened: Browser) -> None:
    (number,) = opened.named('step 0 rank 0 track:"microbatch 0" slice:1')
    opened.run("timeline.select(arguments[0], true)", number)
    assert opened.details()["operations"].splitlines() == [
        "1: wait on comm for event 7 of operation 0",
        "2: work mm; writes 0x1000 +0 to +512",
    ]
    (number,) = opened.named('step 1 rank 0 track:"microbatch 0" slice:1')
    opened.run("timeline.select(arguments[0], true)", number)
    assert "operations" not in opened.details()


def test_the_pointer_has_a_tip(opened: Browser) -> None:
    (number,) = opened.named('step 1 rank 0 track:"microbatch 0" slice:2')
    opened.fit(number)
    left, top, right, bottom = opened.box(number)
    opened.move_to((left + right) / 2, (top + bottom) / 2).perform()
    shown = opened.run("const tip = document.getElementById('tip'); return [tip.hidden, tip.textContent]")
    assert shown[0] is False
    assert (
        "A2" in shown[1] and "step 1, layer 2, microbatch 0, slice 2" in shown[1] and "to layer2.dispatch" in shown[1]
    )
    opened.move_to((left + right) / 2, AXIS / 2 + top - 100).perform()
    assert opened.run("return document.getElementById('tip').hidden") is True


def test_the_steps_are_listed_and_lead_to_their_slices(opened: Browser, trace: Trace) -> None:
    opened.driver.find_element("css selector", "[data-tab=steps]").click()
    rows = opened.run(
        "const rows = [...document.querySelectorAll('#tab-steps tbody tr')];"
        "return rows.map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    assert [(row[0], row[1], row[2], row[3], row[6], row[7]) for row in rows] == [
        (str(step), str(rank), "dbo", "64", "split-decode", "eager") for step in range(3) for rank in range(2)
    ]
    opened.driver.find_elements("css selector", "#tab-steps .link")[3].click()  # step 1 of rank 1
    opened.painted()
    record = trace.step(1, rank=1).record
    assert record is not None and record.begin is not None and record.end is not None
    begin, end = opened.view()
    length = (record.end - record.begin) * 1000
    assert begin == pytest.approx((record.begin + 100) * 1000 - 0.1 * length, rel=1e-6)
    assert end == pytest.approx((record.end + 100) * 1000 + 0.1 * length, rel=1e-6)
    assert opened.text("#timetable") == render_step(trace.step(1, rank=1), width=110)


def test_it_says_where_it_is_from(opened: Browser) -> None:
    opened.driver.find_element("css selector", "[data-tab=about]").click()
    rows = dict(
        opened.run(
            "return [...document.querySelectorAll('#tab-about tr')].map((r) => [...r.cells].map((c) => c.textContent))"
        )
    )
    assert rows["torch"] == "2.13.0" and rows["steps"] == "6"
    assert "clock" in rows["axis"]


# -- moving ------------------------------------------------------------------------------------------------------------


def test_zooming_keeps_the_time_under_the_pointer(opened: Browser) -> None:
    before = opened.view()
    left = opened.run("return document.getElementById('canvas').getBoundingClientRect().left")
    x = 700.0
    under = opened.run("return timeline.view.time(arguments[0])", x - left)
    opened.wheel(x, 300, -240, held="\ue009")  # Control
    after = opened.view()
    assert after[1] - after[0] < 0.6 * (before[1] - before[0])
    assert opened.run("return timeline.view.time(arguments[0])", x - left) == pytest.approx(under, abs=1)
    opened.wheel(x, 300, 240, held="\ue009")
    assert opened.view()[1] - opened.view()[0] == pytest.approx(before[1] - before[0], rel=0.01)


def test_keys_and_buttons_zoom_and_move(opened: Browser) -> None:
    whole = opened.view()
    opened.press("w", "w", "w")
    near = opened.view()
    assert near[1] - near[0] == pytest.approx(0.7**3 * (whole[1] - whole[0]), rel=1e-6)
    opened.press("d")
    assert opened.view()[0] > near[0] and opened.view()[1] - opened.view()[0] == pytest.approx(near[1] - near[0])
    opened.press("a", "s")
    assert opened.view()[1] - opened.view()[0] == pytest.approx(0.7**2 * (whole[1] - whole[0]), rel=1e-6)
    opened.press_button("zoom-in")
    assert opened.view()[1] - opened.view()[0] == pytest.approx(near[1] - near[0], rel=1e-6)
    opened.press_button("whole")
    assert opened.view() == pytest.approx(whole)


def test_dragging_moves_with_the_pointer(opened: Browser) -> None:
    (number,) = opened.named("step 1 rank 0 track:steps")
    opened.fit(number)
    opened.press("w", "w")
    left, top, right, bottom = opened.box(number)
    opened.drag(600, (top + bottom) / 2, 500, (top + bottom) / 2)
    assert opened.box(number) == pytest.approx([left - 100, top, right - 100, bottom], abs=1)
    assert opened.selected() == -1, "a drag is no click, although it begins and ends on a slice"


def test_a_drag_on_the_axis_zooms_to_it(opened: Browser) -> None:
    top = opened.run("return document.getElementById('canvas').getBoundingClientRect().top")
    wanted = opened.run("return [timeline.view.time(400), timeline.view.time(700)]")
    opened.drag(400, top + 10, 700, top + 10)
    assert opened.view() == pytest.approx(wanted, abs=(wanted[1] - wanted[0]) / 100)


def test_a_double_click_zooms_to_a_slice_and_f_to_its_step(opened: Browser, trace: Trace) -> None:
    (number,) = opened.named("step 1 rank 0 track:steps")
    left, top, right, bottom = opened.box(number)
    opened.move_to((left + right) / 2, (top + bottom) / 2).double_click().perform()
    opened.painted()
    begin, end = opened.run("return timeline.trace.span(arguments[0])", number)
    shown = opened.view()
    assert shown[0] < begin < end < shown[1] and (end - begin) / (shown[1] - shown[0]) > 0.8
    (inner,) = opened.named('step 1 rank 0 track:"microbatch 1" slice:2')
    opened.run("timeline.select(arguments[0])", inner)
    opened.press("f")
    begin, end = opened.run("return timeline.trace.span(arguments[0])", inner)
    assert (end - begin) / (opened.view()[1] - opened.view()[0]) > 0.8
    opened.press("f")
    assert opened.view() == pytest.approx(shown, rel=1e-3)


def test_arrow_keys_go_from_slice_to_slice(opened: Browser) -> None:
    numbers = opened.named('rank 0 track:"microbatch 0"')
    opened.run("timeline.select(arguments[0])", numbers[5])
    opened.press("\ue014")  # right
    assert opened.selected() == numbers[6]
    opened.press("\ue012", "\ue012")  # left
    assert opened.selected() == numbers[4]


def test_a_rank_is_folded_and_a_search_unfolds_it(opened: Browser) -> None:
    (number,) = opened.named("step 1 rank 0 track:steps")
    _, top, _, _ = opened.box(number)
    opened.click(40, top - 12)
    assert opened.run("return timeline.box(arguments[0])", number) is None
    opened.search("step 1 rank 0 track:steps")
    opened.press_button("next")
    assert opened.selected() == number
    assert opened.run("return timeline.box(arguments[0])", number) is not None


def test_dark_and_light(opened: Browser) -> None:
    number = opened.named("step 1 rank 0 track:steps")[0]
    left, top, _, _ = opened.box(number)
    assert opened.colour(left + 50, top + 1) == opened.css_colour("back") == (255, 255, 255)
    opened.press_button("theme")
    assert opened.colour(left + 50, top + 1) == opened.css_colour("back") != (255, 255, 255)
    opened.press("t")
    assert opened.colour(left + 50, top + 1) == opened.css_colour("back") == (255, 255, 255)


def test_colours_by_microbatch(opened: Browser) -> None:
    opened.press("c")
    assert opened.text("#legend") == "microbatch 0microbatch 1"
    for microbatch in (0, 1):
        (number,) = opened.named(f"step 1 rank 0 track:compute slice:3 microbatch {microbatch}")
        opened.fit(number)
        _, top, right, _ = opened.box(number)
        assert opened.colour(right - 6, top + 6) == opened.css_colour(f"m{microbatch}")
    opened.press("c")
    assert opened.text("#legend").startswith("attention")


def test_the_list_of_keys(opened: Browser) -> None:
    opened.press("?")
    assert opened.run("return document.getElementById('keys').open") is True
    opened.driver.find_element("css selector", "dialog button").click()
    assert opened.run("return document.getElementById('keys').open") is False
