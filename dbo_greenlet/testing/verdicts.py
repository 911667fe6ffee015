"""What an explored run is judged by. A verdict answers None, or one sentence that says what is wrong.

A verdict is any `Callable[[StepRun, Reference], str | None]`; its `__name__` says in a report which one it was. Those
here judge a run by itself or against the same microbatches one after the other:

    succeeded        the step did not fail; a fault that was injected may fail it
    same_outputs     what the microbatches returned is bit-equal to the reference
    no_hazard        the stream program has no hazard (`hazards.find_hazards`)
    nothing_left     no stream left current, no receive left, no microbatch left referenced (`StepRun.left_behind`)
    laws_kept        laws 4 and 6, read off the recorded program, not taken from the scheduler
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import BrokenGroupError, RankFailedError
from .checksum import checksum
from .errors import InjectedFault
from .hazards import find_hazards

if TYPE_CHECKING:
    from .step_run import StepRun

__all__ = [
    "DEFAULT",
    "Finding",
    "Reference",
    "Verdict",
    "first_finding",
    "is_injected",
    "is_of_the_ranks",
    "laws_kept",
    "no_hazard",
    "nothing_left",
    "same_outputs",
    "succeeded",
]


@dataclass(frozen=True)
class Reference:
    """What the same microbatches gave one after the other, outside a step.

    Attributes: `outputs` of each, `checksum` over them.
    """

    outputs: Sequence[Any] = field(default=(), compare=False)
    checksum: str = ""


Verdict = Callable[["StepRun", Reference], "str | None"]


class Finding(NamedTuple):
    """What a verdict found: its name, and its sentence."""

    verdict: str
    text: str


def first_finding(run: StepRun, reference: Reference, verdicts: Sequence[Verdict]) -> Finding | None:
    """What the first of `verdicts` that finds something says; None where all are content."""
    for verdict in verdicts:
        if (text := verdict(run, reference)) is not None:
            return Finding(getattr(verdict, "__name__", type(verdict).__name__), text)
    return None


def succeeded(run: StepRun, reference: Reference) -> str | None:
    """The step did not fail, or failed by the fault that was injected into it."""
    if run.error is None or (run.faults and is_injected(run.error)):
        return None
    return f"the step failed: {type(run.error).__name__}: {run.error}"


def same_outputs(run: StepRun, reference: Reference) -> str | None:
    """The outputs are bit-equal to those of the microbatches one after the other."""
    if run.error is not None or run.outputs is None or run.checksum == reference.checksum:
        return None
    outputs = run.outputs
    if len(outputs) != len(reference.outputs):
        return f"{len(outputs)} outputs; one after the other the microbatches give {len(reference.outputs)}"
    wrong = [
        i
        for i, (out, wanted) in enumerate(zip(outputs, reference.outputs, strict=True))
        if checksum(out) != checksum(wanted)
    ]
    # None differs by itself where the outputs share what the checksum goes through.
    who = ", ".join(map(str, wrong)) or "unknown"
    first = wrong[0] if wrong else 0
    return (
        f"the output of microbatch {who} is not bit-equal to the one it gives without interleaving: "
        f"{_short(outputs[first])} instead of {_short(reference.outputs[first])}"
    )


def no_hazard(run: StepRun, reference: Reference) -> str | None:
    """The recorded stream program has no hazard. A failed step may have left its program in the middle."""
    if run.error is not None or run.program is None:
        return None
    hazards = find_hazards(run.program)
    if not hazards:
        return None
    more = f" (and {len(hazards) - 1} more)" if len(hazards) > 1 else ""
    return f"{hazards[0]}{more}"


def nothing_left(run: StepRun, reference: Reference) -> str | None:
    """The step left nothing behind."""
    return "the step left something behind: " + "; ".join(run.left_behind) if run.left_behind else None


def laws_kept(run: StepRun, reference: Reference) -> str | None:
    """Program order and receives before use, as the recorded decisions and operations have them.

    Law 6: microbatch i completes its k-th slice before microbatch i + 1 begins its own. Law 4: a transfer is received
    before its owner works or sends in a later slice than the one that sent it.
    """
    return _order_of_slices(run) or (_order_of_receives(run) if run.program is not None else None)


def _order_of_slices(run: StepRun) -> str | None:
    count, decisions, sites = run.schedule.count, run.schedule.decisions, run.schedule.sites
    completed = [0] * count
    done = [False] * count
    for position, (index, site) in enumerate(zip(decisions, sites, strict=True)):
        number = completed[index]
        earlier = index - 1
        while earlier >= 0 and done[earlier]:
            earlier -= 1
        # Those before the nearest one that is not done have completed no fewer slices than it has.
        if earlier >= 0 and completed[earlier] <= number:
            return (
                f"law 6: decision {position} ran slice {number} of microbatch {index} before microbatch {earlier} had "
                "completed its own"
            )
        completed[index] = number + 1
        if not site:
            done[index] = True
    return None


def _order_of_receives(run: StepRun) -> str | None:
    program = run.program
    if program is None:
        return None
    # Owner -> what it has in flight: (number of the transfer, slice that sent it).
    flying: dict[int | None, dict[int, int | None]] = {}
    for operation in program.operations:
        kind = operation.kind
        if kind == "receive":
            transfer = operation.transfer
            if transfer is not None and transfer.owner in flying:
                flying[transfer.owner].pop(transfer.number, None)
        elif kind == "work" or kind == "send":
            owner = operation.microbatch
            if own := flying.get(owner):
                number = operation.slice
                for sent, slice_sent in own.items():
                    if slice_sent != number:
                        return (
                            f"law 4: {operation} comes before the receive of its microbatch's transfer "
                            f"{program.transfers[sent].name!r}, sent in slice {slice_sent}"
                        )
            if kind == "send" and operation.transfer is not None:
                flying.setdefault(owner, {})[operation.transfer.number] = operation.slice
    return None


def is_injected(error: BaseException | None) -> bool:
    """Whether a fault raised `error`, or is in the chain of what led to it."""
    return _is_in_chain(error, (InjectedFault, KeyboardInterrupt))


def is_of_the_ranks(error: BaseException | None) -> bool:
    """Whether another rank's failure led to `error`: the group is broken then, and every further step fails alike."""
    return _is_in_chain(error, (RankFailedError, BrokenGroupError))


def _is_in_chain(error: BaseException | None, kinds: tuple[type[BaseException], ...]) -> bool:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, kinds):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


DEFAULT: tuple[Verdict, ...] = (succeeded, same_outputs, no_hazard, nothing_left)
