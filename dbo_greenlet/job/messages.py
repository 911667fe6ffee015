"""What a rank tells the parent: plain data, pickled over a pipe that outlives the rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..trace.schema import StepRecord

__all__ = ["Failed", "Finished", "Lines", "Message", "PassDone", "Ready", "Serving", "StepDone"]


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
    """The model is loaded and the ranks have found each other; the first pass begins."""

    seconds: float


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
class PassDone:
    """The end of a pass: generated text, tokens and close calls (index in the tokens -> gap) by request number."""

    run: str
    seconds: float
    texts: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    close_calls: dict[int, dict[int, float]] = field(default_factory=dict)


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


Message = Serving | Lines | Ready | StepDone | PassDone | Failed | Finished
