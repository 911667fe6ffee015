"""The chain that set a step's length, and what shortening each stage would give: the report.

A step's path is the longest one through what had to come before what (`path_graph`): take any of its pieces away and
nothing else kept the step from ending earlier by that much, until another chain takes over. The gain of a stage is
therefore found by solving the same graph again with that stage shortened. It is a range where the trace does not say
what set a time (a stretch of GPU time with a receive in it): from the least to the most that the truth may be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..kernels import STAGES
from .graph import IDLE, PathGraph, Piece
from .names import OTHER_COMMUNICATION

__all__ = [
    "COMMUNICATION",
    "PERCENT",
    "Gain",
    "PathReport",
    "StagePath",
    "StepPath",
    "added_up",
    "measure_path",
    "typical",
]

# By how much stages are shortened.
PERCENT = (10.0, 50.0, 100.0)
# Both ways of communication at once: a faster wire, fewer bytes.
COMMUNICATION = "communication"
_COMMUNICATION = ("dispatch", "combine", OTHER_COMMUNICATION)
_ORDER = {stage: place for place, stage in enumerate((*STAGES, COMMUNICATION))}
_NO_LINKS = ("work", "start", "end")
_LAST = {stage: place for place, stage in enumerate(("host", "vote", "launch", IDLE))}


@dataclass(frozen=True)
class Gain:
    """What a stage `percent` shorter would save, in microseconds: `least` to `most`, equal where it is certain."""

    percent: float
    least: float
    most: float


@dataclass(frozen=True)
class StagePath:
    """One stage on the path. Microseconds.

    Attributes:
        stage: its name; "communication" is all of it together, and no part of the sum.
        on_path: its pieces of the path.
        uncertain: the part of these that may have been something else.
        gains: by percent, ascending.
    """

    stage: str
    on_path: float
    uncertain: float
    gains: list[Gain]


@dataclass(frozen=True)
class StepPath:
    """The path of one step, or of several added up (`added_up`).

    Attributes:
        run, step, rank: which; of a profile `run` names the GPU.
        begin, length: microseconds; `begin` on the trace's axis.
        stages: by stage; their `on_path`, but for "communication", adds up to the length.
        links: what connects the pieces of the path, and how often: "stream order", "event", "launch", "hand-over",
            "receive" ...
        pieces: the path; empty where nobody asked for it.
        contradictions: edges that were left out because recorded times contradict them.
    """

    run: str
    step: int
    rank: int
    begin: float
    length: float
    stages: list[StagePath]
    links: dict[str, int]
    pieces: list[Piece] = field(default_factory=list)
    contradictions: int = 0


@dataclass(frozen=True)
class PathReport:
    """What `dbo-greenlet critical-path` prints.

    Attributes:
        path, source: the file, and what wrote it.
        what: which of its steps these are, a clause.
        steps: each step by itself, without pieces.
        total: all of them added up.
        shown: the step whose path is shown, with its pieces.
        lanes: what else ran in that step: of each lane the (begin, end) of what ran there, in microseconds, by begin.
        unreliable: why it must not be trusted, each a sentence.
        notes: what else to know, as sentences.
    """

    path: str
    source: str
    what: str
    steps: list[StepPath]
    total: StepPath
    shown: StepPath
    lanes: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    unreliable: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def measure_path(
    graph: PathGraph,
    end: int,
    *,
    run: str,
    step: int,
    rank: int,
    percent: Sequence[float] = PERCENT,
    pieces: bool = False,
) -> StepPath:
    """The path to point `end`, and what each stage of the graph would give.

    Args:
        graph, end: the graph, and the point at which the step is over.
        run, step, rank: the step.
        percent: by how much to shorten, from 0 to 100.
        pieces: whether to keep them.
    """
    found = graph.path(end)
    on_path: Counter[str] = Counter()
    uncertain: Counter[str] = Counter()
    links: Counter[str] = Counter()
    for piece in found:
        on_path[piece.stage] += piece.length  # type: ignore[assignment]
        if piece.uncertain:
            uncertain[piece.stage] += piece.length  # type: ignore[assignment]
        links.update(kind for kind in (*piece.by, piece.kind) if kind not in _NO_LINKS)
    begin, over = graph.at[0], graph.at[end]
    stages = [stage for stage in graph.stages if stage != IDLE or on_path[IDLE]]
    parts: dict[str, tuple[str, ...]] = {stage: (stage,) for stage in stages}
    if len(both := tuple(stage for stage in _COMMUNICATION if stage in parts)) > 1:
        parts[COMMUNICATION] = both
    scenarios: list[Mapping[str, float]] = [
        dict.fromkeys(names, share / 100) for names in parts.values() for share in percent
    ]
    earliest, latest = graph.shortened(scenarios, end)
    out = []
    for place, (stage, names) in enumerate(parts.items()):
        gains = []
        for number, share in enumerate(percent):
            at = place * len(percent) + number
            # A rounding error is no gain.
            gains.append(Gain(share, _tidy(over - latest[at]), _tidy(over - earliest[at])))
        out.append(
            StagePath(stage, sum(on_path[name] for name in names), sum(uncertain[name] for name in names), gains)
        )
    return StepPath(
        run=run,
        step=step,
        rank=rank,
        begin=begin,
        length=over - begin,
        stages=in_order(out),
        links=dict(links),
        pieces=found if pieces else [],
        contradictions=graph.contradictions,
    )


def _tidy(saved: float) -> float:
    return max(round(float(saved), 6), 0.0)


def typical(steps: Sequence[StepPath]) -> int:
    """Place of the step of median length; of an even number the longer one of the two in the middle."""
    return sorted(range(len(steps)), key=lambda place: (steps[place].length, place))[len(steps) // 2]


def in_order(stages: Iterable[StagePath]) -> list[StagePath]:
    """As a layer runs them, then those of the model that have no name, then what is no work of the model's."""

    def place(row: StagePath) -> tuple[int, int, str]:
        if row.stage in _ORDER:
            return 0, _ORDER[row.stage], ""
        return (2, _LAST[row.stage], "") if row.stage in _LAST else (1, 0, row.stage)

    return sorted(stages, key=place)


def added_up(steps: Sequence[StepPath]) -> StepPath:
    """Several steps as one: lengths, stages and gains added, which presumes that they follow one another."""
    rows: dict[str, list[StagePath]] = {}
    links: Counter[str] = Counter()
    for step in steps:
        links.update(step.links)
        for row in step.stages:
            rows.setdefault(row.stage, []).append(row)
    stages = [
        StagePath(
            stage,
            sum(row.on_path for row in mine),
            sum(row.uncertain for row in mine),
            [
                Gain(gains[0].percent, sum(g.least for g in gains), sum(g.most for g in gains))
                for gains in zip(*(row.gains for row in mine), strict=True)
            ],
        )
        for stage, mine in rows.items()
    ]
    return StepPath(
        run=steps[0].run if steps else "",
        step=steps[0].step if steps else 0,
        rank=steps[0].rank if steps else 0,
        begin=steps[0].begin if steps else 0.0,
        length=sum(step.length for step in steps),
        stages=in_order(stages),
        links=dict(links),
        contradictions=sum(step.contradictions for step in steps),
    )
