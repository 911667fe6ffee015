"""Whether two traces are of one job: the same program, settings and prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from ..schema import HeaderRecord, PromptRecord

__all__ = ["program_differences", "prompt_differences", "some_of", "why_not_comparable"]

# Settings that say how a run was recorded, supervised or on what machine, and nothing about what it decides.
_NO_DECISION = ("gpu_timeline", "memory", "processor", "rank_timeout", "trace")
_SHOWN = 40  # characters of a setting in an error
_REASONS = 3  # of the differences in an error
_MISSING = object()
_NOT_STATED = "not stated"


def program_differences(a: Mapping[int, HeaderRecord], b: Mapping[int, HeaderRecord]) -> list[str]:
    """What says that these are two jobs, one clause each."""
    first, second = a[min(a)], b[min(b)]
    out = []
    if first.world != second.world:
        out.append(f"{first.world} ranks and {second.world}")
    # The same content may lie in two folders; where nobody hashed it, its folder is all there is to go by.
    kind = "sha256" if first.model.get("sha256") and second.model.get("sha256") else "path"
    models = [header.model.get(kind) for header in (first, second)]
    if models[0] != models[1]:
        out.append(f"the {kind} of the model is {_short(models[0])} and {_short(models[1])}")
    for name in sorted((first.settings.keys() | second.settings.keys()) - set(_NO_DECISION)):
        values = [header.settings.get(name, _MISSING) for header in (first, second)]
        if values[0] != values[1]:
            out.append(f"{name} is {_short(values[0])} and {_short(values[1])}")
    return out


def some_of(reasons: Sequence[str]) -> str:
    """As many of the clauses as one can take in; those about settings that one side does not state come last."""
    ordered = sorted(reasons, key=lambda reason: _NOT_STATED in reason)
    more = len(ordered) - _REASONS
    return ", ".join(ordered[:_REASONS]) + (f" and {more} more" if more > 0 else "")


def prompt_differences(a: list[PromptRecord], b: list[PromptRecord]) -> list[str]:
    """What says that the two were asked other things, one clause; none where they were not."""
    sides = []
    for prompts in (a, b):
        sides.append({prompt.request: (prompt.rank, prompt.arrival, prompt.text, prompt.ids) for prompt in prompts})
    if sides[0] == sides[1]:
        return []
    if len(sides[0]) != len(sides[1]):
        return [f"{len(sides[0])} prompts and {len(sides[1])}"]
    differing = sorted(n for n in sides[0].keys() | sides[1].keys() if sides[0].get(n) != sides[1].get(n))
    return [f"{len(differing)} of {len(sides[0])} prompts differ, the first is {differing[0]}"]


def _short(value: object) -> str:
    if value is _MISSING or value is None:
        return _NOT_STATED
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def why_not_comparable(a: Mapping[int, HeaderRecord], b: Mapping[int, HeaderRecord]) -> str:
    """Why output checksums, and tokens sampled from such outputs, say nothing; "" where they must be equal."""
    first, second = a[min(a)], b[min(b)]
    pairs = (
        ("dbo_greenlet", first.package, second.package),
        ("torch", first.torch, second.torch),
        ("the processor", first.settings.get("processor"), second.settings.get("processor")),
        ("the number of threads", first.threads, second.threads),
    )
    return ", ".join(f"{name} is {_short(x)} and {_short(y)}" for name, x, y in pairs if x != y)
