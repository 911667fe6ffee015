"""The answer to one question of the command line: estimates for each execution, thresholds, and the error."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError, TraceFileError
from ..policies.names import policy_from_text
from ..trace.files import expand, is_trace
from .from_trace import SplitStep, TracedSteps, carried, read_steps
from .measured import UnsplitStep, readings
from .predict import COUNTS, POLICIES, SPLIT, Estimate, Setup, estimate
from .setup import make_setup, read_values
from .text import estimate_json, render_estimate, render_setup, render_threshold, threshold_json
from .threshold import MOST_LOW_LATENCY, Threshold, threshold

__all__ = ["Question", "Report", "answer"]

_DEFAULT_TOKENS = 128
_DEFAULT_MODEL = "deepseek-v3"


_DEFAULTS: dict[str, Any] = {"all2all": "deepep_ll", "ranks": 16, "link": "rdma", "context": 2048}


@dataclass(frozen=True)
class Question:
    """What was asked.

    `values` are of `make_setup`, as far as they were given; `values_file` has more of them, which give way to these.
    The rest is as on the command line.
    """

    values: Mapping[str, Any]
    values_file: Path | None = None
    file: Path | None = None
    execution: str = "both"
    microbatches: str = "2,3,4"
    policies: tuple[str, ...] = ()
    unsplit: tuple[str, ...] = ()
    host_ms: float | None = None
    split: Path | None = None
    kernels: Path | None = None
    most: int | None = None

    def all_values(self) -> dict[str, Any]:
        from_file = {} if self.values_file is None else read_values(self.values_file)
        return {**_DEFAULTS, **from_file, **self.values}


@dataclass(frozen=True)
class Judged:
    """A split step that was measured, beside what was predicted for it. Times in microseconds."""

    step: SplitStep
    predicted: float
    unsplit: float | None
    predicted_gain: float

    @property
    def gain(self) -> float | None:
        return None if self.unsplit is None else self.unsplit / self.step.step


@dataclass(frozen=True)
class Section:
    """One execution. `readings` are the estimates under each explanation of the measurements; the first counts."""

    readings: dict[str, Estimate]
    threshold: Threshold
    judged: list[Judged] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def estimate(self) -> Estimate:
        return next(iter(self.readings.values()))


@dataclass(frozen=True)
class Report:
    sections: list[Section]
    skipped: list[str] = field(default_factory=list)

    @property
    def recommends(self) -> bool:
        return any(section.estimate.verdict == SPLIT for section in self.sections)

    def text(self) -> str:
        parts = [render_setup(self.sections[0].estimate.setup)]
        for section in self.sections:
            parts.append(render_estimate(section.estimate))
            parts.append(render_threshold(section.threshold))
            others = list(section.readings.items())[1:]
            if others:
                counted = next(iter(section.readings))
                lines = [f"The measured step has two explanations. Above: {counted}."]
                lines += [f"If {name}, the gain is {found.best.gain:.2f}." for name, found in others]
                parts.append(" ".join(lines))
            if section.judged:
                parts.append("\n".join(_judged_lines(section.judged)))
            parts += section.notes
        return "\n\n".join([*parts, *self.skipped])

    def json(self) -> str:
        sections = []
        for section in self.sections:
            others = {name: estimate_json(found) for name, found in list(section.readings.items())[1:]}
            judged = [
                {
                    "tokens": each.step.tokens,
                    "microbatches": each.step.count,
                    "policy": each.step.policy,
                    "carrier": each.step.carrier,
                    "steps": each.step.rounds,
                    "measured": each.step.step,
                    "predicted": each.predicted,
                    "measured_gain": each.gain,
                    "predicted_gain": each.predicted_gain,
                }
                for each in section.judged
            ]
            sections.append(
                {
                    **estimate_json(section.estimate),
                    "threshold": threshold_json(section.threshold),
                    "otherwise": others,
                    "split_steps": judged,
                    "notes": section.notes,
                }
            )
        return json.dumps({"estimates": sections, "notes": self.skipped}, indent=2)


def answer(question: Question) -> Report:
    """Estimate what was asked.

    Raises:
        ConfigurationError, TraceFileError: something in the question is wrong; one sentence that names it.
    """
    if question.execution not in ("eager", "graph", "both"):
        raise ConfigurationError(f"--execution {question.execution}; use eager, graph or both")
    counts, policies = _numbers(question.microbatches), question.policies or POLICIES
    sections: list[Section] = []
    skipped: list[str] = []
    both = question.execution == "both"
    for graph in (False, True):
        if not both and graph != (question.execution == "graph"):
            continue
        try:
            sections.append(_section(question, graph, counts, policies))
        except (ConfigurationError, TraceFileError) as error:
            # Of two executions one may be impossible, or not in the file.
            if not both or (graph and not sections):
                raise
            skipped.append(f"Not estimated {'as a graph' if graph else 'eagerly'}: {error}")
    return Report(sections, skipped)


def _section(question: Question, graph: bool, counts: list[int], policies: Iterable[str]) -> Section:
    notes: list[str] = []
    values = question.all_values()
    traced: TracedSteps | None = None
    profile: Any = None
    if question.file is not None:
        files, said = expand([question.file])
        notes += said
        if any(is_trace(file) for file in files):
            traced = read_steps(question.file, prefill=bool(values.get("prefill")), graph=graph)
        else:
            from ..trace.importers import read_profile

            profile = read_profile(files[0])
            if len(files) > 1:
                notes.append(f"Of {question.file} only {files[0].name} was read.")
            if "tokens" not in values:
                raise ConfigurationError(
                    f"{question.file} is a profile, which says not how many tokens a step has: --tokens"
                )
    values.setdefault("model", (traced.model if traced else "") or _DEFAULT_MODEL)
    values.setdefault("tokens", traced.unsplit[-1].tokens if traced else _DEFAULT_TOKENS)
    setup = make_setup({**values, "graph": graph})
    if setup.communication.kind == "deepep_ll" and setup.work.tokens > MOST_LOW_LATENCY:
        notes.append(
            f"Low latency takes no {setup.work.tokens} tokens of a rank in one message, at most {MOST_LOW_LATENCY}; "
            "unsplit this step does not run."
        )
    steps = [_unsplit(text, question.host_ms) for text in question.unsplit]
    if traced is not None:
        steps += traced.unsplit
    if profile is not None:
        from ..trace.kernels import KernelTable
        from .from_profile import unsplit_of_profile

        table = KernelTable(question.kernels)
        step, said = unsplit_of_profile(profile, setup.work.tokens, table)
        steps, notes = [*steps, step], notes + said
    found = {
        name: estimate(reading, counts, tuple(policies))
        for name, reading in (readings(setup, steps) if steps else {"": setup}).items()
    }
    # The least favourable explanation counts.
    found = dict(sorted(found.items(), key=lambda item: item[1].best.gain))
    chosen = next(iter(found.values())).setup
    split = traced.split if traced else []
    if question.split is not None:
        split = _split_steps(question.split, setup)
    # Another carrier is another question: --carrier asks it.
    mine = [step for step in split if step.carrier == setup.carrier.name]
    judged = [_judge(chosen, step, traced.unsplit if traced else []) for step in mine if _is_named(step.policy)]
    notes += _not_judged([step for step in mine if not _is_named(step.policy)])
    return Section(found, threshold(chosen, question.most), judged, notes)


def _split_steps(path: Path, setup: Setup) -> list[SplitStep]:
    if not path.is_dir() and not is_trace(path):
        raise TraceFileError(f"{path}: no trace of ours; --split takes one, with the same kind of steps split")
    split = read_steps(path, prefill=setup.work.prefill, graph=setup.graph, need_unsplit=False).split
    if not split:
        raise TraceFileError(f"{path}: no split step of the kind that is estimated")
    return split


def _is_named(policy: str) -> bool:
    try:
        policy_from_text(policy)
    except ConfigurationError:
        return False
    return True


def _not_judged(steps: list[SplitStep]) -> list[str]:
    if not steps:
        return []
    count, orders = sum(step.rounds for step in steps), ", ".join(sorted({step.policy for step in steps}))
    return [
        f"{count} split step{'s' if count > 1 else ''} of the trace ran in an order that cannot be run again: {orders}."
    ]


def _judge(setup: Setup, step: SplitStep, unsplit: list[UnsplitStep]) -> Judged:
    found = estimate(carried(setup, step), (step.count,), (step.policy,))
    near = [each.step for each in unsplit if each.step and 0.8 < each.tokens / step.tokens < 1.25]
    return Judged(step, found.best.step, near[0] if near else None, found.best.gain)


def _judged_lines(judged: list[Judged]) -> Iterable[str]:
    yield "Against the split steps that were measured:"
    for each in judged:
        step = each.step
        gain = "" if each.gain is None else f"; gain {each.gain:.2f}, predicted {each.predicted_gain:.2f}"
        yield (
            f"  {step.rounds} of {step.tokens} tokens, {step.count} microbatches, {step.policy}, {step.carrier}: "
            f"{step.step / 1e3:.1f} ms, predicted {each.predicted / 1e3:.1f} ms "
            f"({100 * (each.predicted / step.step - 1):+.0f} %){gain}"
        )


def _unsplit(text: str, host_ms: float | None) -> UnsplitStep:
    tokens, _, ms = text.partition("=")
    try:
        return UnsplitStep(int(tokens), float(ms) * 1e3, None if host_ms is None else host_ms * 1e3)
    except ValueError:
        raise ConfigurationError(f"--unsplit {text}; use TOKENS=MILLISECONDS, as 128=38.5") from None


def _numbers(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1 or max(counts) > max(COUNTS):
        raise ConfigurationError(f"--microbatches {text}; use numbers from 1 to {max(COUNTS)}, as 2,3")
    return counts
