"""A real browser for the tests of pages: Debian's Chromium, driven by selenium."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

WIDTH, HEIGHT = 1400, 900


class Browser:
    """One browser that opens page after page, and what it can be asked about the one that is open."""

    def __init__(self, chromium: str, chromedriver: str) -> None:
        from selenium import webdriver

        options = webdriver.ChromeOptions()
        options.binary_location = chromium
        # In a container its sandbox has no rights to be made with and /dev/shm is small.
        for argument in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu"):
            options.add_argument(f"--{argument}")
        options.add_argument(f"--window-size={WIDTH},{HEIGHT}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        service = webdriver.ChromeService(executable_path=chromedriver)
        self.driver = webdriver.Chrome(options=options, service=service)
        self.driver.set_script_timeout(60)

    def open(self, page: Path) -> None:
        self.complaints()
        self.requests()
        self.driver.get(page.as_uri())

    def run(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def painted(self) -> None:
        """Wait until what was changed so far is on the canvas."""
        self.driver.execute_async_script(
            "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done()));"
        )

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0]).textContent", selector))

    def complaints(self) -> list[str]:
        """What the console holds since it was last asked."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Addresses that were asked for since it was last asked."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [message["params"] for message in messages if message["method"] == "Network.requestWillBeSent"]
        return [parameters["request"]["url"] for parameters in sent]

    # -- the page's own words ------------------------------------------------------------------------------------------

    def view(self) -> tuple[float, float]:
        begin, end = self.run("return [timeline.view.begin, timeline.view.end]")
        return begin, end

    def selected(self) -> int:
        return int(self.run("return timeline.selected"))

    def named(self, query: str) -> list[int]:
        """Numbers of the slices that a query finds, in order of time."""
        return [each[0] for each in self.run("return timeline.named(arguments[0])", query)]

    def fit(self, first: int, last: int | None = None) -> None:
        """Zoom to a slice, or to all from one to another one."""
        self.run(
            """const [first] = timeline.trace.span(arguments[0]), [, last] = timeline.trace.span(arguments[1]);
            timeline.view.fit(first, last); timeline.redraw();""",
            first,
            first if last is None else last,
        )
        self.painted()

    def box(self, slice_number: int) -> list[float]:
        """Left, top, right, bottom of a slice on the screen."""
        found: list[float] = self.run("return timeline.box(arguments[0])", slice_number)
        return found

    def colour(self, x: float, y: float) -> tuple[int, int, int]:
        """What the canvas shows at a point of the screen."""
        self.painted()
        red, green, blue = self.run(
            """const canvas = document.getElementById("canvas"), at = canvas.getBoundingClientRect();
            const ratio = canvas.width / canvas.clientWidth;
            const [x, y] = [arguments[0] - at.left, arguments[1] - at.top].map((n) => Math.floor(n * ratio));
            const point = Object.assign(document.createElement("canvas"), {width: 1, height: 1});
            const context = point.getContext("2d", {willReadFrequently: true});
            context.drawImage(canvas, x, y, 1, 1, 0, 0, 1, 1);
            return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3)""",
            x,
            y,
        )
        return red, green, blue

    def css_colour(self, name: str) -> tuple[int, int, int]:
        text = self.run(
            "return getComputedStyle(document.documentElement).getPropertyValue(arguments[0]).trim()", f"--{name}"
        )
        return int(text[1:3], 16), int(text[3:5], 16), int(text[5:7], 16)

    # -- hands ---------------------------------------------------------------------------------------------------------

    def mouse(self) -> Any:
        from selenium.webdriver.common.action_chains import ActionChains

        return ActionChains(self.driver, duration=20)

    def move_to(self, x: float, y: float) -> Any:
        """A chain of actions that begins with the pointer at a point of the screen."""
        chain = self.mouse()
        chain.w3c_actions.pointer_action.move_to_location(round(x), round(y))
        return chain

    def click(self, x: float, y: float) -> None:
        self.move_to(x, y).click().perform()
        self.painted()

    def drag(self, x: float, y: float, to_x: float, to_y: float) -> None:
        chain = self.move_to(x, y).click_and_hold()
        chain.w3c_actions.pointer_action.move_to_location(round((x + to_x) / 2), round((y + to_y) / 2))
        chain.w3c_actions.pointer_action.move_to_location(round(to_x), round(to_y))
        chain.release().perform()
        self.painted()

    def wheel(self, x: float, y: float, delta: int, *, held: str = "") -> None:
        from selenium.webdriver.common.actions.wheel_input import ScrollOrigin

        origin = ScrollOrigin.from_viewport(round(x), round(y))
        chain = self.mouse()
        if held:
            chain.key_down(held)
        chain.scroll_from_origin(origin, 0, delta)
        if held:
            chain.key_up(held)
        chain.perform()
        self.painted()

    def press(self, *keys: str) -> None:
        self.mouse().send_keys(*keys).perform()
        self.painted()

    def press_button(self, name: str) -> None:
        self.driver.find_element("id", name).click()
        self.painted()

    def search(self, query: str) -> str:
        """Type into the search box; returns what the page says it found."""
        box = self.driver.find_element("id", "query")
        box.clear()
        box.send_keys(query)
        # The page waits for the end of the typing.
        self.driver.execute_async_script(
            """const [query, done] = arguments;
            const look = () => timeline.search.query === query ? done() : setTimeout(look, 10); look();""",
            query,
        )
        self.painted()
        return self.text("#found")

    def details(self) -> dict[str, str]:
        """The panel of the selected slice."""
        rows = self.run(
            "const rows = [...document.querySelectorAll('#details tr')];"
            "return rows.map((row) => [...row.cells].map((cell) => cell.textContent))"
        )
        return dict(rows)


def start() -> Browser:
    """A browser, or a skip that says what is missing."""
    pytest.importorskip("selenium", reason="selenium is not installed")
    browsers = ("chromium", "chromium-browser", "google-chrome")
    chromium = next((path for name in browsers if (path := shutil.which(name))), None)
    chromedriver = shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        missing = "Chromium" if chromium is None else "chromedriver"
        pytest.skip(f"there is no {missing} here; make browser installs it")
    return Browser(chromium, chromedriver)
