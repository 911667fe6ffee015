"""What `dbo-greenlet show --html` and `--png` write: an export's items as a page, or as a picture."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

from ..errors import ConfigurationError
from ..trace.export.items import Item
from ..trace.export.open_export import open_export
from ..trace.export.write import export_trace
from ..trace.files import TraceFiles
from ..trace.op_text import operation_text
from ..trace.page import StepWords, write_page
from ..trace.schema import HeaderRecord
from ..trace.step_choice import choose_steps
from ..trace.step_text import StepTexts
from .show import are_ours
from .trace_extra import needs_trace_extra

if TYPE_CHECKING:
    from ..trace.export.write import Model
    from .show import Asked

__all__ = ["write_html", "write_png"]

# Characters a line of a timetable: what the page's panel shows on a laptop.
_WIDTH = 110


def write_html(asked: Asked, output: Path, *, as_json: bool) -> None:
    """Write the page, of all steps unless some are asked for, and say what was written."""
    asked = _settled(asked, every=True)

    def write(model: Model, items: Iterable[Item], file: IO[bytes]) -> int:
        told = _Told(asked, model)
        return write_page(items, file, title=_title(asked), steps=told.steps(), facts=told.facts())

    _write(asked, output, write, as_json)


def write_png(asked: Asked, output: Path, *, layers: Collection[int] | None, as_json: bool) -> None:
    """Draw the picture, of the first step that was split unless others are asked for, and say what was drawn."""
    try:
        from ..trace.plot import write_plot
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "matplotlib":
            raise
        raise ConfigurationError("matplotlib is not installed; install dbo-greenlet[plot]") from error
    asked = _settled(asked, every=False)

    def write(model: Model, items: Iterable[Item], file: IO[bytes]) -> int:
        return write_plot(items, file, title=_title(asked), layers=layers)

    _write(asked, output, write, as_json)


def _write(asked: Asked, output: Path, write: Callable[[Model, Iterable[Item], IO[bytes]], int], as_json: bool) -> None:
    count = 0
    with needs_trace_extra():
        model = open_export(asked.files, run=asked.run, rank=asked.rank, steps=asked.steps)

        def counted(items: Iterable[Item], file: IO[bytes]) -> None:
            nonlocal count
            count = write(model, items, file)

        export_trace(model, output, counted)
    ranks = sorted(model.offsets)
    axis = model.axis_text()
    if as_json:
        summary: dict[str, object] = {"files": model.paths, "output": str(output), "slices": count, "ranks": ranks}
        print(json.dumps(summary | {"offsets_us": model.offsets, "axis": axis, "notes": model.notes}, indent=2))
        return
    print(f"{output}: {count} slices of rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}")
    for line in [*axis, *(f"note: {note}" for note in model.notes)]:
        print(line)


def _settled(asked: Asked, *, every: bool) -> Asked:
    """With the steps named that are meant by what was left out; of several runs a picture shows one."""
    if not are_ours(asked.files, asked.rank):
        if asked.last:
            raise ConfigurationError("--last: a profile has no steps to choose from; leave it out")
        return asked
    if every and not asked.last:
        return asked
    stream = TraceFiles(asked.files, rank=asked.rank, quick=True)
    chosen = choose_steps(stream, stream.path, steps=asked.steps, run=asked.run, rank=asked.rank, last=asked.last)
    number = chosen[0].step
    steps = asked.steps if asked.steps is not None else range(number, number + 1)
    return dataclasses.replace(asked, steps=steps, run=chosen[0].run)


def _title(asked: Asked) -> str:
    names = [path.name or str(path) for path in asked.files]
    title = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    if asked.steps is not None:
        first, last = asked.steps[0], asked.steps[-1]
        title += f", step {first}" if first == last else f", steps {first} to {last}"
    if asked.run is not None:
        title += f" of run {asked.run}"
    return title


class _Told:
    """What a page says besides its slices, by reading the trace once more."""

    def __init__(self, asked: Asked, model: Model) -> None:
        self._asked = asked
        self._model = model
        self._headers: dict[int, HeaderRecord] = {}

    def steps(self) -> Iterator[StepWords]:
        asked = self._asked
        if not are_ours(asked.files, asked.rank):
            return
        texts = StepTexts(width=_WIDTH)
        files = TraceFiles(asked.files, rank=asked.rank, quick=True)
        for step in files:
            if (
                asked.run in (None, step.run)
                and asked.rank in (None, step.rank)
                and (asked.steps is None or step.step in asked.steps)
            ):
                heading, body = texts.render(step)
                operations: dict[tuple[int, int], list[str]] = {}
                for record in step.ops:
                    if record.ubatch is not None and record.slice is not None:
                        operations.setdefault((record.ubatch, record.slice), []).append(operation_text(record))
                yield StepWords(step.run, step.step, step.rank, heading, body, operations)
        self._headers = files.headers

    def facts(self) -> Iterator[tuple[str, str]]:
        for path in self._model.paths:
            yield "file", path
        for line in self._model.axis_text():
            yield "axis", line
        for note in self._model.notes:
            yield "note", note
        if self._headers:
            yield from _of_header(self._headers[min(self._headers)])


def _of_header(header: HeaderRecord) -> Iterator[tuple[str, str]]:
    yield "recorded by", f"dbo_greenlet {header.package}"
    for name in ("torch", "python", "platform", "started"):
        if value := getattr(header, name):
            yield name, value
    yield "ranks in all", str(header.world)
    for name in ("model", "settings", "env"):
        for key, value in getattr(header, name).items():
            yield f"{name} {key}" if name != "settings" else key, value if isinstance(value, str) else json.dumps(value)
