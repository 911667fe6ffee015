"""A trace as one HTML page that needs nothing else: no network, no other file, no library.

The page's parts are in `assets/timeline`: the frame, its style, and its scripts, which become one script here. Its data
is a block of JSON (`page_data`). A browser that opens the page is told to fetch nothing and to run this one script and
no other (a content security policy with its hash), so that nothing that stands in a trace can become code, even if the
escaping below had a hole.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import IO, Any

from .._version import __version__
from ..errors import ConfigurationError
from .export.items import Item, Slice
from .page_data import PageColumns

__all__ = ["MAX_SLICES", "SCRIPTS", "StepWords", "page_json", "write_page"]

# In this order: each uses what those before it define.
SCRIPTS = ("format.js", "data.js", "search.js", "view.js", "rows.js", "draw.js", "details.js", "main.js")

# A browser holds about 100 bytes for each, and a page of as many is about 25 MB.
MAX_SLICES = 500_000


@dataclass(frozen=True)
class StepWords:
    """What a page says about a step.

    Attributes:
        run, step, rank: the step.
        heading, body: as text, with its timetable (`StepTexts`).
        operations: (microbatch, slice) -> what it issued, one line each.
    """

    run: str
    step: int
    rank: int
    heading: str
    body: str
    operations: Mapping[tuple[int, int], list[str]] = field(default_factory=dict)


def write_page(
    items: Iterable[Item],
    file: IO[bytes],
    *,
    title: str,
    steps: Iterable[StepWords] = (),
    facts: Iterable[tuple[str, str]] = (),
) -> int:
    """Write the page; returns how many slices it shows.

    Args:
        items: what to show.
        title: for the window and the head of the page.
        steps: what is said about them in words. Asked for when the items are through.
        facts: names and values for the panel "about". Asked for last.

    Raises:
        ConfigurationError: more than `MAX_SLICES` slices.
        whatever iterating over the arguments raises; OSError from the file.
    """
    columns = PageColumns()
    columns.add(_not_too_many(items))
    data = columns.data()
    texts: dict[str, int] = {}

    def text_number(text: str) -> int:
        return texts.setdefault(text, len(texts))

    data["steps"] = [
        {
            "run": step.run,
            "step": step.step,
            "rank": step.rank,
            "heading": step.heading,
            "body": text_number(step.body),
            "operations": [
                [ubatch, number, list(map(text_number, lines))] for (ubatch, number), lines in step.operations.items()
            ],
        }
        for step in steps
    ]
    data["texts"] = list(texts)
    data["title"] = title
    data["facts"] = [list(fact) for fact in [*facts, ("page made by", f"dbo_greenlet {__version__}")]]
    parts = files("dbo_greenlet") / "assets" / "timeline"
    style = (parts / "page.css").read_text(encoding="utf-8")
    script = '"use strict";\n(() => {\n'
    script += "\n".join((parts / name).read_text(encoding="utf-8") for name in SCRIPTS) + "})();\n"
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    frame = (parts / "page.html").read_text(encoding="utf-8")
    # Cut at the marks, and never replaced one after the other: a title may hold the text of a mark.
    values = {"policy": policy, "title": html.escape(title), "style": style, "script": script}
    for number, part in enumerate(frame.split("@@")):
        if number % 2 == 0:
            file.write(part.encode("utf-8"))
        elif part == "data":
            file.write(page_json(data).encode("ascii"))
        else:
            file.write(values[part].encode("utf-8"))
    return columns.slices


def page_json(data: Any) -> str:
    """JSON that may stand in a script element: pure ASCII, and nothing in it ends the element or begins a comment."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


def _not_too_many(items: Iterable[Item]) -> Iterable[Item]:
    count = 0
    for item in items:
        if isinstance(item, Slice):
            count += 1
            if count > MAX_SLICES:
                raise ConfigurationError(
                    f"a page holds up to {MAX_SLICES} slices, and this trace has more; choose some of its steps "
                    "(--step 100-200), a rank or a run, or `dbo-greenlet export` it for a viewer of large traces"
                )
        yield item
