"""A report as text and as JSON."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Collection, Iterable
from typing import Any

from .findings import ERROR, Finding, NotChecked, Place, Report
from .rules import RULES

__all__ = ["render_report", "render_rules", "report_json", "rules_json"]

_INDENT = "    "
_SHOWN = 6  # numbers that are listed one by one


def render_report(report: Report, *, width: int = 100) -> str:
    """The report for people: findings, and what was not looked at.

    Args:
        width: characters a line.
    """
    blocks = [f"{report.path} ({report.source}), {report.about}"]
    blocks += [_finding(each, width) for each in report.findings]
    last = [_summary(report)]
    if report.not_checked:
        last += _not_checked(report.not_checked, width)
    if report.ignored:
        last += _wrapped(f"left out: {_ids(rule.id for rule in report.ignored)}", width)
    for note in report.notes:
        last += _wrapped(note, width)
    return "\n\n".join([*blocks, "\n".join(last)])


def report_json(report: Report) -> dict[str, Any]:
    """The report for programs. Times are microseconds; what is null does not apply or is not known."""
    return {
        "path": report.path,
        "source": report.source,
        "findings": [
            {
                "id": each.rule.id,
                "severity": each.rule.severity,
                "what": each.what,
                "why": each.rule.why,
                "remedy": each.remedy,
                "place": dataclasses.asdict(each.place),
                "count": each.count,
                "steps": sorted(each.steps),
                "ranks": sorted(each.ranks),
                "microbatches": sorted(each.microbatches),
                "layers": sorted(each.layers),
            }
            for each in report.findings
        ],
        "not_checked": [
            {"id": each.rule.id, "why": each.why, "steps": each.steps, "steps_checked": each.checked}
            for each in report.not_checked
        ],
        "checked": [rule.id for rule in report.checked],
        "ignored": [rule.id for rule in report.ignored],
        "notes": report.notes,
    }


def render_rules(*, width: int = 100) -> str:
    """Every rule: its id, why, and the bug behind it."""
    out = []
    for rule in RULES:
        out.append(f"{rule.id} ({rule.severity})")
        out += _wrapped(rule.why, width, _INDENT)
        out += _wrapped(f"remedy: {rule.remedy}", width, _INDENT)
        out += _wrapped(f"origin: {rule.origin}", width, _INDENT)
        if rule.on_profiles:
            out += _wrapped(f"traces of ours only: {rule.on_profiles}", width, _INDENT)
    return "\n".join(out)


def rules_json() -> dict[str, Any]:
    """The same as JSON values."""
    keys = ("id", "severity", "why", "remedy", "origin")
    return {
        "rules": [
            {key: getattr(rule, key) for key in keys} | {"not_on_profiles": rule.on_profiles or None} for rule in RULES
        ]
    }


def _finding(finding: Finding, width: int) -> str:
    rule = finding.rule
    lines = _wrapped(f"{rule.severity} {rule.id}: {_place(finding.place)}", width)
    lines += _wrapped(finding.what, width, _INDENT)
    if finding.count > 1:
        where = [
            _numbers(name, held)
            for name, held in (
                ("step", finding.steps),
                ("rank", finding.ranks),
                ("microbatch", finding.microbatches),
                ("layer", finding.layers),
            )
            if held
        ]
        lines += _wrapped(f"{finding.count} times: {', '.join(where)}", width, _INDENT)
    lines += _wrapped(f"why it matters: {rule.why}", width, _INDENT)
    lines += _wrapped(f"remedy: {finding.remedy}", width, _INDENT)
    return "\n".join(lines)


def _place(place: Place) -> str:
    parts = [
        f"{name} {value}"
        for name, value in (
            ("run", place.run),
            ("step", place.step),
            ("rank", place.rank),
            ("microbatch", place.microbatch),
            ("slice", place.slice),
        )
        if value is not None
    ]
    if place.site is not None:
        parts.append(f"at {place.site!r}" if place.site else "in its last slice")
    if place.operation is not None:
        parts.append(f"operation {place.operation}")
    if place.at is not None:
        parts.append(f"{place.at:.3f} us")
    return ", ".join(parts) or "the whole file"


def _summary(report: Report) -> str:
    rules = f"{len(report.checked)} rule{'' if len(report.checked) == 1 else 's'} looked"
    count = len(report.findings)
    if not count and not report.checked and report.not_checked:
        return "Nothing could be checked: no rule has what it needs."
    if not count:
        return f"No findings; {rules}."
    errors = sum(each.rule.severity == ERROR for each in report.findings)
    return f"{count} finding{'' if count == 1 else 's'}, {errors} of severity error; {rules}."


def _not_checked(some: Iterable[NotChecked], width: int) -> list[str]:
    """Rules that lack the same are told together."""
    by_why: dict[tuple[str, int], list[str]] = {}
    for each in some:
        by_why.setdefault((each.why, each.steps), []).append(each.rule.id + (" in part" if each.checked else ""))
    lines = []
    for (why, steps), ids in by_why.items():
        where = f" ({steps} steps)" if steps > 1 else ""
        lines += _wrapped(f"not checked: {_ids(ids)}: {why}{where}", width)
    return lines


def _ids(ids: Iterable[str]) -> str:
    return ", ".join(ids)


def _numbers(name: str, held: Collection[int]) -> str:
    numbers = sorted(held)
    many = name.removesuffix("h") + "hes" if name.endswith("h") else f"{name}s"
    if len(numbers) == 1:
        return f"{name} {numbers[0]}"
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{many} {numbers[0]} to {numbers[-1]}"
    if len(numbers) <= _SHOWN:
        return f"{many} {', '.join(map(str, numbers))}"
    return f"{len(numbers)} {many} from {numbers[0]} to {numbers[-1]}"


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent + "  ", break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
