"""The progress bar of a job, on standard error; nothing where that is no terminal."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ..job.messages import Message, Ready, StepDone
from ..job.spec import JobSpec, Pass

__all__ = ["JobProgress"]

TITLES = {
    "dbo": "split, greenlets",
    "thread": "split, threads",
    "unsplit": "unsplit",
    "dbo-graph": "split, graphs",
    "unsplit-graph": "unsplit, graphs",
}


class JobProgress:
    """One bar per pass: answered requests, or split steps where a pass ends after so many. A context manager."""

    def __init__(self, spec: JobSpec) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description:<18}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._ranks = spec.settings.ranks
        self._loading = self._add(f"loading {self._ranks} rank(s)", self._ranks, "ready", start=True)
        self._tasks = {each.run: self._add_pass(spec, each) for each in spec.passes}
        self._passes = {each.run: each for each in spec.passes}

    def follow(self, rank: int, message: Message) -> None:
        """Take over what a rank said."""
        if isinstance(message, Ready):
            self._progress.advance(self._loading)
            if message.no_graphs:
                self._leave_graphs_out()
        elif isinstance(message, StepDone):
            run = message.record.run
            task = self._tasks[run]
            if not self._progress.tasks[task].started:
                self._progress.start_task(task)
            if self._passes[run].split_steps is None:
                self._progress.advance(task, message.answered)
            elif rank == 0:
                self._progress.advance(task, message.record.split)

    def _leave_graphs_out(self) -> None:
        for run, each in self._passes.items():
            if each.graphs:
                self._progress.update(self._tasks[run], visible=False)

    def _add_pass(self, spec: JobSpec, each: Pass) -> TaskID:
        by_answers = each.split_steps is None
        total = len(spec.requests) if by_answers else each.split_steps
        title = TITLES.get(each.run, each.run)
        return self._add(title, total or 0, "answers" if by_answers else "steps", start=False)

    def _add(self, title: str, total: int, unit: str, *, start: bool) -> TaskID:
        return self._progress.add_task(title, start=start, total=total, unit=unit)

    def __enter__(self) -> JobProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()
