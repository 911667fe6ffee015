"""What a rank tells the parent: plain data, pickled over a pipe that outlives the rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..trace.schema import StepRecord

__all__ = [
    "CapturedGraph",
    "Failed",
    "Finished",
    "GraphsCaptured",
    "Lines",
    "LogitsCompared",
    "Message",
    "PassDone",
    "Ready",
    "Serving",
    "StepDone",
]


@dataclass(frozen=True)
class Serving:
    """Rank 0 serves the store through which the ranks meet; the parent passes the port on to the others."""

    port: int


@dataclass(frozen=True)
class Lines:
    """Trace lines before the first step: the header and the rank's prompts."""

    lines: bytes


@dataclass(frozen=True)
class Ready:
    """The model is loaded and the ranks have found each other; the first pass begins.

    `device` is what the rank computes on ("cuda:0"), `processor` what that is called, `sharing` how many ranks of the
    job it serves. `no_graphs`: why no step can be a graph with this all-to-all, as a clause; None where it can.
    """

    seconds: float
    device: str = "cpu"
    processor: str = ""
    sharing: int = 1
    no_graphs: str | None = None


@dataclass(frozen=True)
class CapturedGraph:
    """One graph: a decode step of `size` tokens in `microbatches` parts (1: unsplit), what its capture took in seconds,
    and by how many bytes the memory of the graphs grew with it."""

    size: int
    microbatches: int
    seconds: float
    pool_bytes: int


@dataclass(frozen=True)
class GraphsCaptured:
    """The graphs of a pass are ready."""

    run: str
    graphs: tuple[CapturedGraph, ...]


@dataclass(frozen=True)
class StepDone:
    """One step. `lines` is everything that the trace says about it, `answered` how many requests it finished, and
    `explanation` the vote's decision as a sentence.

    `handoffs`: nanoseconds of each hand-off that was measured in it.
    """

    record: StepRecord
    lines: bytes
    answered: int
    explanation: str
    handoffs: tuple[int, ...] = ()


@dataclass(frozen=True)
class LogitsCompared:
    """The logits of a pass beside those of an earlier pass `against`, row by row, where both had sampled the same
    tokens of the request before.

    `rows` were compared, `equal` of them bit for bit. `largest` is the largest difference of two logits, at the token
    `token` (index in the answer) of request `request`; -1 where no two differ. `left_out`: rows that were not compared,
    since keeping them would have taken too much memory; `parted`: those behind a token that differed.
    """

    against: str
    rows: int = 0
    equal: int = 0
    left_out: int = 0
    parted: int = 0
    largest: float = 0.0
    request: int = -1
    token: int = -1


@dataclass(frozen=True)
class PassDone:
    """The end of a pass: generated text, tokens and close calls (index in the tokens -> gap) by request number."""

    run: str
    seconds: float
    texts: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    close_calls: dict[int, dict[int, float]] = field(default_factory=dict)
    logits: LogitsCompared | None = None


@dataclass(frozen=True)
class Failed:
    """The rank stops. `blamed` is the rank that failed: itself, or the one it heard of.

    `kind` is the class of the error, `text` its message; `run` and `step` say where, -1 before the first step. `lines`
    are the rank's last trace lines, `traceback` is the traceback as Python prints it.
    """

    blamed: int
    microbatch: int | None
    kind: str
    text: str
    run: str = ""
    step: int = -1
    lines: bytes = b""
    traceback: str = field(default="", repr=False)


@dataclass(frozen=True)
class Finished:
    """All passes are done. `lines` are the rank's last trace lines."""

    lines: bytes


Message = Serving | Lines | Ready | GraphsCaptured | StepDone | PassDone | Failed | Finished
