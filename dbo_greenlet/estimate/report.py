"""The answer to one question of the command line: estimates for each execution, thresholds, and the error."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError, TraceFileError
from ..trace.files import expand, is_trace
from .from_trace import SplitStep, TracedSteps, read_steps
from .judged import Judged, further_off, judge, judged_lines, lost
from .measured import UnsplitStep, misfits, readings
from .predict import COUNTS, POLICIES, SPLIT, Estimate, Setup, estimate
from .setup import make_setup, read_values
from .text import estimate_json, render_estimate, render_setup, render_threshold, threshold_json
from .threshold import MOST_LOW_LATENCY, Threshold, threshold

__all__ = ["Question", "Report", "answer"]

_DEFAULT_TOKENS = 128
_DEFAULT_MODEL = "deepseek-v3"
_MOSTLY = 0.5
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

    def given(self) -> dict[str, Any]:
        """Without defaults."""
        from_file = {} if self.values_file is None else read_values(self.values_file)
        return {**from_file, **self.values}


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

    @property
    def recommends(self) -> bool:
        """A split that was measured and lost is not recommended, whatever was predicted."""
        return self.estimate.verdict == SPLIT and not lost(self.judged, self.estimate)


@dataclass(frozen=True)
class Report:
    sections: list[Section]
    skipped: list[str] = field(default_factory=list)

    @property
    def recommends(self) -> bool:
        return any(section.recommends for section in self.sections)

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
                off = further_off(section.judged, section.estimate.setup.margin)
                parts.append("\n".join([*judged_lines(section.judged), *off]))
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
                    "recommended": section.recommends,
                    "notes": section.notes,
                }
            )
        return json.dumps({"estimates": sections, "notes": self.skipped}, indent=2)


def answer(question: Question) -> Report:
    """Estimate what was asked.

    Raises:
        ConfigurationError, TraceFileError: something in the question is wrong; one sentence that names it.
    """
    if question.host_ms is not None and not question.unsplit:
        raise ConfigurationError("--host-ms is of a step given by --unsplit TOKENS=MS, and there is none")
    if question.execution not in ("eager", "graph", "both"):
        raise ConfigurationError(f"--execution {question.execution}; use eager, graph or both")
    counts, policies = _numbers(question.microbatches), question.policies or POLICIES
    sections: list[Section] = []
    failures: list[tuple[bool, ConfigurationError | TraceFileError]] = []
    both = question.execution == "both"
    for graph in (False, True):
        if not both and graph != (question.execution == "graph"):
            continue
        try:
            sections.append(_section(question, graph, counts, policies))
        except (ConfigurationError, TraceFileError) as error:
            # Of two executions one may be impossible, or not in the file.
            if not both:
                raise
            failures.append((graph, error))
    if not sections:
        raise _neither(*(error for _, error in failures))
    skipped = [f"Not estimated {'as a graph' if graph else 'eagerly'}: {error}" for graph, error in failures]
    return Report(sections, skipped)


def _neither(
    eager: ConfigurationError | TraceFileError, graph: ConfigurationError | TraceFileError
) -> ConfigurationError | TraceFileError:
    """One error for both executions: either may be the one that tells what is wrong, as where --split names no file."""
    return eager if str(eager) == str(graph) else type(eager)(f"{eager}; and as a graph: {graph}")


def _section(question: Question, graph: bool, counts: list[int], policies: Iterable[str]) -> Section:
    notes: list[str] = []
    values = question.given()
    traced: TracedSteps | None = None
    profile: Any = None
    if question.file is not None:
        files, said = expand([question.file])
        notes += said
        if any(is_trace(file) for file in files):
            traced = read_steps(question.file, prefill=bool(values.get("prefill")), graph=graph)
        else:
            from ..trace.importers import read_profile

            for name, what in (("tokens", "how many tokens a step has"), ("model", "which model it is of")):
                if name not in values:
                    raise ConfigurationError(f"{question.file} is a profile, which says not {what}: --{name}")
            from .from_profile import all2all_of_profile

            profile = read_profile(files[0])
            if "all2all" not in values and (kind := all2all_of_profile(profile)) is not None:
                values["all2all"] = kind
            if len(files) > 1:
                notes.append(f"Of {question.file} only {files[0].name} was read.")
    if traced is not None:
        notes += [*traced.notes(), *_contradicted(traced, values)]
        values = {**traced.machine, **values}
    values = {**_DEFAULTS, **values}
    unnamed = traced is not None and "model" not in values and not traced.model
    if unnamed:
        notes.append(
            "The trace does not say which model ran, or its folder is not here, so this is an estimate of "
            f"{_DEFAULT_MODEL} with the times of another model; --model names the one that ran."
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
        step, said = unsplit_of_profile(profile, setup.work.tokens, table, setup.shape.moe_layers)
        if question.unsplit:
            step = replace(step, step=None)  # one that was timed without a profiler says more
        elif step.step is not None:
            said.append(f"A step of the profile takes {step.step / 1e3:.1f} ms, by when its kernels ran; that is met.")
        steps, notes = [*steps, step], notes + said
    try:
        read = readings(setup, steps) if steps else {"": setup}
    except ConfigurationError as error:
        if unnamed:
            raise ConfigurationError(f"{error}; or --model: of {_DEFAULT_MODEL} they need not be") from error
        raise
    found = {name: estimate(reading, counts, tuple(policies)) for name, reading in read.items()}
    # The least favourable explanation counts.
    found = dict(sorted(found.items(), key=lambda item: item[1].best.gain))
    chosen = next(iter(found.values())).setup
    if steps:
        notes += misfits(chosen, steps)
    notes += _beside(next(iter(found.values())), timed=any(step.step for step in steps))
    split = traced.split if traced else []
    if question.split is not None:
        split, said = _split_steps(question, question.split, setup)
        notes += said
    # Another carrier is another question: --carrier asks it.
    mine = [step for step in split if step.carrier == setup.carrier.name]
    judged, said = judge(chosen, mine, [step for step in steps if step.step])
    return Section(found, threshold(chosen, question.most), judged, notes + said)


def _contradicted(traced: TracedSteps, given: Mapping[str, Any]) -> list[str]:
    """Where an option says another thing than the trace: the option counts, and that is said."""
    told = {name: value for name, value in traced.machine.items() if name in ("ranks", "all2all", "gpu")}
    notes = [
        f"The trace ran with {name} {value}; the estimate is of {given[name]}, corrected by steps of the former."
        for name, value in told.items()
        if name in given and str(given[name]).lower() != str(value).lower()
    ]
    if traced.processor and "gpu" not in traced.machine and "gpu" not in given:
        notes.append(f"The trace ran on {traced.processor}, no GPU of the table; the estimate is of another one.")
    return notes


def _beside(found: Estimate, timed: bool) -> list[str]:
    """A step most of which is nothing that is split is not told much about."""
    outside = found.setup.outside
    if outside <= _MOSTLY * found.unsplit.step:
        return []
    corrected = "the calibration" if not timed else "the calibration, the step's length aside"
    return [
        f"{outside / 1e3:.1f} of the {found.unsplit.step / 1e3:.1f} ms lie beside the model by {corrected}, and are "
        "taken to last as long when it is split; where they do not, the gain is another one, so this estimate is "
        "unreliable. --outside-ms says what they are."
    ]


def _split_steps(question: Question, path: Path, setup: Setup) -> tuple[list[SplitStep], list[str]]:
    """Those of `--split`, a trace of ours or a profile, and what is to be said of them."""
    files, notes = expand([path])
    if any(is_trace(file) for file in files):
        return read_steps(path, prefill=setup.work.prefill, graph=setup.graph, need_unsplit=False).split, notes
    from ..trace.importers import read_profile
    from ..trace.kernels import KernelTable
    from .split_profile import split_of_profile

    profile = read_profile(files[0])
    if "tokens" not in question.given():
        raise ConfigurationError(f"{path} is a profile, which says not how many tokens a step has: --tokens")
    if setup.graph:
        why = f"{path}: of graphs a profile does not tell microbatches apart; give --split a trace of ours"
        if question.execution == "graph":
            raise TraceFileError(why)
        return [], [f"The split steps are not compared as a graph: {why}."]
    table = KernelTable(question.kernels)
    if len(files) > 1:
        notes.append(f"Of {path} only {files[0].name} was read.")
    step, said = split_of_profile(profile, setup.work.tokens, setup.shape.moe_layers, setup.carrier.name, table)
    return [step], notes + said


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
    if not counts or min(counts) < min(COUNTS) or max(counts) > max(COUNTS):
        raise ConfigurationError(f"--microbatches {text}; use numbers from {min(COUNTS)} to {max(COUNTS)}, as 2,3")
    return counts
