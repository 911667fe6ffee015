"""Two traces of the same job, compared: the first decision that differs, then the differences of their times.

Steps are paired by run, number and rank. Of a pair the decisions are compared in the order in which they were made:
votes, split or not, the cut into microbatches, then slice by slice who ran, to which site, and whose receives ran in
it. The first difference over all pairs (runs as the first trace has them, steps ascending, ranks ascending) is the one
to look at; what follows it in the same job usually follows from it.

Times never count as a difference: no two runs take the same time. Outputs and sampled tokens count where they are
comparable: equal package, torch, processor and threads.

Both files are read once, side by side, and a step is dropped when it has met its partner, so memory does not grow with
the traces as long as both hold the same steps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from ...errors import ScheduleDecodeError, TraceFileError
from ...schedule import Schedule
from ..files import AnyPath, TraceFiles
from ..reader import StepTrace
from .program import program_differences, prompt_differences, some_of, why_not_comparable
from .times import Times, times_of

__all__ = ["Difference", "StepTimes", "TraceDiff", "diff_traces"]

StepKey = tuple[str, int, int]  # (run, step, rank)


@dataclass(frozen=True)
class Difference:
    """The first difference within one step.

    Attributes:
        run, step, rank: the step.
        what: "step" (only one trace has it), "votes", "split", "slices" (of the batch), "decision", "receive",
            "execution" or "error".
        decision: index in the schedule, None where it is not about one.
        a, b: what the two traces have there, in words.
        microbatches: the microbatch on each side, where one ran or was received for; None elsewhere.
        sites: the site on each side, where there is one.
    """

    run: str
    step: int
    rank: int
    what: str
    decision: int | None
    a: str
    b: str
    microbatches: tuple[int | None, int | None] = (None, None)
    sites: tuple[str | None, str | None] = (None, None)


@dataclass(frozen=True)
class StepTimes:
    """Times of one step in both traces, in microseconds, by (what, stage) as `times` has them."""

    run: str
    step: int
    rank: int
    a: Times
    b: Times

    @property
    def delta(self) -> float:
        """By how much the step took longer in the second trace; 0 where one of them did not measure it."""
        step = ("step", "")
        return self.b[step] - self.a[step] if step in self.a and step in self.b else 0.0


@dataclass
class TraceDiff:
    """What `diff_traces` found.

    Attributes:
        a, b: the files.
        first: the first decision that differs; None where all are equal.
        differing: each step whose decisions differ, by (run, step, rank), in order.
        only_a, only_b: steps that one trace has and the other not.
        outputs, tokens: steps with different output checksums and sampled tokens.
        not_comparable: why outputs and tokens say nothing here; "" where they do.
        times: of every step that both have, in order.
        notes: what was left out of folders, as sentences.
        torn: the files whose last line was cut off.
        unended: the files of runs that still go on or died: a rank has no end record.
    """

    a: str
    b: str
    first: Difference | None = None
    differing: list[StepKey] = field(default_factory=list)
    only_a: list[StepKey] = field(default_factory=list)
    only_b: list[StepKey] = field(default_factory=list)
    outputs: list[StepKey] = field(default_factory=list)
    tokens: list[StepKey] = field(default_factory=list)
    not_comparable: str = ""
    times: list[StepTimes] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)
    unended: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether every decision is equal and, where that can be judged, every output and token."""
        return self.first is None and (bool(self.not_comparable) or not (self.outputs or self.tokens))

    def totals(self) -> dict[str, dict[tuple[str, str], tuple[float, float]]]:
        """Run -> (what, stage) -> its microseconds in both traces, over the steps in which both have it."""
        sums: dict[str, dict[tuple[str, str], tuple[float, float]]] = {}
        for step in self.times:
            run = sums.setdefault(step.run, {})
            for key in step.a.keys() & step.b.keys():
                a, b = run.get(key, (0.0, 0.0))
                run[key] = a + step.a[key], b + step.b[key]
        return sums


def diff_traces(a: AnyPath, b: AnyPath, *, run: str | None = None, rank: int | None = None) -> TraceDiff:
    """Compare two traces of ours.

    Args:
        a, b: the files, or folders of them.
        run, rank: compare only this run's and this rank's steps.

    Raises:
        TraceFileError: a file cannot be read; they are of different programs, settings or prompts; no step is in both.
    """
    return _Comparison(*(TraceFiles(each, rank=rank, quick=True) for each in (a, b)), run=run, rank=rank).result()


class _Comparison:
    def __init__(self, a: TraceFiles, b: TraceFiles, *, run: str | None, rank: int | None) -> None:
        self._streams = (a, b)
        self._wanted = (run, rank)
        self._found = TraceDiff(a.path, b.path)
        self._runs: dict[str, int] = {}  # run -> its place in the order
        self._differences: list[Difference] = []

    def result(self) -> TraceDiff:
        a, b = self._streams
        found = self._found
        steps = (self._steps(a), self._steps(b))
        waiting: tuple[dict[StepKey, StepTrace], dict[StepKey, StepTrace]] = ({}, {})
        going = [0, 1]
        checked = False
        while going:
            for side in list(going):
                step = next(steps[side], None)
                if step is None:
                    going.remove(side)
                    continue
                key = (step.run, step.step, step.rank)
                partner = waiting[1 - side].pop(key, None)
                if partner is None:
                    waiting[side][key] = step
                else:
                    self._compare(*((step, partner) if side == 0 else (partner, step)))
            if not checked:
                # Both are at their first step, behind headers and prompts: refuse before reading on.
                self._same_program()
                checked = True
        self._same_program()
        found.only_a, found.only_b = (sorted(each, key=self._place) for each in waiting)
        self._something_in_common()
        found.not_comparable = why_not_comparable(a.headers, b.headers)
        found.torn = [os.fspath(path) for each in self._streams for path in each.torn_paths]
        found.notes = a.notes + b.notes
        found.unended = [each.path for each in self._streams if each.headers.keys() - each.ends.keys()]
        for keys in (found.outputs, found.tokens):
            keys.sort(key=self._place)
        found.times.sort(key=lambda step: self._place((step.run, step.step, step.rank)))
        self._differences += [_only_in(key, True) for key in found.only_a]
        self._differences += [_only_in(key, False) for key in found.only_b]
        self._differences.sort(key=lambda d: self._place((d.run, d.step, d.rank)))
        found.differing = [(d.run, d.step, d.rank) for d in self._differences if d.what != "step"]
        found.first = self._differences[0] if self._differences else None
        return found

    def _steps(self, stream: TraceFiles) -> Iterator[StepTrace]:
        run, rank = self._wanted
        for step in stream:
            if run in (None, step.run) and rank in (None, step.rank):
                self._runs.setdefault(step.run, len(self._runs))
                yield step

    def _place(self, key: StepKey) -> tuple[int, int, int]:
        return self._runs[key[0]], key[1], key[2]

    def _compare(self, a: StepTrace, b: StepTrace) -> None:
        if (difference := _first_difference(a, b)) is not None:
            self._differences.append(difference)
        key = (a.run, a.step, a.rank)
        if a.record is not None and b.record is not None:
            if a.record.output != b.record.output:
                self._found.outputs.append(key)
            if a.record.sampled != b.record.sampled:
                self._found.tokens.append(key)
        self._found.times.append(StepTimes(*key, times_of(a), times_of(b)))

    def _same_program(self) -> None:
        a, b = self._streams
        if reasons := program_differences(a.headers, b.headers) or prompt_differences(a.prompts, b.prompts):
            raise TraceFileError(
                f"{a.path} and {b.path} are not of the same program and settings, so their decisions cannot be "
                f"compared: {some_of(reasons)}"
            )

    def _something_in_common(self) -> None:
        found = self._found
        if found.times:
            return
        asked = "".join(
            f" of {name} {value}"
            for name, value in zip(("run", "rank"), self._wanted, strict=True)
            if value is not None
        )
        held = [f"{path} holds {_held(keys)}" for path, keys in ((found.a, found.only_a), (found.b, found.only_b))]
        raise TraceFileError(f"no step{asked} is in both traces: {', '.join(held)}")


def _held(keys: list[StepKey]) -> str:
    if not keys:
        return "none"
    runs = list(dict.fromkeys(run for run, _, _ in keys))
    ranks = sorted({rank for _, _, rank in keys})
    numbers = sorted({step for _, step, _ in keys})
    return (
        f"{len(numbers)} step{'s' if len(numbers) > 1 else ''} from {numbers[0]} to {numbers[-1]} "
        f"(run {', '.join(runs)}, rank {', '.join(map(str, ranks))})"
    )


# -- what differs in a step --------------------------------------------------------------------------------------------


def _only_in(key: StepKey, in_a: bool) -> Difference:
    there, missing = "it is in the trace", "the trace has no such step"
    return Difference(*key, "step", None, *((there, missing) if in_a else (missing, there)))


def _first_difference(a: StepTrace, b: StepTrace) -> Difference | None:
    key = (a.run, a.step, a.rank)
    first, second = a.record, b.record
    if first is not None and second is not None:
        for what, x, y in (
            ("votes", json.dumps(first.votes), json.dumps(second.votes)),
            ("split", _decided(first.split, first.reason), _decided(second.split, second.reason)),
            ("slices", json.dumps(first.slices), json.dumps(second.slices)),
        ):
            if x != y:
                return Difference(*key, what, None, x, y)
    if (difference := _in_schedule(key, a, b)) is not None:
        return difference
    if first is None or second is None:
        # A run that died within the step left no record: its slices are all there is to compare.
        return None
    for what, x, y in (
        # What the records say beyond the slices: the sites of replays, and schedules whose slices are not in the file.
        (
            "decision",
            f"schedule {first.schedule}, hash {first.hash}",
            f"schedule {second.schedule}, hash {second.hash}",
        ),
        ("execution", first.execution or "not stated", second.execution or "not stated"),
        ("error", first.error or "none", second.error or "none"),
    ):
        if x != y:
            return Difference(*key, what, None, x, y)
    return None


def _decided(split: bool, reason: str) -> str:
    return f"{'split' if split else 'not split'} ({reason})"


def _in_schedule(key: StepKey, a: StepTrace, b: StepTrace) -> Difference | None:
    sides = [_Decisions(step) for step in (a, b)]
    if not all(side.readable for side in sides):
        return None
    with_sites = all(side.with_sites for side in sides)
    for index in range(max(len(side.ran) for side in sides)):
        x, y = (side.at(index) for side in sides)
        if x is None or y is None or x[0] != y[0] or (with_sites and x[1] != y[1]):
            microbatches = (x and x[0], y and y[0])
            sites = (x[1] if x and with_sites else None, y[1] if y and with_sites else None)
            return Difference(*key, "decision", index, _ran(x), _ran(y), microbatches, sites)
        received = [side.received.get(index, []) for side in sides]
        if all(side.with_receives for side in sides) and received[0] != received[1]:
            place = next(n for n in range(max(map(len, received))) if received[0][n : n + 1] != received[1][n : n + 1])
            pair = [each[place] if place < len(each) else None for each in received]
            owners = tuple(each and each[0] for each in pair)
            where = tuple(each and each[1] for each in pair)
            return Difference(*key, "receive", index, _receive(pair[0]), _receive(pair[1]), owners, where)  # type: ignore[arg-type]
    return None


class _Decisions:
    """One side of a step: its decisions from the best source that the trace has for them.

    Attributes:
        ran: (microbatch, site) of each decision; the site is None in a schedule string.
        readable: False for a schedule string that is none; the strings are compared as text then.
        with_sites, with_receives: whether the source tells sites, and who ran receives.
        received: decision -> (owner, site, by) of the receives that ran in it.
    """

    def __init__(self, step: StepTrace) -> None:
        self.ran: list[tuple[int, str | None]] = list(zip(step.decisions, step.sites, strict=True))
        self.with_sites = bool(self.ran) or step.record is None or not step.record.schedule
        self.with_receives = bool(step.slices)
        self.readable = True
        self.received: dict[int, list[tuple[int, str, int | None]]] = {}
        for each in step.receives_as_run:
            if each.decision is not None:
                self.received.setdefault(each.decision, []).append((each.ubatch, each.site, each.by))
        if not self.with_sites and step.record is not None:
            try:
                self.ran = [(index, None) for index in Schedule.decode(step.record.schedule).decisions]
            except ScheduleDecodeError:
                self.readable = False

    def at(self, index: int) -> tuple[int, str | None] | None:
        return self.ran[index] if index < len(self.ran) else None


def _ran(entry: tuple[int, str | None] | None) -> str:
    if entry is None:
        return "the schedule is over"
    index, site = entry
    ending = "" if site is None else f", to {site}" if site else ", returns"
    return f"microbatch {index}{ending}"


def _receive(entry: tuple[int, str, int | None] | None) -> str:
    if entry is None:
        return "no (further) receive ran"
    owner, site, by = entry
    who = "the microbatch itself, when it was resumed," if by is None else f"microbatch {by}"
    return f"{who} ran the receive of microbatch {owner} ({site or 'sent before its return'})"
