"""Unsplit and split steps of a trace of ours, as measurements."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError, ScheduleDecodeError, TraceFileError
from ..schedule import Schedule
from ..trace.files import expand, is_trace
from ..trace.reader import TraceReader
from ..trace.schema import HeaderRecord, Record, StepRecord
from .engines import CARRIERS
from .gpus import gpu_named
from .measured import UnsplitStep
from .predict import Setup

__all__ = ["SplitStep", "TracedSteps", "carried", "read_steps"]

_PER_DOUBLING = 2  # groups of numbers of tokens
_CARRIERS = {"thread": "threads"}  # a run's name -> its carrier
# What `dbo-greenlet run` calls an all-to-all -> what it is here; NCCL's and Gloo's copies go over a comm stream.
# "auto" is the loopback for one rank and torch for several.
_ALL2ALLS = {"auto": "stream", "torch": "stream", "nccl": "stream", "loopback": "stream", "deepep_ll": "deepep_ll",
             "deepep_ht": "deepep_ht"}  # fmt: skip
# The same for a vLLM server's; its other all-to-alls are no two messages over a wire, as the estimate has them.
_BACKENDS = {"deepep_low_latency": "deepep_ll", "deepep_high_throughput": "deepep_ht"}
# Reasons of a server's steps that were no batch of requests: those of its start, and those of a rank that has none and
# runs along with tokens of its own making.
_NO_BATCH = ("warm-up", "rank-idle")
_ONE_NODE = 8  # ranks
_NAMES = {
    (prefill, graph): f"{'prefill' if prefill else 'decode'}, {'graph' if graph else 'eager'}"
    for prefill in (False, True)
    for graph in (False, True)
}


@dataclass(frozen=True)
class SplitStep:
    """Steps that were split alike: the median. Times in microseconds; `rounds` is how many there were.

    `count` is 0 where the trace does not say into how many microbatches.
    """

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
        machine: values for `setup.make_setup` that the trace states of what it ran on.
        processor: what it ran on, as the trace has it; "" where it does not say.
        unknown: how many steps do not say how many requests they have, so that nobody knows whether they are prefills.
        host_times: whether the times are a server's, which measures on the host and does not wait for the GPU.
    """

    unsplit: list[UnsplitStep]
    split: list[SplitStep]
    model: str = ""
    machine: dict[str, Any] = field(default_factory=dict)
    processor: str = ""
    unknown: int = 0
    host_times: bool = False

    def notes(self) -> list[str]:
        """What has to be said of how it was measured, and of what was not read."""
        notes = [] if not self.unknown else [_unknown(self.unknown) + "; these do not count."]
        if self.host_times:
            notes.append(
                "The steps are a server's, timed on the host around the call of the model: where the GPU was still at "
                "work when it returned, they took longer."
            )
        return notes


def read_steps(path: str | Path, *, prefill: bool, graph: bool, need_unsplit: bool = True) -> TracedSteps:
    """Medians of the steps of one kind, by tokens (of a rank) in groups of half a doubling.

    A decode step has as many tokens as requests; how many these are its requests say, or its slices. Steps that failed,
    that ran for no request, or whose times or requests are not known, do not count.

    Args:
        path: a trace of ours, or a folder of the traces of ranks.
        prefill, graph: which steps count.
        need_unsplit: whether a trace without unsplit ones is refused, or else one without split ones.

    Raises:
        TraceFileError: no trace, or one without such a step of that kind; names the file, and the kinds it has.
    """
    model, processor, unknown, server = "", "", 0, False
    machine: dict[str, Any] = {}
    unsplit: dict[int, list[StepRecord]] = defaultdict(list)
    split: dict[tuple[int, int, str, str], list[StepRecord]] = defaultdict(list)
    others: set[str] = set()
    for record in _records(path):
        if isinstance(record, HeaderRecord):
            model, machine, processor = _model(record), _machine(record), str(record.settings.get("processor") or "")
            server = record.settings.get("engine") == "vllm"
        if not isinstance(record, StepRecord) or record.error is not None:
            continue
        if record.tokens < 1 <= record.padded or record.reason in _NO_BATCH:
            continue  # a rank that ran along with the others, without a request of its own
        if record.execution == "captured":
            continue  # it took as long as the capture did
        kind = _kind(record)
        if kind is None:
            unknown += 1
        elif record.begin is None or record.end is None or record.end <= record.begin:
            others.add(f"{_name(record, kind)} without times")
        else:
            if kind == (prefill, graph):
                _put(record, unsplit, split)
            if kind != (prefill, graph) or record.split == need_unsplit:
                others.add(_name(record, kind))
    if not (unsplit if need_unsplit else split):
        found = f"; it has steps of these kinds: {'; '.join(sorted(others))}" if others else ""
        if unknown:
            found += f"; {_unknown(unknown)}"
        raise TraceFileError(
            f"{path}: no {'unsplit' if need_unsplit else 'split'} {'prefill' if prefill else 'decode'} step that ran "
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
        machine,
        processor,
        unknown,
        server,
    )


def _put(
    record: StepRecord,
    unsplit: dict[int, list[StepRecord]],
    split: dict[tuple[int, int, str, str], list[StepRecord]],
) -> None:
    if not record.split:
        unsplit[_group(record.padded)].append(record)
        return
    carrier = _CARRIERS.get(record.run, "greenlets")
    split[_group(record.padded), _count(record), record.policy or "round_robin", carrier].append(record)


def _name(record: StepRecord, kind: tuple[bool, bool]) -> str:
    return f"{_NAMES[kind]}{', split' if record.split else ''}"


def _unknown(count: int) -> str:
    if count == 1:
        return "1 step does not say how many requests it has"
    return f"{count} steps do not say how many requests they have"


def _records(path: str | Path) -> Iterator[Record]:
    for file in expand([path])[0]:
        if is_trace(file):
            yield from TraceReader(file)


def _kind(record: StepRecord) -> tuple[bool, bool] | None:
    """(prefill, graph); None where nobody knows whether it is a prefill."""
    requests = len(record.requests) or (record.slices[-1][3] if record.slices else 0)
    if not requests and record.tokens != 1:
        return None
    return record.tokens > max(1, requests), record.execution == "replayed"


def _count(record: StepRecord) -> int:
    """Its microbatches; 0 where it does not say: a replayed step of vLLM has no slices, and may have no schedule."""
    if record.slices or not record.schedule:
        return len(record.slices)
    try:
        return Schedule.decode(record.schedule).count
    except ScheduleDecodeError:
        return 0


def _machine(header: HeaderRecord) -> dict[str, Any]:
    """What the header says of ranks, all-to-all, GPU and program."""
    machine: dict[str, Any] = {}
    if header.world > 0:
        machine["ranks"] = header.world
    if (backend := _BACKENDS.get(str(header.settings.get("all2all_backend")))) is not None:
        machine["all2all"] = backend
    kind = _ALL2ALLS.get(str(header.settings.get("all2all")))
    if kind is not None:
        # Only `dbo-greenlet run` says so; its ranks are of one host.
        machine |= {"all2all": kind, "engine": "runner"}
        if header.world <= _ONE_NODE:
            machine["link"] = "nvlink"
    # A CPU, or a GPU that the table does not have: the estimate is of the default, and says so.
    with contextlib.suppress(ConfigurationError):
        machine["gpu"] = gpu_named(str(header.settings.get("processor") or "")).name
    return machine


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
        raise ConfigurationError(f"no carrier {step.carrier!r}; use one of {', '.join(map(repr, CARRIERS))}") from None
    return replace(setup.with_tokens(step.tokens), carrier=carrier)
