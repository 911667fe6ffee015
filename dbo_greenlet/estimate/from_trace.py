"""Unsplit and split steps of a trace of ours, as measurements."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import ConfigurationError, TraceFileError
from ..trace.files import expand, is_trace
from ..trace.reader import TraceReader
from ..trace.schema import HeaderRecord, Record, StepRecord
from .engines import CARRIERS
from .measured import UnsplitStep
from .predict import Setup

__all__ = ["SplitStep", "TracedSteps", "carried", "read_steps"]

_PER_DOUBLING = 2  # groups of numbers of tokens
_CARRIERS = {"thread": "threads"}  # a run's name -> its carrier
_NAMES = {
    (prefill, graph): f"{'prefill' if prefill else 'decode'}, {'graph' if graph else 'eager'}"
    for prefill in (False, True)
    for graph in (False, True)
}


@dataclass(frozen=True)
class SplitStep:
    """Steps that were split alike: the median. Times in microseconds; `rounds` is how many there were."""

    tokens: int
    count: int
    policy: str
    carrier: str
    step: float
    rounds: int


@dataclass(frozen=True)
class TracedSteps:
    """What a trace knows of one phase and execution.

    Attributes:
        unsplit, split: by tokens, ascending.
        model: the folder of the checkpoint that ran; "" where the trace does not say, or it is not here.
    """

    unsplit: list[UnsplitStep]
    split: list[SplitStep]
    model: str = ""


def read_steps(path: str | Path, *, prefill: bool, graph: bool, need_unsplit: bool = True) -> TracedSteps:
    """Medians of the steps of one kind, by tokens (of a rank) in groups of half a doubling.

    A decode step has as many tokens as requests. Steps that failed, and those whose times are not known, do not count.

    Args:
        path: a trace of ours, or a folder of the traces of ranks.
        prefill, graph: which steps count.
        need_unsplit: whether a trace without unsplit ones is refused.

    Raises:
        TraceFileError: no trace, or one without an unsplit step of that kind; names the file.
    """
    model = ""
    unsplit: dict[int, list[StepRecord]] = defaultdict(list)
    split: dict[tuple[int, int, str, str], list[StepRecord]] = defaultdict(list)
    others: set[str] = set()
    for record in _records(path):
        if isinstance(record, HeaderRecord):
            model = _model(record)
        if not isinstance(record, StepRecord) or record.error is not None or record.tokens < 1:
            continue
        kind = _kind(record)
        if record.begin is None or record.end is None or record.end <= record.begin:
            others.add(f"{_NAMES[kind]} without times")
        elif kind != (prefill, graph):
            others.add(_NAMES[kind])
        elif record.split:
            policy = record.policy or "round_robin"
            carrier = _CARRIERS.get(record.run, "greenlets")
            split[_group(record.padded), len(record.slices), policy, carrier].append(record)
        else:
            unsplit[_group(record.padded)].append(record)
    if need_unsplit and not unsplit:
        found = f"; it has steps of these kinds: {'; '.join(sorted(others))}" if others else ""
        raise TraceFileError(
            f"{path}: no unsplit {'prefill' if prefill else 'decode'} step that ran "
            f"{'as a graph' if graph else 'eagerly'}{found}"
        )
    return TracedSteps(
        [UnsplitStep(*_median(records)) for _, records in sorted(unsplit.items())],
        [
            SplitStep(tokens, count, policy, carrier, step, len(records))
            for (_, count, policy, carrier), records in sorted(split.items())
            for tokens, step in [_median(records)]
        ],
        model,
    )


def _records(path: str | Path) -> Iterator[Record]:
    for file in expand([path])[0]:
        if is_trace(file):
            yield from TraceReader(file)


def _kind(record: StepRecord) -> tuple[bool, bool]:
    return record.tokens > max(1, len(record.requests)), record.execution == "replayed"


def _group(tokens: int) -> int:
    return round(_PER_DOUBLING * math.log2(max(1, tokens)))


def _median(records: Iterable[StepRecord]) -> tuple[int, float]:
    """Tokens and microseconds of the step."""
    records = list(records)
    times = [record.end - record.begin for record in records if record.end is not None and record.begin is not None]
    return round(statistics.median(record.padded or record.tokens for record in records)), statistics.median(times)


def _model(header: HeaderRecord) -> str:
    path = str((header.model or {}).get("path", ""))
    return path if path and (Path(path) / "config.json").is_file() else ""


def carried(setup: Setup, step: SplitStep) -> Setup:
    """The setup of such a step.

    Raises:
        ConfigurationError: nobody knows what carries it.
    """
    try:
        carrier = CARRIERS[step.carrier]
    except KeyError:
        raise ConfigurationError(f"no carrier {step.carrier!r}; use one of {', '.join(CARRIERS)}") from None
    return replace(setup.with_tokens(step.tokens), carrier=carrier)
