"""Runs rules over the steps of a trace, and groups what they find. It knows no rule."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from ...errors import TraceFileError
from .checks import Facts, Looked, Rule, StepView
from .findings import ERROR, Coverage, Finding, Hit, Missing, NotChecked, Report
from .rules import RULES

if TYPE_CHECKING:
    from ..files import TraceFiles

__all__ = ["Findings", "lint_trace"]


def lint_trace(
    trace: TraceFiles,
    *,
    rules: Sequence[Rule] = RULES,
    run: str | None = None,
    rank: int | None = None,
    cutoff: int | None = None,
) -> Report:
    """Look at the steps of a trace, one after the other.

    Args:
        trace: what to look at.
        rules: which rules; the others of the table are told as ignored.
        run, rank: look at this run or rank only.
        cutoff: bytes below which a message counts as small; None: what is known of the transport.

    Raises:
        TraceFileError: as iterating over `trace`; and it has no steps (of that run or rank).
    """
    facts = Facts(trace, cutoff)
    found = Findings(rules)
    checks = [(rule, rule.check(facts)) for rule in rules]
    runs: dict[str, int] = {}
    ranks: set[int] = set()
    for step in trace:
        if run not in (None, step.run) or rank not in (None, step.rank):
            continue
        runs[step.run] = runs.get(step.run, 0) + 1
        ranks.add(step.rank)
        view = StepView(step)
        try:
            for rule, check in checks:
                found.looked(rule, check.step(view))
        except TraceFileError as error:
            raise TraceFileError(f"{trace.path}: {error}") from None
    if not runs:
        raise TraceFileError(f"{trace.path} has {_no_steps(run, rank)}")
    for rule, check in checks:
        for each in check.end():
            found.looked(rule, each if isinstance(each, Missing) else [each], steps=0)
    notes = list(trace.notes)
    if trace.torn:
        notes.append("The last line is torn and was left out: the run is writing it right now, or died there.")
    return found.report(trace.path, "dbo_greenlet", _about(runs, ranks), notes)


class Findings:
    """Collects what rules find; what is of one kind becomes one finding.

    Args:
        rules: the rules that look.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = list(rules)
        self._groups: dict[tuple[str, Hashable], Finding] = {}
        self._coverage = {rule.id: Coverage() for rule in rules}

    def looked(self, rule: Rule, said: Looked, *, steps: int = 1) -> None:
        """What `rule` said of a step; with `steps` 0 of something that is no step."""
        coverage = self._coverage[rule.id]
        if said is None:
            return
        if isinstance(said, Missing):
            said = [said]
        else:
            coverage.checked += steps
        for each in said:
            if isinstance(each, Missing):
                coverage.missing[each.why] = coverage.missing.get(each.why, 0) + 1
            else:
                self._add(rule, each)

    def _add(self, rule: Rule, hit: Hit) -> None:
        key = (rule.id, hit.group)
        finding = self._groups.get(key)
        if finding is None:
            finding = self._groups[key] = Finding(rule, hit.what, hit.place, hit.remedy or rule.remedy)
        finding.add(hit.place)

    def report(self, path: str, source: str, about: str, notes: list[str]) -> Report:
        """All of it, in the order of the rules."""
        places = {rule.id: place for place, rule in enumerate(self._rules)}
        chosen = set(places)
        findings = sorted(self._groups.values(), key=lambda each: (each.rule.severity != ERROR, places[each.rule.id]))
        not_checked = [
            NotChecked(rule, why, count, self._coverage[rule.id].checked)
            for rule in self._rules
            for why, count in self._coverage[rule.id].missing.items()
        ]
        found = {each.rule.id for each in findings}
        checked = [rule for rule in self._rules if self._coverage[rule.id].checked or rule.id in found]
        ignored = [rule for rule in RULES if rule.id not in chosen]
        return Report(path, source, about, findings, not_checked, checked, ignored, notes)


def _no_steps(run: str | None, rank: int | None) -> str:
    text = "no steps" + (f" of run {run}" if run is not None else "") + (f" on rank {rank}" if rank is not None else "")
    return text if run is not None or rank is not None else f"{text} (yet)"


def _about(runs: dict[str, int], ranks: set[int]) -> str:
    counts = ", ".join(f"{count} of run {name}" for name, count in runs.items())
    return f"steps: {counts}; rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
